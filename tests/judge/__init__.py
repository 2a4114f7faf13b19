"""Modules whose tests are not in the file of their name, and where these are:
bench burst child command launch referee sandbox scheduler screen task verdict wire zygote: judge/test_judge.py"""
