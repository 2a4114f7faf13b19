"""opjit: write a torch operator in plain C or CUDA C; it is built on first use, once, and shared safely.

    >>> import torch, opjit
    >>> allreduce = opjit.get("allreduce")      # builds on the first request, then a dictionary look-up
    >>> torch.ops.opjit.allreduce(torch.ones(3))
    tensor(3.)

Importing builds, probes and writes nothing. An op is declared to torch (schema, fake kernel, backward) when it is first named, as
``torch.ops.opjit.<name>`` or to a function of this module. (C++ asks nobody: what loads a saved program there needs its ops named before.)
"""

from typing import TYPE_CHECKING

from opjit import catalog, errors
from opjit.api import get
from opjit.backends import register_backend
from opjit.backends.cpu import Cpu
from opjit.backends.cuda import Cuda
from opjit.catalog import add_path
from opjit.op import Op, Workload, op

__all__ = ["Op", "Workload", "add_path", "build_library", "cache", "distributed", "errors", "explain", "get", "inline", "load",
           "load_inline", "load_library", "op", "precompile", "register_backend", "testing", "watch"]
__version__ = "0.1.0"

# What few processes call is imported when it is asked for: each name, and the module that has it.
_LATER = {"cache": "cache", "distributed": "distributed", "testing": "testing", "build_library": "library", "load_library": "library",
          "inline": "inlined", "load": "cpp_extension", "load_inline": "cpp_extension", "explain": "why", "precompile": "ahead",
          "watch": "watcher", "load_ipython_extension": "notebook"}

if TYPE_CHECKING:
    from opjit import cache, distributed, testing
    from opjit.ahead import precompile
    from opjit.cpp_extension import load, load_inline
    from opjit.inlined import inline
    from opjit.library import build_library, load_library
    from opjit.watcher import watch
    from opjit.why import explain
else:
    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module 'opjit' has no attribute {name!r}")
        from importlib import import_module

        module = import_module(f"opjit.{_LATER[name]}")
        return getattr(module, name, module)  # `cache` and others are modules

register_backend(Cpu())
register_backend(Cuda())
catalog.offer_bundled()
