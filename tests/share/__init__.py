"""Modules whose tests are not in the file of their name, and where these are:
transport trust: share/test_remote.py"""
