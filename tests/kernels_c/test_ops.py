"""One table for every op, on each device that it has a kernel for: every check of opjit.testing. An op that is added to kernels_c is
in the table.

The tests' own ops are in it too: `parts` and `joined` have several results and several Tensor arguments, and share a folder."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from opjit import Op, testing
from opjit.catalog import registry
from opjit.testing import integration
from tests.helpers import BUNDLED, emulated, is_across_ranks

OPS = Path(__file__).parents[1] / "ops"
for _folder in ("double", "parts"):
    registry.declare_folder(OPS / _folder)
LARGEST_EMULATED = 20_000  # elements, so that a call lasts milliseconds
OWN = ["optest::double", "optest::parts", "optest::joined"]
# Ops for which the fast tier has the checks that compile and export.
TRACED = [
    "opjit::add_custom",
    "opjit::allreduce",
]


def _cases() -> Iterator[Any]:
    """Every op on every device that it has a source for; double's CUDA kernel takes less than its samples."""
    for name in [*BUNDLED, *OWN]:
        for device in ("cpu",) if name == "optest::double" else _devices(name):
            for check in testing.CHECKS:
                if device == "cuda" or not check.name.startswith("cuda"):
                    marks = [pytest.mark.gpu] if device == "cuda" else []
                    if device == "cuda" and check.name == "memory":
                        marks.append(pytest.mark.alone)  # others on the GPU allocate meanwhile
                    if device == "emulated" and check.name != "results":
                        marks.append(pytest.mark.slow)
                    marks += (
                        [pytest.mark.torch]
                        if check.run.__module__ == integration.__name__ and check.device is None
                        else []
                    )
                    marks += (
                        [pytest.mark.slow]
                        if check.name.startswith(("compile", "export")) and name not in TRACED
                        else []
                    )
                    yield pytest.param(
                        check,
                        name,
                        device,
                        id=f"{check}-{name.partition('::')[2]}-{device}",
                        marks=marks,
                    )


def _devices(name: str) -> list[str]:
    """The devices that an op has a source for, and the emulated one; tests/emulate/test_ranks.py has the ops across ranks."""
    op = registry.find(name)
    backends = op.backends()
    twin = "cuda" in backends and not is_across_ranks(op)
    return [*backends, "emulated"] if twin else [*backends]


# What torch 2.11 says of itself, once in a process, when torch._dynamo.reset() imports inductor.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("check", "name", "device"), list(_cases()))
def test_an_op_holds_its_promises(check: testing.Check, name: str, device: str) -> None:
    op = registry.find(name)
    if device != "emulated":
        check(op, device)
        return
    declared = op.declaration
    small = [sample for sample in op.samples_on("cpu") if sample.numel <= LARGEST_EMULATED]
    op.samples(lambda device: iter(small))
    try:
        with emulated(checked=False):
            check(op, "cpu")
    finally:
        op.declaration = declared


def _takes(op: Op, dtype: torch.dtype) -> bool:
    """Whether the fake kernel accepts some sample with its floating-point tensors in another dtype."""
    for sample in op.samples_on("cpu"):
        changed = sample.map(lambda t: t.to("meta", dtype if t.is_floating_point() else t.dtype))
        with contextlib.suppress(RuntimeError):
            op(*changed.args, **changed.kwargs)
            return True
    return False


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_op_declares_all_that_the_table_needs(name: str) -> None:
    op = registry.find(name)
    declared = [t for sample in op.samples_on("cpu") for t in sample.tensors()]
    assert callable(op.reference_function)
    assert {"cpu", "cuda"} <= set(op.backends())
    assert any(t.numel() == 0 for t in declared), "no empty tensor"
    assert any(not t.is_contiguous() for t in declared), "no strided tensor"
    dtypes = {t.dtype for t in declared}
    assert torch.float32 in dtypes or not _takes(op, torch.float32)
    without = torch.float64 not in dtypes and op.declaration.differentiable
    assert not without or not _takes(op, torch.float64), "gradcheck needs float64"
    assert next(op.workloads_on("cpu"), None) is not None, "no workload"
