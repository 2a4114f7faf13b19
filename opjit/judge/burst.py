"""A burst: calls that are ready to run one after another, and whose results stay until they are compared."""

import gc
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from opjit.declare.sample import tensors_of
from opjit.judge.wire import DTYPES
from opjit.measure import machine
from opjit.measure.timing import wait
from opjit.testing.samples import storage_bytes


class Burst:
    """On CUDA the calls are one graph, where they can be captured: its replay takes the device's time and not the host's.
    A spec has the dtypes and shapes of a call's results."""

    def __init__(
        self,
        functions: Sequence[Callable[[], Any]],
        inputs: Sequence[Any],
        spec: Sequence[dict[str, Any]],
        device: str,
    ) -> None:
        self.functions, self.inputs, self.device, self._spec = functions, inputs, device, spec
        self.results: list[Any] = []
        self._graph = self._captured() if device == "cuda" else None

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        spec: Sequence[dict[str, Any]],
        device: str,
    ) -> "Burst":
        """Calls of one function, without autograd."""
        with torch.inference_mode():
            return cls(
                [partial(function, *args, **kwargs) for args, kwargs in inputs],
                inputs,
                spec,
                device,
            )

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        found = machine.captured(lambda: [function() for function in self.functions])
        if found is None:
            return None
        graph, results = found
        poison(
            results, self.inputs
        )  # the capture computed nothing, and the replay must write all of it
        self.results = results
        return graph

    def arm(self) -> None:
        """Prepare all that takes time and is not the calls'."""
        if (
            self.device == "cpu"
        ):  # what the results will lie in, unless they are written; more of it, as a message may take from it
            places = range(2 * len(self.functions) + 32)
            poison(
                [
                    torch.empty(each["shape"], dtype=DTYPES[each["dtype"]])
                    for each in self._spec
                    for _ in places
                ]
            )
        else:
            _flusher(self.device)()
        gc.disable()
        wait(self.device)

    def run(self) -> float:
        """Make the calls. Returns the seconds of all: on CUDA the device's, else the clock's."""
        started = time.perf_counter()
        if self.device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self._call()
            end.record()
            end.synchronize()
            seconds = float(start.elapsed_time(end)) / 1e3
        else:
            self._call()
            wait(self.device)
            seconds = time.perf_counter() - started
        gc.enable()
        return seconds

    def _call(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self.results = [function() for function in self.functions]


_flusher = cache(machine.flusher)


def poison(results: Any, inputs: Any = ()) -> None:
    """Fill what results lie in, from the first element to the last, unless that is an input: guards and gaps keep their bytes."""
    kept = {each.untyped_storage().data_ptr() for each in tensors_of(inputs)}
    with torch.inference_mode():
        for each in tensors_of(results):
            if each.numel() and each.untyped_storage().data_ptr() not in kept:
                first, size = each.storage_offset(), each.element_size()
                last = first + sum(
                    (length - 1) * stride
                    for length, stride in zip(each.shape, each.stride(), strict=True)
                )
                storage_bytes(each)[first * size : (last + 1) * size].fill_(0xFF)


def storages(values: Any, others: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The bytes of each storage of tensors, once, and those of its counterpart."""
    pairs = zip(tensors_of(values), tensors_of(others), strict=True)
    return [
        *{
            one.untyped_storage().data_ptr(): (storage_bytes(one), storage_bytes(other))
            for one, other in pairs
            if one.numel()
        }.values()
    ]


def changed(before: Any, after: Any) -> bool:
    """Whether the bytes of tensors differ, or of what lies between their elements."""
    return not all(torch.equal(one, other.to(one.device)) for one, other in storages(before, after))
