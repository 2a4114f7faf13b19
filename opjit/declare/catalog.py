"""The ops declared in this process, by qualified name, and the folders that they are found in.

`import opjit` declares the bundled ops. A request for any other op searches the folders in OPJIT_PATH, then the installed packages
with an entry point ``opjit.ops``; neither is read before.
"""

from __future__ import annotations

import copyreg
import difflib
import hashlib
import importlib.util
import inspect
import os
import sys
import threading
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from opjit import files, processes, resources
from opjit.declare import registration
from opjit.declare.op import Function, Op
from opjit.errors import DeclarationError, UnknownOp

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "opjit.ops"

_ops: dict[str, Op] = {}
_searched: set[str] = set()  # folders in OPJIT_PATH and entry points that have been read


class _Thread(threading.local):
    """One thread's view of the catalog.

    Attributes:
        ops: all published ops, and before them those of the op.py that this thread is running.
        rerun: collects the declarations of an op.py that runs again; None while none does.
    """

    def __init__(self) -> None:
        self.ops: ChainMap[str, Op] = ChainMap(_ops)
        self.rerun: list[Op] | None = None


_thread = _Thread()


@contextmanager
def _publishing() -> Iterator[None]:
    """Publish the ops that the block declares when it ends, so that no other thread sees one half declared. An op goes if its module
    raised, as Python then forgets the module."""
    with processes.reading:
        outer = _thread.ops
        _thread.ops = outer.new_child()
        declared = _thread.ops.maps[0]
        try:
            yield
        finally:
            _thread.ops = outer
            for name, op in declared.items():
                if op.file is None or op.fake.__module__ in sys.modules:
                    outer[name] = op
                else:
                    remove(op)


def add(newer: Op) -> Op:
    """Enter an op; it replaces an earlier declaration of the same name from the same folder."""
    if _thread.rerun is not None:
        _thread.rerun.append(newer)
        return newer
    with processes.declaring:
        registration.define(newer, declared(newer.qualified))
        _thread.ops[newer.qualified] = newer
    return newer


def remove(op: Op) -> None:
    """Take back an op that its op.py no longer declares."""
    registration.forget(op)
    _ops.pop(op.qualified, None)


def declared(qualified: str) -> Op | None:
    """The op of a qualified name, if this process declared it."""
    return _thread.ops.get(qualified)


def all_ops() -> list[Op]:
    """Every declared op, sorted by name."""
    return [op for _, op in sorted(_thread.ops.items())]


def find(name: str) -> Op:
    """The op of a name; without a namespace, opjit's own.

    Raises:
        UnknownOp: with the most similar names.
        DeclarationError: OPJIT_PATH names a folder without ops, or one that others can write.
    """
    qualified = name if "::" in name else f"opjit::{name}"
    if declared(qualified) is None:
        search(qualified)
    op = declared(qualified)
    if op is None:
        short = [op.qualified.removeprefix("opjit::") for op in all_ops()]
        closest = difflib.get_close_matches(qualified.removeprefix("opjit::"), short, n=3, cutoff=0.5)
        raise UnknownOp(qualified, closest)
    return op


def search(qualified: str | None = None) -> None:
    """Declare the ops of OPJIT_PATH, then those of installed packages until the op is found; None declares all of them."""
    with processes.reading:  # an op.py that another thread is running may declare it
        if qualified is not None and declared(qualified) is not None:
            return
        for path in os.environ.get("OPJIT_PATH", "").split(os.pathsep):
            if path and path not in _searched:
                _add_named(path)
                _searched.add(path)
        if qualified is None or declared(qualified) is None:
            _search_packages(qualified)


def _add_named(path: str) -> None:
    """Add a folder that OPJIT_PATH names. Its op.py files are run, so only you and root may be able to write them."""
    folder = Path(os.path.expanduser(path))
    if not folder.is_absolute():
        raise DeclarationError(f"OPJIT_PATH names {path!r}, which depends on where the process starts; use an absolute path")
    try:
        folders = op_folders(folder)
        for each in (folder, *folders, *(each / "op.py" for each in folders)):
            problem = files.distrusted(each.resolve())
            if problem:
                raise DeclarationError(f"its op.py files are not run: {problem}")
        add_path(folder)
    except (DeclarationError, OSError) as error:
        raise DeclarationError(f"OPJIT_PATH names {path!r}, and {error}") from error


def _search_packages(qualified: str | None) -> None:
    """Load entry points, those named like the op's namespace first, until the op is declared. One that fails gives one warning."""
    from importlib.metadata import entry_points

    namespace = (qualified or "").partition("::")[0]
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name != namespace, point.name)):
        if qualified is not None and declared(qualified) is not None:
            return
        if f"{point.name}={point.value}" in _searched:
            continue
        _searched.add(f"{point.name}={point.value}")
        try:
            with _publishing():
                _load(point)
        except Exception as error:
            origin = f" of {point.dist.name}" if point.dist else ""
            warnings.warn(f"the ops of the entry point {point.name} = {point.value}{origin} are missing: {type(error).__name__}: {error}",
                          RuntimeWarning, stacklevel=5)


def _load(point: EntryPoint) -> None:
    """Import the module or package of an entry point. A module declares its ops itself; a package may be a folder of ops."""
    loaded = point.load()
    for path in getattr(loaded, "__path__", []):
        if op_folders(Path(path)):
            add_path(path)


def declare_bundled() -> None:
    """Declare the ops of kernels_c, unless an earlier import of opjit did."""
    if not _ops:
        for folder in op_folders(resources.folder("kernels_c")):
            declare_folder(folder, "opjit_bundled")


def add_path(folder: str | os.PathLike[str]) -> list[Op]:
    """Declare the ops of a folder by running its op.py; nothing is compiled.

    Args:
        folder: an op's folder, or a folder of such folders. An op.py runs once.

    Returns:
        Its ops, sorted by name.

    Raises:
        DeclarationError: the folder has no op, or an op elsewhere has the same name.

    Example:
        >>> opjit.add_path("my_ops")
        [<opjit op mylib::scale(Tensor x, float a) -> Tensor>]
        >>> opjit.get("mylib::scale")
    """
    place = Path(os.path.abspath(folder))
    if not place.is_dir():
        raise DeclarationError(f"there is no folder {place}")
    folders = op_folders(place)
    if not folders:
        raise DeclarationError(f"no op is declared in {place}: expected op.py in it or in its subfolders")
    ops = [op for each in folders for op in _declare(each / "op.py")]
    return sorted(ops, key=lambda op: op.qualified)


def op_folders(place: Path) -> list[Path]:
    """The folder itself if it has an op.py, else its subfolders that have one."""
    if (place / "op.py").is_file():
        return [place]
    return sorted(each for each in place.iterdir() if (each / "op.py").is_file())


def _declare(file: Path) -> list[Op]:
    """The ops of an op.py, which runs unless it ran before."""
    real = file.resolve()

    def ops() -> list[Op]:
        return [op for op in all_ops() if op.file == real]

    with processes.reading:
        if not ops():
            declare_folder(file.parent)
        if not ops():
            raise DeclarationError(f"{file} declares no op: expected a function under @opjit.op")
        return ops()


def declare_folder(folder: Path, prefix: str = "opjit_ops") -> None:
    """Run a folder's op.py as a module and publish its ops. Pickle, dataclasses and others look its contents up by the module's name."""
    file = folder / "op.py"
    name = f"{prefix}_{folder.name}".replace(".", "_")  # pickle would import the part before a dot
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(file):  # a folder of the same name elsewhere
        name = f"{name}_{hashlib.sha256(os.fsencode(file)).hexdigest()[:8]}"
    module = _new_module(name, file)
    assert module.__spec__ is not None
    assert module.__spec__.loader is not None  # a .py file always has one
    with _publishing():
        sys.modules[name] = module
        try:
            module.__spec__.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]  # as after an import that failed
            raise


def _new_module(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    return importlib.util.module_from_spec(spec)


def rerun(op: Op) -> tuple[list[Op], ModuleType]:
    """Run the op.py of an op once more, without telling torch or the catalog.

    Returns:
        Its declarations, and the new module.
    """
    assert op.file is not None
    name, stamp = op.fake.__module__, op.stamp_now()
    module = _new_module(name, op.file)
    module.__package__ = getattr(sys.modules.get(name), "__package__", None)
    outer, _thread.rerun = _thread.rerun, []
    try:
        # Compiled here: Python's cached byte code is good for a whole second, and an author may save twice within one.
        exec(compile(op.file.read_bytes(), op.file, "exec", dont_inherit=True), vars(module))
        newer = _thread.rerun
    finally:
        _thread.rerun = outer
    for each in newer:
        each.stamp = stamp  # from before the file was read
    return newer, module


def op(text: str, *, extra_cflags: Sequence[str] = (), extra_cuda_cflags: Sequence[str] = (), extra_ldflags: Sequence[str] = (),
       extra_include_paths: Sequence[str | os.PathLike[str]] = ()) -> Callable[[Function], Op]:
    """Declare an op; the decorated function is its fake kernel.

    The op's C and CUDA sources lie beside the declaring file: ``<name>.c`` defines ``<name>_cpu``, ``<name>.cu`` defines
    ``<name>_cuda``. The first request or call compiles them.

    Args:
        text: a torch schema, such as ``"mylib::scale(Tensor x, float a) -> Tensor"``; the default namespace is ``opjit``.
        extra_cflags: flags for the ``.c`` kernel, after opjit's own, one argument each (no shell splits them): ``["-DTILE=64"]``.
        extra_cuda_cflags: the same for the ``.cu`` kernel: ``["--use_fast_math", "-Xptxas=-O2"]``.
        extra_ldflags: system libraries that the kernels call, for every backend: ``["-lz"]``. The binary may need no others. Like
            libc, each machine provides them, and their content is not part of the key.
        extra_include_paths: more header folders, relative to the op's folder; headers included from them enter the key.

    Raises:
        SchemaError: torch cannot parse the schema, or a type has no C form.
        DeclarationError: an op of that name is declared elsewhere; or a flag would break a promise of opjit about its binaries,
            and the message names an alternative.

    Example:
        >>> @opjit.op("mylib::scale(Tensor x, float a) -> Tensor", extra_cflags=["-DTILE=64"])
        ... def scale(x, a):
        ...     return torch.empty_like(x)
    """

    def declare(fake: Function) -> Op:
        file = Path(inspect.unwrap(fake).__code__.co_filename).resolve()
        folder = file.parent
        extra = None
        if extra_cflags or extra_cuda_cflags or extra_ldflags or extra_include_paths:
            from opjit.recipe import flags

            extra = flags.check(text.partition("(")[0], folder, extra_cflags, extra_cuda_cflags, extra_ldflags, extra_include_paths)
        return add(Op(text, fake, folder, extra, file=file))

    return declare


def _reduce(declared: Op) -> tuple[Callable[[str], Op], tuple[str]]:
    """Pickle an op by its name, as a function: a copy is the op itself, and another process finds its own."""
    return find, (declared.qualified,)


copyreg.pickle(Op, _reduce)
