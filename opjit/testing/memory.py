"""Checks of memory: calls change neither inputs nor the bytes around them, and keep no memory."""

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from opjit.declare.sample import Sample
from opjit.operators.op import Op
from opjit.tensors import moved, span, storage_bytes, tensors_of
from opjit.testing.checks import Check, add
from opjit.testing.compare import as_list, assert_same
from opjit.testing.samples import Skipped, called, expected_of, repeated_samples, results_of, trials

CHECKS = list[Check]()
# Bytes on either side of an input; a multiple of every dtype's size, and torch's alignment.
_GUARD = 256
_FILLS = (0x00, 0xFF)  # 0xff...ff is a NaN, and -1
_UNMARKED = ", an input that the schema does not mark: Tensor(a!)"
_CALLS = 64
_LEAK = 16  # bytes per call; malloc's smallest block is larger, and a growing cache needs less
# Calls until caches are full: Python's, torch's, and the C library's of freed memory.
_WARM_UP = 200


@add(CHECKS, "inputs kept")
def _inputs(op: Op, device: str) -> str:
    """Inputs and the bytes around and between their elements are not written, do not have
    another effect, and are not part of a result.
    """
    for sample in trials(op.samples_on(device)):
        expected = expected_of(op, sample)
        for fill in _FILLS:
            own = sample.map(lambda t, fill=fill: _guarded(t, fill))  # type: ignore[misc]
            before = [(storage_bytes(t).clone(), t._version) for t in own.tensors()]
            results = as_list(called(op.overload, own))
            written = _written(op, own)
            for index, (t, (content, version)) in enumerate(
                zip(own.tensors(), before, strict=True)
            ):
                place = _changed(t, content, index in written)
                assert place is None, (
                    f"on ({sample}) the kernel writes {place} tensor {index}{_UNMARKED if place == 'into' else ''}"
                )
                assert t._version == version or index in written, (
                    f"on ({sample}) the op raises the version of tensor {index}{_UNMARKED}"
                )
            tensors = own.tensors()
            returnable = {0, *(_address(tensors[index]) for index in written)}
            places = [_address(t) for t in (*tensors_of(results), *tensors)]
            distinct = [place for place in places if place not in returnable]
            assert len(set(distinct)) == len(distinct), f"on ({sample}) two tensors share memory"
            results += tensors if op.schema.mutates else []
            assert_same(
                results, expected, sample._replace(note=f"with bytes {fill:#04x} around its inputs")
            )
    return f"nothing written, nothing shared, {_GUARD} bytes on either side"


def _address(tensor: Tensor) -> int:
    """The address of a tensor's memory; 0 if it has no bytes."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else 0


def _written(op: Op, sample: Sample) -> set[int]:
    """The numbers of the tensors in arguments that the schema marks as written."""
    names = [argument.name for argument in op.schema.arguments]
    given = {**dict(zip(names, sample.args, strict=False)), **sample.kwargs}
    marked = {argument.name for argument in op.schema.arguments if argument.writes}
    owners = [name for name in given for _ in tensors_of(given[name])]
    return {index for index, name in enumerate(owners) if name in marked}


def _guarded(tensor: Tensor, fill: int) -> Tensor:
    """A copy within more memory, with the same strides; the bytes that are not elements have a value."""
    reach = span(tensor)
    size = 2 * _GUARD + reach * tensor.element_size()
    memory = torch.full((size,), fill, dtype=torch.uint8, device=tensor.device)
    copy = moved(tensor, memory, _GUARD // tensor.element_size())
    if 0 not in tensor.stride():
        return copy.copy_(tensor)
    # Expanded: elements share memory.
    copy.as_strided((reach,), (1,)).copy_(tensor.as_strided((reach,), (1,)))
    return copy


def _changed(tensor: Tensor, before: Tensor, marked: bool) -> str | None:
    """Return the position of a byte of a tensor's storage that changed but should not have.

    The elements of a marked tensor may change.
    """
    outside = torch.ones_like(before)
    moved(tensor, outside).zero_()
    changed = (storage_bytes(tensor) != before) & (outside.bool() | (not marked))
    if not changed.any():
        return None
    byte = int(changed.nonzero()[0])
    end = before.numel() - _GUARD
    if byte < _GUARD:
        return f"{_GUARD - byte} bytes before"
    if byte >= end:
        return f"{byte - end} bytes after the end of"
    return "between the elements of" if outside[byte] else "into"


@add(CHECKS, "memory")
def _memory(op: Op, device: str) -> str:
    """Repeated calls keep no memory of the host or the device; nor do calls that the op rejects."""
    measures = {"host": _host_memory()}
    if device == "cuda":
        measures["device"] = _device_memory
    for sample in trials(repeated_samples(op, device)):
        for where, measure in measures.items():
            kept = _kept(op, sample, measure)
            assert not kept, f"the op kept {kept} bytes of {where} memory per call on ({sample})"
    return f"{_CALLS} times each"


def _kept(op: Op, sample: Sample, measure: Callable[[], int]) -> int:
    """Return the bytes that each call keeps: the smallest of ten rounds, because caches and
    other processes on the GPU may grow in some rounds.
    """

    def call(times: int) -> int:
        for _ in range(times):
            with suppress(RuntimeError):
                results_of(op, sample)
        gc.collect()
        return measure()

    level = call(_WARM_UP)
    least = 1 << 62
    for _ in range(10):
        now = call(_CALLS)
        least = min(least, now - level)
        level = now
        if least < _CALLS * _LEAK:
            return 0
    return least // _CALLS


class _Usage(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [("counts", ctypes.c_size_t * 10)]
    mapped, allocated = 4, 7  # the places of hblkhd and uordblks


def _host_memory() -> Callable[[], int]:
    """A function for the bytes that malloc has given out and not got back."""
    try:
        usage = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        raise Skipped("the C library does not count its memory; glibc does from 2.33 on") from None
    usage.restype = _Usage

    def measure() -> int:
        counts = usage().counts
        return int(counts[_Usage.mapped] + counts[_Usage.allocated])

    return measure


def _device_memory() -> int:
    """Bytes of the GPU that torch has given out, or that another allocation than torch's holds."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved() + torch.cuda.memory_allocated()
