"""Build ops and C++ extensions once per job, and run kernels across the ranks of a job.

    >>> import opjit.distributed
    >>> allreduce, = opjit.distributed.ready(["allreduce"])         # at the start of a training script, on every rank
    >>> module = opjit.distributed.load("ext", ["ext.cpp"])         # instead of opjit.load

One rank builds a missing entry, and nodes that lack it get a copy. `peers` makes a group of ranks for kernels that read each other's
memory.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from opjit import backends, batch, cpp_extension, progress, request
from opjit.backends import targets
from opjit.catalog import registry
from opjit.cpp_extension.arguments import InlineCall, LoadCall

# Importing a module from the package would query the package, which imports torch.
from opjit.cpp_extension.binary import (
    of_call,
)
from opjit.cpp_extension.identity import Unsupported
from opjit.distributed import ranks
from opjit.distributed.job import Job, RankTask
from opjit.distributed.peer_groups import (
    MAX_RANKS,
    Peers,
    check,
    gathered,
    peers,
    rank_in,
    world_size,
)
from opjit.distributed.ranks import Rank
from opjit.distributed.rendezvous import StoreLost, connect
from opjit.errors import BadSetting, one_string, warn_of_cache
from opjit.store.store import Store, default_store
from opjit.wanted import BinaryRequest, here

__all__ = [
    "MAX_RANKS",
    "Peers",
    "check",
    "gathered",
    "load",
    "load_inline",
    "peers",
    "rank_in",
    "ready",
    "world_size",
]

_CONNECT_TIMEOUT = 60.0  # seconds that a rank with missing entries waits for the job's store
_OFFER_TIMEOUT = 2.0  # the same for a rank that misses nothing


def ready(names: Sequence[str], device: object = None) -> list[torch._ops.OpOverload]:
    """Make ops available on all ranks of a job. Call it on every rank, before or after `init_process_group`.

    One rank builds a missing entry, once per job, and nodes that lack it download it through the store of the job. Each rank builds one
    entry at a time. Ranks with different architectures or compilers use separate entries. When a rank dies, it delays the job by up to
    60 s. A late rank finds the results. A rank that cannot build waits for at most 10 minutes for a rank that can. If the store is
    unreachable, each rank builds alone, with one warning. In a process that is not a rank, this is `opjit.get` for each name.

    opjit reads the rank from the variables of torchrun, Slurm's srun and MPI, see `opjit.distributed.ranks`. Without torchrun and without a
    process group, rank 0 hosts the store on MASTER_PORT until it exits; `init_process_group` shares that store.

    Trust: entries come from the job's store, so anyone who can reach its port can make the ranks run code, like with
    torch.distributed. A received entry must be complete, have the requested key and fit this machine.

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
    target = here(backends.for_device(targets.device_type(device)))
    ops = [registry.find(name) for name in names]
    store = default_store()
    wanted = batch.requests(((op, target) for op in ops), store)
    for each, task in zip(wanted, share(wanted, store), strict=True):
        if each.op in ops:  # not one of its other variants, which may fail
            if task.error is not None:
                raise task.error
            request.ready(each.op, target.backend, task.entry)
    return [op.overload for op in ops]


def load(name: str, sources: str | list[str], **arguments: Any) -> Any:
    """Call `opjit.load` on all ranks of a job, and build a missing extension once per job.

    Call it on every rank. Ranks with different versions of torch and Python, flags or headers use separate entries. If only torch can
    build an extension, each rank loads it through torch.

    Args:
        arguments: as for `opjit.load`.

    Example:
        >>> module = opjit.distributed.load("ext", ["ext.cpp"], extra_cflags=["-O2"])
    """
    return _load_together(LoadCall.of({"name": name, "sources": sources, **arguments}))


def load_inline(name: str, cpp_sources: str | list[str], **arguments: Any) -> Any:
    """Call `opjit.load_inline` on all ranks of a job, and build a missing extension once per job, like `load`.

    Example:
        >>> source = "at::Tensor twice(at::Tensor x) { return x + x; }"
        >>> opjit.distributed.load_inline("ext", source, functions="twice").twice(torch.ones(1))
        tensor([2.])
    """
    return _load_together(InlineCall.of({"name": name, "cpp_sources": cpp_sources, **arguments}))


def _load_together(call: LoadCall | InlineCall) -> Any:
    store = default_store()
    try:
        wanted = of_call(call, store.notes)
    except Unsupported:
        return cpp_extension.load_by_torch(call)
    [task] = share([wanted], store)
    if task.error is not None:
        raise task.error
    return cpp_extension.load_wanted(wanted, task.entry)


def share(wanted: Iterable[BinaryRequest], store: Store, *, ahead: bool = False) -> list[RankTask]:
    """Find or build entries together with the job's other ranks, which also call this function.

    Nothing is loaded, and errors are in the tasks. With `ahead`, each built entry must be in the
    store, and entries that this node had before are not sent to nodes that lack them.
    """
    tasks = [
        RankTask(each.in_store() if ahead else each, request.lookup(each, store), store)
        for each in wanted
    ]
    rank = ranks.current()
    if rank is not None and rank.needs_store:
        _settle_with_others(rank, tasks, rank.leader and not rank.one_node and not ahead)
    for task in tasks:
        if not task.done:
            task.build()
    return tasks


def _settle_with_others(rank: Rank, tasks: list[RankTask], offer: bool) -> None:
    missing = [task for task in tasks if task.entry is None]
    offers = [task for task in tasks if offer and task.entry is not None]
    if not missing and rank.number != 0 and rank.one_node:
        return
    what = progress.tally(len(tasks), "binary")
    with (
        progress.status(f"readying {what} with {rank.size} ranks") as show,
        progress.on(progress.STATUS, show),
    ):
        try:
            if missing and rank.number != 0:
                show(
                    "waiting for the job's store"
                    + (f" on rank 0, at {':'.join(map(str, rank.address))}" if rank.address else "")
                )
            Job(connect(rank, _CONNECT_TIMEOUT if missing else _OFFER_TIMEOUT), rank, show).run(
                offers, missing
            )
        except StoreLost as lost:
            if any(not task.done for task in missing):
                warn_of_cache(
                    f"rank {rank.number} builds its missing ops alone, because the job's "
                    "store is unreachable: "
                    f"{lost}"
                )
