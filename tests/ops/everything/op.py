"""Takes every type that a schema can have, and reports what arrived in C as JSON text in a uint8 tensor."""

from typing import Any

import torch

import opjit

SCHEMA = (
    "optest::everything(Tensor x, Tensor? maybe, Tensor[] xs, int n, SymInt sym, float f, bool b, str s, ScalarType d, "
    "int? on, SymInt? osym, float? of, bool? ob, str? os, ScalarType? od, int[] ns, SymInt[] syms, float[] fs, bool[] bs, "
    "int[2] pair, Tensor[2] twins, Tensor[]? oxs, int[]? ons, float[]? ofs, bool[]? obs, int[2]? opair, *, int last=7) "
    "-> (Tensor report, int n2, float f2, bool nb, Tensor copy)"
)


@opjit.op(SCHEMA)
def everything(
    x: torch.Tensor,
    maybe: torch.Tensor | None,
    xs: list[torch.Tensor],
    n: int,
    sym: int,
    f: float,
    b: bool,
    *rest: Any,
    **last: Any,
) -> tuple[torch.Tensor, int, float, bool, torch.Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty((size,), dtype=torch.uint8), 2 * n, 2 * f, not b, torch.empty_like(x)
