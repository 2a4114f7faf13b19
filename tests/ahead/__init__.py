"""Modules whose tests are not in the file of their name, and where these are:
plan: ahead/test_precompile.py ahead/test_record.py"""
