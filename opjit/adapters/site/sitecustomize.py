"""Replaces the builders of other projects when a process imports them.

Python imports this file when it starts, because `opjit run` puts this directory on PYTHONPATH for the program and its children. Python
imports only one sitecustomize, so this one runs the next one on the path. vLLM and SGLang call `install` in each of their processes.
"""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType

MODULES = {"torch.utils.cpp_extension", "flashinfer.jit.core"}
_FOLDER = os.path.dirname(os.path.abspath(__file__))


class Finder:
    """Finds the modules in MODULES, and replaces their builders after their import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in MODULES:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                found = find_spec("opjit")
                if (
                    found is None or found.origin is None
                ):  # the program runs from a checkout or with another Python: use the opjit next to this file
                    sys.path.append(os.path.normpath(os.path.join(_FOLDER, *[os.pardir] * 3)))
                from opjit import adapters

                adapters.replace_builder(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Replace the builders in this process, if VLLM_PLUGINS or SGLANG_PLUGINS names opjit."""
    named = f"{os.environ.get('VLLM_PLUGINS')},{os.environ.get('SGLANG_PLUGINS')}"
    if "opjit" not in named.split(","):
        return
    from opjit import adapters

    sys.meta_path.insert(0, Finder())
    for name in MODULES & sys.modules.keys():
        adapters.replace_builder(sys.modules[name])


def _run_next() -> None:
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != os.path.realpath(_FOLDER)]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, Finder())
    _run_next()
