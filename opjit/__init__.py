"""opjit: write a torch operator in plain C or CUDA C; it is built on first use, once, and shared safely.

    >>> import torch, opjit
    >>> allreduce = opjit.get("allreduce")      # builds on the first request, then a dictionary look-up
    >>> torch.ops.opjit.allreduce(torch.ones(3))
    tensor(3.)

Importing declares the bundled ops to torch (schemas, fake kernels, backwards); it builds, probes and writes nothing.
"""

from typing import TYPE_CHECKING

from opjit import catalog, errors
from opjit.api import get
from opjit.backends import register_backend
from opjit.backends.cpu import Cpu
from opjit.backends.cuda import Cuda
from opjit.op import Op, Workload, op

__all__ = ["Op", "Workload", "build_library", "errors", "get", "load", "load_inline", "load_library", "op", "register_backend"]
__version__ = "0.1.0"

if TYPE_CHECKING:
    from opjit.cpp_extension import load, load_inline
    from opjit.library import build_library, load_library
else:
    def __getattr__(name: str) -> object:
        """What few processes call is imported when it is asked for."""
        if name in ("load", "load_inline"):
            from opjit import cpp_extension as room
        elif name in ("build_library", "load_library"):
            from opjit import library as room
        else:
            raise AttributeError(f"module 'opjit' has no attribute {name!r}")
        return getattr(room, name)

register_backend(Cpu())
register_backend(Cuda())
catalog.declare_bundled()
