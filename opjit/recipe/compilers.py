"""The compilers as data, how opjit runs them, and the version and target that each prints."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from opjit import files, processes, progress
from opjit.errors import BadSetting, ToolMissing

if TYPE_CHECKING:
    import subprocess

    from opjit.backends import DeviceCompiler


class Compiler(NamedTuple):
    """The C compiler: its absolute path, ``"gcc version 12.2.0 (Debian …)"``, the target triple, and folders of headers and of libraries,
    joined by ``:``; what assembler and linker print for their versions; and the commands of a compiler that is a script."""

    path: str
    version: str
    machine: str
    includes: str
    libraries: str = ""
    binutils: str = ""
    script: str = ""


class Nvcc(NamedTuple):
    """The CUDA toolkit: the folder with bin/nvcc, which nvcc prints because PATH may have a
    wrapper; ``"13.0"``; ``"V13.0.88"``; and the architectures that it supports, ``"sm_75
    sm_80 …"``.
    """

    root: str
    version: str
    build: str
    archs: str = ""


class DeviceCompilerInfo(NamedTuple):
    """The compiler of a device: its absolute path, the first line of its version, and its
    SHA-256.
    """

    path: str
    version: str
    sha256: str


class Nvrtc(NamedTuple):
    """NVIDIA's compiler as a library, from pip or from the CUDA Toolkit: libnvrtc.so, the folders of CUDA's headers, joined by ``:``, and
    the folder of libcudart.so. NVRTC reports no build number, so its version has a digest of its files' names and sizes."""

    library: str
    headers: str
    runtime: str
    version: str

    def as_toolkit(self, work: Path) -> str:
        """Make a folder that is laid out as the CUDA Toolkit's, without programs, for builds that look there. Returns its path."""
        root = work / "toolkit"
        if root.exists():
            return str(root)
        for folder in ("include", "lib64"):
            (root / folder).mkdir(parents=True)
        library = next(Path(self.runtime).glob("libcudart.so.[0-9]*"))
        (root / "lib64/libcudart.so").symlink_to(library)
        found = [entry for folder in self.headers.split(":") for entry in os.scandir(folder)]
        for name, path in {entry.name: entry.path for entry in reversed(found)}.items():
            (root / "include" / name).symlink_to(path)
        return str(root)


_TIME_LIMIT = "3600"  # seconds; the longest builds of CUDA templates last minutes


_WRITTEN = 1.0  # seconds until a program that is being written counts as broken
ASSEMBLED = ".assembled"  # the end of the names of an assembler's lists


# Variables that change what tools read or write. Builds run without them, but extensions, which torch's users give some: see HONOURED.
_UNSET = """
    COMPILER_PATH CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH CUDA_INC_PATH DEPENDENCIES_OUTPUT
    GCC_EXEC_PREFIX LD_RUN_PATH LIBRARY_PATH NVCC_APPEND_FLAGS NVCC_CCBIN NVCC_PREPEND_FLAGS
    SOURCE_DATE_EPOCH SUNPRO_DEPENDENCIES
"""


NEUTRAL: dict[str, str | None] = {
    "LC_ALL": "C",
    **dict.fromkeys(_UNSET.split()),
}


# Variables that tools of an extension see; its key contains their values.
HONOURED = (
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "C_INCLUDE_PATH",
    "LIBRARY_PATH",
    "NVCC_APPEND_FLAGS",
    "NVCC_PREPEND_FLAGS",
    "SOURCE_DATE_EPOCH",
)


def honoured() -> dict[str, str]:
    """Return the variables that tools of an extension see."""
    return {name: os.environ[name] for name in HONOURED if os.environ.get(name)}


def which(name: str) -> str | None:
    """Return a program's path like shutil.which, but ten times faster, because each request for
    an op searches for three programs.
    """
    if os.sep in name:
        return name if _is_program(name) else None
    path = os.environ.get("PATH", os.defpath)
    places = (os.path.join(folder or os.curdir, name) for folder in path.split(os.pathsep))
    return next(filter(_is_program, places), None)


def _is_program(path: str) -> bool:
    return os.access(path, os.X_OK) and os.path.isfile(path)


def is_script(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) != b"\x7fELF"


def run_compiler(
    command: Sequence[str], work: Path | None = None, honours: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a compiler without the variables that change its output, or with the variables that
    `honours` the table; stdout includes stderr.

    Raises ToolMissing if the tool is not on PATH.
    """

    progress.logger().debug("%s", " ".join(command))
    given = {**os.environ, **NEUTRAL, **(honoured() if honours else {})}
    if honours and work is not None:  # ccache then finds it in any other private folder
        given |= {"CCACHE_BASEDIR": str(work), "CCACHE_NOHASHDIR": "1"}
    environment = {name: value for name, value in given.items() if value is not None}
    try:
        return processes.run_printing(command, cwd=work, env=environment, limit=time_limit())
    except FileNotFoundError as error:
        if error.filename != command[0] or os.sep in command[0]:
            raise
        raise ToolMissing(
            command[0],
            f"no {command[0]} on PATH, which a build with this compiler needs; install binutils (Debian and "
            "Ubuntu: apt install binutils)",
        ) from None


def time_limit() -> float:
    """Return the time limit for each tool of a build in seconds; 0 for no limit.

    Raises BadSetting if OPJIT_TIMEOUT is not a number.
    """
    setting = os.environ.get("OPJIT_TIMEOUT", "").strip() or _TIME_LIMIT
    try:
        seconds = float(setting)
    except ValueError:
        seconds = -1
    if not 0 <= seconds < threading.TIMEOUT_MAX:
        raise BadSetting(
            f"OPJIT_TIMEOUT is {setting!r}; expected seconds, such as 600, or 0 for no limit"
        )
    return seconds


def dependency_flags(compiler: Compiler, name: str) -> list[str]:
    """Return the flags that make gcc's assembler list the files that it reads, including
    .incbin, as ``<name>.assembled``; clang has none.
    """
    return [f"-Wa,--MD,{name}{ASSEMBLED}"] if "gcc version" in compiler.version else []


def refuse_full_disk(output: str, work: Path) -> None:
    if any(os.strerror(code) in output for code in (errno.ENOSPC, errno.EDQUOT)):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(work))


def _output(*command: str) -> str:
    """Return what a program prints, or why it does not start."""
    until = time.monotonic() + _WRITTEN
    while True:
        try:
            return run_compiler(command).stdout
        except OSError as error:
            if error.errno != errno.ETXTBSY or time.monotonic() > until:
                return str(error)
        time.sleep(0.01)


def probe_compiler(path: str, language: str = "c") -> Compiler:
    text = _output(path, "-v", "-E", "-x", language, os.devnull)
    machine = re.search(r"^Target: (\S+)", text, re.MULTILINE)
    version = re.search(r"^(.*\b(?:gcc|clang) version .+)$", text, re.MULTILINE)
    if machine is None or version is None:
        name, variable = ("cc", "CC") if language == "c" else ("c++", "CXX")
        raise ToolMissing(
            name,
            f"{path} is not a working gcc or clang: `{path} -v` printed {text.strip()[:200]!r}; "
            f"set {variable} to one",
        )
    searched = re.search(
        r"#include <\.\.\.> search starts here:\n(.*?)End of search list", text, re.DOTALL
    )
    includes = (
        [os.path.realpath(line.strip()) for line in searched[1].splitlines()] if searched else []
    )
    commands = planned_commands(path, language)
    libraries = re.search(r"^LIBRARY_PATH=(.+)$", commands, re.MULTILINE)
    folders = libraries[1].split(":") if libraries else []
    found = dict.fromkeys(os.path.realpath(folder) for folder in folders if os.path.isdir(folder))
    binutils = ", ".join(_program_version(path, name) for name in ("as", "ld"))
    return Compiler(
        path,
        version[1].strip(),
        machine[1],
        ":".join(includes),
        ":".join(found),
        binutils,
        "script" if is_script(path) else "",
    )


def _program_version(compiler: str, name: str) -> str:
    """Return the version that the assembler or linker of a compiler prints."""
    program = which(_output(compiler, f"-print-prog-name={name}").strip())
    if not program:
        return ""
    script = f" {files.digest(program)}" if is_script(program) else ""
    return _output(program, "--version").partition("\n")[0] + script


def planned_commands(path: str, language: str) -> str:
    """Return the commands that a compiler would run, without the names of temporary files."""
    said = _output(path, "-###", "-x", language, os.devnull, "-o", os.devnull)
    # A word that is quoted may have blanks.
    return re.sub(r'"[^"]*/cc\w{6}\b[.\w]*"|\S*/cc\w{6}\b[.\w]*', "<temporary>", said)


def probe_nvcc(path: str) -> Nvcc:
    text = _output(path, "--version")
    dryrun = _output(path, "--dryrun", "-E", "-x", "cu", os.devnull)
    release = re.search(r"release (\d+\.\d+), (V[\d.]+)", text)
    root = re.search(r"^#\$ TOP=(.+)$", dryrun, re.MULTILINE)
    if release is None or root is None:
        raise ToolMissing(
            "nvcc",
            f"{path} is not a working nvcc: `{path} --version` printed {text.strip()[:200]!r}; put another "
            "one on PATH, or set CUDA_HOME",
        )
    archs = re.findall(r"^sm_\w+$", _output(path, "--list-gpu-code"), re.MULTILINE)
    return Nvcc(os.path.realpath(root[1].strip()), release[1], release[2], " ".join(archs))


def probe_device_compiler(path: str, wanted: DeviceCompiler) -> DeviceCompilerInfo:
    command = [path, *wanted.version]
    try:
        done = run_compiler(command)
        lines = done.stdout.strip().splitlines()
        failed = done.returncode != 0
    except OSError as error:
        lines = [str(error)]
        failed = True
    if failed or not lines:
        printed = f"printed {' '.join(lines)[:200]!r}" if lines else "printed nothing"
        raise ToolMissing(
            wanted.command,
            f"{path} is not a working compiler: `{' '.join(command)}` {printed}; {wanted.install}",
        )
    return DeviceCompilerInfo(path, lines[0], files.digest(path))
