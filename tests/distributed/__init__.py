"""Modules whose tests are not in the file of their name, and where these are:
job ranks rendezvous: distributed/test_distributed.py
peer_groups peer_memory: distributed/test_peers.py"""
