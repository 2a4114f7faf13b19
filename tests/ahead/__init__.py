"""Modules whose tests are not in the file of their name, and where these are:
compiler_parts: ahead/test_precompile.py
plan: ahead/test_precompile.py ahead/test_record.py"""
