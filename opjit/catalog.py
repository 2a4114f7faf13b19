"""Every op that is declared in this process, by qualified name, and the folders that ops are found in.

An op that comes with opjit is declared when somebody first names it, to opjit or as ``torch.ops.opjit.<name>``. Another that is not
declared when it is asked for is looked for in the folders that OPJIT_PATH names, then in the installed packages that have an entry
point ``opjit.ops``. None is looked at before: a process pays for the ops that it uses.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from opjit import files, registration, resources
from opjit.errors import DeclarationError, UnknownOp
from opjit.op import Op

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "opjit.ops"

_ops: dict[str, Op] = {}
_bundled: dict[str, Path] = {}  # folders whose op.py has not run to its end, by name
_running: set[str] = set()  # those whose op.py runs now
_searched: set[str] = set()  # folders of OPJIT_PATH, and entry points, that were looked at
_searching = threading.RLock()
_searchers: list[int] = []  # the thread that holds it, as often as it does
_fresh: set[str] = set()  # ops that it found: their op.py may not have run to its end
_again = threading.local()  # .found: the declarations of an op.py that runs again


def _renew_locks() -> None:
    """A forked child has no thread that could free a lock that was held at the fork."""
    global _searching
    _searching = threading.RLock()
    _searchers.clear()
    _fresh.clear()
    for op in _ops.values():
        op.lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)


class _Namespace(torch._ops._OpNamespace):
    """``torch.ops.opjit``, which Python asks for names that nobody has asked it for before."""

    __module__ = torch._ops._OpNamespace.__module__  # from which torch makes the names of ops in exported programs

    def __getattr__(self, name: str) -> torch._ops.OpOverloadPacket:
        """Of threads that ask at once, torch would give each an operator of its own; so one makes it, and shows it when it is whole."""
        with registration.declaring:
            _declare_bundled(name)
            if name not in self.__dict__:
                packet = getattr(torch._ops._OpNamespace("opjit"), name)
                getattr(packet, "default", None)  # made when it is first asked for, too
                setattr(self, name, packet)
                self._dir.append(name)
            found: torch._ops.OpOverloadPacket = self.__dict__[name]
            return found

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(op.schema.name for op in all_ops() if op.schema.namespace == "opjit")})


def offer_bundled() -> None:
    """Let the ops that come with opjit, each folder of kernels_c with an op.py, be declared when they are first named."""
    if isinstance(torch.ops.opjit, _Namespace):
        return  # opjit is imported again
    root = resources.folder("kernels_c")
    _bundled.update((name, root / name) for name in sorted(os.listdir(root)) if os.path.isfile(root / name / "op.py"))
    torch.ops.opjit.__class__ = _Namespace


def _declare_bundled(name: str | None = None) -> None:
    """Run the op.py that has the op: that of the folder with its name, or with the beginning of it up to a ``_``; None is all of them.

    No other thread gets an op of a folder before its op.py is done.
    """
    if not _wanted(name):
        return
    with registration.declaring:
        for folder in _wanted(name):
            if folder not in _running:  # else it asks for its own op
                _running.add(folder)
                try:
                    declare_folder(_bundled[folder], "opjit_bundled")
                    del _bundled[folder]
                finally:
                    _running.discard(folder)


def _wanted(name: str | None) -> list[str]:
    return [folder for folder in list(_bundled) if name is None or f"{name}_".startswith(f"{folder}_")]


def add(declared: Op) -> Op:
    """Enter an op; a later declaration of the same name from the same folder takes the place of the earlier."""
    found: list[Op] | None = getattr(_again, "found", None)
    if found is not None:
        found.append(declared)
        return declared
    if threading.get_ident() in _searchers:
        _fresh.add(declared.qualified)
    with registration.declaring:
        registration.define(declared)
        _ops[declared.qualified] = declared
    return declared


def remove(declared: Op) -> None:
    """Take an op back that its op.py does not declare any more."""
    registration.forget(declared)
    _ops.pop(declared.qualified, None)


def declared(qualified: str) -> Op | None:
    """The op of a qualified name, if this process declared it, or opjit comes with it."""
    if qualified.startswith("opjit::"):
        _declare_bundled(qualified.removeprefix("opjit::"))
    return _ops.get(qualified)


def all_ops() -> list[Op]:
    """In the order of their names."""
    _declare_bundled()
    return [_ops[name] for name in sorted(_ops)]


def find(name: str) -> Op:
    """The op of a name; without a namespace, opjit's own.

    Raises:
        UnknownOp: with the names that look most like it.
        DeclarationError: OPJIT_PATH names something that is no folder of ops, or that others can write.
    """
    qualified = name if "::" in name else f"opjit::{name}"
    found = declared(qualified)
    if found is None or (qualified in _fresh and threading.get_ident() not in _searchers):  # then it waits for who declares it
        search(qualified)
        found = _ops.get(qualified)
    if found is None:
        short = [op.qualified.removeprefix("opjit::") for op in all_ops()]
        closest = difflib.get_close_matches(qualified.removeprefix("opjit::"), short, n=3, cutoff=0.5)
        raise UnknownOp(qualified, closest)
    return found


def search(qualified: str | None = None) -> None:
    """Declare the ops of OPJIT_PATH's folders, then those of installed packages, until an op is found; None is none: look at all."""
    with _search():
        if qualified in _ops:
            return
        for path in os.environ.get("OPJIT_PATH", "").split(os.pathsep):
            if path and path not in _searched:
                _add_named(path)
                _searched.add(path)
        if qualified is None or qualified not in _ops:
            _search_packages(qualified)


@contextmanager
def _search() -> Iterator[None]:
    """One thread at a time runs op.py files. What they declare is there for others when all have run to their ends."""
    with _searching:
        _searchers.append(threading.get_ident())
        try:
            yield
        finally:
            del _searchers[-1:]  # of a fork in it, the child has none
            if not _searchers:
                _fresh.clear()


def _add_named(path: str) -> None:
    """Add a folder that the environment names. Its op.py files are run, so nobody else may be able to write them."""
    folder = Path(os.path.expanduser(path))
    if not folder.is_absolute():
        raise DeclarationError(f"OPJIT_PATH names {path!r}, which would be another folder wherever the process starts; name it by its "
                               "absolute path")
    try:
        folders = _op_folders(folder)
        for each in (folder, *folders, *(each / "op.py" for each in folders)):
            problem = files.distrusted(each.resolve())
            if problem:
                raise DeclarationError(f"what is in it is not run: {problem}")
        add_path(folder)
    except (DeclarationError, OSError) as error:
        raise DeclarationError(f"OPJIT_PATH names {path!r}, and {error}") from error


def _search_packages(qualified: str | None) -> None:
    """Load entry points, those named like the op's namespace first, until the op is declared. One that fails is said once."""
    from importlib.metadata import entry_points

    namespace = (qualified or "").partition("::")[0]
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name != namespace, point.name)):
        if qualified in _ops:
            return
        if f"{point.name}={point.value}" in _searched:
            continue
        _searched.add(f"{point.name}={point.value}")
        try:
            _load(point)
        except Exception as error:
            origin = f" of {point.dist.name}" if point.dist else ""
            warnings.warn(f"the ops of the entry point {point.name} = {point.value}{origin} are not there: {type(error).__name__}: {error}",
                          RuntimeWarning, stacklevel=5)


def _load(point: EntryPoint) -> None:
    """Import what an entry point names. A module declares its ops itself; a package may be a folder of ops."""
    loaded = point.load()
    for path in getattr(loaded, "__path__", []):
        if _op_folders(Path(path)):
            add_path(path)


def add_path(folder: str | os.PathLike[str]) -> list[Op]:
    """Declare the ops of a folder by running its op.py; nothing is compiled.

    Args:
        folder: an op's folder, or a folder of such folders. An op.py that ran before does not run again.

    Returns:
        Its ops, in the order of their names.

    Raises:
        DeclarationError: there is no op in the folder, or one has a name that an op elsewhere has.

    Example:
        >>> opjit.add_path("my_ops")
        [<opjit op mylib::scale(Tensor x, float a) -> Tensor>]
        >>> opjit.get("mylib::scale")
    """
    place = Path(os.path.abspath(folder))
    if not place.is_dir():
        raise DeclarationError(f"there is no folder {place}")
    folders = _op_folders(place)
    if not folders:
        raise DeclarationError(f"no op is declared in {place}: expected op.py in it, or in a folder in it")
    found: list[Op] = []
    with _search():
        for file in (each / "op.py" for each in folders):
            real = file.resolve().parent
            if _bundled.get(real.name) == real:
                _declare_bundled(real.name)
            if not _declared_in(file):
                declare_folder(file.parent)
            found += _declared_in(file)
            if not _declared_in(file):
                raise DeclarationError(f"{file} declares no op: expected a function under @opjit.op")
    return sorted(found, key=lambda op: op.qualified)


def _declared_in(file: Path) -> list[Op]:
    real = file.resolve()
    return [op for op in list(_ops.values()) if op.file == real]


def _op_folders(place: Path) -> list[Path]:
    """The folder itself if it has an op.py, else those in it that have one."""
    if (place / "op.py").is_file():
        return [place]
    return sorted(each for each in place.iterdir() if (each / "op.py").is_file())


def declare_folder(folder: Path, whose: str = "opjit_ops") -> None:
    """Run a folder's op.py, which declares its ops, as a module. Pickle, dataclasses and others look what it defines up by its name."""
    name, file = f"{whose}_{folder.name}".replace(".", "_"), str(folder / "op.py")  # pickle would import what stands before a dot
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != file:  # of another folder of the same name
        name = f"{name}_{hashlib.sha256(os.fsencode(file)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None  # a .py file always has one
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # as after an import that failed
        raise


def read_again(op: Op) -> tuple[list[Op], ModuleType]:
    """Run the op.py that declares an op once more, beside what it declared: nothing changes for torch.

    Returns:
        Its declarations, and the new module.
    """
    name, stamp = op.fake.__module__, op.stamp_now()
    loader = SourceFileLoader(name, str(op.file))
    spec = importlib.util.spec_from_file_location(name, op.file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__package__ = getattr(sys.modules.get(name), "__package__", None)
    outer, _again.found = getattr(_again, "found", None), []
    try:
        # Compiled here: byte code that Python kept is known by a whole second, and somebody may save twice in it.
        exec(loader.source_to_code(Path(str(op.file)).read_bytes(), str(op.file)), module.__dict__)
        found: list[Op] = _again.found
    finally:
        _again.found = outer
    for each in found:
        each.stamp = stamp  # from before it was read
    return found, module


def named_on(names: Iterable[str], device: str | None, tell: Callable[[str], object]) -> Iterator[tuple[Op, str]]:
    """The ops that a user means, with each device that they are to run on; None is all that are here. An op that none is for is told of."""
    for op in (op for name in names for op in named(name)):
        devices = [device] if device else op.devices()
        if not devices:
            tell(f"{op.qualified} runs on no device that is here: it has kernels for {' and '.join(op.backends()) or 'nothing'}")
        yield from ((op, each) for each in devices)


def _refuse_strangers(folder: Path) -> None:
    """A user who names a folder of op folders may not mean each of them; one that is named itself is meant, whosever it is."""
    for place in (part for each in _op_folders(folder) for part in (each, each / "op.py")):
        status = place.stat()
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o002:
            whose = "can be written by everybody" if status.st_mode & 0o002 else f"belongs to user {status.st_uid}"
            raise DeclarationError(f"{folder} is a folder of op folders, and {place} {whose}, so none of them is run; name an op's own "
                                   "folder")


def named(text: str) -> list[Op]:
    """What a user means at the command line: an op's name, or the path of a folder, whose ops need not be on any path.

    Raises:
        UnknownOp, DeclarationError: there is no such op, or none in the folder; or it is a folder of op folders, such as /tmp, with one
            of somebody else's.
    """
    path = Path(text)
    is_path = os.sep in text or text in (".", "..")
    if is_path or ("::" not in text and declared(f"opjit::{text}") is None and (path / "op.py").is_file()):
        if path.is_dir() and not (path / "op.py").is_file() and _op_folders(path):
            _refuse_strangers(path)
        return add_path(path)
    return [find(text)]
