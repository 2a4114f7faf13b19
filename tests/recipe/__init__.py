"""Modules whose tests are not in the file of their name, and where these are:

headers: recipe/test_key.py
nvcc_flags: recipe/test_flags.py
recipe: recipe/test_key.py
"""
