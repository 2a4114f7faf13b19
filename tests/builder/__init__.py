"""Modules whose tests are not in the file of their name, and where these are:
build: builder/test_builder.py builder/test_errors.py store/test_store.py
compile_step host_device_split layouts nvrtc tokens: builder/test_cuda.py
op_library: builder/test_builder.py builder/test_errors.py
cuda_reader cuda_text: builder/test_cuda.py
diagnosis publish: builder/test_errors.py
ninja torch_builder: builder/test_builder.py
"""
