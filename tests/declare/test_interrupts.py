"""Ctrl-C during a declaration: the op is declared, or it is not, and can be."""

from __future__ import annotations

import dis
import gc
import itertools
import linecache
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import opjit
from opjit import processes
from opjit.declare import catalog
from tests.helpers import PLUS, write_op

OP = """\
import torch
import opjit

@opjit.op("interrupted{number}::plus(Tensor x) -> Tensor")
def plus(x):
    return torch.empty_like(x)

@plus.backward
def backward(ctx, grad):
    return grad
"""


class Interrupt:
    """Sends SIGINT at a line of opjit's or torch's own code; counts the lines."""

    def __init__(self, line: int) -> None:
        self.line, self.seen = line, 0

    def __enter__(self) -> Interrupt:
        sys.settrace(self._frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_globals.get("__name__", "")
        return self._at_line if name.startswith(("opjit", "torch.library", "torch._ops", "torch._library")) else None

    def _at_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not _between(frame):
            self.seen += 1
            if self.seen == self.line:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._at_line


def _between(frame: FrameType) -> bool:
    """Whether a `try` begins, or a `with` block is about to call `__exit__`: Python takes signals after calls and at jumps, so none here,
    where neither `finally` nor `with` would hear of one."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
    instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return instruction == "NOP" or (line.startswith("with ") and instruction in ("LOAD_CONST", "SWAP"))


def free_for_others(*locks: processes.Lock) -> bool:
    """Whether another thread can take each lock."""
    def take(lock: processes.Lock) -> bool:
        taken = bool(lock.acquire(blocking=False))
        if taken:
            lock.release()
        return taken

    with ThreadPoolExecutor(1) as other:
        return all(other.map(take, locks))


@pytest.fixture
def without_collection() -> Iterator[None]:
    """A Library that an interrupt left in a cycle is freed when Python likes: its finalizer would take the interrupt, which Python then
    ignores, and make torch.ops forget the op's next declaration."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.usefixtures("without_collection")
@pytest.mark.parametrize("first", range(5))
def test_an_op_whose_declaration_is_interrupted_at_any_line_can_be_declared_again(tmp_path: Path, first: int) -> None:
    """Every fifth line."""
    folder = write_op(tmp_path / "plus")
    (folder / "op.py").write_text(OP.format(number=first))
    (folder / "plus.c").write_text(PLUS)
    interrupted = 0
    for line in itertools.count(first + 1, 5):
        try:
            with Interrupt(line) as trace:
                opjit.add_path(folder)
        except KeyboardInterrupt:
            interrupted += 1
        declared, = opjit.add_path(folder)
        assert getattr(torch.ops, f"interrupted{first}").plus.default is declared.overload
        assert declared.overload(torch.empty(2, device="meta")).shape == (2,)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert free_for_others(processes.reading, processes.declaring)
        catalog.remove(declared)
        sys.modules.pop("opjit_ops_plus", None)
        if trace.seen < line:
            break
    assert interrupted > 20
