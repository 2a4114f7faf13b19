"""Compares macros of light headers with those of torch/extension.h, for programs whose preprocessor asks for one."""

from __future__ import annotations

import re
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from opjit.builder import runtime_objects
from opjit.cpp_extension.light import headers
from opjit.recipe.toolchain import Compiler

_NAME = "macros.h"
_DEFINED = re.compile(r"^#define (\w+)(.*)$", re.MULTILINE)


def different(words: Iterable[str], folders: Sequence[str], base: Path, cxx: Compiler) -> list[str]:
    """Return the words that torch/extension.h defines as another macro than light headers.

    Args:
        folders: of light headers.
        base: folder of the store, which keeps the macros of torch/extension.h.

    Raises:
        BuildError: the compiler failed.
        OSError: the folder is not writable.
    """
    content = ["macros", torch.__version__, str(torch.version.git_version), sysconfig.get_config_var("SOABI"), cxx.version, cxx.machine]
    place = runtime_objects.kept(base, content, (_NAME,), lambda staged: _write([], staged, cxx))
    theirs = _macros(place / _NAME)
    with tempfile.TemporaryDirectory() as folder:
        _write(folders, Path(folder), cxx)
        light = _macros(Path(folder, _NAME))
    return sorted(word for word in words if theirs.get(word) != light.get(word))


def _write(folders: Sequence[str], staged: Path, cxx: Compiler) -> None:
    (staged / "program.cpp").write_text("#include <torch/extension.h>\n")
    places = (*folders, headers.INCLUDE, headers.INCLUDE / headers.API, sysconfig.get_path("include"))
    flags = ["-std=c++20", "-w", "-fPIC", "-dM", "-E", *(f"-I{place}" for place in places)]
    runtime_objects.run(cxx, [*flags, "program.cpp", "-o", _NAME], staged)


def _macros(path: Path) -> Mapping[str, str]:
    return dict(_DEFINED.findall(path.read_text("utf-8", "replace")))
