"""Build FlashInfer's modules with opjit's cache: opjit.build builds each JitSpec for nvcc, without ninja.

    python examples/13_any_library/flashinfer_modules.py page norm

A program calls `install()` before its first module. FlashInfer still builds modules with flags for one source, or with embedded cubins.
FLASHINFER_DISABLE_JIT also forbids builds here. nvcc gets the C++ compiler in CXX, not the one in CC.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import opjit


def install() -> None:
    """Have FlashInfer build with opjit."""
    from flashinfer.jit import core

    theirs = core.JitSpecNvcc.build_and_load

    def build_and_load(spec: Any) -> Any:
        if spec.is_aot or spec.extra_cuda_cflags_by_source or spec.embedded_cubin_factory:
            return theirs(spec)
        return spec.load(library(spec))

    core.JitSpecNvcc.build_and_load = build_and_load


def library(spec: Any) -> Path:
    """Return the verified library of a spec's sources, which opjit builds if no cache has it."""
    from flashinfer.jit import cpp_ext

    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        os.environ["OPJIT_OFFLINE"] = "1"
    home = cpp_ext.get_cuda_path()
    flags = {Path(each["file"]).suffix: _flags(each["command"], f"{home}/include") for each in spec.get_compile_commands()}
    cuda = [*flags.get(".cu", []), *(["-rdc=true"] if spec.needs_device_linking else [])]
    linked = ["-lcuda", *cpp_ext.parse_env_flags("FLASHINFER_EXTRA_LDFLAGS"), *(spec.extra_ldflags or [])]
    launcher = shlex.split(os.environ.get("FLASHINFER_NVCC_LAUNCHER", ""))
    return opjit.build(spec.name, spec.sources, cflags=next((words for suffix, words in flags.items() if suffix != ".cu"), []),
                       cuda_cflags=cuda, ldflags=linked, launcher=launcher)


def _flags(command: str, toolkit: str) -> list[str]:
    """Return a compiler's flags from one of FlashInfer's commands, without the source, the object and the headers that nvcc has itself."""
    words = shlex.split(command)[3:-2]  # COMPILER -c SOURCE ... -o OBJECT
    pairs = list(zip(words, [*words[1:], ""], strict=True))
    left_out = {number for number, pair in enumerate(pairs) if pair[0] == "-ccbin" or pair == ("-isystem", toolkit)}
    return [word for number, word in enumerate(words) if not {number, number - 1} & left_out]


def main(names: list[str]) -> None:
    try:
        from flashinfer.jit import norm, page, rope, sampling
    except ImportError as error:
        print(f"skipped, because FlashInfer is not installed: {error}; pip install flashinfer-python")
        return
    made = {"norm": norm.gen_norm_module, "page": page.gen_page_module, "rope": rope.gen_rope_module,
            "sampling": sampling.gen_sampling_module}
    install()
    for name in names:
        print(f"{name}:", made[name]().build_and_load())


if __name__ == "__main__":
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")  # without a GPU
    main(sys.argv[1:] or ["page"])
