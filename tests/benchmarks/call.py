"""What a call costs: 8 float32 elements, from Python, so that hardly anything but the way to the kernel is measured.

    python tests/benchmarks/call.py

On the CPU against C++ ops with the same work (TORCH_LIBRARY, at::Tensor, -O3; peers/call_ext.cpp):

    allreduce       allocates its output. Both sides have the same Python backward, so that they differ in nothing but
                    the kernel and its glue; inference mode skips what torch.library.register_autograd adds to a call.
    total           the same without a backward, whose derivative is an error; torch only warns of the C++ op's.
    autograd        allreduce where no gradient is wanted, against inference mode: what having a backward costs such a call, 0.1 us.
                    OPJIT_CPP_AUTOGRAD=0 shows it without the kernel in C++, 5 us.
    scale           records a gradient, against a C++ torch::autograd::Function: with an op as the backward, and with a
                    backward in Python that calls this op. `and backward` also runs it.
    scale_inplace   mutates its argument. opjit's glue counts up the tensor's version, which the C++ op leaves out.

On a GPU against torch.sum, whose result has the same dtype. A round is some thousand calls in a loop, synchronized at
its end; sides take turns, and a table holds medians of rounds. Results are checked first.
"""

from __future__ import annotations

import argparse
import os
import runpy
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from common import HERE, Row, difference, load_peer, path_with_tools, ratio, show
from torch.utils.benchmark import Timer

CALLS = 5_000
TOTAL = """
opjit_status total_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    double total = 0;
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "total takes a contiguous float32 tensor");
    OPJIT_TRY(opjit_empty(out, 0, NULL, x->dtype, x));
    for (int64_t i = 0; i < x->numel; i++)
        total += ((const float *)x->data)[i];
    *(float *)out->data = (float)total;
    return OPJIT_OK;
}
"""
SCALE = """
opjit_status NAME_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
{
    opjit_tensor dense;
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32, "NAME takes a float32 tensor");
    OPJIT_TRY(opjit_contiguous(&dense, x));
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = ((const float *)dense.data)[i] * (float)a;
    return OPJIT_OK;
}
"""
Op = Callable[..., Any]
Mode = Callable[[], AbstractContextManager[Any]]


def duel(
    ours: Op, peer: Op, arguments: tuple[Any, ...], rounds: int, mode: Mode
) -> tuple[list[float], list[float]]:
    """Seconds per call of both sides; they take turns."""

    def timer(op: Op) -> Timer:
        call = ", ".join(f"a{index}" for index in range(len(arguments)))
        return Timer(
            f"op({call})",
            globals={"op": op, **{f"a{index}": value for index, value in enumerate(arguments)}},
        )

    timers = timer(ours), timer(peer)
    spent: tuple[list[float], list[float]] = [], []
    with mode():
        for turn in range(rounds + 1):
            for side in (0, 1) if turn % 2 else (1, 0):
                measured = timers[side].timeit(CALLS).mean
                if turn:  # the first round warms up
                    spent[side].append(measured)
    return spent


def cost_of_autograd(
    op: Op, x: torch.Tensor, rounds: int, mode: Mode
) -> tuple[list[float], list[float]]:
    """Seconds of this thread per call, which other processes hardly change: in a mode, and in inference mode; they take turns."""
    spent: tuple[list[float], list[float]] = [], []
    for _ in range(5 * rounds):
        for seconds, entered in zip(spent, (mode, torch.inference_mode), strict=True):
            with entered():
                started = time.thread_time()
                for _ in range(CALLS // 10):
                    op(x)
                seconds.append((time.thread_time() - started) / (CALLS // 10))
    return spent


def give_backward(qualified: str) -> None:
    """The same backward that opjit's allreduce has, registered in the same way."""

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.shape = inputs[0].shape
        ctx.dtype = inputs[0].dtype

    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.to(ctx.dtype).expand(ctx.shape)

    torch.library.register_autograd(qualified, backward, setup_context=setup_context)


def scale_ops() -> tuple[Op, Op]:
    """Multiply by a number: with an op as the backward, and with a backward in Python that calls it."""
    import opjit

    backward = opjit.inline(
        "scale_backward(Tensor grad, float a) -> Tensor",
        c=SCALE.replace("NAME", "scale_backward"),
        fake=lambda grad, a: grad.new_empty(grad.shape),
    )
    found = []
    for name in ("scale_op", "scale_python"):
        op = opjit.inline(
            f"{name}(Tensor x, float a) -> Tensor",
            c=SCALE.replace("NAME", name),
            fake=lambda x, a: x.new_empty(x.shape),
        )
        found.append(op)
    found[0].backward(backward)

    @found[1].setup_context
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.a = inputs[1]

    @found[1].backward
    def in_python(ctx: Any, grad: torch.Tensor) -> Any:
        return backward.overload(grad, ctx.a), None

    return found[0].overload, found[1].overload


def measure_recorded(rounds: int) -> list[Row]:
    """Calls of scale that record a gradient."""
    leaf = torch.ones(8, requires_grad=True)
    weights = torch.full((8,), 3.0)

    def with_backward(op: Op) -> Op:
        return lambda x, a: torch.autograd.grad(op(x, a), x, weights)

    rows = []
    peer = torch.ops.peer.scale.default
    for name, op in zip(("an op", "Python"), scale_ops(), strict=True):
        for each in (op, peer):
            torch.testing.assert_close(each(leaf, 2.5), torch.full((8,), 2.5))
            torch.testing.assert_close(with_backward(each)(leaf, 2.5)[0], 2.5 * weights)
        for what, ours, theirs in (
            ("scale, recorded", op, peer),
            ("scale and backward", with_backward(op), with_backward(peer)),
        ):
            spent = duel(ours, theirs, (leaf, 2.5), rounds, nullcontext)
            rows.append(ratio(f"{what}, backward is {name}", *spent))
    return rows


def check_cpu(allreduce: Op, scale: Op) -> None:
    """Stop unless the ops of a side do what they are measured for."""
    x = torch.arange(8, dtype=torch.float32, requires_grad=True)
    total = allreduce(x)
    torch.testing.assert_close(total, torch.sum(x))
    total.backward()
    torch.testing.assert_close(x.grad, torch.ones(8))
    y = torch.arange(8, dtype=torch.float32)
    scale(y, 2.0)
    torch.testing.assert_close(y, torch.arange(0, 16, 2, dtype=torch.float32))


def measure_cpu(rounds: int) -> list[Row]:
    import opjit
    from opjit.cpp_extension import autograd_part

    autograd_part.make()
    runpy.run_path(str(HERE / "ops" / "op.py"))
    x = torch.ones(8)
    leaf = torch.ones(8, requires_grad=True)
    total = opjit.inline(
        "total(Tensor x) -> Tensor", c=TOTAL, fake=lambda x: x.new_empty(())
    ).overload
    torch.testing.assert_close(total(x), torch.sum(x))
    without = [
        ratio(
            f"total, {name}",
            *duel(total, torch.ops.peer.allreduce.default, (tensor,), rounds, mode),
        )
        for name, tensor, mode in (
            ("inference mode", x, torch.inference_mode),
            ("no_grad", x, torch.no_grad),
            ("grad mode, input requires grad", leaf, nullcontext),
        )
    ]
    give_backward("peer::allreduce")
    allreduce, peer_allreduce = opjit.get("allreduce", "cpu"), torch.ops.peer.allreduce.default
    scale = opjit.get("opjit_bench::scale_inplace", "cpu")
    peer_scale = torch.ops.peer.scale_inplace.default
    check_cpu(allreduce, scale)
    check_cpu(peer_allreduce, peer_scale)

    duels: list[tuple[str, torch.Tensor, Mode, float | None]] = [
        ("inference mode", x, torch.inference_mode, 1.1),
        ("no_grad", x, torch.no_grad, None),
        ("grad mode", x, nullcontext, None),
        ("grad mode, input requires grad", leaf, nullcontext, None),
    ]
    rows = [
        ratio(f"allreduce, {name}", *duel(allreduce, peer_allreduce, (tensor,), rounds, mode), bar)
        for name, tensor, mode, bar in duels
    ] + without
    without_gradient: list[tuple[str, Mode]] = [
        ("no_grad", torch.no_grad),
        ("grad mode", nullcontext),
    ]
    rows += [
        difference(f"autograd, {name}", *cost_of_autograd(allreduce, x, rounds, mode), 300e-9)
        for name, mode in without_gradient
    ]
    for name, mode in (("inference mode", torch.inference_mode), ("grad mode", nullcontext)):
        rows.append(
            difference(
                f"scale_inplace, {name}", *duel(scale, peer_scale, (x, 1.0), rounds, mode), 300e-9
            )
        )
    return rows + measure_recorded(rounds)


def measure_cuda(rounds: int) -> list[Row]:
    import opjit

    # The calls use the kernel for autograd that measure_cpu had compiled.
    allreduce = opjit.get("allreduce", "cuda")
    rows = []
    for dtype in (torch.float32, torch.float16, torch.int32, torch.int64):
        x = torch.ones(8, device="cuda", dtype=dtype)
        torch.testing.assert_close(allreduce(x), torch.sum(x))
        for name, mode in (("inference mode", torch.inference_mode), ("no_grad", torch.no_grad)):
            bar = 1.1 if mode is torch.inference_mode else None
            what = f"allreduce, {str(dtype).removeprefix('torch.')}, {name}"
            rows.append(ratio(what, *duel(allreduce, torch.sum, (x,), rounds, mode), bar))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=101)
    rounds = parser.parse_args().rounds
    os.environ["PATH"] = path_with_tools()
    with tempfile.TemporaryDirectory() as build:
        load_peer(["call_ext.cpp"], build)
        show("Calls on 8 elements on the CPU, against a C++ op (medians)", measure_cpu(rounds))
    if torch.cuda.is_available():
        show("Calls on 8 elements on the GPU, against torch.sum (medians)", measure_cuda(rounds))


if __name__ == "__main__":
    main()
