"""Memory that the kernels of all ranks of a group reach: shared memory on the CPU, and CUDA's IPC on GPUs.

Each rank has one piece, which contains signals, on CUDA an inbox for collectives, and the buffer
for ops.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from opjit.errors import OpjitError

LOST_BYTES = 4096  # a page with the error words and, behind them, the names of ops
_OPS_START = 1024
_NAME_BYTES = 96  # of an opjit_named
_MAX_OPS = 32
SIGNAL_BYTES = 1 << 17
COUNT_BYTES = 1 << 15
INBOX_BYTES = 192 << 20  # enough for eight ranks
_PATTERN_BYTES = 1 << 12
_REGISTER_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class PeerMemory:
    """A rank's view of a group's memory."""

    device: int  # the index of the CUDA device that kernels run on; -1 for CPU ranks
    starts: list[int]  # the address of each rank's piece in this process
    count: int  # the address of this rank's counts
    lost: Any  # the error words, an array of ctypes
    pids: list[int]
    kept: tuple[Any, ...]  # owners of the memory

    @property
    def buffer(self) -> int:
        """The place of the buffer in a rank's piece, behind the signals and, on a GPU, the inbox."""
        return SIGNAL_BYTES + (INBOX_BYTES if self.device >= 0 else 0)

    @property
    def ops(self) -> int:
        """The address of the table of ops that ranks have called."""
        return ctypes.addressof(self.lost) + _OPS_START

    def op_name(self, number: int) -> str | None:
        if number >= _MAX_OPS:
            return None
        return ctypes.string_at(self.ops + number * _NAME_BYTES + 4).decode() or None


@dataclass(frozen=True)
class Members:
    """This process's part in a group of torch.distributed."""

    name: str
    rank: int
    world: int
    group: Any

    def exchange(self, value: _Value) -> list[_Value]:
        """Exchange a value with all ranks of the group, and return the values of all ranks."""
        if self.world == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def obtain(self, size: int, device: torch.device) -> PeerMemory:
        """Get memory for the group, with a buffer of `size` bytes in each rank. All ranks call it, and all raise an OpjitError of one."""
        pids = self.exchange(os.getpid())
        shared = _shared(LOST_BYTES, self)
        lost = words_in(shared)
        on_gpu = device.type == "cuda"
        if on_gpu:
            code = torch.cuda.cudart().cudaHostRegister(
                ctypes.addressof(lost), LOST_BYTES, _REGISTER_MAPPED
            )
            failed = [f"CUDA cannot map the group's error words: {code}"] if int(code) else []
            _agree(failed, self)
        inbox = INBOX_BYTES if on_gpu else 0
        starts, memory = self.reach(SIGNAL_BYTES + inbox + size, device)
        counts = torch.zeros(COUNT_BYTES, dtype=torch.uint8, device=device)
        if on_gpu:
            _test(starts, device, self)
        index = device.index if on_gpu else -1
        kept = (shared, counts, memory)
        return PeerMemory(index, starts, counts.data_ptr(), lost, pids, kept)

    def reach(self, size: int, device: torch.device) -> tuple[list[int], Any]:
        """Get zeroed memory on each rank; returns the address of each rank's in this process, and an owner to keep."""
        if device.type == "cuda":
            return _on_devices(size, device, self), None
        piece = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        shared = _shared(piece * self.world, self)
        start = address_of(shared)
        return [start + piece * each for each in range(self.world)], shared


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def words_in(shared: mmap.mmap) -> Any:
    """Return the error words of a group, which are at the beginning of a shared page."""
    return (ctypes.c_uint32 * (LOST_BYTES // 4)).from_buffer(shared)


def _agree(problems: list[str], members: Members) -> None:
    """Raise the first problem of the first rank that has one, on all ranks."""
    for found in members.exchange(problems):
        if found:
            raise OpjitError(f"the ranks cannot reach each other's memory: {found[0]}")


def _shared(size: int, members: Members) -> mmap.mmap:
    """Map memory of rank 0 in all ranks.

    The memory is anonymous, so a killed job leaves nothing behind.
    """
    descriptor = -1
    identity = None
    if members.rank == 0:
        descriptor = os.memfd_create("opjit-peers")
        os.truncate(descriptor, size)
        status = os.stat(descriptor)
        identity = status.st_dev, status.st_ino
    first_path, first = members.exchange((f"/proc/{os.getpid()}/fd/{descriptor}", identity))[0]
    reason = "they must be processes of one machine and one PID namespace"
    shared = None
    try:
        opened = os.open(first_path, os.O_RDWR | os.O_CLOEXEC)
        found = os.stat(opened)
        if (found.st_dev, found.st_ino) == first:
            shared = mmap.mmap(opened, size)
        os.close(opened)
    except OSError as error:
        reason = f"{reason}: {error}"
    _agree([reason] if shared is None else [], members)
    if members.rank == 0:
        os.close(descriptor)
    assert shared is not None
    return shared


class _IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


def _on_devices(size: int, device: torch.device, members: Members) -> list[int]:
    """Get zeroed memory on each rank's GPU, which CUDA opens in the other ranks' processes."""
    ids = members.exchange(str(torch.cuda.get_device_properties(device).uuid))
    if len({*ids}) < members.world:
        raise OpjitError(
            "two ranks of the group have the same GPU; call torch.cuda.set_device(local_rank) before opjit.distributed.peers"
        )
    major = str(torch.version.cuda).partition(".")[0]
    cudart = ctypes.CDLL(f"libcudart.so.{major}")
    failed = list[str]()

    def call(function: str, *arguments: Any) -> None:
        code = getattr(cudart, function)(*arguments)
        if code:
            failed.append(f"{function} failed with CUDA error {code}")

    own = ctypes.c_void_p()
    handle = _IpcHandle()
    call("cudaMalloc", ctypes.byref(own), ctypes.c_size_t(size))
    call("cudaMemset", own, 0, ctypes.c_size_t(size))
    call("cudaDeviceSynchronize")
    call("cudaIpcGetMemHandle", ctypes.byref(handle), own)
    _agree(failed, members)
    starts = []
    for number, content in enumerate(members.exchange(bytes(handle))):
        opened = own
        if number != members.rank:
            opened = ctypes.c_void_p()
            theirs = _IpcHandle.from_buffer_copy(content)
            call("cudaIpcOpenMemHandle", ctypes.byref(opened), theirs, 1)
        starts.append(opened.value or 0)
    _agree(failed, members)
    return starts


def _test(starts: Sequence[int], device: torch.device, members: Members) -> None:
    """Let kernels write a pattern to every rank's memory and read the patterns of all ranks
    there, in both directions.
    """
    world = members.world
    rank = members.rank
    places = [
        tensor_at(start + SIGNAL_BYTES, _PATTERN_BYTES * world, device).view(world, -1)
        for start in starts
    ]

    def pattern(writer: int, owner: int) -> torch.Tensor:
        numbers = torch.arange(_PATTERN_BYTES, dtype=torch.int32, device=device)
        return (numbers * (2 * writer + 3) + owner * 7 + (numbers >> 8)).to(torch.uint8)

    for owner, place in enumerate(places):
        place[rank].copy_(pattern(rank, owner))
    torch.cuda.synchronize(device)
    members.exchange(None)
    wrong = [
        f"rank {rank} read bytes from the GPU of rank {owner} that differ from the bytes that "
        f"rank {writer} wrote"
        for owner, place in enumerate(places)
        for writer in range(world)
        if not torch.equal(place[writer], pattern(writer, owner))
    ]
    _agree(wrong, members)
    places[rank].zero_()
    torch.cuda.synchronize(device)
    members.exchange(None)


def tensor_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Return the bytes at an address."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
