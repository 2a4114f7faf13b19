"""What access to the elements of a strided tensor costs on the CPU: 1e6 float32, one thread, y = 2 x.

    python tests/benchmarks/strides.py

Four kernels that differ in nothing but their loop:

    loops       nested loops over sizes and strides, written for the layout by hand
    for_each    OPJIT_FOR_EACH of opjit.h, for any layout
    accessor    at::TensorAccessor in C++, where torch's headers are there to compile with (--accessor; takes a minute)
    offset      opjit_offset() for each element, for any layout

Results are checked first. Sides take turns; a ratio is the median of the rounds' ratios to `loops`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
from common import seconds
from torch.utils.benchmark import Timer

import opjit

ROUNDS = 21
KERNEL = """
opjit_status NAME_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    const float *from = x->data;
    float *to = out->data;
LOOP
    return OPJIT_OK;
}
"""
OFFSET = """
    for (int64_t i = 0; i < x->numel; i++)
        to[i] = 2 * from[opjit_offset(x, i)];
"""
FOR_EACH = """
    OPJIT_FOR_EACH(i, at, x)
        to[i] = 2 * from[at];
"""
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed 1000 x 1000": lambda x: x.view(1000, 1000).t(),
    "every second of 2e6": lambda x: torch.stack((x, x), 1)[:, 0],
    "permuted (2, 0, 1) of 100^3": lambda x: x.view(100, 100, 100).permute(2, 0, 1),
    "permuted (1, 0, 2) of 100^3": lambda x: x.view(100, 100, 100).permute(1, 0, 2),
    "channels last, 4 x 3 x 288 x 288": lambda x: (
        x[: 4 * 3 * 288 * 288].view(4, 288, 288, 3).permute(0, 3, 1, 2)
    ),
}


def loops(dim: int) -> str:
    """Nested loops over `dim` dimensions."""
    names = "abcd"[:dim]
    place = " + ".join(f"{name} * s{d}" for d, name in enumerate(names))
    lines = [
        f"const int64_t {', '.join(f'n{d} = x->sizes[{d}], s{d} = x->strides[{d}]' for d in range(dim))};",
        "int64_t i = 0;",
        *(f"for (int64_t {name} = 0; {name} < n{d}; {name}++)" for d, name in enumerate(names)),
        f"to[i++] = 2 * from[{place}];",
    ]
    return "\n".join(lines)


def accessors() -> Callable[[torch.Tensor], torch.Tensor]:
    """The same op in C++, over torch's accessors; it takes 1 to 4 dimensions."""
    bodies = []
    for dim in range(1, 5):
        names = "abcd"[:dim]
        nest = "".join(
            f"for (int64_t {name} = 0; {name} < from.size({d}); {name}++) "
            for d, name in enumerate(names)
        )
        element = "".join(f"[{name}]" for name in names)
        bodies.append(
            f"if (x.dim() == {dim}) {{ auto from = x.accessor<float, {dim}>(); auto to = y.accessor<float, {dim}>(); "
            f"{nest} to{element} = 2 * from{element}; }}"
        )
    source = "\n".join(
        [
            "#include <torch/extension.h>",
            "at::Tensor twice(const at::Tensor &x) {",
            "at::Tensor y = at::empty(x.sizes(), x.options());",
            *bodies,
            "return y; }",
        ]
    )
    flags = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"]
    twice: Callable[[torch.Tensor], torch.Tensor] = opjit.load_inline(
        "strides_accessor", source, functions=["twice"], extra_cflags=flags
    ).twice
    return twice


def op(name: str, loop: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return opjit.inline(
        f"{name}(Tensor x) -> Tensor", c=KERNEL.replace("NAME", name).replace("LOOP", loop)
    ).overload


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--accessor", action="store_true", help="also time a C++ op over at::TensorAccessor"
    )
    twice = accessors() if parser.parse_args().accessor else None
    data = torch.rand(1_000_000)
    print(f"torch {torch.__version__}, one thread; ratios to nested loops\n")
    with torch.inference_mode():
        for label, layout in LAYOUTS.items():
            x = layout(data)
            sides = {
                "loops": op(f"strides_loops{x.dim()}", loops(x.dim())),
                "for_each": op("strides_for_each", FOR_EACH),
                **({"accessor": twice} if twice else {}),
                "offset": op("strides_offset", OFFSET),
            }
            for call in sides.values():
                torch.testing.assert_close(call(x), 2 * x, rtol=0, atol=0)
            print(f"{label:<34}{measured(sides, x)}", flush=True)


def measured(sides: dict[str, Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor) -> str:
    timers = {
        name: Timer("call(x)", globals={"call": call, "x": x}) for name, call in sides.items()
    }
    spent: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(ROUNDS + 1):
        for name in reversed(sides) if turn % 2 else sides:
            spent[name].append(timers[name].timeit(8).mean)
    ratios = {
        name: median(own / plain for own, plain in zip(values[1:], spent["loops"][1:], strict=True))
        for name, values in spent.items()
    }
    return "  ".join(
        f"{name} {seconds(median(spent[name][1:])):>8} {ratio:5.2f}x"
        for name, ratio in ratios.items()
    )


if __name__ == "__main__":
    main()
