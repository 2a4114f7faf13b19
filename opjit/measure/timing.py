"""The one timing loop: bursts of each side in turns, on the CPU's clock or between CUDA events."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from statistics import median
from typing import Any, NamedTuple

import torch

from opjit import backends, processes
from opjit.measure import machine
from opjit.measure.plan import Arguments, Measurement, TimingPlan, copies
from opjit.tensors import bytes_of, tensors_of

_MOST_CALLS = 20_000
_SHORT = 10e-6  # device seconds of a call below which a graph issues the calls
_GRAPH_CALLS = 64  # of one set of inputs
_QUEUE = 64  # calls that a device's queue holds without making the host wait
_LATENCY = 200e-6  # of a synchronization, at most


def plan_of(
    sides: Mapping[str, Callable[..., Any]],
    inputs: Arguments,
    device: str,
    cold: bool | None = None,
    moved: int = 0,
    flops: int = 0,
) -> TimingPlan:
    """Make a plan with one call's inputs, and with copies of them if caches are to be cold.

    By default, caches are cold on a device with a clock, such as CUDA, and hot on the CPU.
    """
    if cold is None:
        cold = backends.clock_of(device) is not None
    sets = copies(inputs, machine.cache_bytes(device)) if cold else [inputs]
    return TimingPlan(sides, sets, device, cold, moved, flops)


def measure(plan: TimingPlan) -> dict[str, Measurement]:
    """Measure each side of a plan, in turns of alternating order.

    Each side must have run before, because a first call may build or compile. The caller chooses
    the modes: users of an op without autograd see the times under `torch.inference_mode`.
    """
    flush = machine.flusher(plan.device) if plan.cold else lambda: None
    burst_of = _DeviceBurst if backends.clock_of(plan.device) else _HostBurst
    bursts: dict[str, _HostBurst | _DeviceBurst] = {
        name: burst_of(plan, name, flush) for name in plan.sides
    }
    for burst in bursts.values():
        burst()  # warms up

    before = machine.megahertz(plan.device)
    seconds: dict[str, list[float]] = {name: [] for name in bursts}
    for turn in range(plan.rounds):
        for name in reversed(bursts) if turn % 2 else bursts:
            seconds[name].append(bursts[name]())
    after = machine.megahertz(plan.device)
    clock = None if before is None or after is None else (before, after)
    return {
        name: _measurement(plan, burst, tuple(seconds[name]), clock)
        for name, burst in bursts.items()
    }


def _measurement(
    plan: TimingPlan,
    burst: "_HostBurst | _DeviceBurst",
    seconds: tuple[float, ...],
    clock: tuple[int, int] | None,
) -> Measurement:
    floats = (each for each in tensors_of(plan.inputs[0]) if each.is_floating_point())
    size = min((each.element_size() for each in floats), default=4)
    calls_in_cache = burst.calls if plan.cold else 1
    cached = machine.cache_bytes(plan.device) // calls_in_cache  # bytes of a call
    floor = machine.bound(plan.device, max(0, plan.bytes - cached), plan.flops, 1)
    bound = machine.bound(plan.device, plan.bytes, plan.flops, size)
    return Measurement(
        seconds,
        burst.host,
        burst.way,
        burst.calls,
        len(plan.inputs),
        plan.cold,
        plan.bytes,
        plan.flops,
        bound,
        floor or 0.0,
        burst.agrees,
        clock,
    )


def _turn(plan: TimingPlan, seconds: float) -> list[Arguments]:
    """Return the inputs of a burst of calls with so many seconds each.

    If caches are cold and big enough for all inputs, each set is used once.
    """
    count = max(1, min(_MOST_CALLS, int(plan.seconds / max(seconds, 1e-9))))
    size = bytes_of(plan.inputs)
    if plan.cold and size < 2 * machine.cache_bytes(plan.device):
        count = min(count, len(plan.inputs))
    return list(islice(cycle(plan.inputs), count))


def _call_all(function: Callable[..., Any], turn: Sequence[Arguments], window: int) -> deque[Any]:
    """Make the calls of a turn, and keep the last results, so that later ones get other memory."""
    return deque((function(*args, **kwargs) for args, kwargs in turn), maxlen=window)


class _HostBurst:
    """Calls on the CPU, or on a device with an unknown clock."""

    way = "clock"
    host: float | None = None
    agrees = True

    def __init__(self, plan: TimingPlan, side: str, flush: Callable[[], object]) -> None:
        self._plan = plan
        self._function = plan.sides[side]
        self._flush = flush
        self._turn = plan.inputs[:1]
        self._turn = _turn(plan, min(self() for _ in range(3)))

    @property
    def calls(self) -> int:
        return len(self._turn)

    def __call__(self) -> float:
        self._flush()
        wait(self._plan.device)
        with processes.without_collections():
            started = time.perf_counter()
            _call_all(self._function, self._turn, 0)
            wait(self._plan.device)
            return (time.perf_counter() - started) / self.calls


def wait(device: str) -> None:
    """Wait for all work of a device."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type == backends.for_device(device).device_type:
        torch.accelerator.synchronize()


class _Span(NamedTuple):
    """One burst by three clocks: CUDA events, the host until the calls are issued, and the host until the whole device is idle."""

    device: float
    issued: float
    whole: float
    results: Any


def span_of(run: Callable[[], Any]) -> _Span:
    """Time calls on CUDA."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    with processes.without_collections():
        began = time.perf_counter()
        start.record()
        results = run()
        end.record()
        issued = time.perf_counter() - began
        torch.cuda.synchronize()
        whole = time.perf_counter() - began
    return _Span(start.elapsed_time(end) / 1e3, issued, whole, results)


class _DeviceBurst:
    """Calls on a GPU, timed by the device. If the host is slower than the device, a graph issues them."""

    def __init__(self, plan: TimingPlan, side: str, flush: Callable[[], object]) -> None:
        self._plan = plan
        self._function = plan.sides[side]
        self._flush = flush
        once = span_of(lambda: _call_all(self._function, plan.inputs[:1], 1))
        size = bytes_of([*once.results])
        self._window = 3 * machine.cache_bytes(plan.device) // max(1, size) + 1 if plan.cold else 0

        count = max(1, min(_QUEUE, int(plan.seconds / once.whole)))
        queue = list(islice(cycle(plan.inputs), count))
        spans = [span_of(lambda: _call_all(self._function, queue, self._window)) for _ in range(5)]
        device = median(span.device for span in spans) / count
        self.host: float = median(span.issued for span in spans) / count
        self._turn = _turn(plan, device)
        self._repeats = 1
        self.way = "events"
        self._agreed = list[bool]()
        self._run: Callable[[], deque[Any]] = lambda: _call_all(
            self._function, self._turn, self._window
        )
        if device < _SHORT or self.host > 0.8 * device:
            self._capture()

    @property
    def calls(self) -> int:
        return len(self._turn) * self._repeats

    @property
    def agrees(self) -> bool:
        """Whether both clocks agree about most bursts. Another process may use the GPU between them."""
        return sum(self._agreed) * 2 > len(self._agreed)

    def _capture(self) -> None:
        """Let a graph issue the calls if they can be captured."""
        inputs = list(self._plan.inputs)
        repeated = inputs if len(inputs) > 1 else inputs * _GRAPH_CALLS
        turn = repeated[: len(self._turn)]
        found = machine.captured(lambda: _call_all(self._function, turn, self._window))
        if found is None:
            self.way = "issue"
            return
        graph, results = found

        def replay() -> deque[Any]:
            for _ in range(self._repeats):
                graph.replay()
            return results

        self.way = "graph"
        seconds = span_of(replay).device / len(turn)
        self._repeats = max(1, len(_turn(self._plan, seconds)) // len(turn))
        self._turn = turn
        self._run = replay

    def __call__(self) -> float:
        self._flush()
        span = span_of(self._run)
        self._agreed.append(abs(span.whole - span.device) <= 0.1 * span.whole + _LATENCY)
        return span.device / self.calls
