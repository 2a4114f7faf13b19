"""Checks of memory: what lies around the inputs stays as it is and has no effect, and calls keep none."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress

import torch

from opjit.declare.op import Op
from opjit.declare.sample import Sample
from opjit.testing.checks import Check, add, tally
from opjit.testing.compare import assert_same
from opjit.testing.samples import Skipped, distinct_samples, effects, effects_in_place, moved, replica, storage_bytes
from opjit.testing.trials import trials, watch

CHECKS: list[Check] = []
_GUARD = 256  # bytes on either side of an input; a multiple of every dtype's size, and torch's alignment
_FILLS = (0x00, 0xFF)  # 0xff...ff is a NaN, and -1
_CALLS = 64
_LEAK = 16  # bytes per call; malloc's smallest block is larger, and a cache that still grows takes less
_WARM_UP = 200  # calls until caches are full: Python's, torch's, and the C library's of freed memory


@add(CHECKS, "canaries")
def _canaries(op: Op, device: str) -> str:
    """Bytes before, after and between the elements of inputs are not written, and have no effect."""
    calls = distinct_samples(op, device, 12)
    for sample in trials(calls):
        expected = effects(op.reference_function, op, sample)
        for fill in _FILLS:
            own = sample.map(lambda t, fill=fill: _guarded(t, fill))  # type: ignore[misc]
            before = [_around(t) for t in own.tensors()]
            results = effects_in_place(op.overload, op, own)
            for index, (t, bytes_before) in enumerate(zip(own.tensors(), before, strict=True)):
                wrong = (_around(t) != bytes_before).nonzero().flatten().tolist()
                assert not wrong, f"on ({sample}) the kernel writes {_beside(t, wrong[0])} tensor {index}"
            assert_same(results, expected, sample._replace(note=f"with bytes {fill:#04x} around its inputs"))
    return f"{_GUARD} bytes on either side of the inputs of {tally(len(calls), 'sample')}"


def _guarded(tensor: torch.Tensor, fill: int) -> torch.Tensor:
    """A copy within more memory, with the same strides; the bytes that are not elements have a value."""
    if tensor.layout is not torch.strided:
        return tensor.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    memory = torch.full((2 * _GUARD + span * tensor.element_size(),), fill, dtype=torch.uint8, device=tensor.device)
    copy = moved(tensor, memory, _GUARD // tensor.element_size())
    if 0 not in tensor.stride():
        return copy.copy_(tensor)
    torch.as_strided(copy, (span,), (1,)).copy_(torch.as_strided(replica(tensor), (span,), (1,)))  # expanded: elements share memory
    return copy


def _around(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's storage, with 0 for those of its elements."""
    if tensor.layout is not torch.strided:
        return torch.empty(0)
    memory = storage_bytes(tensor).clone()
    moved(tensor, memory).zero_()
    return memory


def _beside(tensor: torch.Tensor, byte: int) -> str:
    """Where a byte of the storage lies."""
    end = tensor.untyped_storage().nbytes() - _GUARD
    if byte < _GUARD:
        return f"{_GUARD - byte} bytes before"
    return f"{byte - end} bytes after the end of" if byte >= end else "between the elements of"


@add(CHECKS, "memory")
def _memory(op: Op, device: str) -> str:
    """Repeated calls keep no memory of the host or the device; nor do calls that the op rejects."""
    measures = {"host": _host_memory()} | ({"device": _device_memory} if device == "cuda" else {})
    calls = distinct_samples(op, device, 4)
    rejected = [calls[0].map(lambda t: torch.zeros_like(t, dtype=torch.float8_e4m3fn), "a dtype without arithmetic")]
    for sample in trials([*calls, *rejected]):
        for where, measure in measures.items():
            kept = _kept(op, sample, measure)
            assert not kept, f"the op kept {kept} bytes of {where} memory per call on ({sample})"
    return f"{_CALLS} calls of {tally(len(calls), 'sample')}"


def _kept(op: Op, sample: Sample, measure: Callable[[], int]) -> int:
    """Bytes that each call keeps: of ten rounds, the one that keeps least, as caches and other processes on the GPU grow in the others."""
    def call(times: int) -> int:
        for _ in range(times):
            watch.get().running("kernel")
            with suppress(RuntimeError):
                effects(op.overload, op, sample)
        gc.collect()
        return measure()

    level, least = call(_WARM_UP), 1 << 62
    for _ in range(10):
        now = call(_CALLS)
        least, level = min(least, now - level), now
        if least < _CALLS * _LEAK:
            return 0
    return least // _CALLS


class _Usage(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
                                                     "fordblks", "keepcost")]


def _host_memory() -> Callable[[], int]:
    """A function for the bytes that malloc has given out and not got back."""
    try:
        usage = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        raise Skipped("the C library does not count its memory; glibc does from 2.33 on") from None
    usage.restype = _Usage

    def measure() -> int:
        now = usage()
        return int(now.uordblks + now.hblkhd)

    return measure


def _device_memory() -> int:
    """Bytes of the GPU that torch has given out, or that another allocation than torch's holds."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved() + torch.cuda.memory_allocated()
