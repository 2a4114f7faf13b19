"""Modules whose tests are not in the file of their name, and where these are:
test: testing/test_isolation.py testing/test_testing.py"""
