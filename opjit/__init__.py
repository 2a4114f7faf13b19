"""opjit: write a torch operator in plain C or CUDA C; it is built on first use, once, and shared safely.

    >>> import torch, opjit
    >>> allreduce = opjit.get("allreduce")      # builds on the first request, then a dictionary look-up
    >>> torch.ops.opjit.allreduce(torch.ones(3))
    tensor(3.)

Importing builds, probes and writes nothing. It declares the bundled ops to torch, now or when torch is imported: schema, fake kernel and
backward.
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
    "inline": "live.inline",
    "load": "cpp_extension",
    "load_inline": "cpp_extension",
    "include_path": "resources",
    "check_precompiled": "ahead.precompile",
    "precompile": "ahead.precompile",
    "reload": "live.reload",
    "watch": "live.watch",
    "load_ipython_extension": "author.notebook",
    "registry": "catalog.registry",
}

if TYPE_CHECKING:
    from opjit import cache, cpp_extension, distributed, errors, judge, testing
    from opjit.ahead.precompile import check_precompiled, precompile
    from opjit.api import explain, get
    from opjit.backends import register_backend
    from opjit.catalog.registry import add_path, op
    from opjit.cpp_extension import load, load_inline
    from opjit.declare.sample import Sample, Workload
    from opjit.library import aoti_compile_and_package, build_library, load_library
    from opjit.live.inline import inline
    from opjit.live.reload import reload
    from opjit.live.watch import watch
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
