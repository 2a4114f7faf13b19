"""Build the op into a directory, and print the path of the library: python build.py [DIRECTORY]"""

import os
import sys

from op import tensor_negate

import opjit

directory = sys.argv[1] if len(sys.argv) > 1 else os.getcwd()
print(opjit.build_library(tensor_negate.qualified, build_directory=directory, device="cpu", name="my_ops"))
