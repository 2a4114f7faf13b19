"""The README's quick start: the bundled op, from its first request to torch.ops."""

import torch

# begin: quickstart
import opjit

allreduce = opjit.get("allreduce", "cpu")  # built on the first request anywhere; then from the cache; then a dictionary look-up
total = allreduce(torch.ones(3, 4))  # the same as torch.ops.opjit.allreduce(torch.ones(3, 4))
# end: quickstart

print(total)
