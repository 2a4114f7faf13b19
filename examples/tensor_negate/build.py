"""Build the op into a folder, and print where the library is: python build.py [FOLDER]"""

import os
import sys

from op import tensor_negate

import opjit

directory = sys.argv[1] if len(sys.argv) > 1 else os.getcwd()
print(opjit.build_library(tensor_negate.qualified, build_directory=directory, device="cpu", name="my_ops"))
