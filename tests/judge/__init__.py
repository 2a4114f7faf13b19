"""Modules whose tests are not in the file of their name, and where these are:
audit bench burst command connection keeper inputs launch operators pool protocol: judge/test_judge.py judge/test_isolation.py
read_write_lock referee sandbox scheduler screen: judge/test_judge.py judge/test_isolation.py
system_calls task trial verdict worker: judge/test_judge.py judge/test_isolation.py"""
