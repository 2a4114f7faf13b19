"""Modules whose tests are not in the file of their name, and where these are:
sitecustomize: cpp_extension/test_patched.py"""
