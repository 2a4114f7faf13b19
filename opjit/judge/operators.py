"""The operators of torch that run in a block, to find candidates that call the reference's.

Operators that compute the same, such as linear and addmm, are one family.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.autograd import profiler
from torch.utils._python_dispatch import TorchDispatchMode

from opjit import resources
from opjit.judge.verdict import VerdictReached
from opjit.tensors import tensors_of

# "free" operators make, move or view tensors, and compute nothing. "included": operators that can also compute another family, because a
# product is a convolution of one element.
_TABLE = json.loads(resources.template("judge/operators.json"))
_FAMILY_OF = {name: family for family, names in _TABLE["families"].items() for name in names}
_UNCOUNTED = ("inductor", "profiler", "prim")  # namespaces of operators that compute nothing
_PROBE = (3, 5, 7)  # the shape of a tensor that only the log uses


@cache
def known_operators() -> frozenset[str]:
    """Return the full names of the operators that are registered when this is first called."""
    return frozenset(name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names())


def _families_of(name: str) -> set[str]:
    """Return the families of an operator by its full name, which counts itself outside of aten."""
    namespace, _, plain = name.partition("::")
    if namespace != "aten":
        counts = name in known_operators() and namespace not in _UNCOUNTED
        return {name} if counts else set()
    if plain in _TABLE["free"]:
        return set()
    plain = plain.removesuffix("_")
    family = _FAMILY_OF.get(plain, plain)
    return {family, *(_TABLE["included"].get(each, family) for each in (plain, family))}


def largest(*values: Any) -> int:
    """Return the number of elements of the largest tensor among values."""
    return max((each.numel() for each in tensors_of(values)), default=0)


class Recorder(TorchDispatchMode):
    """Counts the elements of operators in this thread, by their full names."""

    def __init__(self, elements: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._elements = elements

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._elements[func._schema.name] += largest(args)
        return func(*args, **(kwargs or {}))


@contextmanager
def profiled(elements: Counter[str]) -> Iterator[None]:
    """Count the elements of operators in all threads, by torch's profiler, below all of Python's modes.

    Code cannot ask torch's functions in Python whether the profiler is on. Raises VerdictReached if it was switched off.
    """
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profiler.profile(record_shapes=True, experimental_config=every_thread) as profile:
        profiler._is_profiler_enabled = False
        yield
        torch.zeros(_PROBE).frac()
    complete = False
    for event in profile.function_events or ():
        shapes = event.input_shapes or []
        if list(_PROBE) in shapes:
            complete = True
        else:
            elements[event.name] += max(map(math.prod, shapes), default=0)
    if not complete:
        raise VerdictReached("cheat", "switches off torch's profiler")


def families(elements: Mapping[str, int], smallest: int) -> set[str]:
    """Return the families of operators that ran on at least so many elements, in all calls together."""
    totals = Counter[str]()
    for name, count in elements.items():
        totals.update(dict.fromkeys(_families_of(name), count))
    return {family for family, count in totals.items() if count >= max(1, smallest)}
