"""Entries of caches: built, counted, copied and changed."""

import os
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from opjit import cache, files, lock
from opjit.backends import targets
from opjit.backends.targets import Target
from opjit.builder import build
from opjit.errors import CacheWarning
from opjit.recipe.document import document_key
from opjit.recipe.recipe import Recipe
from opjit.store import inventory, layers, manifest, usage
from opjit.store.entry import Entry, verify
from opjit.store.store import PARTS, Store
from tests.helpers.ops import SCHEMA, cpu, describe

DAY = 86400.0


def built(folder: Path, cache: Path, target: Target | None = None, text: str = SCHEMA) -> Entry:
    """The entry of the op in a folder: found in the cache, or built into it."""
    wanted = describe(folder, target, text)
    store = Store(cache)
    return found(store, wanted) or build.build(wanted, store)


def found(store: Store, wanted: Recipe, above: bool = False) -> Entry | None:
    """The verified entry of a recipe in a store, or, with `above`, also in the layers."""
    return layers.find(wanted.ways, store, above)


@contextmanager
def cache_warnings() -> Iterator[list[str]]:
    """A list that holds, when the block has ended, the text of every CacheWarning in it; no other warning may come."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield texts
    texts += [str(one.message) for one in seen]
    assert all(one.category is CacheWarning for one in seen), texts


class Caught(NamedTuple):
    """What `caught` saw."""

    entry: Entry
    warnings: list[str]


def caught(folder: Path, cache: Path, target: Target | None = None) -> Caught:
    """Like `built`, with the text of every CacheWarning."""
    with cache_warnings() as texts:
        entry = built(folder, cache, target)
    return Caught(entry, texts)


def keys() -> set[str]:
    """Of the entries in the cache that OPJIT_CACHE names."""
    return {item.key for item in cache.entries()}


def date(folder: Path, used: float, written: float | None = None) -> None:
    """Set when an entry was used last, and when it was written."""
    os.utime(next(folder.glob("*.so")), (used, used if written is None else written))


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Mode, size and modification time of all there is under a folder, but for the counts that a process leaves when it ends."""
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        if path.name == usage.NAME:
            continue
        with suppress(FileNotFoundError):
            status = path.lstat()
            found[str(path)] = (
                status.st_mode,
                0 if stat.S_ISDIR(status.st_mode) else status.st_size,
                status.st_mtime_ns,
            )
    return found


def entries(cache: Path) -> list[Path]:
    return sorted(item.folder for item in inventory.scan(Store(cache)))


def good(cache: Path) -> list[str]:
    """The ops of all entries, each of which must verify."""
    for folder in entries(cache):
        verify(folder, targets.named(folder.parts[-2][:-21], cpu()))
    return [folder.parts[-3].replace(".", "::", 1) for folder in entries(cache)]


def as_verified(entry: Entry) -> Entry:
    """The entry as if its library's file, as it is now, had been verified."""
    with open(entry.library, "rb") as file:
        return replace(entry, verified=files.inode_signature(file.fileno()))


def copy_parts(entry: Entry, cache: Path) -> None:
    """Give a new cache the parts that all builds share, and the versions of compilers, as they are in the cache of an entry."""
    base = entry.folder.parents[2]
    for name in (PARTS, "toolchain"):
        shutil.copytree(base / name, Store(cache).base / name)


def copy_cache(entry: Entry, to: Path) -> Entry:
    """Copy the cache that an entry is in; the entry there."""
    source = entry.folder.parents[3]
    shutil.copytree(source, to)
    folder = to / entry.folder.relative_to(source)
    return as_verified(replace(entry, folder=folder, library=folder / entry.library.name))


def planted(entry: Entry, count: int, **changed: object) -> list[Path]:
    """Folders of more entries beside one: the same library under other keys. Fields of the manifest's document can be changed."""
    described = manifest.parse((entry.folder / manifest.NAME).read_bytes())
    found = []
    for number in range(count):
        inputs = {**described.document["inputs"], f"planted{number}": "0" * 64}
        document = {**described.document, "inputs": inputs, **changed}
        other = described._replace(document=document, key=document_key(document))
        folder = entry.folder.with_name(other.key)
        folder.mkdir(mode=0o700)
        for path in entry.folder.iterdir():
            (folder / path.name).write_bytes(
                other.dump() if path.name == manifest.NAME else path.read_bytes()
            )
            (folder / path.name).chmod(0o644)
        found.append(folder)
    return found


def hold(key: str = "key", waiting: Callable[[str], None] = lambda holder: None) -> list[str]:
    """Take and free the lock of a key; the warnings it gave."""
    with cache_warnings() as texts, lock.held(key, waiting):
        pass
    return texts
