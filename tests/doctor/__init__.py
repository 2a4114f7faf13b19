"""Modules whose tests are not in the file of their name, and where these are:

compilers: doctor/test_doctor.py
folders: doctor/test_doctor.py
machine: doctor/test_doctor.py
report: doctor/test_doctor.py
"""
