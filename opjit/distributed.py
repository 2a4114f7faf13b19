"""Ops for all ranks of a job: whatever is missing is built once in the whole job, and the nodes that lack it get the bytes.

    >>> import opjit.distributed
    >>> opjit.distributed.ready(["allreduce"])      # at the start of a training script, on every rank

How the ranks agree is in job.py; who and where they are, in ranks.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from opjit import api, backends, catalog, progress, ranks, targets
from opjit.errors import BadSetting, CacheWarning, OpjitError, one_string
from opjit.item import Item, Make
from opjit.jobstore import Lost, connect
from opjit.op import Op
from opjit.plan import Survey
from opjit.ranks import Place
from opjit.store import Entry, Store, default_root
from opjit.targets import Target

_CONNECT = 60.0  # seconds to wait for the job's store by who lacks something
_OFFER = 2.0  # the same by who has all


class Outcome(NamedTuple):
    """What became of one wanted entry.

    Attributes:
        entry: the verified binary on this rank; None where there is an error.
        error: why there is none; on every rank the same where the op's source is to blame.
        origin: ``"found"`` in a cache, ``"built"`` by this rank, or ``"taken"`` from another rank.
    """

    op: Op
    target: Target
    entry: Entry | None
    error: OpjitError | None
    origin: str


def ready(names: Sequence[str], device: object = None) -> list[torch._ops.OpOverload]:
    """Ready ops on every rank of a job; call it on each of them, before or after `init_process_group`.

    An entry that some node lacks is built once in the whole job, by whichever rank has time, and handed to the others through the
    job's store. A rank that dies costs the others 5 s; one that starts late finds the results; without the store, each rank builds
    for itself, with one warning. Ranks with other archs or compilers have entries of their own. In a process that is no rank it is
    `opjit.get` for each name.

    The ranks are those of torchrun, Slurm's srun and MPI, which say so in the environment (see `opjit.ranks`). Without torchrun and
    without a process group rank 0 is the store's host, on MASTER_PORT, for as long as it lives; `init_process_group` uses the same.

    Trust: the bytes come from the job's own store, so whoever can reach its port can make the ranks run code, as is the case for
    torch.distributed itself. What arrives must be the entry that was asked for, whole, and fit this machine.

    Args:
        names: as `opjit.get` takes them.
        device: as `opjit.get` takes it.

    Returns:
        The torch operators, in the order of their names.

    Raises:
        UnknownOp, UnknownDevice, DeviceUnavailable, NoKernel, ToolMissing, CompileError: see `opjit.errors`. A compile error is the
            builder's, on every rank.

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
        api.ready(outcome.op, target.backend, outcome.entry)
    return [api.get(name, device) for name in names]


def share(wanted: Iterable[tuple[Op, Target]], store: Store | None = None, *, layers: bool = True, offer: bool = True,
          make: Make | None = None, jobs: int | None = None) -> list[Outcome]:
    """Find or build entries together with the job's other ranks, which call this too; nothing is loaded.

    The ranks need not want the same: each returns when it has its own. Errors are in the outcomes.

    Args:
        store: where entries go; default: the cache.
        layers: look into the layers too.
        offer: hand what this node had before to nodes that lack it, not only what is built now.
        make: builds and publishes; see `api.build_once`.
        jobs: builds at once on a machine, of all ranks there; None is what `budget.jobs` finds.

    Raises:
        NoKernel: an op has no source for a target's backend.
        OpjitError: what the environment says of the rank makes no sense.
    """
    place, store = ranks.found(), store or Store(default_root())
    survey = Survey(store, layers)
    items = [Item(op, target, survey, store, make) for op, target in wanted]
    if place is not None and place.meets:
        missing = [item for item in items if item.entry is None]
        if missing or place.rank == 0 or not place.one_node:
            offers = [item for item in items if item.entry is not None] if offer and place.leader and not place.one_node else []
            with progress.shown(f"readying {len(items)} op{'s' * (len(items) != 1)} with {place.size} ranks") as say, progress.told(say):
                _share_with(place, offers, missing, store, say, jobs)
    for item in items:
        if not item.settled:
            item.build()
    return [Outcome(item.op, item.target, item.entry, item.error, item.origin) for item in items]


def _share_with(place: Place, offers: list[Item], missing: list[Item], store: Store, say: Callable[[str], None], jobs: int | None) -> None:
    """Settle all that can be settled with the other ranks' help."""
    from opjit.job import Job  # a rank that has all has no part in one, unless it offers

    try:
        if missing and place.rank != 0:
            say("waiting for the job's store" + (f" on rank 0, at {':'.join(map(str, place.address))}" if place.address else ""))
        line = connect(place, _CONNECT if missing else _OFFER, lambda: bool(missing) and all(item.look() for item in missing))
        job = Job(line, place, store, say, jobs)
        if not missing:
            job.offer(offers)
            return
        with job:
            job.run(offers, missing)
    except Lost as lost:
        if any(not item.settled for item in missing):
            warnings.warn(CacheWarning(f"rank {place.rank} builds what it lacks by itself, as the job's store is out of reach: {lost}"),
                          stacklevel=5)
