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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from opjit import progress
from opjit.errors import EntryError, warn_of_cache
from opjit.recipe.build_inputs import BuildInputs
from opjit.recipe.document import base_key
from opjit.share import trust
from opjit.share.transport import Objects, with_timeout
from opjit.share.trust import Trust
from opjit.store import manifest as manifests
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
_Check = Callable[[str, bytes, Manifest], bool]  # of an object by its key, library and manifest
_failed: set[tuple[str, str]] = set()  # remotes that failed, with OPJIT_TRUST at that time


def fetch(ways: Sequence[BuildInputs], store: Store) -> Entry | None:
    """Fetch an entry of any of `ways`, which have one base key, from OPJIT_REMOTE.

    Returns None if it is not there, or if the remote fails.
    """
    first = ways[0]
    target = first.op_target
    keys = [way.key for way in ways]  # without compilers, the key is the base key
    if target is not None and target.backend.uses_nvcc:
        keys.append(first.base)  # of binaries of compilers that are not here

    def fits(key: str, library: bytes, manifest: Manifest) -> bool:
        check_binary(manifest, library, target)
        if manifest.key != key or base_key(manifest.document) != first.base:
            raise EntryError(MISMATCH)
        return any(way.fits(manifest.document) for way in ways)

    seconds = _EXTENSION if target is None else _AT_LEAST
    received = _fetched(first.place_of_entries, keys, fits, seconds)
    if received is None:
        return None
    folder = store.base / first.place_of_entries / manifests.parse(received.manifest).key
    try:
        entry = store.receive_or_keep(received, folder, target, str(first))
    except (OSError, EntryError):
        return None  # the build will report the problem with the temporary folder
    usage.count(store.base, "fetches")
    progress.log(f"{first} came from the remote: {entry.folder}")
    return replace(entry, origin="remote")


def fetch_parts(name: str) -> Bundle | None:
    """Fetch shared parts by their name, and check all but the files that made them. Returns None like `fetch`."""
    folder, _, name_in_folder = f"{PARTS}/{name}".rpartition("/")

    def fits(key: str, library: bytes, manifest: Manifest) -> bool:
        if manifest.document.get("name") != name:
            raise EntryError(MISMATCH)
        return True

    return _fetched(folder, [name_in_folder], fits, _EXTENSION)


def _fetched(folder: str, pointers: Sequence[str], fits: _Check, seconds: float) -> Bundle | None:
    """Return the first object in a remote's directory to which a pointer leads and that `fits`, or None.

    The object gets `seconds` once a pointer shows that the remote answers. After a failure, warn once and stop using the remote.
    """
    named = Objects(os.environ["OPJIT_REMOTE"])
    identity = (named.url, os.environ.get("OPJIT_TRUST", ""))
    if identity in _failed:
        return None
    try:
        objects, trusted = _connected(named)
        keys: list[str] = []
        for pointer in dict.fromkeys(pointers):
            with suppress(FileNotFoundError):
                name = f"{VERSION}/{folder}/{pointer}.key"
                keys += pointed(_read_in_time(objects, name, _POINTER_BYTES))
        objects = objects.within(seconds)
        for key in dict.fromkeys(keys):
            with suppress(FileNotFoundError):
                content = _read_in_time(objects, f"{VERSION}/{folder}/{key}.opjit", MAX_BYTES)
                found, manifest = trusted.opened(content)
                if fits(key, found.library, manifest):
                    return found
    except Exception as error:  # a failing network or hostile bytes must not prevent the build
        if identity not in _failed:
            _failed.add(identity)
            warn_of_cache(
                f"the remote {named.shown} failed and is not used again: {reason(error)}. Missing entries are built "
                "by this process"
            )
    return None


def _connected(objects: Objects) -> tuple[Objects, Trust]:
    """Return a remote that is ready for the first requests, with a time limit, and the keys that it needs."""
    started = time.monotonic()
    objects.load()  # first, because a key is useless without a remote
    trusted = trust.required()
    return objects.within(max(_IN_ALL - (time.monotonic() - started), _AT_LEAST)), trusted


def _read_in_time(objects: Objects, name: str, limit: int) -> bytes:
    """Read an object within the remote's time limit."""
    return with_timeout(lambda: objects.read(name, limit), objects.until - time.monotonic())


def problem() -> str | None:
    """Return the reason why OPJIT_REMOTE cannot be used, or None if it answers.

    The check lasts at most about a second.
    """
    try:
        objects, _ = _connected(Objects(os.environ.get("OPJIT_REMOTE", "")))
        with suppress(FileNotFoundError):
            _read_in_time(objects, f"{VERSION}/opjit.nothing/none/{'0' * 64}.key", _POINTER_BYTES)
    except Exception as error:
        return reason(error)
    return None


def pointed(content: bytes) -> list[str]:
    """Return the keys in a pointer.

    Raises EntryError if it contains anything else.
    """
    if len(content) > _POINTER_BYTES or not re.fullmatch(_KEYS, content):
        raise EntryError("its pointer does not contain a key")
    return content.decode().split()


def reason(error: Exception) -> str:
    """Make an error of a network library or a server short and printable."""
    text = str(getattr(error, "reason", error)) or type(error).__name__  # urllib's have a reason
    if " 401 " in text:
        text += " (for a registry, run `docker login`)"
    if isinstance(error, PermissionError) or " 403 " in text:
        text += " (object stores also give this answer for a missing object if this user may not list the bucket)"
    return "".join(character if character.isprintable() else "?" for character in text)[:400]
