"""Groups of ranks with kernels that reach each other's memory. Libraries read a group as an `opjit_group` of
kernels_c/opjit_peers.h.

The ranks of a group are processes of one machine. They share a page with the group's error words, which the kernels of all ranks and a
thread in each process write: the thread waits for the other processes to end. `peer_memory` gets the memory that kernels use."""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import Any

import torch

from opjit import loader, processes
from opjit.distributed.peer_memory import SIGNAL_BYTES, Members, PeerMemory, tensor_at
from opjit.errors import BadSetting, PeerLost

MAX_RANKS = 8
_ALONE = "alone"  # the group of a process that is in no process group
_TIMEOUT = 10.0  # seconds
_DIED = 2  # OPJIT_DIED
# Why a rank was lost, by the numbers of opjit_peers.h. Libraries read them for their errors.
_REASONS = (
    "was lost",
    "did not come in time",
    "has ended",
    "called another op, other sizes or another grid",
    "launched a kernel with another grid or block than it gave opjit_peers_launch()",
)
_GROUP_WORDS = 28  # of an opjit_group
_TIMEOUT_WORD = 7  # of them
_TENSORS_WORD = 14


@dataclass(frozen=True)
class Peers:
    """A group of ranks with kernels that read and write each other's memory.

    Attributes:
        name: the name of the group. Pass it to ops as their ``str group``.
        rank: the number of this process in the group.
        world: the number of ranks.
        device: the device of this rank.
        bytes: the size of the buffer of each rank.
        timeout: the seconds that a kernel waits for a rank.
    """

    name: str
    rank: int
    world: int
    device: torch.device
    bytes: int  # of the buffer that each rank offers
    timeout: float  # seconds that a kernel waits for a rank

    def check(self) -> None:
        """Raise PeerLost if a rank was lost, like `opjit.distributed.check`."""
        check(self.name)

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Make a tensor that the kernels of all ranks reach.

        Call it on every rank of the group, with the same arguments, outside a CUDA graph. `all_reduce_ranks_` adds such tensors where they
        are, without copies through the group's memory. A kernel finds the tensors of the other ranks by `opjit_tensors_of`. The memory is
        never freed, because kernels of other ranks and captured graphs use it.

        Returns:
            A tensor of zeros on the group's device.

        Raises:
            BadSetting: the arguments differ between the ranks, or are invalid.
            PeerLost: the group was lost.

        Example:
            >>> group = opjit.distributed.peers(device="cpu")
            >>> x = group.empty((2, 3))
            >>> _ = opjit.get("all_reduce_ranks_", "cpu")(x.fill_(1), group.name)
        """
        self.check()
        live = _groups[self.name, self.device]
        members = _members(live.members())
        if members.name != self.name:
            raise BadSetting(f"the process group of {self.name} was destroyed")
        asked = members.exchange((tuple(shape), dtype))
        if len(set(asked)) > 1:
            raise BadSetting(
                f"the ranks of group {self.name} must call empty() with the same arguments; shape and dtype are {asked}"
            )
        size = torch.empty(shape, dtype=dtype, device="meta").nbytes
        starts, memory = members.reach(max(size, 1), self.device)
        words = (ctypes.c_uint64 * (2 + len(starts)))(live.words[_TENSORS_WORD], size, *starts)
        live.tensors.append((words, memory))
        live.words[_TENSORS_WORD] = ctypes.addressof(words)
        members.exchange(None)  # no rank calls an op before all ranks know the tensor
        return tensor_at(starts[self.rank], size, self.device).view(dtype).view(shape)


@dataclass(frozen=True)
class _LiveGroup:
    """A group, and the memory that libraries and kernels read for as long as the process lives."""

    peers: Peers
    words: Any  # the opjit_group, as an array of ctypes
    memory: PeerMemory
    members: Callable[[], Any]  # the process group, or None if it was destroyed
    kept: tuple[Any, ...]  # the texts to which the words point, and the group before
    tensors: list[Any]  # the memory of Peers.empty()

    def lost(self) -> dict[int, int]:
        """Return the error words of lost ranks by their numbers."""
        words = self.memory.lost
        first = words[0] - 1
        found = {rank: words[1 + rank] for rank in range(self.peers.world) if words[1 + rank]}
        return found if first < 0 or found else {first: 0}

    def lose(self, rank: int) -> None:
        """Note that the process of a rank has ended."""
        words = self.memory.lost
        words[1 + rank] = words[1 + rank] or _DIED
        words[0] = words[0] or 1 + rank


# By name and device, the newest of each. A group keeps the one before it, because captured graphs use its memory.
_groups: dict[tuple[str, torch.device], _LiveGroup] = {}
_lock = processes.Lock()
# A thread that is a rank has `members`: opjit.emulate runs all ranks of a group in one process.
this_thread = threading.local()


def peers(
    group: Any = None,
    bytes: int = 1 << 20,  # noqa: A002 - the usual word; the type is not needed here
    timeout: float | None = None,
    device: Any = None,
) -> Peers:
    """Make a group of ranks with kernels that read and write each other's memory.

    Call it once on every rank of the group, outside a CUDA graph. Ops with a ``str group`` argument find the group by the returned
    `name`. On CUDA, each rank has one GPU, and the GPUs reach each other by NVLink or PCIe, which a test with patterns in both directions
    confirms. In addition to the buffer, each rank allocates 192 MiB for opjit's collectives. On the CPU, ranks are processes that share
    memory.

    All ranks also make later calls together. If their group has enough bytes, such a call returns it, with the new `timeout`. If a wait
    lasts longer than `timeout`, all ranks lose the group. If a rank may only be late, for example because it compiles, choose a longer
    timeout.

    Args:
        group: a process group of torch.distributed. None means the default group or, without one, this rank alone.
        bytes: the size of the buffer of each rank, for ops that use one (`opjit_peers_of`).
        timeout: seconds that a kernel waits for a rank. None means the limit of the group or, for a new group, 10 seconds. A captured CUDA
            graph keeps its limit. The environment variable OPJIT_PEER_TIMEOUT overrides it.
        device: ``"cpu"`` or ``"cuda"``. None means the current accelerator, or the CPU.

    Returns:
        The group, with its name, the rank of this process and the number of ranks.

    Raises:
        BadSetting: the arguments differ between the ranks, or are invalid.
        PeerLost: the group was lost. Make a smaller group with the remaining ranks.
        OpjitError: the ranks are on several machines, or their GPUs do not reach each other.

    Example:
        >>> group = opjit.distributed.peers(device="cpu")
        >>> opjit.get("all_reduce_ranks", "cpu")(torch.ones(2), group.name)
        tensor([1., 1.])
    """
    where = _device(device)
    members = _members(group)
    known = _groups.get((members.name, where))
    if known is not None and known.members() is not members.group:
        known = None  # it is of a process group that was destroyed
    if known is not None:
        check(members.name)  # a lost rank would not answer
    limit = os.environ.get("OPJIT_PEER_TIMEOUT") or timeout
    asked = members.exchange((bytes, limit, where.type))
    if len(set(asked)) > 1:
        raise BadSetting(
            f"the ranks of group {members.name} must call opjit.distributed.peers with the same arguments; "
            f"bytes, timeout and device are {asked}"
        )
    if type(bytes) is not int or bytes < 0:
        raise BadSetting(
            f"bytes of opjit.distributed.peers is {bytes!r}; expected a number of bytes, 0 or more"
        )
    if limit is None:
        limit = known.peers.timeout if known is not None else _TIMEOUT
    seconds = _checked_timeout(limit)
    if members.world > MAX_RANKS:
        raise BadSetting(f"a group has at most {MAX_RANKS} ranks, not {members.world}")
    if known is not None and known.peers.bytes >= bytes:
        return _with_timeout(known, seconds)
    wanted = Peers(members.name, members.rank, members.world, where, bytes, seconds)
    _publish(wanted, members)
    members.exchange(None)  # no rank calls before all are ready
    return wanted


def _with_timeout(known: _LiveGroup, seconds: float) -> Peers:
    """Set the time limit of a group for its next calls."""
    if known.peers.timeout == seconds:
        return known.peers
    peers = replace(known.peers, timeout=seconds)
    with _lock:
        _groups[peers.name, peers.device] = replace(known, peers=peers)
        known.words[_TIMEOUT_WORD] = int(seconds * 1e9)
    return peers


def _publish(wanted: Peers, members: Members) -> None:
    """Get a group's memory, let libraries find the group, and watch the other ranks."""
    memory = members.obtain(wanted.bytes, wanted.device)
    name = ctypes.create_string_buffer(wanted.name.encode())
    reasons = (ctypes.c_char_p * len(_REASONS))(*(each.encode() for each in _REASONS))
    words = (ctypes.c_uint64 * _GROUP_WORDS)()
    # Without keeping it alive: a program may destroy it, and make another group of the same name.
    group = (lambda: None) if members.group is None else weakref.ref(members.group)
    key = wanted.name, wanted.device
    with _lock:
        live = _LiveGroup(wanted, words, memory, group, (name, reasons, _groups.get(key)), [])
        known = [
            ctypes.sizeof(words),
            loader.first_group.value or 0,
            ctypes.addressof(name),
            memory.device,
            wanted.rank,
            wanted.world,
            wanted.bytes,
            int(wanted.timeout * 1e9),
            SIGNAL_BYTES,  # where the inbox begins
            memory.buffer,
            memory.count,
            ctypes.addressof(memory.lost),
            memory.ops,
            ctypes.addressof(reasons),
            0,  # no tensors
            *memory.starts,
        ]
        for place, value in enumerate(
            known
        ):  # libraries keep the state of calls in the other words
            words[place] = value or 0
        _groups[key] = live
        loader.first_group.value = ctypes.addressof(words)
    if members.world > 1 and members.group is not None:
        threading.Thread(target=_watch, args=(live,), name="opjit peers", daemon=True).start()


def check(group: Any = None) -> None:
    """Raise PeerLost if a rank of the group ended, was late, or called a different op.

    Call it before you use the results of kernels across ranks, for example after you have synchronized a replayed graph. It costs less
    than a microsecond, because it only reads memory.

    Args:
        group: as for `peers`, or the name of a group.

    Raises:
        PeerLost: `ranks` lists the lost ranks. If a kernel waited for them, `op` is the name of its op.

    Example:
        >>> opjit.distributed.check()
    """
    name = group if isinstance(group, str) else _members(group).name
    for live in list(_groups.values()):
        lost = live.lost() if live.peers.name == name else {}
        if not lost:
            continue
        numbers = [word >> 8 for word in lost.values() if word & 255 != _DIED]
        op = live.memory.op_name(numbers[0]) if numbers else None
        reasons = [
            f"rank {rank} {_REASONS[word % 256 % len(_REASONS)]}" for rank, word in lost.items()
        ]
        where = f" in {op}" if op else ""
        raise PeerLost(
            f"group {name}{where}: {', '.join(reasons)}; the remaining ranks "
            "can make a smaller group",
            name,
            tuple(lost),
            op,
        )


def _members(group: Any) -> Members:
    import torch.distributed as dist

    of_thread: Members | None = getattr(this_thread, "members", None)
    if group is None and of_thread is not None:
        return of_thread
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return Members(_ALONE, 0, 1, None)
    chosen: Any = dist.group.WORLD if group is None else group
    rank = dist.get_rank(chosen)
    if rank < 0:
        raise BadSetting("this rank is not in the group that opjit.distributed.peers was given")
    return Members(chosen.group_name, rank, dist.get_world_size(chosen), chosen)


def gathered(x: torch.Tensor, name: str) -> list[torch.Tensor]:
    """Return the tensors of all ranks of a group, with a collective of torch.

    Use it in the reference of an op, because a reference must not use opjit's collectives.

    Example:
        >>> opjit.distributed.gathered(torch.ones(2), opjit.distributed.peers(device="cpu").name)
        [tensor([1., 1.])]
    """
    of_thread: Members | None = getattr(this_thread, "members", None)
    if of_thread is not None and of_thread.name == name:
        return of_thread.exchange(x.clone(memory_format=torch.contiguous_format))
    if name == _ALONE:
        return [x]
    import torch.distributed as dist

    group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


def world_size(name: str) -> int:
    """Return the number of ranks of the group with this name, for example in a fake kernel.

    Example:
        >>> opjit.distributed.world_size(opjit.distributed.peers(device="cpu").name)
        1
    """
    return _peers_named(name).world


def rank_in(name: str) -> int:
    """Return the rank of this process in the group with this name, for example in a reference.

    Example:
        >>> opjit.distributed.rank_in(opjit.distributed.peers(device="cpu").name)
        0
    """
    return _peers_named(name).rank


def _peers_named(name: str) -> Peers:
    found = [live.peers for live in list(_groups.values()) if live.peers.name == name]
    if not found:
        raise BadSetting(f"there is no group {name}; call opjit.distributed.peers() for it first")
    return found[-1]


def _device(device: Any) -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    chosen = torch.device(device or accelerator or "cpu")
    if chosen.type not in ("cpu", "cuda"):
        raise BadSetting(f"opjit.distributed.peers supports cpu and cuda, not {chosen.type}")
    if chosen.type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def _checked_timeout(limit: float | str) -> float:
    with suppress(ValueError, TypeError):
        if 0 < float(limit) < 1e6:
            return float(limit)
    raise BadSetting(
        f"the time limit of a group of ranks is {limit!r}; expected seconds above 0 and below 1000000"
    )


def _watch(live: _LiveGroup) -> None:
    """Wait for the other ranks' processes to end: a kernel that waits for one then stops within a millisecond."""
    ranks = dict[int, int]()
    for rank, pid in enumerate(live.memory.pids):
        if rank == live.peers.rank:
            continue
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            live.lose(rank)
            continue
        except OSError:  # an old kernel: the time limit is left
            continue
        ranks[descriptor] = rank
    while ranks:
        ended: list[Any] = connection.wait(ranks)
        for each in ended:
            live.lose(ranks.pop(each))
            os.close(each)
