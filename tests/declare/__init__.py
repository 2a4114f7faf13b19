"""Modules whose tests are not in the file of their name, and where these are:
arguments: declare/test_paths.py declare/test_torch_integration.py
inline_code: live/test_inline.py
op: declare/test_paths.py live/test_reload.py
oplist: ahead/test_record.py
registration: declare/test_bundled.py
registry: declare/test_paths.py
sample: testing/test_testing.py
variants: test_tune.py"""
