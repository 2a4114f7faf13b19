"""An op under torch.func and autocast, pickled, and called with nested tensors."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import grad, jacrev, vmap

import opjit
from opjit import Op
from opjit.catalog import registry
from opjit.errors import DeclarationError
from tests import helpers
from tests.helpers import Cases, MakeOp

pytestmark = pytest.mark.torch
SCALE = """
opjit_status scale_cpu(const opjit_tensor *x, const opjit_tensor *y, double a, int64_t b, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == y->dtype && x->dim == y->dim, "scale takes two tensors of one dtype and size");
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    OPJIT_DISPATCH_FLOATING(x->dtype, "scale", {
        for (int64_t i = 0; i < x->numel; i++)
            ((scalar_t *)out->data)[i] = (scalar_t)((a + (double)b) * ((scalar_t *)x->data)[opjit_offset(x, i)]
                                                    * ((scalar_t *)y->data)[opjit_offset(y, i)]);
    })
    return OPJIT_OK;
}
"""
ONE = "opjit_status one_cpu(const opjit_tensor *x, int64_t *n) { *n = x->dim; return OPJIT_OK; }"


def fake(x: torch.Tensor, y: torch.Tensor, a: float = 2.0, *, b: int = 1) -> torch.Tensor:
    return x.new_empty(x.shape)


@pytest.fixture
def scale(make_op: MakeOp) -> Op:
    """``scale(x, y, a=2, *, b=1)`` is (a + b)xy, for two tensors of one size; its backward can be differentiated."""
    op = make_op("scale(Tensor x, Tensor y, float a=2.0, *, int b=1) -> Tensor", SCALE, fake=fake)

    @op.setup_context
    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.given = inputs[2], keyword_only_inputs["b"]

    @op.backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (x, y) = ctx.saved_tensors
        (a, b) = ctx.given
        return op.overload(grad, y, a, b=b), op.overload(grad, x, a, b=b), None

    return op


def plain(x: torch.Tensor, y: torch.Tensor, a: float = 2.0, b: int = 1) -> torch.Tensor:
    return (a + b) * x * y


X = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(3, 4)
Y = torch.linspace(1, 3, 12, dtype=torch.float64).reshape(3, 4)
PROGRAMS = Cases[Callable[[Callable[..., Any]], Any]]()


@PROGRAMS("grad")
def _(f: Callable[..., Any]) -> Any:
    return grad(lambda x: f(x, Y).sum())(X)


@PROGRAMS("grad of both")
def _(f: Callable[..., Any]) -> Any:
    return grad(lambda x, y: f(x, y, 3.0, b=4).sin().sum(), argnums=(0, 1))(X, Y)


@PROGRAMS("grad of grad")
def _(f: Callable[..., Any]) -> Any:
    return grad(lambda x: grad(lambda x: (f(x, Y) ** 3).sum())(x).sum())(X)


@PROGRAMS("jacrev")
def _(f: Callable[..., Any]) -> Any:
    return jacrev(f)(X[0], Y[0])


@PROGRAMS("jacrev of jacrev")
def _(f: Callable[..., Any]) -> Any:
    return jacrev(jacrev(lambda x: f(x, x).sum()))(X[0])


@PROGRAMS("vmap")
def _(f: Callable[..., Any]) -> Any:
    return vmap(f)(X, Y)


@PROGRAMS("vmap over columns")
def _(f: Callable[..., Any]) -> Any:
    return vmap(f, in_dims=(1, 0), out_dims=1)(X, Y.t())


@PROGRAMS("vmap of one")
def _(f: Callable[..., Any]) -> Any:
    return vmap(f, in_dims=(0, None))(X, Y[0])


@PROGRAMS("vmap with a keyword")
def _(f: Callable[..., Any]) -> Any:
    return vmap(lambda x, y: f(x, y, b=5))(X, Y)


@PROGRAMS("vmap of vmap")
def _(f: Callable[..., Any]) -> Any:
    return vmap(vmap(f))(X[:, :, None], Y[:, :, None])


@PROGRAMS("vmap of grad")
def _(f: Callable[..., Any]) -> Any:
    return vmap(grad(lambda x, y: f(x, y).sin().sum()))(X, Y)


@PROGRAMS("grad of vmap")
def _(f: Callable[..., Any]) -> Any:
    return grad(lambda x: vmap(f)(x, Y).sin().sum())(X)


@PROGRAMS("jacrev of vmap of grad")
def _(f: Callable[..., Any]) -> Any:
    return jacrev(lambda x: vmap(grad(lambda x, y: f(x, y).sin().sum()))(x, Y))(X)


@PROGRAMS("vjp")
def _(f: Callable[..., Any]) -> Any:
    return torch.func.vjp(f, X, Y)[1](torch.ones_like(X))


@PROGRAMS("autograd around grad")
def _(f: Callable[..., Any]) -> Any:
    return torch.autograd.grad(
        grad(lambda x: (f(x, Y) ** 2).sum())(x := X.clone().requires_grad_()).sum(), x
    )


@PROGRAMS("compiled grad")
def _(f: Callable[..., Any]) -> Any:
    return torch.compile(grad(lambda x: f(x, Y).sin().sum()), backend="aot_eager", fullgraph=True)(
        X
    )


@PROGRAMS("compiled vmap")
def _(f: Callable[..., Any]) -> Any:
    return torch.compile(vmap(f), backend="aot_eager", fullgraph=True)(X, Y)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_transform_of_torch_func_goes_through_the_backward(scale: Op, name: str) -> None:
    torch.testing.assert_close(PROGRAMS[name](scale.overload), PROGRAMS[name](plain))


def test_a_declared_rule_is_called_once_for_the_batch(scale: Op) -> None:
    seen: list[Any] = []

    @scale.vmap
    def rule(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: torch.Tensor,
        y: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> Any:
        seen.append((info.batch_size, in_dims, rest, named))
        return scale.overload(
            x.movedim(in_dims[0] or 0, 0), y.movedim(in_dims[1] or 0, 0), *rest, **named
        ), 0

    torch.testing.assert_close(
        vmap(lambda x, y: scale.overload(x, y, 7.0, b=2), in_dims=(1, 0))(X, Y.t()),
        plain(X, Y, 7.0, 2).t(),
    )
    assert seen == [(4, (1, 0, None), (7.0,), {"b": 2})]
    torch.testing.assert_close(vmap(grad(lambda x, y: scale.overload(x, y).sum()))(X, Y), 3 * Y)


@pytest.mark.parametrize("backward", [False, True], ids=["no backward", "backward"])
def test_an_elementwise_op_is_called_once(
    make_op: MakeOp, monkeypatch: pytest.MonkeyPatch, backward: bool
) -> None:
    op = make_op(
        "scale(Tensor x, Tensor y, float a=2.0, *, int b=1) -> Tensor",
        SCALE,
        fake=fake,
        elementwise=True,
    )
    if backward:
        op.backward(lambda ctx, grad: (grad, grad, None))
    called: list[Any] = []
    overload, real = op.overload, type(op.overload).__call__

    def note(*args: Any, **kwargs: Any) -> Any:
        called.append(args)
        return real(overload, *args, **kwargs)

    monkeypatch.setattr(
        type(op.overload),
        "__call__",
        lambda self, *args, **kwargs: (
            real(self, *args, **kwargs) if self is not overload else note(*args, **kwargs)
        ),
    )
    torch.testing.assert_close(vmap(lambda x, y: overload(x, y, 4.0))(X, Y), plain(X, Y, 4.0))
    inner = [args for args in called if not torch._C._functorch.is_batchedtensor(args[0])]
    assert [tuple(args[0].shape) for args in inner] == [(3, 4)]


def test_bundled_elementwise_ops_batch_as_torchs_do() -> None:
    add = torch.ops.opjit.add_custom
    pairs = (
        (torch.ones(3, 4, 2), torch.ones(2, 3), (0, 1)),
        (torch.ones(3, 4), torch.ones(4), (0, None)),
        (torch.ones(4), torch.ones(3, 2, 4), (None, 1)),
        (torch.ones(3, 4), torch.ones(3, dtype=torch.float64), (0, 0)),
        (torch.ones(3), torch.ones(3, dtype=torch.int64), (0, 0)),
        (torch.ones(3), torch.ones((), dtype=torch.float64), (0, None)),
    )
    for x, y, dims in pairs:
        torch.testing.assert_close(
            vmap(add, in_dims=dims)(x, y), vmap(torch.add, in_dims=dims)(x, y)
        )
    assert vmap(torch.ops.opjit.tensor_negate)(torch.ones(0, 3)).shape == (0, 3)


def test_a_loop_over_an_op_that_returns_a_number_is_refused(make_op: MakeOp) -> None:
    count = make_op("one(Tensor x) -> int", ONE)
    count.backward(lambda ctx, grad: None)
    with pytest.raises(
        RuntimeError, match=r"returns a number, and torch\.vmap cannot batch numbers"
    ):
        vmap(count.overload)(X)


def test_rules_that_cannot_hold_are_refused_at_the_declaration(make_op: MakeOp) -> None:
    for schema in (
        "add_(Tensor(a!) x) -> ()",
        "sum(Tensor[] xs) -> Tensor",
        "keyed(*, Tensor x) -> Tensor",
        "one(Tensor x) -> int",
    ):
        with pytest.raises(
            DeclarationError,
            match=r"elementwise=True requires positional Tensor arguments",
        ):
            make_op(schema, elementwise=True)
    with pytest.raises(
        DeclarationError, match="keyword-only Tensor, for which torch supports no vmap rule"
    ):
        make_op("keyed(*, Tensor x) -> Tensor").vmap(lambda *args: None)


def test_autocast_converts_to_the_regions_dtype_or_to_the_declared_one(scale: Op) -> None:
    x = torch.ones(3, dtype=torch.float32)
    wide = torch.ones(3, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert scale(x, x).dtype == torch.float32, "no rule"
    scale.autocast()
    with pytest.raises(RuntimeError, match="one dtype"):
        scale(x, wide)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert scale(wide, wide).dtype == torch.float64
    scale.autocast(torch.float32)
    narrow = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = scale(narrow, x, b=4)
        compiled = torch.compile(
            lambda x, y: scale.overload(x, y, b=4), backend="aot_eager", fullgraph=True
        )(narrow, x)
    assert result.dtype == compiled.dtype == torch.float32
    assert result.tolist() == compiled.tolist() == [6.0] * 3
    result.sum().backward()
    assert narrow.grad is not None
    assert narrow.grad.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="one dtype"):
        scale(narrow, x)


def test_autocast_converts_only_the_arguments_that_its_rule_names(make_op: MakeOp) -> None:
    op = make_op(
        "kinds(Tensor x, Tensor scale, *, Tensor? b=None) -> Tensor",
        """
        opjit_status kinds_cpu(const opjit_tensor *x, const opjit_tensor *scale, const opjit_tensor *b, opjit_tensor *out)
        {
            OPJIT_TRY(opjit_empty(out, 0, NULL, OPJIT_INT64, x));
            *(int64_t *)out->data = (x->dtype == OPJIT_BFLOAT16) + 2 * (scale->dtype == OPJIT_BFLOAT16) + 4 * (b->dtype == OPJIT_BFLOAT16);
            return OPJIT_OK;
        }""",
        fake=lambda x, scale, *, b=None: x.new_empty((), dtype=torch.int64),
        differentiable=False,
    )
    expected = {(): 0, ("x",): 1, ("x", "b"): 5, ("scale",): 2, None: 7}
    for only, converted in expected.items():
        op.autocast(only=only)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert op(torch.ones(1), torch.ones(1), b=torch.ones(1)).item() == converted
            assert op(x=torch.ones(1), scale=torch.ones(1), b=torch.ones(1)).item() == converted
    with pytest.raises(
        DeclarationError, match=r"has no Tensor weight: only= is a list of x, scale, b"
    ):
        op.autocast(only=["x", "weight"])


def test_a_rule_for_autocast_is_refused_where_the_op_writes(make_op: MakeOp) -> None:
    op = make_op(
        "fill(Tensor(a!) x) -> ()",
        "opjit_status fill_cpu(const opjit_tensor *x) { return OPJIT_OK; }",
        fake=lambda x: None,
    )
    with pytest.raises(
        DeclarationError, match=r"writes an argument, so autocast\(\) is not supported"
    ):
        op.autocast()


def test_the_backward_sees_what_autocast_converted_under_torch_func_too(scale: Op) -> None:
    scale.autocast(torch.float32)
    seen: list[Any] = []

    @scale.setup_context
    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.given = inputs[2], keyword_only_inputs["b"]
        seen.append([t.dtype for t in inputs[:2]])

    x = X.bfloat16()
    y = Y.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        leaf = x.clone().requires_grad_()
        scale.overload(leaf, y).sum().backward()
        gradient = grad(lambda x: scale.overload(x, y).sum())(x)
        pull = torch.func.vjp(lambda x: scale.overload(x, y), x)[1]
    assert [each for each in seen if each != [torch.float32] * 2] == []
    assert leaf.grad is not None
    torch.testing.assert_close(gradient, leaf.grad, rtol=0, atol=0)
    torch.testing.assert_close(pull(torch.ones(3, 4))[0], leaf.grad, rtol=0, atol=0)


def test_another_process_reads_the_declaration(tmp_path: Path) -> None:
    registry.declare_folder(
        helpers.write_op(
            tmp_path / "pickled_plus", op_py=helpers.op_py("pickletest::plus(Tensor x) -> Tensor")
        )
    )
    (tmp_path / "op.pkl").write_bytes(pickle.dumps(opjit.get("pickletest::plus", "cpu")))
    code = f"import opjit, pickle, torch\nprint(pickle.load(open({str(tmp_path / 'op.pkl')!r}, 'rb'))(torch.ones(2)).tolist())"
    assert helpers.fresh(code).stdout == "[2.0, 2.0]\n"
