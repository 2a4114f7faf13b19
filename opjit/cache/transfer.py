"""Push entries to a remote, pull them from a remote, or pack the objects that a push writes into a tree.

Builds never upload anything.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from opjit import files
from opjit.builder import parts
from opjit.cache import trees
from opjit.cache.trees import TransferReport
from opjit.cache.verification import Origin, origin
from opjit.errors import BadSetting, EntryError, OpjitError, RemoteError
from opjit.files import StrPath
from opjit.share import remote, trust
from opjit.share.transport import Objects, with_timeout
from opjit.store import bundle, inventory
from opjit.store import manifest as manifests
from opjit.store.bundle import Bundle
from opjit.store.entry import check_binary
from opjit.store.manifest import Manifest
from opjit.store.store import PARTS, SHARED, VERSION, default_root, default_store

_Result = TypeVar("_Result")
_OBJECT = (
    rf"{VERSION}/[A-Za-z0-9_][A-Za-z0-9_.]*/[A-Za-z0-9_][A-Za-z0-9_.+-]*/[0-9a-f]{{64}}\.opjit"
)
_ENTRIES = "ENTRIES"  # the name of the only directory of an archive
_SECONDS = 300.0  # for one object: a person is waiting, and can interrupt the command


def _opened(url: str | None) -> Objects:
    """Return a remote, by default the one in OPJIT_REMOTE. Raises BadSetting without a valid one, RemoteError if it can only be read."""
    url = url or os.environ.get("OPJIT_REMOTE")
    if not url:
        raise BadSetting(
            "expected the URL of a remote, such as s3://bucket/opjit or file:///folder: name one, or set OPJIT_REMOTE"
        )
    place = Objects(url)
    place.load()
    if place.is_http:
        raise RemoteError(
            f"cannot push to {place.shown} or pull everything from it, because HTTP remotes are read-only and cannot list "
            "entries; push to the storage behind it (for example s3://…), or push to file:///DIR and copy DIR to the web "
            f"server; set OPJIT_REMOTE={place.shown}, and entries are downloaded when an op needs them"
        )
    return place


def _in_time(place: Objects, call: Callable[..., _Result], *arguments: object) -> _Result:
    """Call a method of a remote, with a time limit. Raises FileNotFoundError and EntryError about an object, and otherwise RemoteError."""
    try:
        return with_timeout(lambda: call(place.within(_SECONDS), *arguments), _SECONDS)
    except (FileNotFoundError, EntryError):
        raise
    except Exception as error:
        raise RemoteError(f"{place.shown} cannot be used: {remote.reason(error)}") from error


def _put(place: Objects, name: str, content: bytes) -> None:
    try:
        _in_time(place, Objects.write, name, content)
    except FileNotFoundError as error:  # the bucket does not exist, or the directory cannot be made
        raise RemoteError(f"{place.shown} cannot be written: {remote.reason(error)}") from error


def push(
    url: str | None = None,
    *,
    sign: StrPath | None,
    ops: Sequence[str] = (),
    say: Callable[[str], object] = lambda line: None,
) -> TransferReport:
    """Upload the cache's entries of `ops` (names as in `opjit cache ls`; default: all) that a
    remote does not have.

    The default remote is OPJIT_REMOTE. If you don't pass a private key as `sign`, only users with
    OPJIT_TRUST=unsigned can use the entries. Raises RemoteError for a bad remote or key.
    """
    place = _opened(url)
    moved: list[str] = []
    problems: list[str] = []
    kept = 0
    there = {*_in_time(place, Objects.names, VERSION)}
    for entry, content in _outgoing(ops, trust.signer(sign), problems):
        known = entry.name in there
        kept += known
        if not known:
            _put(place, entry.name, content)
            moved.append(entry.name)
            say(entry.name)
        for pointer in entry.pointers:
            before: list[str] = []
            with suppress(FileNotFoundError, EntryError):
                found = _in_time(place, Objects.read, pointer, remote.MAX_BYTES)
                before = remote.pointed(found)
            if not known or entry.key not in before:
                keys = list(dict.fromkeys([entry.key, *before]))
                text = "\n".join(keys[: remote.MOST_KEYS])
                _put(place, pointer, text.encode())
    return TransferReport(moved, kept, problems)


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
        f"{item.folder.relative_to(root.root)}.opjit": item.folder
        for item in (*inventory.scan(root), *shared)
    }
    missing = f"{root.root} does not contain an entry of it"
    for name in _selected(sorted(folders), ops, problems, missing):
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
    place = _opened(url)
    trusted = trust.required(place.shown)
    root = default_store()
    moved: list[str] = []
    problems: list[str] = []
    there = 0
    names = _in_time(place, Objects.names, VERSION)
    missing = f"{place.shown} does not contain an entry of it"
    for name in _selected(names, ops, problems, missing):
        folder = root.root / name.removesuffix(".opjit")
        if os.path.isdir(folder):
            # If it is damaged, its next use replaces it.
            there += 1
            continue
        try:
            received, _ = trusted.opened(_in_time(place, Objects.read, name, remote.MAX_BYTES))
            _, belongs = _checked(name, received)
        except FileNotFoundError:
            continue  # removed in the meantime
        except RemoteError:
            raise
        except OpjitError as error:
            problems.append(f"{name} is left out: {error}")
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
        moved.append(name)
        say(name)
    return TransferReport(moved, there, problems)


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
    with files.scratch_folder() as folder:
        report = push(f"file://{folder}", sign=sign, ops=ops)
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
        trees.pack_tree(path, {_ENTRIES: folder}, sign)
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
    with files.scratch_folder() as folder:
        roots = trees.open_tree(Path(path), folder)
        if _ENTRIES not in roots:
            raise RemoteError(f"{path!s} has no entries; pass it to `opjit run --tree`")
        return pull(f"file://{roots[_ENTRIES]}", say=say)


def _checked(name: str, content: Bundle) -> tuple[Manifest, Origin]:
    """Return the manifest of the entry in an object, and the op or library that it belongs to.

    Raises OpjitError if it is damaged, or if it belongs to another one.
    """
    manifest = manifests.parse(content.manifest)
    belongs = origin(manifest)
    if name != belongs.name or not re.fullmatch(_OBJECT, name):
        raise EntryError(
            f"it contains an entry of {belongs.title}, which is not the one in its name"
        )
    if manifest.document.get("made_by") != PARTS:
        check_binary(manifest, content.library, belongs.target)
    return manifest, belongs


def _selected(
    names: Iterable[str], ops: Sequence[str], problems: list[str], missing: str
) -> list[str]:
    """Return the objects of the named ops, or all objects.

    If an op lacks an object, `problems` gets the line `missing` for it.
    """
    folders = {(op if "::" in op else f"opjit::{op}").replace("::", "."): op for op in ops}
    chosen = [
        name
        for name in names
        if name.endswith(".opjit") and (not ops or name.split("/")[1] in folders)
    ]
    found = {name.split("/")[1] for name in chosen}
    problems += [
        f"{op} is left out: {missing}" for folder, op in folders.items() if folder not in found
    ]
    return chosen
