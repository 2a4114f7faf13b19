"""Modules whose tests are not in the file of their name, and where these are:
checks compare gradients integration memory numerics samples: testing/test_testing.py testing/test_calls.py testing/test_mistakes.py
across_ranks: distributed/test_peers.py
sanitized: testing/test_isolation.py
sanitize: testing/test_isolation.py kernels_c/test_cuda.py"""
