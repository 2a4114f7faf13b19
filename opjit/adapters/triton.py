"""Triton's kernels in opjit's cache: ``TRITON_CACHE_MANAGER=opjit.adapters.triton:Manager``.

    <root>/v2/parts/triton-<Triton's key>/<SHA-256>-<file name>

A file is used only if its content has the digest in its name, and if only this user or root can write it. Any other file is a miss, and
Triton compiles again. Readers also search OPJIT_LAYERS. Nothing is read from TRITON_CACHE_DIR, so it does not matter who writes there.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from triton.runtime.cache import CacheManager, FileCacheManager

from opjit import files
from opjit.errors import EntryError, UntrustedFolder, warn_of_cache
from opjit.store import layers
from opjit.store.store import PARTS, Store, default_store

_MAX_BYTES = 1 << 30  # of a file
_PREFIX = 65  # characters of a digest and its hyphen
_GROUP = "__grp__"  # the start of the name of a file that lists the files of a kernel


class Manager(CacheManager):  # type: ignore[misc]  # Triton has no types
    """The files of one kernel in a store, by default the cache. Triton makes a manager for each key."""

    def __new__(cls, key: str, override: bool = False, dump: bool = False) -> Any:
        """Return Triton's manager for the directories in which a user edits kernels."""
        if override or dump:
            return FileCacheManager(key, override, dump)
        return super().__new__(cls)

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._key = key
        self.store = default_store()

    def get_file(self, filename: str) -> str | None:
        """Return the path of a verified file, or None."""
        return next(self._verified(filename), None)

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        """Write a file, and return its path. If the cache cannot be used, the file lives as long as this process."""
        content = data if isinstance(data, bytes) else str(data).encode()
        try:
            return self._write(self.store, content, filename)
        except (OSError, UntrustedFolder) as error:
            warn_of_cache(
                f"the cache cannot be written ({error}), so Triton compiles {filename} again in the next process; "
                "set OPJIT_CACHE to a directory that only you can write"
            )
            return self._write(_private_store(), content, filename)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of the verified files of a kernel by their names, or None."""
        if os.environ.get("OPJIT_RECORD"):
            from opjit.shared_library import recorded

            recorded.note_call("triton", {"name": filename, "key": self._key}, None)
        for group in self._verified(_GROUP + filename):
            listed = json.loads(Path(group).read_bytes())
            found = {name: os.path.join(os.path.dirname(group), listed[name]) for name in listed}
            if all(_is_whole(Path(path)) for path in found.values()):
                return found
        return None

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Write the list of the files of a kernel, which `put` has returned."""
        listed = {name: os.path.basename(path) for name, path in group.items()}
        return self.put(json.dumps(listed), _GROUP + filename)

    def _verified(self, filename: str) -> Iterator[str]:
        """Yield the paths of the verified files of a name."""
        for store in (*map(Store, layers.named()), self.store):
            folder = store.base / PARTS / f"triton-{self._key}"
            places = [each for each in folder.glob("*") if each.name[_PREFIX:] == filename]
            if not places or not store.trusted(folder.parent, folder):
                continue
            if store == self.store:
                with suppress(OSError):
                    os.utime(folder)  # `opjit cache prune` removes the least recently used ones
            yield from (str(place) for place in places if _is_whole(place))

    def _write(self, store: Store, content: bytes, filename: str) -> str:
        folder = store.base / PARTS / f"triton-{self._key}"
        files.make_private(folder)
        problem = store.problem(folder.parent, folder)
        if problem is not None:
            raise UntrustedFolder(problem)
        place = folder / f"{files.sha256(content)}-{filename}"
        files.write_whole(place, content, synced=False)
        return str(place)


@cache
def _private_store() -> Store:
    return Store(files.temporary_folder())


def _is_whole(place: Path) -> bool:
    """Return whether a file has the digest in its name, and only this user or root can have written it."""
    problem = "its content has changed"
    try:
        if files.sha256(files.read(place, _MAX_BYTES)) == place.name[: _PREFIX - 1]:
            return True
    except (OSError, EntryError) as error:
        problem = str(error)
    warn_of_cache(f"{place} is not used: {problem}; Triton compiles the kernel again")
    return False
