"""Modules whose tests are not in the file of their name, and where these are:
checks: doctor/test_doctor.py"""
