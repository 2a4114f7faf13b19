"""Modules whose tests are not in the file of their name, and where these are:
origin: cache/test_transfer.py
verification: cache/test_cache.py"""
