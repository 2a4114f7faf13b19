"""Modules whose tests are not in the file of their name, and where these are:
verification: cache/test_cache.py"""
