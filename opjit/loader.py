"""Verified libraries in this process: dlopen, registration with torch, reload and unregistration.

Opening a library has no effect on torch. torch keeps calling the first library that was registered; a newer build of the op is opened
beside it, and the first one redirects calls to it. Libraries are never closed, so threads never call code that is gone.
"""

from __future__ import annotations

import ctypes

from opjit.errors import LoadError
from opjit.store.entry import Entry


class Gone(LoadError):
    """The library was removed after it was verified."""


class Loaded:
    """An op's registration for one backend.

    Attributes:
        key: of the binary whose kernel runs now.
        registered: the library that torch calls.
    """

    def __init__(self, key: str, registered: ctypes.CDLL) -> None:
        self.key = key
        self.registered = registered

    def replace(self, entry: Entry, qualified: str) -> None:
        """Redirect calls to the kernel of a newer build."""
        if self.key == entry.key:
            return
        library = open_library(entry, qualified)
        library.opjit_prepare()
        self.registered.opjit_redirect(ctypes.cast(library.opjit_kernel, ctypes.c_void_p))
        self.key = entry.key

    def unload(self) -> None:
        """Unregister the kernel; the library stays mapped."""
        self.registered.opjit_unregister()


def load(entry: Entry, qualified: str) -> Loaded:
    """Open an entry's library and register its kernel with torch. Raises Gone if the library was removed, LoadError if the dynamic loader
    or torch rejected it."""
    library = open_library(entry, qualified)
    if library.opjit_register() != 0:
        raise LoadError(f"torch rejected the kernel of {qualified} in {entry.library}; torch's own message is on stderr")
    return Loaded(entry.key, library)


def open_library(entry: Entry, qualified: str) -> ctypes.CDLL:
    """Map an entry's library, without registering it. Raises Gone if it was removed, LoadError if the dynamic loader rejected it."""
    try:
        library = ctypes.CDLL(str(entry.library))  # RTLD_NOW and RTLD_LOCAL
        for name in ("opjit_register", "opjit_unregister"):
            getattr(library, name).restype = ctypes.c_int
        for name in ("opjit_prepare", "opjit_redirect"):
            getattr(library, name).restype = None
    except (OSError, AttributeError) as error:
        missing = str(error).startswith(f"{entry.library}: cannot open shared object file") or not entry.library.exists()
        raise (Gone if missing else LoadError)(f"the library of {qualified} cannot be loaded: {error}{advice(error)}") from None
    return library


def advice(error: Exception) -> str:
    """Return advice on an error of the dynamic loader, or an empty text."""
    if "failed to map segment" not in f"{error} {error.__cause__}":  # torch wraps it
        return ""
    return "; if its filesystem is mounted noexec, set OPJIT_CACHE to a folder of your own on another one"
