"""Checks for CUDA only: graphs and streams."""

from __future__ import annotations

from typing import Any

import torch

from opjit.declare.op import Op
from opjit.declare.sample import Sample
from opjit.testing.checks import Check, add, tally
from opjit.testing.compare import assert_same
from opjit.testing.samples import Skipped, effects, effects_in_place, replica, storage_bytes, trials

CHECKS: list[Check] = []


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros, with the same strides and gaps."""
    copy = replica(tensor)
    storage_bytes(copy).zero_()
    return copy


def _fill(copies: list[Sample], calls: list[Sample]) -> None:
    for copy, sample in zip(copies, calls, strict=True):
        for to, tensor in zip(copy.tensors(), sample.tensors(), strict=True):
            storage_bytes(to).copy_(storage_bytes(tensor))


def _assert_all_same(calls: list[Sample], found: list[list[Any]], expected: list[list[Any]]) -> None:
    torch.cuda.synchronize()
    for sample, got, wanted in zip(calls, found, expected, strict=True):
        assert_same(got, wanted, sample)


@add(CHECKS, "cuda graph", device="cuda")
def _cuda_graph(op: Op, device: str) -> str:
    """A CUDA graph captured on zeros gives the same results when it is replayed on the samples."""
    if op.schema.mutates:
        raise Skipped("the op writes its arguments, so each replay starts from other values")
    calls = list(trials(list(op.samples_on(device))))
    expected = [effects(op.overload, op, sample) for sample in calls]
    copies = [sample.map(_zeros) for sample in calls]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [effects_in_place(op.overload, op, sample) for sample in copies]
    _fill(copies, calls)
    for _ in range(2):
        graph.replay()
        _assert_all_same(calls, found, expected)
    return tally(len(calls), "sample")


@add(CHECKS, "cuda stream", device="cuda")
def _cuda_stream(op: Op, device: str) -> str:
    """The op runs on the current stream: the data arrives there late, so on any other stream the op would read zeros."""
    calls = list(trials(list(op.samples_on(device))))
    expected = [effects(op.overload, op, sample) for sample in calls]
    copies = [sample.map(_zeros) for sample in calls]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        _fill(copies, calls)
        found = [effects_in_place(op.overload, op, sample) for sample in copies]
    _assert_all_same(calls, found, expected)
    return tally(len(calls), "sample")
