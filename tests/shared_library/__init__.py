"""Modules whose tests are not in the file of their name, and where these are:
binary compilation identity recorded: shared_library/test_shared_library.py"""
