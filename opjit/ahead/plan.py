"""What precompile builds: ops by name, or the ops and C++ extensions of a recorded list. A list may come from anyone, so code that only it
names, such as the folder's op.py, never runs: the source is compiled with the list's schema and flags, checked as a declaration's. C++
extensions can run code, as torch passes their flags to a shell and a build opens the library: they are built only if the caller says so."""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import opjit.cpp_extension.binary as extension_binary  # not "from": that asks the package, which asks torch
from opjit import backends, batch, files, resources
from opjit.backends.targets import Target
from opjit.catalog import arguments, registry
from opjit.declare import oplist
from opjit.declare.declaration import Declaration
from opjit.declare.op_state import OpState
from opjit.declare.oplist import RecordedExtension, RecordedOp
from opjit.errors import NoKernel, OpjitError, RecordError, UnknownArch, UnknownOp
from opjit.operators.op import Op
from opjit.recipe import toolchain
from opjit.recipe.flags import check
from opjit.recipe.headers import Scan
from opjit.recipe.recipe import read_files
from opjit.recipe.schema import parse
from opjit.shared_library import recorded as recorded_libraries
from opjit.store.store import Store, default_root
from opjit.wanted import Wanted


class Plan(NamedTuple):
    """What precompile is going to build."""

    wanted: list[Wanted]  # of each op with each target, and of a list's C++ extensions
    skipped: int  # further pairs, for which the ops have no kernel
    store: Store
    shared: bool  # the user named the store, so it must be complete without the cache, and readable for everyone
    remarks: Sequence[str] = ()  # what the user should know before the builds start
    failed: Sequence[tuple[str, OpjitError]] = ()
    listed: Path | None = None  # the list; None for ops by name


def plan_ops(
    names: Iterable[str | os.PathLike[str]] | None,
    archs: Sequence[str],
    root: str | os.PathLike[str] | None,
    hosts: Sequence[str] = (),
) -> Plan:
    """Plan to build ops by name; the arguments, and what is raised, are those of `opjit.precompile`."""
    store = _store(root)
    targets = batch.targets_of(archs, store, hosts)
    ops: list[Op] = []
    if names is None:
        registry.search()
        ops += registry.all_ops()
    for name in names or ():
        found = arguments.ops(name if isinstance(name, str) else os.path.join(".", name))
        if not batch.pairs(found, targets):
            has = sorted({backend for op in found for backend in op.backends()})
            raise NoKernel(
                f"{os.fspath(name)} has no kernel for {' or '.join(map(str, targets)) or 'any device of this machine'}, so "
                f"there is nothing to build; it has kernels for {' and '.join(has) or 'nothing'}: name one of their archs"
            )
        ops += found
    pairs, failed = batch.pairs(ops, targets), list[tuple[str, OpjitError]]()
    wanted = batch.requests(pairs, store, root is not None, failed)
    return Plan(
        [*wanted], len(set(ops)) * len(targets) - len(pairs), store, root is not None, failed=failed
    )


def plan_recorded(
    path: str | os.PathLike[str],
    archs: Sequence[str],
    root: str | os.PathLike[str] | None,
    extensions: bool = False,
    hosts: Sequence[str] = (),
) -> Plan:
    """Plan to build the ops of a recorded list, and its C++ extensions; without archs, for the recorded targets."""
    store = _store(root)
    targets = batch.targets_of(archs, store, hosts) if archs else None
    (uses_of_ops, calls), recorded, scan = (
        oplist.read_list(Path(path)),
        dict[str, list[RecordedOp]](),
        Scan(),
    )
    for use in uses_of_ops:
        recorded.setdefault(repr(use._replace(backend="", arch="", runtime="")), []).append(use)
    pairs, skipped, remarks, failed = (
        list[tuple[OpState, Target]](),
        0,
        list[str](),
        list[tuple[str, OpjitError]](),
    )
    absent, resolved = set[str](), dict[tuple[str, str], list[Target]]()
    for uses in recorded.values():
        try:
            op, declared = _resolve_op(uses[0], absent)
            found = batch.pairs([op], targets or ())
            for pair in () if declared else found:
                _require_closed(*pair, scan)
        except OpjitError as error:
            failed.append((uses[0].op, error))
            continue
        if targets is not None:
            pairs += found
            skipped += len(targets) - len(found)
            continue
        for use in uses:
            name, place = f"{use.op} for {use.backend} {use.arch}", (use.backend, use.arch)
            try:
                for_hosts = resolved.get(place) or [
                    _resolve_target(use, name, store, host) for host in hosts or (None,)
                ]
                found = [(op, target) for target in resolved.setdefault(place, for_hosts)]
                if not declared:
                    _require_closed(*found[0], scan)
                pairs += found
            except OpjitError as error:
                failed.append((name, error))
    # A declared op may replace several recorded ones, which differ.
    ops = batch.requests(dict.fromkeys(pairs), store, root is not None, failed, scan)
    others = _plan_extensions(
        calls, Path(path), store, root is not None, extensions, remarks, failed
    )
    return Plan(
        [*ops, *others],
        skipped,
        store,
        root is not None,
        remarks,
        failed,
        Path(path),
    )


def _plan_extensions(
    listed: Sequence[RecordedExtension],
    path: Path,
    store: Store,
    shared: bool,
    allowed: bool,
    remarks: list[str],
    failed: list[tuple[str, OpjitError]],
) -> list[Wanted]:
    """Return the requests for a list's extensions and shared libraries, each content once."""
    found = dict[str, Wanted]()
    if listed and not allowed:
        remarks.append(
            f"{len(listed)} C++ extensions of the list are not built, as their flags and initialisers can run any code; "
            "if you trust the list, give --extensions (in Python: extensions=True)"
        )
        return []
    for each in listed:
        try:
            of_list = (
                recorded_libraries.request
                if each.function == recorded_libraries.FUNCTION
                else extension_binary.of_recorded
            )
            wanted: Wanted = of_list(each, os.path.dirname(os.path.abspath(path)), store)
            found.setdefault(wanted.name, wanted.in_store() if shared else wanted)
        except OpjitError as error:
            failed.append((each.name, error))
    return list(found.values())


def _store(root: str | os.PathLike[str] | None) -> Store:
    if root is None:
        return Store(default_root())
    folder = Path(os.path.abspath(os.path.expanduser(root)))
    if not os.path.exists(folder):  # pathlib's raises an error where the path cannot be entered
        with suppress(OSError):  # the builds' errors say why the store cannot keep them
            folder.mkdir(parents=True)
            folder.chmod(0o755)
    return Store(folder)


def _require_closed(op: OpState, target: Target, scan: Scan) -> None:
    """Raise RecordError if another user can write what a build of an op that only the list names reads: OPJIT_PATH's rule for folders."""
    op.write_code()
    try:
        source, flags = op.declaration.source(target.backend), op.declaration.flags(target)
        read = [str(source.parent), *flags.include, *read_files(source, target, flags, scan)]
    except (OSError, NoKernel):
        return  # the build will report the error
    own = f"{resources.folder('kernels_c')}{os.sep}"
    problem = next(
        filter(None, (files.swappable(Path(path)) for path in read if not path.startswith(own))),
        None,
    )
    if problem is not None:
        raise RecordError(
            f"{op.qualified} is not built from files that only the list names: {problem}"
        )


def _resolve_op(recorded: RecordedOp, absent: set[str]) -> tuple[Op, bool]:
    """Return a list's op, and whether anything but the list declares it. `absent`: namespaces that have been searched, and lack an op."""
    schema = parse(recorded.schema)
    if schema.qualified != recorded.op:
        raise RecordError(
            f"the list has {recorded.schema!r} under the name {recorded.op}, which is another op; record it again"
        )
    if recorded.code is not None:
        from opjit.live import inline

        flags = [recorded.flags[kind] for kind in oplist.FLAGS]
        return inline.make(
            recorded.schema,
            dict(recorded.code),
            None,
            None,
            "opjit.ahead.plan",
            "a recorded list",
            f"{recorded.op} (inline code)",
            flags,
        ), False
    op = _find_declared(recorded.op, absent)
    return (_op_in_folder(recorded), False) if op is None else (op, True)


def _find_declared(name: str, absent: set[str]) -> Op | None:
    """Return the op that anything but a list declares; `absent`: see `_resolve_op`."""
    namespace = name.partition("::")[0]
    with suppress(UnknownOp):
        return registry.declared(name) if namespace in absent else registry.find(name)
    absent.add(namespace)
    return None


def _op_in_folder(recorded: RecordedOp) -> Op:
    folder, flags = Path(recorded.folder or ""), recorded.flags
    if not folder.is_absolute() or not folder.is_dir():
        raise RecordError(
            f"{recorded.op} is not here: no op of that name is declared or installed, and there is no folder "
            f"{recorded.folder}; name the folder that contains the op in OPJIT_PATH, or install its package"
        )
    extra = (
        check(recorded.op, folder, *(flags[kind] for kind in oplist.FLAGS))
        if any(flags.values())
        else None
    )
    schema = parse(recorded.schema, recorded.tags or ())
    # torch never sees this op, so nothing calls its fake kernel.
    return Op(Declaration(schema, lambda *args, **kwargs: None, folder, extra))


def _resolve_target(recorded: RecordedOp, name: str, store: Store, host: str | None) -> Target:
    backend = next(
        (each for each in backends.all_backends() if each.name == recorded.backend), None
    )
    if backend is None:
        raise UnknownArch(
            f"{name} cannot be built: this process has no backend {recorded.backend!r}; import the package that adds it with "
            "opjit.register_backend first"
        )
    return toolchain.target_of(recorded.arch, store.notes, backend, host)
