"""Results that are lists or that may be None: in C, eager, compiled, exported, differentiated, and without a leak."""

import pytest
import torch

from opjit import Op, request
from tests.helpers import Growth, MakeOp, cuda_target

SCHEMA = "rows(Tensor x, bool want, int fail=0) -> (Tensor[] rows, Tensor? total, int n)"
ROWS = """
    opjit_status rows_cpu(const opjit_tensor *x, bool want, int64_t fail, opjit_outputs *rows, opjit_tensor *total, int64_t *n)
    {
        const float *from = x->data;
        *n = x->sizes[0];
        if (want) {
            OPJIT_TRY(opjit_empty(total, 0, NULL, x->dtype, x));
            *(float *)total->data = 0;
        }
        OPJIT_CHECK(fail != 1, "before the list");
        OPJIT_TRY(opjit_make_outputs(rows, *n));
        for (int64_t i = 0; i < *n; i++) {
            OPJIT_CHECK(fail != 2 || i == 0, "in the list");
            if ((fail >= 3 && fail <= 5 && i == 1) || (fail == 6 && i == 0))
                continue;
            OPJIT_TRY(opjit_empty(&rows->data[i], OPJIT_SIZES(x->sizes[1]), x->dtype, x));
            for (int64_t j = 0; j < x->sizes[1]; j++) {
                ((float *)rows->data[i].data)[j] = from[i * x->strides[0] + j * x->strides[1]];
                if (want)
                    *(float *)total->data += from[i * x->strides[0] + j * x->strides[1]];
            }
        }
        if (fail == 4)
            rows->data[1] = rows->data[0];
        if (fail == 5)
            rows->data[1] = *x;
        if (fail == 6 && want)
            rows->data[0] = *total;
        OPJIT_CHECK(fail != 7, "after the list");
        if (fail == 8)
            OPJIT_TRY(opjit_make_outputs(rows, 1));
        return OPJIT_OK;
    }
    """


def _fake(x: torch.Tensor, total: bool, fail: int = 0) -> object:
    return (
        [x.new_empty(x.shape[1]) for _ in range(x.shape[0])],
        x.new_empty(()) if total else None,
        x.shape[0],
    )


@pytest.fixture
def rows(make_op: MakeOp) -> Op:
    return make_op(SCHEMA, ROWS, fake=_fake)


X = torch.arange(6.0).reshape(3, 2)


@pytest.mark.torch
def test_a_list_and_a_missing_result_come_back(rows: Op) -> None:
    found, total, n = rows(X, True)
    assert [row.tolist() for row in found] == X.tolist()
    assert (total.item(), n) == (15, 3)
    assert rows(X.t(), False)[1] is None
    assert rows(torch.empty(0, 2), False) == ([], None, 0)


MISTAKES = {
    1: "before the list",
    2: "in the list",
    3: "did not make item 1 of the output `rows`",
    4: "the output `rows` is an input or another",
    5: "the output `rows` is an input or another output",
    6: "the output `total` is an input or another output",
    7: "after the list",
    8: "already has its length",
}


@pytest.mark.torch
def test_calls_leak_nothing_and_mistakes_are_errors_that_leak_nothing(
    rows: Op, growth: Growth
) -> None:
    x = torch.ones(3, 1024)

    def call() -> None:
        for total in (True, False):
            rows(x, total)
            for fail, says in MISTAKES.items():
                if total or fail != 6:
                    with pytest.raises(RuntimeError, match=says):
                        rows(x, total, fail)

    assert growth(call, 300) < 1 << 19


def test_a_list_without_a_length_is_an_error(make_op: MakeOp) -> None:
    for made, said in (
        ("(void)x, (void)out, OPJIT_OK", "did not call opjit_make_outputs for the output `out`"),
        ("opjit_make_outputs(out, -x->numel)", "a list of -6 outputs"),
    ):
        code = f"opjit_status bad_cpu(const opjit_tensor *x, opjit_outputs *out) {{ return {made}; }}\n"
        with pytest.raises(RuntimeError, match=said):
            make_op("bad(Tensor x) -> Tensor[]", code)(X)


@pytest.mark.torch
def test_torch_s_own_checks_pass(rows: Op) -> None:
    for total in (True, False):
        torch.library.opcheck(rows.overload, (X, total))


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own imports
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("total", [True, False])
def test_they_compile_and_export(rows: Op, backend: str, total: bool) -> None:
    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found, whole, n = rows(x, total)
            summed: torch.Tensor = found[0] + found[n - 1] + (0 if whole is None else whole)
            return summed

    expected = Sum()(X)
    assert torch.equal(torch.compile(Sum(), fullgraph=True, backend=backend)(X), expected)
    assert torch.equal(torch.export.export(Sum(), (X,)).module()(X), expected)


@pytest.mark.torch
def test_a_backward_gets_the_gradients_of_a_list(make_op: MakeOp) -> None:
    op = make_op(
        "pieces(Tensor x, bool want) -> (Tensor[] rows, Tensor? total, int n)",
        ROWS.replace("rows_cpu", "pieces_cpu")
        .replace(" int64_t fail,", "")
        .replace(
            "{\n        const float", "{\n        const int fail = 0;\n        const float", 1
        ),
        fake=lambda x, total: _fake(x, total),
    )
    op.backward(
        lambda ctx, of_rows, of_total, of_n: (
            torch.stack(of_rows) + (0 if of_total is None else of_total),
            None,
        )
    )
    for total in (True, False):
        x = X.clone().requires_grad_()
        found, whole, _ = op(x, total)
        loss = sum((row * (i + 1)).sum() for i, row in enumerate(found)) + (
            5 * whole if total else 0
        )
        torch.autograd.backward(loss)
        assert x.grad is not None
        assert x.grad.tolist() == [
            [6 * total + 1 - total] * 2,
            [7 * total + 2 * (1 - total)] * 2,
            [8 * total + 3 * (1 - total)] * 2,
        ]


@pytest.mark.torch
def test_a_single_optional_result(make_op: MakeOp) -> None:
    op = make_op(
        "maybe(Tensor x, bool b) -> Tensor?",
        """
        opjit_status maybe_cpu(const opjit_tensor *x, bool b, opjit_tensor *out)
        {
            return b ? opjit_empty_like(out, x, x->dtype) : OPJIT_OK;
        }
        """,
        fake=lambda x, b: torch.empty_like(x) if b else None,
    )
    assert op(X, True).shape == X.shape
    assert op(X, False) is None
    torch.library.opcheck(op.overload, (X, False))


@pytest.mark.nvcc
@pytest.mark.torch
def test_they_compile_in_cuda_beside_a_written_argument_and_one_with_the_name_of_a_macro(
    make_op: MakeOp,
) -> None:
    op = make_op(
        "cut(Tensor x, Tensor(a!) y, float errno) -> (Tensor[] rows, Tensor? rest)",
        cuda="""
        #include <cerrno>
        opjit_status cut_cuda(const opjit_tensor *x, opjit_tensor *y, double number, opjit_outputs *rows, opjit_tensor *rest,
                              cudaStream_t stream)
        {
            OPJIT_TRY(opjit_make_outputs(rows, 1));
            return opjit_empty_like(&rows->data[0], x, x->dtype);
        }
        """,
    )
    assert request.entry(op, cuda_target("sm_90")).library.exists()
