"""How something leaves a store: in one piece, and so that nobody who is reading or building at the moment notices.

An entry is renamed into a staging folder, and deleted there. A process that has its library mapped goes on using it; one that was
about to open it finds nothing, and asks again. Staging folders of others and what links are made against stay: builds use them.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from opjit import counters, files, inventory, manifest
from opjit.errors import BadSetting, OpjitError, UntrustedFolder
from opjit.inventory import Item
from opjit.recipe import FORMAT
from opjit.store import Store

# Names that opjit gives in each of a store's special folders; the last is a file that a killed process was writing.
_NAMES = {"logs": re.compile(r".+\.log"), "toolchain": re.compile(r"(cc|cxx|nvcc)-[0-9a-f]{16}\.json"),
          "stubs": re.compile(r".+-[0-9a-f]{16}")}
_UNFINISHED = re.compile(r"\.(.+\.)?[0-9a-f]{32}")


class Unremovable(OpjitError):
    """Nothing can be removed from the cache: it cannot be written, or is not this user's alone."""


class Cleared(NamedTuple):
    """What `clear` did: how many entries it removed, their bytes, and how many it could not remove."""

    removed: int
    freed: int
    failed: int


class Trash(NamedTuple):
    """A folder of the store's filesystem for what goes.

    Attributes:
        now: what that filesystem's clock says.
    """

    folder: Path
    now: float

    def take(self, path: Path) -> bool:
        """Remove a file or a folder; False where it cannot be. What is gone already is removed."""
        aside = self.folder / files.unique()
        try:
            os.rename(path, aside)
        except OSError:
            return not os.path.lexists(path)
        files.remove_tree(aside)
        return not os.path.lexists(aside)

    def take_entry(self, item: Item) -> bool:
        """Remove an entry, and the folders over it that are empty then. One of another version of opjit stays."""
        if _of_another_format(item.folder) or not self.take(item.folder):
            return False
        with suppress(OSError):
            os.rmdir(item.folder.parent)
            os.rmdir(item.folder.parent.parent)
        return True


@contextmanager
def open_trash(store: Store) -> Iterator[Trash]:
    """Where to put what goes.

    Raises:
        Unremovable: the store cannot be written, or others can write there.
    """
    try:
        folder = store.stage()
        now = folder.stat().st_mtime
    except UntrustedFolder as error:
        raise Unremovable(f"nothing is removed from the cache {store.root}: {error}") from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not (store.base / "staging").is_dir():
            raise Unremovable(f"nothing can be removed from the cache {store.root}: {error}") from error
        yield Trash(store.base / "staging", time.time())  # a full disk: there is no room for another folder, nor need for one
        return
    try:
        yield Trash(folder, now)
    finally:
        files.remove_tree(folder)


def clear(store: Store, ops: Sequence[str] = ()) -> Cleared:
    """Remove the entries of ops, or all there is, notes and counts included.

    Args:
        ops: as `opjit cache ls` shows them; ``opjit::`` may be left out.

    Raises:
        BadSetting: the cache has no entry of one of them; nothing was removed.
        Unremovable: see `open_trash`.
    """
    items = list(inventory.scan(store))
    if ops:
        wanted = {op if "::" in op else f"opjit::{op}" for op in ops}
        known = {item.op for item in items}
        for op in sorted(wanted - known):
            raise BadSetting(f"the cache has no entry of {op}; `opjit cache ls` shows what it has")
        items = [item for item in items if item.op in wanted]
    if not os.path.isdir(store.base):
        return Cleared(0, 0, 0)
    with open_trash(store) as trash:
        gone = [item for item in items if trash.take_entry(item)]
        if not ops:
            sweep(store, trash, lambda _: True, ("logs", "toolchain"))
            trash.take(store.base / counters.NAME)
    return Cleared(len(gone), sum(item.size for item in gone), len(items) - len(gone))


def sweep(store: Store, trash: Trash, old: Callable[[float], bool], kinds: Sequence[str] = tuple(_NAMES)) -> int:
    """Remove notes on compilers, logs of failed builds and what links are made against; returns how many.

    Args:
        old: whether what was used last at a time goes.
        kinds: names of the folders. What has a name that opjit does not give stays.
    """
    removed = 0
    for kind in kinds:
        with suppress(OSError), os.scandir(store.base / kind) as found:
            for entry in found:
                if (_NAMES[kind].fullmatch(entry.name) or _UNFINISHED.fullmatch(entry.name)) and old(_used(entry)):
                    removed += trash.take(Path(entry.path))
    return removed


def _used(entry: os.DirEntry[str]) -> float:
    """When a file, or one in a folder, was read or written last."""
    try:
        status = entry.stat(follow_symlinks=False)
        if not entry.is_dir(follow_symlinks=False):
            return max(status.st_atime, status.st_mtime)
        with os.scandir(entry.path) as found:
            return max([status.st_mtime, *(_used(file) for file in found)])
    except OSError:
        return 0.0


def _of_another_format(folder: Path) -> bool:
    """Whether a manifest says that another version of opjit, which may be in use beside this one, made an entry."""
    try:
        with open(folder / manifest.NAME, "rb") as file:
            fields = json.loads(file.read(manifest.MAX_BYTES + 1))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and isinstance(fields.get("format"), int) and fields["format"] != FORMAT
