"""An addition in Triton."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def add(x, y, out, B: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    i = tl.arange(0, B)
    tl.store(out + i, tl.load(x + i) + tl.load(y + i))
