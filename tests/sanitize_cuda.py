"""Every sample of every CUDA op under NVIDIA's compute-sanitizer: memory, races in shared memory, uninitialised reads.

    python tests/sanitize_cuda.py                                   all tools, every bundled op
    python tests/sanitize_cuda.py --tool memcheck --op allreduce    one tool, one op

The samples are made on the CPU and copied, so that hardly any kernel but the ops' runs under the tool, and torch's caching
allocator is off, so that each tensor is an allocation that the tool knows. Results are compared with the references.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.utils._pytree import tree_map

from opjit import api, backends, catalog, targets, toolchain

ROOT = Path(__file__).resolve().parents[1]
TOOLS = {
    "memcheck": ("--padding", "4096"),
    "racecheck": ("--racecheck-report", "all"),
    "initcheck": (),
}
FOUND = 86  # the exit code that says the tool found something


def find_sanitizer() -> str | None:
    """compute-sanitizer of the CUDA Toolkit, or on PATH."""
    nvcc = toolchain.find_nvcc(None)
    beside = [f"{nvcc.root}/bin/compute-sanitizer", f"{nvcc.root}/compute-sanitizer/compute-sanitizer"] if nvcc else []
    return next(filter(None, map(shutil.which, [*beside, "compute-sanitizer"])), None)


def sanitize(sanitizer: str, tool: str, names: list[str], folders: list[Path]) -> subprocess.CompletedProcess[str]:
    """Call the ops in a process of its own under a tool. They are built before: under the tool nothing but the kernels shall be slow.

    Args:
        folders: of ops to declare first, besides the bundled ones.
    """
    backend = backends.for_device("cuda")
    for name in names:
        api.entry(catalog.find(name), targets.here(backend))
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no", *TOOLS[tool], sys.executable,
               "-m", "tests.sanitize_cuda", "--child", *(f"--op={name}" for name in names), *(f"--folder={folder}" for folder in folders)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)


def _uploaded(value: object) -> object:
    """A tensor's copy on the GPU, with its strides and gaps, made without a kernel."""
    if not isinstance(value, torch.Tensor):
        return value
    storage = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).cuda().untyped_storage()
    return torch.empty(0, dtype=value.dtype, device="cuda").set_(storage, value.storage_offset(), value.shape, value.stride())


def call_samples(names: list[str]) -> None:
    """In the process under the tool."""
    for name in names:
        op, calls = catalog.find(name), 0
        for args, kwargs in op.sample("cpu"):
            result = op(*tree_map(_uploaded, args), **tree_map(_uploaded, kwargs))
            expected = op.plain(*args, **kwargs)
            torch.testing.assert_close(tree_map(lambda r: r.cpu(), result), expected, rtol=1e-2, atol=1e-1, equal_nan=True)
            calls += 1
        print(f"{name}: {calls} calls", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", dest="tools", choices=TOOLS, help="only this tool; may be repeated")
    parser.add_argument("--op", action="append", dest="names", help="only this op; may be repeated")
    parser.add_argument("--folder", action="append", default=[], type=Path, help="first declare the ops of this folder")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for folder in options.folder:
        catalog.declare_folder(folder)
    names = options.names or [op.qualified for op in catalog.all_ops() if "cuda" in op.backends()]
    if options.child:
        call_samples(names)
        return 0
    sanitizer = find_sanitizer()
    missing = "no compute-sanitizer: it comes with the CUDA Toolkit" if sanitizer is None else backends.for_device("cuda").available()
    if sanitizer is None or missing:
        print(f"nothing was checked: {missing}")
        return 1
    worst = 0
    for tool in options.tools or TOOLS:
        started = time.perf_counter()
        done = sanitize(sanitizer, tool, names, options.folder)
        print(f"{tool}: {'clean' if done.returncode == 0 else f'exit code {done.returncode}'}, {time.perf_counter() - started:.0f} s\n"
              f"{done.stdout[-4000:].strip()}", flush=True)
        worst = max(worst, done.returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
