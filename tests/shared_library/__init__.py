"""Modules whose tests are not in the file of their name, and where these are:

binary: shared_library/test_shared_library.py
compilation: shared_library/test_shared_library.py
identity: shared_library/test_shared_library.py
lookup: cpp_extension/test_cluster.py shared_library/test_shared_library.py
recorded: shared_library/test_shared_library.py
"""
