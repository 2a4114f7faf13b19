"""The remote: entries that others have built, asked for before an op is built here. It may help, and can never harm.

    <url>/v1/<namespace>.<op>/<arch>/<key>.opjit    an entry, as bundle.py writes it
    <url>/v1/<namespace>.<op>/<arch>/<base>.key     for machines without a compiler, which know no key: the key of an entry that was
                                                    built from what `base` is the hash of, by whichever compiler

What comes from there is bounded in time and size, and held against a trusted signature before anything of it is parsed or written.
After any failure but «not there» the remote is out for the rest of the process, which is told once.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import warnings
from collections.abc import Callable
from typing import TypeVar

from opjit import bundle, files, manifest, trust
from opjit.bundle import Bundle
from opjit.errors import CacheWarning, EntryError, RemoteError
from opjit.manifest import Manifest
from opjit.objects import Objects, in_time
from opjit.recipe import Recipe
from opjit.store import Entry, Store, check_library
from opjit.targets import Target
from opjit.trust import Trust

MAX_BYTES = 64 << 20  # of an object: more would not arrive in time
_POINTER_BYTES = 80
_KEY = re.compile(rb"[0-9a-f]{64}\n?")
# Seconds that a remote may take from a process before it is given up, with the import of what speaks its protocol; but it gets
# _AT_LEAST for itself, which a slow object store needs (a client made, two round trips of 0.2 s).
_IN_ALL = 0.9
_AT_LEAST = 0.6
_Read = Callable[[str, int], bytes]
_Result = TypeVar("_Result")
_out: dict[tuple[str, str], object] = {}  # remotes that failed, with what was trusted then


def fetch(recipe: Recipe, store: Store) -> Entry | None:
    """The entry of a recipe from the remote that OPJIT_REMOTE names, put into the store, or into a folder of this process's own where
    the store cannot be written. None is a miss; trouble is a miss with one CacheWarning, and the remote is not asked again.

    Example:
        >>> os.environ.update(OPJIT_REMOTE="https://cache.example.org/opjit", OPJIT_TRUST="/etc/opjit/ci.pub")
        >>> opjit.get("allreduce")  # fetched instead of built, if it is there
    """
    objects = Objects(os.environ["OPJIT_REMOTE"])
    asked = (objects.url, os.environ.get("OPJIT_TRUST", ""))
    if asked in _out:
        return None
    try:
        found = _ask(objects, lambda read, trusted: look_up(recipe, read, trusted))
    except Exception as error:  # whatever a network, its libraries and hostile bytes can do: the op is built
        token = object()
        if _out.setdefault(asked, token) is token:
            warnings.warn(CacheWarning(f"the remote {objects.shown} is not used by this process: {reason(error)}. Ops that are in "
                                       "no cache are built here"), stacklevel=2)
        return None
    return None if found is None else _keep(found[0], found[1], recipe, store)


def trouble() -> str | None:
    """Why the remote that OPJIT_REMOTE names gives this process nothing; None if it answers. Takes about a second at most."""
    objects = Objects(os.environ.get("OPJIT_REMOTE", ""))
    try:
        _ask(objects, lambda read, trusted: read(f"v1/opjit.nothing/none/{'0' * 64}.key", _POINTER_BYTES))
    except FileNotFoundError:
        return None
    except Exception as error:
        return reason(error)
    return None


def holds(recipe: Recipe) -> bool:
    """Whether the remote that OPJIT_REMOTE names has a recipe's entry, and it may be believed. Nothing is kept.

    Raises:
        Exception: as `trouble` tells it in words, or that what is there is refused; see `reason`.
    """
    return _ask(Objects(os.environ["OPJIT_REMOTE"]), lambda read, trusted: look_up(recipe, read, trusted)) is not None


def required_trust() -> Trust:
    """What OPJIT_TRUST says.

    Raises:
        RemoteError: it says nothing, or cannot be understood.
    """
    trusted = trust.configured()
    if trusted is None:
        raise RemoteError("nothing from it is trusted: set OPJIT_TRUST to the public key of whoever pushes there (`opjit keygen` makes "
                          "a pair), or to `unsigned` to run whatever is there")
    return trusted


def _ask(objects: Objects, call: Callable[[_Read, Trust], _Result]) -> _Result:
    """Let a function read from the remote, for as long as a process that only wants an op can wait."""
    started = time.monotonic()
    objects.check()  # first: a key would not help where there is no remote
    trusted = required_trust()
    objects.load()
    seconds = max(_IN_ALL - (time.monotonic() - started), _AT_LEAST)
    until = time.monotonic() + seconds
    return in_time(lambda: call(lambda name, limit: objects.read(name, limit, until), trusted), seconds)


def look_up(recipe: Recipe, read: _Read, trusted: Trust) -> tuple[str, Bundle] | None:
    """The key and the entry that a recipe asks for, checked in every way that needs no file; None if it is not there.

    Args:
        read: the bytes of an object, by its name and the most that it may have.

    Raises:
        EntryError: what is there may not be trusted, or is not what was asked for.
        Exception: what `read` raises.
    """
    folder = folder_name(recipe.schema.qualified, recipe.target)
    try:
        key = recipe.key or _pointed(read(f"{folder}/{recipe.base}.key", _POINTER_BYTES))
        found = bundle.parse(read(f"{folder}/{key}.opjit", MAX_BYTES))
    except FileNotFoundError:
        return None
    trusted.check(found)
    described = manifest.parse(found.manifest)
    examine(described, found.library, key, recipe.target)
    if described.document != {**recipe.document(), "toolchain": described.document.get("toolchain")}:
        raise EntryError("the entry was built from something else than what was asked for")
    return key, found


def _pointed(content: bytes) -> str:
    if not _KEY.fullmatch(content):
        raise EntryError("what should name a key does not")
    return content[:64].decode("ascii")


def folder_name(qualified: str, target: Target) -> str:
    """The name that the objects of an op for a target start with."""
    return f"v1/{qualified.replace('::', '.')}/{target.folder}"


def examine(described: Manifest, library: bytes, key: str, target: Target) -> None:
    """Hold an entry's parts against each other, its key and its target.

    Raises:
        EntryError: they do not fit.
    """
    if described.key != key:
        raise EntryError("it is the entry of another key")
    if len(library) != described.size or hashlib.sha256(library).hexdigest() != described.sha256:
        raise EntryError("its library is not the one that its manifest names")
    check_library(library, target, described.link)


def _keep(key: str, found: Bundle, recipe: Recipe, store: Store) -> Entry | None:
    qualified, target = recipe.schema.qualified, recipe.target
    try:
        return store.receive(found, store.folder(qualified, target) / key, target)
    except (OSError, EntryError) as error:
        warnings.warn(CacheWarning(f"the cache cannot be used, so {qualified} is kept for this process only: {error}. Set OPJIT_CACHE to a "
                                   "folder of your own"), stacklevel=2)
    try:
        private = Store(files.until_exit())
        return private.receive(found, private.folder(qualified, target) / key, target)
    except (OSError, EntryError):
        return None  # a build will say what is wrong with the temporary folder


def reason(error: Exception) -> str:
    """An error of a network library or of a server in a few words that can be printed."""
    inner = getattr(error, "reason", None)  # of urllib's
    text = str(inner if inner is not None else error) or type(error).__name__
    if isinstance(error, PermissionError) or " 403 " in text:
        text += " (object stores answer so for what is not there, too, unless this user may list the bucket)"
    return "".join(character if character.isprintable() else "?" for character in text)[:400]
