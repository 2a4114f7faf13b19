"""``torch.ops.<namespace>.<op>`` for ops that nothing declared yet: torch asks here before it says that there is no such op."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from opjit import processes
from opjit.declare import registry
from opjit.errors import OpjitError
from opjit.store import layers

_get = torch._ops._OpNamespace.__getattr__


def watch(load_library: Callable[[str], object]) -> None:
    """When torch.ops has no op of a name, load the libraries of the namespace that torch.ops.load_library opened, which alone
    registers nothing; then search OPJIT_PATH and the installed packages of the namespace.

    Args:
        load_library: `opjit.load_library`.
    """
    if _get.__module__ != "torch._ops":
        return  # the function below, of an earlier import of opjit
    tried: set[str] = set()

    def load(path: str) -> None:
        """Load a library once. torch asks for the op while it is being declared."""
        with processes.reading:
            if path in tried:
                return
            tried.add(path)
            try:
                load_library(path)
            except BaseException:
                tried.remove(path)
                raise

    def get_or_search(namespace: Any, name: str) -> Any:
        try:
            return _get(namespace, name)
        except AttributeError as error:
            missing, qualified = error, f"{namespace.name}::{name}"
        opened = [path for path in sorted(torch.ops.loaded_libraries - tried) if os.path.basename(path).startswith(f"{namespace.name}.")
                  and layers.holds(Path(path))]
        if name.startswith("__") or not (opened or registry.may_have(namespace.name)):
            raise missing
        try:
            for path in opened:
                load(path)
            registry.search(qualified, any_namespace=False)
        except OpjitError as error:  # hasattr() must not raise it
            raise AttributeError(f"torch.ops.{namespace.name}.{name} was not found: {error}") from error
        if registry.declared(qualified) is None:
            raise missing
        return _get(namespace, name)

    torch._ops._OpNamespace.__getattr__ = get_or_search  # type: ignore[method-assign]
