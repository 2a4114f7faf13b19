"""Modules whose tests are not in the file of their name, and where these are:
declaration: operators/test_torch_integration.py catalog/test_paths.py
inline_code: catalog/test_inline.py
op_state: catalog/test_reload.py
oplist: ahead/test_record.py
sample: testing/test_testing.py"""
