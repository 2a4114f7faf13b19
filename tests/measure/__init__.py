"""Modules whose tests are not in the file of their name, and where these are:

machine: measure/test_measure.py
plan: measure/test_measure.py
timing: measure/test_measure.py
units: measure/test_measure.py
"""
