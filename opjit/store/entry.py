"""One entry: a folder with a library.

Its owner, modes, size, hash, machine and arch are verified before the library is loaded.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from opjit import files
from opjit.backends.targets import Target
from opjit.errors import EntryError
from opjit.store import elf
from opjit.store import manifest as manifests
from opjit.store.manifest import Manifest

MAX_BYTES = 1 << 31  # of a library
# Every op's library defines these.
FUNCTIONS = (
    "opjit_register",
    "opjit_unregister",
    "opjit_prepare",
    "opjit_redirect",
    "opjit_kernel",
)


@dataclass(frozen=True)
class Entry:
    """A binary that was verified when this object was made: in a ``"layer"`` or the ``"store"``,
    from the ``"remote"``, or ``"built"``.

    `verified` is the library's `files.inode_signature`. Comparison ignores both.
    """

    folder: Path
    key: str
    library: Path
    origin: str = field(default="store", compare=False)
    verified: tuple[int, ...] = field(default=(), compare=False)


class NotWanted(Exception):
    """The entry was built from other inputs than the requested ones."""


def verify(
    folder: Path,
    target: Target | None,
    key: str | None = None,
    trusted_as: Path | None = None,
    fits: Callable[[Manifest], bool] | None = None,
) -> tuple[Entry, Manifest]:
    """Check owners, modes, size, hash, machine, arch and needed libraries before a library is loaded. A C++ extension, with `target` None,
    may need any library. `key` None: the folder's name. `trusted_as`: see files.trust_problem. Raises FileNotFoundError if there is no
    entry, EntryError or OSError if it must not be used, and NotWanted, without reading the library, if its document does not fit."""
    manifest, content, verified = read(folder, trusted_as, fits)
    if manifest.key != (key or folder.name):
        raise EntryError("its manifest has another key")
    check_binary(manifest, content, target)
    return Entry(folder, manifest.key, folder / manifest.library, verified=verified), manifest


def read(
    folder: Path,
    trusted_as: Path | None = None,
    fits: Callable[[Manifest], bool] | None = None,
) -> tuple[Manifest, bytes, tuple[int, ...]]:
    """Return an entry's manifest, library and file's identity. Raises FileNotFoundError, or EntryError or OSError about a bad one."""
    problem = files.trust_problem(folder, trusted_as)
    if problem is not None:
        raise EntryError(problem)
    manifest = manifests.read_manifest(folder, trusted_as)
    if fits is not None and not fits(manifest):
        raise NotWanted
    with files.opened(folder / manifest.library, MAX_BYTES, trusted_as) as file:
        verified = files.inode_signature(file.fileno())
        if os.fstat(file.fileno()).st_size != manifest.size:
            raise EntryError("its library does not have the size in its manifest")
        content = file.read(manifest.size)
    if files.sha256(content) != manifest.sha256:
        raise EntryError("its library does not have the SHA-256 in its manifest")
    return manifest, content, verified


def check_binary(manifest: Manifest, content: bytes, target: Target | None) -> None:
    """Raise EntryError if an entry's binary does not fit the target of an op, or, for a C++ extension, this machine."""
    if target is not None:
        check_library(content, target, manifest.link)
    elif elf.machine(content) != os.uname().machine:
        raise EntryError(f"its binary is for {elf.machine(content)}, not {os.uname().machine}")


def check_library(content: bytes, target: Target, link: Iterable[str] = ()) -> None:
    """Raise EntryError if a library does not fit the target or needs another library than an op may need, or than `link` names."""
    allowed = target.backend.flags(target.arch, target.runtime).needed
    archs = frozenset(target.arch.split("+")) if target.backend.uses_nvcc else frozenset()
    elf.check_elf(content, target.host, allowed, archs, elf.names(tuple(link)))
    missing = [function for function in FUNCTIONS if f"{function}\0".encode() not in content]
    if missing:
        raise EntryError(f"the library does not define {', '.join(missing)}")
