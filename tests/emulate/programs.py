"""Programs with mistakes, compiled with the emulation's checks: a C++ library with a function run(mistake, kernel)."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from opjit import resources
from opjit.emulate import build
from opjit.emulate.translate import TranslatedFiles

HERE = Path(__file__).parent
# The kernel that each mistake is in.
PLANTED = {
    **dict.fromkeys((1, 2, 3, 4, 5, 6, 33), 1),
    **dict.fromkeys((7, 8, 9, 10), 2),
    **dict.fromkeys((11, 12, 13), 3),
    **dict.fromkeys((14, 15), 4),
    **dict.fromkeys((16, 17, 18), 5),
    **dict.fromkeys((19, 35), 6),
    **dict.fromkeys((20, 21), 7),
    **dict.fromkeys((22, 23), 8),
    24: 9,
    **dict.fromkeys((25, 26, 27), 10),
    28: 11,
    29: 12,
    **dict.fromkeys((30, 31), 13),
}
MORE = {
    **dict.fromkeys((1, 2, 3), 1),
    **dict.fromkeys((4, 5, 6), 2),
    7: 3,
    **dict.fromkeys((8, 9), 4),
    **dict.fromkeys((10, 11, 12), 5),
    **dict.fromkeys((13, 14), 6),
    15: 7,
    **dict.fromkeys((16, 17), 8),
    **dict.fromkeys((18, 19), 9),
    **dict.fromkeys((20, 21, 22), 10),
    **dict.fromkeys((23, 24), 11),
    25: 12,
    26: 13,
    **dict.fromkeys((27, 28), 14),
    **dict.fromkeys((29, 30), 15),
}


class Outcome(NamedTuple):
    """A call's result, and what was found."""

    right: bool
    findings: list[str]


@cache
def compiled(source: Path, folder: Path) -> Callable[[int, int, int], Outcome]:
    """Compile a program into a folder. Returns a function of a mistake, its kernel and a seed."""
    runtime = build.runtime()
    runtime.emu_set_patience.argtypes = (ctypes.c_double,)
    runtime.emu_finding.restype = ctypes.c_char_p
    translated = TranslatedFiles([str(HERE), resources.include_path()])
    main = folder / "program.cc"
    main.write_text(f'#include "{translated.add(source)}"\n')
    build.write_translated(translated, folder, {})
    library = folder / "program.so"
    flags = [f"-I{folder}/files", *build.compiler_flags(True)]
    link = ["-shared", f"-L{build.runtime_folder()}", f"-l:{build.RUNTIME}", "-lstdc++"]
    compiler = shutil.which("g++")
    assert compiler is not None
    subprocess.run([compiler, *flags, "-c", str(main), "-o", f"{main}.o"], check=True)
    subprocess.run([compiler, f"{main}.o", "-o", str(library), *link], check=True)
    program = ctypes.CDLL(str(library))
    program.run.restype = ctypes.c_bool

    def call(mistake: int, kernel: int, seed: int) -> Outcome:
        runtime.emu_set_checking(1)
        runtime.emu_set_seed(seed)
        runtime.emu_set_patience(0.3)
        runtime.emu_forget_findings()
        right = program.run(mistake, kernel)
        found = [runtime.emu_finding(i).decode() for i in range(runtime.emu_count_findings())]
        return Outcome(right, found)

    return call


def lines_of(source: Path, mistake: int) -> set[int]:
    """The lines of a program that are marked with a mistake's number."""
    lines = source.read_text(encoding="utf-8").splitlines()
    return {n for n, line in enumerate(lines, 1) if re.search(rf"// .*\bB{mistake}\b", line)}


def names_a_line(outcome: Outcome, source: Path, mistake: int) -> bool:
    """Whether a finding names a marked line."""
    named = re.findall(rf"(?:{re.escape(source.name)}:|line )(\d+)", "\n".join(outcome.findings))
    return bool(lines_of(source, mistake) & set(map(int, named)))
