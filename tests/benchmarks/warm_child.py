"""A fresh process of warm.py: import opjit, get allreduce, check it, print the seconds as JSON."""

import sys
from time import perf_counter

import torch

device = sys.argv[1]
torch.zeros(1, device=device)

start = perf_counter()
import opjit  # noqa: E402

imported = perf_counter()
op = opjit.get("allreduce", device)
ready = perf_counter()

assert op(torch.ones(8, device=device)).item() == 8
print(f'{{"import": {imported - start}, "get": {ready - imported}}}')
