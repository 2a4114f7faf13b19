"""opjit.build beside the builders of FlashInfer, SGLang and DeepSpeed, each with a module of its own project.

    python tests/benchmarks/builders.py [flashinfer] [sglang] [deepspeed]    minutes, as each side compiles up to four times
    python tests/benchmarks/builders.py imports                              what `import opjit; opjit.build` costs without torch

    cold       nothing is built: seconds of the request in a fresh process, and CPU seconds of all its compilers
    warm       the same request again in that process
    process    in a second process
    edit       a comment is added to a header of the project
    back       the comment is taken out again
    moved      the project lies at another path
    toolkit    the CUDA Toolkit at the same path is another version: "built" or "reused"; flashinfer#5145

The project is copied, so that a header can be edited. opjit's side calls `install` of the script in examples/13_any_library first. Packages
that are not installed are skipped. Without a GPU they build for sm_90a, and no kernel runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples/13_any_library"


class Project(NamedTuple):
    """A package, a header of it that the module includes, and whether CUDA code is compiled."""

    package: str
    header: str
    cuda: bool


PROJECTS = {
    "flashinfer": Project("flashinfer", "data/include/flashinfer/page.cuh", True),
    "sglang": Project("sglang", "kernels/jit/include/sgl_kernel/utils.h", True),
    "deepspeed": Project("deepspeed", "ops/csrc/includes/simd.h", False),
}


def flashinfer_request(side: str) -> Callable[[], object]:
    from flashinfer.jit import core
    from flashinfer.jit.page import gen_page_module

    if side == "opjit":  # what `opjit run` does
        from opjit import adapters

        adapters.replace_builder(core)
    request: Callable[[], object] = gen_page_module().build_and_load
    return request


def sglang_request(side: str) -> Callable[[], object]:
    import sglang_modules
    from sglang.kernels.jit.utils import load_jit, override_jit_cuda_arch

    if side == "opjit":
        sglang_modules.install()

    def load() -> object:
        with override_jit_cuda_arch(9, 0):
            return load_jit(
                "add_constant",
                "1",
                cuda_files=["elementwise/add_constant.cuh"],
                cuda_wrappers=[("add_constant", "add_constant<1>")],
            )

    return load


def deepspeed_request(side: str) -> Callable[[], object]:
    if side == "opjit":  # what `opjit run` does
        import torch.utils.cpp_extension

        from opjit import cpp_extension

        torch.utils.cpp_extension.load = cpp_extension.load
    from deepspeed.ops.op_builder import FusedAdamBuilder

    def load() -> object:
        FusedAdamBuilder._loaded_ops.clear()
        return FusedAdamBuilder().load(verbose=False)

    return load


def measured(name: str, side: str) -> None:
    """Print the seconds of a request, of one more, and the compilers' CPU seconds."""
    sys.path.insert(0, str(EXAMPLES))
    request = {
        "flashinfer": flashinfer_request,
        "sglang": sglang_request,
        "deepspeed": deepspeed_request,
    }[name](side)
    start = time.perf_counter()
    request()
    first = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    request()
    print(
        json.dumps(
            {
                "first": first,
                "again": time.perf_counter() - start,
                "cpu": used.ru_utime + used.ru_stime,
            }
        )
    )


def child(name: str, side: str, work: Path, place: Path) -> dict[str, Any]:
    """Run `measured` in a fresh process, with the project below `place` and the cache of a side below `work`; say whether it built."""
    paths = [str(place), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_HOME": str(work / "cuda"),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(work / side),
        "OPJIT_CACHE": str(work / side / "opjit"),
        "SGLANG_JIT_CACHE_DIR": str(work / side / "sglang"),
        "TORCH_EXTENSIONS_DIR": str(work / side / "torch"),
        "MAX_JOBS": "2",
        "LIBRARY_PATH": str(work / "stubs"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    before = libraries(work / side)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--measure", name, side],
        env=env,
        cwd=work,
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{name} through {side} failed:\n{done.stdout}\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**result, "built": libraries(work / side) != before}


def libraries(cache: Path) -> set[tuple[Path, int]]:
    """Return the libraries of a cache and when they were written. CPU time tells no build: DeepSpeed's probes take seconds, too."""
    return {(path, path.stat().st_mtime_ns) for path in cache.rglob("*.so")}


def toolkits(work: Path) -> None:
    """Make two CUDA Toolkits whose nvcc differs in what it prints as its version, and stubs that the real one may lack. `work`/cuda is the
    first of them."""
    nvcc = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").resolve()
    dryrun = subprocess.run(
        [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True, check=True
    ).stderr
    root = Path(
        next(
            line.partition("=")[2].strip()
            for line in dryrun.splitlines()
            if line.startswith("#$ TOP=")
        )
    ).resolve()
    for name, change in (
        ("cuda-a", "cat"),
        ("cuda-b", "sed -e 's/V13[.0-9]*/V13.9.99/; s/release 13.0/release 13.9/'"),
    ):
        (work / name / "bin").mkdir(parents=True)
        for path in root.iterdir():
            if path.name != "bin":
                (work / name / path.name).symlink_to(path)
        script = work / name / "bin/nvcc"
        script.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] || exec {root}/bin/nvcc "$@"\n{root}/bin/nvcc --version | {change}\n'
        )
        script.chmod(0o755)
        os.utime(script, (0, 0))
    (work / "cuda").symlink_to("cuda-a")
    (work / "stubs").mkdir()
    stub = [
        "cc",
        "-shared",
        "-nostdlib",
        "-Wl,-soname,libcuda.so.1",
        "-xc",
        os.devnull,
        "-o",
        f"{work}/stubs/libcuda.so",
    ]
    subprocess.run(stub, check=True)


def compare(name: str, project: Project) -> None:
    """Print a project's table."""
    found = importlib.util.find_spec(project.package)
    if found is None or found.origin is None:
        print(f"\n{name}: skipped, as the package is not installed")
        return
    sides = (name, "opjit")
    with tempfile.TemporaryDirectory(prefix="opjit-builders-") as folder:
        work = Path(folder)
        rows = list[tuple[str, list[dict[str, Any]]]]()
        toolkits(work)
        place = work / "first"
        shutil.copytree(Path(found.origin).parent, place / project.package, symlinks=True)

        def row(what: str) -> None:
            rows.append((what, [child(name, side, work, place) for side in sides]))

        row("cold")
        row("process")
        header = place / project.package / project.header
        before = header.read_bytes()
        header.write_bytes(before + b"\n// edited\n")
        row("edit")
        header.write_bytes(before)
        row("back")
        (work / "second").mkdir()
        place = (place / project.package).rename(work / "second" / project.package).parent
        row("moved")
        if project.cuda:
            (work / "cuda").unlink()
            (work / "cuda").symlink_to("cuda-b")
            row("toolkit")
    print(
        f"\n{name}: seconds of the request, CPU seconds of its compilers; {os.cpu_count()} CPUs\n\n{'':10}{name:>24}{'opjit':>24}"
    )
    print(
        "".join(
            f"{what:10}{''.join(f'{_shown(each):>24}' for each in both)}\n" for what, both in rows
        ),
        end="",
    )
    print(
        f"{'warm':10}"
        + "".join(
            f"{1e3 * median(both[side]['again'] for _, both in rows):>21.1f} ms" for side in (0, 1)
        )
    )


def _shown(each: dict[str, Any]) -> str:
    return f"{'built' if each['built'] else 'reused'} {each['first']:.2f} s, {each['cpu']:.1f}"


def imports() -> None:
    """Print the CPU milliseconds of imports, and of a request for a library that is built already."""
    request = (
        "opjit.build('adder', generated={'adder.c': 'int add(int a, int b) { return a + b; }'})"
    )
    clock = "import time; start = time.{0}(); {1}\nprint(json.dumps({{'ms': (time.{0}() - start) * 1e3}}))"
    codes = {
        "import opjit": clock.format("process_time", "import opjit"),
        "import opjit; opjit.build": clock.format("process_time", "import opjit; opjit.build"),
        "a warm request, again": f"import opjit; {request}; "
        + clock.format("perf_counter", request),
    }
    with tempfile.TemporaryDirectory(prefix="opjit-builders-") as cache:
        env = {
            **os.environ,
            "OPJIT_CACHE": cache,
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPATH": str(HERE.parents[1]),
        }
        for what, code in codes.items():
            times = [
                float(
                    json.loads(
                        subprocess.run(
                            [sys.executable, "-c", f"import json; {code}"],
                            env=env,
                            check=True,
                            capture_output=True,
                            text=True,
                        ).stdout
                    )["ms"]
                )
                for _ in range(15)
            ]
            print(f"{what:30}{median(times[1:]):6.1f} ms, at best {min(times):.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", help="; ".join([*PROJECTS, "imports"]))
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measured(*arguments.measure)
        return
    for name in arguments.what or [*PROJECTS, "imports"]:
        if name == "imports":
            imports()
        else:
            compare(name, PROJECTS[name])


if __name__ == "__main__":
    main()
