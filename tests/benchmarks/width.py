"""An extension of many heavy files takes as many compilers as memory and CPUs hold: none is killed, and no fixed width is faster.

    python tests/benchmarks/width.py --files 85 --cpus 16 --memory 24 --suffix .cu --widths 4,6,7,8,16      # as root

A control group has the memory, and a process's affinity the CPUs. Each width is MAX_JOBS of one build into an empty cache, with
torch/extension.h in each file; the last build has no number. The kernel counts, in the group, the compilers that it kills; a build that
lost one has failed, and is no peer. Without the right to make a group, the machine's own memory is the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Row, child, seconds, show

MAIN = '#include <torch/extension.h>\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("seven", [] { return 7; }); }\n'
FILE = "#include <torch/extension.h>\nat::Tensor add{number}(at::Tensor x) {{ return x + {number}; }}\n"
GIB = 1 << 30


def make_group(memory: float) -> Path | None:
    """Make a control group of either version with a limit on memory, below this process's own; None without the right."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        first = "memory" in controllers.split(",")
        group = Path(f"/sys/fs/cgroup/{'memory' if first else ''}{path}/opjit-width-{os.getpid()}")
        try:
            if first or number == "0":
                group.mkdir()
                (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(
                    str(int(memory * GIB))
                )
                return group
        except OSError:
            if group.exists():
                group.rmdir()
    return None


def killed(group: Path | None) -> int:
    """How many processes of a group the kernel has killed."""
    for name in ("memory.events", "memory.oom_control") if group else ():
        for line in (
            (group / name).read_text().splitlines() if group and (group / name).exists() else ()
        ):
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def run_once(folder: Path, group: str, cpus: int) -> dict[str, Any]:
    """In a fresh process: join the group, and build all files."""
    if group:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cpus])
    import opjit
    from opjit.errors import BuildError

    start = time.perf_counter()
    try:
        built = opjit.load("heavy", sorted(map(str, folder.glob("*.c*"))), fast=False).seven() == 7
    except BuildError as error:
        print(str(error)[:500], file=sys.stderr)
        built = False
    return {"seconds": time.perf_counter() - start, "built": built}


def measure(arguments: argparse.Namespace) -> list[Row]:
    group = make_group(arguments.memory)
    rows = list[Row]()
    best = float("inf")
    with tempfile.TemporaryDirectory() as root:
        sources = Path(root, "sources")
        sources.mkdir()
        (sources / "main.cpp").write_text(MAIN)
        for number in range(arguments.files - 1):
            (sources / f"file{number}{arguments.suffix}").write_text(FILE.format(number=number))
        for width in [*arguments.widths.split(","), ""]:
            lost = killed(group)
            env = {
                "OPJIT_CACHE": f"{root}/cache{width}",
                "TORCH_CUDA_ARCH_LIST": "9.0",
                "MAX_JOBS": width,
            }
            result = child(
                Path(__file__).resolve(),
                "--child",
                str(sources),
                str(group or ""),
                str(arguments.cpus),
                env=env,
            )
            lost = killed(group) - lost
            took = result["seconds"]
            ratio = f"{took / best:.2f}" if not width and best < float("inf") else ""
            met = not lost and result["built"] and took <= 1.1 * best
            rows.append(
                Row(
                    f"width {width}" if width else "opjit's own",
                    seconds(took),
                    f"{lost} killed",
                    ratio,
                    "" if width else "<= 1.1",
                    "" if width else "PASS" if met else "FAIL",
                )
            )
            best = min(best, took) if result["built"] and not lost else best
    if group:
        group.rmdir()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=85)
    parser.add_argument("--suffix", default=".cu", choices=[".cu", ".cpp"])
    parser.add_argument("--cpus", type=int, default=16)
    parser.add_argument("--memory", type=float, default=24, help="GiB of the control group")
    parser.add_argument("--widths", default="4,7,16", help="fixed widths to compare with")
    parser.add_argument(
        "--child", nargs=3, metavar=("FOLDER", "GROUP", "CPUS"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.child:
        print(
            json.dumps(
                run_once(Path(arguments.child[0]), arguments.child[1], int(arguments.child[2]))
            )
        )
        return
    show(
        f"{arguments.files} files of torch/extension.h in {arguments.memory:g} GiB",
        measure(arguments),
    )


if __name__ == "__main__":
    main()
