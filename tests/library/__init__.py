"""Modules whose tests are not in the file of their name, and where these are:
build: library/test_library.py library/test_declarations.py
load: library/test_library.py
package: library/test_without_python.py"""
