"""CUDA graphs of the bundled ops and of LLTM's training step: each replay is equal to eager, on several streams, in two threads and in two
processes that share a GPU."""

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch

import opjit
from opjit.catalog import registry
from opjit.testing import integration
from opjit.testing.compare import Tolerance, assert_same
from opjit.testing.samples import effects, effects_in_place
from tests import helpers
from tests.kernels_c.test_lltm import arguments

pytestmark = pytest.mark.gpu

SHARE = "from tests.kernels_c.test_graphs import share; share(rounds=10)"  # a process that shares the GPU
EXACT = Tolerance(0, 0)


def captured(
    work: Callable[[], None], mode: str, stream: torch.cuda.Stream
) -> torch.cuda.CUDAGraph:
    """Capture work; then fill with NaN what the allocator gives to others: the graph may depend on none of it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        work()
    _ = [
        torch.full((1 << power,), torch.nan, device="cuda")
        for power in range(7, 22)
        for _ in range(4)
    ]
    return graph


class Calls:
    """Samples of every bundled op in one graph, captured on zeros, in turn on streams that branch off and join again. Scratch memory and
    results come from the graph's pool."""

    def __init__(self, every: int = 1) -> None:
        ops = [registry.find(name) for name in helpers.BUNDLED]
        self._calls = [
            (op, sample)
            for op in ops
            if "cuda" in op.backends()
            for sample in op.samples_on("cuda")
        ][::every]
        self._zeros = [sample.map(integration._zeros) for _, sample in self._calls]
        self._branches = [torch.cuda.Stream() for _ in range(3)]

    def capture(self, mode: str) -> None:
        self._expected = [effects(op.overload, op, sample) for op, sample in self._calls]
        self._found: list[list[Any]] = []
        self._graph = captured(self._branch, mode, torch.cuda.Stream())

    def _branch(self) -> None:
        trunk = torch.cuda.current_stream()
        for branch in self._branches:
            branch.wait_stream(trunk)
        for (op, _), zeros, branch in zip(
            self._calls, self._zeros, itertools.cycle(self._branches)
        ):
            with torch.cuda.stream(branch):
                self._found.append(effects_in_place(op.overload, op, zeros))
        for branch in self._branches:
            trunk.wait_stream(branch)

    def check(self) -> None:
        integration._fill(self._zeros, [sample for _, sample in self._calls])
        self._graph.replay()
        for (op, sample), found, expected in zip(
            self._calls, self._found, self._expected, strict=True
        ):
            assert_same(found, expected, sample, f"{op.qualified}'s replay against eager", EXACT)


class Training:
    """Steps of SGD through two LLTM cells in a row that share their parameters: losses and parameters after each of some batches."""

    def __init__(self) -> None:
        self._x, weights, bias, self._h, self._cell = arguments(16, 32, 128, torch.float32, "cuda")
        self._batches = [
            arguments(16, 32, 128, torch.float32, "cuda", seed)[0] for seed in range(5)
        ]
        self._parameters = [weights.requires_grad_(), bias.requires_grad_()]
        self._start = [one.detach().clone() for one in self._parameters]
        self._cells = registry.find("lltm_forward").overload

    def _step(self) -> None:
        h = self._h
        cell = self._cell
        for _ in range(2):
            h, cell, _ = self._cells(self._x, *self._parameters, h, cell)
        loss = h.square().mean() + cell.mean()
        with torch.no_grad():
            for parameter, grad in zip(
                self._parameters, torch.autograd.grad(loss, self._parameters), strict=True
            ):
                parameter.sub_(grad, alpha=0.1)
        self._loss = loss.detach()

    @torch.no_grad()
    def _trained(self, step: Callable[[], object]) -> list[torch.Tensor]:
        results: list[torch.Tensor] = []
        for parameter, start in zip(self._parameters, self._start, strict=True):
            parameter.copy_(start)
        for batch in self._batches:
            self._x.copy_(batch)
            with torch.enable_grad():
                step()
            results += [one.detach().clone() for one in (self._loss, *self._parameters)]
        return results

    def capture(self, mode: str) -> None:
        # All nodes of autograd are counted: the sanitizer keeps Python's frames, and so old nodes.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._expected = self._trained(self._step)
        self._graph = captured(self._step, mode, stream)

    def check(self) -> None:
        assert_same(
            self._trained(self._graph.replay),
            self._expected,
            what="LLTM's training in a graph against eager",
            within=EXACT,
        )


@pytest.mark.parametrize("make", [Calls, Training])
def test_a_replay_on_any_stream_is_equal_to_eager(make: Callable[[], Calls | Training]) -> None:
    work = make()
    work.capture("global")
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            work.check()
    torch.cuda.synchronize()


def test_two_threads_call_and_replay_at_the_same_time() -> None:
    """Each on a stream of its own; torch captures one graph at a time, while the other thread calls the ops."""
    both = threading.Barrier(2, timeout=100)
    captures = threading.Lock()

    def run(_: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            made: list[Calls | Training] = [Calls(every=7), Training()]
            for work in made:
                with captures:
                    work.capture("thread_local")
                work.check()
            both.wait()
            for work in made * 5:
                work.check()
            both.wait()  # no graph is destroyed before

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))


def share(rounds: int) -> None:
    """Capture, say so, wait for a line or the end of stdin, and replay."""
    made: list[Calls | Training] = [Calls(every=7), Training()]
    for work in made:
        work.capture("global")
    print("captured", flush=True)
    sys.stdin.readline()
    for work in made * rounds:
        work.check()
    print("equal", flush=True)


def test_two_processes_replay_on_one_gpu_at_the_same_time() -> None:
    for name in helpers.BUNDLED:
        opjit.get(name, "cuda")  # they compile nothing
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHARE], env=helpers.environment(), text=True, **pipes
        )
        for _ in range(2)
    ]
    said = [process.stdout.readline() for process in processes if process.stdout]
    for process in processes:
        with suppress(BrokenPipeError):
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
    for first, process in zip(said, processes, strict=True):
        out, errors = process.communicate(timeout=helpers.TIMEOUT)
        assert (first + out, process.returncode) == ("captured\nequal\n", 0), errors
