"""The compiled part of the binding: pybind11's and torch's own code behind opjit_bind.h, made once for each compiler and torch.

It is compiled with torch's own headers, so it is the proof that the binding fits this torch: nothing of torch's or pybind11's is retyped.
Where it does not compile, programs are bound by pybind11's own headers.
"""

from __future__ import annotations

import sysconfig
import tempfile
from pathlib import Path

import torch

from opjit import progress
from opjit.builder import runtime_objects
from opjit.cpp_extension.light import headers
from opjit.errors import BuildError
from opjit.recipe.toolchain import Compiler

_NAME = "opjit_bind.o"
_HEADERS = ("torch/csrc/utils/pybind.h", "torch/csrc/Exceptions.h", "torch/csrc/autograd/variable.h")
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w")


def compiled(base: Path, cxx: Compiler) -> Path | None:
    """Return the object file that every extension with light headers is linked with; None if it does not compile with this torch.

    Args:
        base: folder of the store.

    Raises:
        OSError: the folder is not writable.
    """
    source = headers.OWN / "opjit_bind.cpp"
    code = headers.code_of([source.read_text()])

    def make(staged: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            headers.write(code, (), Path(folder), _HEADERS, made_by_torch=True)
            include = [f"-I{folder}", f"-I{headers.OWN}", f"-I{headers.INCLUDE}", f"-I{headers.INCLUDE / headers.API}",
                       f"-I{sysconfig.get_path('include')}"]
            try:
                runtime_objects.run(cxx, [*_FLAGS, *include, "-c", str(source)], staged)
            except BuildError as error:
                progress.log(f"opjit's binding does not fit torch {torch.__version__}, so pybind11's is used: {error}")
                (staged / _NAME).write_bytes(b"")  # it is not tried again

    content = ["binding", source.read_text(), (headers.OWN / "opjit_bind.h").read_text(), torch.__version__, str(torch.version.git_version),
               sysconfig.get_config_var("SOABI"), cxx.version, cxx.machine]
    place = runtime_objects.kept(base, content, (_NAME,), make) / _NAME
    return place if place.stat().st_size else None
