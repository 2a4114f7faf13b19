"""Ops and C++ extensions for all ranks of a job: a missing entry is built once in the whole job, and the nodes that lack it get its bytes.

    >>> import opjit.distributed
    >>> allreduce, = opjit.distributed.ready(["allreduce"])         # at the start of a training script, on every rank
    >>> module = opjit.distributed.load("ext", ["ext.cpp"])         # instead of opjit.load

job.py has the ranks' protocol, and ranks.py how a process learns its rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from opjit import backends, cpp_extension, progress, request
from opjit.backends import targets
from opjit.backends.targets import Target
from opjit.cpp_extension import binary
from opjit.cpp_extension.binary import ExtensionBinary
from opjit.cpp_extension.identity import Unsupported
from opjit.cpp_extension.recorded import with_defaults
from opjit.declare import catalog
from opjit.declare.op import Op
from opjit.distributed import ranks
from opjit.distributed.job import Job
from opjit.distributed.ranks import Rank
from opjit.distributed.rendezvous import StoreLost, connect
from opjit.distributed.wanted_entry import WantedEntry
from opjit.errors import BadSetting, CacheWarning, OpjitError, one_string
from opjit.store.entry import Entry
from opjit.store.store import Store, default_root
from opjit.survey import Pair, Survey
from opjit.wanted import OpBinary

__all__ = ["load", "load_inline", "ready"]

_CONNECT_TIMEOUT = 60.0  # seconds that a rank with missing entries waits for the job's store
_OFFER_TIMEOUT = 2.0  # the same for a rank that misses nothing


class Outcome(NamedTuple):
    """What became of one entry that this rank wants.

    Attributes:
        entry: the verified binary on this rank; None if there is an error.
        error: why there is no entry; an error in the op's source is the same on every rank.
        origin: ``"found"`` in a cache, ``"built"`` by this rank, or ``"taken"`` from another rank.
    """

    op: Op
    target: Target
    entry: Entry | None
    error: OpjitError | None
    origin: str


def ready(names: Sequence[str], device: object = None) -> list[torch._ops.OpOverload]:
    """Ready ops on all ranks of a job. Call it on every rank, before or after `init_process_group`.

    A rank with a free core builds a missing entry, once in the whole job, and the job's store passes the bytes to the nodes that lack
    it. Ranks with different archs or compilers have separate entries. A rank that dies delays the others by 5 s. A late rank finds
    the results. If the store is unreachable, each rank builds alone, with one warning. In a process that is not a rank, this is
    `opjit.get` for each name.

    The environment tells the ranks of torchrun, Slurm's srun and MPI; see `opjit.distributed.ranks`. Without torchrun and without a
    process group, rank 0 hosts the store on MASTER_PORT until it exits; `init_process_group` shares that store.

    Trust: entries come from the job's store, so anyone who can reach its port can make the ranks run code, as with torch.distributed
    itself. A received entry must be complete, have the requested key and fit this machine.

    Args:
        names: as for `opjit.get`.
        device: as for `opjit.get`.

    Returns:
        The torch operators, in the order of the names.

    Raises:
        UnknownOp, UnknownDevice, DeviceUnavailable, NoKernel, ToolMissing, CompileError: see `opjit.errors`. A compile error is
            raised on every rank.

    Example:
        >>> allreduce, = opjit.distributed.ready(["allreduce"], "cpu")
        >>> allreduce(torch.ones(3))
        tensor(3.)
    """
    if isinstance(names, str):
        raise BadSetting(one_string("opjit.distributed.ready", "names", names))
    target = targets.here(backends.for_device(targets.device_type(device)))
    outcomes = share([(catalog.find(name), target) for name in names])
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
        request.ready(outcome.op, target.backend, outcome.entry)
    return [outcome.op.overload for outcome in outcomes]


def load(name: str, sources: str | list[str], **arguments: Any) -> Any:
    """`opjit.load` on all ranks of a job: a missing extension is built once in the whole job, as `ready` builds an op.

    Call it on every rank. A rank whose torch, Python, flags or headers differ has an entry of its own. What only torch can build, each rank
    loads through torch.

    Args:
        arguments: as for `opjit.load`.

    Example:
        >>> module = opjit.distributed.load("ext", ["ext.cpp"], extra_cflags=["-O2"])
    """
    return _load(cpp_extension.load, {"name": name, "sources": sources, **arguments})


def load_inline(name: str, cpp_sources: str | list[str], **arguments: Any) -> Any:
    """`opjit.load_inline` on all ranks of a job; see `load`.

    Example:
        >>> source = "at::Tensor twice(at::Tensor x) { return x + x; }"
        >>> opjit.distributed.load_inline("ext", source, functions="twice").twice(torch.ones(1))
        tensor([2.])
    """
    return _load(cpp_extension.load_inline, {"name": name, "cpp_sources": cpp_sources, **arguments})


def _load(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    store, given = Store(default_root()), with_defaults(function, arguments)
    try:
        wanted = binary.of_call(given, store.notes, fast=given.pop("fast"))
    except Unsupported:
        return function(**arguments)
    [entry] = share_extensions([wanted], store)
    if entry.error is not None:
        raise entry.error
    return cpp_extension.load_wanted(function.__name__, wanted, entry.entry)


def share(wanted: Iterable[tuple[Op, Target]], store: Store | None = None, *, layers: bool = True, offer: bool = True,
          must_store: bool = False, jobs: int | None = None) -> list[Outcome]:
    """Find or build entries together with the job's other ranks, which also call this. Nothing is loaded.

    The ranks may want different entries; each returns when it has its own. Errors are in the outcomes.

    Args:
        store: where entries go; None is the cache.
        layers: also look into the layers.
        offer: also send entries that this node had before the call to nodes that lack them.
        must_store: an entry must be in the store; a layer or a private folder will not do.
        jobs: builds at once on a machine, over all ranks there; None is what `budget.jobs` finds.

    Raises:
        NoKernel: an op has no source for a target's backend.
        OpjitError: the environment's variables for ranks are invalid.
    """
    store = store or Store(default_root())
    survey, entries, pairs = Survey(store, layers), list[WantedEntry](), list(wanted)
    for op, target in pairs:
        recipe = survey.recipe(Pair(op, target))
        entries.append(WantedEntry(OpBinary(op, target, recipe, must_store), survey.look(recipe), store, must_store))
    _settle(entries, store, offer, jobs)
    return [Outcome(op, target, entry.entry, entry.error, entry.origin) for (op, target), entry in zip(pairs, entries, strict=True)]


def share_extensions(wanted: Iterable[ExtensionBinary], store: Store, *, offer: bool = True, must_store: bool = False,
                     jobs: int | None = None) -> list[WantedEntry]:
    """The same for C++ extensions. A request's own `must_store` says whether a layer's entry will do."""
    entries = [WantedEntry(each._replace(must_store=must_store), each.find(store), store, must_store) for each in wanted]
    _settle(entries, store, offer, jobs)
    return entries


def _settle(entries: list[WantedEntry], store: Store, offer: bool, jobs: int | None) -> None:
    rank = ranks.current()
    if rank is not None and rank.needs_store:
        _settle_with_others(rank, entries, store, offer and rank.leader and not rank.one_node, jobs)
    for entry in entries:
        if not entry.settled:
            entry.build()


def _settle_with_others(rank: Rank, entries: list[WantedEntry], store: Store, offer: bool, jobs: int | None) -> None:
    missing = [entry for entry in entries if entry.entry is None]
    offers = [entry for entry in entries if offer and entry.entry is not None]
    if not missing and rank.number != 0 and rank.one_node:
        return
    what = "binary" if len(entries) == 1 else "binaries"
    with progress.status(f"readying {len(entries)} {what} with {rank.size} ranks") as show, progress.on_status(show):
        try:
            if missing and rank.number != 0:
                show("waiting for the job's store" + (f" on rank 0, at {':'.join(map(str, rank.address))}" if rank.address else ""))
            job = Job(connect(rank, _CONNECT_TIMEOUT if missing else _OFFER_TIMEOUT), rank, store, show, jobs)
            if missing:
                job.run(offers, missing)
            else:
                job.offer(offers)
        except StoreLost as lost:
            if any(not entry.settled for entry in missing):
                warnings.warn(CacheWarning(f"rank {rank.number} builds its missing ops alone, because the job's store is out of reach: "
                                           f"{lost}"), stacklevel=4)
