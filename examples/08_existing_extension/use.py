"""The C++ extension of torch's tutorial, built with opjit's cache: `python examples/08_existing_extension/use.py`."""

from pathlib import Path

import torch

from opjit import cpp_extension  # was: from torch.utils import cpp_extension

HERE = Path(__file__).resolve().parent
extension = cpp_extension.load("square_ext", [str(HERE / "square.cpp")], extra_cflags=["-O2"])

x = torch.arange(4.0)
torch.testing.assert_close(extension.square(x), x * x)
print(extension.square(x))
