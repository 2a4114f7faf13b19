"""`import opjit` before torch: the ops are declared when torch is imported, so that a program that needs no torch never waits for it."""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

# The modules that do not need torch, which tests/test_late_torch.py proves. Any other module is
# imported after torch.
_FREE_NAMES = """
    adapters backends builder cache environment errors files loader lock processes progress recipe request
    resources shared_library share store typed_json wanted why
"""
FREE = tuple(_FREE_NAMES.split())
NOT_FREE = (
    "backends.cuda",
    "backends.nvidia",
    "builder.build",
    "builder.op_library",
    "builder.torch_builder",
    "shared_library.recorded",
)


class _TorchFinder:
    """Find torch like the other finders, and let its loader call a function at the end."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        if (
            package == "opjit" and needs_torch(rest)
        ):  # otherwise the function, which imports opjit's modules, would find this module unfinished
            import torch  # noqa: F401
        if name != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def needs_torch(module: str) -> bool:
    """Return whether a module of opjit, by its name below that, imports torch when it is imported."""
    return module in NOT_FREE or module.partition(".")[0] not in FREE


def call_when_imported(then: Callable[[], None]) -> None:
    if "torch" in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _TorchFinder(then))
