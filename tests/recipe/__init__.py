"""Modules whose tests are not in the file of their name, and where these are:
recipe: recipe/test_key.py
build_inputs reads record_reader: shared_library/test_stale.py stale/test_stale.py
nvcc_flags: recipe/test_flags.py
compilers: builder/test_builder.py cpp_extension/test_cuda.py
gpu_archs: backends/test_targets.py
document: store/test_format.py
command_line: cpp_extension/test_extension_key.py shared_library/test_shared_library.py"""
