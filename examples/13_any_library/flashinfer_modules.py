"""Build FlashInfer's modules through opjit's cache, and export them for machines without a compiler.

    opjit run examples/13_any_library/flashinfer_modules.py modules page norm
"""

from __future__ import annotations

import os
import sys

from opjit.adapters import flashinfer


def main(folder: str, names: list[str]) -> None:
    try:
        from flashinfer.jit import norm, page, rope, sampling
    except ImportError as error:
        print(f"skipped, because FlashInfer is not installed: {error}; pip install flashinfer-python")
        return
    functions = {"norm": norm.gen_norm_module, "page": page.gen_page_module, "rope": rope.gen_rope_module,
                 "sampling": sampling.gen_sampling_module}
    flashinfer.export(folder, [functions[name]() for name in names])
    print(f"{folder}:", *names)


if __name__ == "__main__":
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")  # without a GPU
    folder, *names = sys.argv[1:] or ["modules", "page"]
    main(folder, names)
