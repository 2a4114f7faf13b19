"""Entries on their way: pushed to a remote, pulled from one, packed into a file and unpacked. Nothing of this happens by itself.

A pack is a plain tar of exactly what a remote holds, so untarred on a web server it is one. C++ extensions stay where they are: their
binaries are tied to one version of torch and Python, and nobody looks for them in a remote.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from opjit import api, backends, bundle, catalog, files, layers, manifest, remote, targets, trust
from opjit.bundle import Bundle
from opjit.errors import EntryError, OpjitError, RemoteError
from opjit.library import origin
from opjit.objects import Objects, in_time
from opjit.op import Op
from opjit.recipe import base_key
from opjit.store import Store, default_root
from opjit.targets import Target
from opjit.trust import Signer, Trust

_Result = TypeVar("_Result")
_OBJECT = re.compile(r"v1/(\w[\w.]*)/(\w[\w.+-]*)/([0-9a-f]{64})\.(opjit|key)", re.ASCII)
_SECONDS = 300.0  # for one object: a person waits for it, and can end the command
_BLOCK = tarfile.BLOCKSIZE
_EMPTY = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)


class Report(NamedTuple):
    """What a transfer did.

    Attributes:
        moved: names of the objects that were written.
        there: how many entries were there already.
        absent: how many that were asked for by name the other side does not have.
        problems: a sentence for each entry that was left out because it is not in order.
    """

    moved: list[str]
    there: int
    absent: int
    problems: list[str]


class _Outgoing(NamedTuple):
    """An entry to send: its object's name, its bytes, and the name of the pointer to it."""

    name: str
    content: Bundle
    pointer: str


class _Remote:
    """A remote whose every answer is waited for in bounded time.

    Args:
        url: None is OPJIT_REMOTE's.

    Raises:
        RemoteError: no remote is named, or something else than a missing object went wrong; so do the methods.
    """

    def __init__(self, url: str | None) -> None:
        found = url or os.environ.get("OPJIT_REMOTE")
        if not found:
            raise RemoteError("expected the URL of a remote, such as s3://bucket/opjit or file:///folder: name one, or set OPJIT_REMOTE")
        self.objects = Objects(found)
        self.objects.load()

    def read(self, name: str, limit: int = remote.MAX_BYTES) -> bytes:
        """May raise FileNotFoundError, and EntryError for an object that is too long."""
        return self._in_time(lambda: self.objects.read(name, limit, time.monotonic() + _SECONDS))

    def write(self, name: str, content: bytes) -> None:
        try:
            self._in_time(lambda: self.objects.write(name, content))
        except FileNotFoundError as error:  # a bucket that there is not, or a folder that cannot be made
            raise RemoteError(f"{self.objects.shown} cannot be written: {remote.reason(error)}") from error

    def has(self, name: str) -> bool:
        return self._in_time(lambda: self.objects.has(name))

    def names(self) -> list[str]:
        """Of all entries."""
        return [name for name in self._in_time(lambda: self.objects.names("v1")) if _OBJECT.fullmatch(name) and name.endswith(".opjit")]

    def _in_time(self, call: Callable[[], _Result]) -> _Result:
        try:
            return in_time(call, _SECONDS)
        except (FileNotFoundError, EntryError):
            raise
        except Exception as error:
            raise RemoteError(f"{self.objects.shown} cannot be used: {remote.reason(error)}") from error


def _silent(line: str) -> None:
    """For callers that want the report only."""


def push(url: str | None = None, *, sign: Path | None, ops: Sequence[str] = (), say: Callable[[str], None] = _silent) -> Report:
    """Upload the cache's entries of ops that a remote does not have. What is there stays as it is.

    Args:
        url: the remote; None is OPJIT_REMOTE's.
        sign: file of the private key; None leaves entries unsigned, which only OPJIT_TRUST=unsigned takes.
        ops: names; none is all.
        say: told a line for each object.

    Raises:
        RemoteError: the remote cannot be reached or written, or the key cannot be read.

    Example:
        >>> from opjit import transfer
        >>> transfer.push("s3://bucket/opjit", sign=Path("ci.key"))
    """
    place, problems = _Remote(url), list[str]()
    if place.objects.is_http:
        raise RemoteError(f"{place.objects.shown} is only read over HTTP: push to the storage behind it (s3://…, file://…), or untar on "
                          "the web server what `opjit cache pack` writes")
    signer = Signer(sign) if sign is not None else None
    moved, there = [], 0
    for entry in _outgoing(Store(default_root()), ops, signer, problems):
        known = place.has(entry.name)
        if not known:
            place.write(entry.name, entry.content.dump())
            moved.append(entry.name)
            say(entry.name)
        if not known or not place.has(entry.pointer):
            place.write(entry.pointer, _pointer(entry))
        there += known
    return Report(moved, there, 0, problems)


def pull(url: str | None = None, *, ops: Sequence[str] = (), say: Callable[[str], None] = _silent) -> Report:
    """Fetch what a remote has and the cache has not, for every arch. A web server cannot list what it has: from there come the entries
    that the ops declared here ask for on this machine.

    Args:
        url: the remote; None is OPJIT_REMOTE's.
        ops: names; none is all.
        say: told a line for each object.

    Raises:
        RemoteError: the remote cannot be reached, OPJIT_TRUST names nobody, or the cache cannot be written.
    """
    place, trusted, root = _Remote(url), remote.required_trust(), Store(default_root())
    if place.objects.is_http:
        return _pull_declared(place, trusted, root, ops, say)
    moved, there, problems = [], 0, list[str]()
    for name in _selected(place.names(), ops, problems, f"there is nothing of it at {place.objects.shown}"):
        if _is_here(root, name):
            there += 1
            continue
        try:
            content = place.read(name)
        except FileNotFoundError:
            continue  # removed meanwhile
        except EntryError as error:
            problems.append(f"{name} is left out: {error}")
            continue
        if _arrived(name, content, trusted, root, problems):
            moved.append(name)
            say(name)
    return Report(moved, there, 0, problems)


def _pull_declared(place: _Remote, trusted: Trust, root: Store, ops: Sequence[str], say: Callable[[str], None]) -> Report:
    moved, there, absent, problems = [], 0, 0, list[str]()
    for op, target in _declared(ops):
        try:
            recipe = api.describe(op, target, root)
            if layers.find(recipe) or root.find(recipe, quiet=True):
                there += 1
                continue
            found = remote.look_up(recipe, place.read, trusted)
        except (EntryError, OSError) as error:  # OSError: of the op's sources
            problems.append(f"{op.qualified} for {target} is left out: {error}")
            continue
        if found is None:
            absent += 1
            continue
        key, received = found
        _receive(root, received, root.folder(op.qualified, target) / key, target)
        moved.append(f"{remote.folder_name(op.qualified, target)}/{key}.opjit")
        say(moved[-1])
    return Report(moved, there, absent, problems)


def _declared(ops: Sequence[str]) -> Iterator[tuple[Op, Target]]:
    """The ops with the targets of this machine that they have kernels for."""
    if not ops:
        catalog.search()
    for op in [catalog.find(name) for name in ops] or catalog.all_ops():
        for backend in backends.all_backends():
            if backend.name in op.backends() and backend.available() is None:
                yield op, targets.here(backend)


def pack(path: str | os.PathLike[str], *, sign: Path | None = None, ops: Sequence[str] = ()) -> Report:
    """Write the cache's entries of ops into one file, for `unpack` or a web server. The same entries give the same bytes.

    Args:
        path: of the file, which appears by one rename and takes the place of one that is there.
        sign: file of a private key; None leaves entries unsigned.
        ops: names; none is all.

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
                pointers = {}
                for entry in _outgoing(Store(default_root()), ops, signer, problems):
                    _add(archive, entry.name, entry.content.dump())
                    names.append(entry.name)
                    pointers[entry.pointer] = _pointer(entry)
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
        staged.unlink(missing_ok=True)
    return Report(names, 0, 0, problems)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # of 1970, and root's
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def unpack(path: str | os.PathLike[str], *, say: Callable[[str], None] = _silent) -> Report:
    """Put a pack's entries into the cache. Where OPJIT_TRUST names keys, one of them must have signed each entry; else the file must be
    yours or root's, and nobody else's to write: then you vouch for what is in it, wherever it came from.

    The pack's names are only compared, never used as paths: what it holds goes the way of every entry that comes from elsewhere.

    Raises:
        RemoteError: the file cannot be read or may not be trusted, or the cache cannot be written.
    """
    place, root = Path(path), Store(default_root())
    trusted = trust.configured() or Trust(())
    moved, there, problems = [], 0, list[str]()
    try:
        with open(place, "rb") as file:
            if not trusted.keys:
                _refuse_distrusted(place, file)
            for name, content in _members(file, problems):
                if _is_here(root, name):
                    there += 1
                elif _arrived(name, content, trusted, root, problems):
                    moved.append(name)
                    say(name)
    except OSError as error:
        raise RemoteError(f"{place} cannot be unpacked: {error}; expected a file that `opjit cache pack` wrote") from error
    return Report(moved, there, 0, problems)


def _refuse_distrusted(place: Path, file: IO[bytes]) -> None:
    problem = files.distrusted(place)
    if problem is None and not os.path.samestat(os.lstat(place), os.fstat(file.fileno())):
        problem = f"{place} was just replaced"
    if problem:
        raise RemoteError(f"{place} is not unpacked: {problem}. Copy it to a folder of your own if you trust it, or have it signed (opjit "
                          "cache pack --sign) and set OPJIT_TRUST to the public key")


def _members(file: IO[bytes], problems: list[str]) -> Iterator[tuple[str, bytes]]:
    """The entries of a pack by their names. Read by hand from the headers that tarfile decodes: what it makes of links, long names,
    sparse files and claims of sizes is more than a pack has use for."""
    length = os.fstat(file.fileno()).st_size
    while True:
        start = file.tell()
        header = file.read(_BLOCK)
        if header == bytes(_BLOCK):
            return
        try:
            member = tarfile.TarInfo.frombuf(header, "ascii", "backslashreplace")
            if not 0 <= member.size <= length - file.tell():
                raise tarfile.HeaderError("its size is more than there is")
        except (tarfile.TarError, ValueError) as error:
            problems.append(f"from byte {start} on it is damaged or cut off, and what follows is left out: {error}")
            return
        after = file.tell() + (0 if member.type in _EMPTY else -(-member.size // _BLOCK) * _BLOCK)
        shown = ascii(member.name)[:200]
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            problems.append(f"{shown} is left out: it is not a plain file, and a pack has nothing else")
        elif not _OBJECT.fullmatch(member.name):
            problems.append(f"{shown} is left out: it has no name that an entry of a pack has")
        elif member.size > remote.MAX_BYTES:
            problems.append(f"{shown} is left out: it is larger than {remote.MAX_BYTES} bytes")
        elif member.name.endswith(".opjit"):
            yield member.name, file.read(member.size)
        file.seek(after)


def _outgoing(root: Store, ops: Sequence[str], signer: Signer | None, problems: list[str]) -> Iterator[_Outgoing]:
    """The cache's entries of ops, verified, in order; those that are not in order are named."""
    folders = {"/".join(("v1", *folder.parts[-3:])) + ".opjit": folder for folder in root.entries()
               if not folder.parts[-3].startswith("cpp_extension.")}
    for name in _selected(sorted(folders), ops, problems, f"{root.root} has no entry of it"):
        try:
            content = bundle.of(folders[name])
            described = manifest.parse(content.manifest)
            schema, target = origin(described)
            remote.examine(described, content.library, folders[name].name, target)
            if name != f"{remote.folder_name(schema.qualified, target)}/{described.key}.opjit" or not _OBJECT.fullmatch(name):
                raise EntryError("it lies where another op's entries do")
            if len(content.dump()) > remote.MAX_BYTES:
                raise EntryError(f"it is larger than {remote.MAX_BYTES} bytes, which nobody would fetch")
            tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT)  # ValueError: the name is too long for a pack
        except FileNotFoundError:
            continue  # removed meanwhile
        except (OSError, OpjitError, ValueError) as error:
            problems.append(f"{folders[name]} is left out: {error}")
            continue
        base = base_key(described.document)
        yield _Outgoing(name, signer.sign(content) if signer else content, f"{remote.folder_name(schema.qualified, target)}/{base}.key")


def _selected(names: Iterable[str], ops: Sequence[str], problems: list[str], nothing: str) -> Iterator[str]:
    """The objects of ops; all where none is named. An op without any is named at the end."""
    folders = {(op if "::" in op else f"opjit::{op}").replace("::", "."): op for op in ops}
    seen = set()
    for name in names:
        folder = name.split("/")[1]
        if not ops or folder in folders:
            seen.add(folder)
            yield name
    problems += [f"{op} is left out: {nothing}" for folder, op in folders.items() if folder not in seen]


def _pointer(entry: _Outgoing) -> bytes:
    return Path(entry.name).stem.encode("ascii")


def _is_here(root: Store, name: str) -> bool:
    """Whether the cache has an entry of that name. Whether it is good is looked at when it is used, and then it is replaced."""
    return os.path.isfile(root.root / name.removesuffix(".opjit") / manifest.NAME)


def _arrived(name: str, content: bytes, trusted: Trust, root: Store, problems: list[str]) -> bool:
    """Put an object's entry into the cache, or say why not."""
    try:
        received = bundle.parse(content)
        trusted.check(received)
        described = manifest.parse(received.manifest)
        schema, target = origin(described)
        if name != f"{remote.folder_name(schema.qualified, target)}/{described.key}.opjit":
            raise EntryError(f"it holds an entry of {schema.qualified} for {target}, and not the one that its name says")
        remote.examine(described, received.library, described.key, target)
    except OpjitError as error:
        problems.append(f"{name} is left out: {error}")
        return False
    _receive(root, received, root.root / name.removesuffix(".opjit"), target)
    return True


def _receive(root: Store, received: Bundle, place: Path, target: Target) -> None:
    try:
        root.receive(received, place, target)
    except (OSError, EntryError) as error:  # the entry was looked at before: this is the cache's
        raise RemoteError(f"the cache {root.root} cannot be written: {error}; set OPJIT_CACHE to a folder of your own") from error


