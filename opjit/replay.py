"""From a list of ops that was recorded, perhaps on another machine, to what is to be built here.

An op is looked for by its name: bundled, in OPJIT_PATH, and in installed packages. One that is not found is built from its folder, if
that is here, or from its code. A list may come from anybody, so nothing that only the list names is run: of such a folder no op.py is
imported, but its C or CUDA source is compiled, with the schema and the flags of the list, which are checked like those of a
declaration. What comes of it is an entry under the key of just that content, which only a program that asks for it will load.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from opjit import backends, catalog, extras, inlined, oplist, plan
from opjit.errors import OpjitError, RecordError, UnknownArch, UnknownOp
from opjit.op import Op
from opjit.oplist import Line
from opjit.plan import Wanted
from opjit.schema import parse
from opjit.store import Store
from opjit.targets import Target


class Found(NamedTuple):
    """What a list comes to; the fields are those of `ahead.Work`."""

    wanted: list[Wanted]
    skipped: int
    remarks: list[str]
    failed: list[tuple[str, OpjitError]]


def find(path: Path, targets: Sequence[Target] | None, store: Store) -> Found:
    """The ops of a list, with their targets.

    Args:
        targets: to build each op for; None is what the list says.
        store: as `plan.targets_of` takes it.

    Raises:
        RecordError: it is no list.
        DeclarationError: OPJIT_PATH names a folder that is not to be run.
    """
    found = Found([], 0, [], [])
    skipped = 0
    ops: dict[str, Op | None] = {}
    for line in oplist.read(path):
        identity = repr(line._replace(backend="", arch="", runtime=""))
        first = identity not in ops
        if first:
            ops[identity] = _op(line, found)
        op = ops[identity]
        if op is None:
            continue
        if targets is None:
            target = _target(line, store, found)
            if target is not None:
                found.wanted.append(Wanted(op, target))
        elif first:
            pairs = plan.pairs([op], targets)
            found.wanted.extend(pairs)
            skipped += len(targets) - len(pairs)
    # A declared op may stand for several lines, of which its recorded forms differ.
    return found._replace(wanted=list(dict.fromkeys(found.wanted)), skipped=skipped, remarks=list(dict.fromkeys(found.remarks)))


def _op(line: Line, found: Found) -> Op | None:
    try:
        schema = parse(line.schema)
        if schema.qualified != line.op:
            raise RecordError(f"the list calls {line.schema!r} by the name {line.op}, which is another; record it again")
        if line.code is not None:
            return _inline(line)
        try:
            known = catalog.find(line.op)
        except UnknownOp:
            return _in_folder(line)
        if known.schema.text != schema.text:
            found.remarks.append(f"{line.op} was recorded as {schema.text!r} and is declared here as {known.schema.text!r}, as which it is "
                                 "built")
        return known
    except OpjitError as error:
        found.failed.append((line.op, error))
        return None


def _inline(line: Line) -> Op:
    flags = line.flags
    return inlined.make(line.schema, dict(line.code or {}), None, None, "opjit.replay", "a recorded list", f"{line.op} (inline code)",
                        extra_cflags=flags["c"], extra_cuda_cflags=flags["cuda"], extra_ldflags=flags["link"],
                        extra_include_paths=flags["include"])


def _in_folder(line: Line) -> Op:
    folder, flags = Path(line.folder or ""), line.flags
    if not folder.is_absolute() or not folder.is_dir():
        raise RecordError(f"{line.op} is not here: no op of that name is declared or found, and there is no folder {line.folder}; name "
                          "the folder that it is in with OPJIT_PATH, or install its package")
    extra = None
    if any(flags.values()):
        extra = extras.check(line.op, folder, flags["c"], flags["cuda"], flags["link"], flags["include"])
    return Op(line.schema, _never_called, folder, extra)


def _never_called(*args: Any, **kwargs: Any) -> None:
    """The op is not made known to torch."""


def _target(line: Line, store: Store, found: Found) -> Target | None:
    name = f"{line.op} for {line.backend} {line.arch}"
    try:
        backend = next((each for each in backends.all_backends() if each.name == line.backend), None)
        if backend is None:
            raise UnknownArch(f"{name} cannot be built: this process has no backend {line.backend!r}; a package that adds one with "
                              "opjit.register_backend must be imported first")
        target = plan.target_of(line.arch, store, backend)
    except OpjitError as error:
        found.failed.append((name, error))
        return None
    if target.runtime != line.runtime:
        found.remarks.append(f"ops were recorded with {line.runtime or 'no runtime'} for {line.arch}, and are built here with "
                             f"{target.runtime or 'none'}: a process with another one will not find them")
    return target
