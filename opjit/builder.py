"""Torch's extension builder, torch.utils.cpp_extension, without what a build on demand has no use for.

Whoever imports it imports setuptools, for the build_ext command of a setup.py: 30 ms, and with Cython in the environment up to 0.1 s,
about as long as a compiler takes for an op. And it asks whether there is a GPU, for a warning: that starts CUDA.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

_NAME = "torch.utils.cpp_extension"
_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


class _Absent(ModuleType):
    """Stands for setuptools and its modules: of their classes, torch only derives its own."""

    def __getattr__(self, name: str) -> Any:
        return type(name, (), {})


def module() -> Any:
    """The module if somebody has imported it; else its code once more, as a module of opjit's own that nobody else sees."""
    return importlib.import_module(_NAME) if _NAME in sys.modules else _own()  # another thread may be at it still


def whole() -> Any:
    """The module, for who is about to import it anyway, such as by torch.utils.benchmark."""
    with _no_questions():
        return importlib.import_module(_NAME)


@cache
def _own() -> Any:
    with _no_questions():
        spec = importlib.util.find_spec(_NAME)
        assert spec is not None
        assert spec.loader is not None  # it is a file of torch's
        made = importlib.util.module_from_spec(spec)
        made.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
        try:
            spec.loader.exec_module(made)
        except Exception:  # a version of torch that needs setuptools for more
            return importlib.import_module(_NAME)
        return made


def _import(name: str, *details: Any, **named: Any) -> ModuleType:
    return _Absent("setuptools") if name.partition(".")[0] == "setuptools" else builtins.__import__(name, *details, **named)


@contextmanager
def _no_questions() -> Iterator[None]:
    """Torch does not warn that there is no GPU, which no build needs, and asks NVML for one: to ask CUDA takes 0.2 s where there is a GPU,
    and then no child that is forked later could use it. For the 4 ms of the import that is in the process's environment: torch.cuda reads
    it there."""
    quiet = logging.getLogger(_NAME)
    level, asked = quiet.level, os.environ.get(_ASK_NVML)
    quiet.setLevel(logging.ERROR)
    os.environ[_ASK_NVML] = "1"
    try:
        yield
    finally:
        quiet.setLevel(level)
        if asked is None:
            os.environ.pop(_ASK_NVML, None)  # another thread may have put the environment back
        else:
            os.environ[_ASK_NVML] = asked
