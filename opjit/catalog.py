"""Every op that is declared in this process, by qualified name."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
from pathlib import Path

from opjit import resources
from opjit.errors import DeclarationError, UnknownOp
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


def of_folder(folder: Path) -> list[Op]:
    """The ops that a folder's op.py declares, whatever path it is on; they are declared if nobody did yet.

    Raises:
        DeclarationError: there is no op.py, or it declares none.
    """
    folder = folder.resolve()
    if not (folder / "op.py").is_file():
        raise DeclarationError(f"expected the folder of an op, and {folder} {'has no op.py' if folder.is_dir() else 'is no folder'}; "
                               "`opjit new mylib::myop` writes one")
    if not any(op.folder == folder for op in all_ops()):
        declare_folder(folder)
    found = [op for op in all_ops() if op.folder == folder]
    if not found:
        raise DeclarationError(f"{folder / 'op.py'} declares no op; a function decorated with @opjit.op(\"mylib::myop(...) -> ...\") does")
    return found


def named(text: str) -> list[Op]:
    """What a user means at the command line: an op's name, or the path of a folder of ops."""
    path = Path(text)
    is_path = os.sep in text or text in (".", "..")
    if is_path or ("::" not in text and f"opjit::{text}" not in _ops and (path / "op.py").is_file()):
        return of_folder(path)
    return [find(text)]
