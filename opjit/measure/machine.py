"""The machine's part in a measurement: caches, clocks, load, and the peaks of a GPU."""

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TypeVar

import torch

from opjit import backends

Result = TypeVar("Result")

_LEVEL3_CACHE_SIZE = 194  # glibc's number, for which Python has no name
_UNKNOWN_CACHE = 64 << 20
_LARGEST_CACHE = 128 << 20  # virtual machines report the cache of a whole socket


def cache_bytes(device: str) -> int:
    """Return the size of the cache before the memory: the GPU's L2, or the CPU's last level."""
    clock = backends.clock_of(device)
    if clock is not None:
        return clock.cache_bytes()
    size = os.sysconf(_LEVEL3_CACHE_SIZE)
    return min(size, _LARGEST_CACHE) if size > 0 else _UNKNOWN_CACHE


def flusher(device: str) -> Callable[[], object]:
    """Return a function that fills the cache with other data, which it reads: written lines would go to memory during the next call."""
    return torch.zeros(cache_bytes(device) // 4 * 2, dtype=torch.int32, device=device).max


def captured(run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result] | None:
    """Capture a function's calls in a CUDA graph. Returns the graph and the function's result.

    Returns None if the calls cannot be captured, for example because they synchronize or launch on the default stream.
    torch.cuda.graph would also collect garbage and empty the allocator's cache.
    """
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.clone_state()
    torch.cuda.synchronize()
    try:
        with torch.cuda.stream(_blocking_stream()):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                results = run()
            finally:
                graph.capture_end()
    except Exception:  # of torch, CUDA or the function
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")  # reports an error that a launch of the function left
        torch.cuda.synchronize()
        generator.graphsafe_set_state(before)  # torch leaves it in a capture and draws no numbers
        return None
    return graph, results


@cache
def _blocking_stream() -> torch.cuda.ExternalStream:
    """A stream that the default stream waits for, so that a launch on the default stream ends a capture.

    A launch next to torch's streams would run immediately, and the graph would lack it.
    """
    handle = ctypes.c_void_p()
    torch.cuda.check_error(torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle)))
    return torch.cuda.ExternalStream(handle.value)


def megahertz(device: str) -> int | None:
    """Read the clock of the GPU's multiprocessors; None if it is unknown."""
    clock = backends.clock_of(device)
    return None if clock is None else clock.megahertz()


def bound(device: str, moved: int, flops: int, element_size: int) -> float | None:
    """Compute the least seconds that the device needs to move bytes and to do operations on elements of a size.

    Returns None if the device's peaks are unknown.
    """
    clock = backends.clock_of(device)
    if clock is None:
        return None
    limits = zip((moved, flops), clock.peaks(element_size), strict=True)
    return max((work / peak for work, peak in limits if work and peak), default=None)


def describe_machine(device: str) -> str:
    """Describe the device, and on the CPU the threads and the load: ``"2 threads, load 0.4 on 16 CPUs, torch 2.13.0"``."""
    clock = backends.clock_of(device)
    if clock is not None:
        return f"{clock.model()}, torch {torch.__version__}"
    return (
        f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} CPUs, "
        f"torch {torch.__version__}"
    )
