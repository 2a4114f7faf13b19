"""Build SGLang's modules with opjit's cache: load_jit calls opjit.build, without ninja and without SGLang's cache.

    python examples/13_any_library/sglang_modules.py

A program calls `install()` before its first load_jit. SGLANG_CRASH_ON_JIT_COMPILE also forbids builds here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import opjit


def install() -> None:
    """Have SGLang build with opjit. load_jit then finds each module prebuilt, under a key that it does not compute."""
    from sglang.kernels.jit.utils.compile import loader

    loader.ninja.generate = lambda spec: ""
    loader.cache.compute_build_key = lambda spec, build_file: "opjit"
    loader._find_prebuilt = lambda spec, scope: library(spec)


def library(spec: Any) -> Path:
    """Return the verified library of a BuildSpec, which opjit builds if no cache has it."""
    from sglang.kernels.jit.utils.compile import toolchain
    from sglang.kernels.jit.utils.compile.paths import KERNEL_PATH
    from sglang.srt.environ import envs

    if envs.SGLANG_CRASH_ON_JIT_COMPILE.get():
        os.environ["OPJIT_OFFLINE"] = "1"
    units, kernels = spec.translation_units(), f"{KERNEL_PATH}/csrc"
    include, folder, linked = toolchain.tvm_ffi_paths()
    # The wrapper includes kernels by their paths on this machine. Below a directory of headers, the names are the same on all machines.
    generated = {unit.filename: unit.source.replace(f'"{kernels}/', '"') for unit in units if unit.source is not None}
    return opjit.build(re.sub(r"[^\w.-]", "_", spec.module_name)[:100], [unit.filename for unit in units if unit.source is None],
                       generated=generated, include=[*include, *spec.include_paths, kernels], cflags=spec.cflags,
                       cuda_cflags=[*toolchain.target_flags(), *spec.cuda_cflags], ldflags=[f"-L{folder}", f"-l{linked}", *spec.ldflags])


def main() -> None:
    try:
        from sglang.kernels.jit.utils import load_jit, override_jit_cuda_arch
    except ImportError as error:
        print(f"skipped, because SGLang is not installed: {error}; pip install sglang")
        return
    install()
    with override_jit_cuda_arch(9, 0):  # even without a GPU
        module = load_jit("add_constant", "1", cuda_files=["elementwise/add_constant.cuh"],
                          cuda_wrappers=[("add_constant", "add_constant<1>")])
    print("add_constant:", module.add_constant)


if __name__ == "__main__":
    main()
