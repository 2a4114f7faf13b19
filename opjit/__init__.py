"""Write PyTorch operators in plain C or CUDA C.

opjit compiles an op on first use, registers it as a torch operator, and keeps the binary in a verified cache that processes, users and
machines can share.

    >>> import torch, opjit
    >>> allreduce = opjit.get("allreduce")      # builds the op if it is not cached
    >>> allreduce(torch.ones(3))
    tensor(3.)
    >>> torch.ops.opjit.allreduce(torch.ones(3))
    tensor(3.)

These are the functions by task:

- declare ops: `op` for an op.py next to its C sources, `inline` for a string, `add_path` for a directory
- build and replace them: `get`, `reload`, `watch`, and `explain` for the reason of a cache miss
- build in advance and ship: `precompile`, `check_precompiled`, `build_library`, `load_library`, `aoti_compile_and_package`
- build C++ extensions: `load`, `load_inline` and `cpp_extension`, with the arguments of torch.utils.cpp_extension
- build a shared library from any C, C++ and CUDA sources: `build`
- use several ranks: `distributed`
- check and judge: `testing`, and `judge` for untrusted kernels
- manage the cache: `cache`

`import opjit` declares the bundled ops to torch. If torch is not imported yet, opjit declares them when it is. The import does not build
anything.
"""

import sys
from typing import TYPE_CHECKING

__all__ = [
    "Op",
    "Sample",
    "Workload",
    "add_path",
    "aoti_compile_and_package",
    "build",
    "build_library",
    "cache",
    "check_precompiled",
    "cpp_extension",
    "distributed",
    "errors",
    "explain",
    "get",
    "include_path",
    "inline",
    "judge",
    "load",
    "load_inline",
    "load_library",
    "op",
    "precompile",
    "register_backend",
    "reload",
    "testing",
    "watch",
]
__version__ = "0.2.0"

_archive = getattr(__spec__ and __spec__.loader, "archive", None)  # a zip, on sys.path
if _archive is not None:
    raise ImportError(
        f"opjit cannot run from the archive {_archive}: compilers read its headers and templates as files; install it "
        "with pip, or unpack the archive"
    )


def _is_command() -> bool:
    """Return whether this process is ``python -m opjit`` or the script ``opjit`` that pip installed.

    Its help and completion must not wait seconds for torch, so a command that needs the ops
    declares them itself. Another program with the same name, in any directory, is not one.
    """
    if sys.argv[:1] == ["-m"]:
        return sys.orig_argv[-len(sys.argv) :][:1] == ["opjit"]
    if not sys.argv or not sys.argv[0].endswith("/opjit"):
        return False
    import os
    import sysconfig

    schemes = (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user"))
    installed = (os.path.join(sysconfig.get_path("scripts", scheme), "opjit") for scheme in schemes)
    return os.path.realpath(sys.argv[0]) in map(os.path.realpath, installed)


# Imported on first use: each name, and its module. `registry` is not public.
_LATER = {
    "errors": "errors",
    "explain": "api",
    "get": "api",
    "register_backend": "backends",
    "add_path": "catalog.registry",
    "op": "catalog.registry",
    "Op": "operators.op",
    "Workload": "declare.sample",
    "Sample": "declare.sample",
    "cache": "cache",
    "cpp_extension": "cpp_extension",
    "distributed": "distributed",
    "judge": "judge",
    "testing": "testing",
    "build": "shared_library",
    "aoti_compile_and_package": "library",
    "build_library": "library",
    "load_library": "library",
    "inline": "catalog.inline",
    "load": "cpp_extension",
    "load_inline": "cpp_extension",
    "include_path": "resources",
    "check_precompiled": "ahead.precompile",
    "precompile": "ahead.precompile",
    "reload": "catalog.reload",
    "watch": "catalog.watch",
    "load_ipython_extension": "author.notebook",
    "registry": "catalog.registry",
}

if TYPE_CHECKING:
    from opjit import cache, cpp_extension, distributed, errors, judge, testing
    from opjit.ahead.precompile import check_precompiled, precompile
    from opjit.api import explain, get
    from opjit.backends import register_backend
    from opjit.catalog.inline import inline
    from opjit.catalog.registry import add_path, op
    from opjit.catalog.reload import reload
    from opjit.catalog.watch import watch
    from opjit.cpp_extension import load, load_inline
    from opjit.declare.sample import Sample, Workload
    from opjit.library import aoti_compile_and_package, build_library, load_library
    from opjit.operators.op import Op
    from opjit.resources import include_path
    from opjit.shared_library import build
else:

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module 'opjit' has no attribute {name!r}")
        from importlib import import_module

        module = import_module(f"opjit.{_LATER[name]}")
        # `cache` and others are modules; getattr of cpp_extension would import torch's.
        found = vars(module).get(name, module)
        return globals().setdefault(name, found)


def _declare() -> None:
    from opjit import api
    from opjit.environment import is_on

    api.declare_all()
    if is_on("OPJIT_EMULATE"):
        from opjit.emulate import serve

        serve.serve()


if not _is_command():
    from opjit import late_torch

    late_torch.call_when_imported(_declare)


def __dir__() -> list[str]:
    return __all__
