"""What the calls of a program give, as JSON that is equal if a user could see no difference."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.cpp_extension.corpus.program import Program, scope

Outcome = dict[str, Any]
# What differs between two builds of one program, although both are right.
_PLACES = [
    (re.compile(r"(Exception raised from \S+) at .*? \(most recent call first\):.*", re.DOTALL), r"\1"),  # paths and addresses
    (re.compile(r'(INTERNAL ASSERT FAILED at )"[^"]*":\d+'), r"\1FILE"),
    (re.compile(r"\(Triggered internally at [^)]*\)"), "(Triggered internally)"),
    (re.compile(r"\[F\d+ [\d:.]+ \S+:\d+\]"), "[F]"),  # TORCH_CHECK_EQ's, with the time
    (re.compile(r"0x[0-9a-f]+"), "0x"),
    (re.compile(r" \| typing\.SupportsIndex"), ""),  # pybind11 3.0.1, torch 2.11's, does not name it
]


def results(module: Any, program: Program, device: str = "cpu") -> list[Outcome]:
    """First what the module has, then what each call gives: those that succeed, then the wrong ones."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        said = [] if program.library else [_contents(module, program)]
        clean = _normal(module, program)
        return said + [outcome(call, {**scope(device), "m": module}, clean) for call in [*program.calls, *program.wrong]]
    finally:
        torch.set_num_threads(threads)


def _contents(module: Any, program: Program) -> Outcome:
    clean = _normal(module, program)
    names = [name for name in dir(module) if not name.startswith("__")] + ["__doc__"]
    found = {name: getattr(module, name) for name in names}
    return {"call": "dir(m)", "names": {name: [type(one).__name__, clean(str(one.__doc__))] for name, one in found.items()}}


def outcome(call: str, names: dict[str, Any], clean: Callable[[str], str]) -> Outcome:
    """What a call gives; `clean` takes out of a text what may differ."""
    found: Outcome = {"call": call}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            value = eval(call, names)
            found["value"] = _described(value, clean)
        except Exception as error:
            found["error"] = [type(error).__name__, clean(str(error))]
            if error.__cause__ is not None:
                found["cause"] = [type(error.__cause__).__name__, clean(str(error.__cause__))]
    found["warnings"] = [[one.category.__name__, clean(str(one.message))] for one in seen]
    return found


def _normal(module: Any, program: Program) -> Callable[[str], str]:
    """Takes out of a text the names that the build chose for the module and the namespace, and places in files and memory."""
    def clean(text: str) -> str:
        for name in (f"{program.identifier}::", f"{getattr(module, '__name__', program.identifier)}."):
            text = text.replace(name, "")
        return without_places(text)

    return clean


def without_places(text: str) -> str:
    for pattern, instead in _PLACES:
        text = pattern.sub(instead, text)
    return text


def _described(value: object, clean: Callable[[str], str]) -> object:
    if isinstance(value, torch.Tensor):
        return _tensor(value, clean)
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(_described(one, clean) for one in value)]
    if isinstance(value, dict):
        return ["dict", *sorted(([_described(key, clean), _described(one, clean)] for key, one in value.items()), key=repr)]
    if isinstance(value, float):
        return ["float", value.hex()]
    return [type(value).__name__, clean(repr(value))]


def _tensor(value: torch.Tensor, clean: Callable[[str], str]) -> dict[str, object]:
    grad_fn = value.grad_fn
    if value.layout != torch.strided or value.is_quantized or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return {"type": type(value).__name__, "repr": clean(repr(value)), "requires_grad": value.requires_grad}
    plain = value.detach().resolve_conj().resolve_neg()
    content = "" if value.is_meta else bytes(plain.cpu().contiguous().reshape(-1).view(torch.uint8).tolist()).hex()
    return {
        "type": type(value).__name__, "dtype": str(value.dtype), "shape": list(value.shape), "stride": list(value.stride()),
        "offset": value.storage_offset(), "device": str(value.device), "requires_grad": value.requires_grad, "is_leaf": value.is_leaf,
        "grad_fn": grad_fn and grad_fn.name(), "is_view": value._is_view(), "is_inference": value.is_inference(), "bytes": content,
    }
