"""Modules whose tests are not in the file of their name, and where these are:

checks: testing/test_testing.py testing/test_mistakes.py
command: testing/test_isolation.py testing/test_testing.py
compare: testing/test_testing.py testing/test_mistakes.py
cuda: kernels_c/test_ops.py
gradients: testing/test_testing.py testing/test_mistakes.py
integration: testing/test_testing.py testing/test_mistakes.py
memory: testing/test_testing.py testing/test_mistakes.py
numerics: testing/test_testing.py testing/test_mistakes.py
reports: testing/test_isolation.py
samples: testing/test_testing.py testing/test_mistakes.py
sanitize: testing/test_isolation.py kernels_c/test_cuda.py
sanitized: testing/test_isolation.py
"""
