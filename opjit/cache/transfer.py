"""Push entries to a remote, pull them from a remote, or pack the objects that a push writes into a tree.

Builds never upload anything.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

from opjit import files
from opjit.builder import parts
from opjit.cache import trees
from opjit.cache.trees import TransferReport
from opjit.cache.verification import Origin, origin
from opjit.errors import BadSetting, EntryError, OpjitError, RemoteError
from opjit.files import StrPath
from opjit.share import remote
from opjit.share.transport import Objects, with_timeout
from opjit.share.trust import Trust, signer
from opjit.store import bundle, inventory
from opjit.store import manifest as manifests
from opjit.store.bundle import Bundle
from opjit.store.manifest import Manifest
from opjit.store.store import SHARED, VERSION, default_root, default_store

_Result = TypeVar("_Result")
_OBJECT = re.compile(rf"{VERSION}/(\w[\w.]*)/(\w[\w.+-]*)/([0-9a-f]{{64}})\.(opjit|key)", re.ASCII)
_ENTRIES = "ENTRIES"  # the name of the only directory of an archive
_SECONDS = 300.0  # for one object: a person is waiting, and can interrupt the command


class _Remote:
    """A remote, by default the one in OPJIT_REMOTE, with a time limit for each request.

    Raises BadSetting if no remote is named, and RemoteError for each failure.
    """

    def __init__(self, url: str | None, shown: str | None = None) -> None:
        url = url or os.environ.get("OPJIT_REMOTE")
        if not url:
            raise BadSetting(
                "expected the URL of a remote, such as s3://bucket/opjit or file:///folder: name one, or set OPJIT_REMOTE"
            )
        self.objects = Objects(url)
        self.objects.load()
        self.shown = shown or self.objects.shown

    def read(self, name: str) -> bytes:
        """Read an object's bytes.

        Raises FileNotFoundError if the object is missing, and EntryError if it is too long.
        """
        return self._in_time(
            lambda: self.objects.read(name, remote.MAX_BYTES, time.monotonic() + _SECONDS)
        )

    def write(self, name: str, content: bytes) -> None:
        try:
            self._in_time(lambda: self.objects.write(name, content))
        except (
            FileNotFoundError
        ) as error:  # the bucket does not exist, or the directory cannot be made
            raise RemoteError(f"{self.shown} cannot be written: {remote.reason(error)}") from error

    def pointed(self, name: str) -> list[str]:
        try:
            return remote.pointed(self.read(name))
        except (FileNotFoundError, EntryError):
            return []

    def names(self) -> list[str]:
        return [
            name
            for name in self._in_time(lambda: self.objects.names(VERSION))
            if _OBJECT.fullmatch(name) and name.endswith(".opjit")
        ]

    def _in_time(self, call: Callable[[], _Result]) -> _Result:
        try:
            return with_timeout(call, _SECONDS)
        except (FileNotFoundError, EntryError):
            raise
        except Exception as error:
            raise RemoteError(f"{self.shown} cannot be used: {remote.reason(error)}") from error


def push(
    url: str | None = None,
    *,
    sign: Path | None,
    ops: Sequence[str] = (),
    say: Callable[[str], object] = lambda line: None,
) -> TransferReport:
    """Upload the cache's entries of `ops` (names as in `opjit cache ls`; default: all) that a
    remote does not have.

    The default remote is OPJIT_REMOTE. If you don't pass a private key as `sign`, only users with
    OPJIT_TRUST=unsigned can use the entries. Raises RemoteError for a bad remote or key.
    """
    place = _Remote(url)
    report = TransferReport([], 0, [])
    if place.objects.is_http:
        raise RemoteError(
            f"cannot push to {place.shown}, because HTTP remotes are read-only; push to the "
            "storage behind it (for example s3://…), or push to file:///DIR and copy DIR to the "
            "web server"
        )
    there = {*place.names()}
    for entry, content in _outgoing(
        ops,
        signer(sign) if sign is not None else lambda each: each,
        report.problems,
    ):
        known = entry.name in there
        if not known:
            place.write(entry.name, content)
            report.moved.append(entry.name)
            say(entry.name)
        for pointer in entry.pointers:
            before = place.pointed(pointer)
            if not known or entry.key not in before:
                keys = dict.fromkeys([entry.key, *before])
                kept = islice(keys, remote.MOST_KEYS)
                place.write(pointer, "\n".join(kept).encode("ascii"))
        report = report._replace(there=report.there + known)
    return report


def _outgoing(
    ops: Sequence[str], sign: Callable[[Bundle], Bundle], problems: list[str]
) -> Iterator[tuple[Origin, bytes]]:
    """Yield the cache's entries of ops, verified and sorted by name, with the bytes of their
    objects. Without ops, also its shared parts.

    If an entry fails, `problems` gets a line about it.
    """
    root = default_store()
    shared = (item for item in inventory.parts(root) if item.folder.parent.name == SHARED)
    folders = {
        "/".join((VERSION, *item.folder.parts[-3:])) + ".opjit": item.folder
        for item in (*inventory.scan(root), *shared)
    }
    for name in _selected(
        sorted(folders), ops, problems, f"{root.root} does not contain an entry of it"
    ):
        try:
            folder = folders[name]
            content = parts.packed(folder) if folder.parent.name == SHARED else bundle.of(folder)
            manifest, belongs = _checked(name, content)
            if "debug" in manifest.document:
                continue  # it contains directories of this machine
            signed = sign(content).dump()
            if len(signed) > remote.MAX_BYTES:
                raise EntryError(
                    f"it is larger than {remote.MAX_BYTES} bytes, the most that a request fetches"
                )
        except FileNotFoundError:
            continue  # removed in the meantime
        except (OSError, OpjitError) as error:
            problems.append(f"{folders[name]} is left out: {error}")
            continue
        yield belongs, signed


def pull(
    url: str | None = None,
    *,
    ops: Sequence[str] = (),
    say: Callable[[str], object] = lambda line: None,
) -> TransferReport:
    """Download a remote's entries that the cache does not have, for every arch.

    The arguments and errors are the same as for `push`.
    """
    place = _Remote(url)
    if place.objects.is_http:
        raise RemoteError(
            f"cannot pull everything from {place.shown}, because HTTP cannot list entries; set "
            f"OPJIT_REMOTE={place.shown}, and entries are downloaded when an op needs them"
        )
    return _take_in(place, remote.required_trust(place.shown), ops, say)


def _take_in(
    place: _Remote, trusted: Trust, ops: Sequence[str], say: Callable[[str], object]
) -> TransferReport:
    root = default_store()
    report = TransferReport([], 0, [])
    for name in _selected(
        place.names(), ops, report.problems, f"{place.shown} does not contain an entry of it"
    ):
        folder = root.root / name.removesuffix(".opjit")
        if os.path.isdir(folder):
            # If it is damaged, its next use replaces it.
            report = report._replace(there=report.there + 1)
            continue
        try:
            received, _ = trusted.opened(place.read(name))
            _, belongs = _checked(name, received)
        except FileNotFoundError:
            continue  # removed in the meantime
        except RemoteError:
            raise
        except OpjitError as error:
            report.problems.append(f"{name} is left out: {error}")
            continue
        try:
            if folder.parent.name == SHARED:
                parts.receive(root.base, f"{SHARED}/{belongs.key}", received, Path.is_dir)
            else:
                root.receive(received, folder, belongs.target)
        except (OSError, EntryError) as error:  # the entry is good, so the cache is at fault
            raise RemoteError(
                f"the cache {root.root} cannot be written: {error}; set OPJIT_CACHE to a directory that only you can write"
            ) from error
        report.moved.append(name)
        say(name)
    return report


def pack(
    path: StrPath,
    *,
    sign: StrPath | None = None,
    ops: Sequence[str] = (),
) -> TransferReport:
    """Write entries of the cache into one archive, for all host CPUs and architectures.

    The archive is a tree with the objects that ``opjit cache push`` uploads.

    Args:
        path: the archive. An existing file is replaced when the new one is complete.
        sign: a file with the private key that signs the entries. Only OPJIT_TRUST=unsigned accepts unsigned entries.
        ops: names of ops, as ``opjit cache ls`` shows them. Without names, all entries are written.

    Raises:
        RemoteError: there is nothing to pack, the file cannot be written, or the key cannot be read.

    Example:
        >>> len(opjit.cache.pack("ops.pack", ops=["allreduce"]).moved)
        1
    """
    key = None if sign is None else Path(sign)
    with files.scratch_folder() as folder:
        report = push(f"file://{folder}", sign=key, ops=ops)
        if not report.moved:
            raise RemoteError(
                "\n".join(
                    [
                        f"expected entries to pack, but the cache {default_root()} is empty; "
                        "run `opjit precompile` first",
                        *report.problems,
                    ]
                )
            )
        trees.pack_tree(path, {_ENTRIES: folder}, key)
    return report


def unpack(path: StrPath, *, say: Callable[[str], object] = lambda line: None) -> TransferReport:
    """Add the entries of an archive from `pack` to the cache.

    OPJIT_TRUST must contain the public key of their signer.

    Raises:
        RemoteError: OPJIT_TRUST is not set, the file cannot be read or is not an archive of `pack`, or
            the cache cannot be written.

    Example:
        >>> opjit.cache.unpack("ops.pack").there
        1
    """
    shown = os.fspath(path)
    with files.scratch_folder() as folder:
        roots = trees.open_tree(Path(path), folder)
        if _ENTRIES not in roots:
            raise RemoteError(f"{shown} has no entries; pass it to `opjit run --tree`")
        place = _Remote(f"file://{roots[_ENTRIES]}", shown)
        return _take_in(place, remote.required_trust(shown), (), say)


def _checked(name: str, content: Bundle) -> tuple[Manifest, Origin]:
    """Return the manifest of the entry in an object, and the op or library that it belongs to.

    Raises OpjitError if it is damaged, or if it belongs to another one.
    """
    manifest = manifests.parse(content.manifest)
    belongs = origin(manifest)
    if name != belongs.name or not _OBJECT.fullmatch(name):
        raise EntryError(
            f"it contains an entry of {belongs.title}, which is not the one in its name"
        )
    remote.examine(manifest, content.library, manifest.key, belongs.target)
    return manifest, belongs


def _selected(
    names: Iterable[str], ops: Sequence[str], problems: list[str], missing: str
) -> Iterator[str]:
    """Yield the objects of the named ops, or all objects.

    If an op lacks an object, `problems` gets the line `missing` for it.
    """
    folders = {(op if "::" in op else f"opjit::{op}").replace("::", "."): op for op in ops}
    seen = set()
    for name in names:
        folder = name.split("/")[1]
        if not ops or folder in folders:
            seen.add(folder)
            yield name
    problems += [
        f"{op} is left out: {missing}" for folder, op in folders.items() if folder not in seen
    ]
