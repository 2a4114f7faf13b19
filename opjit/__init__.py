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

__all__ = ["Op", "Workload", "build_library", "errors", "get", "load_library", "op", "register_backend"]
__version__ = "0.1.0"

if TYPE_CHECKING:
    from opjit.library import build_library, load_library
else:
    def __getattr__(name: str) -> object:
        """What few processes call is imported when it is asked for."""
        if name not in ("build_library", "load_library"):
            raise AttributeError(f"module 'opjit' has no attribute {name!r}")
        from opjit import library

        return getattr(library, name)

register_backend(Cpu())
register_backend(Cuda())
catalog.declare_bundled()
