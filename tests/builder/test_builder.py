"""Torch's extension builder as opjit gets it: torch's own, or its code without setuptools."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import fresh

pytestmark = pytest.mark.torch
GET = "print(opjit.get('allreduce', 'cpu')(torch.ones(3)).item(), end=' ')\n"


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path))


def test_a_first_build_imports_no_setuptools() -> None:
    done = fresh("import sys, opjit, torch\n" + GET + "print(sys.modules.keys() & {'setuptools', 'distutils', 'Cython'})")
    assert done.stdout == "3.0 set()\n"


def test_a_machine_without_setuptools_builds() -> None:
    done = fresh("import sys, opjit, torch\nsys.modules['setuptools'] = None\n" + GET)
    assert done.stdout == "3.0 "


def test_who_imports_the_builder_after_a_build_gets_all_of_it() -> None:
    done = fresh("import opjit, torch\n" + GET + """
from torch.utils.cpp_extension import BuildExtension, CppExtension
from setuptools import Command, Extension
print(issubclass(BuildExtension, Command), isinstance(CppExtension("x", ["x.cpp"]), Extension))
""")
    assert done.stdout == "3.0 True True\n"


def test_a_program_may_replace_functions_of_torchs_module() -> None:
    done = fresh("""
import opjit, torch
from torch.utils import cpp_extension
cpp_extension.load = cpp_extension._jit_compile = None
""" + GET)
    assert done.stdout == "3.0 "


def test_the_environment_may_change_while_the_builder_is_imported() -> None:
    done = fresh("""
import os, sys, opjit, torch
class Clear:
    def find_spec(self, name, path=None, target=None):
        if "PYTORCH_NVML_BASED_CUDA_CHECK" in os.environ:  # the first import of the builder's
            print(os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK"), end=" ")
sys.meta_path.insert(0, Clear())
""" + GET)
    assert done.stdout == "1 3.0 "


def test_a_torch_that_needs_more_of_setuptools_gets_it() -> None:
    done = fresh("""
import sys, opjit, torch
from opjit.builder import torch_builder
del torch_builder._Empty.__getattr__
""" + GET + "print('setuptools' in sys.modules)")
    assert done.stdout == "3.0 True\n"


def test_a_builder_that_another_thread_is_importing_is_waited_for() -> None:
    done = fresh("""
import importlib, sys, threading, time, opjit, torch
reached = threading.Event()

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "setuptools":
            reached.set()
            time.sleep(1)

sys.meta_path.insert(0, Slow())
importer = threading.Thread(target=importlib.import_module, args=("torch.utils.cpp_extension",))
importer.start()
reached.wait(60)
""" + GET + "importer.join()")
    assert done.stdout == "3.0 "
