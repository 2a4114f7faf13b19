"""Transfer entries: push them to a remote, pull them from one, pack them into a file and unpack it. Only commands do so, never a build.

A pack is a plain tar of exactly the files of a remote, so it becomes one when it is untarred on a web server. Ops and C++ extensions are
transferred alike.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from opjit import files
from opjit.backends.targets import Target
from opjit.cache import origin
from opjit.cache.origin import Origin
from opjit.errors import EntryError, OpjitError, RemoteError
from opjit.share import remote, trust
from opjit.share.transport import Objects, with_timeout
from opjit.share.trust import Signer, Trust
from opjit.store import bundle, inventory
from opjit.store import manifest as manifests
from opjit.store.bundle import Bundle
from opjit.store.store import Store, default_root

_Result = TypeVar("_Result")
_OBJECT = re.compile(r"v1/(\w[\w.]*)/(\w[\w.+-]*)/([0-9a-f]{64})\.(opjit|key)", re.ASCII)
_SECONDS = 300.0  # for one object: a person is waiting, and can interrupt the command
_BLOCK = tarfile.BLOCKSIZE
_EMPTY = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)


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
    """A remote with a time limit for every request.

    Args:
        url: None is OPJIT_REMOTE's.

    Raises:
        RemoteError: no remote is named, or a request failed for another reason than a missing object. The methods raise it too.
    """

    def __init__(self, url: str | None) -> None:
        url = url or os.environ.get("OPJIT_REMOTE")
        if not url:
            raise RemoteError("expected the URL of a remote, such as s3://bucket/opjit or file:///folder: name one, or set OPJIT_REMOTE")
        self.objects = Objects(url)
        self.objects.load()

    def read(self, name: str, limit: int = remote.MAX_BYTES) -> bytes:
        """Read an object's bytes. Raises FileNotFoundError for a missing object, and EntryError for one that is too long."""
        return self._in_time(lambda: self.objects.read(name, limit, time.monotonic() + _SECONDS))

    def write(self, name: str, content: bytes) -> None:
        try:
            self._in_time(lambda: self.objects.write(name, content))
        except FileNotFoundError as error:  # there is no such bucket, or the folder cannot be made
            raise RemoteError(f"{self.objects.shown} cannot be written: {remote.reason(error)}") from error

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
        return [name for name in self._in_time(lambda: self.objects.names("v1")) if _OBJECT.fullmatch(name) and name.endswith(".opjit")]

    def _in_time(self, call: Callable[[], _Result]) -> _Result:
        try:
            return with_timeout(call, _SECONDS)
        except (FileNotFoundError, EntryError):
            raise
        except Exception as error:
            raise RemoteError(f"{self.objects.shown} cannot be used: {remote.reason(error)}") from error


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

    Example:
        >>> from opjit.cache import transfer
        >>> transfer.push("s3://bucket/opjit", sign=Path("ci.key"))
    """
    place, problems = _Remote(url), list[str]()
    if place.objects.is_http:
        raise RemoteError(f"{place.objects.shown} is only read over HTTP: push to the storage behind it (s3://…, file://…), or untar the "
                          "output of `opjit cache pack` on the web server")
    signer = Signer(sign) if sign is not None else None
    moved, there = [], 0
    for entry, content in _outgoing(Store(default_root()), ops, signer, problems):
        known = place.has(entry.name)
        if not known:
            place.write(entry.name, content)
            moved.append(entry.name)
            say(entry.name)
        for pointer in entry.pointers:
            before = place.pointed(pointer)
            if not known or not before or (entry.most > 1 and entry.key not in before):
                place.write(pointer, entry.pointing(before))
        there += known
    return TransferReport(moved, there, problems)


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
    place, problems = _Remote(url), list[str]()
    if place.objects.is_http:
        raise RemoteError(f"{place.objects.shown} cannot list its entries: set OPJIT_REMOTE to it, and requests and `opjit precompile` "
                          "fetch what they need; or download a pack from it for `opjit cache unpack`")
    trusted = remote.required_trust(place.objects.shown)
    names = _selected(place.names(), ops, problems, f"{place.objects.shown} has no entry of it")
    return _add_to_cache(((name, partial(place.read, name)) for name in names), trusted, problems, say)


def pack(path: str | os.PathLike[str], *, sign: Path | None = None, ops: Sequence[str] = ()) -> TransferReport:
    """Write the cache's entries into one file, for `unpack` or a web server. The same entries give the same bytes.

    Args:
        path: the file, which appears by one rename and replaces an existing one.
        sign: file of the private key; None leaves entries unsigned.
        ops: the names of the ops and extensions (``cpp_extension::NAME``) to pack; empty is all.

    Raises:
        RemoteError: there is nothing to pack, the file cannot be written, or the key cannot be read.
    """
    place, problems = Path(path), list[str]()
    signer = Signer(sign) if sign is not None else None
    staged = place.with_name(f".{files.unique()}")
    names: list[str] = []
    try:
        with open(staged, "xb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
                pointers = dict[str, bytes]()
                for entry, content in _outgoing(Store(default_root()), ops, signer, problems):
                    _add(archive, entry.name, content)
                    names.append(entry.name)
                    pointers |= {name: entry.pointing(pointers.get(name, b"").decode("ascii").split()) for name in entry.pointers}
                for name, content in sorted(pointers.items()):
                    _add(archive, name, content)
            file.flush()
            os.fsync(file.fileno())
        if not names:
            raise RemoteError(" ".join([f"there is no entry to pack in {default_root()}; build one with `opjit get OP`.", *problems]))
        os.replace(staged, place)
    except OSError as error:
        raise RemoteError(f"{place} cannot be written: {error}; choose another place") from error
    finally:
        with suppress(OSError):
            staged.unlink()
    return TransferReport(names, 0, problems)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # dated 1970, and owned by root
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def unpack(path: str | os.PathLike[str], *, say: Callable[[str], None] = _silent) -> TransferReport:
    """Put a pack's entries into the cache.

    If OPJIT_TRUST names keys, one of them must have signed each entry. Otherwise the file must be owned by you or root and not writable by
    others: then you vouch for its contents, wherever they came from. The pack's names are only compared, never used as paths.

    Raises:
        RemoteError: the file cannot be read or is not trusted, or the cache cannot be written.
    """
    place, problems = Path(path), list[str]()
    trusted = trust.configured() or Trust(())
    try:
        with open(place, "rb") if trusted.keys and place.is_file() else files.opened(place, sys.maxsize) as file:
            return _add_to_cache(_members(file, problems), trusted, problems, say)
    except EntryError as error:
        raise RemoteError(f"{place} is not unpacked: {error}. Copy it to a folder of your own if you trust it, or have it signed "
                          "(opjit cache pack --sign) and set OPJIT_TRUST to the public key") from error
    except OSError as error:
        raise RemoteError(f"{place} cannot be unpacked: {error}; expected a file from `opjit cache pack`") from error


def _members(file: IO[bytes], problems: list[str]) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield the names of a pack's entries, each with a function that reads its bytes until the next name is taken.

    Only tarfile's header parser is used: a pack needs none of its support for links, long names and sparse files.
    """
    length, odd = os.fstat(file.fileno()).st_size, set[str]()
    while True:
        start = file.tell()
        header = file.read(_BLOCK)
        if header == bytes(_BLOCK):
            return
        try:
            member = tarfile.TarInfo.frombuf(header, "ascii", "backslashreplace")
            if not 0 <= member.size <= length - file.tell():
                raise tarfile.HeaderError("its size exceeds the file's")
        except (tarfile.TarError, ValueError) as error:
            problems.append(f"the pack is damaged or truncated at byte {start}, and the rest is left out: {error}")
            return
        after = file.tell() + (0 if member.type in _EMPTY else -(-member.size // _BLOCK) * _BLOCK)
        shown = ascii(member.name)[:200]
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            problems.append(f"{shown} is left out: it is not a plain file")
            odd.add(member.name)
        elif not _OBJECT.fullmatch(member.name):
            problems.append(f"{shown} is left out: its name is not an entry's")
        elif member.name in odd:
            problems.append(f"{shown} is left out: in the same pack, its name is also that of something else than a file")
        elif member.size > remote.MAX_BYTES:
            problems.append(f"{shown} is left out: it is larger than {remote.MAX_BYTES} bytes")
        elif member.name.endswith(".opjit"):
            yield member.name, partial(file.read, member.size)
        file.seek(after)


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
            if name != belongs.name or not _OBJECT.fullmatch(name):
                raise EntryError("it lies among another op's entries")
            signed = (signer.sign(content) if signer else content).dump()
            if len(signed) > remote.MAX_BYTES:
                raise EntryError(f"it is larger than {remote.MAX_BYTES} bytes, the most that a request fetches")
            tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT)  # ValueError: the name is too long for a pack
        except FileNotFoundError:
            continue  # removed meanwhile
        except (OSError, OpjitError, ValueError) as error:
            problems.append(f"{folders[name]} is left out: {error}")
            continue
        yield belongs, signed


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


def _add_to_cache(found: Iterable[tuple[str, Callable[[], bytes]]], trusted: Trust, problems: list[str],
                  say: Callable[[str], None]) -> TransferReport:
    """Put the good entries that the cache does not have into it.

    Args:
        found: the objects' names, each with a function that reads the bytes; FileNotFoundError: the object has been removed.
    """
    root, moved, there = Store(default_root()), [], 0
    for name, read in found:
        place = root.root / name.removesuffix(".opjit")
        if os.path.isfile(place / manifests.NAME):
            there += 1  # if it is damaged, its next use replaces it
            continue
        try:
            received = bundle.parse(read())
            trusted.check(received)
            manifest = manifests.parse(received.manifest)
            belongs = origin.of(manifest)
            if name != belongs.name:
                raise EntryError(f"it holds an entry of {belongs.title}, not the one in its name")
            remote.examine(manifest, received.library, manifest.key, belongs.target)
        except FileNotFoundError:
            continue
        except RemoteError:
            raise
        except OpjitError as error:
            problems.append(f"{name} is left out: {error}")
            continue
        _receive(root, received, place, belongs.target)
        moved.append(name)
        say(name)
    return TransferReport(moved, there, problems)


def _receive(root: Store, received: Bundle, place: Path, target: Target | None) -> None:
    try:
        root.receive(received, place, target)
    except (OSError, EntryError) as error:  # the entry is good, so the cache is at fault
        raise RemoteError(f"the cache {root.root} cannot be written: {error}; set OPJIT_CACHE to a folder of your own") from error
