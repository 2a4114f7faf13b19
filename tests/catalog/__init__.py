"""Modules whose tests are not in the file of their name, and where these are:
arguments: catalog/test_paths.py operators/test_torch_integration.py
registry: catalog/test_paths.py
watch: catalog/test_reload.py"""
