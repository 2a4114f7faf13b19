"""Compilers that tests replace, wrap or hide."""

import functools
import os
import re
import subprocess
import tempfile
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest

from opjit.cpp_extension import autograd_part
from opjit.declare import cpp_autograd
from opjit.recipe import toolchain
from opjit.store import elf


def program(path: Path, text: str) -> Path:
    """An executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    path.chmod(0o755)
    return path


def real_compiler() -> str:
    found = toolchain.find_compiler(None)
    assert found is not None
    return os.path.realpath(found.path)


@functools.cache
def shares_libstdcxx(compiler: str) -> bool:
    """Whether a C++ compiler is there and links libstdc++ as a shared library: with another copy of it torch's own extensions crash."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "text.so"
        text = (
            "#include <string>\nstd::string text(int number) { return std::to_string(number); }\n"
        )
        with suppress(OSError):
            subprocess.run(
                [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)],
                input=text.encode(),
                capture_output=True,
                check=False,
            )
        return library.exists() and any(
            name.startswith(("libstdc++.", "libc++."))
            for name in elf.inspect(library.read_bytes()).needed
        )


def fake_compiler(path: Path, before: str = "", after: str = "") -> Path:
    """A compiler that is the real one, with shell commands before and after; in them ``$1`` … are its arguments."""
    assert real_compiler() != str(path), "it would run itself for ever"
    return program(
        path, f"#!/bin/sh\n{before}\n'{real_compiler()}' \"$@\"\ncode=$?\n{after}\nexit $code\n"
    )


# True in a fake compiler when it compiles an op's glue (not when it is asked who it is, compiles the runtime, or links).
COMPILES = 'case " $* " in *" -c "*opjit_glue.c*) true;; *) false;; esac'
# True when it makes an op's library from objects.
LINKS = 'case " $* " in *" -ltorch_cpu "*) true;; *) false;; esac'
# Sets $out to the file that the compiler is asked for.
OUTPUT = 'out=; previous=; for word in "$@"; do if [ "$previous" = -o ]; then out=$word; fi; previous=$word; done'
# What a compiler may leave there and report success all the same.
LIES = {
    "missing": 'rm -f "$out"',
    "empty": ': > "$out"',
    "text": 'echo hello > "$out"',
    "half-an-elf": 'head -c 100 "$out" > "$out.x"; mv "$out.x" "$out"',
    "an-elf-without-sections": "printf '\\177ELF\\002\\001\\001' > \"$out\"",
    "an-executable": 'cp "{python}" "$out"',
    "no-symbols": "echo | '{compiler}' -shared -nostdlib -Wl,-rpath,'$ORIGIN' -o \"$out\" -x c -",
}


def fake_nvcc(path: Path, build_version: str) -> None:
    """An nvcc that says which one it is, and no more; it takes the place of another at one stroke."""
    release = re.sub(r"V(\d+\.\d+).*", r"\1", build_version)
    program(
        path.with_name("new"),
        f"""\
        #!/bin/sh
        case "$*" in
        --version) echo 'Cuda compilation tools, release {release}, {build_version}';;
        *) echo '#$ TOP={path.parents[1]}' >&2;;
        esac
        """,
    ).replace(path)


def no_compiler(tmp: Path) -> dict[str, str | None]:
    """An environment without any compiler or build tool."""
    empty = tmp / "no-tools"
    empty.mkdir(exist_ok=True)
    return {"PATH": str(empty), "CC": None, "CXX": None, "CUDA_HOME": str(empty), "CUDA_PATH": None}


def elsewhere(tmp: Path) -> dict[str, str | None]:
    """An environment without compilers and without a cache that has anything."""
    return {**no_compiler(tmp), "OPJIT_CACHE": str(tmp / "no-cache"), "OPJIT_OFFLINE": "1"}


def no_nvcc(patch: pytest.MonkeyPatch) -> None:
    """As on a machine without the CUDA Toolkit."""
    patch.setattr(toolchain, "find_nvcc", lambda notes: None)


def no_nvrtc(patch: pytest.MonkeyPatch) -> None:
    """As on a machine whose torch has no NVRTC."""
    patch.setattr(toolchain, "find_nvrtc", lambda runtime, notes: None)


def take_cpp_autograd(patch: pytest.MonkeyPatch) -> None:
    """Give each op that this process loads autograd's kernel in C++, which is compiled once for the cache of all tests."""
    autograd_part.make()
    entry = cpp_autograd.find_entry()
    assert entry is not None
    patch.setattr(cpp_autograd, "find_entry", lambda: entry)
    patch.setattr(cpp_autograd, "is_on", lambda switch, **_: switch == "OPJIT_CPP_AUTOGRAD")
