"""matmul: x @ w with bias, activation and residual, added in float32 and rounded once; for any strides, and with gradients."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opjit import backends
from opjit.backends import targets
from opjit.catalog import registry
from tests import helpers
from tests.tensors import COMPILES, DEVICES, Seen

Tensor = torch.Tensor
MATMUL = registry.find("matmul")
HALF = [torch.float16, torch.bfloat16]
EPILOGUES = ["none", "relu", "gelu", "silu_multiply"]
NAMES = ["x", "w", "bias", "residual"]


def arguments(
    rows: int,
    depth: int,
    columns: int,
    epilogue: str = "none",
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    seed: int = 0,
) -> list[Tensor]:
    """x, w, bias and residual, for results of `columns` columns; w is a layer's transposed weight."""
    inner = 2 * columns if epilogue == "silu_multiply" else columns
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, depth), (inner, depth), (inner,), (rows, columns)]
    x, weight, bias, residual = (torch.randn(shape, generator=generator) for shape in shapes)
    made = [x, weight / max(1, depth) ** 0.5, bias, residual]
    x, weight, bias, residual = (each.to(device, dtype) for each in made)
    return [x, weight.t(), bias, residual]


def assert_right(args: list[Tensor], epilogue: str) -> None:
    """One rounding of the dtype and those of float32 from the result in float64."""
    got = MATMUL(*args, epilogue=epilogue)
    wide = [each.double() for each in args]
    z = wide[0] @ wide[1]
    z = z if len(args) < 3 else z + wide[2]
    if epilogue == "silu_multiply":
        gate, up = z.chunk(2, dim=1)
        z = torch.nn.functional.silu(gate) * up
    elif epilogue != "none":
        z = getattr(torch.nn.functional, epilogue)(z)
    wanted = z if len(args) < 4 else z + wide[3]
    assert got.dtype == args[0].dtype
    assert got.shape == wanted.shape
    assert got.is_contiguous()
    allowed = 0.501 * torch.finfo(got.dtype).eps * wanted.abs() + 2e-5
    assert ((got.double() - wanted).abs() <= allowed).all()


@settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.integers(0, 40),
    depth=st.integers(0, 300),
    columns=st.integers(0, 70),
    epilogue=st.sampled_from(EPILOGUES),
    dtype=st.sampled_from(HALF),
    given_to_it=st.sampled_from([2, 3, 4]),
    seed=st.integers(0, 99),
)
def test_any_sizes_give_the_references_values(
    rows: int,
    depth: int,
    columns: int,
    epilogue: str,
    dtype: torch.dtype,
    given_to_it: int,
    seed: int,
) -> None:
    args = arguments(rows, depth, columns, epilogue, dtype, seed=seed)
    assert_right(args[:given_to_it], epilogue)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_sizes_beyond_a_tile_give_the_references_values(
    epilogue: str, dtype: torch.dtype, device: str
) -> None:
    for sizes in ((1, 1, 1), (65, 33, 129), (241, 513, 257), (500, 256, 64), (3, 1000, 700)):
        args = arguments(*sizes, epilogue, dtype, device)
        assert_right(args, epilogue)
        assert_right([args[0].t().contiguous().t(), args[1].contiguous(), *args[2:]], epilogue)


def apart(x: Tensor) -> Tensor:
    """The same numbers, from an odd element on, with others between them that nothing may read."""
    wide = x.new_full([2 * size + 1 for size in x.shape], math.nan)
    return wide[tuple(slice(1, None, 2) for _ in x.shape)].copy_(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("epilogue", ["none", "silu_multiply"])
def test_strides_of_any_one_argument_are_followed(epilogue: str, device: str) -> None:
    layouts: list[Callable[[Tensor], Tensor]] = [
        apart,
        lambda x: apart(x.t()).t() if x.dim() == 2 else x,
        lambda x: x.t().contiguous().t() if x.dim() == 2 else x,
        lambda x: x[..., :1].expand(x.shape),
        lambda x: x[:1].expand(x.shape),
        lambda x: torch.cat([x.new_ones(1), x.flatten()])[1:].view(x.shape),
    ]
    args = arguments(19, 270, 40, epilogue, device=device)
    for at in range(4):
        for layout in layouts:
            changed = [layout(x) if index == at else x for index, x in enumerate(args)]
            assert_right(changed, epilogue)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_empty_tensors_give_what_is_left(epilogue: str, device: str) -> None:
    for sizes in ((0, 3, 4), (3, 4, 0), (0, 0, 0)):
        args = arguments(*sizes, epilogue, device=device)
        assert MATMUL(*args, epilogue=epilogue).shape == (sizes[0], sizes[2])
    args = arguments(3, 0, 4, epilogue, device=device)
    assert_right(args, epilogue)
    assert_right(args[:2], epilogue)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALF)
def test_only_the_result_is_rounded(dtype: torch.dtype, device: str) -> None:
    """The product, the bias and the residual cancel to 1, and no sum of two of them fits the dtype."""
    large = 1.0 / torch.finfo(dtype).eps  # 128 or 1024: at 4 times as much, odd numbers do not fit
    x = torch.tensor([[4.0, 1.0]], device=device, dtype=dtype)
    w = torch.tensor([[large], [1.0]], device=device, dtype=dtype)
    bias = torch.tensor([2 * large], device=device, dtype=dtype)
    residual = torch.tensor([[-6 * large]], device=device, dtype=dtype)
    for epilogue in ("none", "relu", "gelu"):
        assert MATMUL(x, w, bias, residual, epilogue=epilogue).item() == 1


@pytest.mark.parametrize("device", DEVICES)
def test_nan_and_infinity_reach_the_result(device: str) -> None:
    x = torch.tensor([[math.nan], [math.inf], [-1.0]], device=device, dtype=torch.bfloat16)
    one = x.new_ones(1, 1)
    for epilogue, below in (("none", -1.0), ("relu", 0.0), ("gelu", -0.15865525)):
        first, second, third = MATMUL(x, one, epilogue=epilogue).flatten().tolist()
        assert math.isnan(first)
        assert second == math.inf
        assert third == pytest.approx(below, rel=1e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALF)
def test_gelu_and_silu_are_right_for_any_number(dtype: torch.dtype, device: str) -> None:
    """All finite float16, as z, are more than any layer has."""
    z = torch.arange(-(1 << 15), 1 << 15, device=device).to(torch.int16).view(torch.float16)
    x = z[z.isfinite()].to(dtype)[:, None]
    assert_right([x, x.new_ones(1, 1)], "gelu")
    gate_and_one = x.new_tensor([[1, 0]]), x.new_tensor([0, 1])
    assert_right([x, *gate_and_one], "silu_multiply")


def gradients(
    call: Callable[..., Tensor], args: list[Tensor], wanted: int, epilogue: str
) -> Tensor:
    leaves = [x.detach().requires_grad_(index == wanted) for index, x in enumerate(args)]
    result = call(*leaves, epilogue=epilogue)
    weights = torch.linspace(-1, 2, result.numel(), device=result.device).cos()
    result.backward(weights.reshape(result.shape).to(result.dtype))
    assert [leaf.grad is not None for leaf in leaves] == [i == wanted for i in range(len(args))]
    found = leaves[wanted].grad
    assert found is not None
    return found


# What torch says of its own product, once in a process: the thread of the backward has not used CUDA before.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_a_gradient_of_any_one_argument_is_that_of_float32(
    epilogue: str, dtype: torch.dtype, device: str
) -> None:
    args = arguments(33, 70, 24, epilogue, dtype, device)
    for count in (2, 3, 4):
        for wanted in range(count):
            got = gradients(MATMUL, args[:count], wanted, epilogue)
            wide = [x.float() for x in args[:count]]
            right = gradients(MATMUL.reference_function, wide, wanted, epilogue)
            assert got.dtype == dtype
            assert got.shape == args[wanted].shape
            allowed = 2 * torch.finfo(dtype).eps * right.abs().max().item()
            assert (got.float() - right).abs().max().item() <= allowed, NAMES[wanted]


def test_only_the_needed_gradients_are_computed() -> None:
    """With a gradient of the residual alone, no product is computed."""
    x, w, bias, residual = arguments(3, 4, 5)
    residual.requires_grad_()
    with Seen() as seen:
        MATMUL(x, w, bias, residual, epilogue="gelu").sum().backward()
    names = {str(op) for op in seen.ops}
    assert "opjit.matmul.default" in names
    assert not names & {"aten.mm.default", "aten.addmm.default", "aten.gelu_backward.default"}


def test_any_number_of_threads_gives_the_same_bits(threads: Callable[[int], None]) -> None:
    for sizes in ((500, 300, 300), (1, 2000, 3000)):
        args = arguments(*sizes, "silu_multiply")
        results = []
        for count in (1, 2, 3):
            threads(count)
            results.append(MATMUL(*args, epilogue="silu_multiply"))
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", HALF)
def test_a_result_has_the_same_bits_with_other_rows_columns_and_strides(dtype: torch.dtype) -> None:
    x, w, bias, residual = arguments(250, 600, 200, dtype=dtype)
    whole = MATMUL(x, w, bias, residual)
    for rows, columns in ((1, 1), (3, 33), (14, 190), (250, 7)):
        part = MATMUL(x[-rows:], w[:, -columns:], bias[-columns:], residual[-rows:, -columns:])
        assert torch.equal(part, whole[-rows:, -columns:])
    assert torch.equal(MATMUL(x, w.contiguous(), bias, residual), whole)


@pytest.mark.slow
@pytest.mark.parametrize("arch", helpers.LEVELS)
def test_every_level_of_the_cpu_is_right(tmp_path: Path, arch: str) -> None:
    cpu = backends.for_device("cpu")
    if (
        not cpu.takes(arch)
        or targets.here(cpu).arch not in helpers.LEVELS[helpers.LEVELS.index(arch) :]
    ):
        pytest.skip(f"this CPU is no {arch}")
    helpers.fresh(
        """
        import torch
        from opjit.catalog import registry
        op = registry.find("matmul")
        for sample in op.samples_on("cpu"):
            got, wanted = op(*sample.args, **sample.kwargs), op.reference_function(*sample.args, **sample.kwargs)
            eps = torch.finfo(got.dtype).eps
            torch.testing.assert_close(got, wanted, rtol=eps, atol=1e-4)
        assert op.loaded["cpu"].key
    """,
        {"OPJIT_ARCH": arch, "OPJIT_CACHE": str(tmp_path)},
    )
    assert len(list(tmp_path.glob(f"v2/opjit.matmul/{arch}-*/*/manifest.json"))) == 1


MISTAKES: list[tuple[str, dict[str, Callable[[Tensor], Tensor]], str]] = [
    ("none", {"x": lambda x: x.float()}, "matmul takes float16 and bfloat16, not float32"),
    ("none", {"x": lambda x: x[0]}, "`x` and `w` must have 2 dimensions, not 1 and 2"),
    ("none", {"w": lambda w: w[None]}, "`x` and `w` must have 2 dimensions, not 2 and 3"),
    ("none", {"w": lambda w: w.half()}, "`w` is float16, but `x` is bfloat16; convert"),
    (
        "none",
        {"w": lambda w: w[1:]},
        "dimension 0 of `w` is 3, but must be 4 for `x` (3, 4) and `w` (3, 6)",
    ),
    ("none", {"bias": lambda b: b[None]}, "`bias` must have 1 dimension, not 2"),
    ("none", {"bias": lambda b: b[1:]}, "dimension 0 of `bias` is 5, but must be 6"),
    ("none", {"bias": lambda b: b.float()}, "`bias` is float32, but `x` is bfloat16"),
    ("none", {"residual": lambda r: r[0]}, "`residual` must have 2 dimensions, not 1"),
    ("none", {"residual": lambda r: r[:1]}, "dimension 0 of `residual` is 1, but must be 3"),
    (
        "silu_multiply",
        {"residual": lambda r: torch.cat([r, r], 1)},
        "dimension 1 of `residual` is 6, but must be 3",
    ),
    (
        "silu_multiply",
        {"w": lambda w: w[:, 1:], "bias": lambda b: b[1:]},
        "`w` must have an even number of columns for silu_multiply, not 5",
    ),
    ("tanh", {}, "`epilogue` must be none, relu, gelu or silu_multiply, not tanh"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("epilogue", "changes", "message"), MISTAKES)
def test_bad_arguments_are_named(
    epilogue: str, changes: dict[str, Callable[[Tensor], Tensor]], message: str, device: str
) -> None:
    columns = 3 if epilogue == "silu_multiply" else 6
    args = arguments(3, 4, columns, epilogue, device=device)
    for name, change in changes.items():
        args[NAMES.index(name)] = change(args[NAMES.index(name)])
    with pytest.raises(RuntimeError, match=re.escape(message)):
        MATMUL(*args, epilogue=epilogue)
    with pytest.raises(RuntimeError) as caught:
        MATMUL(*(x.to("meta") for x in args), epilogue=epilogue)
    assert message in str(caught.value).replace("torch.", "")


@COMPILES
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_a_batch_that_only_data_tell_is_one_graph_with_gradients(
    epilogue: str, device: str
) -> None:
    torch._dynamo.reset()

    def step(mask: Tensor, x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        result = torch.ops.opjit.matmul(x[mask], w, bias, residual[mask], epilogue=epilogue)
        total: Tensor = result.float().square().sum()
        return total

    mask = torch.tensor([True, False, True, True], device=device)
    args = [x.requires_grad_() for x in arguments(4, 3, 5, epilogue, device=device)]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        got = torch.autograd.grad(compiled(mask, *args), args)
    torch.testing.assert_close(got, torch.autograd.grad(step(mask, *args), args))
