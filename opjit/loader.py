"""Verified libraries in this process: dlopen, registration with torch, reload and unregistration.

`pinned` opens the very file that was verified. Opening a library does not change torch. torch keeps
calling the first library that was registered. If the op is built again, the new library is opened
next to it, and the first library redirects calls to the new one. Libraries are never closed, so
threads never call code that is gone.
"""

import ctypes
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opjit import files, processes
from opjit.errors import LoadError
from opjit.store.entry import Entry

_DLINFO_LINKMAP = 2  # RTLD_DI_LINKMAP
_numbers = itertools.count(1)
# The address at which the first op's library counts interrupts for all libraries, because a process
# has a single handler. See `opjit_interrupted` in opjit.h.
_interrupts: int | None = None
# The functions of an op's library, with the types of the result and of the arguments.
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "opjit_register": (ctypes.c_int, ()),
    "opjit_unregister": (ctypes.c_int, ()),
    "opjit_prepare": (None, ()),
    "opjit_enable_variants": (None, ()),
    "opjit_redirect": (None, (ctypes.c_void_p,)),
    "opjit_set_variant": (None, (ctypes.c_uint64, ctypes.c_void_p)),
    "opjit_force_variant": (ctypes.c_uint64, (ctypes.c_void_p,)),
    "opjit_share_groups": (None, (ctypes.c_void_p,)),
    "opjit_share_interrupts": (ctypes.c_void_p, (ctypes.c_void_p,)),
}
_sharing = processes.Lock()
# The address of the newest group of ranks, which every op's library reads; see opjit_peers.h. `opjit.distributed` adds groups in front.
first_group = ctypes.c_void_p()


class Gone(LoadError):
    """The library was removed or replaced after it was verified."""


class Loaded:
    """An op's registration for one backend: key and kernel of the binary that runs now, and the library that torch calls."""

    def __init__(self, key: str, registered: ctypes.CDLL) -> None:
        self.key = key
        self.registered = registered
        self.kernel = _kernel(registered)
        self.variants: dict[str, int] = {}  # kernels of variants that were opened
        self.unbind_autograd: Callable[[], None] | None = (
            None  # unregisters autograd's kernel in C++, if the op has it
        )

    def replace(self, entry: Entry, qualified: str) -> None:
        if self.key == entry.key:
            return
        self.kernel = open_kernel(entry, qualified)
        self.registered.opjit_redirect(self.kernel)
        self.key = entry.key
        self.variants.clear()

    def unload(self) -> None:
        if self.unbind_autograd is not None:
            self.unbind_autograd()
        self.registered.opjit_unregister()


def load(entry: Entry, qualified: str, before: Iterable[str] = ()) -> Loaded:
    """Open an entry's library like `open_library`, and register its kernel.

    Raises Gone, or LoadError if torch rejects it.
    """
    library = open_library(entry, qualified, before)
    if library.opjit_register() != 0:
        raise LoadError(
            f"torch rejected the kernel of {qualified} in {entry.library}; see torch's message on "
            "stderr"
        )
    return Loaded(entry.key, library)


def open_kernel(entry: Entry, qualified: str, before: Iterable[str] = ()) -> int:
    """Map an entry's library like `open_library`, and return its kernel's address."""
    library = open_library(entry, qualified, before)
    library.opjit_prepare()
    return _kernel(library)


def _kernel(library: ctypes.CDLL) -> int:
    return ctypes.cast(library.opjit_kernel, ctypes.c_void_p).value or 0


def open_library(entry: Entry, qualified: str, before: Iterable[str] = ()) -> ctypes.CDLL:
    """Map an entry's library, unregistered, after the shared ones in `before`. Raises Gone if it was removed, LoadError if it fails."""
    global _interrupts
    path = str(entry.library)
    try:
        for each in before:
            ctypes.CDLL(each)
        with pinned(entry) as path:
            library = ctypes.CDLL(path)  # RTLD_NOW and RTLD_LOCAL
        name_as(library, entry.library)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
        library.opjit_share_groups(ctypes.addressof(first_group))
        with _sharing:
            _interrupts = library.opjit_share_interrupts(_interrupts)
    except (OSError, AttributeError) as error:
        raise LoadError(
            f"the library of {qualified} cannot be loaded: {explained(error, path, entry.library)}"
        ) from None
    return library


@contextmanager
def pinned(entry: Entry) -> Iterator[str]:
    """Yield a path that leads to the very file that was verified while the block runs. Raises Gone if its name has another file by now."""
    try:
        descriptor = os.open(
            entry.library, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
    except OSError as error:
        raise Gone(f"{entry.library} was removed after it was verified: {error}") from None
    try:
        if files.inode_signature(descriptor) != entry.verified:
            raise Gone(f"{entry.library} was replaced after it was verified")
        path = _unseen_path(descriptor)
        if not _leads_to(path, descriptor):  # no /proc, for example in a chroot
            path = str(entry.library)
        yield path
    finally:
        os.close(descriptor)


def _unseen_path(descriptor: int) -> str:
    """Return a path of an open file that dlopen has not seen.

    If dlopen has opened a path before, it returns the library that it opened there, even if the
    path leads to another file by now. ``/`` and ``./`` lead nowhere else, so they spell a counter
    in binary: the millionth path of a process is 40 characters longer than the first.
    """
    number = f"{next(_numbers):b}"
    spelled = number.replace("0", "/").replace("1", "./")
    return f"/proc/{os.getpid()}/fd/{spelled}{descriptor}"  # a debugger has another /proc/self


def _leads_to(path: str, descriptor: int) -> bool:
    try:
        return os.path.samefile(path, descriptor)
    except OSError:
        return False


class _LinkMap(ctypes.Structure):
    """The start of the dynamic loader's description of a library, which is public."""

    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_void_p))


def name_as(library: ctypes.CDLL, path: Path) -> None:
    """Set the path of a library that debuggers and backtraces show, and that a later dlopen of the path finds."""
    libc = ctypes.CDLL(None)
    libc.strdup.restype = ctypes.c_void_p
    link_map = ctypes.POINTER(_LinkMap)()
    handle = ctypes.c_void_p(library._handle)
    if libc.dlinfo(handle, _DLINFO_LINKMAP, ctypes.byref(link_map)) == 0:
        # Never freed: the loader uses the name for as long as the library is open, which is forever.
        link_map.contents.name = libc.strdup(os.fsencode(path))
    library._name = str(path)


def explained(error: Exception, path: str, library: Path) -> str:
    """Return the text of the dynamic loader's error with the path of the library in the cache, and with advice."""
    text = str(error).replace(path, str(library))
    if "failed to map segment" not in f"{error} {error.__cause__}":  # torch wraps it
        return text
    return f"{text}; if its filesystem is mounted noexec, set OPJIT_CACHE to a directory on another filesystem"
