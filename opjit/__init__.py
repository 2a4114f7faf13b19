"""opjit: write a torch operator in plain C or CUDA C; it is built on first use, once, and shared safely.

    >>> import torch, opjit
    >>> allreduce = opjit.get("allreduce")      # builds on the first request, then a dictionary look-up
    >>> torch.ops.opjit.allreduce(torch.ones(3))
    tensor(3.)

Importing builds, probes and writes nothing. It declares the bundled ops to torch: schema, fake kernel and backward.
"""

from typing import TYPE_CHECKING

from opjit import errors
from opjit.api import explain, get
from opjit.backends import register_backend
from opjit.backends.cpu import Cpu
from opjit.backends.cuda import Cuda
from opjit.declare import catalog
from opjit.declare.catalog import add_path, op
from opjit.declare.op import Op, Workload

__all__ = ["Op", "Workload", "add_path", "build_library", "cache", "cpp_extension", "distributed", "errors", "explain", "get", "inline",
           "load", "load_inline", "load_library", "op", "precompile", "register_backend", "testing", "watch"]
__version__ = "0.1.0"

# Imported on first use: each name, and its module.
_LATER = {"cache": "cache", "cpp_extension": "cpp_extension", "distributed": "distributed", "testing": "testing",
          "build_library": "library", "load_library": "library", "inline": "live.inline", "load": "cpp_extension",
          "load_inline": "cpp_extension", "precompile": "ahead.precompile",
          "watch": "live.watch", "load_ipython_extension": "live.notebook"}

if TYPE_CHECKING:
    from opjit import cache, cpp_extension, distributed, testing
    from opjit.ahead.precompile import precompile
    from opjit.cpp_extension import load, load_inline
    from opjit.library import build_library, load_library
    from opjit.live.inline import inline
    from opjit.live.watch import watch
else:
    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module 'opjit' has no attribute {name!r}")
        from importlib import import_module

        module = import_module(f"opjit.{_LATER[name]}")
        return vars(module).get(name, module)  # `cache` and others are modules; getattr of cpp_extension would import torch's

register_backend(Cpu())
register_backend(Cuda())
catalog.declare_bundled()
