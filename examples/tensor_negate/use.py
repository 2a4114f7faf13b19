"""Use the op from its library, without building it: python use.py LIBRARY"""

import sys

import torch

import opjit

# begin: load
opjit.load_library(sys.argv[1])
x = torch.arange(12_000.0).reshape(3, 4000).t()  # any strides
y = torch.ops.example.tensor_negate(x)
# end: load
assert torch.equal(y, -x)
print("largest difference from torch.neg:", (y + x).abs().max().item())
print("traced:", torch.ops.example.tensor_negate(x.to("meta")).shape)  # by the shape function, without data
