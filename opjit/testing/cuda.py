"""What only an op on CUDA can break: graphs and streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opjit.checks.check import Check, add
from opjit.op import Op
from opjit.samples import Sample, Skipped, assert_same, listed, memory, outcome, replica, samples

CHECKS: list[Check] = []


def _filled_later(sample: Sample) -> tuple[Sample, Callable[[], None]]:
    """A copy whose memory holds zeros, and what fills it."""
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def make(tensor: torch.Tensor) -> torch.Tensor:
        copy = replica(tensor)
        memory(copy).zero_()
        copies.append((copy, tensor))
        return copy

    def fill() -> None:
        for copy, tensor in copies:
            memory(copy).copy_(memory(tensor))

    return sample.map(make), fill


def _left(op: Op, sample: Sample) -> list[Any]:
    """Like `outcome`, in place."""
    return [*listed(op.overload(*sample.args, **sample.kwargs)), *(sample.tensors() if op.schema.mutates else [])]


def _needs_cuda(device: str) -> None:
    if device != "cuda":
        raise Skipped("for CUDA")


@add(CHECKS, "cuda graph")
def _cuda_graph(op: Op, device: str) -> str:
    """Captured in a CUDA graph on zeros and replayed on the samples, it gives the same."""
    _needs_cuda(device)
    if op.schema.mutates:
        raise Skipped("the op writes its arguments, so a second replay is another call")
    expected = [outcome(op.overload, op, sample) for sample in samples(op, device)]
    calls = [_filled_later(sample) for sample in samples(op, device)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [_left(op, sample) for sample, _ in calls]
    for _, fill in calls:
        fill()
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        for got, wanted, (sample, _) in zip(found, expected, calls, strict=True):
            assert_same(got, wanted, sample)
    return f"{len(calls)} samples"


@add(CHECKS, "cuda stream")
def _cuda_stream(op: Op, device: str) -> str:
    """The current stream is the one used: the samples arrive on it after a while, and on any other the op would read zeros."""
    _needs_cuda(device)
    expected = [outcome(op.overload, op, sample) for sample in samples(op, device)]
    calls = [_filled_later(sample) for sample in samples(op, device)]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        for _, fill in calls:
            fill()
        found = [_left(op, sample) for sample, _ in calls]
    side.synchronize()
    for got, wanted, (sample, _) in zip(found, expected, calls, strict=True):
        assert_same(got, wanted, sample)
    return f"{len(calls)} samples"
