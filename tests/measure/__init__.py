"""Modules whose tests are not in the file of their name, and where these are:
machine plan timing units: measure/test_measure.py"""
