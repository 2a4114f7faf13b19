"""lltm_forward and lltm_backward: torch's values and gradients, own exp and tanh as exact as stated, on CUDA the same bits each time."""

import math
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opjit import Op, backends
from opjit.backends import targets
from opjit.catalog import registry
from tests import helpers
from tests.helpers import example, is_emulated
from tests.tensors import COMPILES, DEVICES

FLOATING = [torch.float32, torch.float64]
Tensor = torch.Tensor
FORWARD = registry.find("lltm_forward")
BACKWARD = registry.find("lltm_backward")


def arguments(
    batch: int, features: int, state: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> list[Tensor]:
    """x, weights, bias, old_h, old_cell."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (batch, features),
        (3 * state, state + features),
        (3 * state,),
        (batch, state),
        (batch, state),
    ]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    made[1] /= max(1, state + features) ** 0.5
    return [x.to(device, dtype) for x in made]


def gradient_arguments(args: list[Tensor], seed: int = 9) -> list[Any]:
    """What lltm_backward takes after such a forward, with gradients of both results."""
    generator = torch.Generator().manual_seed(seed)
    x, weights, _, old_h, old_cell = args
    grads = [
        torch.randn(old_cell.shape, generator=generator, dtype=torch.float64).to(old_cell)
        for _ in range(2)
    ]
    return [*grads, FORWARD.reference_function(*args)[2], x, weights, old_h, [True] * 5]


def exact(op: Op, args: list[Any]) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = op.reference_function(
        *(x.double() if isinstance(x, Tensor) else x for x in args)
    )
    return found


def assert_right(op: Op, args: list[Any]) -> None:
    """As near to the float64 reference as a sum of so many products in the dtype is."""
    for got, wanted in zip(op(*args), exact(op, args), strict=True):
        dtype = args[2].dtype
        assert got.dtype == dtype
        assert got.shape == wanted.shape
        assert got.is_contiguous()
        if got.numel():
            allowed = 64 * torch.finfo(dtype).eps * (1 + wanted.abs().max().item())
            assert (got.double() - wanted).abs().max().item() <= allowed


@settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    batch=st.integers(0, 40),
    features=st.integers(0, 70),
    state=st.integers(0, 70),
    dtype=st.sampled_from(FLOATING),
    seed=st.integers(0, 99),
)
def test_any_sizes_give_the_references_values(
    batch: int, features: int, state: int, dtype: torch.dtype, seed: int
) -> None:
    args = arguments(batch, features, state, dtype, seed=seed)
    assert_right(FORWARD, args)
    assert_right(BACKWARD, gradient_arguments(args))


@pytest.mark.parametrize("dtype", FLOATING)
def test_sizes_beyond_a_block_of_the_depth_and_one_thread(dtype: torch.dtype, device: str) -> None:
    of_blocks = [(64, 128, 512), (5, 700, 33), (300, 2, 65)]
    of_tiles = [
        (1, 1, 1),
        (16, 32, 128),
        (17, 33, 65),
        (33, 1, 100),
        (100, 0, 30),
        (0, 3, 5),
        (2, 3, 0),
        (300, 300, 1030),
    ]
    chosen = of_blocks if device == "cpu" else [*of_blocks, *of_tiles]
    if is_emulated():
        chosen = [(1, 1, 1), (17, 3, 33), (0, 3, 5), (2, 3, 0)]
    for sizes in chosen:
        args = arguments(*sizes, dtype, device)
        assert_right(FORWARD, args)
        assert_right(BACKWARD, gradient_arguments(args))


def apart(x: Tensor) -> Tensor:
    """The same numbers, with others between them that nothing may read."""
    wide = x.new_full((*(2 * size for size in x.shape),), math.nan)
    return wide[tuple(slice(1, None, 2) for _ in x.shape)].copy_(x)


def test_strides_of_any_one_argument_are_followed(device: str) -> None:
    layouts: list[Callable[[Tensor], Tensor]] = [
        apart,
        lambda x: x.t().contiguous().t() if x.dim() == 2 else x,
        lambda x: x[..., :1].expand(x.shape),
    ]
    chosen = [(3, 5, 17)] if is_emulated() else [(19, 13, 34), (300, 300, 1030)]
    for sizes in chosen[: 1 if device == "cpu" else 2]:
        args = arguments(*sizes, torch.float32, device)
        for op, all_args in ((FORWARD, args), (BACKWARD, gradient_arguments(args))):
            for at in [index for index, x in enumerate(all_args) if isinstance(x, Tensor)]:
                for layout in layouts:
                    assert_right(
                        op, [layout(x) if index == at else x for index, x in enumerate(all_args)]
                    )


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("wanted", range(5))
def test_autograd_gives_eager_gradients_of_any_one_argument(
    dtype: torch.dtype, wanted: int
) -> None:
    combinations: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda h, cell: h.sum() + cell.sum(),
        lambda h, cell: h.square().sum(),
        lambda h, cell: cell.sum(),
    ]
    for combine in combinations:
        found = []
        for function in (FORWARD, FORWARD.reference_function):
            leaves = [
                x.requires_grad_(index == wanted)
                for index, x in enumerate(arguments(16, 8, 24, dtype))
            ]
            combine(*function(*leaves)[:2]).backward()
            assert [leaf.grad is not None for leaf in leaves] == [
                index == wanted for index in range(5)
            ]
            found.append(leaves[wanted].grad)
        torch.testing.assert_close(
            found[0], found[1], rtol=64 * torch.finfo(dtype).eps, atol=64 * torch.finfo(dtype).eps
        )


@pytest.mark.parametrize("dtype", FLOATING)
def test_the_slope_of_elu_at_zero_is_one_as_torchs(dtype: torch.dtype) -> None:
    """All of z is exactly 0, so that new_cell is elu(z2) / 2 and its slope by the bias is elu'(0) / 2."""
    args = arguments(2, 3, 4, dtype)
    args[1].zero_()
    slopes = []
    for function in (FORWARD, FORWARD.reference_function):
        bias = torch.zeros(12, dtype=dtype, requires_grad=True)
        function(args[0], args[1], bias, args[3], args[4])[1].sum().backward()
        assert bias.grad is not None
        slopes.append(bias.grad[8:])
    assert torch.equal(slopes[0], slopes[1])
    assert torch.equal(slopes[0], torch.ones(4, dtype=dtype))


def functions_of(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """sigmoid(z), elu(z) and tanh(z), by the op: gates are these of any numbers, with weights of 0 and z in the bias."""
    n = z.numel()
    zero = z.new_zeros(1, n)
    gates = FORWARD(z.new_zeros(1, 0), z.new_zeros(3 * n, n), z.repeat(3), zero, zero)[2][0]
    # The input gate gives 0, so new_cell is old_cell.
    shut = torch.cat([z.new_full((n,), -math.inf), z.new_zeros(2 * n)])
    activated = FORWARD(z.new_zeros(1, 0), z.new_zeros(3 * n, n), shut, zero, z[None])[2][0]
    return gates[:n], gates[2 * n : 3 * n], activated[3 * n :]


def hard_numbers(dtype: torch.dtype) -> Tensor:
    """All magnitudes, and many where the results turn from one thing to another."""
    info = torch.finfo(dtype)
    small = torch.logspace(math.log10(info.smallest_normal), 1, 20_000, dtype=torch.float64)
    edges = 0.5 * math.log(2) * torch.arange(-300, 300, dtype=torch.float64)
    around = (edges[:, None] + torch.linspace(-1e-3, 1e-3, 41, dtype=torch.float64)).flatten()
    even = torch.linspace(-110, 110, 200_001, dtype=torch.float64)
    return torch.cat([small, -small, around, even]).to(dtype)


@pytest.mark.parametrize(("dtype", "every"), [(torch.float32, 97), (torch.float64, 397)])
def test_own_functions_are_as_exact_as_stated(dtype: torch.dtype, every: int) -> None:
    """In units of the last place, against 200 bits, on a sample; subnormal numbers share the smallest's unit."""
    import mpmath  # type: ignore[import-untyped]

    z, least, digits = (
        hard_numbers(dtype)[::every],
        *{torch.float32: (-126, 23), torch.float64: (-1022, 52)}[dtype],
    )
    if dtype == torch.float32:
        z = z[z > -87]  # below, sigmoid is subnormal, and 0 from -89 on; torch's is 0 from -88.7 on
    with mpmath.workprec(200):
        numbers = [mpmath.mpf(value) for value in z.tolist()]
        wanted = (
            [1 / (1 + mpmath.exp(-x)) for x in numbers],
            [x if x > 0 else mpmath.expm1(x) for x in numbers],
            [mpmath.tanh(x) for x in numbers],
        )
        parts = zip(*(functions_of(part) for part in z.split(700)), strict=True)
        for name, got, of, bound in zip(
            ("sigmoid", "elu", "tanh"), parts, wanted, (2.5, 1.5, 3.0), strict=True
        ):
            worst = max(
                abs(mpmath.mpf(value) - right)
                / mpmath.ldexp(1, max(least, mpmath.frexp(right)[1] - 1) - digits)
                for value, right in zip(torch.cat(got).tolist(), of, strict=True)
                if right
            )
            assert worst <= bound, name


@pytest.mark.parametrize("dtype", FLOATING)
def test_saturation_infinities_and_nan_are_torchs(dtype: torch.dtype) -> None:
    z = torch.tensor(
        [
            0.0,
            -0.0,
            20,
            -20,
            50,
            -50,
            104,
            -104,
            800,
            -800,
            1e30,
            -1e30,
            math.inf,
            -math.inf,
            math.nan,
        ],
        dtype=dtype,
    )
    wanted = torch.sigmoid(z), torch.nn.functional.elu(z), torch.tanh(z)
    for got, right in zip(functions_of(z), wanted, strict=True):
        torch.testing.assert_close(
            got,
            right,
            rtol=4 * torch.finfo(dtype).eps,
            atol=torch.finfo(dtype).smallest_normal,
            equal_nan=True,
        )
    sigmoid, elu, tanh = functions_of(z)
    assert sigmoid[-3:-1].tolist() == [1, 0]
    assert elu[-3:-1].tolist() == [math.inf, -1]
    assert tanh[-3:-1].tolist() == [1, -1]


def error_ratios(op: Op, sizes: tuple[int, int, int], device: str) -> list[float]:
    """The op's error over torch's, for each result: root mean squares over all elements of some calls."""
    mine = [0.0] * 5
    theirs = [0.0] * 5
    for seed in range(6):
        args: list[Any] = arguments(*sizes, torch.float32, device, seed)
        args = args if op is FORWARD else gradient_arguments(args, seed)
        for index, (got, torchs, right) in enumerate(
            zip(op(*args), op.reference_function(*args), exact(op, args), strict=True)
        ):
            mine[index] += (got.double() - right).square().mean().item()
            theirs[index] += (torchs.double() - right).square().mean().item()
    return [math.sqrt(ours / torchs) for ours, torchs in zip(mine, theirs, strict=True) if torchs]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(16, 32, 128), (64, 128, 256), (64, 128, 512), (7, 600, 40)])
def test_float32_is_no_less_exact_than_torch(sizes: tuple[int, int, int], device: str) -> None:
    for op in (FORWARD, BACKWARD):
        assert max(error_ratios(op, sizes, device)) <= 1.1  # a tenth is what chance does


@pytest.mark.parametrize("dtype", FLOATING)
def test_any_number_of_threads_gives_the_references_values(
    threads: Callable[[int], None], dtype: torch.dtype
) -> None:
    args = arguments(70, 61, 300, dtype)
    given_back = gradient_arguments(args)
    for count in (1, 2, 3, 8):
        threads(count)
        assert_right(FORWARD, args)
        assert_right(BACKWARD, given_back)


def test_a_failed_product_is_an_error_and_frees_all_memory(tmp_path: Path) -> None:
    """Of the two products of a forward and the four of a backward, each in turn."""
    source = tmp_path / "fails.c"
    library = tmp_path / "fails.so"
    source.write_text("""
        int left;
        int aoti_torch_cpu_mm_out(void *out, void *a, void *b) { return left-- == 0; }
        int aoti_torch_cpu_addmm_out(void *out, void *c, void *a, void *b, double beta, double alpha) { return left-- == 0; }
    """)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    helpers.fresh(
        """
        import ctypes, os, resource
        import torch
        import opjit
        left = ctypes.c_int.in_dll(ctypes.CDLL(os.environ["LD_PRELOAD"]), "left")
        forward, backward = opjit.get("lltm_forward", "cpu"), opjit.get("lltm_backward", "cpu")

        def fail(at):  # every tensor of its own memory, 2 MiB and more
            x, state, gates, weights = torch.ones(512, 512), torch.ones(512, 1024), torch.ones(512, 4096), torch.ones(3072, 1536)
            left.value = at % 6 - (0 if at % 6 < 2 else 2)
            try:
                if at % 6 < 2:
                    forward(x, weights, torch.ones(3072), state, state)
                else:
                    backward(state, state, gates, x, weights, state, [True] * 5)
            except RuntimeError as error:
                assert "matrix product failed" in str(error), error
            else:
                raise SystemExit("no error")

        for at in range(12):
            fail(at)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for at in range(120):
            fail(at)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 256 * 1024, grown  # KiB; without a handle's release, 480 MiB and more
    """,
        {"LD_PRELOAD": str(library)},
    )


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
        torch.set_num_threads(1)
        for name in ("lltm_forward", "lltm_backward"):
            op = registry.find(name)
            for args, *_ in op.samples_on("cpu"):
                for got, wanted in zip(op(*args), op.reference_function(*args), strict=True):
                    torch.testing.assert_close(got, wanted, rtol=1e-4 if got.dtype == torch.float32 else 1e-11, atol=1e-5)
            assert op.loaded["cpu"].key
    """,
        {"OPJIT_ARCH": arch, "OPJIT_CACHE": str(tmp_path)},
    )
    assert len(list(tmp_path.glob(f"v2/opjit.lltm_*/{arch}-*/*/manifest.json"))) == 2


MISTAKES: list[tuple[Op, int, Callable[[Tensor], Tensor], str]] = [
    (FORWARD, 0, lambda x: x[0], "`x` and `old_h` must have 2 dimensions, not 1 and 2"),
    (FORWARD, 2, lambda x: x[None], "`bias` must have 1 dimension, not 2"),
    (
        FORWARD,
        3,
        lambda x: x[:2],
        "dimension 0 of `old_h` is 2, but must be 3 for a batch of 3, 4 features (`x`) and 5 states (`old_h`)",
    ),
    (FORWARD, 4, lambda x: x[:, :4], "dimension 1 of `old_cell` is 4, but must be 5"),
    (FORWARD, 1, lambda x: x[:14], "dimension 0 of `weights` is 14, but must be 15"),
    (FORWARD, 2, lambda x: x[:5], "dimension 0 of `bias` is 5, but must be 15"),
    (FORWARD, 1, lambda x: x.double(), "`weights` is float64, but `x` is float32"),
    (FORWARD, 0, lambda x: x.half(), "lltm_forward takes float32 and float64, not float16"),
    (BACKWARD, 0, lambda x: x[:2], "dimension 0 of `grad_new_h` is 2, but must be 3"),
    (BACKWARD, 2, lambda x: x[:, :15], "dimension 1 of `gates` is 15, but must be 20"),
    (BACKWARD, 0, lambda x: x.double(), "`grad_new_h` is float64, but `x` is float32"),
]


@pytest.mark.parametrize(("op", "at", "changed", "message"), MISTAKES)
def test_bad_arguments_are_named(
    op: Op, at: int, changed: Callable[[Tensor], Tensor], message: str
) -> None:
    args = arguments(3, 4, 5, torch.float32)
    args = args if op is FORWARD else gradient_arguments(args)
    args[at] = changed(args[at])
    with pytest.raises(RuntimeError, match=re.escape(message)):
        op(*args)
    with pytest.raises(RuntimeError) as caught:
        op(*(x.to("meta") if isinstance(x, Tensor) else x for x in args))
    assert message in str(caught.value).replace("torch.", "")


@COMPILES
def test_a_batch_that_only_data_tell_is_one_graph_with_gradients() -> None:
    torch._dynamo.reset()

    def step(mask: Tensor, x: Tensor, weights: Tensor, bias: Tensor, *states: Tensor) -> Tensor:
        new_h, new_cell, _ = torch.ops.opjit.lltm_forward(
            x[mask], weights, bias, *(state[mask] for state in states)
        )
        total: Tensor = new_h.sum() + new_cell.square().sum()
        return total

    mask = torch.tensor([True, False, True, True])
    args = [x.requires_grad_() for x in arguments(4, 3, 5, torch.float64)]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = torch.autograd.grad(
            torch.compile(step, backend="aot_eager", fullgraph=True)(mask, *args), args
        )
    torch.testing.assert_close(got, torch.autograd.grad(step(mask, *args), args))


NUMBERS = r"\d+\.\d{3}/\d+\.\d{3}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("py",), ("c", "-d", "-b", "3", "-f", "5", "-s", "7", "--scale", "ms")]
)
def test_the_examples_benchmark_prints_one_line(options: tuple[str, ...]) -> None:
    unit = options[options.index("--scale") + 1] if "--scale" in options else "us"
    told = example("05_lltm/benchmark.py", *options, "-r", "5", flags=())
    assert re.fullmatch(f"Forward: {NUMBERS} {unit} \\| Backward {NUMBERS} {unit}\n", told)


@pytest.mark.parametrize(
    ("script", "form", "told"),
    [
        ("check.py", "c", "c on cpu: "),
        ("grad_check.py", "c", "c on cpu: "),
        # Also where ninja is only pip's and the environment is not activated: opjit finds it beside Python.
        pytest.param("check.py", "cpp", "cpp on cpu: equal to Python", marks=pytest.mark.slow),
    ],
)
def test_the_examples_checks_pass(script: str, form: str, told: str) -> None:
    assert example(f"05_lltm/{script}", form, flags=()).startswith(told)


@pytest.mark.parametrize("sizes", [(16, 32, 128), (300, 300, 1030)])
def test_cuda_gives_the_same_bits_each_time(sizes: tuple[int, int, int], cuda_device: str) -> None:
    sizes = (4, 5, 33) if is_emulated() else sizes
    args = arguments(*sizes, torch.float32, cuda_device)
    given_back = gradient_arguments(args)
    first = [*FORWARD(*args), *BACKWARD(*given_back)]
    for _ in range(2 if is_emulated() else 20):
        assert all(
            torch.equal(one, other)
            for one, other in zip(first, [*FORWARD(*args), *BACKWARD(*given_back)], strict=True)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("script", ["check.py", "grad_check.py", "benchmark.py"])
def test_the_examples_run_on_cuda(script: str) -> None:
    told = example(f"05_lltm/{script}", "cuda", flags=())
    assert script != "benchmark.py" or re.fullmatch(
        f"Forward: {NUMBERS} us \\| Backward {NUMBERS} us\n", told
    )
