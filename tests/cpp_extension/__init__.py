"""Modules whose tests are not in the file of their name, and where these are:

arguments: cpp_extension/test_dropin.py
binary: cpp_extension/test_cluster.py
build: cpp_extension/test_dropin.py
headers: cpp_extension/test_light.py
identity: cpp_extension/test_extension_key.py
mistakes: cpp_extension/test_light.py
policy: cpp_extension/test_light.py
recorded: cpp_extension/test_cluster.py
sitecustomize: cpp_extension/test_patched.py
static_init: cpp_extension/test_dropin.py
table: cpp_extension/test_light.py
vocabulary: cpp_extension/test_light.py
delivery: cpp_extension/test_dropin.py
"""
