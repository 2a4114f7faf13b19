"""What is to be measured, and what came out: a plan of calls, and a measurement of each side."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

_MOST_INPUTS = 256


class Inputs(NamedTuple):
    """The arguments of one call, in memory of their own."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = {}  # never changed

    def tensors(self) -> list[torch.Tensor]:
        return [
            leaf
            for leaf in tree_leaves((self.args, dict(self.kwargs)))
            if isinstance(leaf, torch.Tensor)
        ]

    @property
    def nbytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self.tensors())


@dataclass(frozen=True)
class TimingPlan:
    """Functions to measure with the same inputs, in turns. The caller has checked their results; `plan_of` makes copies of inputs."""

    sides: Mapping[str, Callable[..., Any]]
    inputs: Sequence[
        Inputs
    ]  # one set, or several at different addresses through which the calls rotate
    device: str
    cold: bool  # each burst begins with caches that hold none of the inputs
    bytes: int = 0  # the fewest that a call must move, and
    flops: int = 0  # operations that it must do; 0 if they do not bound its time
    rounds: int = 9  # bursts of each side that are timed
    seconds: float = 0.02  # about how long a burst takes; short ones leave a GPU's clocks alone


@dataclass(frozen=True)
class Measurement:
    """The time of one side's calls. `way` is ``"clock"`` of the CPU, ``"events"`` around calls on CUDA, ``"graph"`` for events around a
    CUDA graph of short calls, ``"issue"`` where calls are short but no graph takes them: `seconds` then holds the host's time, too."""

    side: str
    seconds: tuple[float, ...]  # the mean time of a call in each burst; on CUDA, the device's
    host: (
        float | None
    )  # on CUDA the seconds in which the host issues a call, the median of bursts; None where `seconds` is all
    way: str
    calls: int  # of a burst
    inputs: int  # sets of them, through which a burst rotates
    cold: bool
    bytes: int
    flops: int
    bound: float | None = (
        None  # seconds that the device takes at least for the plan's bytes and operations; None if its peaks are unknown
    )
    floor: float = (
        0.0  # the part of the bound that no cache explains away: a shorter time is impossible
    )
    agrees: bool = True  # on CUDA, events and a synchronisation of the whole device measured the same: no work on another stream
    clock: tuple[int, int] | None = (
        None  # MHz of a GPU's multiprocessors before and after all rounds; None where no library tells
    )
    median: float = field(init=False)
    lower: float = field(init=False)
    upper: float = field(init=False)

    def __post_init__(self) -> None:
        for name, value in zip(("lower", "median", "upper"), _quartiles(self.seconds), strict=True):
            object.__setattr__(self, name, value)

    @property
    def possible(self) -> bool:
        """False if the time is below what the device can do, or if two clocks disagree about it."""
        return self.agrees and self.median >= self.floor

    @property
    def of_bound(self) -> float | None:
        """The reached fraction of the roofline."""
        return self.bound / self.median if self.bound else None


def ratio(one: Measurement, other: Measurement) -> tuple[float, float]:
    """Return the median of one side's time over the other's, and its spread."""
    return median_and_spread(
        [mine / theirs for mine, theirs in zip(one.seconds, other.seconds, strict=True)]
    )


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and half of the distance between the quartiles, relative to it."""
    low, middle, high = _quartiles(values)
    return middle, (high - low) / 2 / middle


def _quartiles(values: Sequence[float]) -> Sequence[float]:
    return statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3


def copies(inputs: Inputs, cache: int) -> list[Inputs]:
    """Return a set of inputs, and copies of it until all fill a cache of so many bytes three times; at most 256 sets.
    Copies have the strides, the alignment and the shared tensors of the original."""
    found = [inputs]
    for _ in range(min(_MOST_INPUTS, -(-3 * cache // max(1, inputs.nbytes))) - 1):
        made = {id(each): _copy(each) for each in inputs.tensors()}
        found.append(
            Inputs(
                *tree_map(
                    lambda value, made=made: made.get(id(value), value),
                    (inputs.args, dict(inputs.kwargs)),
                )
            )
        )
    return found


def _copy(x: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to other memory, with its strides and its alignment."""
    if x.layout != torch.strided or x.is_conj() or x.is_neg() or x.numel() == 0:
        return x.detach().clone().requires_grad_(x.requires_grad)
    with torch.no_grad():
        span = 1 + sum(
            (size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)
        )
        offset = x.data_ptr() % 256 // x.element_size()
        memory = x.new_empty(offset + span)
        memory[offset:].copy_(x.as_strided((span,), (1,)))
        return memory.as_strided(x.shape, x.stride(), offset).requires_grad_(x.requires_grad)
