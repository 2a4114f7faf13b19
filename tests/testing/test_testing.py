"""opjit.testing notices: for each promise an op that breaks it and no other, and the sentence that says so."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from opjit import Op, Sample, testing
from opjit.cli import main
from opjit.recipe import toolchain
from opjit.testing import sanitize
from opjit.testing.checks import outcome_of
from opjit.testing.gradients import assert_same_gradients
from opjit.testing.samples import Skipped, rolled
from tests.helpers import ROOT, MakeOp, command
from tests.testing.mistakes import BODY, Mistake

CHECKS = {check.name: check for check in testing.CHECKS}
NEGATED = """
    #include <stdlib.h>

    opjit_status negated_cpu(const opjit_tensor *x, opjit_tensor *out)
    {{
        {before}
        OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
        OPJIT_DISPATCH_FLOATING(x->dtype, "negated", {{
            scalar_t *from = (scalar_t *)x->data, *to = (scalar_t *)out->data;
            for (int64_t i = 0; i < x->numel; i++)
                to[i] = {value};
            {after}
        }})
        return OPJIT_OK;
    }}
    """
RIGHT = "-from[opjit_offset(x, i)]"


def _fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _negated(
    make_op: MakeOp,
    before: str = "",
    value: str = RIGHT,
    after: str = "",
    fake: Callable[..., Any] = _fake,
    backward: Callable[..., Any] | None = None,
    change: Callable[[Op], object] = lambda op: None,
) -> Op:
    op = make_op(
        "negated(Tensor x) -> Tensor",
        NEGATED.format(before=before, value=value, after=after),
        fake=fake,
    )
    op.reference(torch.neg)

    @op.samples
    def samples(device: str) -> Any:
        for dtype in (torch.float32, torch.float64):
            x = torch.linspace(-2, 3, 24, dtype=dtype, device=device).reshape(4, 6)
            yield from (((view,), {}) for view in (x, x.t(), x[:0], x[1::2, ::3]))

    if backward:
        op.setup_context(lambda ctx, inputs, output: None)
        op.backward(backward)
    change(op)
    return op


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        (
            "results",
            {"value": f"{RIGHT} + 1"},
            r"got 3, expected 2 at \[0, 0\] on \(float32 \(4, 6\)\); 24 of 24",
        ),
        ("strides", {"value": "-from[i]"}, r"got .*, expected .* strides \("),
        (
            "nan and inf",
            {
                "value": "from[opjit_offset(x, i)] != from[opjit_offset(x, i)] ? 0 : -from[opjit_offset(x, i)]"
            },
            "with nan in tensor 0",
        ),
        (
            "inputs kept",
            {"after": "if (x->numel) from[0] = 7;"},
            "writes into tensor 0, an input that the schema does not mark",
        ),
        (
            "fake kernel",
            {"fake": torch.empty_like},
            r"the kernel makes .* but the fake kernel .*shape, dtype, strides",
        ),
        (
            "fake kernel",
            {"fake": lambda x: x},
            r"the fake kernel returns its argument, but the kernel returns a new tensor",
        ),
        (
            "threads",
            {
                "before": "static double kept[1 << 16];",
                "after": """
        if (x->numel <= 1 << 16) {
            for (int64_t i = 0; i < x->numel; i++)
                kept[i] = to[i] / 3;
            for (int64_t i = 0; i < x->numel; i++)
                to[i] = 3 * kept[i];
        }""",
            },
            r"got .*, expected .* of a call, with four threads at once, on \(float",
        ),
        (
            "inputs kept",
            {"after": "if (x->numel && x->contiguous) from[x->numel] = 0;"},
            r"writes 0 bytes after the end of tensor 0",
        ),
        (
            "memory",
            {"after": "volatile char *kept = malloc(1000); kept[0] = 0;"},
            r"the op kept \d+ bytes of host memory per call on \(float32",
        ),
        (
            "second gradients",
            {"backward": lambda ctx, grad: -grad.detach()},
            "Numerical gradient for function expected to be zero",
        ),
        (
            "shapes",
            {"before": 'OPJIT_CHECK(x->numel || x->dim < 2 || x->sizes[0] == 0, "two\\nlines");'},
            "must raise a one-line error",
        ),
        (
            "shapes",
            {"value": f"(x->dim == 2 && x->sizes[1] > 30) ? 0 : {RIGHT}"},
            r"got 0(\.0)?, expected .* on \(float(32|64) \(\d+, (31|64|65)\)",
        ),
        (
            "dtypes",
            {
                "before": "if (opjit_is_float8(x->dtype)) return opjit_empty(out, 0, NULL, OPJIT_INT8, x);"
            },
            r"got int8 \(\) on cpu, expected float32 \(4, 6\) on cpu on \(float8_e4m3fn",
        ),
        ("opcheck", {"fake": lambda x: x.new_empty((3,))}, "(?i)shape"),
        (
            "gradients",
            {"backward": lambda ctx, grad: grad},
            "got .*, expected .* of the gradient of tensor 0",
        ),
        ("gradcheck", {"backward": lambda ctx, grad: grad}, "Jacobian"),
        ("compile", {"fake": lambda x: x.new_empty((int(x.sum()), 4))}, "(?i)data.dependent"),
        ("export", {"fake": lambda x: x.new_empty((int(x.sum()), 4))}, "(?i)data.dependent"),
        (
            "vmap",
            {"change": lambda op: op.vmap(lambda info, in_dims, x: (op.overload(x), 0))},
            r"got .*, expected .* of torch\.vmap with in_dims=\(-1,\) on \(float",
        ),
        (
            "saved tensors",
            {
                "backward": lambda ctx, grad: -grad + 0 * ctx.x,
                "change": lambda op: op.setup_context(
                    lambda ctx, inputs, output: setattr(ctx, "x", inputs[0])
                ),
            },
            r"ctx\.x is a tensor; keep it with ctx\.save_for_backward",
        ),
    ],
)
def test_a_broken_promise_is_noticed(
    make_op: MakeOp, name: str, wrong: dict[str, Any], told: str
) -> None:
    op = _negated(make_op, **wrong)
    line = outcome_of(name, lambda: CHECKS[name].run(op, "cpu"))
    assert line.status == "failed", line
    assert re.search(told, line.note), line.note
    assert "\n" not in line.note
    with pytest.raises(AssertionError, match=rf"(?s)on cpu:.*\n?{name}: "):
        testing.check(op, "cpu", [CHECKS[name]])


@pytest.mark.torch
@pytest.mark.slow
def test_a_good_op_passes_each_of_them(make_op: MakeOp) -> None:
    op = _negated(make_op, backward=lambda ctx, grad: -grad)
    found = list(testing.results(op, "cpu"))
    assert [line for line in found if line.status == "failed"] == []
    assert [line.name for line in found if line.status == "skipped"] == [
        "numbers",
        "rejects",
        "complex gradients",
        "cuda graph",
        "cuda stream",
    ]


FLIPPED = """
opjit_status flipped_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    OPJIT_DISPATCH_FLOAT8(x->dtype, "flipped", {
        for (int64_t i = 0; i < x->numel; i++)
            opjit_store((scalar_t *)out->data + opjit_offset(out, i), -opjit_load((const scalar_t *)x->data + opjit_offset(x, i)));
    })
    return OPJIT_OK;
}
"""


@pytest.mark.slow
def test_a_good_op_that_takes_float8_passes_too(make_op: MakeOp) -> None:
    op = make_op("flipped(Tensor x) -> Tensor", FLIPPED, fake=torch.empty_like, elementwise=True)

    @op.reference
    def reference(x: torch.Tensor) -> torch.Tensor:
        assert x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        return torch.empty_like(x).copy_((-x.float()).to(x.dtype))

    @op.samples
    def samples(device: str) -> Iterator[tuple[torch.Tensor]]:
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            x = torch.linspace(-3, 3, 24, device=device).reshape(4, 6).to(dtype)
            yield from ((x,), (x[:, ::2],), (x.t(),), (x[0, 0],))

    assert [line for line in testing.results(op, "cpu") if line.status == "failed"] == []


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[::2],
        lambda x: x[0].expand(9),
        lambda x: x.to(torch.complex64).conj(),
        lambda x: (x * 1j).conj().imag,
    ],
    ids=["strided", "expanded", "conj", "neg"],
)
def test_elements_of_any_view_are_rolled(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = view(torch.arange(8.0))
    assert torch.equal(rolled(x, 1), x.flatten().roll(1).reshape(x.shape))


def test_an_op_that_writes_its_argument_is_checked_too(increment: Op) -> None:
    increment.reference(lambda x: x.add_(1) and None if x.numel() == 1 else (x.add_(1), None)[1])
    increment.samples(
        lambda device: (
            ((torch.arange(6.0, device=device).reshape(2, 3).t(),), {}) for _ in range(2)
        )
    )
    try:
        found = list(
            testing.results(
                increment,
                "cpu",
                [check for check in testing.CHECKS if not check.name.startswith("cuda")],
            )
        )
    finally:
        increment.declare(reference=None, samples=None)
    assert [line for line in found if line.status == "failed"] == []
    assert {"results", "inputs kept", "compile", "export", "threads"} <= {
        line.name for line in found if line.status == "ok"
    }


def test_an_op_that_returns_the_argument_which_it_writes_keeps_its_inputs(make_op: MakeOp) -> None:
    op = make_op(
        "first_(Tensor(a!) x) -> Tensor(a!)",
        """
        opjit_status first__cpu(opjit_tensor *x)
        {
            ((float *)x->data)[0] = 7;
            return OPJIT_OK;
        }
        """,
        fake=lambda x: x,
    )
    op.reference(lambda x: x.index_fill_(0, torch.tensor([0]), 7))
    op.samples(lambda device: iter([torch.zeros(3, device=device)]))
    assert CHECKS["inputs kept"](op, "cpu").startswith("nothing written, nothing shared")


def test_an_op_whose_results_size_depends_on_elements_has_no_fake_kernel_for_meta_tensors(
    make_op: MakeOp,
) -> None:
    op = make_op(
        "filled(Tensor x) -> Tensor",
        """
        opjit_status filled_cpu(const opjit_tensor *x, opjit_tensor *out)
        {
            int64_t size = ((const int64_t *)x->data)[0];
            OPJIT_TRY(opjit_empty(out, 1, &size, OPJIT_INT64, x));
            memset(out->data, 0, size * sizeof size);
            return OPJIT_OK;
        }
        """,
        fake=lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()),
    )
    op.reference(lambda x: x.new_zeros(int(x[0])))
    op.samples(lambda device: iter([((torch.tensor([3], device=device),), {})]))
    with pytest.raises(Skipped, match="a size of the result depends on elements"):
        CHECKS["fake kernel"](op, "cpu")
    assert outcome_of("opcheck", lambda: CHECKS["opcheck"].run(op, "cpu")).status == "ok"


COPIED = """
opjit_status copied_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_CHECK(x->contiguous, "expected a contiguous tensor");
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    memcpy(out->data, x->data, (size_t)x->numel * opjit_dtype_size(x->dtype));
    return OPJIT_OK;
}
"""


@pytest.mark.parametrize(
    "reference",
    [torch.clone, lambda x: torch.maximum(x, x)],
    ids=["takes float8", "takes no float8"],
)
def test_an_op_that_copies_bytes_may_take_float8(
    make_op: MakeOp, reference: Callable[..., Any]
) -> None:
    op = make_op("copied(Tensor x) -> Tensor", COPIED, fake=_fake)
    op.reference(reference)
    op.samples(lambda device: iter([torch.linspace(-2, 3, 24, device=device)]))
    dtypes, _, _ = CHECKS["dtypes"](op, "cpu").partition(";")
    assert "float8_e4m3fn" in dtypes.split(", ")


def test_a_contiguous_tensor_may_start_at_an_odd_element(make_op: MakeOp) -> None:
    """The mistake of a float4 pointer, in vectors that short samples do not fill."""
    op = make_op(
        "copied(Tensor x) -> Tensor",
        COPIED.replace(
            "return OPJIT_OK",
            """
        OPJIT_CHECK(x->numel < 64 || (uintptr_t)x->data % 16 == 0, "stands in for a kernel\\nthat dies"); return OPJIT_OK""",
        ),
        fake=_fake,
    )
    op.reference(torch.clone)
    op.samples(lambda device: iter([torch.arange(5.0, device=device)]))
    line = outcome_of("strides", lambda: CHECKS["strides"].run(op, "cpu"))
    assert "on (float32 (67,)) the op must raise a one-line error" in line.note, line


def test_other_arguments_than_the_written_ones_are_kept(make_op: MakeOp) -> None:
    op = make_op(
        "accumulated(Tensor(a!) x, Tensor y) -> ()",
        """
        opjit_status accumulated_cpu(opjit_tensor *x, const opjit_tensor *y)
        {
            ((float *)x->data)[0] += 1;
            ((float *)y->data)[0] += 1;
            return OPJIT_OK;
        }
        """,
    )
    op.reference(lambda x, y: x[0].add_(1) and None)
    op.samples(lambda device: iter([(torch.zeros(2), torch.zeros(2))]))
    line = outcome_of("inputs kept", lambda: CHECKS["inputs kept"].run(op, "cpu"))
    assert "the kernel writes into tensor 1, an input that the schema does not mark" in line.note, (
        line
    )


def test_an_op_or_a_reference_without_a_gradient_is_named(make_op: MakeOp) -> None:
    sample = Sample((torch.ones(2, dtype=torch.int64), torch.ones(2), torch.ones(2)), {})

    def both(i: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    def one(i: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y.detach()

    for calls, told in (
        ((both, one), "the reference has a gradient for tensor 2 but the op does not; return it"),
        ((one, both), "the op has a gradient for tensor 2 but the reference does not; return None"),
    ):
        with pytest.raises(AssertionError, match=told):
            assert_same_gradients(sample, *calls)


@pytest.mark.parametrize("strides", ["(1, 3)", "(0, 1)"], ids=["transposed", "expanded"])
def test_a_backward_that_ignores_the_strides_of_its_gradient_is_found(strides: str) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            ignores = str(grad.stride()) == strides
            memory = grad.as_strided(grad.shape, (grad.shape[1], 1)) if ignores else grad
            return 2 * memory

    call: Callable[..., torch.Tensor] = Doubled.apply
    told = rf"of the gradient of tensor 0, for a result's gradient with strides {re.escape(strides)}, on \("
    with pytest.raises(AssertionError, match=told):
        assert_same_gradients(Sample((torch.ones(3, 3),)), lambda x: 2 * x, call)


def test_a_gradient_of_equal_weights_may_cancel_in_half_precision() -> None:
    sample = Sample(((3 * torch.linspace(-1, 2, 24).cos()).half(),))
    steps: Callable[..., torch.Tensor] = _Steps.apply
    assert assert_same_gradients(sample, lambda x: torch.softmax(x, -1), lambda x: steps(x, 1.0))


def test_what_does_not_apply_says_why(make_op: MakeOp) -> None:
    op = _negated(make_op)
    for name, why in (("gradcheck", "the op has no backward"), ("cuda graph", "for cuda only")):
        with pytest.raises(Skipped, match=why):
            CHECKS[name](op, "cpu")


def test_the_command_prints_a_table_and_fails(tmp_path: Path) -> None:
    folder = Mistake("wrong", "", body=BODY + "if (n) to[0] = 5;").write(tmp_path / "wrong")
    some = [word for name in ("results", "fake kernel", "gradients") for word in ("--only", name)]
    done = command("test", str(folder), "--device", "cpu", "--sanitize", "none", *some)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0] == "mistakes::wrong on cpu"
    told = "  failed   results            got 5, expected -4 at [0, 0] on "
    place = next(index for index, line in enumerate(lines) if line.startswith(told))
    assert lines[place + 1].split() == [
        "opjit",
        "test",
        str(folder),
        "--only",
        "results",
        "--sample",
        "0",
    ]
    assert any(
        line.split(maxsplit=2) == ["skipped", "gradients", "the op has no backward"]
        for line in lines
    )
    assert lines[-1] == "1 failed, 1 ok, 1 skipped"
    again = command(*lines[place + 1].split()[1:], "--sanitize", "none").stdout.splitlines()
    assert again == [lines[0], *lines[place : place + 2], "1 failed"]


class _Steps(torch.autograd.Function):
    """softmax, with a gradient in steps that are each rounded to the tensors' dtype, and then scaled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (y,) = ctx.saved_tensors
        return ctx.scale * y * (grad - (grad * y).sum(-1, keepdim=True)), None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [8, 24, 64])
def test_a_gradient_in_half_precision_may_be_rounded_at_each_step_and_not_be_wrong(
    dtype: torch.dtype, n: int
) -> None:
    sample = Sample(
        (torch.randn(4, n, generator=torch.Generator().manual_seed(n)).to(dtype) * 3,), {}
    )
    steps: Callable[..., torch.Tensor] = _Steps.apply
    assert assert_same_gradients(sample, lambda x: torch.softmax(x, -1), lambda x: steps(x, 1.0))
    with pytest.raises(AssertionError, match=r"of the gradient of tensor 0"):
        assert_same_gradients(sample, lambda x: torch.softmax(x, -1), lambda x: steps(x, 1.1))


@pytest.mark.parametrize(
    ("command", "last"),
    [
        ("test", "1 skipped, nothing was tested: mistakes::idle_test"),
        ("bench", "nothing was measured"),
    ],
)
def test_an_op_that_no_device_here_can_run_is_no_success(
    tmp_path: Path, command: str, last: str
) -> None:
    folder = Mistake(f"idle_{command}", "").write(tmp_path / "idle")
    (folder / f"idle_{command}.c").unlink()
    done = CliRunner().invoke(main, [command, str(folder)])
    *_, why, verdict = done.output.splitlines()
    told = f"mistakes::idle_{command} runs on no device of this machine: it has kernels for nothing"
    assert (told in why, verdict) == (True, last)
    assert done.exit_code == 1


def test_an_op_without_samples_or_reference_is_told_what_is_missing(make_op: MakeOp) -> None:
    op = make_op(
        "bare(Tensor x) -> ()", "opjit_status bare_cpu(const opjit_tensor *x) { return OPJIT_OK; }"
    )
    done = CliRunner().invoke(main, ["test", op.qualified, "--device", "cpu", "--sanitize", "none"])
    assert done.exit_code == 1
    assert "declares no reference; add @bare.reference" in done.output


@pytest.mark.slow
def test_vmap_is_not_red_for_an_op_that_rejects_strided_tensors() -> None:
    """The op of the chapter on Caffe, whose kernel takes contiguous tensors."""
    folder = ROOT / "examples" / "06_from_caffe" / "round"
    done = command("test", folder, "--device", "cuda", "--emulate", "--only", "vmap")
    assert done.returncode == 0, done.stdout
    assert "ok       vmap" in done.stdout


def test_compute_sanitizer_of_pip_is_found_and_named(
    make_op: MakeOp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia" / "cu13" / "bin" / "compute-sanitizer"
    monkeypatch.setattr(toolchain, "find_nvcc", lambda notes: None)
    monkeypatch.setattr(toolchain, "cuda_wheels", lambda: [tmp_path / "nvidia"])
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setenv("PATH", str(tmp_path))
    op = make_op(
        "kept(Tensor x) -> ()", "opjit_status kept_cpu(const opjit_tensor *x) { return 0; }"
    )
    with pytest.raises(Skipped, match=r"pip install 'nvidia-cuda-sanitizer-api==13\.2\.\*'"):
        sanitize.sanitize_op(op, "memcheck")
    tool.parent.mkdir(parents=True)
    tool.touch(0o755)
    assert sanitize.find_tool() == str(tool)


ROW_SUMS = """
opjit_status row_sums_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_CHECK(x->dim == 2 && x->contiguous && x->dtype == OPJIT_FLOAT32, "expected a matrix");
    OPJIT_TRY(opjit_empty(out, OPJIT_SIZES(x->sizes[0]), x->dtype, x));
    const int64_t rows = x->sizes[0], n = x->sizes[1];
    for (int64_t r = 0; r < rows; r++) {
        float sum = 0;
        for (int64_t i = 0; i < n; i++)
            sum += ((const float *)x->data)[r * n + (rows > 1 ? ORDER : i)];
        ((float *)out->data)[r] = sum;
    }
    return OPJIT_OK;
}
"""


def _row_sums(make_op: MakeOp, order: str) -> Op:
    op = make_op("row_sums(Tensor x) -> Tensor", ROW_SUMS.replace("ORDER", order))
    op.reference(lambda x: x.sum(1))
    op.samples(
        lambda device: iter([torch.randn(6, 1000, generator=torch.Generator().manual_seed(0))])
    )
    return op


def test_rows_that_depend_on_the_size_of_the_batch_are_found_by_the_check_batch(
    make_op: MakeOp,
) -> None:
    assert "batch" not in CHECKS, "it runs by name only"
    with pytest.raises(AssertionError, match=r"of rows 0 to 0 without the other rows"):
        testing.check(_row_sums(make_op, "n - 1 - i"), "cpu", testing.OPTIONAL)


def test_rows_that_do_not_depend_on_the_batch_pass_the_check_batch(make_op: MakeOp) -> None:
    [line] = testing.results(_row_sums(make_op, "i"), "cpu", testing.OPTIONAL)
    assert (line.status, line.note.partition(";")[0]) == ("ok", "4 with fewer rows")


def test_a_sum_of_all_rows_has_no_row_by_itself(make_op: MakeOp) -> None:
    op = _row_sums(make_op, "i")
    op.reference(lambda x: x.sum(1) * x.mean())
    [line] = testing.results(op, "cpu", testing.OPTIONAL)
    assert (line.status, "no row of the samples by itself" in line.note) == ("skipped", True)
