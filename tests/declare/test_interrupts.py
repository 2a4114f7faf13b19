"""Ctrl-C during a declaration: the op is declared, or it is not, and can be; no lock stays held."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import opjit
from opjit import processes
from opjit.declare import autograd, registry
from tests.helpers import PLUS, write_op

OP = """\
import torch
import opjit

@opjit.op("interrupted::plus(Tensor x) -> Tensor", elementwise=True)
def plus(x):
    return torch.empty_like(x)

@plus.backward
def backward(ctx, grad):
    return grad
"""
PLACES: list[tuple[Any, str]] = [
    (torch.library.Library, "define"), (torch.library.Library, "impl"), (torch.library, "register_fake"),
    (torch.library, "register_vmap"), (autograd, "bind"), (torch, "empty_like"), (registry, "add")]


def free_for_others(*locks: processes.Lock) -> bool:
    """Whether another thread can take each lock."""
    def take(lock: processes.Lock) -> bool:
        taken = bool(lock.acquire(blocking=False))
        if taken:
            lock.release()
        return taken

    with ThreadPoolExecutor(1) as other:
        return all(other.map(take, locks))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[name for _, name in PLACES])
def test_an_interrupted_declaration_leaves_nothing_and_can_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any,
                                                                        name: str, after: bool) -> None:
    folder = write_op(tmp_path / "plus", op_py=OP + ("\ntorch.empty_like(torch.ones(1))\n" if name == "empty_like" else ""))
    (folder / "plus.c").write_text(PLUS)
    real: Callable[..., Any] = getattr(owner, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if after:
            real(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            opjit.add_path(folder)
    assert free_for_others(processes.reading, processes.declaring)
    assert registry.declared("interrupted::plus") is None
    assert not hasattr(torch.ops.interrupted, "plus")
    op, = opjit.add_path(folder)
    assert torch.ops.interrupted.plus.default is op.overload
    assert op.overload(torch.empty(2, device="meta")).shape == (2,)
    registry.remove(op)
    sys.modules.pop("opjit_ops_plus", None)
