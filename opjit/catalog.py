"""Every op that is declared in this process, by qualified name."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
from pathlib import Path

from opjit import resources
from opjit.errors import UnknownOp
from opjit.op import Op

_ops: dict[str, Op] = {}


def add(declared: Op) -> Op:
    """Enter an op; a later declaration of the same name from the same folder takes the place of the earlier."""
    _ops[declared.qualified] = declared
    return declared


def declared(qualified: str) -> Op | None:
    return _ops.get(qualified)


def all_ops() -> list[Op]:
    """In the order of their names."""
    return [_ops[name] for name in sorted(_ops)]


def find(name: str) -> Op:
    """The op of a name; without a namespace, opjit's own.

    Raises:
        UnknownOp: with the names that look most like it.
    """
    qualified = name if "::" in name else f"opjit::{name}"
    found = _ops.get(qualified)
    if found is None:
        short = {known.removeprefix("opjit::"): known for known in _ops}
        closest = difflib.get_close_matches(qualified.removeprefix("opjit::"), list(short), n=3, cutoff=0.5)
        raise UnknownOp(qualified, closest)
    return found


def declare_folder(folder: Path) -> None:
    """Run a folder's op.py, which declares its ops."""
    name = f"opjit_ops.{folder.name}"
    spec = importlib.util.spec_from_file_location(name, folder / "op.py")
    assert spec is not None
    assert spec.loader is not None  # a .py file always has one
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def declare_bundled() -> None:
    """Declare the ops that come with opjit: every folder of kernels_c with an op.py."""
    with os.scandir(resources.folder("kernels_c")) as found:
        folders = sorted(entry.path for entry in found if entry.is_dir())
    for folder in folders:
        if os.path.isfile(os.path.join(folder, "op.py")):
            declare_folder(Path(folder))
