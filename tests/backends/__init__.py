"""Modules whose tests are not in the file of their name, and where these are:
cpu: backends/test_targets.py
cuda: backends/test_targets.py library/test_library.py
nvidia: measure/test_measure.py"""
