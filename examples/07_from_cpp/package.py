"""Compile a model that calls the op in C, and put both into a package for run.cpp.

    python package.py [all_reduce.pt2]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch

import opjit

runpy.run_path(str(Path(__file__).resolve().parent / "c" / "op.py"))


# begin: package
class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.from_c.all_reduce(x.int()) / 2


program = torch.export.export(Model(), (torch.arange(4.0),))
path = opjit.aoti_compile_and_package(program, package_path=sys.argv[1] if len(sys.argv) > 1 else "all_reduce.pt2")
# end: package
print(path, torch._inductor.aoti_load_package(path)(torch.arange(4.0)))
