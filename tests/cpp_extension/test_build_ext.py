"""setup.py's build_ext with opjit's cache."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import helpers

SETUP = """
from setuptools import setup
from {module} import BuildExtension, CppExtension

setup(name="package", packages=["package"], ext_modules=[CppExtension("package._C", ["package/ext.cpp"], {extension})],
      cmdclass={{"build_ext": BuildExtension{options}}})
"""
SOURCE = """#include <torch/extension.h>
#include "value.h"
at::Tensor plus(at::Tensor x) { return x + VALUE * FACTOR; }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("plus", &plus); }
"""
PLAIN = """#include <Python.h>
static PyModuleDef def = {PyModuleDef_HEAD_INIT, "_C"};
#ifndef NDEBUG
#error "setuptools' flags are missing"
#endif
PyMODINIT_FUNC PyInit__C() {
  PyObject *made = PyModule_Create(&def);
  PyModule_AddIntConstant(made, "value", VALUE);
  return made;
}
"""
VALUE = "extra_compile_args=['-DVALUE=7']"


class Package:
    """A package of one extension, with a cache and a c++ that counts what it compiles."""

    def __init__(
        self,
        tmp: Path,
        source: str,
        extension: str,
        module: str = "opjit.cpp_extension",
        options: str = "",
    ) -> None:
        self.folder = tmp / "one"
        self.log = tmp / "compiled"
        (self.folder / "package").mkdir(parents=True)
        (self.folder / "package/__init__.py").touch()
        (self.folder / "package/ext.cpp").write_text(source)
        (self.folder / "setup.py").write_text(
            SETUP.format(module=module, extension=extension, options=options)
        )
        text = f"#!/bin/sh\ncase \" $* \" in *' -c '*) echo 1 >> '{self.log}';; esac\nexec '{shutil.which('c++')}' \"$@\"\n"
        self.environment = helpers.environment(
            {"OPJIT_CACHE": str(tmp / "cache"), "CXX": str(helpers.program(tmp / "bin/c++", text))}
        )

    def python(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def build(self, *before: str) -> str:
        """Build in place; return the file's name."""
        done = self.python(*before, "setup.py", "build_ext", "--inplace")
        assert done.returncode == 0, done.stdout + done.stderr
        [built] = (self.folder / "package").glob("_C*.so")
        return built.name

    def compiled(self) -> int:
        return self.log.read_text().count("1") if self.log.exists() else 0

    def value(self, expression: str) -> str:
        return self.python(
            "-c", f"import torch; from package import _C; print(({expression}))"
        ).stdout


@pytest.mark.slow
@pytest.mark.torch
def test_a_package_is_built_once_wherever_it_lies_and_an_error_shows_its_line(
    tmp_path: Path,
) -> None:
    package = Package(
        tmp_path,
        SOURCE,
        "include_dirs=['include'], define_macros=[('VALUE', '3')], "
        "extra_compile_args={'cxx': ['-DFACTOR=2']}",
    )
    (package.folder / "include").mkdir()
    (package.folder / "include/value.h").write_text("#pragma once\n")
    assert package.build().startswith("_C.cpython-")
    assert package.value("_C.plus(torch.ones(1)).item(), _C.__name__") == "(7.0, 'package._C')\n"
    compiled = package.compiled()
    assert compiled > 0
    package.folder = Path(
        shutil.copytree(
            package.folder, tmp_path / "another", ignore=shutil.ignore_patterns("build", "*.so")
        )
    )
    package.build()
    assert package.value("_C.plus(torch.ones(1)).item()") == "7.0\n"
    assert package.compiled() == compiled
    (package.folder / "package/ext.cpp").write_text(SOURCE.replace("x + VALUE", "y + VALUE"))
    done = package.python("setup.py", "build_ext", "--inplace")
    assert done.returncode == 1
    assert "package/ext.cpp:3:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    ("options", "extension", "name"),
    [
        (
            ".with_options(no_python_abi_suffix=True)",
            f"{VALUE}, extra_link_args=['-Wl,--version-script=export.map']",
            "_C.so",
        ),
        (
            "",
            f"{VALUE}, library_dirs=['lib'], libraries=['m'], extra_link_args=['-Wl,-rpath,$ORIGIN/lib']",
            None,
        ),
    ],
)
def test_options_are_torchs(tmp_path: Path, options: str, extension: str, name: str | None) -> None:
    package = Package(tmp_path, PLAIN, extension, options=options)
    (package.folder / "export.map").write_text("{ global: PyInit__C; local: *; };\n")
    built = package.build()
    assert built == (name or built)
    assert package.value("_C.value") == "7\n"
    assert helpers.entries(tmp_path / "cache")
    if "ORIGIN" in extension:
        assert b"$ORIGIN/lib\0" in (package.folder / "package" / built).read_bytes()


@pytest.mark.slow
@pytest.mark.torch
def test_what_opjit_does_not_build_torch_does_and_the_reason_is_said(tmp_path: Path) -> None:
    package = Package(tmp_path, PLAIN, VALUE)
    setup = package.folder / "setup.py"
    setup.write_text(setup.read_text().replace("CppExtension(", "type('Own', (Extension,), {})("))
    setup.write_text("from setuptools import Extension\n" + setup.read_text())
    done = package.python("setup.py", "build_ext", "--inplace")
    assert "without opjit's cache: it is a Own" in done.stdout + done.stderr
    assert not os.path.exists(tmp_path / "cache/v2")


@pytest.mark.slow
@pytest.mark.torch
def test_use_ninja_false_is_served_from_the_cache(tmp_path: Path) -> None:
    package = Package(tmp_path, PLAIN, VALUE, options=".with_options(use_ninja=False)")
    package.build()
    assert package.value("_C.value") == "7\n"
    assert helpers.entries(tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.torch
def test_opjit_run_gives_an_unedited_setup_py_the_cache(tmp_path: Path) -> None:
    package = Package(tmp_path, PLAIN, VALUE, module="torch.utils.cpp_extension")
    package.build("-m", "opjit", "run")
    assert package.value("_C.value") == "7\n"
    assert helpers.entries(tmp_path / "cache")
