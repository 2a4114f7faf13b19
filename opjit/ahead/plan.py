"""The plan of `opjit precompile`: ops by name, or the ops and C++ extensions of a recorded list.

A list may come from anyone. Therefore code that only the list names, for example the op.py of a
folder, never runs: the source is compiled with the list's schema and flags, after the same checks
as for a declaration. C++ extensions can run code, because torch passes their flags to a shell and a
build opens the library. They are built only if the caller allows it.
"""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import opjit.cpp_extension.binary as extension_binary  # not "from", which would query the package and import torch
from opjit import backends, batch, files, resources
from opjit.backends.targets import Target
from opjit.catalog import arguments, registry
from opjit.declare import oplist
from opjit.declare.declaration import Declaration
from opjit.declare.op_state import OpState
from opjit.declare.oplist import RecordedExtension, RecordedOp
from opjit.errors import Failures, NoKernel, OpjitError, RecordError, UnknownArch, UnknownOp
from opjit.files import StrPath
from opjit.operators.op import Op
from opjit.recipe import gpu_archs, libraries, toolchain
from opjit.recipe.flags import check_flags
from opjit.recipe.schema import parse
from opjit.shared_library import recorded as recorded_libraries
from opjit.store.store import Store, default_store
from opjit.wanted import BinaryRequest


class Plan(NamedTuple):
    """The binaries that precompile will build."""

    wanted: list[BinaryRequest]  # of each op with each target, and of a list's C++ extensions
    skipped: int  # further pairs, for which the ops lack a kernel
    store: Store
    shared: bool  # the user named the store, so it must be complete without the cache, and readable for everyone
    remarks: Sequence[str] = ()  # a message for the user before the builds start
    failed: Sequence[tuple[str, OpjitError]] = ()
    kernels: int = 0  # of Triton, in the list


def plan_ops(
    names: Iterable[StrPath] | None,
    archs: Sequence[str],
    root: StrPath | None,
    hosts: Sequence[str] = (),
) -> Plan:
    """Plan to build ops by name.

    The arguments and errors are the same as for `opjit.precompile`.
    """
    store = _store(root)
    targets = batch.targets_of(archs, store, hosts)
    ops = []
    if names is None:
        registry.search()
        ops += registry.all_ops()
    for name in names or ():
        found = arguments.ops(name if isinstance(name, str) else os.path.join(".", name))
        if not batch.pairs(found, targets):
            has = sorted({backend for op in found for backend in op.backends()})
            raise NoKernel(
                f"{os.fspath(name)} has no kernel for "
                f"{' or '.join(map(str, targets)) or 'any device of this machine'}, so "
                f"there is nothing to build; it has kernels for {' and '.join(has) or 'nothing'}: "
                "pass --arch with one of their archs"
            )
        ops += found
    shared = root is not None
    pairs = batch.pairs(ops, targets)
    failed: Failures = []
    wanted = batch.requests(pairs, store, shared, failed)
    skipped = len(set(ops)) * len(targets) - len(pairs)
    return Plan([*wanted], skipped, store, shared, failed=failed)


def plan_recorded(
    path: StrPath,
    archs: Sequence[str],
    root: StrPath | None,
    extensions: bool = False,
    hosts: Sequence[str] = (),
) -> Plan:
    """Plan to build the ops of a recorded list, and its C++ extensions; without archs, for the recorded targets."""
    store = _store(root)
    shared = root is not None
    targets = batch.targets_of(archs, store, hosts) if archs else None
    recorded_ops, calls = oplist.read_list(Path(path))
    reader = _ListReader(store, hosts)
    uses = dict[str, list[RecordedOp]]()  # of each op, for all its targets
    for use in recorded_ops:
        op = repr(use._replace(backend="", arch="", runtime=""))
        uses.setdefault(op, []).append(use)
    skipped = sum(reader.add_op(each, targets) for each in uses.values())
    # A declared op may replace several recorded ones, which differ.
    pairs = dict.fromkeys(reader.pairs)
    ops = batch.requests(pairs, store, shared, reader.failed)
    remarks = []
    kernels = [each for each in calls if each.function == "triton"]
    for kernel in kernels:
        calls.remove(kernel)
        reader.look_up_kernel(kernel)
    others = []
    if extensions:
        others = _plan_extensions(calls, Path(path), store, shared, reader.failed)
    elif calls:
        remarks.append(
            f"{len(calls)} C++ extensions of the list are not built, because their flags and "
            "initializers can run any code; if you trust the list, pass --extensions (in Python: "
            "extensions=True)"
        )
    return Plan([*ops, *others], skipped, store, shared, remarks, reader.failed, len(kernels))


class _ListReader:
    """Pairs the ops of a list with targets, and collects errors.

    Attributes:
        absent: the namespaces that have been searched, and lack an op.
    """

    def __init__(self, store: Store, hosts: Sequence[str]) -> None:
        self.store = store
        self.hosts = hosts
        self.pairs = list[tuple[OpState, Target]]()
        self.failed: Failures = []
        self.absent = set[str]()

    def add_op(self, uses: Sequence[RecordedOp], targets: Sequence[Target] | None) -> int:
        """Add an op for these targets, or for the recorded ones. Returns the number of targets without a kernel."""
        try:
            op = _resolve_op(uses[0], self.absent)
            if targets is not None:
                found = batch.pairs([op], targets)
                for pair in found:
                    _require_closed(*pair)
                self.pairs += found
                return len(targets) - len(found)
        except OpjitError as error:
            self.failed.append((uses[0].op, error))
            return 0
        for use in uses:
            name = f"{use.op} for {use.backend} {use.arch}"
            try:
                hosts = self.hosts or (None,)
                recorded = [_resolve_target(use, name, self.store, host) for host in hosts]
                _require_closed(op, recorded[0])
                self.pairs += [(op, target) for target in recorded]
            except OpjitError as error:
                self.failed.append((name, error))
        return 0

    def look_up_kernel(self, kernel: RecordedExtension) -> None:
        """Add an error if no cache has a kernel of Triton, because opjit cannot build it."""
        from opjit.adapters.triton import Manager

        manager = Manager(os.path.basename(str(kernel.arguments.get("key"))))
        manager.store = self.store
        if manager.get_group(kernel.name) is None:
            text = f"Triton's kernel {kernel.name} is not cached; run the program with this cache"
            self.failed.append((kernel.name, OpjitError(text)))


def _plan_extensions(
    listed: Sequence[RecordedExtension],
    path: Path,
    store: Store,
    shared: bool,
    failed: Failures,
) -> list[BinaryRequest]:
    """Return the requests for a list's extensions and shared libraries, each content once."""
    found = dict[str, BinaryRequest]()
    folder = os.path.dirname(os.path.abspath(path))
    for each in listed:
        try:
            of_library = each.function == recorded_libraries.FUNCTION
            request = recorded_libraries.request if of_library else extension_binary.of_recorded
            wanted = request(each, folder, store)
            found.setdefault(wanted.name, wanted.in_store() if shared else wanted)
        except OpjitError as error:
            failed.append((each.name, error))
    return list(found.values())


def _store(root: StrPath | None) -> Store:
    if root is None:
        return default_store()
    folder = Path(os.path.abspath(os.path.expanduser(root)))
    with suppress(OSError):  # it exists, or the builds' errors contain the reason
        folder.mkdir(parents=True)
        folder.chmod(0o755)
    return Store(folder)


def _require_closed(op: OpState, target: Target) -> None:
    """Raise RecordError if another user can write the sources or folders of an op that only the
    list names.

    This is OPJIT_PATH's rule for folders. The build checks all other files that it reads.
    """
    if not op.declaration.only_listed:
        return
    op.write_code()
    try:
        source = op.declaration.source(target.backend)
        flags = op.declaration.flags(target)
        linked = libraries.files(flags)
        read = [str(source.parent), str(source), *flags.include, *flags.sources, *linked]
    except (OSError, NoKernel):
        return  # the build will report the error
    bundled = f"{resources.include_path()}{os.sep}"
    files.require_closed(op.qualified, (path for path in read if not path.startswith(bundled)))


def _resolve_op(recorded: RecordedOp, absent: set[str]) -> Op:
    """Return a list's op. `absent`: namespaces that have been searched, and lack an op."""
    schema = parse(recorded.schema)
    if schema.qualified != recorded.op:
        raise RecordError(
            f"expected a schema of {recorded.op} in the list, got {recorded.schema!r}; the list "
            "was edited or is damaged: run `opjit record` again"
        )
    if recorded.code is not None:
        from opjit.catalog import inline

        flags = [recorded.flags[kind] for kind in oplist.FLAGS]
        op = inline.make(
            recorded.schema,
            dict(recorded.code),
            None,
            None,
            "opjit.ahead.plan",
            "a recorded list",
            f"{recorded.op} (inline code)",
            flags,
        )
        op.declaration = replace(op.declaration, only_listed=True)
        return op
    return _find_declared(recorded.op, absent) or _op_in_folder(recorded)


def _find_declared(name: str, absent: set[str]) -> Op | None:
    """Return the op that anything but a list declares; `absent`: see `_resolve_op`."""
    namespace = name.partition("::")[0]
    with suppress(UnknownOp):
        return registry.declared(name) if namespace in absent else registry.find(name)
    absent.add(namespace)
    return None


def _op_in_folder(recorded: RecordedOp) -> Op:
    folder = Path(recorded.folder or "")
    flags = recorded.flags
    if not folder.is_absolute() or not folder.is_dir():
        raise RecordError(
            f"{recorded.op} is not here: no op of that name is declared or installed, and there is no directory "
            f"{recorded.folder}; name the directory that contains the op in OPJIT_PATH, or install its package"
        )
    extra = None
    if any(flags.values()):
        extra = check_flags(recorded.op, folder, *(flags[kind] for kind in oplist.FLAGS))
    schema = parse(recorded.schema, recorded.tags or ())
    # torch never sees this op, so nothing calls its fake kernel.
    return Op(Declaration(schema, lambda *args, **kwargs: None, folder, extra, only_listed=True))


def _resolve_target(recorded: RecordedOp, name: str, store: Store, host: str | None) -> Target:
    backend = backends.by_name(recorded.backend)
    if backend is None:
        raise UnknownArch(
            f"{name} cannot be built, because this process lacks the backend "
            f"{recorded.backend!r}; import the package that adds it with opjit.register_backend "
            "first"
        )
    target = toolchain.target_of(recorded.arch, store.notes, backend, host)
    return gpu_archs.served(target, store.notes)
