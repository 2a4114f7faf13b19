"""The flags of nvcc: for which part of a .cu file each is, and which an op's author may give."""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

DEVICE = "device"
HOST = "host"
BOTH = "both"
NEITHER = "neither"
FOLDER = "directory"  # of headers
NVCC = "nvcc"
LINE_INFO = frozenset({"-lineinfo", "--lineinfo", "-generate-line-info", "--generate-line-info"})


class NvccOnly(Exception):
    """The compilers in the place of nvcc do not support the code or a flag.

    The message is the reason.
    """


class NvccFlag(NamedTuple):
    """A flag, or several of one kind."""

    name: str  # a pattern
    value: str  # a pattern of what follows the name. A value that begins with = may be the next argument instead.
    part: str  # `NEITHER` has no meaning where other compilers replace nvcc, and `NVCC` none in other compilers
    author: str  # a pattern of the values that an op's author may give


# An empty pattern is (), and (?!) matches nothing.
_TABLE = r"""
    -[DU]                                         .*       both     [A-Za-z_]\w*([(=].*)?
    --?std                                        =.*      both     =c\+\+(17|2\d)
    -w                                            ()       both     ()
    -O                                            \d       host     [0-3]
    -W                                            .*       neither  [a-z][\w=-]*
    -Xcompiler                                    =.*      host     =[\w=.,+-]+
    --compiler-options                            =.*      host     (?!)
    -Xptxas                                       =.*      device   =[\w=,-]+
    --ptxas-options                               =.*      device   (?!)
    --?use_fast_math|--?restrict                  ()       device   ()
    --?extra-device-vectorization                 ()       device   ()
    --?lineinfo|--?generate-line-info             ()       device   ()
    --?(ftz|prec-div|prec-sqrt|fmad)              =\w+     device   =\w+
    --?maxrregcount                               =\d+     device   =\d+
    --?diag-(suppress|warn|error)                 =[\d,]+  device   =[\d,]+
    --split-compile|--frandom-seed                =\w+     device   (?!)
    -G                                            ()       device   (?!)
    --?(expt-)?relaxed-constexpr                  ()       neither  ()
    --?(expt-)?extended-lambda                    ()       nvcc     ()
    -Xcudafe                                      =.*      neither  =--diag_(suppress|remark|warning|error)=\w+
    -Xcudafe                                      =.*      neither  =--(display_error_number|promote_warnings)
    -gencode                                      =.*      neither  (?!)
    --generate-code|-arch|--gpu-architecture      =.*      nvcc     (?!)
    -I|-isystem|--include-path|--system-include   =?.+     directory  (?!)
    --threads|-t                                  =\d+     neither  (?!)
    -MD                                           ()       neither  (?!)
    -MF                                           =.*      neither  (?!)
    -ccbin|--compiler-bindir                      =.*      neither  (?!)
    -optf|--options-file|--?keep|--save-temps     .*       nvcc     (?!)
"""
FLAGS = [NvccFlag(*line.split()) for line in _TABLE.split("\n")[1:-1]]
OF_AUTHORS = "|".join(f"(?:{flag.name})(?:{flag.author})" for flag in FLAGS)
_WITH_VALUE = "|".join(flag.name for flag in FLAGS if flag.value.startswith("="))


def joined(words: Iterable[str]) -> Iterator[str]:
    """Yield each flag of a command line with its value in one argument."""
    waiting = iter(words)
    for word in waiting:
        yield f"{word}={next(waiting, '')}" if re.fullmatch(_WITH_VALUE, word) else word


def part_of(flag: str) -> str:
    """Return the part that a flag is for, or `NVCC` for a flag that is not in the table."""
    return next(
        (row.part for row in FLAGS if re.fullmatch(f"({row.name})({row.value})", flag)), NVCC
    )


def translated(flags: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return flags in the form for NVRTC and the host compiler.

    Raises NvccOnly for a flag that neither supports.
    """
    device = []
    host = []
    for flag in joined(flags):
        part = part_of(flag)
        (name, _, value) = flag.partition("=")
        if part in (NVCC, FOLDER):
            raise NvccOnly(f"NVRTC does not have the flag {flag}")
        if name in ("-Xcompiler", "--compiler-options"):
            host += value.split(",")
        elif name in ("-Xptxas", "--ptxas-options"):
            device += [f"--ptxas-options={each}" for each in value.split(",")]
        else:
            device += [_NVRTC.get(flag, flag)] if part in (DEVICE, BOTH) else []
            host += [flag] if part in (HOST, BOTH) else []
    return device, host


def for_nvcc(include: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Pass include folders to the host compiler, because nvcc splits -I at commas.

    It also splits the word after -Xcompiler, unless a backslash precedes the comma, and passes it
    through a second shell.
    """
    flags = [*(part for flag in include for part in ("-Xcompiler", flag)), *flags]
    return [
        re.sub(r'([\\",])', r"\\\1", shlex.quote(flag)) if before == "-Xcompiler" else flag
        for before, flag in zip(["", *flags], flags, strict=False)
    ]


_NVRTC = {"-G": "--device-debug", **dict.fromkeys(LINE_INFO, "--generate-line-info")}
