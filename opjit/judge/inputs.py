"""The arguments of a burst's calls. A worker can read their bytes only after the clock has started.

Before that, it gets the places of their tensors in memory that it reserves. On a CPU, the judge then sends
a file, which the worker maps to these addresses without a copy. For other devices, the bytes come early,
under a mask of random bits, and the judge then sends the key.
"""

import ctypes
import mmap
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from opjit.judge.protocol import read_sealed, sealed
from opjit.tensors import storage_bytes

_ALIGNMENT = 512  # bytes, like torch's allocator
_ANY_SIZE = 1 << 40  # bytes of a file from the judge, which is trusted
_MAP_FIXED = 0x10
_MAP_POPULATE = 0x8000


@dataclass(frozen=True)
class TensorPlace:
    """A tensor as a part of a storage."""

    storage: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class PackedInputs(NamedTuple):
    """The files that a worker gets before and after the clock has started, and the key of the bytes' mask, if any."""

    early: list[int]
    late: list[int]
    key: int | None

    @classmethod
    def of(cls, calls: Sequence[Any], key: int | None) -> "PackedInputs":
        """Pack the arguments of calls."""
        storages = dict[int, torch.Tensor]()

        def place(tensor: torch.Tensor) -> TensorPlace:
            plain = tensor.detach().resolve_conj().resolve_neg()
            memory = storage_bytes(plain)
            storages.setdefault(memory.data_ptr(), memory)
            number = [*storages].index(memory.data_ptr())
            offset = int(plain.storage_offset())
            return TensorPlace(number, plain.dtype, offset, tuple(plain.shape), plain.stride())

        placed = tree_map_only(torch.Tensor, place, [*calls])
        memories = [*storages.values()]
        if key is not None:
            memories = [each.clone() for each in memories]
            _mask(memories, key)
        content = bytearray()
        for each in memories:
            on_cpu = each.cpu()
            content += ctypes.string_at(on_cpu.data_ptr(), len(on_cpu))
            content += bytes(_padded(len(on_cpu)) - len(on_cpu))
        places = pickle.dumps(([len(each) for each in memories], placed))
        if key is None:
            return cls([sealed(places)], [sealed(content)], None)
        return cls([sealed(places), sealed(content)], [], key)

    def close(self) -> None:
        """Remove the files."""
        for each in [*self.early, *self.late]:
            os.close(each)


class DeliveredInputs:
    """The calls of a burst in a worker, with tensors that get their bytes later.

    Args:
        places: the file with the places of tensors.
        device: of the tensors.
        masked: the file with masked bytes. Without one, `reveal` gets a file.
        writes: whether calls write to their arguments.
    """

    def __init__(
        self, places: int, device: str, masked: int | None = None, *, writes: bool
    ) -> None:
        sizes, placed = pickle.loads(read_sealed(places, _ANY_SIZE))
        self._sizes: list[int] = sizes
        self._writes = writes
        if masked is None:
            self._reserved = mmap.mmap(-1, sum(map(_padded, sizes)) + _ALIGNMENT)
            self._storages = self._parts_of(self._reserved)
        else:
            self._content = read_sealed(masked, _ANY_SIZE)
            parts = self._parts_of(self._content)
            self._storages = [each.to(device, copy=True) for each in parts]

        def tensor(place: TensorPlace) -> torch.Tensor:
            memory = self._storages[place.storage]
            return torch.empty(0, dtype=place.dtype, device=memory.device).set_(
                memory.untyped_storage(), place.offset, place.shape, place.stride
            )

        self.calls = tree_map_only(TensorPlace, tensor, placed)

    def _parts_of(self, memory: Any) -> list[torch.Tensor]:
        """Return each storage's bytes in a mapping or a file's content."""
        found = []
        start = 0
        for size in self._sizes:
            part = torch.empty(0, dtype=torch.uint8)
            if size:
                part = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
            found.append(part)
            start += _padded(size)
        return found

    def reveal(self, content: int | None = None, *, key: int | None) -> None:
        """Give all tensors their bytes, from a file or by the key of the mask."""
        self._file = content
        self._key = key
        if content is None:
            assert key is not None
            _mask(self._storages, key)
            return
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        # Pages that are mapped for writing are copied.
        protection = writable if self._writes else mmap.PROT_READ
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_POPULATE
        libc = ctypes.CDLL(None)
        address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._reserved)))
        size = ctypes.c_size_t(len(self._reserved))
        libc.mmap.restype = ctypes.c_void_p
        mapped = libc.mmap(address, size, protection, flags, content, ctypes.c_long(0))
        if mapped != address.value or libc.mprotect(address, size, writable):
            raise OSError("the inputs cannot be mapped")

    def changed(self) -> bool:
        """Return whether calls wrote to their inputs, or between the elements."""
        if self._file is None:
            assert self._key is not None
            _mask(self._storages, self._key)
        else:
            self._content = read_sealed(self._file, _ANY_SIZE)
        pairs = zip(self._storages, self._parts_of(self._content), strict=True)
        return not all(torch.equal(one.cpu(), other) for one, other in pairs)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _mask(storages: Sequence[torch.Tensor], key: int) -> None:
    """Combine bytes with random bits. Doing it twice restores them."""
    for number, memory in enumerate(storages):
        generator = torch.Generator(memory.device).manual_seed(key + number)
        words = torch.empty(-(-len(memory) // 8), dtype=torch.int64, device=memory.device)
        words.random_(-(1 << 63), None, generator=generator)
        memory.bitwise_xor_(words.view(torch.uint8)[: len(memory)])
