"""Batches of prepared calls, with results that are kept for comparison."""

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from opjit.judge.protocol import DTYPES, TensorSpec
from opjit.measure import machine
from opjit.measure.timing import span_of, wait
from opjit.tensors import span, storage_bytes, tensors_of


@dataclass(eq=False)
class Burst:
    """A batch of prepared calls with their results, which are kept for comparison.

    On CUDA the calls are one graph if they can be captured: its replay costs the device's time and
    not the host's.

    Args:
        functions: the calls.
        inputs: their arguments.
        spec: the tensors of each call's results.
        device: its type.
    """

    functions: Sequence[Callable[[], Any]]
    inputs: Sequence[Any]
    spec: Sequence[TensorSpec]
    device: str

    def __post_init__(self) -> None:
        self.results = list[Any]()
        self._graph: torch.cuda.CUDAGraph | None = None
        if self.device != "cuda" or not self.functions:
            return
        found = machine.captured(lambda: [function() for function in self.functions])
        if found is not None:
            self._graph, self.results = found
            # The capture computed nothing, and the replay must write every element.
            fill_with_sentinel(self.results, self.inputs)

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        spec: Sequence[TensorSpec],
        device: str,
    ) -> "Burst":
        """Prepare calls of one function, without autograd."""
        with torch.inference_mode():
            calls = [partial(function, *args, **kwargs) for args, kwargs in inputs]
            return cls(calls, inputs, spec, device)

    def arm(self) -> None:
        """Do all setup that must not be timed."""
        if self.device == "cpu":
            # Memory that the results will get, and more, because a message may use some of it.
            count = 2 * len(self.functions) + 32
            fill_with_sentinel([each for _ in range(count) for each in self.empty_results()])
        else:
            _flusher(self.device)()
        gc.disable()
        wait(self.device)

    def empty_results(self) -> list[torch.Tensor]:
        """Return new memory for the results of a call."""
        return [
            torch.empty(each.shape, dtype=DTYPES[each.dtype], device=self.device)
            for each in self.spec
        ]

    def run(self) -> float:
        """Make the calls. Returns the seconds of all: on CUDA by the device, otherwise by the clock."""
        started = time.perf_counter()
        if self.device == "cuda":
            seconds = span_of(self._call).device
        else:
            self._call()
            wait(self.device)
            seconds = time.perf_counter() - started
        gc.enable()
        return seconds

    def seconds_of_call(self) -> float:
        """Make the calls after all setup. Returns the mean seconds of a call."""
        self.arm()
        return self.run() / len(self.functions)

    def _call(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self.results = [function() for function in self.functions]


_flusher = cache(machine.flusher)


def copied(tensors: list[torch.Tensor], memory: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors, into memory that fits if possible, so that later work on them changes nothing."""
    needed, reserved = ([(each.dtype, each.shape) for each in group] for group in (tensors, memory))
    if not tensors or needed != reserved:
        return [each.clone() for each in tensors]
    torch._foreach_copy_(memory, tensors)
    return memory


def fill_with_sentinel(results: Any, inputs: Any = ()) -> None:
    """Fill the memory of results, from the first element to the last, unless it is an input's: guards and gaps keep their bytes."""
    kept = {each.untyped_storage().data_ptr() for each in tensors_of(inputs)}
    with torch.inference_mode():
        for each in tensors_of(results):
            if each.numel() and each.untyped_storage().data_ptr() not in kept:
                size = span(each) * each.element_size()
                if each.is_cuda:
                    first = each.storage_offset() * each.element_size()
                    storage_bytes(each)[first : first + size].fill_(0xFF)
                else:  # torch's threads would wait for each other on busy CPUs
                    ctypes.memset(each.data_ptr(), 0xFF, size)


def storages(values: Any, others: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the bytes of each storage of tensors, once, and the bytes of its counterpart."""
    pairs = {}
    for one, other in zip(tensors_of(values), tensors_of(others), strict=True):
        if one.numel():
            pairs[one.untyped_storage().data_ptr()] = storage_bytes(one), storage_bytes(other)
    return [*pairs.values()]
