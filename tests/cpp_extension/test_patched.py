"""opjit's load in place of torch's, in code that one may not edit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import fresh

pytestmark = pytest.mark.torch
SOURCE = 'extern "C" int value() { return 7; }\n'
LOAD = "print(ctypes.CDLL(load('patched', [{source!r}], is_python_module=False)).value())\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "torchs"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "plain.cpp").write_text(SOURCE)
    return str(tmp_path / "plain.cpp")


def test_torchs_names_may_be_opjits(source: str) -> None:
    done = fresh("""
import ctypes, opjit, torch.utils.cpp_extension
torch.utils.cpp_extension.load = opjit.load
torch.utils.cpp_extension.load_inline = opjit.load_inline
from torch.utils.cpp_extension import load
""" + LOAD.format(source=source) + "print(opjit.get('allreduce', 'cpu')(torch.ones(3)).item())", timeout=60)
    assert done.stdout == "7\n3.0\n"


@pytest.mark.parametrize("imported", [True, False])
def test_torchs_module_may_be_opjits(source: str, imported: bool) -> None:
    done = fresh(("import torch.utils.cpp_extension\n" if imported else "") + """
import ctypes, sys, torch, opjit.cpp_extension
sys.modules["torch.utils.cpp_extension"] = opjit.cpp_extension
from torch.utils.cpp_extension import BuildExtension, include_paths, load
from setuptools import Command
print(issubclass(BuildExtension, Command), len(include_paths()) > 0)
""" + LOAD.format(source=source), timeout=60)
    assert done.stdout == "True True\n7\n"
