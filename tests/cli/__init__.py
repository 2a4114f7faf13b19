"""Modules whose tests are not in the file of their name, and where these are:
authoring basics programs: cli/test_cli.py
cache: cache/test_cache.py cache/test_transfer.py"""
