"""The ops declared in this process, by qualified name, and the folders that they are found in.

`import opjit` declares the bundled ops. A request for any other op searches the folders in
OPJIT_PATH and then the installed packages with an entry point ``opjit.ops`` that has the name of
the op's namespace. Neither is read before such a request.
"""

import copyreg
import difflib
import functools
import importlib.util
import inspect
import os
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from opjit import files, processes, resources
from opjit.declare import fake_kernel
from opjit.declare.declaration import Declaration, Function, cpp_advice, stamp_of
from opjit.errors import DeclarationError, OpjitError, UnknownOp
from opjit.files import StrPath
from opjit.operators import registration
from opjit.operators.op import Op
from opjit.recipe import schema

GROUP = "opjit.ops"

_ops = dict[str, Op]()
# The same, and ops that are replaced or removed, by their op.py: a search of all for each of a thousand files takes seconds.
_of_file = defaultdict[Path | None, dict[str, Op]](dict)
_unfinished: set[str] = set()  # ops of an op.py that is still running; see `find`
_searched: set[str] = set()  # folders in OPJIT_PATH and entry points that have been read
# folders in OPJIT_PATH that are being read, because their op.py may request ops
_searching = set[str]()
# Collects the declarations of an op.py that runs again.
_rerun: ContextVar[list[Op] | None] = ContextVar("rerun", default=None)


@contextmanager
def _running() -> Iterator[None]:
    """Run an op.py or an entry point.

    If the module raises, its ops are unregistered, because Python forgets the module.
    """
    with processes.reading:
        before = set(_unfinished)
        try:
            yield
        finally:
            for op in filter(None, map(declared, _unfinished - before)):
                if op.declaration.file is not None and op.fake.__module__ not in sys.modules:
                    remove(op)
            _unfinished.intersection_update(before)


def add(newer: Op) -> Op:
    """Register an op; it replaces an earlier declaration of the same name from the same folder."""
    rerun = _rerun.get()
    if rerun is not None:
        rerun.append(newer)
        return newer
    with processes.declaring:
        registration.define(newer, declared(newer.qualified))
        if processes.reading.is_held_here():
            _unfinished.add(newer.qualified)
        _ops[newer.qualified] = newer
        _of_file[newer.declaration.file][newer.qualified] = newer
    return newer


def remove(op: Op) -> None:
    """Unregister an op that its op.py no longer declares."""
    registration.forget(op)
    _ops.pop(op.qualified, None)


def of_file(file: Path | None) -> list[Op]:
    """Return the ops that an op.py declares."""
    return [op for name, op in _of_file[file].items() if declared(name) is op]


def declared(qualified: str) -> Op | None:
    """Return the op of a qualified name, if this process declared it."""
    return _ops.get(qualified)


def is_whole(op: Op) -> bool:
    """Return whether the op.py that declares the op has ended."""
    return op.qualified not in _unfinished


def all_ops() -> list[Op]:
    """Return every declared op, sorted by name."""
    return sorted(_ops.values(), key=lambda op: op.qualified)


def find(name: str) -> Op:
    """Return the op of a name.

    A name without a namespace is a bundled op. Raises UnknownOp with the most similar names, or
    DeclarationError if OPJIT_PATH names a folder without ops, or a folder that other users can
    write.
    """
    qualified = name if "::" in name else f"opjit::{name}"
    # the latter waits for the thread that runs its op.py
    if declared(qualified) is None or qualified in _unfinished:
        search(qualified)
    op = declared(qualified)
    if op is None:
        short = [op.qualified.removeprefix("opjit::") for op in all_ops()]
        similar = functools.partial(
            difflib.get_close_matches, qualified.removeprefix("opjit::"), short
        )
        # A misspelled name is close to one op; for a part of a name, name the ops that contain it.
        raise UnknownOp(qualified, similar(cutoff=0.7) or similar(cutoff=0.5))
    return op


def _path() -> list[str]:
    return [path for path in os.environ.get("OPJIT_PATH", "").split(os.pathsep) if path]


def get_or_search(namespace: Any, name: str) -> Any:
    """Return an attribute that a namespace of torch.ops does not have: search for the op, once."""
    try:
        return registration.look_up(namespace, name)
    except AttributeError:
        qualified = f"{namespace.name}::{name}"
        if qualified in registration.half_declared or name.startswith("__"):
            raise  # torch looks for an op that it is about to define
        unread = any(path not in _searched for path in _path())
        if not unread and namespace.name not in _packaged_namespaces():
            raise
        try:
            search(qualified)
        except OpjitError as error:  # hasattr() must not raise it
            raise AttributeError(
                f"torch.ops.{namespace.name}.{name} was not found: {error}"
            ) from error
        if declared(qualified) is None:
            raise
        return registration.look_up(namespace, name)


@functools.cache
def _packaged_namespaces() -> frozenset[str]:
    """Return the names of the entry points.

    They are searched once per process, because the search lasts some milliseconds.
    """
    from importlib.metadata import entry_points

    return frozenset(point.name for point in entry_points(group=GROUP))


def search(qualified: str | None = None) -> None:
    """Declare the ops of OPJIT_PATH and, unless the op is among them, the ops of the packages of
    its namespace.

    None declares all ops.
    """
    with processes.reading:  # an op.py that another thread is running may declare it
        if qualified is not None and declared(qualified) is not None:
            return
        for path in _path():
            if path not in _searched | _searching:
                _searching.add(path)
                try:
                    _add_named(path)
                    _searched.add(path)  # no earlier: until then, other threads wait
                finally:
                    _searching.discard(path)
        if qualified is None or declared(qualified) is None:
            _search_packages(None if qualified is None else qualified.partition("::")[0])


def _add_named(path: str) -> None:
    """Add a folder that OPJIT_PATH names."""
    folder = Path(os.path.expanduser(path))
    if not folder.is_absolute():
        raise DeclarationError(
            f"OPJIT_PATH names {path!r}, which depends on where the process starts; use an absolute path"
        )
    try:
        add_trusted(folder)
    except (DeclarationError, OSError) as error:
        raise DeclarationError(f"OPJIT_PATH names {path!r}, but {error}") from error


def add_trusted(folder: Path) -> list[Op]:
    """Add a folder that no Python code names, like `add_path`.

    Because its op.py files are run and its kernels are compiled, only this user and root may be
    able to write it and the op folders in it. Otherwise, it raises DeclarationError.
    """
    root = Path(os.path.abspath(folder))
    paths = [root]
    for each in op_folders(root):
        for parent, folders, names in os.walk(each):
            paths += [Path(parent, name) for name in (*folders, *names)]
    for path in paths:
        problem = files.replacement_risk(path)
        if problem is not None:
            raise DeclarationError(f"opjit refuses to run the op.py files in {root}: {problem}")
    return add_path(root)


def _search_packages(namespace: str | None) -> None:
    """Load the entry points of a namespace, or all. One that fails gives one warning."""
    from importlib.metadata import entry_points

    for point in entry_points(group=GROUP):
        name = f"{point.name} = {point.value}"
        if name in _searched or namespace not in (None, point.name):
            continue
        _searched.add(name)
        try:
            with _running():
                # A package may be a folder of ops; a module declares its ops itself.
                for path in getattr(point.load(), "__path__", []):
                    if op_folders(Path(path)):
                        add_path(path)
        except Exception as error:
            origin = f" of {point.dist.name}" if point.dist else ""
            warnings.warn(
                f"the ops of the entry point {name}{origin} are missing: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=5,
            )


def declare_bundled() -> None:
    """Declare the ops of kernels_c, unless an earlier import of opjit did."""
    if not _ops:
        for folder in op_folders(resources.folder("kernels_c")):
            declare_folder(folder, bundled=True)


def add_path(folder: StrPath) -> list[Op]:
    """Declare the ops of a directory by running its op.py, without compiling anything.

    Args:
        folder: an op directory, or a directory that contains op directories. Each op.py runs only once.

    Returns:
        The ops, sorted by name.

    Raises:
        DeclarationError: the directory does not contain an op, or another op has the same name.

    Example:
        >>> opjit.add_path("my_ops")
        [<opjit op mylib::scale(Tensor x, float a) -> Tensor>]
        >>> scale = opjit.get("mylib::scale", "cpu")
    """
    place = Path(os.path.abspath(folder))
    folders = op_folders(place)
    if place.is_file():
        raise DeclarationError(
            f"expected the directory of an op, got the file {place}; pass {place.parent}"
        )
    if not folders and not place.is_dir():
        raise DeclarationError(f"there is no directory {place}")
    if not folders:
        raise DeclarationError(
            f"no op is declared in {place}: expected op.py in it or in its subfolders{cpp_advice(place, '*')}"
        )
    ops = [op for each in folders for op in _declare(each / "op.py")]
    return sorted(ops, key=lambda op: op.qualified)


def op_folders(place: Path) -> list[Path]:
    """Return the folder itself if it contains an op.py, otherwise its subfolders with an op.py.

    The list is empty if the folder is a file or does not exist.
    """
    try:
        if (place / "op.py").is_file():
            return [place]
        if not place.is_dir():
            return []
        return sorted(each for each in place.iterdir() if (each / "op.py").is_file())
    except OSError as error:
        raise DeclarationError(
            f"the directory {place} cannot be read ({error.strerror}: {error.filename}); let this user enter and read it"
        ) from error


def _declare(file: Path) -> list[Op]:
    """Return the ops of an op.py, which runs unless it ran before."""
    real = file.resolve()
    with processes.reading:
        if not of_file(real):
            declare_folder(file.parent)
        found = of_file(real)
    if not found:
        raise DeclarationError(f"{file} declares no op: expected a function under @opjit.op")
    return found


def declare_folder(folder: Path, bundled: bool = False) -> None:
    """Run a folder's op.py as a module and publish its ops.

    For example, pickle and dataclasses look its contents up by the module's name. The modules next
    to it are its submodules: ``from .shapes import rows``.
    """
    file = folder / "op.py"
    name = f"opjit_{'bundled' if bundled else 'ops'}_{folder.name}".replace(
        ".", "_"
    )  # pickle would import the part before a dot
    earlier = sys.modules.get(name)
    if earlier is not None and getattr(earlier, "__file__", None) != str(file):
        # A folder of the same name elsewhere.
        name = f"{name}_{files.sha256(os.fsencode(file))[:8]}"
    module = _new_module(name, file)
    loader = module.__spec__ and module.__spec__.loader
    with _running():
        sys.modules[name] = module
        try:
            if bundled and loader:  # nobody edits them
                loader.exec_module(module)
            else:
                _execute(module, file)
        except BaseException:
            for each in list(sys.modules):  # as after an import that failed
                if each == name or each.startswith(f"{name}."):
                    del sys.modules[each]
            raise


def _new_module(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        name, file, submodule_search_locations=[str(file.parent)]
    )
    assert spec is not None
    return importlib.util.module_from_spec(spec)


def _execute(module: ModuleType, file: Path) -> None:
    """Run an op.py, compiled here: Python's cached byte code is good for a whole second, and an author may save twice within one."""
    exec(compile(file.read_bytes(), file, "exec", dont_inherit=True), vars(module))


def rerun(op: Op) -> tuple[list[Op], ModuleType]:
    """Run the op.py of an op once more, without telling torch or the registry. Returns its declarations, and the new module."""
    file = op.declaration.file
    assert file is not None
    name = op.fake.__module__
    stamp = op.declaration.stamp_now()
    module = _new_module(name, file)
    module.__package__ = getattr(sys.modules.get(name), "__package__", None)
    newer = list[Op]()
    token = _rerun.set(newer)
    try:
        _execute(module, file)
    finally:
        _rerun.reset(token)
    for each in newer:
        each.declaration = replace(each.declaration, stamp=stamp)  # from before the file was read
    return newer, module


def op(
    text: str,
    *,
    extra_cflags: Sequence[str] = (),
    extra_cuda_cflags: Sequence[str] = (),
    extra_ldflags: Sequence[str] = (),
    extra_cuda_ldflags: Sequence[str] = (),
    extra_include_paths: Sequence[StrPath] = (),
    extra_sources: Sequence[StrPath] = (),
    differentiable: bool = True,
    elementwise: bool = False,
    archs: Sequence[str] = (),
    tags: Sequence[torch.Tag] = (),
) -> Callable[[Function], Op]:
    """Declare an op. The decorated function is its fake kernel.

    The C and CUDA sources of the op are next to the declaring file. ``<name>.c`` defines ``<name>_cpu``, and ``<name>.cu`` defines
    ``<name>_cuda``. opjit compiles them at the first call, or earlier at `opjit.get`.

    Args:
        text: a torch schema, for example ``"mylib::scale(Tensor x, float a) -> Tensor"``, with your namespace.
        extra_cflags: flags for the ``.c`` kernel, after the flags of opjit, one argument each, for example ``["-DTILE=64"]``.
        extra_cuda_cflags: the same for the ``.cu`` kernel, for example ``["--use_fast_math", "-Xptxas=-O2"]``.
        extra_ldflags: libraries that the kernels call, for every backend. ``"-lz"`` is a system library, which each machine must
            provide. ``"vendor/libfft.a"`` and ``"table.o"`` are a static archive and an object file, relative to the op's directory.
            ``"-Lvendor", "-lfft"`` is a library in a directory, which opjit opens before the op's library. Keep these files inside
            the op's directory if you build a wheel. Their content is part of the key.
        extra_cuda_ldflags: the same for CUDA only. For ``["-lcublas"]`` and other CUDA libraries of torch, opjit links the copies that
            torch uses.
        extra_sources: more sources, relative to the op's directory, for example ``["solver.c", "solver.cu"]``. Each is compiled
            separately, for the backend of its suffix. A ``.cu`` file cannot call kernels or device functions of another one.
        extra_include_paths: more directories of headers, relative to the op's directory. Included headers are part of the key.
        differentiable: False makes autograd treat the results as constants. Otherwise an op without a backward raises an error
            in ``backward()``, like with torch.library.custom_op.
        elementwise: True if each element of a result depends only on the elements at the same index of the arguments, which may
            broadcast. Then torch.vmap calls the op once for the whole batch, and DTensor keeps its shards.
        archs: GPU archs with instructions that no later GPU has, for example ``["sm_90a"]`` for wgmma. opjit builds the op for them
            where a request, a machine or a wheel wants ``sm_90``. The ``.cu`` contains code for other archs as well.
        tags: properties of the op for torch's compilers, for example ``[torch.Tag.needs_fixed_stride_order]``. opjit adds
            pt2_compliant_tag and, with a ``Generator?``, nondeterministic_seeded.

    Raises:
        SchemaError: torch cannot parse the schema, or C does not support a type.
        DeclarationError: the schema lacks a namespace, the fake kernel cannot be called with its arguments, or another file declares an
            op of that name. For a flag that opjit does not support, the message names an alternative.

    Example:
        >>> @opjit.op("mylib::scale(Tensor x, float a) -> Tensor", extra_cflags=["-DTILE=64"])
        ... def scale(x, a):
        ...     return torch.empty_like(x)
    """

    name = text.partition("(")[0].strip()
    if not all(re.fullmatch(r"sm_\d+[af]", arch) for arch in archs):
        raise DeclarationError(f"{name}: archs is a list of names such as sm_90a, not {archs!r}")
    if not all(isinstance(tag, torch.Tag) for tag in tags):
        raise DeclarationError(
            f"{name}: tags is a list of members of torch.Tag, such as "
            f"torch.Tag.pointwise, not {tags!r}"
        )

    def declare(fake: Function) -> Op:
        file = Path(inspect.unwrap(fake).__code__.co_filename).resolve()
        folder = file.parent
        extra = None
        extras = (
            extra_cflags,
            extra_cuda_cflags,
            extra_ldflags,
            extra_include_paths,
            extra_cuda_ldflags,
            extra_sources,
        )
        if any(extras):
            from opjit.recipe import flags

            extra = flags.check_flags(name, folder, *extras)
        if "::" not in name and not folder.is_relative_to(resources.folder("kernels_c")):
            raise DeclarationError(
                f"expected namespace::name, such as mylib::{name or 'scale_add'}, got {name!r}: your own namespace keeps the "
                "op apart from other people's"
            )
        parsed = schema.parse(text, [tag.name for tag in tags])
        fake_kernel.check_signature(parsed, fake)
        declaration = Declaration(
            parsed,
            fake,
            folder,
            extra,
            file=file,
            stamp=stamp_of(file),
            constant=not differentiable,
            elementwise=elementwise,
            archs=tuple(archs),
        )
        return add(Op(declaration))

    return declare


def _restored(qualified: str, where: str, declaration: str) -> Op:
    """Return an op that was pickled, maybe by another process.

    If it has an op.py, the op.py is run unless other users can write it.
    """
    if (
        declared(qualified) is None
        and os.path.isfile(declaration)
        and Path(declaration).name == "op.py"
    ):
        add_trusted(Path(declaration).parent)  # the folder may belong to another user by now
    try:
        return find(qualified)
    except UnknownOp as error:
        error.args = (
            f"{qualified} was pickled by a process that declared it in {where}; import or load that here first",
        )
        raise


# An op is pickled by its name, so a copy is the op itself.
copyreg.pickle(
    Op, lambda op: (_restored, (op.qualified, op.declaration.place, str(op.declaration.file or "")))
)
