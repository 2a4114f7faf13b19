"""Random programs with ops whose backward is an op have the gradients and errors of torch.autograd.Function with the same saved tensors."""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests import helpers
from tests.declare.test_gradient_op import blend, blended, cube, root, some
from tests.helpers import MakeOp

pytestmark = pytest.mark.torch
Tensor = torch.Tensor
Calls = dict[str, Callable[..., Any]]
SHAPE = (2, 3)
PROGRAMS = {"python": 300, "c++": 5_000}


class CubeBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(grad, x)
        return 3 * x * x * grad

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor]:
        grad, x = ctx.saved_tensors
        return 3 * x * x * grad_out, 6 * x * grad * grad_out


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found: Tensor = CubeBackward.apply(grad, x)
        return found


class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.sqrt()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        found: Tensor = grad / (2 * out)
        return found


class Blend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor | None, x: Tensor, a: float) -> tuple[Tensor, ...]:
        ctx.save_for_backward(w, x)
        ctx.a = a
        product, square, sign = blended(w, x, a)
        ctx.mark_non_differentiable(sign)
        return product, square, sign

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, product: Tensor, square: Tensor, _: Tensor) -> Any:
        w, x = ctx.saved_tensors
        grad_w = x * product * ctx.a if ctx.needs_input_grad[0] else None
        return grad_w, 2 * x * square + product * (1 if w is None else w) * ctx.a, None


REFERENCES: Calls = {"cube": Cube.apply, "root": Root.apply, "blend": Blend.apply}


class Outcome(NamedTuple):
    """What a program computed until its end or its first error."""

    values: list[Tensor]
    error: str  # the kind of it, in torch's words


# The errors of torch that a program can meet. Others fail the test.
_ERRORS = (
    "modified by an inplace operation",
    "a second time",
    "a leaf Variable that requires grad",
    "does not require grad",
    "appears to not have been used",
    "is a view and is being modified inplace",
    "unsupported operation: more than one element of the written-to tensor",
)


class Program:
    """A program that a seed decides: the same steps with each set of calls."""

    def __init__(self, seed: int, calls: Calls) -> None:
        self.random = random.Random(seed)
        self.calls = calls
        generator = torch.Generator().manual_seed(seed)
        made = [torch.rand(SHAPE, generator=generator, dtype=torch.float64) for _ in range(3)]
        wanted = [True, self.random.random() < 0.7, self.random.random() < 0.3]
        self.leaves = [
            each.add_(0.5).requires_grad_(needs) for each, needs in zip(made, wanted, strict=True)
        ]
        self.values: list[Tensor] = [each * 1 for each in self.leaves]
        self.seen: list[Tensor] = []  # what hooks were given
        self.twice = True  # whether each op so far has a second derivative

    def pick(self) -> Tensor:
        return self.random.choice(self.values)

    def apply(self) -> Tensor:
        """Call one of the ops on one or two values."""
        name = self.random.choice(("cube", "root", "blend"))
        x = self.pick()
        found: Tensor
        if name == "cube":
            found = self.calls["cube"](x)
            return found
        self.twice = False
        if name == "root":
            found = self.calls["root"](x.abs() + 0.5 if self.random.random() < 0.7 else x)
            return found
        w = self.pick() if self.random.random() < 0.7 else None
        results = self.calls["blend"](w, x, self.random.choice((0.5, 2.0)))
        found = results[self.random.choice((0, 0, 1, 1, 2))]
        return found

    def view(self) -> Tensor:
        x = self.pick()
        kind = self.random.randrange(5)
        if kind == 0:
            return x.flip(0)
        if kind == 1:
            return x.t().contiguous().t()
        if kind == 2:
            return x[:1].expand(SHAPE)
        if kind == 3:
            return x.view(-1).view(SHAPE) if x.is_contiguous() else x.detach()
        return x[:]

    def edit(self) -> None:
        """Change a value in place, perhaps one that an op saved."""
        x = self.pick()
        kind = self.random.randrange(3)
        if kind == 0:
            x.mul_(1.5)
        elif kind == 1:
            x[:, 1:].add_(0.25)
        else:
            x.add_(self.pick())

    def watch(self) -> None:
        """Put a hook on a value, which sees its gradient and can change it."""
        x = self.pick()
        if not x.requires_grad:
            return
        factor = self.random.choice((None, 2.0))

        def hook(grad: Tensor) -> Tensor | None:
            self.seen.append(grad.detach().clone())
            return None if factor is None else grad * factor

        x.register_hook(hook)

    def step(self) -> None:
        kind = self.random.randrange(12)
        if kind < 5:
            self.values.append(self.apply())
        elif kind < 7:
            self.values.append(self.view())
        elif kind == 7:
            self.values.append(torch.tanh(self.pick()) * self.pick() + 0.5)
        elif kind == 8:
            self.edit()
        elif kind == 9:
            self.watch()
        elif kind == 10:
            with torch.no_grad():
                self.values.append(self.apply())
        else:
            self.recompute()

    def recompute(self) -> None:
        """Call an op whose tensors the backward computes again."""
        x, reentrant = self.pick(), self.random.random() < 0.5
        self.twice = False
        root = self.calls["root"]
        self.values.append(checkpoint(lambda x: root(x.abs() + 0.5), x, use_reentrant=reentrant))

    def total(self) -> Tensor:
        used = [
            value for value in self.values if self.random.random() < 0.6 or value is self.values[-1]
        ]
        return torch.stack(
            [value.cos() if value.is_floating_point() else value for value in used]
        ).sum()

    def differentiate(self, total: Tensor) -> list[Tensor]:
        kind = self.random.randrange(6)
        leaves = [leaf for leaf in self.leaves if leaf.requires_grad]
        if kind == 0 and self.twice:
            first = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
            there = [each for each in first if each is not None]
            if any(each.requires_grad for each in there):
                second = torch.autograd.grad(
                    torch.stack([each.sum() for each in there]).sum(), leaves, allow_unused=True
                )
                there += [each for each in second if each is not None]
            return there
        if kind == 1:
            total.backward(retain_graph=True)
            total.backward()
        elif kind == 2:
            total.backward()
            total.backward()
        elif kind == 3:
            self.in_a_thread(total)
        else:
            total.backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    def in_a_thread(self, total: Tensor) -> None:
        errors: list[RuntimeError] = []

        def work() -> None:
            try:
                total.backward()
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    def run(self) -> Outcome:
        try:
            for _ in range(self.random.randrange(2, 9)):
                self.step()
            grads = self.differentiate(self.total())
        except RuntimeError as error:
            kind = next((each for each in _ERRORS if each in str(error)), None)
            if kind is None:
                raise
            return Outcome([value.detach() for value in self.values], kind)
        return Outcome([value.detach() for value in [*self.values, *grads, *self.seen]], "")


def compare(seed: int, calls: Sequence[Calls]) -> str:
    """Run a program with both sets of calls. Returns its error."""
    mine, theirs = (Program(seed, each).run() for each in calls)
    assert mine.error == theirs.error, seed
    assert len(mine.values) == len(theirs.values), seed
    for one, other in zip(mine.values, theirs.values, strict=True):
        torch.testing.assert_close(
            one, other, equal_nan=True, msg=lambda text: f"seed {seed}: {text}"
        )
    return mine.error


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of checkpoint
@pytest.mark.parametrize("way", ["python", pytest.param("c++", marks=pytest.mark.slow)])
def test_random_programs_are_those_of_torch(
    way: str, make_op: MakeOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "c++":
        helpers.take_cpp_autograd(monkeypatch)
    ops: Calls = {"cube": cube(make_op), "root": root(make_op), "blend": blend(make_op)}
    ops["cube"](some(2)), ops["root"](some(2)), ops["blend"](None, some(2))  # loads them
    ended = [compare(seed, (ops, REFERENCES)) for seed in range(PROGRAMS[way])]
    assert ended.count("") > 0.5 * len(ended)  # most programs reach their gradients
    assert {"modified by an inplace operation", "a second time"} <= set(ended)
