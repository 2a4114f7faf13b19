"""Modules whose tests are not in the file of their name, and where these are:
autograd_part: declare/test_cpp_autograd.py
arguments build static_init: cpp_extension/test_dropin.py
binary: cpp_extension/test_cluster.py
core headers mistakes policy table vocabulary: cpp_extension/test_light.py
macros streams: cpp_extension/test_differences.py
identity: cpp_extension/test_extension_key.py"""
