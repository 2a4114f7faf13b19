"""The proof by stat alone that the entries of a list are all there: 30 ms of CPU for 1,000 (tests/benchmarks/precompile.py). The marker of
a complete set, see opjit/store/sets.py, is derived: where it is gone, or anything differs, the list is planned and each manifest read."""

import hashlib
import os
import platform
from array import array
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from opjit import backends, files
from opjit.ahead.plan import Listed, Plan, known, plan_recorded
from opjit.declare import registry
from opjit.declare.op_state import OpState
from opjit.errors import OpjitError
from opjit.recipe import toolchain
from opjit.recipe.headers import Scan
from opjit.recipe.recipe import read_files
from opjit.store import layers, sets
from opjit.store.store import Store, default_root
from opjit.wanted import OpBinary, describe

_UNKNOWN = (
    OpjitError,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)  # no marker, or a damaged one


def proven(listed: Listed) -> int | None:
    """Return the number of entries if a marker of the named store, or else of the cache or a layer, fits what is here now."""
    path, _, root, extensions, _ = listed
    places = [(Store(default_root()), False), *((Store(layer), True) for layer in layers.named())]
    for store, shared in (
        ()
        if extensions
        else places
        if root is None
        else [(Store(Path(os.path.abspath(os.path.expanduser(root)))), True)]
    ):
        with suppress(*_UNKNOWN):
            seen = sets.read(store, Path(path))
            if store.trusted() and seen["state"] == _state(listed, store, shared, seen):
                return len(seen["entries"])
    return None


def mark(plan: Plan) -> None:
    """Note that all entries of a list are there. Ops are proved by stat if a second plan, made after it has looked, is the same."""
    assert plan.listed is not None
    if proven(plan.listed) is not None:
        return
    seen = dict[str, Any]()
    with suppress(*_UNKNOWN):
        looked = _look(plan)
        state = _state(plan.listed, plan.store, plan.shared, looked)
        again = plan_recorded(*plan.listed)
        seen = {"state": state, **looked} if not again.failed and _look(again) == looked else {}
    sets.mark(
        plan.store,
        Path(plan.listed[0]),
        {"entries": sorted(map(str, plan.wanted)), **seen},
        plan.shared,
    )


def _look(plan: Plan) -> dict[str, Any]:
    """Return what decides whether a request finds each entry. Raises LookupError if one is missing or an extension, whose key has more."""
    ops, found, paths, scan = (
        dict[str, list[Any]](),
        set[tuple[str, str, str]](),
        set[str](),
        Scan(),
    )
    for wanted in plan.wanted:
        entry = wanted.find(plan.store, warn=False, hashed=False)
        if (
            entry is None
            or not isinstance(wanted, OpBinary)
            or ops.setdefault(wanted.op.qualified, named := _named(wanted.op)) != named
        ):
            raise LookupError(str(wanted))
        recipe, target = wanted.recipe, wanted.target
        found.add((target.backend.name, target.arch, target.host))
        read = read_files(recipe.source, target, recipe.flags, scan)
        places = {
            *read,
            *map(os.path.dirname, read),
            *recipe.include_path,
        }  # a folder changes with the names in it
        of_list = (
            f"{recipe.folder}" if wanted.op.declaration.code else "\0"
        )  # this process's, of code that is in the list
        paths |= {
            str(entry.folder),
            str(entry.library),
            *(path for path in places if not path.startswith(of_list)),
        }
    return {"ops": ops, "targets": sorted(map(list, found)), "paths": sorted(paths)}


def _named(op: OpState) -> list[Any]:
    """Return an op's declaration, and whether anything but the list declares it."""
    return [
        repr(
            (
                op.schema.text,
                op.declaration.code is None and str(op.declaration.folder),
                op.declaration.flags_of_author,
            )
        ),
        registry.declared(op.qualified) is op,
    ]


def _state(listed: Listed, store: Store, shared: bool, seen: Mapping[str, Any]) -> str:
    """Return a digest of what is there now. The keys of a bundled op, for the same targets, cover the compilers and opjit's own code."""
    path, archs, _, _, hosts = listed
    absent, by_name = set[str](), {backend.name: backend for backend in backends.all_backends()}
    found: list[object] = [
        files.digest(str(path)),
        [*archs],
        [*hosts],
        platform.machine(),
        shared or os.environ.get("OPJIT_LAYERS"),
    ]
    for name, (declaration, declared) in seen["ops"].items():
        op = known(name, absent)
        found.append(_named(op)[0] if op else None if declared else declaration)
    for backend, arch, host in seen["targets"]:
        recipe = describe(
            registry.find("opjit::allreduce"),
            toolchain.target_of(arch, store.notes, by_name[backend], host),
            store,
        )
        found.append([str(recipe), recipe.base, recipe.keys])
    statuses = map(os.stat, seen["paths"])
    numbers = array(
        "Q",
        [
            number
            for status in statuses
            for number in (status.st_ino, status.st_size, status.st_ctime_ns)
        ],
    )
    return hashlib.sha256(
        repr(found).encode("utf-8", "surrogateescape") + numbers.tobytes()
    ).hexdigest()
