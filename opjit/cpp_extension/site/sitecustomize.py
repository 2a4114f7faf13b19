"""Replaces load, load_inline and BuildExtension when a process imports torch.utils.cpp_extension.

Python imports this file when it starts, because `opjit run` puts this directory on PYTHONPATH for the program and its children. Python
imports only one sitecustomize, so this one runs the next one on the path.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, module_from_spec
from types import ModuleType

_FOLDER = os.path.dirname(os.path.abspath(__file__))


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch.utils.cpp_extension":
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        spec = find_spec("opjit")
        if (
            spec is None or spec.origin is None
        ):  # the program runs from a checkout or with another Python: use the opjit next to this file
            sys.path.append(os.path.normpath(os.path.join(_FOLDER, *[os.pardir] * 3)))
        from opjit import cpp_extension

        vars(module).update(
            {
                name: getattr(cpp_extension, name)
                for name in ("load", "load_inline", "BuildExtension")
            }
        )


def _run_next() -> None:
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != os.path.realpath(_FOLDER)]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Finder())
    _run_next()
