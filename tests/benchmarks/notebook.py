"""How long it takes from an edited notebook cell to its result, beside tvm-ffi's load_inline of the same edit.

    python tests/benchmarks/notebook.py

A Jupyter kernel runs both sides in turn. A round changes a constant in the C code, executes the cell that builds it and the cell
below, which calls it, and takes the time that a person waits: from sending the first to having the second one's output, which is
checked. The imports, and each side's first build, are not counted.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from time import perf_counter
from typing import Any

import nbformat
from common import Row, alone, path_with_tools, ratio, show
from nbclient import NotebookClient

SETUP = "import tempfile, torch, tvm_ffi.cpp\n%load_ext opjit\nx = torch.ones(1000)\nout = torch.empty(1000)"
OPJIT = """%%opjit scale(Tensor x, float a) -> Tensor --like x
opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
{{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "scale takes a contiguous float32 tensor");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = (float)a * ((const float *)x->data)[i] + {constant}.0f;
    return OPJIT_OK;
}}
"""
TVM = '''module = tvm_ffi.cpp.load_inline(name="scale", functions="scale", build_directory=tempfile.mkdtemp(), cpp_sources="""
void scale(tvm::ffi::TensorView x, double a, tvm::ffi::TensorView out)
{{
    TVM_FFI_ICHECK(x.dtype().code == kDLFloat && x.dtype().bits == 32 && x.IsContiguous()) << "scale takes a contiguous float32 tensor";
    for (int64_t i = 0; i < x.numel(); i++)
        static_cast<float *>(out.data_ptr())[i] = (float)a * static_cast<const float *>(x.data_ptr())[i] + {constant}.0f;
}}
""")'''
Side = Callable[[int], float]


def waits(client: NotebookClient, edited: str, use: str) -> Side:
    """A function that makes one edit and returns the seconds until its result is there."""

    def once(constant: int) -> float:
        cells = [
            nbformat.v4.new_code_cell(text) for text in (edited.format(constant=constant), use)
        ]
        client.nb.cells = cells
        start = perf_counter()
        for index, cell in enumerate(cells):
            client.execute_cell(cell, index)
        spent = perf_counter() - start
        printed = "".join(output.get("text", "") for output in cells[1].outputs)
        if printed != f"{2.0 + constant}\n":
            raise SystemExit(f"the cell's result is {printed!r}, not {2.0 + constant}")
        return spent

    return once


def measure(rounds: int) -> list[Row]:
    setup = nbformat.v4.new_code_cell(SETUP)
    book: Any = nbformat.v4.new_notebook(cells=[setup])
    client = NotebookClient(book, kernel_name="python3", timeout=300)
    with client.setup_kernel():
        client.execute_cell(setup, 0)
        sides = [
            waits(client, OPJIT, "print(scale(x, 2.0)[0].item())"),
            waits(client, TVM, "module.scale(x, 2.0, out); print(out[0].item())"),
        ]
        spent = [[side(constant) for side in sides] for constant in range(rounds + 1)][1:]
    ours, peer = ([times[side] for times in spent] for side in range(2))
    return [
        alone("an edited cell to its result", ours, 0.2),
        ratio("... against tvm-ffi's load_inline", ours, peer, 1 / 6),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="edits on each side")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(
            OPJIT_CACHE=f"{folder}/cache",
            TMPDIR=folder,
            IPYTHONDIR=f"{folder}/ipython",
            PATH=path_with_tools(),
        )
        rows = measure(rounds)
    show("From an edited notebook cell to its result (medians)", rows)


if __name__ == "__main__":
    main()
