"""List, verify, prune and exchange the entries of the cache.

    >>> [item.op for item in opjit.cache.entries()]
    ['opjit::allreduce']
    >>> opjit.cache.prune(size="2GiB", age="30d").removed
    0

`opjit cache` does the same on the command line.
"""

from pathlib import Path
from typing import NamedTuple

from opjit.cache import verification
from opjit.cache.transfer import pack, unpack
from opjit.cache.trees import TransferReport
from opjit.cache.verification import Finding
from opjit.store import inventory, usage
from opjit.store import prune as _pruning
from opjit.store.inventory import EntryInfo
from opjit.store.prune import AGE, Cleared, Pruned
from opjit.store.store import default_root, default_store

__all__ = [
    "Cleared",
    "EntryInfo",
    "Finding",
    "Pruned",
    "Stats",
    "TransferReport",
    "clear",
    "entries",
    "pack",
    "path",
    "prune",
    "stats",
    "unpack",
    "verify",
]


class Stats(NamedTuple):
    """The numbers of requests in this process and in all processes that have ended.

    Attributes:
        since: the time of the first request in seconds since 1970, or 0 without a request.
        hits: requests that found an entry in the cache or in a read-only cache.
        fetches: requests that downloaded an entry from the remote cache.
        builds: requests that built an entry.
    """

    since: int
    hits: int
    fetches: int
    builds: int


def path() -> Path:
    """Return the directory of the cache, which may not exist yet.

    Example:
        >>> opjit.cache.path()
        PosixPath('…')
    """
    return default_root()


def entries() -> list[EntryInfo]:
    """List all entries, sorted by op, architecture and key.

    The list is read from the names of directories. It does not open or verify any file.

    Example:
        >>> [(item.op, item.arch) for item in opjit.cache.entries()]
        [('opjit::allreduce', 'x86-64-v…')]
    """
    return sorted(inventory.scan(default_store()), key=lambda item: (item.op, item.arch, item.key))


def stats() -> Stats:
    """Count the hits, fetches and builds of all processes that used the cache.

    If an op is already loaded in a process, further requests are not counted.

    Example:
        >>> opjit.cache.stats().builds
        1
    """
    return Stats(*usage.total(default_store().base))


def verify() -> list[Finding]:
    """Compare each entry with its manifest, like a request does.

    Nothing is changed. If an entry is bad, the next request for it replaces it.

    Example:
        >>> [(finding.item.op, finding.verdict) for finding in opjit.cache.verify()]
        [('opjit::allreduce', 'good')]
    """
    return list(verification.verify_store(default_store()))


def prune(size: int | str | None = None, age: float | str | None = None) -> Pruned:
    """Remove entries unused for longer than `age`, then the least recently used ones until the rest fits `size`.

    Loaded binaries keep working. Entries younger than an hour stay.

    Args:
        size: bytes, or ``"5GiB"``. 0 means no limit. None means OPJIT_CACHE_SIZE or, if it is not
            set, 10 GiB.
        age: seconds, or ``"30d"``. 0 means no limit. None means 90 days.

    Raises:
        BadSetting: the size or the age is invalid.
        OpjitError: the cache cannot be written, or other users can write it.

    Example:
        >>> opjit.cache.prune(size="2GiB", age="30d").freed
        0
    """
    bound = _pruning.size_wanted() if size is None else _pruning.parse_size(size)
    oldest = AGE if age is None else _pruning.parse_age(age)
    return _pruning.prune(default_store(), bound, oldest)


def clear(*ops: str) -> Cleared:
    """Remove the entries of ops, or everything. Loaded binaries keep working.

    Raises:
        BadSetting: the cache does not contain an entry of one of the ops. In this case, nothing is removed.
        OpjitError: the cache cannot be written, or other users can write it.

    Example:
        >>> opjit.cache.clear("allreduce").removed
        1
    """
    return _pruning.clear(default_store(), ops)
