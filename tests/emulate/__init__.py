"""Modules whose tests are not in the file of their name, and where these are:
build checks: emulate/test_command.py
extension: emulate/test_extensions.py
"""
