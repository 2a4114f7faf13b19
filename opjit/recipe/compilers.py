"""The compilers as data, how opjit runs them, and the version and target that each prints."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from opjit import files, processes, progress
from opjit.backends import DeviceCompiler
from opjit.errors import BadSetting, ToolMissing
from opjit.recipe import recorder

if TYPE_CHECKING:
    import subprocess


class Compiler(NamedTuple):
    """The C compiler: its absolute path, ``"gcc version 12.2.0 (Debian …)"``, the target triple, folders of headers and of libraries,
    joined by ``:``, and a digest of all programs and scripts that compile and link an empty file."""

    path: str
    version: str
    machine: str
    includes: str
    libraries: str = ""
    programs: str = ""


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
# Variables that change what tools read, write or print. Builds run without them, but extensions, which torch's users give some: see
# HONOURED. Any other variable that a tool asks for is part of the key.
_UNSET = (
    "COMPILER_PATH",
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "CUDA_INC_PATH",
    "DEPENDENCIES_OUTPUT",
    "GCC_EXEC_PREFIX",
    "LD_RUN_PATH",
    "LIBRARY_PATH",
    "NVCC_APPEND_FLAGS",
    "NVCC_CCBIN",
    "NVCC_PREPEND_FLAGS",
    "SOURCE_DATE_EPOCH",
    "SUNPRO_DEPENDENCIES",
    "COLUMNS",
    "GCC_COLORS",
    "GCC_URLS",
    "LANG",
    "LANGUAGE",
    "LC_MESSAGES",
    "MAKEFLAGS",
    "TERM",
    "TERM_URLS",
)
NEUTRAL: dict[str, str | None] = {
    "LC_ALL": "C",
    "CCACHE_NODIRECT": "1",  # with it, ccache preprocesses for each hit, so that all questions are recorded
    "TORCH_NO_COMPILER_WRAPPER": "1",  # torch would run any ccache that it finds
    **dict.fromkeys(_UNSET),
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


def _is_program(path: str) -> bool:
    return os.access(path, os.X_OK) and os.path.isfile(path)


def is_script(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) != b"\x7fELF"


def run_compiler(
    command: Sequence[str], work: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a compiler without the variables that change its output; stdout includes stderr. In a folder `work`, its questions are recorded.

    Raises ToolMissing if the tool is not on PATH.
    """

    progress.logger().debug("%s", " ".join(command))
    log = work and work / recorder.LOG
    given = environment(log=log)
    try:
        done = processes.run_printing(command, cwd=work, env=given, limit=time_limit())
    except FileNotFoundError as error:
        if error.filename != command[0] or os.sep in command[0]:
            raise
        raise ToolMissing(
            command[0],
            f"no {command[0]} on PATH, which a build with this compiler needs; install binutils (Debian and "
            "Ubuntu: apt install binutils)",
        ) from None
    if done.returncode and log is not None:
        recorder.refuse_endless([log])
    done.stdout = recorder.without_complaints(done.stdout)
    return done


def environment(honours: bool = False, log: Path | None = None) -> dict[str, str]:
    """Return the variables for a tool whose questions are recorded in `log`: with those of HONOURED, or without."""
    given = {**os.environ, **NEUTRAL, **(honoured() if honours else {})}
    if log is not None:
        given |= recorder.watching(log)
        folder = str(log.parent)  # private, so no tool lists a folder of other programs
        # ccache then finds an object of any other private folder.
        given |= {"TMPDIR": folder, "CCACHE_BASEDIR": folder, "CCACHE_NOHASHDIR": "1"}
    return {name: value for name, value in given.items() if value is not None}


def time_limit() -> float:
    """Return the time limit in seconds of a tool, or of all commands that ninja runs for a build; 0 for no limit.

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


def refuse_full_disk(output: str, work: Path) -> None:
    if any(os.strerror(code) in output for code in (errno.ENOSPC, errno.EDQUOT)):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(work))


def _output(work: Path, *command: str) -> str:
    """Return what a program prints, or why it does not start."""
    until = time.monotonic() + _WRITTEN
    while True:
        try:
            return run_compiler(command, work).stdout
        except OSError as error:
            if error.errno != errno.ETXTBSY or time.monotonic() > until:
                return str(error)
        time.sleep(0.01)


def probe_compiler(path: str, work: Path, language: str = "c") -> Compiler:
    """Ask a compiler for its version, by the compilation of an empty file in the folder `work`. Raises ToolMissing."""
    made = ["-shared", "-nostdlib", "-o", str(work / "empty.so")]
    text = _output(work, path, "-v", "-x", language, os.devnull, *made)
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
    libraries = re.search(r"^LIBRARY_PATH=(.+)$", text, re.MULTILINE)
    return Compiler(
        path,
        version[1].strip(),
        machine[1],
        _real_folders(searched[1].splitlines() if searched else []),
        _real_folders(libraries[1].split(":") if libraries else []),
        _digest_of_programs(work),
    )


def _real_folders(named: Iterable[str]) -> str:
    real = (os.path.realpath(folder.strip()) for folder in named)
    return ":".join(dict.fromkeys(folder for folder in real if os.path.isdir(folder)))


def _digest_of_programs(work: Path) -> str:
    """Return a digest of the programs and scripts that ran in a folder, behind links, launchers and wrappers."""
    record = recorder.read([work / recorder.LOG])
    scripts = {path for path in filter(_is_program, record.opened) if is_script(path)}
    named = {(os.path.basename(path), files.digest(path)) for path in scripts}
    for path, signature in record.programs.items():
        if os.path.isfile(path) and ".so" not in path:
            named.add((os.path.basename(path), recorder.digest_of_program(path, signature)))
    return files.sha256(repr(sorted(named)))


def probe_nvcc(path: str, work: Path) -> Nvcc:
    text = _output(work, path, "--version")
    dryrun = _output(work, path, "--dryrun", "-E", "-x", "cu", os.devnull)
    release = re.search(r"release (\d+\.\d+), (V[\d.]+)", text)
    root = re.search(r"^#\$ TOP=(.+)$", dryrun, re.MULTILINE)
    if release is None or root is None:
        raise ToolMissing(
            "nvcc",
            f"{path} is not a working nvcc: `{path} --version` printed {text.strip()[:200]!r}; put another "
            "one on PATH, or set CUDA_HOME",
        )
    archs = re.findall(r"^sm_\w+$", _output(work, path, "--list-gpu-code"), re.MULTILINE)
    return Nvcc(os.path.realpath(root[1].strip()), release[1], release[2], " ".join(archs))


def probe_device_compiler(path: str, work: Path, wanted: DeviceCompiler) -> DeviceCompilerInfo:
    command = [path, *wanted.version]
    try:
        done = run_compiler(command, work)
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
