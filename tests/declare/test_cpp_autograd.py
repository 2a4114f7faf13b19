"""Autograd's kernel in C++: a call that needs no derivative runs no Python, and nothing else is different.

All tests of ops run with it, too: OPJIT_TEST_CPP_AUTOGRAD=1 python -m pytest tests/operators tests/testing tests/kernels_c
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from opjit import Op
from opjit.cpp_extension import autograd_part
from opjit.declare import cpp_autograd
from tests import helpers
from tests.helpers import MakeOp
from tests.operators.test_autograd import differentiable, without_backward

pytestmark = [pytest.mark.torch, pytest.mark.slow]  # a compiler takes 4 s for torch's headers


@pytest.fixture(scope="module", autouse=True)
def compiled() -> Iterator[None]:
    """Each op that a test of this file loads has the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        helpers.take_cpp_autograd(patch)
        yield


def python_of(op: Op, *args: Any) -> list[str]:
    """The names of the functions in Python that a call of the overload runs."""
    seen: list[str] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.append(frame.f_code.co_name)

    call = op.overload._op  # without the method of OpOverload
    sys.setprofile(profile)
    try:
        call(*args)
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("make", [differentiable, without_backward])
def test_a_call_that_needs_no_gradient_runs_no_python(
    make_op: MakeOp, make: Any, mode: type[AbstractContextManager[None]]
) -> None:
    op = make(make_op)
    x = torch.ones(3)
    op(x)  # loads it
    leaf = torch.ones(3, requires_grad=True)
    with mode():
        assert python_of(op, x) == []
        assert ("kernel" in python_of(op, leaf)) == torch.is_grad_enabled()
    op.loaded["cpu"].unload()
    op.loaded.clear()
    assert op(x).tolist() == [3.0] * 3, "as after a reload"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile itself
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # opcheck of torch 2.14 reads it
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by forward mode
def test_compilers_modes_and_subclasses_see_no_difference(make_op: MakeOp) -> None:
    op = differentiable(make_op)
    plain = torch.ones(3)
    op(plain)
    leaf = torch.ones(3, requires_grad=True)
    for each in (plain, leaf):
        torch.library.opcheck(op.overload, (each, 2.0))
        compiled = torch.compile(
            lambda x: op.overload(x, 2.0) * 2, fullgraph=True, backend="aot_eager", dynamic=True
        )
        assert compiled(each).requires_grad == each.requires_grad
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert op(each).requires_grad == each.requires_grad
        both = op(TwoTensor(each, each))
        assert isinstance(both, TwoTensor)
        assert (both.a.tolist(), both.requires_grad) == ([3.0] * 3, each.requires_grad)
    [gradient] = torch.autograd.grad(op(leaf).sum(), leaf)
    assert gradient.tolist() == [3.0] * 3
    assert torch.func.grad(lambda x: op(x).sum())(plain).tolist() == [3.0] * 3
    assert torch.vmap(op.overload)(torch.ones(2, 3)).tolist() == [[3.0] * 3] * 2
    assert (
        torch.vmap(torch.func.grad(lambda x: op(x).sum()))(torch.ones(2, 3)).tolist()
        == [[3.0] * 3] * 2
    )
    with pytest.raises(RuntimeError, match=r"derivative for \S*scale is not implemented"):
        without_backward(make_op)(leaf).sum().backward()
    with (
        pytest.raises(NotImplementedError, match="does not support forward mode"),
        torch.autograd.forward_ad.dual_level(),
        torch.no_grad(),
    ):
        op(torch.autograd.forward_ad.make_dual(plain, plain))


def test_precompile_makes_it_for_a_layer_and_no_first_build_does(tmp_path: Path) -> None:
    code = """
        import opjit, torch
        op = opjit.get("allreduce", "cpu")
        print(op(torch.ones(3)).item(), opjit.registry.find("allreduce").loaded["cpu"].unbind_autograd is not None)
        """
    on = {"OPJIT_CPP_AUTOGRAD": "1"}
    layer = tmp_path / "layer"
    assert helpers.command("precompile", "allreduce", "--store", layer, **on).returncode == 0
    cache = {"OPJIT_CACHE": str(tmp_path / "cache")}
    layered = {**cache, "OPJIT_LAYERS": str(layer)}
    assert helpers.fresh(code, {**on, **layered}).stdout == "3.0 True\n"
    assert helpers.fresh(code, {"OPJIT_CPP_AUTOGRAD": "0", **layered}).stdout == "3.0 False\n"
    assert helpers.fresh(code, {**on, **cache}).stdout == "3.0 False\n"
    assert list((tmp_path / "cache").glob(f"v2/*{cpp_autograd.NAME}")) == []


def test_a_compiler_that_links_a_static_cpp_library_makes_it(tmp_path: Path) -> None:
    """Such as the g++ of some images: a second set of locales would crash, so the part is linked without a C++ library."""
    wrapper = helpers.program(tmp_path / "c++", '#!/bin/sh\nexec c++ -static-libstdc++ "$@"\n')
    code = """
        import opjit, torch
        from opjit.cpp_extension import autograd_part
        from opjit.declare import cpp_autograd
        from opjit.store import elf
        autograd_part.make()
        entry = cpp_autograd.find_entry()
        print([name for name in elf.inspect(entry.library.read_bytes()).needed if "c++" in name])
        op = opjit.get("allreduce", "cpu")
        print(op(torch.ones(3)).item(), opjit.registry.find("allreduce").loaded["cpu"].unbind_autograd is not None)
        """
    env = {"OPJIT_CPP_AUTOGRAD": "1", "OPJIT_CACHE": str(tmp_path / "cache"), "CXX": str(wrapper)}
    assert helpers.fresh(code, env).stdout == "[]\n3.0 True\n"


def test_ops_run_without_what_a_compiler_refuses(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "opjit_autograd.cpp"
    source.write_text("#error of another torch\n")
    monkeypatch.setattr(cpp_autograd, "source", lambda: source)
    monkeypatch.setenv("OPJIT_VERBOSE", "2")
    with caplog.at_level("INFO", "opjit"):
        autograd_part.make()
    assert "autograd's kernel in C++ does not fit torch" in caplog.text
    assert not list(here.glob(f"v2/*{cpp_autograd.NAME}/*/*/manifest.json"))
