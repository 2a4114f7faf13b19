"""Modules whose tests are not in the file of their name, and where these are:

job: distributed/test_distributed.py
ranks: distributed/test_distributed.py
rendezvous: distributed/test_distributed.py
"""
