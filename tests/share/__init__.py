"""Modules whose tests are not in the file of their name, and where these are:

transport: share/test_remote.py
trust: share/test_remote.py
"""
