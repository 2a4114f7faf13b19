"""Modules whose tests are not in the file of their name, and where these are:
watch: live/test_reload.py"""
