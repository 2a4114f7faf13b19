"""opjit: write a torch operator in plain C or CUDA C; it is built on first use, once, and shared safely.

    >>> import torch, opjit
    >>> allreduce = opjit.get("allreduce")      # builds on the first request, then a dictionary look-up
    >>> torch.ops.opjit.allreduce(torch.ones(3))
    tensor(3.)

Importing declares the bundled ops to torch (schemas, fake kernels, backwards); it builds, probes and writes nothing.
"""

from opjit import catalog, errors
from opjit.api import get
from opjit.backends import register_backend
from opjit.backends.cpu import Cpu
from opjit.backends.cuda import Cuda
from opjit.op import Op, Workload, op

__all__ = ["Op", "Workload", "errors", "get", "op", "register_backend"]
__version__ = "0.1.0"

register_backend(Cpu())
register_backend(Cuda())
catalog.declare_bundled()
