"""A backward that is an op: in Python, or in C++ if a cache has that part, an op has the same gradients as torch's."""

import gc
import textwrap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import opjit
from opjit import Op
from opjit.errors import DeclarationError
from tests import helpers
from tests.helpers import MakeOp

pytestmark = pytest.mark.torch
Tensor = torch.Tensor


@pytest.fixture(params=["python", pytest.param("c++", marks=pytest.mark.slow)])
def in_cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Ops that the test loads are recorded in Python, and in C++."""
    if request.param == "c++":
        helpers.take_cpp_autograd(monkeypatch)
    return bool(request.param == "c++")


def pointwise(name: str, tensors: tuple[str, ...], values: dict[str, str], more: str = "") -> str:
    """The C of an op on float64 tensors of the sizes of the first one; a missing one is NULL. An empty value is a missing result."""
    parameters = [f"const opjit_tensor *{each}" for each in tensors] + [more] * bool(more)
    parameters += [f"opjit_tensor *{each}" for each in values]
    lines = []
    for each in tensors:
        lines += [
            f"opjit_tensor dense_{each};",
            f"const double *p_{each} = NULL;",
            f"if ({each}) {{ OPJIT_TRY(opjit_contiguous(&dense_{each}, {each})); p_{each} = dense_{each}.data; }}",
        ]
    like = tensors[-1]
    for result, value in values.items():
        skipped, _, formula = value.rpartition("?? ")
        lines += [
            f"if (!({skipped or 0})) {{",
            f"OPJIT_TRY(opjit_empty({result}, {like}->dim, {like}->sizes, {like}->dtype, {like}));",
            f"for (int64_t i = 0; i < {like}->numel; i++)",
            f"    ((double *){result}->data)[i] = {formula};",
            "}",
        ]
    body = "\n    ".join(lines)
    return f"opjit_status {name}_cpu({', '.join(parameters)})\n{{\n    {body}\n    return OPJIT_OK;\n}}\n"


def cube(make_op: MakeOp, twice: bool = True) -> Op:
    """x^3, with a second derivative."""
    op = make_op(
        "cube(Tensor x) -> Tensor",
        pointwise("cube", ("x",), {"out": "p_x[i] * p_x[i] * p_x[i]"}),
        fake=lambda x: x.new_empty(x.shape),
        elementwise=True,
    )
    first = make_op(
        "cube_backward(Tensor grad, Tensor x) -> Tensor",
        pointwise("cube_backward", ("grad", "x"), {"out": "3 * p_x[i] * p_x[i] * p_grad[i]"}),
        fake=lambda grad, x: x.new_empty(x.shape),
        elementwise=True,
    )
    second = make_op(
        "cube_twice(Tensor grad_out, Tensor grad, Tensor x) -> (Tensor grad_grad, Tensor grad_x)",
        pointwise(
            "cube_twice",
            ("grad_out", "grad", "x"),
            {
                "grad_grad": "3 * p_x[i] * p_x[i] * p_grad_out[i]",
                "grad_x": "6 * p_x[i] * p_grad[i] * p_grad_out[i]",
            },
        ),
        fake=lambda grad_out, grad, x: (x.new_empty(x.shape), x.new_empty(x.shape)),
        elementwise=True,
    )
    assert op.backward(first) is first
    if twice:
        first.backward(second)
    return op


def root(make_op: MakeOp) -> Op:
    """The square root, whose gradient needs the result."""
    op = make_op(
        "root(Tensor x) -> Tensor",
        "#include <math.h>\n" + pointwise("root", ("x",), {"out": "sqrt(p_x[i])"}),
        fake=lambda x: x.new_empty(x.shape),
    )
    op.backward(
        make_op(
            "root_backward(Tensor grad, Tensor out) -> Tensor",
            pointwise("root_backward", ("grad", "out"), {"out_": "p_grad[i] / (2 * p_out[i])"}),
            fake=lambda grad, out: out.new_empty(out.shape),
        )
    )
    return op


def blend(make_op: MakeOp) -> Op:
    """Numbers of each kind, a missing tensor, a result without a gradient, and gradients that nobody needs."""
    op = make_op(
        "blend(Tensor? w, Tensor x, float a=2.0, *, int b=1) -> (Tensor product, Tensor square, Tensor sign)",
        pointwise(
            "blend",
            ("w", "x"),
            {
                "product": "p_x[i] * (p_w ? p_w[i] : 1) * a + (double)b",
                "square": "p_x[i] * p_x[i]",
                "sign": "p_x[i] > 0",
            },
            "double a, int64_t b",
        ),
        fake=lambda w, x, a=2.0, *, b=1: tuple(x.new_empty(x.shape) for _ in range(3)),
    )
    op.backward(
        make_op(
            "blend_backward(Tensor? grad_product, Tensor grad_square, Tensor? w, Tensor x, float a, bool[] output_mask)"
            " -> (Tensor? grad_x, Tensor? grad_w)",
            pointwise(
                "blend_backward",
                ("grad_product", "grad_square", "w", "x"),
                {
                    "grad_x": "!output_mask->data[0] ?? 2 * p_x[i] * p_grad_square[i] + (p_grad_product ? p_grad_product[i] : 0)"
                    " * (p_w ? p_w[i] : 1) * a",
                    "grad_w": "!output_mask->data[1] ?? p_x[i] * (p_grad_product ? p_grad_product[i] : 0) * a",
                },
                "double a, const opjit_bools *output_mask",
            ),
            fake=lambda p, q, w, x, a, output_mask: tuple(
                x.new_empty(x.shape) if each else None for each in output_mask
            ),
        )
    )
    return op


def blended(w: Tensor | None, x: Tensor, a: float = 2.0, *, b: int = 1) -> tuple[Tensor, ...]:
    return x * (1 if w is None else w) * a + b, x * x, (x > 0).double()


def some(*sizes: int, requires_grad: bool = True) -> Tensor:
    return torch.rand(sizes, dtype=torch.float64).add_(0.5).requires_grad_(requires_grad)


def is_recorded_in_cpp(result: Tensor) -> bool:
    return "Generated" not in type(result.grad_fn).__name__


def test_gradients_are_the_numerical_ones(make_op: MakeOp, in_cpp: bool) -> None:
    first, second = cube(make_op), root(make_op)
    both = blend(make_op)
    for op in (first, second):
        op(some(2))  # loads it
        assert is_recorded_in_cpp(op(some(2))) == in_cpp
        for x in (some(3), some(2, 3).t(), some(0), some(), some(4)[::2]):
            leaf = x.detach().requires_grad_()
            assert gradcheck(op, (leaf,))
    assert gradgradcheck(first, (some(3),))
    ws: list[Any] = [some(4), some(4, requires_grad=False), None]
    for w in ws:
        for x in (some(4), some(4, requires_grad=False)):
            if x.requires_grad or (w is not None and w.requires_grad):
                call: Any = lambda w, x: both(w, x, 3.0, b=4)[:2]  # noqa: E731
                assert gradcheck(call, (w, x), check_undefined_grad=w is not None)


def test_missing_gradients_and_constants_are_those_of_torch(make_op: MakeOp, in_cpp: bool) -> None:
    op = blend(make_op)
    op(None, some(3))
    w, x = some(3), some(3)
    seeds = some(3, requires_grad=False), some(3, requires_grad=False)
    for used in ((0,), (1,), (0, 1)):
        for leaves in ((w,), (x,), (w, x)):
            found = []
            for each in (op, blended):
                results = each(w, x)
                outputs = [results[index] for index in used]
                weights = [seeds[index] for index in used]
                found.append(torch.autograd.grad(outputs, leaves, weights, allow_unused=True))
            for mine, theirs in zip(*found, strict=True):
                torch.testing.assert_close(
                    torch.zeros(3).double() if mine is None else mine,
                    torch.zeros(3).double() if theirs is None else theirs,
                )
    product, square, sign = op(w, x)
    assert product.requires_grad
    assert square.requires_grad
    assert not sign.requires_grad
    assert not op(w, x.detach())[2].requires_grad
    with torch.no_grad():
        assert not op(w, x)[0].requires_grad
    with torch.inference_mode():
        assert op(w, x)[0].is_inference()


def test_edits_views_and_graphs_give_the_errors_of_torch(make_op: MakeOp, in_cpp: bool) -> None:
    op = cube(make_op, twice=False)
    of_result = root(make_op)
    op(some(2)), of_result(some(2))
    x = some(3)
    saved = x * 1
    y = op(saved)
    saved.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = of_result(x)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = op(x)
    y.mul_(2)  # which it does not need
    [grad] = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, 6 * x.detach() ** 2)
    base = x * 1
    view = base[1:]
    view.mul_(2)
    [grad] = torch.autograd.grad(op(view).sum(), x)
    torch.testing.assert_close(grad, torch.stack([x[0] * 0, *(24 * x[1:] ** 2)]).detach())
    y = of_result(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()
    [grad] = torch.autograd.grad(op(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"derivative for \S*cube_backward is not implemented"):
        grad.sum().backward()
    with torch.inference_mode():
        made = torch.ones(3).double()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        blend(make_op)(made, x)


def test_a_saved_result_does_not_keep_itself_alive(make_op: MakeOp, in_cpp: bool) -> None:
    op = root(make_op)
    op(some(2))
    gc.collect()
    gc.disable()
    try:
        y = op(some(3))
        gone = weakref.ref(y)
        del y
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile itself
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # opcheck of torch 2.14 reads it
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by forward mode
def test_compilers_and_transforms_see_no_difference(make_op: MakeOp, in_cpp: bool) -> None:
    op, of_result, both = cube(make_op), root(make_op), blend(make_op)
    op(some(2)), of_result(some(2)), both(None, some(2))
    x, w = some(3), some(3)
    torch.library.opcheck(op.overload, (x,))
    torch.library.opcheck(of_result.overload, (x,))
    torch.library.opcheck(both.overload, (w, x, 3.0), {"b": 2})

    def mine(w: Tensor, x: Tensor) -> Any:
        return (both(w, op(x), 3.0)[0] * of_result(x)).sum()

    def theirs(w: Tensor, x: Tensor) -> Tensor:
        return (blended(w, x**3, 3.0)[0] * x.sqrt()).sum()

    expected = torch.autograd.grad(theirs(w, x), (w, x))
    calls: list[Callable[..., Tensor]] = [
        mine,
        torch.compile(mine, fullgraph=True, backend="aot_eager"),
        torch.compile(mine, fullgraph=True, backend="aot_eager", dynamic=True),
        lambda w, x: checkpoint(mine, w, x, use_reentrant=False),
    ]
    for call in calls:
        torch.testing.assert_close(torch.autograd.grad(call(w, x), (w, x)), expected)
    checkpoint(mine, w, x, use_reentrant=True).backward()
    torch.testing.assert_close((w.grad, x.grad), expected)
    grads = torch.func.grad(mine, argnums=(0, 1))(w, x)
    torch.testing.assert_close(grads, expected)
    rows = some(2, 3), some(2, 3)
    torch.testing.assert_close(
        torch.vmap(torch.func.grad(mine, argnums=(0, 1)))(*rows),
        torch.vmap(torch.func.grad(theirs, argnums=(0, 1)))(*rows),
    )
    hessian = torch.func.jacrev(torch.func.jacrev(lambda x: op(x).sum()))(x.detach())
    torch.testing.assert_close(hessian, torch.diag(6 * x.detach()))
    with pytest.raises(NotImplementedError, match="does not support forward mode"):
        torch.func.jvp(op, (x.detach(),), (x.detach(),))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_autograd_runs_it(make_op: MakeOp, in_cpp: bool) -> None:
    op, of_result, both = cube(make_op), root(make_op), blend(make_op)
    op(some(2)), of_result(some(2)), both(None, some(2))
    compiler = torch.compile(backend="aot_eager", fullgraph=in_cpp)  # not the Python of torch 2.10
    for size, factor in ((3, 2.0), (5, 2.0), (5, 3.0)):
        x, w = some(size), some(size)
        y = of_result(op(x)) + both(w, x, factor)[0] + both(None, x)[1]
        with torch._dynamo.compiled_autograd._enable(compiler):
            y.sum().backward()
        expected = 1.5 * x.detach().sqrt() + factor * w.detach() + 2 * x.detach()
        torch.testing.assert_close((x.grad, w.grad), (expected, factor * x.detach()))


def test_random_programs_have_the_gradients_of_torch(make_op: MakeOp, in_cpp: bool) -> None:
    op, of_result, both = cube(make_op), root(make_op), blend(make_op)
    op(some(2)), of_result(some(2)), both(None, some(2))
    ours: list[Callable[..., Tensor]] = [
        lambda x, y: op(x),
        lambda x, y: of_result(x.abs() + 1),
        lambda x, y: both(y, x, 0.5)[0],
        lambda x, y: both(None, x)[1],
        lambda x, y: both(x, y, b=3)[0] + both(x, y)[1],
    ]
    references: list[Callable[..., Tensor]] = [
        lambda x, y: x**3,
        lambda x, y: (x.abs() + 1).sqrt(),
        lambda x, y: blended(y, x, 0.5)[0],
        lambda x, y: blended(None, x)[1],
        lambda x, y: blended(x, y, b=3)[0] + blended(x, y)[1],
    ]
    torch.manual_seed(0)
    for _ in range(60):
        leaves = [some(2, 3) for _ in range(3)]
        steps = [tuple(torch.randint(0, 3 + step, (2,)).tolist()) for step in range(5)]
        chosen = torch.randint(0, len(ours), (5,)).tolist()
        found = []
        for functions in (ours, references):
            values = [each.clone() for each in leaves]
            for which, (left, right) in zip(chosen, steps, strict=True):
                result = functions[which](values[left].t(), values[right].t()).t()
                values.append(torch.tanh(result))
            total = torch.stack(values).sum()
            found.append(torch.autograd.grad(total, leaves))
        torch.testing.assert_close(*found)


def test_threads_record_and_run_it(make_op: MakeOp, in_cpp: bool) -> None:
    op = cube(make_op)
    op(some(2))
    failures: list[BaseException] = []
    shared = some(100)

    def work() -> None:
        try:
            for _ in range(50):
                [grad] = torch.autograd.grad(op(shared).sum(), shared)
                torch.testing.assert_close(grad, 3 * shared.detach() ** 2)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert failures == []


def test_a_later_backward_replaces_it(make_op: MakeOp, in_cpp: bool) -> None:
    op = cube(make_op)
    x = some(2)
    op(x)
    recorded = op(x).sum()
    op.backward(lambda ctx, grad: grad * 7)
    [grad] = torch.autograd.grad(op(x).sum(), x)
    assert grad.tolist() == [7.0, 7.0]
    if in_cpp:
        [grad] = torch.autograd.grad(recorded, x)
        torch.testing.assert_close(grad, 3 * x.detach() ** 2)


def test_a_reload_that_changes_the_gradient_spares_no_recorded_call(
    here: Path, tmp_path: Path, in_cpp: bool
) -> None:
    """Its values would be passed in the old order."""
    op_py = """
        import opjit
        @opjit.op("NAMESPACE::half(Tensor x, Tensor y) -> Tensor")
        def half(x, y):
            return x.new_empty(x.shape)
        @half.backward
        @opjit.op("NAMESPACE::half_backward(Tensor grad, Tensor x, Tensor y) -> Tensor grad_x")
        def half_backward(grad, x, y):
            return x.new_empty(x.shape)
        """.replace("NAMESPACE", f"spare{in_cpp}".lower())
    code = pointwise("half", ("y", "x"), {"out": "p_x[i] * (p_y[i] + p_y[i])"})
    code = code.replace("*y, const opjit_tensor *x", "*x, const opjit_tensor *y")
    back = pointwise("half_backward", ("grad", "x", "y"), {"grad_x": "2 * p_y[i] * p_grad[i]"})
    (tmp_path / "op.py").write_text(textwrap.dedent(op_py))
    (tmp_path / "half.c").write_text('#include "opjit.h"\n' + code)
    (tmp_path / "half_backward.c").write_text('#include "opjit.h"\n' + back)
    op, _ = opjit.add_path(tmp_path)
    x, y = some(3), some(3, requires_grad=False)
    op(x, y)
    recorded = op(x, y).sum()
    op_py = op_py.replace("Tensor grad, Tensor x, Tensor y", "Tensor grad, Tensor y, Tensor x")
    back = back.replace("*x, const opjit_tensor *y", "*y, const opjit_tensor *x")
    (tmp_path / "op.py").write_text(
        textwrap.dedent(op_py.replace("d(grad, x, y)", "d(grad, y, x)"))
    )
    (tmp_path / "half_backward.c").write_text('#include "opjit.h"\n' + back)
    opjit.reload(op.qualified, "cpu")
    with pytest.raises(RuntimeError, match=r"has another schema .* call spare\w+::half again"):
        recorded.backward()
    [grad] = torch.autograd.grad(op(x, y).sum(), x)
    torch.testing.assert_close(grad, 2 * y)


@pytest.mark.parametrize(
    ("forward", "gradient", "message"),
    [
        (
            "f(Tensor x, float a) -> Tensor",
            "g(Tensor grad, float b) -> Tensor",
            r"expected arguments among \(Tensor x, float a, Tensor out, Tensor grad, bool\[\] output_mask\), at least one of "
            r"them a gradient, got \(Tensor grad, float b\); change names or types",
        ),
        ("f(Tensor x, float a) -> Tensor", "g(Tensor grad, int a) -> Tensor", "got .*int a"),
        ("f(Tensor? x, Tensor y) -> Tensor", "g(Tensor grad, Tensor x) -> Tensor", "Tensor[?] x"),
        ("f(Tensor x) -> Tensor", "g(Tensor x) -> Tensor", "at least one of them a gradient"),
        ("f(Tensor x) -> (Tensor, Tensor)", "g(Tensor grad) -> Tensor", "grad_out0, .*grad_out1"),
        ("f(Tensor grad) -> Tensor", "g(Tensor grad) -> Tensor", "Tensor grad_out"),
        (
            "f(Tensor x, Tensor y) -> Tensor",
            "g(Tensor grad) -> Tensor",
            r"expected results among \(Tensor grad_x, Tensor grad_y\), got Tensor; name each result",
        ),
        ("f(Tensor x) -> Tensor", "g(Tensor grad) -> Tensor grad_z", "got Tensor grad_z"),
        ("f(Tensor x) -> Tensor", "g(Tensor grad) -> ()", r"got \(\)"),
        ("f(Tensor x) -> Tensor", "g(Tensor grad) -> int", "got int"),
        ("f(Tensor[] x) -> Tensor", "g(Tensor grad) -> Tensor", "no list of tensors"),
        ("f(Tensor x) -> Tensor", "g(Tensor(a!) grad) -> ()", "no written argument"),
        ("f(Tensor x, *, int a) -> Tensor", "g(Tensor grad, *, int a) -> Tensor", "int a"),
        ("f(Tensor x) -> int", "g(Tensor grad) -> Tensor", "Tensor[?] grad"),
    ],
)
def test_a_gradient_that_does_not_match_is_an_error_of_its_declaration(
    make_op: MakeOp, forward: str, gradient: str, message: str
) -> None:
    op = make_op(forward)
    with pytest.raises(DeclarationError, match=f"as the backward of .*: .*{message}"):
        op.backward(make_op(gradient))
    assert op.declaration.backward is None


def test_an_op_as_a_backward_saves_the_values_itself(make_op: MakeOp) -> None:
    op = cube(make_op)
    with pytest.raises(DeclarationError, match="remove setup_context"):
        op.setup_context(lambda ctx, inputs, output: None)
