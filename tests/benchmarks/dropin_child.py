"""A fresh process of dropin.py: import one side's load, load the extension, check it, print the seconds as JSON."""

import importlib
import sys
from time import perf_counter

import torch

side, source = sys.argv[1:]

start = perf_counter()
cpp_extension = importlib.import_module("opjit" if side == "opjit" else "torch.utils.cpp_extension")
module = cpp_extension.load("scaled", [source])
seconds = perf_counter() - start

assert torch.equal(module.scaled(torch.ones(3), 2.0), torch.full((3,), 2.0))
print(f'{{"seconds": {seconds}}}')
