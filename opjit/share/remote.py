"""The remote: a store of entries from other machines, which is tried before an op is built here.
store/FORMAT.md lists the names of its objects.

The key of a C++ extension also covers headers that only its build finds. Therefore a request reads
a pointer, which is named by the inputs that are known before the build. The pointer lists a few
entries, and each of them is compared with the files of this machine, like an entry of the store. An
answer is bounded in time and size, and its signature is checked before anything in it is parsed or
written. After any failure except "not found", the process warns once and stops using the remote.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from opjit import files, progress
from opjit.backends.targets import Target
from opjit.errors import EntryError, RemoteError, warn_of_cache
from opjit.recipe.build_inputs import BuildInputs
from opjit.recipe.document import base_key
from opjit.share import trust
from opjit.share.transport import Objects, with_timeout
from opjit.share.trust import Trust
from opjit.store import usage
from opjit.store.bundle import Bundle
from opjit.store.entry import Entry, check_binary
from opjit.store.manifest import Manifest
from opjit.store.store import PARTS, VERSION, Store

MAX_BYTES = 64 << 20  # of an object; a larger one would not arrive in time
MOST_KEYS = 8  # in a pointer
MISMATCH = "the entry was built from other sources, flags or targets than the requested one"
_POINTER_BYTES = 65 * MOST_KEYS
_KEYS = rb"[0-9a-f]{64}(\n[0-9a-f]{64})*\n?"
# Seconds until a request to the remote is given up, including the import of its protocol. Reading
# gets _AT_LEAST, because a slow object store needs it (for example, a new client and two round
# trips of 0.2 s).
_IN_ALL = 0.9
_AT_LEAST = 0.6
_EXTENSION = 20.0  # seconds for an extension or parts that a pointer names: they are larger than an op and slower to build
_Read = Callable[[str, int], bytes]
_Result = TypeVar("_Result")
_failed: set[tuple[str, str]] = set()  # remotes that failed, with OPJIT_TRUST at that time


def fetch(ways: Sequence[BuildInputs], store: Store) -> Entry | None:
    """Fetch an entry of any of `ways`, which have one base key, from OPJIT_REMOTE.

    Returns None if it is not there, or if the remote fails.
    """
    found = _unless_failed(lambda objects: _ask(ways, objects))
    if found is None:
        return None
    key, received = found
    first = ways[0]
    folder = store.base / first.place_of_entries / key
    try:
        entry = store.receive_or_keep(received, folder, first.op_target, str(first))
    except (OSError, EntryError):
        return None  # the build will report the problem with the temporary folder
    usage.count(store.base, "fetches")
    progress.log(f"{first} came from the remote: {entry.folder}")
    return replace(entry, origin="remote")


def fetch_parts(name: str) -> Bundle | None:
    """Fetch shared parts by their name, and check all but the files that made them. Returns None like `fetch`."""

    place = f"{VERSION}/{PARTS}/{name}"

    def ask(objects: Objects) -> Bundle | None:
        try:
            _read_from(objects, lambda read, trusted: read(f"{place}.key", _POINTER_BYTES))
            found, manifest = _read_from(
                objects,
                lambda read, trusted: trusted.opened(read(f"{place}.opjit", MAX_BYTES)),
                _EXTENSION,
            )
        except FileNotFoundError:
            return None
        examine(manifest, found.library, manifest.key, None)
        if manifest.document.get("name") != name:
            raise EntryError(MISMATCH)
        return found

    return _unless_failed(ask)


def _unless_failed(ask: Callable[[Objects], _Result | None]) -> _Result | None:
    """Ask the remote. After a failure, warn once, return None, and stop using the remote."""
    objects = Objects(os.environ["OPJIT_REMOTE"])
    identity = (objects.url, os.environ.get("OPJIT_TRUST", ""))
    if identity in _failed:
        return None
    try:
        return ask(objects)
    except Exception as error:  # a failing network or hostile bytes must not prevent the build
        if identity not in _failed:
            _failed.add(identity)
            warn_of_cache(
                f"the remote {objects.shown} failed and is not used again: {reason(error)}. Missing entries are built "
                "by this process"
            )
        return None


def _ask(ways: Sequence[BuildInputs], objects: Objects) -> tuple[str, Bundle] | None:
    """Look up an entry within the time limits above. An extension's gets more time once a pointer shows that the remote answers."""
    keys = dict.fromkeys(_read_from(objects, lambda read, trusted: [*_keys(ways, read)]))
    if not keys:
        return None
    seconds = _EXTENSION if ways[0].op_target is None else _AT_LEAST
    return _read_from(objects, lambda read, trusted: _look_up(ways, keys, read, trusted), seconds)


def _object(ways: Sequence[BuildInputs], name: str) -> str:
    """Return the whole name of an object: a pointer, or an entry."""
    return f"{VERSION}/{ways[0].place_of_entries}/{name}"


def _keys(ways: Sequence[BuildInputs], read: _Read) -> Iterator[str]:
    """Yield the keys of entries in the pointers of a request, the preferred first."""
    keys = [way.key for way in ways]  # without compilers, the key is the base key
    target = ways[0].op_target
    if target is not None and target.backend.uses_nvcc:
        keys.append(ways[0].base)  # of binaries of compilers that are not here
    for key in dict.fromkeys(keys):
        with suppress(FileNotFoundError):
            yield from pointed(read(_object(ways, f"{key}.key"), _POINTER_BYTES))


def problem() -> str | None:
    """Return the reason why OPJIT_REMOTE cannot be used, or None if it answers.

    The check lasts at most about a second.
    """
    objects = Objects(os.environ.get("OPJIT_REMOTE", ""))
    try:
        with suppress(FileNotFoundError):
            _read_from(
                objects,
                lambda read, trusted: read(
                    f"{VERSION}/opjit.nothing/none/{'0' * 64}.key", _POINTER_BYTES
                ),
            )
    except Exception as error:
        return reason(error)
    return None


def required_trust(source: str = "it") -> Trust:
    """Read OPJIT_TRUST. Raises RemoteError, for entries from `source`, if it is missing or invalid."""
    trusted = trust.configured()
    if trusted is None:
        raise RemoteError(
            f"nothing from {source} is trusted: set OPJIT_TRUST to the public key of its publisher (`opjit keygen` makes a "
            "pair), or to `unsigned` to run any binary from it"
        )
    return trusted


def _read_from(
    objects: Objects, call: Callable[[_Read, Trust], _Result], at_least: float = _AT_LEAST
) -> _Result:
    started = time.monotonic()
    objects.load()  # first, because a key is useless without a remote
    trusted = required_trust()
    seconds = max(_IN_ALL - (time.monotonic() - started), at_least)
    until = time.monotonic() + seconds
    return with_timeout(
        lambda: call(lambda name, limit: objects.read(name, limit, until), trusted), seconds
    )


def _look_up(
    ways: Sequence[BuildInputs], keys: Iterable[str], read: _Read, trusted: Trust
) -> tuple[str, Bundle] | None:
    """Return the key and the requested entry, checked, or None.

    Raises the errors of `read`, and EntryError if the entry is not trusted or is a different one.
    """

    for key in keys:
        try:
            content = read(_object(ways, f"{key}.opjit"), MAX_BYTES)
        except FileNotFoundError:
            continue
        found, manifest = trusted.opened(content)
        examine(manifest, found.library, key, ways[0].op_target)
        if base_key(manifest.document) != ways[0].base:
            raise EntryError(MISMATCH)
        if any(way.fits(manifest.document) for way in ways):
            return key, found
    return None


def pointed(content: bytes) -> list[str]:
    """Return the keys in a pointer.

    Raises EntryError if it contains anything else.
    """
    if len(content) > _POINTER_BYTES or not re.fullmatch(_KEYS, content):
        raise EntryError("its pointer does not contain a key")
    return content.decode("ascii").split()


def examine(manifest: Manifest, library: bytes, key: str, target: Target | None) -> None:
    """Compare an entry's parts with each other, with its key and, for an op, with its target.

    Raises EntryError if they differ.
    """
    if manifest.key != key:
        raise EntryError("it has another key")
    if len(library) != manifest.size or files.sha256(library) != manifest.sha256:
        raise EntryError("its library does not have the SHA-256 in its manifest")
    if manifest.document.get("made_by") != PARTS:
        check_binary(manifest, library, target)


def reason(error: Exception) -> str:
    """Make an error of a network library or a server short and printable."""
    inner = getattr(error, "reason", None)  # of urllib's
    text = str(inner if inner is not None else error) or type(error).__name__
    if isinstance(error, PermissionError) or " 403 " in text:
        text += " (object stores also give this answer for a missing object if this user may not list the bucket)"
    return "".join(character if character.isprintable() else "?" for character in text)[:400]
