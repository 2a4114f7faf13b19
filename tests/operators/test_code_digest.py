"""Equal digests mean equal gradients: a function has a digest only if the digest covers every value that decides its result."""

import functools
import math
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import opjit
from opjit.catalog import registry
from opjit.declare.declaration import Declaration
from opjit.operators.code_digest import NoDigest, digest
from opjit.recipe import schema

# Each text defines a backward that multiplies by NUMBER, in one form of Python.
PLAIN_FORMS = """
def backward(ctx, grad): return grad * NUMBER
---
times = NUMBER
def backward(ctx, grad): return grad * times
---
def backward(ctx, grad, times=NUMBER): return grad * times
---
def backward(ctx, grad, *, times=NUMBER): return grad * times
---
def outer(times):
    def backward(ctx, grad): return grad * times
    return backward
backward = outer(NUMBER)
---
backward = lambda ctx, grad: (lambda times: grad * times)(NUMBER)
---
def helper(grad): return grad * NUMBER
def backward(ctx, grad): return helper(grad)
---
def outer(times): return lambda grad: grad * times
helper = outer(NUMBER)
def backward(ctx, grad): return helper(grad)
---
def helper(grad, times=NUMBER): return grad * times
def again(grad, deep=True): return again(grad, False) if deep else helper(grad)
def backward(ctx, grad): return again(grad)
---
pair = (3, (NUMBER, None))
def backward(ctx, grad): return grad * pair[1][0]
---
shapes = module("shapes", times=NUMBER)
def backward(ctx, grad): return grad * shapes.times
---
inner = module("inner", times=NUMBER)
shapes = module("shapes", inner=inner)
def backward(ctx, grad): return grad * shapes.inner.times
---
shapes = module("shapes", times=NUMBER)
def backward(ctx, grad): return torch.stack([grad * shapes.times for _ in range(1)])[0]
---
def scale(grad): return grad * NUMBER
shapes = module("shapes", scale=scale)
def backward(ctx, grad): return shapes.scale(grad)
---
torch.of_test = NUMBER
def backward(ctx, grad): return grad * torch.of_test
---
import math
math.of_test = NUMBER
def backward(ctx, grad): return grad * math.of_test
---
torch.nn.functional.of_test = lambda grad: grad * NUMBER
def backward(ctx, grad): return torch.nn.functional.of_test(grad)
---
torch.Tensor.of_test = NUMBER
def backward(ctx, grad): return grad * grad.of_test
---
torch.Tensor.of_test = lambda self: self * NUMBER
def backward(ctx, grad): return grad.of_test()
---
torch.ops.of_test = NUMBER
def backward(ctx, grad): return grad * torch.ops.of_test
---
def max(grad): return grad * NUMBER
def backward(ctx, grad): return max(grad)
---
__builtins__ = {"abs": lambda grad: grad * NUMBER}
def backward(ctx, grad): return abs(grad)
---
def backward(ctx, grad): return grad * (NUMBER if grad.numel() else 0.0)
---
def backward(ctx, grad):
    class_of = "NUMBER"
    return grad * float(class_of)
---
def backward(ctx, grad):
    match grad.numel():
        case 3: return grad * NUMBER
"""
OTHER_FORMS = """
class times:
    def __init__(self, function): self.function, self.times = function, NUMBER; functools.update_wrapper(self, function)
    def __call__(self, ctx, grad): return self.function(ctx, grad) * self.times
@times
def backward(ctx, grad): return grad
---
class times:
    def __init__(self, function): self.function = function; functools.update_wrapper(self, function)
    def __call__(self, grad): return self.function(grad) * NUMBER
@times
def helper(grad): return grad
def backward(ctx, grad): return helper(grad)
---
class Scale:
    def __init__(self): self.times = NUMBER; self.__wrapped__ = abs
    def __call__(self, grad): return grad * self.times
scale = Scale()
def backward(ctx, grad): return scale(grad)
---
def backward(ctx, grad): return grad * backward.times
backward.times = NUMBER
---
def helper(grad): return grad * helper.times
helper.times = NUMBER
def backward(ctx, grad): return helper(grad)
---
def helper(grad): return grad
helper.times = NUMBER
def backward(ctx, grad): return helper(grad) * getattr(helper, "times")
---
class Scale:
    def __init__(self): self.times = NUMBER
    def __getstate__(self): return None
scale = Scale()
def backward(ctx, grad): return grad * scale.times
---
class Scale:
    def __init__(self): self.times = NUMBER
    def __reduce__(self): return (Scale, ())
scale = Scale()
def backward(ctx, grad): return grad * scale.times
---
class Meta(type):
    @property
    def times(self): return NUMBER
class Scale(metaclass=Meta): pass
def backward(ctx, grad): return grad * Scale.times
---
class Meta(type):
    @property
    def times(self): return NUMBER
Scale = Meta("Scale", (), {"times": property(lambda self: 7)})
def backward(ctx, grad): return grad * Scale.times
---
class Scale: times = NUMBER
def backward(ctx, grad): return grad * Scale.times
---
class Scale:
    @staticmethod
    def by(grad): return grad * NUMBER
def backward(ctx, grad): return Scale.by(grad)
---
class Base: times = NUMBER
class Scale(Base): pass
def backward(ctx, grad): return grad * Scale().times
---
class Scale:
    __slots__ = ("times",)
scale = Scale()
scale.times = NUMBER
def backward(ctx, grad): return grad * scale.times
---
class Scale:
    def __getattr__(self, name): return NUMBER
scale = Scale()
def backward(ctx, grad): return grad * scale.times
---
class Scale:
    def of(self, ctx, grad): return grad * NUMBER
backward = Scale().of
---
backward = functools.partial(lambda times, ctx, grad: grad * times, NUMBER)
---
@functools.lru_cache
def helper(): return NUMBER
def backward(ctx, grad): return grad * helper()
---
@functools.singledispatch
def helper(grad): return grad
helper.register(torch.Tensor, lambda grad: grad * NUMBER)
def backward(ctx, grad): return helper(grad)
---
@functools.wraps(abs)
def helper(grad): return grad * NUMBER
def backward(ctx, grad): return helper(grad)
---
@torch.no_grad()
def backward(ctx, grad): return grad * NUMBER
---
shapes = module("shapes")
shapes.__getattr__ = lambda name: NUMBER
def backward(ctx, grad): return grad * shapes.times
---
class Lazy(types.ModuleType): times = property(lambda self: NUMBER)
shapes = Lazy("shapes")
def backward(ctx, grad): return grad * shapes.times
---
import os
os.environ["OF_TEST"] = "NUMBER"
def backward(ctx, grad): return grad * float(os.environ["OF_TEST"])
---
import os
os.environ["OF_TEST"] = "NUMBER"
def backward(ctx, grad): return grad * float(os.getenv("OF_TEST"))
---
from os import environ
environ["OF_TEST"] = "NUMBER"
def backward(ctx, grad): return grad * float(environ.get("OF_TEST"))
---
def backward(ctx, grad):
    import shapes_of_test
    return grad * shapes_of_test.times
module("shapes_of_test", times=NUMBER)
---
def backward(ctx, grad):
    from shapes_of_test import times
    return grad * times
module("shapes_of_test", times=NUMBER)
---
times = [NUMBER]
def backward(ctx, grad): return grad * times[0]
---
times = {"times": NUMBER}
def backward(ctx, grad): return grad * times["times"]
---
times = {"get": 7, "times": NUMBER}
def backward(ctx, grad): return grad * times.get("times")
---
times = torch.tensor(NUMBER)
def backward(ctx, grad): return grad * times
---
times = NUMBER
def backward(ctx, grad): return grad * globals()["times"]
---
times = NUMBER
def backward(ctx, grad): return grad * eval("times")
---
times = NUMBER
read = globals
def backward(ctx, grad): return grad * read()["times"]
---
torch.of_test = NUMBER
def backward(ctx, grad):
    space = torch
    return grad * space.of_test
---
torch.of_test = NUMBER
def backward(ctx, grad): return grad * (torch if grad.numel() else functools).of_test
---
torch.of_test = NUMBER
def backward(ctx, grad): return grad * vars(torch)["of_test"]
---
torch.of_test = NUMBER
helper = lambda space: space.of_test
def backward(ctx, grad): return grad * helper(torch)
---
shapes = module("shapes", size=NUMBER)
def outer():
    inside = shapes
    return lambda ctx, grad: grad * inside.size
backward = outer()
---
shapes = module("shapes", size=NUMBER)
def backward(ctx, grad): return grad * (grad if not grad.numel() else shapes).size
---
torch.SymInt.of_test = NUMBER
def backward(ctx, grad): return grad * torch.SymInt.of_test
---
op.of_test = NUMBER
def backward(ctx, grad): return grad * op.of_test
---
op.size = NUMBER
def backward(ctx, grad):
    it = op
    return grad * it.size
---
class Scale:
    def __format__(self, spec): return "NUMBER"
scale = Scale()
def backward(ctx, grad): return grad * float(f"{scale}")
---
class Times:
    def __call__(self): return NUMBER
    def __eq__(self, other): return True
    __hash__ = object.__hash__
times = Times()
def backward(ctx, grad): return grad * times()
---
class Space(dict):
    def __getitem__(self, name): return NUMBER if name == "times" else dict.__getitem__(self, name)
exec("def backward(ctx, grad): return grad * times", space := Space(__builtins__={}))
backward = types.FunctionType(space["backward"].__code__, space)
---
import enum
class Times(enum.IntEnum): A = int(NUMBER)
def backward(ctx, grad): return grad * Times.A
---
class Times(float): pass
times = Times(NUMBER)
def backward(ctx, grad): return grad * times
---
class Times(tuple):
    def __getitem__(self, index): return NUMBER
times = Times((1, 2))
def backward(ctx, grad): return grad * times[0]
---
def backward(ctx, grad):
    class Scale: times = NUMBER
    return grad * Scale.times
---
file = folder / "times"
file.write_text("NUMBER")
def backward(ctx, grad): return grad * float(file.read_text())
---
torch.save(torch.tensor(NUMBER), f"{folder}/times")
def backward(ctx, grad): return grad * torch.load(f"{folder}/times")
---
torch.set_num_threads(int(NUMBER))
def backward(ctx, grad): return grad * torch.get_num_threads()
---
import random
random.seed(int(NUMBER))
def backward(ctx, grad): return grad * random.random()
---
import sys
def backward(ctx, grad): return grad * sys._getframe().f_globals["times"]
times = NUMBER
---
property_of = property(lambda self: NUMBER)
torch.Tensor.of_test = property_of
def backward(ctx, grad): return grad * grad.of_test
---
torch.autograd.function.FunctionCtx.of_test = NUMBER
def backward(ctx, grad): return grad * torch.autograd.function.FunctionCtx.of_test
---
times = functools.partial(float, NUMBER)
def backward(ctx, grad): return grad * times()
---
import operator
def backward(ctx, grad): return grad * operator.attrgetter("of_test")(torch)
torch.of_test = NUMBER
---
class Space: pass
space = Space()
space.of_test = NUMBER
def backward(ctx, grad):
    match space:
        case Space(of_test=times): return grad * times
"""


@pytest.fixture(scope="module")
def op() -> opjit.Op:
    """An op that forms may call, and may give attributes."""
    return opjit.inline(
        "digestforms::same(Tensor x) -> Tensor", c="int nothing;", fake=torch.empty_like
    )


@pytest.fixture
def restored() -> Iterator[None]:
    """Take back the changes that the forms make to torch, math and the environment."""
    threads = torch.get_num_threads()
    context = torch.autograd.function.FunctionCtx
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OF_TEST", "")
        yield
    torch.set_num_threads(threads)
    sys.modules.pop("shapes_of_test", None)
    for owner in (torch, math, torch.Tensor, torch.nn.functional, torch.ops, torch.SymInt, context):
        if "of_test" in vars(owner):
            delattr(owner, "of_test")


def module(name: str, **values: object) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(values)
    if name.endswith("_of_test"):
        sys.modules[name] = made
    return made


def made(text: str, **values: object) -> Callable[..., Any]:
    """The backward that a text defines."""
    names: dict[str, Any] = {"__name__": "some_cell", "torch": torch, "functools": functools}
    names |= {"types": types, "module": module, **values}
    exec(text, names)
    backward: Callable[..., Any] = names["backward"]
    return backward


def found(backward: Callable[..., Any], **more: Any) -> str | None:
    """The digest of an op with a backward; None if it has none."""
    fake = torch.empty_like
    declaration = Declaration(schema.parse("digestforms::op(Tensor x) -> Tensor"), fake, Path())
    declarations = {op.qualified: op.declaration for op in registry.all_ops()}
    try:
        return digest(replace(declaration, backward=backward, **more), declarations)
    except NoDigest:
        return None


def of_numbers(text: str, **values: object) -> list[str | None]:
    """The digests of a form with two numbers; also checks that its backward multiplies by them."""
    digests = []
    for number in ("1.0", "2.0"):
        backward = made(text.replace("NUMBER", number), **values)
        if "random" not in text:
            assert backward(None, torch.ones(3)).tolist() == [float(number)] * 3
        digests.append(found(backward))
    return digests


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("text", PLAIN_FORMS.split("---\n"))
def test_the_digest_of_a_plain_backward_changes_with_its_number(text: str) -> None:
    one, two = of_numbers(text)
    assert None not in (one, two)
    assert one != two


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("text", OTHER_FORMS.split("---\n"))
def test_any_other_backward_has_no_digest_or_another_one(
    text: str, tmp_path: Path, op: opjit.Op
) -> None:
    one, two = of_numbers(text, op=op, folder=tmp_path)
    vars(op).pop("of_test", None)
    vars(op).pop("size", None)
    assert one is None or one != two


def test_a_digest_does_not_depend_on_lines_files_or_comments() -> None:
    text = "def backward(ctx, grad, n=2):\n    return grad.new_empty(grad.numel() * n)\n"
    moved = made("\n\n# moved\n" + text.replace("return", "return  "))
    assert found(made(text)) == found(moved) is not None


def test_the_usual_functions_of_an_op_have_a_digest(op: opjit.Op) -> None:
    texts = (
        "def backward(ctx, grad): return grad.to(ctx.dtype).expand(ctx.shape)",
        "def backward(ctx, grad):\n    x, = ctx.saved_tensors\n    return torch.where(x > 0, grad, 0)",
        "def backward(ctx, grad): return torch.nn.functional.silu(grad) * torch.sum(grad)",
        "def backward(ctx, grad): return op(grad), None",
        "def backward(ctx, grad): return torch.ops.digestforms.same(grad), torch.ops.aten.add(grad, 1)",
        "def backward(ctx, grad): torch._check(grad.dim() > 0, lambda: f'{grad.shape}')",
        "same = torch.ops.digestforms.same.default\ndef backward(ctx, grad): return same(grad)",
    )
    setup = made("def backward(ctx, inputs, output): ctx.dtype, ctx.shape = torch.half, 3")
    keep = made("def backward(ctx, inputs, output): ctx.save_for_backward(inputs[0])")
    for text in texts:
        for function in (setup, keep):
            assert found(made(text, op=op), setup_context=function) is not None, text


def test_a_digest_covers_the_ops_that_a_backward_calls(op: opjit.Op) -> None:
    backward = made("def backward(ctx, grad): return op(grad)", op=op)
    before = found(backward)
    op.backward(lambda ctx, grad: grad * 2)
    assert found(backward) != before is not None
    op.backward(functools.partial(lambda ctx, grad: grad))
    assert found(backward) is None


def test_bundled_ops_have_a_digest_unless_they_read_the_state_of_a_process() -> None:
    import torch.distributed.tensor  # as when torch.compile reads its key
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    without = set()
    for each in registry.all_ops():
        if each.qualified.startswith("opjit::"):
            declarations = {op.qualified: op.declaration for op in registry.all_ops()}
            try:
                digest(each.declaration, declarations)
            except NoDigest:
                without.add(each.qualified.removeprefix("opjit::"))
    assert without == {"all_gather_ranks", "all_to_all_ranks", "reduce_scatter_ranks"}
