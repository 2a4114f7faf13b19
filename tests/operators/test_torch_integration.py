"""An opjit op is a torch operator like any other: autograd, compile, export, devices, threads, processes and streams."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import opjit
from opjit import Op, backends, request
from opjit.errors import NoKernel
from tests.helpers import Cases, MakeOp, fresh
from tests.tensors import Seen

pytestmark = pytest.mark.torch
DOUBLE = str(Path(__file__).parents[1] / "ops" / "double")


def test_opcheck_of_every_type(everything: Op) -> None:
    arguments = (
        torch.ones(2, 3),
        None,
        [torch.ones(1)],
        1,
        2,
        3.0,
        True,
        "s",
        torch.int8,
        1,
        2,
        3.0,
        True,
        "t",
        torch.int8,
        [1, 2],
        [3],
        [1.0],
        [True],
        [1, 2],
        [torch.ones(1)] * 2,
        [torch.ones(1)],
        [1],
        [1.0],
        [True],
        [1, 2],
    )
    torch.library.opcheck(
        everything.overload,
        arguments,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


COMPILED = """
    import os, sys, warnings
    from pathlib import Path
    import torch, opjit
    opjit.registry.declare_folder(Path({double!r}))
    cache = Path(os.environ["OPJIT_CACHE"])
    def entries():
        return len(list(cache.rglob("manifest.json")))
    @torch.compile(fullgraph=True, backend={backend!r}, dynamic={dynamic})
    def f(x):
        return torch.ops.opjit.allreduce(torch.ops.optest.double(x.sin()).t() + 1, dtype=torch.float64) * 2
    def plain(x):
        return ((x.sin() * 2).t() + 1).sum(dtype=torch.float64) * 2
    assert entries() == 0
    for shape in ((3, 5), (4, 7), (1, 9)):
        x = torch.linspace(0, 1, shape[0] * shape[1]).reshape(shape).requires_grad_()
        y = x.detach().clone().requires_grad_()
        f(x).backward()
        plain(y).backward()
        torch.testing.assert_close(f(x), plain(y))
        torch.testing.assert_close(x.grad, y.grad)
    assert entries() == 2, entries()
    print("compiled")
    """


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "dynamic"), [("aot_eager", None), ("aot_eager", True), ("inductor", None)]
)
def test_compile_fullgraph_before_anything_was_built(
    tmp_path: Path, backend: str, dynamic: bool | None
) -> None:
    code = COMPILED.format(double=DOUBLE, backend=backend, dynamic=dynamic)
    env = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    assert "compiled" in fresh(code, {**env, "OPJIT_CACHE": str(tmp_path / "cache")}).stdout


def test_meta_and_fake_tensors_build_nothing(tmp_path: Path) -> None:
    code = f"""
        import os
        from pathlib import Path
        import torch, opjit
        from torch._subclasses.fake_tensor import FakeTensorMode
        opjit.registry.declare_folder(Path({DOUBLE!r}))
        for dtype, expected in ((torch.float32, torch.float32), (torch.bool, torch.int64), (torch.int8, torch.int64)):
            out = torch.ops.opjit.allreduce(torch.ones(3, 4, device="meta", dtype=dtype))
            assert (out.device.type, out.dtype, out.shape) == ("meta", expected, ()), out
        out = torch.ops.optest.double(torch.empty(3, 4, device="meta").t())
        assert (out.shape, out.stride()) == ((4, 3), (1, 4))
        with FakeTensorMode():
            for device in ("cpu", "cuda"):
                out = torch.ops.optest.double(torch.empty(3, 4, device=device))
                assert out.device.type == device
                out = torch.ops.opjit.allreduce(torch.empty(3, 4, device=device), dtype=torch.int32)
                assert (out.device.type, out.dtype) == (device, torch.int32)
        with torch.device("meta"):
            assert torch.ops.opjit.allreduce(torch.ones(3)).is_meta
        assert not os.path.exists(os.environ["OPJIT_CACHE"])
        print("nothing built")
        """
    assert "nothing built" in fresh(code, {"OPJIT_CACHE": str(tmp_path / "cache")}).stdout


UNUSUAL = Cases[Callable[[], Any]]()


@UNUSUAL("sparse")
def _() -> Any:
    return torch.ones(3, 3).to_sparse()


@UNUSUAL("sparse-csr")
def _() -> Any:
    return torch.ones(3, 3).to_sparse_csr()


@UNUSUAL("quantized")
def _() -> Any:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


@UNUSUAL("mkldnn")
def _() -> Any:
    return torch.ones(3).to_mkldnn()


@UNUSUAL("nested")
def _() -> Any:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@UNUSUAL("jagged")
def _() -> Any:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("kind", list(UNUSUAL))
@pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support",
    "ignore:The PyTorch API of nested tensors",
    "ignore:torch.quantize_per",
)
def test_unusual_tensors_give_one_sentence(make_op: MakeOp, kind: str, warm: bool) -> None:
    if kind == "mkldnn" and not torch._C._has_mkldnn:
        pytest.skip("this torch has no MKL-DNN")
    op = make_op(
        "count(Tensor x) -> int",
        """
        opjit_status count_cpu(const opjit_tensor *x, int64_t *out) { *out = x->numel; return OPJIT_OK; }
        """,
    )
    x = UNUSUAL[kind]()
    if warm:
        assert op(torch.ones(5)) == 5
    with pytest.raises(NotImplementedError) as caught:
        op(x)
    first = str(caught.value).splitlines()[0]
    assert op.schema.name in first
    if kind != "jagged":
        assert isinstance(caught.value, NoKernel)
        assert "it accepts dense tensors on cpu" in first
        assert "???" not in first
        assert "\n" not in str(caught.value)
    assert op(torch.ones(4)) == 4, "and the op still works"


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_without_any_tensor_the_op_says_so(make_op: MakeOp, warm: bool) -> None:
    op = make_op(
        "count(Tensor[] xs, Tensor? y) -> int",
        """
        opjit_status count_cpu(const opjit_tensors *xs, const opjit_tensor *y, int64_t *out)
        {
            *out = xs->len + (y != NULL);
            return OPJIT_OK;
        }
        """,
    )
    if warm:
        assert op([torch.ones(1)], None) == 1
        assert op([], torch.ones(1)) == 1
    with pytest.raises(
        NoKernel, match="accepts dense tensors on cpu, and at least one of them"
    ) as caught:
        op([], None)
    assert "\n" not in str(caught.value)


def test_a_tensor_subclass_passes_through(double: Op) -> None:
    assert double(torch.ones(2).as_subclass(torch.nn.Buffer)).tolist() == [2, 2]
    parameter = torch.nn.Parameter(torch.ones(2))
    double(parameter).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [2, 2]


def test_torch_dispatch_modes_see_the_op(double: Op) -> None:
    with Seen() as seen:
        double(torch.ones(2))
    assert [func.name() for func in seen.ops].count("optest::double") == 1


ONE = """
    opjit_status one_cpu(const opjit_tensor *x, int64_t *out)
    {
        (void)x;
        *out = 1;
        return OPJIT_OK;
    }
    """


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)  # by inductor
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_an_integer_that_depends_on_elements_is_a_symint(make_op: MakeOp, backend: str) -> None:
    op = make_op(
        "positive(Tensor x) -> SymInt",
        """
        opjit_status positive_cpu(const opjit_tensor *x, int64_t *n)
        {
            *n = 0;
            for (int64_t i = 0; i < x->numel; i++)
                *n += ((const float *)x->data)[i] > 0;
            return OPJIT_OK;
        }
        """,
        fake=lambda x: torch.library.get_ctx().new_dynamic_size(),
    )

    def first(x: torch.Tensor) -> torch.Tensor:
        count = op.overload(x)
        torch._check(count >= 0)
        torch._check(count <= x.shape[0])
        return x[:count] * 2

    compiled = torch.compile(first, backend=backend, fullgraph=True)
    for x in (torch.tensor([1.0, -1, 2, 3]), torch.tensor([-1.0, -1, -2, 3])):
        assert op.overload(x) == int((x > 0).sum())
        torch.testing.assert_close(compiled(x), first(x))


def test_unloaded_the_next_call_readies_the_op_again(make_op: MakeOp) -> None:
    op = make_op("one(Tensor x) -> int", ONE)
    for _ in range(3):
        assert op(torch.ones(1)) == 1
        loaded = op.loaded.pop("cpu")
        loaded.unload()
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(op.qualified, "CPU")
        library = Path(loaded.registered._name).name
        assert library in Path("/proc/self/maps").read_text(encoding="utf-8"), (
            "a thread may still be inside"
        )
    assert op(torch.ones(1)) == 1
    assert torch._C._dispatch_has_kernel_for_dispatch_key(op.qualified, "CPU")


@pytest.mark.gpu
def test_the_tensors_device_is_used_and_the_current_one_left(double: Op) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    request.ready(double, backends.for_device("cuda"))
    torch.cuda.set_device(0)
    out = double(torch.ones(10, device="cuda:1"))
    assert out.device.index == 1
    assert out.eq(2).all()
    assert torch.cuda.current_device() == 0
    with pytest.raises(RuntimeError):
        double(torch.ones(10, device="cuda:1", dtype=torch.float64))
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_get_readies_the_accelerator(double: Op) -> None:
    assert opjit.get("optest::double") is double.overload
    assert "cuda" in double.loaded
