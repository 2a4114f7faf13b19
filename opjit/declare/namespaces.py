"""``torch.ops.<namespace>.<op>`` for ops that nothing declared yet: torch asks here before it says that there is no such op."""

from __future__ import annotations

from typing import Any

import torch

from opjit.declare import registry
from opjit.errors import OpjitError

_get = torch._ops._OpNamespace.__getattr__


def watch() -> None:
    """When torch.ops has no op of a name, search OPJIT_PATH and the installed packages of the namespace."""
    if _get.__module__ == "torch._ops":  # else it is the function below, of an earlier import of opjit
        torch._ops._OpNamespace.__getattr__ = _get_or_search  # type: ignore[method-assign]


def _get_or_search(namespace: Any, name: str) -> Any:
    try:
        return _get(namespace, name)
    except AttributeError:
        if name.startswith("__") or not registry.may_have(namespace.name):
            raise
        qualified = f"{namespace.name}::{name}"
        try:
            registry.search(qualified)
        except OpjitError as error:  # hasattr() must not raise it
            raise AttributeError(f"torch.ops.{namespace.name}.{name} was not found: {error}") from error
        if registry.declared(qualified) is None:
            raise
        return _get(namespace, name)
