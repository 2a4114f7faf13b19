"""Ops as command-line arguments: by name, or by the path of their folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from opjit.declare import catalog
from opjit.declare.op import Op
from opjit.errors import DeclarationError


def ops(text: str) -> list[Op]:
    """The op of a name, or the ops of a folder, which need not be on any path.

    Raises:
        UnknownOp, DeclarationError: there is no such op, or none in the folder; or it is a folder of op folders, such as /tmp, that
            another user could have put one into.
    """
    path = Path(text)
    is_path = os.sep in text or text in (".", "..")
    if is_path or ("::" not in text and catalog.declared(f"opjit::{text}") is None and (path / "op.py").is_file()):
        if path.is_dir() and not (path / "op.py").is_file():
            _check_owners(path)
        return catalog.add_path(path)
    return [catalog.find(text)]


def ops_on_devices(texts: Iterable[str], device: str | None, say: Callable[[str], object]) -> Iterator[tuple[Op, str]]:
    """Each op with a device to run it on; None is every device of this machine. Reports each op that has no kernel for any of them."""
    for op in (op for text in texts for op in ops(text)):
        devices = [device] if device else op.devices()
        if not devices:
            say(f"{op.qualified} runs on no device of this machine: it has kernels for {' and '.join(op.backends()) or 'nothing'}")
        yield from ((op, each) for each in devices)


def _check_owners(folder: Path) -> None:
    """Refuse a folder of op folders if others can write one: the user may not mean each of them. An op folder that is named is meant."""
    for place in (part for each in catalog.op_folders(folder) for part in (each, each / "op.py")):
        status = place.stat()
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o002:
            whose = "can be written by everybody" if status.st_mode & 0o002 else f"belongs to user {status.st_uid}"
            raise DeclarationError(f"{folder} is a folder of op folders, and {place} {whose}, so none of them is run; name an op's own "
                                   "folder")
