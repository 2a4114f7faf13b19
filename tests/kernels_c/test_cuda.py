"""allreduce on a GPU: numbers, strides, sizes, streams, graphs, devices; and every CUDA op under compute-sanitizer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import opjit
from opjit.declare import registry
from opjit.testing import sanitize
from tests.helpers import BUNDLED

pytestmark = pytest.mark.gpu

REAL = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture(scope="module")
def allreduce() -> Callable[..., torch.Tensor]:
    return opjit.get("allreduce", "cuda")


def numbers(count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(count)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator, device="cuda").to(dtype)
    low, high = (0, 2) if dtype == torch.bool else (-100, 101) if dtype.is_signed else (0, 201)
    return torch.randint(low, high, (count,), generator=generator, device="cuda").to(dtype)


def exact_sum(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The sum in float64 or int64 of the elements as the result's dtype holds them."""
    result = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
    held = x.to(result)
    if result.is_floating_point:
        return held.double().sum()
    return held.any() if result == torch.bool else held.to(torch.int64).sum().to(result)


def assert_sum(got: torch.Tensor, x: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    expected = exact_sum(x, dtype)
    assert got.shape == ()
    assert got.device == x.device
    assert got.dtype == (dtype or (x.dtype if x.dtype.is_floating_point else torch.int64))
    if got.dtype.is_floating_point:
        size = x.to(got.dtype).double().abs().sum().item()
        if abs(expected.item()) > torch.finfo(got.dtype).max:
            assert got.isinf()
            return
        allowed = torch.finfo(got.dtype).eps * abs(expected.item()) + 1e-6 * size
        assert abs(got.double().item() - expected.item()) <= allowed
    else:
        assert got.item() == expected.item()


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_every_size_and_alignment_is_summed_once(allreduce: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    for count in (0, 1, 2, 15, 16, 17, 31, 511, 512, 513, 4097, 32_767, 32_769, 65_537, 131_073, 1_000_003, 9_999_991):
        x = numbers(count + 3, dtype)
        for start in (0, 1, 3):
            assert_sum(allreduce(x[start:start + count]), x[start:start + count])


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_strides_do_not_change_the_sum(allreduce: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    x = numbers(66 * 70 * 74, dtype).reshape(66, 70, 74)
    views = [x.transpose(0, 2), x[1::3, ::2, 3:71], x[0].expand(5, 70, 74), x[:, 3, :], x.permute(1, 2, 0)[::2], x[::65, ::69, ::73],
             x.flatten()[::7], x[0, 0, 0].expand(1000)]
    for view in views:
        assert_sum(allreduce(view), view)


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_what_a_stride_of_zero_repeats_is_counted_as_often(allreduce: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    x = numbers(4 * 300_007, dtype).reshape(4, 1, 300_007)
    for view in (x[:, :, :9].expand(4, 7, 9), x.expand(4, 3, 300_007), x[::2].expand(2, 3, 300_007), x[:1, :, :1].expand(4, 7, 9)):
        assert_sum(allreduce(view, dtype=torch.float64), view, torch.float64)
        assert_sum(allreduce(view), view)


@pytest.mark.parametrize("result", REAL, ids=str)
def test_a_result_dtype_converts_each_element_first(allreduce: Callable[..., torch.Tensor], result: torch.dtype) -> None:
    for source in REAL:
        x = numbers(50_021, source)
        if source.is_floating_point and not result.is_floating_point and not result.is_signed:
            x = x.abs()  # a negative float has no meaning as an unsigned integer
        assert_sum(allreduce(x, dtype=result), x, result)
        assert_sum(allreduce(x[:99], dtype=result), x[:99], result)


def test_float32_is_no_less_exact_than_torch(allreduce: Callable[..., torch.Tensor]) -> None:
    mine = theirs = 0.0
    for seed in range(8):
        x = torch.rand(10_000_019, generator=torch.Generator(device="cuda").manual_seed(seed), device="cuda")
        exact = x.double().sum().item()
        mine += abs(allreduce(x).item() - exact)
        theirs += abs(x.sum().item() - exact)
    assert mine <= theirs


def test_the_same_bits_come_out_each_time(allreduce: Callable[..., torch.Tensor]) -> None:
    for count in (1000, 3_000_017):
        x = numbers(count, torch.float32)
        first = allreduce(x)
        assert all(torch.equal(allreduce(x), first) for _ in range(200))


def test_more_than_two_to_the_31_elements_are_summed(allreduce: Callable[..., torch.Tensor]) -> None:
    count = (1 << 31) + 12_345
    x = torch.ones(count, dtype=torch.int8, device="cuda")
    assert allreduce(x).item() == count
    assert allreduce(x[::1].as_strided((count // 2,), (2,))).item() == count // 2
    assert allreduce(torch.ones((), dtype=torch.int16, device="cuda").expand(3, 1 << 30)).item() == 3 << 30
    rows = torch.ones(40_000, 60_000, dtype=torch.int8, device="cuda")[:, 1:]  # not one dimension: their indices are divided
    assert allreduce(rows).item() == rows.numel() > 1 << 31


def test_calls_on_two_streams_at_once_do_not_mix(allreduce: Callable[..., torch.Tensor]) -> None:
    streams = [torch.cuda.Stream() for _ in range(4)]
    inputs = [torch.full((2_000_003,), float(i + 1), device="cuda") for i in range(4)]
    torch.cuda.synchronize()
    results = []
    for _ in range(200):
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(allreduce(x))
    torch.cuda.synchronize()
    assert all(result.item() == 2_000_003.0 * (i % 4 + 1) for i, result in enumerate(results))


def test_a_stream_that_has_a_part_of_the_device_gets_the_sum(allreduce: Callable[..., torch.Tensor]) -> None:
    """There, fewer blocks are resident at once than the device as a whole could hold."""
    green_contexts = pytest.importorskip("torch.cuda.green_contexts", reason="this torch has no green contexts")
    x, strided = torch.ones(50_000_000, device="cuda"), torch.ones(20_000_000, device="cuda")[::2]
    try:
        context = green_contexts.GreenContext.create(16, 0)
    except RuntimeError as error:
        pytest.skip(f"no green context can be made here: {error}")
    context.set_context()
    try:
        assert allreduce(x).item() == 50_000_000
        assert allreduce(strided).item() == 10_000_000
    finally:
        context.pop_context()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_tensor_on_another_device_than_the_current_one(allreduce: Callable[..., torch.Tensor]) -> None:
    x = torch.ones(3_000_000, device="cuda:1")
    result = allreduce(x)
    assert result.device == x.device
    assert result.item() == 3_000_000
    assert torch.cuda.current_device() == 0


def test_a_tensor_on_the_cpu_beside_one_on_the_gpu_is_served_by_its_own_kernel(allreduce: Callable[..., torch.Tensor]) -> None:
    assert allreduce(torch.ones(10)).item() == allreduce(torch.ones(10, device="cuda")).item() == 10


# compute-sanitizer --------------------------------------------------------------------------------------------------------------


WRONG = {"memcheck": "to[n] = 1", "racecheck": "__shared__ volatile float last; last = threadIdx.x; to[1] = last",
         "initcheck": "to[0] = to[1]"}
WRONG_OP = """
import torch

import opjit


@opjit.op("optest::{name}(Tensor x) -> Tensor")
def wrong(x):
    return torch.empty_like(x)


@wrong.reference
def reference(x):
    return torch.zeros_like(x)


@wrong.samples
def samples(device):
    yield (torch.zeros(64, device=device),), {{}}
"""
WRONG_CU = """
#include "opjit_cuda.h"

static __global__ void wrong_kernel(float *to, int64_t n)
{{
    to[threadIdx.x] = 0;
    {statement};
}}

opjit_status {name}_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    wrong_kernel<<<1, {threads}, 0, stream>>>((float *)out->data, x->numel);
    return OPJIT_LAUNCHED();
}}
"""


@pytest.fixture(scope="module")
def sanitizer() -> str:
    found = sanitize.find_tool()
    if found is None:
        pytest.skip("no compute-sanitizer: it comes with the CUDA Toolkit")
    return found


@pytest.mark.parametrize("tool", list(sanitize.FOR_CUDA))
@pytest.mark.usefixtures("parts")
def test_every_cuda_op_is_clean_under_compute_sanitizer(sanitizer: str, tool: str) -> None:
    names = [name for name in (*BUNDLED, "optest::parts", "optest::joined") if "cuda" in registry.find(name).backends()]
    done = sanitize.under_tool(sanitizer, tool, [registry.find(name) for name in names])
    assert done.returncode == 0, done.stdout
    assert all(re.search(rf"^{name}: [1-9]\d* calls$", done.stdout, re.MULTILINE) for name in names), done.stdout


@pytest.mark.parametrize("tool", list(sanitize.FOR_CUDA))
def test_compute_sanitizer_would_notice(sanitizer: str, tool: str, tmp_path: Path) -> None:
    name = f"wrong_under_{tool}"
    (tmp_path / "op.py").write_text(WRONG_OP.format(name=name))
    (tmp_path / f"{name}.cu").write_text(WRONG_CU.format(name=name, statement=WRONG[tool], threads=1 if tool == "initcheck" else 64))
    [op] = registry.add_path(tmp_path)
    done = sanitize.under_tool(sanitizer, tool, [op])
    assert done.returncode == sanitize.FOUND, done.stdout
    assert "wrong_kernel" in done.stdout
