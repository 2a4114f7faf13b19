"""The sanitizers: gcc's for C, see sanitized.py, and compute-sanitizer's tools for CUDA, where
samples are copied from the CPU, so that almost only the op's kernels run, and torch's caching
allocator is off, so that each tensor is a separate allocation.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils._pytree import tree_map_only

from opjit import backends, processes, request, resources, wanted
from opjit.backends import targets
from opjit.builder import glue
from opjit.builder.compile_step import CompilerFailed, run_tool
from opjit.builder.runtime_objects import RUNTIME
from opjit.catalog import registry
from opjit.errors import BadSetting
from opjit.operators.op import Op
from opjit.recipe import toolchain
from opjit.recipe.libraries import arguments
from opjit.tensors import moved, storage_bytes
from opjit.testing.compare import Tolerance, assert_same
from opjit.testing.samples import Skipped, declared_samples, effects_in_place, expected_of

FOR_C = ("address", "undefined", "leak", "thread")
FOR_CUDA: dict[str, tuple[str, ...]] = {
    "memcheck": ("--padding", "4096"),
    "racecheck": ("--racecheck-report", "all"),
    "initcheck": (),
    "synccheck": (),
}
_LOOSE = Tolerance(1e-2, 1e-1)  # rounding is no matter here
FOUND = 86  # compute-sanitizer's exit code after it reported an error
_REPORT = r"^.*========= (?:Error|Warning|Invalid|Uninitialized|Potential|Barrier).*$"
# -fsanitize itself, and flags that the author gives, come later.
_FLAGS = """
    -std=gnu11 -O1 -g -fPIC -shared -fno-sanitize-recover=all -fno-omit-frame-pointer -fexceptions
    -fvisibility=hidden
"""


def parse_tools(text: str) -> list[str]:
    """``"address,undefined"`` as a list; ``"none"`` means an empty list. Raises BadSetting if a name is unknown."""
    names = [name for name in text.split(",") if name and text != "none"]
    for name in names:
        if name not in (*FOR_C, *FOR_CUDA):
            raise BadSetting(
                f"there is no sanitizer {name!r}; use {', '.join(FOR_C)} for C, and {', '.join(FOR_CUDA)} for CUDA"
            )
    return names


def instrumented(op: Op, names: Sequence[str], compiler: str, folder: Path) -> Path:
    """Build the op's CPU library with sanitizers, linked to this process's torch."""
    backend = backends.for_device("cpu")
    target = targets.here(backend)
    source = op.declaration.source(backend)
    headers = resources.folder("kernels_c")
    library = folder / "sanitized.so"
    sources = glue.write(op.schema, backend, source.name, folder)
    flags = op.declaration.flags(target)
    march = [flag for flag in flags.c if flag.startswith("-march=")]
    extra = op.declaration.flags_of_author
    sanitizers = f"-fsanitize={','.join(names)}"
    words = [
        compiler,
        *_FLAGS.split(),
        *march,
        *(extra.c if extra else ()),
        sanitizers,
        *(f"-I{path}" for path in (source.parent, headers, *flags.include)),
        *map(str, sources),
        *flags.sources,
        *(str(headers / name) for name in RUNTIME),
        "-o",
        str(library),
        f"-L{Path(torch.__file__).parent / 'lib'}",
        "-ltorch_cpu",
        *arguments(flags),
    ]
    try:
        run_tool(words, folder)
    except CompilerFailed as failed:
        raise AssertionError(
            f"the kernel does not compile with {sanitizers}: {str(failed).strip()}"
        ) from None
    return library


def need_declaration(folder: Path) -> None:
    """Raise Skipped unless another process can declare the op of a folder."""
    if not (folder / "op.py").is_file():
        raise Skipped(
            "the op needs an op.py, because the samples run in another process; add one to "
            f"{folder}"
        )


def python_path() -> str:
    """PYTHONPATH for a process that imports this opjit."""
    root = Path(__file__).resolve().parents[2]
    return f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)


def find_tool() -> str | None:
    """Return the path of compute-sanitizer, from the CUDA Toolkit, PATH or pip's packages."""
    nvcc = toolchain.find_nvcc(None)
    wheels = [str(path) for wheel in toolchain.cuda_wheels() for path in wheel.glob("cu*/bin")]
    folders = [os.environ.get("PATH", os.defpath), *wheels]
    if nvcc is not None:
        folders = [f"{nvcc.root}/bin", f"{nvcc.root}/compute-sanitizer", *folders]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def sanitize_op(op: Op, name: str) -> str:
    """Run one of compute-sanitizer's tools on an op's CUDA kernel. Returns the number of calls; raises Skipped where there is no tool."""
    tool = find_tool()
    if tool is None:
        install = toolchain.pip_install("sanitizer-api")
        raise Skipped(f"there is no compute-sanitizer; install the CUDA Toolkit, or {install}")
    # The samples make a group of ranks on the device of their tensors.
    if any(argument.name == "group" for argument in op.schema.arguments):
        raise Skipped("compute-sanitizer sees one process, and the op runs on a group of ranks")
    done = under_tool(tool, name, [op])
    if done.returncode == 0:
        return ", ".join(re.findall(r"^\S+: (\d+ calls)$", done.stdout, re.MULTILINE))
    report = re.search(_REPORT, done.stdout, flags=re.MULTILINE)
    message = report[0].strip("= ") if report else " ".join(done.stdout.strip().splitlines()[-1:])
    raise AssertionError(f"exit code {done.returncode}: {message}")


def command(tool: str, name: str) -> list[str]:
    """Return the words that run Python under one of compute-sanitizer's tools."""
    words = f"--tool {name} --error-exitcode {FOUND} --report-api-errors no"
    return [tool, *words.split(), *FOR_CUDA[name], sys.executable]


def under_tool(tool: str, name: str, ops: Sequence[Op]) -> subprocess.CompletedProcess[str]:
    """Call ops' samples under one of compute-sanitizer's tools.

    The ops are built first, because the compilers would be slow under it.
    """
    for op in ops:
        need_declaration(op.folder)
        request.entry(op, wanted.here(backends.for_device("cuda")))
    pairs = [text for op in ops for text in (str(op.folder), op.qualified)]
    own = {"PYTHONPATH": python_path(), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    words = [*command(tool, name), "-m", "opjit.testing.sanitize", *pairs]
    return processes.run_printing(words, env={**os.environ, **own})


def main(*ops: str) -> None:
    """Run the child process: call each sample.

    The arguments are pairs of an op's folder and name.
    """
    for folder, qualified in zip(ops[::2], ops[1::2], strict=True):
        registry.add_path(folder)
        op = registry.find(qualified)
        calls = declared_samples(op, "cpu")
        for sample in calls:
            on_gpu = sample.map(lambda t: moved(t, storage_bytes(t).cuda()))  # without a kernel
            found = tree_map_only(torch.Tensor, torch.Tensor.cpu, effects_in_place(op, op, on_gpu))
            assert_same(found, expected_of(op, sample), sample, within=_LOOSE)
        print(f"{qualified}: {len(calls)} calls", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
