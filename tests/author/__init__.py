"""Modules whose tests are not in the file of their name, and where these are:
cells: author/test_notebook.py"""
