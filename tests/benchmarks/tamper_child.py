"""One process of tamper.py: it uses an engine's cache, and prints whether its kernel was there. It does not import what it need not."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path


def use_triton() -> bool:
    import tamper_kernel
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    hits: list[bool] = []  # of this call
    knobs.compilation.listener = lambda **said: hits.append(said["cache_hit"])
    types = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "B": "constexpr"}
    source = ASTSource(tamper_kernel.add, signature=types, constexprs={"B": 128})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    return hits[0]


def use_tvm_ffi() -> bool:
    import tvm_ffi.cpp

    before = {*Path(os.environ["TVM_FFI_CACHE_DIR"]).rglob("*.so")}
    module = tvm_ffi.cpp.load_inline(
        "tamper", cpp_sources="int next(int x) { return x + 1; }", functions="next"
    )
    assert module.next(1) == 2
    return bool(before)


def use_inductor() -> bool:
    import torch
    from torch._dynamo.utils import counters

    x = torch.ones(64, 64)
    compiled = torch.compile(lambda x: torch.relu(x + 1).sum(0))
    assert torch.equal(compiled(x), torch.full((64,), 128.0))
    return bool(counters["inductor"]["fxgraph_cache_hit"])


USES: dict[str, Callable[[], bool]] = {
    "Triton": use_triton,
    "tvm-ffi": use_tvm_ffi,
    "Inductor": use_inductor,
}

if __name__ == "__main__":
    print(json.dumps(USES[sys.argv[1]]()))
