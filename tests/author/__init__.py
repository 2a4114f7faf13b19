"""Modules whose tests are not in the file of their name, and where these are:
diagnostics: builder/test_compile_warnings.py builder/test_kernel_usage.py
test: testing/test_isolation.py testing/test_testing.py"""
