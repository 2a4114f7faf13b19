"""Modules whose tests are not in the file of their name, and where these are:
complete: ahead/test_ready.py
plan: ahead/test_precompile.py ahead/test_record.py"""
