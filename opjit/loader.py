"""Verified libraries in this process: dlopen, registration with torch, reload, and taking it back.

A library does nothing when it is opened. torch keeps the first library's entry for good; a newer build of the same op is
opened beside it and the entry is told to jump there, so that no thread in flight meets a kernel that went away. Nothing is
ever closed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from opjit import files
from opjit.errors import CacheWarning, EntryError, LoadError
from opjit.store import Entry, Store, verify

# What every op's library defines.
FUNCTIONS = ("opjit_register", "opjit_unregister", "opjit_prepare", "opjit_redirect", "opjit_kernel")
_NOEXEC = "failed to map segment"  # in the dynamic loader's message where a filesystem is mounted noexec
_LOOKS = 2
T = TypeVar("T")
_ADVICE = "set OPJIT_CACHE to a folder of yours on a filesystem without noexec"


class Gone(LoadError):
    """The library was removed after it was verified."""


class Loaded:
    """An op's registration for one backend.

    Attributes:
        key: of the binary whose kernel is called now.
        registered: the library that torch calls into.
    """

    def __init__(self, key: str, registered: ctypes.CDLL) -> None:
        self.key = key
        self.registered = registered


def found(look: Callable[[Store | None], Entry], use: Callable[[Entry], T], known: Entry | None = None) -> tuple[Entry, T]:
    """An entry, and what is made of it.

    Somebody may clear the cache between the look and the use: then it is looked for again, and at last built where nobody clears.

    Args:
        look: finds or builds the entry; in a store, or in the user's for None.
        use: raises `Gone` where the entry went away.
        known: what was found already; the first look.
    """
    for _ in range(_LOOKS):
        entry, known = known or look(None), None
        with suppress(Gone):
            return entry, use(entry)
    entry = look(Store(files.until_exit()))
    return entry, use(entry)


def load(entry: Entry, qualified: str) -> Loaded:
    """Open an entry's library and make its kernel torch's.

    Raises:
        Gone: it is not there any more.
        LoadError: the dynamic loader or torch refused it.
    """
    library = open_library(entry, qualified)
    if library.opjit_register() != 0:
        raise LoadError(f"torch refused the kernel of {qualified} in {entry.library}; torch's own message is on stderr")
    return Loaded(entry.key, library)


def replace(loaded: Loaded, entry: Entry, qualified: str) -> None:
    """From now on, call the kernel of a newer build."""
    if loaded.key == entry.key:
        return
    library = open_library(entry, qualified)
    library.opjit_prepare()
    loaded.registered.opjit_redirect(ctypes.cast(library.opjit_kernel, ctypes.c_void_p))
    loaded.key = entry.key


def unload(loaded: Loaded) -> None:
    """Take the registration back; the library stays mapped."""
    loaded.registered.opjit_unregister()


def open_library(entry: Entry, qualified: str) -> ctypes.CDLL:
    """Map an entry's library; it does nothing yet.

    Raises:
        Gone: it is not there any more.
        LoadError: the dynamic loader refused it.
    """
    try:
        try:
            library = ctypes.CDLL(str(entry.library))  # RTLD_NOW and RTLD_LOCAL
        except OSError as error:
            library = ctypes.CDLL(str(elsewhere(entry, error)))
        for name in ("opjit_register", "opjit_unregister"):
            getattr(library, name).restype = ctypes.c_int
        for name in ("opjit_prepare", "opjit_redirect"):
            getattr(library, name).restype = None
    except (OSError, AttributeError) as error:
        advice = f"; {_ADVICE}" if _NOEXEC in str(error) else ""
        missing = str(error).startswith(f"{entry.library}: cannot open shared object file") or not entry.library.exists()
        raise (Gone if missing else LoadError)(f"the library of {qualified} cannot be loaded: {error}{advice}") from None
    return library


def elsewhere(entry: Entry, error: Exception) -> Path:
    """The library of an entry whose own filesystem lets nobody run programs (noexec): copied to the user's own temporary cache.

    Args:
        error: of the dynamic loader.

    Raises:
        type(error): it is another error than that one.
        LoadError: there is no place for a copy.
    """
    if _NOEXEC not in f"{error} {error.__cause__}":  # torch wraps it
        raise error
    import tempfile
    import warnings

    from opjit import bundle

    place = Path(tempfile.gettempdir()) / f"opjit-{os.geteuid()}"
    copies = Store(place / "cache")
    folder = copies.base / entry.folder.parent.parent.name / entry.folder.parent.name / entry.key
    try:
        if folder == entry.folder:
            raise EntryError("that is where it lies")
        files.make_private(place)
        problem = files.distrusted(place)
        if problem:
            raise EntryError(problem)
        try:
            library = verify(folder, None)[0].library
        except (OSError, EntryError):
            library = copies.receive(bundle.of(entry.folder), folder, None).library
    except (OSError, EntryError) as trouble:
        raise LoadError(f"{entry.library} lies on a filesystem that runs no programs (noexec), and no copy of it can be loaded "
                        f"from {place}: {trouble}; {_ADVICE}") from None
    warnings.warn(CacheWarning(f"{entry.library} lies on a filesystem that runs no programs (noexec), so a copy in {place} is loaded; "
                               f"{_ADVICE}"), stacklevel=2)
    return library
