"""Modules whose tests are not in the file of their name, and where these are:
build: library/test_library.py library/test_declarations.py
<<<<<<< HEAD
load: library/test_library.py"""
=======
load: library/test_library.py
package: library/test_without_python.py
"""
>>>>>>> 8b84bec (A package of AOTInductor holds its ops and calls them directly: a C++ program needs torch's loader alone, without Python)
