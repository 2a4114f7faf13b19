"""matmul against torch.matmul on 40 shapes of language and vision models, and with fused epilogues against torch's separate ops.

    python tests/benchmarks/matmul.py

bfloat16, with a weight's transpose as w. All results are compared with float32 first. Both sides run in CUDA graphs and take
turns. With few rows, a graph uses several weights, so that they are read from memory and not from the L2 cache. A speed-up is the
median of the rounds' ratios, above 1x if opjit is faster. The bars: geometric means of 1.0x without an epilogue, and of 1.15x with
silu_multiply or a residual.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import geometric_mean, median
from typing import NamedTuple

import torch
from common import seconds

import opjit

ROUNDS = 15
MOST_DECODED = 256  # rows of x up to which a call mostly reads w
READ = 200_000_000  # bytes of weights between two uses of one: four L2 caches
MOST_WEIGHTS = 64
CALLS = 12  # in a graph, at least
BARS = {"none": 1.0, "silu_multiply or residual": 1.15}


class Shape(NamedTuple):
    """A product of a model, and the epilogue that follows it."""

    name: str
    rows: int
    depth: int
    columns: int
    epilogue: str = "none"
    residual: bool = False

    @property
    def plain(self) -> Shape:
        return self._replace(epilogue="none", residual=False)

    @property
    def fused(self) -> str:
        return "residual" if self.residual else self.epilogue


class Layer(NamedTuple):
    """A linear layer of a model."""

    name: str
    depth: int
    columns: int
    epilogue: str = "none"
    residual: bool = False

    def shapes(self, *rows: int) -> list[Shape]:
        return [
            Shape(self.name, count, self.depth, self.columns, self.epilogue, self.residual)
            for count in rows
        ]


LLAMA_8B = (
    Layer("Llama 3 8B, qkv", 4096, 6144),
    Layer("Llama 3 8B, out", 4096, 4096, residual=True),
    Layer("Llama 3 8B, gate and up", 4096, 28672, "silu_multiply"),
    Layer("Llama 3 8B, down", 14336, 4096, residual=True),
)
LLAMA_70B = (  # a rank of eight
    Layer("Llama 3 70B / 8, qkv", 8192, 1280),
    Layer("Llama 3 70B / 8, out", 1024, 8192, residual=True),
    Layer("Llama 3 70B / 8, gate and up", 8192, 7168, "silu_multiply"),
    Layer("Llama 3 70B / 8, down", 3584, 8192, residual=True),
)
EXPERTS = (
    Layer("DeepSeek-V3 expert, gate and up", 7168, 4096, "silu_multiply"),
    Layer("DeepSeek-V3 expert, down", 2048, 7168),
    Layer("Qwen3 30B expert, gate and up", 2048, 1536, "silu_multiply"),
    Layer("Qwen3 30B expert, down", 768, 2048),
)
SHAPES = {
    "decode": [
        *(shape for layer in LLAMA_8B for shape in layer.shapes(1, 16, 64)),
        *(shape for layer in LLAMA_70B for shape in layer.shapes(8, 32)),
    ],
    "prefill": [
        *(shape for layer in LLAMA_8B for shape in layer.shapes(2048, 8192)),
        *(shape for layer in LLAMA_70B[2:] for shape in layer.shapes(4096)),
    ],
    "mixture of experts": [
        *(shape for layer in EXPERTS[:2] for shape in layer.shapes(24, 200)),
        *(shape for layer in EXPERTS[2:] for shape in layer.shapes(96)),
    ],
    "ragged": [
        *Layer("ViT-L, fc1, 8 images", 1024, 4096, "gelu").shapes(1576),
        *Layer("ViT-L, fc2, 8 images", 4096, 1024, residual=True).shapes(1576),
        *Layer("Whisper large, fc1", 1280, 5120, "gelu").shapes(1500),
        *Layer("GPT-2, vocabulary", 768, 50257).shapes(1000),
    ],
}

Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def arguments(shape: Shape, generator: torch.Generator) -> Arguments:
    """x, w and the residual."""

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device="cuda")

    x = normal(shape.rows, shape.depth).bfloat16()
    w = (normal(shape.columns, shape.depth) / shape.depth**0.5).bfloat16().t()
    results = shape.columns // 2 if shape.epilogue == "silu_multiply" else shape.columns
    return x, w, normal(shape.rows, results).bfloat16() if shape.residual else None


def separate(
    x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor | None, *, epilogue: str
) -> torch.Tensor:
    """The same with torch's ops, in the dtype of x."""
    z = x @ w
    if epilogue == "gelu":
        z = torch.nn.functional.gelu(z)
    elif epilogue == "silu_multiply":
        gate, up = z.chunk(2, 1)
        z = torch.nn.functional.silu(gate) * up
    return z if residual is None else z + residual


def fused(
    x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor | None, *, epilogue: str
) -> torch.Tensor:
    result: torch.Tensor = torch.ops.opjit.matmul(x, w, None, residual, epilogue=epilogue)
    return result


def validate(shape: Shape, args: Arguments) -> None:
    """Compare with torch's ops in float32, which round once, at the end."""
    x, w, residual = args
    added = None if residual is None else residual.float()
    expected = separate(x.float(), w.float(), added, epilogue=shape.epilogue)
    found = fused(x, w, residual, epilogue=shape.epilogue)
    torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=0.01)


def recorded(
    call: Callable[..., torch.Tensor], several: list[Arguments], epilogue: str
) -> torch.cuda.CUDAGraph:
    call(*several[0], epilogue=epilogue)  # loaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for args in several:
            call(*args, epilogue=epilogue)
    return graph


def replayed(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Return the seconds of a call."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end) / 1e3 / calls)


def measured(shape: Shape) -> float:
    """Validate and measure a shape, print its row, and return the speed-up."""
    generator = torch.Generator("cuda").manual_seed(shape.rows)
    weights = min(MOST_WEIGHTS, 1 + READ // (2 * shape.depth * shape.columns))
    weights = weights if shape.rows <= MOST_DECODED else 1
    several = [arguments(shape, generator) for _ in range(weights)]
    validate(shape, several[0])
    several = several * -(-CALLS // weights)
    sides = [recorded(call, several, shape.epilogue) for call in (fused, separate)]
    times: list[tuple[float, ...]] = []
    for turn in range(ROUNDS + 1):
        order = sides if turn % 2 else sides[::-1]
        spent = {side: replayed(side, len(several)) for side in order}
        times.append(tuple(spent[side] for side in sides))
    rounds = times[1:]  # the first one warms up
    ours, theirs = (median(side) for side in zip(*rounds, strict=True))
    speed_up = median(theirs / ours for ours, theirs in rounds)
    operations = 2 * shape.rows * shape.depth * shape.columns
    print(
        f"  {shape.name:<32}{shape.rows:>6}{shape.depth:>7}{shape.columns:>7}  {shape.fused:<14}"
        f"{seconds(ours):>9}{seconds(theirs):>9}{operations / ours / 1e12:>8.0f}{speed_up:>8.2f}x",
        flush=True,
    )
    return speed_up


def show(title: str, shapes: list[Shape]) -> list[float]:
    """Print a table and its geometric mean, and return the speed-ups."""
    print(
        f"\n{title:<34}{'M':>6}{'K':>7}{'N':>7}  {'epilogue':<14}{'opjit':>9}{'torch':>9}{'TFLOP/s':>8}{'speed-up':>9}"
    )
    found = [measured(shape) for shape in shapes]
    print(f"  geometric mean of {len(found)}: {geometric_mean(found):.3f}x")
    return found


def main() -> None:
    if not torch.cuda.is_available():
        print("no CUDA GPU is visible: nothing to measure")
        return
    opjit.get("matmul", "cuda")
    print(f"bfloat16 on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    with torch.inference_mode():
        without = []
        for title, shapes in SHAPES.items():
            without += show(title, [shape.plain for shape in shapes])
        together = [shape for shapes in SHAPES.values() for shape in shapes]
        show("with gelu", [shape for shape in together if shape.fused == "gelu"])
        barred = ("silu_multiply", "residual")
        fused_ones = show("fused", [shape for shape in together if shape.fused in barred])
    for (name, bar), values in zip(BARS.items(), (without, fused_ones), strict=True):
        mean = geometric_mean(values)
        verdict = "PASS" if mean >= bar else "FAIL"
        print(f"{name}: geometric mean of {len(values)} shapes {mean:.3f}x, bar {bar}x: {verdict}")


if __name__ == "__main__":
    main()
