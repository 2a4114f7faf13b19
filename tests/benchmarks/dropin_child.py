"""A fresh process of dropin.py: import one side's load, load the extension, check it, print the seconds as JSON."""

import importlib
import sys
import timeit
from time import perf_counter

import torch

side, *sources = sys.argv[1:]

start = perf_counter()
cpp_extension = importlib.import_module("opjit" if side == "opjit" else "torch.utils.cpp_extension")
module = cpp_extension.load("scaled", sources)
seconds = perf_counter() - start

if len(sources) == 1 or torch.cuda.is_available():
    x = torch.ones(3, device="cpu" if len(sources) == 1 else "cuda")
    assert torch.equal(module.scaled(x, 2.0), x + x)
assert module.plus(1, 2) == 3
call = min(timeit.repeat(lambda: module.plus(1, 2), number=10_000, repeat=20)) / 10_000
print(f'{{"seconds": {seconds}, "call": {call}}}')
