"""The calls that a check makes: which samples it chooses, how large it makes them, and what its line says of them."""

import re
from typing import Any

import pytest
import torch

from opjit import Op, testing
from opjit.testing.checks import Line, outcome_of
from opjit.testing.compare import assert_same
from opjit.testing.samples import LARGE, Skipped, distinct_samples, large_samples
from tests.helpers import MakeOp

CHECKS = {check.name: check for check in testing.CHECKS}
SCALED = """
    opjit_status scaled_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
    {{
        OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
        {before}
        OPJIT_DISPATCH_FLOATING(x->dtype, "scaled", {{
            const scalar_t *from = (const scalar_t *)x->data;
            scalar_t *to = (scalar_t *)out->data;
            OPJIT_FOR_EACH(i, at, x)
                to[i] = {value};
            {after}
        }})
        return OPJIT_OK;
    }}
    """
# The samples that `opjit new` writes: most of them have few elements or none.
SHAPES = [(), (1,), (3, 0, 2), (7,), (33, 65)]


def scaled(
    make_op: MakeOp, value: str = "(scalar_t)(a * from[at])", before: str = "", after: str = ""
) -> Op:
    op = make_op(
        "scaled(Tensor x, float a) -> Tensor",
        SCALED.format(before=before, value=value, after=after),
        fake=lambda x, a: x.new_empty(x.shape),
    )
    op.reference(lambda x, a: x * a)

    @op.samples
    def samples(device: str) -> Any:
        for dtype in (torch.float32, torch.float64):
            for shape in SHAPES:
                yield torch.randn(shape, dtype=dtype, device=device), 2.5

    return op


def line_of(op: Op, check: str) -> Line:
    [line] = testing.results(op, "cpu", [CHECKS[check]])
    return line


def test_samples_with_elements_are_chosen_before_empty_ones(make_op: MakeOp) -> None:
    chosen = distinct_samples(scaled(make_op), "cpu", 4)
    shapes = [tuple(sample.tensors()[0].shape) for sample in chosen]
    assert (33, 65) in shapes
    assert sum(sample.numel > 0 for sample in chosen) >= 3
    assert {sample.tensors()[0].dtype for sample in chosen} == {torch.float32, torch.float64}


def test_a_large_call_is_made_of_any_sample_that_can_be_resized(make_op: MakeOp) -> None:
    large = large_samples(scaled(make_op), "cpu")
    assert large
    assert all(sample.numel >= LARGE for sample in large)


def test_a_check_that_needs_a_large_call_says_so_if_there_is_none(make_op: MakeOp) -> None:
    op = scaled(make_op)
    op.samples(lambda device: iter([(torch.ones(()), 2.5), (torch.ones(0, 3), 2.5)]))
    with pytest.raises(Skipped, match="no sample can be made large"):
        large_samples(op, "cpu")
    assert line_of(op, "threads").status == "skipped"


@pytest.mark.parametrize("check", ["results", "shapes", "threads", "memory", "compile", "export"])
def test_a_line_counts_the_calls_and_names_the_largest(make_op: MakeOp, check: str) -> None:
    line = line_of(scaled(make_op), check)
    assert line.status == "ok", line
    assert re.search(r"; \d+ calls? of up to [\d,]+ elements$", line.note), line


def test_a_check_whose_calls_are_all_empty_is_not_ok(make_op: MakeOp) -> None:
    op = scaled(make_op)
    op.samples(lambda device: iter([(torch.ones(0, 3), 2.5)]))
    line = line_of(op, "results")
    assert line.status == "skipped"
    assert line.note == "1 call, all without an element"


@pytest.mark.parametrize(
    ("check", "wrong", "told"),
    [
        (
            "threads",
            {
                "before": "static double room[1 << 20];",
                "after": """
                for (int64_t i = 0; i < x->numel; i++)
                    room[i] = to[i] / 3;
                for (int64_t i = 0; i < x->numel; i++)
                    to[i] = 3 * room[i];""",
            },
            "with four threads at once",
        ),
        ("threads", {"value": "(scalar_t)(a * from[(int16_t)at < 0 ? 0 : at])"}, "got .* expected"),
        (
            "numbers",
            {"before": "static double first; if (!first) first = a;", "value": "first * from[at]"},
            r"with 1\.545 in place of 2\.5",
        ),
        (
            "numbers",
            {"value": "(scalar_t)((int)(2 * a) / 2.0 * from[at])"},
            r"with 1\.545 in place of 2\.5",
        ),
        ("numbers", {"value": "(scalar_t)2.5 * from[at] + 0 * a"}, r"with 1\.545 in place of 2\.5"),
    ],
    ids=["static buffer", "index of 16 bits", "state kept", "number rounded", "number ignored"],
)
def test_a_mistake_that_few_elements_or_one_number_hide_is_found(
    make_op: MakeOp, check: str, wrong: dict[str, str], told: str
) -> None:
    line = line_of(scaled(make_op, **wrong), check)
    assert line.status == "failed", line
    assert re.search(told, line.note), line


def test_a_wrong_result_that_changes_from_call_to_call_is_called_a_race(make_op: MakeOp) -> None:
    changing = "static int calls; calls++;"
    line = line_of(scaled(make_op, before=changing, value="(scalar_t)(calls * a)"), "results")
    assert line.status == "failed"
    assert "equal calls give different results" in line.note
    assert "--sanitize thread" in line.note


def test_a_failure_of_the_reference_is_named_as_its_own(make_op: MakeOp) -> None:
    op = scaled(make_op)

    def broken(x: torch.Tensor, a: float) -> torch.Tensor:
        raise ValueError("no rows")

    op.reference(broken)
    line = line_of(op, "results")
    assert line.status == "failed"
    assert line.note.startswith("the reference raises ValueError on (float32 ()")


def test_a_dtype_argument_is_a_constant_of_an_exported_program(make_op: MakeOp) -> None:
    op = make_op(
        "cast(Tensor x, ScalarType dtype) -> Tensor",
        """
        opjit_status cast_cpu(const opjit_tensor *x, opjit_dtype dtype, opjit_tensor *out)
        {
            OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && dtype == OPJIT_FLOAT64, "cast is for float32 to float64");
            OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, dtype, x));
            OPJIT_FOR_EACH(i, at, x)
                ((double *)out->data)[i] = ((const float *)x->data)[at];
            return OPJIT_OK;
        }
        """,
        fake=lambda x, dtype: x.new_empty(x.shape, dtype=dtype),
    )
    op.reference(lambda x, dtype: x.to(dtype))
    op.samples(lambda device: iter([(torch.randn(3, 5), torch.float64)]))
    assert line_of(op, "export").status == "ok"


def test_a_reference_without_a_complex_derivative_fails_no_op(make_op: MakeOp) -> None:
    op = make_op(
        "soft(Tensor x) -> Tensor",
        """
        #include <math.h>
        opjit_status soft_cpu(const opjit_tensor *x, opjit_tensor *out)
        {
            OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
            if (x->numel == 0)
                return OPJIT_OK;
            OPJIT_CHECK(x->dtype == OPJIT_FLOAT64 && x->dim == 1, "soft takes float64 vectors");
            const double *from = (const double *)x->data;
            double sum = 0;
            OPJIT_FOR_EACH(i, at, x)
                sum += exp(from[at]);
            OPJIT_FOR_EACH(i, at, x)
                ((double *)out->data)[i] = exp(from[at]) / sum;
            return OPJIT_OK;
        }
        """,
        fake=lambda x: x.new_empty(x.shape),
    )
    op.reference(lambda x: torch.softmax(x, -1))
    op.samples(
        lambda device: iter([(torch.randn(shape, dtype=torch.float64),) for shape in (4, (0, 4))])
    )

    def keep_result(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = ctx.saved_tensors[0]
        return y * (grad - (grad * y).sum(-1, keepdim=True))

    op.setup_context(keep_result)
    op.backward(backward)
    line = line_of(op, "complex gradients")
    assert line.status == "skipped", line


@pytest.mark.parametrize("factor", [1, 2])
def test_a_derivative_is_checked_where_only_float32_is_supported(
    make_op: MakeOp, factor: int
) -> None:
    op = scaled(make_op)
    op.samples(lambda device: iter([(torch.randn(6), 2.5)]))
    op.setup_context(lambda ctx, inputs, output: setattr(ctx, "a", inputs[1]))
    op.backward(lambda ctx, grad: (factor * ctx.a * grad, None))
    line = line_of(op, "gradcheck")
    assert line.status == ("ok" if factor == 1 else "failed"), line


def row_scaled(make_op: MakeOp, period: str) -> Op:
    """x * y along the rows, with samples of equal sizes only."""
    op = make_op(
        "row_scaled(Tensor x, Tensor y) -> Tensor",
        f"""
        opjit_status row_scaled_cpu(const opjit_tensor *x, const opjit_tensor *y, opjit_tensor *out)
        {{
            OPJIT_CHECK(x->dim == 2 && y->dim == 1 && x->sizes[1] == y->sizes[0], "expected a row per column");
            OPJIT_CHECK(x->contiguous && y->contiguous, "expected contiguous tensors");
            OPJIT_CHECK(x->dtype == y->dtype, "expected one dtype");
            OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
            OPJIT_DISPATCH_FLOATING(x->dtype, "row_scaled", {{
                const scalar_t *rows = (const scalar_t *)x->data;
                const scalar_t *factors = (const scalar_t *)y->data;
                for (int64_t i = 0; i < x->numel; i++)
                    ((scalar_t *)out->data)[i] = rows[i] * factors[i % {period}];
            }})
            return OPJIT_OK;
        }}
        """,
        fake=lambda x, y: x.new_empty(x.shape),
    )
    op.reference(lambda x, y: x * y)
    op.samples(lambda device: iter([(torch.randn(5, 5), torch.randn(5))]))
    return op


@pytest.mark.parametrize(("period", "status"), [("x->sizes[0]", "failed"), ("x->sizes[1]", "ok")])
def test_a_size_of_another_dimension_is_found_although_samples_are_square(
    make_op: MakeOp, period: str, status: str
) -> None:
    line = line_of(row_scaled(make_op, period), "shapes")
    assert line.status == status, line
    if status == "failed":
        assert re.search(r"on \(float32 \(\d+, 5\), float32 \(5,\)\)", line.note), line


@pytest.mark.parametrize(("wide", "status"), [("int32_t", "failed"), ("int64_t", "ok")])
@pytest.mark.parametrize("drawn", [torch.float32, torch.int64])
def test_a_sum_of_int64_in_32_bits_is_found(
    make_op: MakeOp, wide: str, status: str, drawn: torch.dtype
) -> None:
    op = make_op(
        "total(Tensor x) -> Tensor",
        f"""
        opjit_status total_cpu(const opjit_tensor *x, opjit_tensor *out)
        {{
            OPJIT_TRY(opjit_empty(out, 0, NULL, x->dtype, x));
            if (x->dtype == OPJIT_INT64) {{
                {wide} sum = 0;
                OPJIT_FOR_EACH(i, at, x)
                    sum += ({wide})((const int64_t *)x->data)[at];
                *(int64_t *)out->data = sum;
                return OPJIT_OK;
            }}
            OPJIT_DISPATCH_FLOATING(x->dtype, "total", {{
                scalar_t sum = 0;
                OPJIT_FOR_EACH(i, at, x)
                    sum += ((const scalar_t *)x->data)[at];
                *(scalar_t *)out->data = sum;
            }})
            return OPJIT_OK;
        }}
        """,
        fake=lambda x: x.new_empty(()),
    )
    op.reference(lambda x: x.sum())
    op.samples(lambda device: iter([((torch.randn(4, 6) * 9).to(drawn),)]))
    line = line_of(op, "dtypes")
    assert line.status == status, line
    if status == "failed":
        assert "as int64 beyond 32 bits" in line.note, line


def test_a_reference_that_is_not_exact_for_large_integers_fails_no_op(make_op: MakeOp) -> None:
    op = make_op(
        "cube(Tensor x) -> Tensor",
        """
        opjit_status cube_cpu(const opjit_tensor *x, opjit_tensor *out)
        {
            OPJIT_CHECK(x->dtype == OPJIT_INT64, "expected int64");
            OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
            OPJIT_FOR_EACH(i, at, x) {
                const int64_t value = ((const int64_t *)x->data)[at];
                OPJIT_CHECK(value < 2000000 && value > -2000000, "cube\\noverflows");
                ((int64_t *)out->data)[i] = value * value * value;
            }
            return OPJIT_OK;
        }
        """,
        fake=lambda x: x.new_empty(x.shape),
    )
    op.reference(lambda x: x * x * x)
    op.samples(lambda device: iter([(torch.arange(-3, 4),)]))
    assert line_of(op, "dtypes").status == "ok"


@pytest.mark.parametrize("value", ["(float)from[at]", "from[at]"])
@pytest.mark.parametrize("drawn", [torch.float32, torch.float64])
def test_a_float64_that_loses_digits_is_found(
    make_op: MakeOp, value: str, drawn: torch.dtype
) -> None:
    op = scaled(make_op, value=value)
    op.reference(lambda x, a: x.clone())
    op.samples(lambda device: iter([(torch.arange(9, dtype=drawn).reshape(3, 3), 1.0)]))
    line = line_of(op, "dtypes")
    assert line.status == ("ok" if value == "from[at]" else "failed"), line


def test_the_seconds_of_a_check_are_counted() -> None:
    assert outcome_of("sleep", lambda: "done").seconds >= 0


@pytest.mark.parametrize(
    ("dtype", "is_said"),
    [(torch.float32, True), (torch.int64, True), (torch.uint8, False)],  # 254 is a usual byte
)
def test_memory_that_no_kernel_wrote_is_not_shown_as_a_value(
    dtype: torch.dtype, is_said: bool
) -> None:
    got = torch.full((3 * dtype.itemsize,), 0xFE, dtype=torch.uint8).view(dtype)
    with pytest.raises(AssertionError) as caught:
        assert_same(got, torch.ones(3, dtype=dtype))
    told = " (memory that the kernel did not write), expected 1 at [0]"
    assert (told in str(caught.value)) is is_said, caught.value
