"""The fast way for C++ extensions: light headers with torch's names, which bring what a program mentions and nothing else.

torch/extension.h takes a C++ compiler 17 to 20 seconds, whatever a program uses. The facade (kernels_c/facade) takes about one: a
tensor that libtorch's functions accept as their own, the declarations of the operators that the program names, cut out of torch's headers,
and a binding for functions. A program that names anything else is built with torch's headers, as is one that does not compile.

    work/facade/torch/extension.h, ATen/ATen.h, ...     the headers of torch that the facade replaces: each includes opjit_torch.h
    work/facade/opjit_operators.h                       at::_ops, torch's declarations
    work/facade/opjit_methods.h, opjit_functions.h      methods of Tensor and functions of at::
    work/facade/opjit_factories.h                       torch::zeros and its like
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from opjit import resources
from opjit.cpp_extension import vocabulary
from opjit.recipe.toolchain import Compiler

HEADERS = resources.folder("kernels_c") / "facade"
_INCLUDE = Path(torch.__file__).parent / "include"
_ALWAYS = """add add_ sub sub_ mul mul_ div div_ remainder remainder_ bitwise_and bitwise_and_ bitwise_or
bitwise_or_ bitwise_xor bitwise_xor_ bitwise_not neg lt le gt ge eq ne fill_ copy_ select item to empty_like
scalar_tensor empty clone"""  # what the facade itself calls
_VALUES = re.compile(r"\b(?:torch|at)\s*::\s*tensor\s*\(")  # torch::tensor({1, 2})
_VALUES_HEADER = "torch/csrc/api/include/torch/detail/TensorDataContainer.h"
_REDUCTION = "ATen/core/Reduction.h"  # functions of at:: have its numbers as defaults
_NAMED = re.compile(r"^(?:inline|namespace symint \{\n  template <[^\n]*\n ) [^\n]*\bDimname[^\n]*\{\n(?:    [^\n]*\n)*(?:  \}\n)?\}\n",
                    re.MULTILINE)
_WORD = re.compile(r"[A-Za-z_]\w*")


@functools.cache
def version() -> str:
    """The facade's part of the key: a digest of its headers and of the modules that choose from torch's or split CUDA files."""
    made, package = hashlib.sha256(), Path(__file__).parents[1]
    modules = [package / "cpp_extension" / f"{name}.py" for name in ("facade", "vocabulary", "cuda")]
    modules += [package / "builder" / f"{name}.py" for name in ("cuda", "split", "nvrtc", "tokens")]
    wrapper = [HEADERS.parent / "nvrtc/cuda_runtime.h", resources.folder("templates") / "fatbin.c.in"]
    for path in (*sorted(HEADERS.iterdir()), HEADERS.parent / "opjit_shim.h", *modules, *wrapper):
        made.update(path.read_bytes())
    return made.hexdigest()[:16]


def write(texts: Iterable[str], folder: Path) -> list[str]:
    """Write the headers for a program. Returns the folders to search before torch's."""
    code = "\n".join(map(vocabulary.code_of, texts))
    words = {*_WORD.findall(code), *_ALWAYS.split()}
    methods, bodies = _methods()
    named = sorted(words & methods.keys())
    roots = sorted({root for word in words if (root := _root(word))})
    wanted = [header for header, pattern in vocabulary.ON_DEMAND.items() if pattern.search(code)]
    values = ["ATen/Dispatch.h", _VALUES_HEADER] if _VALUES.search(code) else []
    files = {
        "opjit_operators.h": _included([]) + "".join(_cut(f"{root}_ops") for root in roots),
        "opjit_methods.h": "".join(methods[name] for name in named),
        "opjit_functions.h": "".join([_included(header for header in wanted if header == _REDUCTION), "namespace at {\n",
                                      *(bodies[name] for name in named), "}\n", *map(_cut, roots)]),
        "opjit_factories.h": _included([*wanted, *values]) + _factories(words, bool(values)),
    }
    for name in vocabulary.REPLACED:
        files[name] = _included(["opjit_torch.h", *(["opjit_streams.h"] if "/cuda/" in name else [])])
    for name, text in files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return [str(folder), str(HEADERS), str(HEADERS.parent)]


def runtime(base: Path, cxx: Compiler) -> Path:
    """The compiled part of the facade, which every extension is linked with: made once for each compiler and torch.

    Args:
        base: folder of the store.

    Raises:
        BuildError: the compiler failed.
        OSError: the folder is not writable.
    """
    from opjit.builder import parts

    def make(staged: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            include = [*(f"-I{path}" for path in write([], Path(folder))), "-isystem", str(_INCLUDE)]
            parts.run(cxx, ["-std=c++17", "-O1", "-fPIC", *include, "-c", str(HEADERS / "opjit_bind.cpp")], staged)

    content = ["facade", version(), torch.__version__, cxx.version, cxx.machine]
    return parts.kept(base, content, ("opjit_bind.o",), make) / "opjit_bind.o"


def _included(headers: Iterable[str]) -> str:
    return "#pragma once\n" + "".join(f"#include <{header}>\n" for header in headers)


def _root(word: str) -> str | None:
    """The header of ATen/ops that declares a function: add.h for add, add_ and add_out."""
    for root in (word, word.removesuffix("_"), word.removesuffix("_out")):
        if root in _operators():
            return root
    return None


@functools.cache
def _operators() -> frozenset[str]:
    return frozenset(entry.name.removesuffix("_ops.h") for entry in os.scandir(_INCLUDE / "ATen/ops") if entry.name.endswith("_ops.h"))


def _cut(name: str) -> str:
    """A header of ATen/ops without its includes, and without functions of named tensors, which torch had until 2.12."""
    try:
        text = (_INCLUDE / "ATen/ops" / f"{name}.h").read_text()
    except FileNotFoundError:
        return ""  # an operator that is only a method
    return _NAMED.sub("", "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#")))


@functools.cache
def _methods() -> tuple[dict[str, str], dict[str, str]]:
    """Tensor's methods that are operators, by name: their declarations, and their definitions."""
    text = (_INCLUDE / "ATen/core/TensorBody.h").read_text()
    start = text.index("//Tensor * add(Tensor & b);")
    members = text[start:text.index("\n};\n", start)]
    declarations = _by_name(r"^  [\w:<>, &]+? ?\b(\w+)\([^\n]*\) const;\n", members, "Dimname|QScheme")
    definitions = _by_name(r"^inline [^\n]*? Tensor::(\w+)\([^\n]*\n(?:    [^\n]*\n)*\}\n", text, "Dimname|QScheme")
    return {name: declared for name, declared in declarations.items() if name in definitions}, definitions


def _by_name(pattern: str, text: str, without: str) -> dict[str, str]:
    """The functions that a pattern finds, by the name in its group; not those that mention a type of `without`."""
    found: dict[str, str] = {}
    for one in re.finditer(pattern, text, re.M):
        if not re.search(without, one[0]):
            found[one[1]] = found.get(one[1], "") + one[0]
    return found


def _factories(words: set[str], values: bool) -> str:
    """torch::'s functions that make tensors: those of at:: with options.requires_grad."""
    text = (_INCLUDE / "torch/csrc/autograd/generated/variable_factories.h").read_text()
    found = _by_name(r"^inline at::Tensor (\w+)\([^\n]*\{\n(?:  [^\n]*\n)*\}\n", text, "Dimname|Generator")
    wanted = words - {"from_blob"} if values else words - {"from_blob", "tensor"}
    kept = "".join(made for name, made in found.items() if name in wanted)
    return "namespace torch {\n" + kept.replace("at::AutoDispatchBelowADInplaceOrView guard;", "") + "}\n"
