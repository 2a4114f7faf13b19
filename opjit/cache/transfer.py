"""Transfer entries: push them to a remote, and pull them from one. Only commands do so, never a build. Ops and C++ extensions are
transferred alike."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from opjit.cache import origin
from opjit.cache.origin import Origin
from opjit.errors import EntryError, OpjitError, RemoteError
from opjit.share import remote
from opjit.share.transport import Objects, with_timeout
from opjit.share.trust import Signer, Trust
from opjit.store import bundle, inventory
from opjit.store import manifest as manifests
from opjit.store.bundle import Bundle
from opjit.store.store import Store, default_root

_Result = TypeVar("_Result")
_ENTRY = re.compile(r"v1/(\w[\w.]*)/(\w[\w.+-]*)/([0-9a-f]{64})\.opjit", re.ASCII)
_SECONDS = 300.0  # for one object: a person is waiting, and can interrupt the command


class TransferReport(NamedTuple):
    """What a transfer did.

    Attributes:
        moved: the names of the objects that were written.
        there: the number of entries that the destination already had.
        problems: one line for each entry that was left out, with the reason.
    """

    moved: list[str]
    there: int
    problems: list[str]


class _Remote:
    """A remote with a time limit for every request; `url` None is OPJIT_REMOTE's. Raises RemoteError if none is named, or if a request
    failed for another reason than a missing object."""

    def __init__(self, url: str | None) -> None:
        url = url or os.environ.get("OPJIT_REMOTE")
        if not url:
            raise RemoteError("expected the URL of a remote, such as s3://bucket/opjit or file:///folder: name one, or set OPJIT_REMOTE")
        self.objects = Objects(url)
        self.objects.load()
        self.shown = self.objects.shown

    def read(self, name: str) -> bytes:
        """Read an object's bytes. Raises FileNotFoundError for a missing object, and EntryError for one that is too long."""
        return self._in_time(lambda: self.objects.read(name, remote.MAX_BYTES, time.monotonic() + _SECONDS))

    def write(self, name: str, content: bytes) -> None:
        try:
            self._in_time(lambda: self.objects.write(name, content))
        except FileNotFoundError as error:  # there is no such bucket, or the folder cannot be made
            raise RemoteError(f"{self.shown} cannot be written: {remote.reason(error)}") from error

    def has(self, name: str) -> bool:
        return self._in_time(lambda: self.objects.has(name))

    def pointed(self, name: str) -> list[str]:
        """Read the keys in a pointer; none if it is missing or damaged."""
        try:
            return remote.pointed(self.read(name))
        except (FileNotFoundError, EntryError):
            return []

    def names(self) -> list[str]:
        """List the names of all entries."""
        return [name for name in self._in_time(lambda: self.objects.names("v1")) if _ENTRY.fullmatch(name)]

    def _in_time(self, call: Callable[[], _Result]) -> _Result:
        try:
            return with_timeout(call, _SECONDS)
        except (FileNotFoundError, EntryError):
            raise
        except Exception as error:
            raise RemoteError(f"{self.shown} cannot be used: {remote.reason(error)}") from error


def _silent(line: str) -> None:
    pass


def push(url: str | None = None, *, sign: Path | None, ops: Sequence[str] = (), say: Callable[[str], None] = _silent) -> TransferReport:
    """Upload the cache's entries that a remote does not have. Objects that it has stay as they are.

    Args:
        url: the remote; None is OPJIT_REMOTE's.
        sign: file of the private key; None leaves entries unsigned, which only OPJIT_TRUST=unsigned accepts.
        ops: the names of the ops and extensions (``cpp_extension::NAME``) to push; empty is all.
        say: called with the name of each uploaded object.

    Raises:
        RemoteError: the remote cannot be reached or written, or the key cannot be read.
    """
    place, report = _Remote(url), TransferReport([], 0, [])
    if place.objects.is_http:
        raise RemoteError(f"{place.shown} is only read over HTTP: push to the storage behind it (s3://…, file://…), or copy the folder of "
                          "a push to file://… onto the web server")
    signer = Signer(sign) if sign is not None else None
    for entry, content in _outgoing(Store(default_root()), ops, signer, report.problems):
        known = place.has(entry.name)
        if not known:
            place.write(entry.name, content)
            report.moved.append(entry.name)
            say(entry.name)
        for pointer in entry.pointers:
            before = place.pointed(pointer)
            if not known or not before or (entry.most > 1 and entry.key not in before):
                place.write(pointer, entry.pointing(before))
        report = report._replace(there=report.there + known)
    return report


def _outgoing(root: Store, ops: Sequence[str], signer: Signer | None, problems: list[str]) -> Iterator[tuple[Origin, bytes]]:
    """Yield the cache's entries of ops, verified and sorted by name, with the bytes of their objects. Adds a line to `problems` for each
    entry that fails."""
    folders = {"/".join(("v1", *item.folder.parts[-3:])) + ".opjit": item.folder for item in inventory.scan(root)}
    for name in _selected(sorted(folders), ops, problems, f"{root.root} has no entry of it"):
        try:
            content = bundle.of(folders[name])
            manifest = manifests.parse(content.manifest)
            if "debug" in manifest.document:
                continue  # it names this machine's folders
            belongs = origin.of(manifest)
            remote.examine(manifest, content.library, folders[name].name, belongs.target)
            if name != belongs.name or not _ENTRY.fullmatch(name):
                raise EntryError("it lies among another op's entries")
            signed = (signer.sign(content) if signer else content).dump()
            if len(signed) > remote.MAX_BYTES:
                raise EntryError(f"it is larger than {remote.MAX_BYTES} bytes, the most that a request fetches")
        except FileNotFoundError:
            continue  # removed meanwhile
        except (OSError, OpjitError) as error:
            problems.append(f"{folders[name]} is left out: {error}")
            continue
        yield belongs, signed


def pull(url: str | None = None, *, ops: Sequence[str] = (), say: Callable[[str], None] = _silent) -> TransferReport:
    """Fetch a remote's entries that the cache does not have, for every arch.

    Args:
        url: the remote; None is OPJIT_REMOTE's.
        ops: the names of the ops and extensions (``cpp_extension::NAME``) to pull; empty is all.
        say: called with the name of each fetched object.

    Raises:
        RemoteError: the remote cannot be reached, or is a web server, which cannot list its entries; OPJIT_TRUST is not set, or the cache
            cannot be written.
    """
    place, report = _Remote(url), TransferReport([], 0, [])
    if place.objects.is_http:
        raise RemoteError(f"{place.shown} cannot list its entries: set OPJIT_REMOTE to it, and requests and `opjit precompile` fetch what "
                          "they need")
    trusted, root = remote.required_trust(place.shown), Store(default_root())
    for name in _selected(place.names(), ops, report.problems, f"{place.shown} has no entry of it"):
        folder = root.root / name.removesuffix(".opjit")
        if os.path.isfile(folder / manifests.NAME):
            report = report._replace(there=report.there + 1)  # if it is damaged, its next use replaces it
            continue
        try:
            received, belongs = _checked(name, place.read(name), trusted)
        except FileNotFoundError:
            continue  # removed meanwhile
        except RemoteError:
            raise
        except OpjitError as error:
            report.problems.append(f"{name} is left out: {error}")
            continue
        try:
            root.receive(received, folder, belongs.target)
        except (OSError, EntryError) as error:  # the entry is good, so the cache is at fault
            raise RemoteError(f"the cache {root.root} cannot be written: {error}; set OPJIT_CACHE to a folder of your own") from error
        report.moved.append(name)
        say(name)
    return report


def _checked(name: str, content: bytes, trusted: Trust) -> tuple[Bundle, Origin]:
    """Return the entry in an object and where it belongs. Raises OpjitError if it is not trusted, damaged, or another's."""
    received, manifest = trusted.opened(content)
    belongs = origin.of(manifest)
    if name != belongs.name:
        raise EntryError(f"it holds an entry of {belongs.title}, not the one in its name")
    remote.examine(manifest, received.library, manifest.key, belongs.target)
    return received, belongs


def _selected(names: Iterable[str], ops: Sequence[str], problems: list[str], missing: str) -> Iterator[str]:
    """Yield the objects of the named ops, or all objects. Adds the line `missing` to `problems` for each op without an object."""
    folders = {(op if "::" in op else f"opjit::{op}").replace("::", "."): op for op in ops}
    seen = set()
    for name in names:
        folder = name.split("/")[1]
        if not ops or folder in folders:
            seen.add(folder)
            yield name
    problems += [f"{op} is left out: {missing}" for folder, op in folders.items() if folder not in seen]
