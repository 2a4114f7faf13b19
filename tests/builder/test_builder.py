"""Torch's extension builder as opjit gets it: torch's own, or its code without setuptools."""

from pathlib import Path

import pytest

from tests.helpers import fresh

pytestmark = pytest.mark.torch
GET = "print(opjit.get('allreduce', 'cpu')(torch.ones(3)).item(), end=' ')\n"


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path))


def test_a_first_build_needs_no_setuptools_and_who_imports_the_builder_after_it_gets_all_of_it() -> (
    None
):
    done = fresh(
        "import sys, opjit, torch\nsys.modules['setuptools'] = None\n"
        + GET
        + """
print(sys.modules.keys() & {'distutils', 'Cython'})
del sys.modules['setuptools']
from torch.utils.cpp_extension import BuildExtension, CppExtension
from setuptools import Command, Extension
print(issubclass(BuildExtension, Command), isinstance(CppExtension("x", ["x.cpp"]), Extension))
"""
    )
    assert done.stdout == "3.0 set()\nTrue True\n"


def test_the_builder_of_extensions_does_not_import_torchs_module() -> None:
    done = fresh("""
from opjit.cpp_extension import build
import sys
print(build.__name__, "torch.utils.cpp_extension" in sys.modules)
""")
    assert done.stdout == "opjit.cpp_extension.build False\n"


def test_a_program_that_watches_torchs_load_sees_the_call_of_a_build() -> None:
    done = fresh("""
import opjit, torch, torch.utils.cpp_extension as torchs
from unittest import mock
for spy in (mock.Mock(wraps=torchs.load), mock.Mock()):  # the second calls nothing
    torchs.load = spy
    opjit.get(("allreduce", "tensor_negate")[spy._mock_wraps is None], "cpu")
    print(spy.call_count, spy.call_args.kwargs["is_standalone"])
""")
    assert done.stdout == "1 True\n" * 2


def test_a_program_may_put_opjits_load_in_torchs_place() -> None:
    done = fresh("""
import functools, opjit, torch, torch.utils.cpp_extension as torchs
ops = ["allreduce", "tensor_negate", "round_ste"]
for load in (opjit.load, functools.partial(opjit.load, fast=False), lambda **named: opjit.load(**named)):
    torchs.load = load
    print(opjit.get(ops.pop(), "cpu")._schema.name)
""")
    assert done.stdout.split() == ["opjit::round_ste", "opjit::tensor_negate", "opjit::allreduce"]


def test_torchs_own_load_in_another_thread_is_left_alone_while_a_build_file_is_written(
    tmp_path: Path,
) -> None:
    done = fresh(
        f"""
import ctypes, os, threading, opjit, torch, torch.utils.cpp_extension as torchs
folder = {str(tmp_path)!r}
open(folder + "/plain.cpp", "w").write('extern "C" int value() {{ return 7; }}')
load = torchs.load

def slow(**arguments):
    def beside():
        path = load("beside", folder + "/plain.cpp", build_directory=folder, is_python_module=False)
        print(ctypes.CDLL(path).value(), path.startswith(folder), end=" ")
    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    return load(**arguments)

torchs.load = slow
"""
        + GET
    )
    assert done.stdout == "7 True 3.0 "


def test_a_torch_that_needs_more_of_setuptools_gets_it() -> None:
    done = fresh(
        """
import sys, opjit, torch
from opjit.builder import torch_builder
del torch_builder._Empty.__getattr__
"""
        + GET
        + "print('setuptools' in sys.modules)"
    )
    assert done.stdout == "3.0 True\n"
