"""The compilers: where they are and who they are.

A compiler is known by what it prints for its version and target, not by its path or date; asking costs a process, so the
answer is kept in the cache under the executable's path, size, modification time and inode.
"""

import hashlib
import importlib
import json
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from opjit import files, forks
from opjit.errors import ToolMissing


class Compiler(NamedTuple):
    """The C compiler.

    Attributes:
        path: as the build calls it.
        version: such as ``"gcc version 12.2.0 (Debian 12.2.0-14+deb12u1)"``.
        machine: the triple it compiles for.
        includes: the folders it searches by itself, joined by ``:``.
    """

    path: str
    version: str
    machine: str
    includes: str


class Nvcc(NamedTuple):
    """The CUDA toolkit.

    Attributes:
        root: the folder that holds bin/nvcc, found by asking nvcc: the one on PATH may be a wrapper script.
        version: such as ``"13.0"``.
        build: the full version, such as ``"V13.0.88"``.
    """

    root: str
    version: str
    build: str


# What in the environment would change a compiler's output behind the key's back.
NEUTRAL = {"LC_ALL": "C", **dict.fromkeys(
    ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "LD_RUN_PATH", "DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES",
     "CUDA_INC_PATH", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN"))}


def find_compiler(memory: Path | None) -> Compiler | None:
    """$CC, else gcc, cc or clang on PATH; None if there is none."""
    chosen = os.environ.get("CC")
    for name in [chosen] if chosen else ["gcc", "cc", "clang"]:
        path = shutil.which(name)
        if path:
            return _compiler(memory, "cc", path, _ask_compiler)
    return None


def find_cxx(memory: Path | None) -> Compiler | None:
    """$CXX, else c++, which torch's extension builder calls; None if it is not there."""
    path = shutil.which(os.environ.get("CXX", "c++"))
    return _compiler(memory, "cxx", path, _ask_cxx) if path else None


def _compiler(memory: Path | None, kind: str, found: str, ask: Callable[[str], dict[str, str]]) -> Compiler:
    path = os.path.abspath(found)  # the build runs in another folder
    return Compiler(path, **_remembered(memory, kind, path, ("version", "machine", "includes"), ask))


def find_nvcc(memory: Path | None) -> Nvcc | None:
    """nvcc of $CUDA_HOME, on PATH, or in /usr/local/cuda; None if there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    for name in ([f"{home}/bin/nvcc"] if home else []) + ["nvcc", "/usr/local/cuda/bin/nvcc"]:
        path = shutil.which(name)
        if path:
            return Nvcc(**_remembered(memory, "nvcc", os.path.abspath(path), ("root", "version", "build"), _ask_nvcc))
    return None


def find_ninja() -> str | None:
    """The folder of ninja's executable: on PATH, or of the ninja package beside this Python."""
    path = shutil.which("ninja")
    if path:
        return os.path.dirname(path)
    try:
        import ninja
    except ImportError:
        return None
    return str(ninja.BIN_DIR)


def require_compiler(memory: Path | None) -> Compiler:
    compiler = find_compiler(memory)
    if compiler is None and os.environ.get("CC"):
        raise ToolMissing("cc", f"CC is {os.environ['CC']!r}, which is no program that can be run; set it to the path of a gcc or clang, "
                                "without options, or unset it")
    if compiler is None:
        raise ToolMissing("cc", "no C compiler: opjit looked for $CC, gcc, cc and clang on PATH; install one (Debian and Ubuntu: "
                                "apt install gcc) or point OPJIT_CACHE at a cache that holds the built op")
    return compiler


def require_cxx(memory: Path | None) -> Compiler:
    compiler = find_cxx(memory)
    if compiler is None and os.environ.get("CXX"):
        raise ToolMissing("c++", f"CXX is {os.environ['CXX']!r}, which is no program that can be run; set it to the path of a g++ or "
                                 "clang++, without options, or unset it")
    if compiler is None:
        raise ToolMissing("c++", "no C++ compiler: torch's extension builder calls $CXX, else c++ on PATH; install one (Debian and Ubuntu: "
                                 "apt install g++) or point OPJIT_CACHE at a cache that holds the built extension")
    return compiler


def require_nvcc(memory: Path | None) -> Nvcc:
    nvcc = find_nvcc(memory)
    if nvcc is None:
        raise ToolMissing("nvcc", "no nvcc: opjit looked in $CUDA_HOME, on PATH and in /usr/local/cuda; install the CUDA Toolkit "
                                  "(CUDA ops are compiled by it; no GPU is needed to build)")
    return nvcc


def require_ninja() -> str:
    folder = find_ninja()
    if folder is None:
        raise ToolMissing("ninja", "no ninja: torch's extension builder needs it; pip install ninja")
    return folder


def _remembered(memory: Path | None, kind: str, path: str, names: tuple[str, ...],
                ask: Callable[[str], dict[str, str]]) -> dict[str, str]:
    """What `ask` found out about the executable, from the note in the cache if it is still the same file."""
    real = os.path.realpath(path)
    status = os.stat(real)
    stamp = [real, status.st_size, status.st_mtime_ns, status.st_ino]
    note = memory / f"{kind}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}.json" if memory else None
    if note is not None:
        try:
            known = json.loads(note.read_bytes()) if files.distrusted(note) is None else {}
            if known["stamp"] == stamp:
                return {name: str(known["found"][name]) for name in names}
        except (OSError, ValueError, KeyError, TypeError):
            pass  # no note, or not one of ours: ask
    found = ask(path)
    if note is not None:
        files.write_note(note, json.dumps({"stamp": stamp, "found": found}))
    return found


def _run(*command: str, meanwhile: Callable[[], object] | None = None) -> str:
    """What a command prints; `meanwhile` is done while it runs."""
    with forks.importing():
        from opjit import commands

    environment = {name: value for name, value in {**os.environ, **NEUTRAL}.items() if value is not None}
    logging.getLogger("opjit").debug("%s", " ".join(command))
    try:
        return str(commands.run(command, meanwhile=meanwhile, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                errors="replace", env=environment, stdin=subprocess.DEVNULL).stdout)
    except OSError as error:
        return str(error)


def _prepare_build() -> None:
    """Import what a build needs: a compiler that this cache does not know has built nothing in it."""
    with forks.importing():
        from opjit import build

        with build.without_collection():
            importlib.import_module("opjit.lock")


def _ask_cxx(path: str) -> dict[str, str]:
    return _ask_compiler(path, "c++")


def _ask_compiler(path: str, language: str = "c") -> dict[str, str]:
    text = _run(path, "-v", "-E", "-x", language, os.devnull, meanwhile=_prepare_build)
    machine = re.search(r"^Target: (.+)$", text, re.MULTILINE)
    version = re.search(r"^(.*\b(?:gcc|clang) version .+)$", text, re.MULTILINE)
    if machine is None or version is None:
        name, variable = ("cc", "CC") if language == "c" else ("c++", "CXX")
        raise ToolMissing(name, f"{path} is not a gcc or clang that works: `{path} -v` printed {text.strip()[:200]!r}; "
                                f"set {variable} to one")
    searched = re.search(r"#include <\.\.\.> search starts here:\n(.*?)End of search list", text, re.DOTALL)
    includes = [os.path.realpath(line.strip()) for line in searched[1].splitlines()] if searched else []
    return {"version": version[1].strip(), "machine": machine[1].strip(), "includes": ":".join(includes)}


def _ask_nvcc(path: str) -> dict[str, str]:
    text = ""

    def ask_version() -> None:
        nonlocal text
        text = _run(path, "--version")
        _prepare_build()

    dryrun = _run(path, "--dryrun", "-E", "-x", "cu", os.devnull, meanwhile=ask_version)
    release = re.search(r"release (\d+\.\d+), (V[\d.]+)", text)
    root = re.search(r"^#\$ TOP=(.+)$", dryrun, re.MULTILINE)
    if release is None or root is None:
        raise ToolMissing("nvcc", f"{path} is not an nvcc that works: `{path} --version` printed {text.strip()[:200]!r}")
    return {"root": os.path.realpath(root[1].strip()), "version": release[1], "build": release[2]}


def identity(compiler: Compiler, nvcc: Nvcc | None) -> dict[str, str]:
    """What enters an op's key: who compiles, not from where."""
    who = {"cc.version": compiler.version, "cc.machine": compiler.machine}
    if nvcc is not None:
        who["nvcc.build"] = nvcc.build
    return who
