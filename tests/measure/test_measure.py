"""One core measures calls: sides in turns, caches cold or hot by choice, a device's time apart from the host's, and doubts said."""

import gc
import os
import subprocess
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opjit.measure import machine
from opjit.measure.plan import Measurement, TimingPlan, copies, ratio
from opjit.measure.timing import measure, plan_of
from opjit.measure.units import busy_note, format_rate, format_time


def small(monkeypatch: pytest.MonkeyPatch, cache: int) -> None:
    monkeypatch.setattr(machine, "cache_bytes", lambda device: cache)


def test_the_cpu_s_cache_is_as_large_as_the_system_says() -> None:
    """But no larger than 128 MiB, because virtual machines report the cache of a whole socket."""
    said = subprocess.run(["getconf", "LEVEL3_CACHE_SIZE"], capture_output=True, check=True).stdout
    if not int(said or 0):
        pytest.skip("the system does not say how large the cache is")
    assert machine.cache_bytes("cpu") == min(int(said), 128 << 20)


def one(seconds: tuple[float, ...] = (1.0,), **more: Any) -> Measurement:
    return Measurement(seconds, None, "clock", 1, 1, False, 0, 0, **more)


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(6.0),
        torch.arange(6.0)[1:],
        torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        torch.ones(3, 1).expand(3, 5),
        torch.arange(20)[::3],
        torch.empty(0, 3),
        torch.tensor(2.0),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.eye(3).to_sparse(),
    ],
    ids=[
        "plain",
        "unaligned",
        "permuted",
        "expanded",
        "steps",
        "empty",
        "scalar",
        "conjugate",
        "sparse",
    ],
)
def test_copies_are_the_same_tensor_elsewhere(x: torch.Tensor) -> None:
    [first, second] = copies(((x, 2), {"other": x}), 1 + 2 * x.numel() * x.element_size())[:2]
    copy = second[0][0]
    assert first[0][0] is x
    assert second[1]["other"] is copy, "two arguments that are one tensor"
    assert second[0][1] == 2
    assert torch.equal(copy.to_dense(), x.to_dense())
    if x.layout == torch.strided and x.numel():
        assert copy.data_ptr() != x.data_ptr()
        assert x.is_conj() or (copy.stride(), copy.data_ptr() % 64) == (
            x.stride(),
            x.data_ptr() % 64,
        )


def test_copies_keep_gradients_and_fill_the_cache_three_times() -> None:
    x = torch.ones(256, requires_grad=True)
    made = copies(((x,), {}), 10 * 1024)
    assert len(made) == 30
    assert all(each[0][0].requires_grad for each in made)
    assert len(copies(((x,), {}), 1 << 40)) == 256
    assert len(copies(((x,), {}), 100)) == 1, "what is larger than the cache evicts itself"


def test_sides_take_turns_in_alternating_order(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, 1)
    called: list[str] = []
    sides = {name: (lambda x, name=name: called.append(name)) for name in ("a", "b")}
    found = measure(TimingPlan(sides, [((1,), {})], "cpu", False, rounds=4, seconds=0))
    assert called == ["a"] * 3 + ["b"] * 3 + ["a", "b"] + ["a", "b", "b", "a"] * 2
    assert [len(each.seconds) for each in found.values()] == [4, 4]
    assert (
        found["a"].way,
        found["a"].host,
        found["a"].bound,
        found["a"].clock,
        found["a"].possible,
    ) == ("clock", None, None, None, True)


@pytest.mark.parametrize("cold", [True, False])
def test_cold_calls_rotate_through_memory_and_hot_ones_stay(
    monkeypatch: pytest.MonkeyPatch, cold: bool
) -> None:
    small(monkeypatch, 4000)
    x = torch.ones(100)
    places = Counter[int]()
    plan = plan_of({"f": lambda x: places.update([x.data_ptr()])}, ((x,), {}), "cpu", cold)
    found = measure(plan)["f"]
    assert len(plan.inputs) == found.inputs == len(places) == (30 if cold else 1)
    assert found.cold is cold


def test_each_set_is_used_once_where_all_fit_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, 1 << 30)
    plan = plan_of({"f": torch.neg}, ((torch.ones(4),), {}), "cpu", cold=True)
    assert measure(TimingPlan(plan.sides, plan.inputs[:5], "cpu", True, rounds=2))["f"].calls == 5


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_as_before_also_after_an_error(enabled: bool) -> None:
    def fails() -> None:
        assert not gc.isenabled()
        raise OSError("of the function")

    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(OSError, match="of the function"):
            measure(TimingPlan({"f": fails}, [((), {})], "cpu", False))
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_medians_quartiles_and_ratios() -> None:
    ours = one((1.0, 2.0, 3.0, 4.0, 5.0))
    theirs = one((2.0,) * 5)
    assert (ours.lower, ours.median, ours.upper) == (1.5, 3.0, 4.5)
    assert ratio(ours, theirs) == (1.5, 0.5)
    assert (one().lower, one().median, one().upper) == (1.0, 1.0, 1.0)


def test_what_cannot_be_is_said() -> None:
    assert one(floor=0.5).possible
    assert not one(floor=1.5).possible
    assert not one(agrees=False).possible
    assert one(bound=0.25).of_bound == 0.25
    assert one().of_bound is None


def test_the_roofline_is_the_slower_of_memory_and_arithmetic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h200 = SimpleNamespace(
        memory_clock_rate=3_201_000,
        memory_bus_width=6144,
        clock_rate=1_980_000,
        multi_processor_count=132,
        major=9,
        minor=0,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: h200)
    assert machine.bound("cuda", 4_916_736_000_000, 0, 4) == pytest.approx(1.0)
    assert machine.bound("cuda", 1, 1_070_530_560_000_000, 2) == pytest.approx(1.0), (
        "a data sheet's 989 TFLOP/s at a lower clock"
    )
    assert machine.bound("cuda", 1, 1_070_530_560_000_000, 4) == pytest.approx(2.0)
    assert machine.bound("cuda", 0, 0, 4) is None
    h200.major = 7  # a device that the table lacks
    assert machine.bound("cuda", 0, 1_000_000, 4) is None
    assert machine.bound("cpu", 1 << 30, 1 << 30, 4) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (12.0, "12.0 s"),
        (0.625, "0.625 s"),
        (0.4, "400 ms"),
        (2.54e-2, "25.4 ms"),
        (1.234e-3, "1.23 ms"),
        (9.994e-4, "999 us"),
        (1.4e-6, "1.40 us"),
        (2e-7, "0.200 us"),
    ],
)
def test_a_time_has_three_digits(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(4.12e12, "4.12 TB/s"), (9.89e14, "989 TB/s"), (17.54e9, "17.5 GB/s"), (1e6, "0.001 GB/s")],
)
def test_a_rate_has_three_digits(rate: float, text: str) -> None:
    assert format_rate(rate, "B") == text


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("cold", [True, False])
def test_short_kernels_go_through_a_graph_and_long_ones_between_events(cold: bool) -> None:
    short = torch.rand(1000, device="cuda")
    long = torch.rand(1 << 27, device="cuda")
    with torch.inference_mode():
        brief = measure(plan_of({"neg": torch.neg}, ((short,), {}), "cuda", cold))["neg"]
        lasting = measure(
            plan_of({"neg": torch.neg}, ((long,), {}), "cuda", cold, moved=2 * long.nbytes)
        )["neg"]
    assert (brief.way, lasting.way) == ("graph", "events")
    assert brief.inputs == (256 if cold else 1)
    assert brief.host is not None
    assert lasting.host is not None
    assert brief.agrees
    assert lasting.possible
    assert lasting.of_bound is None or 0.3 < lasting.of_bound <= 1


@pytest.mark.gpu
@pytest.mark.alone
def test_the_device_s_time_is_that_of_cuda_s_own_events() -> None:
    x = torch.rand(1 << 26, device="cuda")
    found = measure(plan_of({"neg": torch.neg}, ((x,), {}), "cuda"))["neg"]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(50):
        torch.neg(x)
    end.record()
    torch.cuda.synchronize()
    assert found.median == pytest.approx(start.elapsed_time(end) / 50e3, rel=0.2)


@pytest.mark.gpu
@pytest.mark.alone
def test_work_on_another_stream_is_noticed() -> None:
    x = torch.rand(1024, 1024, device="cuda")
    aside = torch.cuda.Stream()

    def hides(x: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(aside):
            for _ in range(5):
                x @ x
        return x

    found = measure(
        TimingPlan({"hides": hides}, [((x,), {})], "cuda", False, rounds=3, seconds=2e-3)
    )["hides"]
    assert not found.possible


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("kind", ["waits", "default stream"])
def test_a_function_that_no_graph_takes_is_measured_without_one(kind: str) -> None:
    x = torch.ones(10, device="cuda")

    def on_the_default_stream(x: torch.Tensor) -> torch.Tensor:  # as kernel<<<grid, block>>>
        with torch.cuda.stream(torch.cuda.default_stream()):
            return x.neg()

    function = on_the_default_stream if kind == "default stream" else lambda x: x.sum().item()
    found = measure(TimingPlan({"item": function}, [((x,), {})], "cuda", False, rounds=3))["item"]
    assert found.way == "issue"
    assert torch.equal(x + 1, 2 * x), "the failed capture leaves the device well"
    assert torch.rand(2, device="cuda").ne(torch.rand(2, device="cuda")).any(), (
        "and torch's random numbers"
    )


@pytest.mark.gpu
@pytest.mark.alone
def test_an_input_that_the_cache_holds_is_read_faster_than_one_that_it_does_not() -> None:
    x = torch.rand(machine.cache_bytes("cuda") // 16, device="cuda")  # a quarter of the cache
    cold, hot = (
        measure(plan_of({"sum": torch.sum}, ((x,), {}), "cuda", chosen))["sum"]
        for chosen in (True, False)
    )
    assert hot.median < cold.median


def test_a_machine_with_more_to_run_than_it_has_cpus_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (2.0, 9.0, 9.0))
    assert busy_note() is None
    monkeypatch.setattr(os, "getloadavg", lambda: (5.25, 0.0, 0.0))
    assert busy_note() == (
        "the machine is busy: load 5.2 on 2 CPUs, so times and ratios are unreliable"
    )
