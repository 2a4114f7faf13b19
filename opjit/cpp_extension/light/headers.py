"""Writes light headers: torch's headers, with fewer #include lines in the headers that only include more headers.

A C++ compiler needs 18 seconds for torch/extension.h, even if a program uses little of it. The directory that a program's compiler
searches first has these files:

    torch/all.h, ATen/ATen.h, ...       torch's text with fewer #include lines
    ATen/Functions.h, ATen/ops/add.h    the operators that the program and torch's headers name
    torch/python.h                      opjit's binding of functions, or pybind11's
"""

import functools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from opjit import resources
from opjit.cpp_extension.light import table

OWN = resources.folder("kernels_c") / "light"
INCLUDE = Path(torch.__file__).parent / "include"
API = "torch/csrc/api/include/"  # torch's headers include these files with and without this prefix
_ALWAYS = "equal var var_mean std std_mean empty_like scalar_tensor"  # the operators that torch's required headers use
# Headers of operators include these without need.
_HEAVY = frozenset({"ATen/Context.h", "ATen/DeviceGuard.h"})
# Compiled in no time.
SMALL = {
    "torch/csrc/api/include/torch/detail/TensorDataContainer.h",
    "torch/headeronly/version.h",
    "torch/cuda.h",
}
# They compile alone.
_SELF_CONTAINED = {
    *SMALL,
    "torch/library.h",
    "torch/csrc/utils/pybind.h",
    "torch/csrc/Exceptions.h",
}
_OF_ATEN = """
    ATen/Device.h ATen/DimVector.h ATen/Formatting.h ATen/Functions.h ATen/Tensor.h ATen/TensorOperators.h ATen/core/ATenGeneral.h
    ATen/core/Reduction.h ATen/core/Scalar.h c10/core/Allocator.h c10/core/InferenceMode.h
    c10/core/Layout.h c10/core/Storage.h c10/core/TensorOptions.h c10/util/Exception.h
"""
_KEPT = {  # the #include lines that stay in a header, next to the headers that a program's names need
    "torch/all.h": {"torch/enum.h", "torch/types.h", "torch/utils.h", "torch/version.h"},
    "torch/types.h": {
        "ATen/ATen.h",
        "optional",
        "torch/csrc/autograd/generated/variable_factories.h",
    },
    "torch/utils.h": {"torch/csrc/api/include/torch/types.h", "torch/csrc/autograd/grad_mode.h"},
    "ATen/ATen.h": set(_OF_ATEN.split()),
}
_LISTS = "ATen/core/IListRef.h"  # lists of tensors, for at::cat. Functions are declared without it
_GATHERERS = {*_KEPT, "torch/extension.h", "torch/torch.h", "torch/python.h", "ATen/Functions.h"}
_FACTORIES = "torch/csrc/autograd/generated/variable_factories.h"
_VARIABLE = "torch/csrc/autograd/variable.h"
_VALUES = f"{API}torch/detail/TensorDataContainer.h"  # of torch::tensor({1, 2})
_GATHERS = r"include <(?:ATen/(?:ATen|Functions)|torch/(?:all|types|torch))\.h>"
_INCLUDED = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"].*(?:\n|\Z)', re.MULTILINE)
_USING = re.compile(r"^using at::(\w+);\n", re.MULTILINE)
_OPERATOR = re.compile(r"ATen/ops/(\w+)\.h")
_FACTORY = re.compile(r"^inline at::Tensor (\w+)\((?:.*\n)*?\}\n", re.MULTILINE)
_MAKES_VARIABLE = re.compile(
    r"^inline Variable make_variable\(\s*at::Tensor data,.*?^\}\n", re.MULTILINE | re.DOTALL
)
_MAKES_METADATA = r"std::make_unique<AutogradMeta>\(\s*(\w+\.get\(\)),\s*requires_grad\)"
_CONSTRUCTED = "if (requires_grad) { TORCH_INTERNAL_ASSERT(self_impl); set_requires_grad(requires_grad, self_impl); }"
_METADATA = """\
using Variable = at::Tensor;
inline std::unique_ptr<c10::AutogradMetaInterface> autograd_meta(c10::TensorImpl *self, bool requires_grad) {
  auto made = c10::impl::GetAutogradMetaFactory()->make();
  if (requires_grad)
    made->set_requires_grad(true, self);
  return made;
}
"""
_LIBRARIES = "(?i)cublas|cusparse|cusolver|CUDABlas|CUDASparse|CUDASolver|cudss"
WORD = re.compile(r"[A-Za-z_]\w*")
_COMMENT = re.compile(
    r'((?:\bR"([^()\\\s]{0,16})\(.*?\)\2")|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\')|//[^\n]*|/\*.*?\*/',
    re.S,
)


def write(code: str, includes: Sequence[str], folder: Path, binding: Sequence[str]) -> list[str]:
    """Write the headers for a program without comments. Returns torch's headers that its names need, beyond the narrow set.

    `binding` are the headers for Python.
    """
    words = frozenset(WORD.findall(code))
    named = set(filter(None, map(_root, words)))
    lists = (
        [_LISTS]
        if any("ITensorListRef" in (text_of(f"ATen/ops/{name}.h") or "") for name in named)
        else []
    )
    used = _INCLUDED.sub("", code)  # <torch/serialize/tensor.h> does not need torch::serialize
    needed = [*lists, *table.headers_of(used, words), *([] if _maker() else [_VARIABLE])]
    brought = tuple(name for name in (*needed, *binding, *includes) if name not in _GATHERERS)
    operators = frozenset({*named, *_ALWAYS.split(), *_named_by(brought)})
    heavy = (
        _HEAVY
        if {one for one in brought if one.startswith("torch/")} <= _SELF_CONTAINED
        else frozenset()
    )
    files = {name: _filtered(name, kept.__contains__) for name, kept in _KEPT.items()}
    of_aten = [one for one in needed if not one.startswith("torch/")]
    files["ATen/ATen.h"] = included(table.NARROW) + files["ATen/ATen.h"] + included(of_aten)
    files["torch/types.h"] += included(one for one in needed if one.startswith("torch/"))
    files["torch/utils.h"] = _USING.sub(
        lambda line: line[0] if line[1] in words else "", files["torch/utils.h"]
    )
    files["ATen/Functions.h"] = _filtered(
        "ATen/Functions.h",
        lambda one: (
            found[1] in operators if (found := _OPERATOR.fullmatch(one)) else one not in heavy
        ),
    )
    made = operators | words - {"tensor"}  # each function of at::, so that no other replaces it
    if _VALUES in needed:
        made |= {"tensor"}
    files[_FACTORIES] = _factories(made)
    files |= {
        f"ATen/ops/{name}.h": _filtered(f"ATen/ops/{name}.h", lambda one: one not in heavy)
        for name in operators
    }
    files |= {f"{API}{name}": included([name]) for name in _KEPT if name.startswith("torch/")}
    files["torch/python.h"] = included(["torch/types.h", *binding])
    if "opjit_bind.h" in binding:
        files |= dict.fromkeys(
            ("pybind11/pybind11.h", "pybind11/stl.h", "torch/csrc/utils/pybind.h"),
            included(binding),
        )
    if "ATen/cuda/CUDAContext.h" in closure(brought):
        files["ATen/cuda/CUDAContextLight.h"] = _cuda_context(words)
    for name, text in files.items():
        if not text:
            continue
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return needed


def code_of(texts: Iterable[str]) -> str:
    """Return programs' texts without comments."""
    return "\n".join(_COMMENT.sub(lambda found: found[1] or " ", text) for text in texts)


def includes(code: str) -> list[str]:
    """Return the headers that a text includes."""
    return _INCLUDED.findall(code)


def included(names: Iterable[str]) -> str:
    """Return a header that includes some headers."""
    return "#pragma once\n" + "".join(f"#include <{name}>\n" for name in names)


def is_rewritten(path: str) -> bool:
    """Whether light headers replace the text of a header of torch."""
    of_operator = "/ATen/ops/" in path and not path.endswith("_ops.h")
    return of_operator or path.endswith(tuple(f"/{name}" for name in _GATHERERS))


@functools.cache
def text_of(name: str) -> str | None:
    """Read one of torch's headers. Returns None for any other header.

    A path outside torch's directories, absolute or with "..", is not a header of torch, even if the file exists.
    """
    if name.startswith("/") or ".." in name.split("/"):
        return None
    places = (INCLUDE / name, INCLUDE / API / name)
    return next((place.read_text() for place in places if place.is_file()), None)


def _filtered(name: str, keep: Callable[[str], bool]) -> str:
    """Return one of torch's headers with some of its #include lines, or an empty text if this torch lacks the header."""
    return _INCLUDED.sub(lambda line: line[0] if keep(line[1]) else "", text_of(name) or "")


@functools.cache
def _named_by(headers: tuple[str, ...]) -> frozenset[str]:
    """Return the operators that some of torch's headers use."""
    found = set[str]()
    for name in closure((*table.NARROW, *headers)):
        text = text_of(name) or ""
        named = set(_OPERATOR.findall(text))
        if not named and (name.startswith("torch/nn/") or re.search(_GATHERS, text)):
            named = set(filter(None, map(_root, WORD.findall(code_of([text])))))
        if name != _FACTORIES:
            found |= named
    return frozenset(name for name in found if not name.endswith(("_ops", "_native")))


@functools.cache
def closure(names: tuple[str, ...]) -> frozenset[str]:
    """Return the names of torch's headers that some headers include with light headers, without the headers of operators."""
    found = set[str]()
    rest = list(names)
    while rest:
        name = rest.pop().removeprefix(API)
        if name in found or name.startswith("ATen/ops/") or name == "ATen/Functions.h":
            continue
        text = text_of(name)
        if text is not None:
            found.add(name)
            kept = _KEPT.get(name)
            rest += [one for one in _INCLUDED.findall(text) if kept is None or one in kept]
    return frozenset(found)


@functools.cache
def _root(word: str) -> str | None:
    """Return the header of ATen/ops that declares a function: add.h for add, add_ and add_out."""
    for root in (
        word,
        word.removesuffix("_"),
        word.removesuffix("_out"),
        word.removesuffix("_symint"),
    ):
        if root in _all_operators():
            return root
    return None


@functools.cache
def _all_operators() -> frozenset[str]:
    names = {entry.name.removesuffix(".h") for entry in os.scandir(INCLUDE / "ATen/ops")}
    return frozenset(name for name in names if f"{name}_ops" in names or name == "from_blob")


def _factories(words: frozenset[str]) -> str:
    """Keep only the factories of torch:: that a program names. torch's header of factories includes Variable for one function."""
    text = _filtered(
        _FACTORIES,
        lambda one: (
            not _OPERATOR.fullmatch(one)
            and (one != _VALUES or "tensor" in words)
            and one != _VARIABLE
        ),
    )
    text = _FACTORY.sub(lambda found: found[0] if found[1] in words else "", text)
    if not _maker():
        return text
    text = text.replace("namespace torch {\n", f"{_maker()}namespace torch {{\n", 1)
    return text.replace("autograd::make_variable(", "opjit::make_variable(")


@functools.cache
def _maker() -> str:
    """Return torch's make_variable, which every factory calls, without the class of a tensor's metadata, because its header takes 4 s.

    torch's core has a factory of that class, and the constructor of the class calls the same function of the interface as the text here.
    Empty if the text of this torch differs.
    """
    text = text_of(_VARIABLE) or ""
    made = _MAKES_VARIABLE.search(text)
    if made is None or _CONSTRUCTED not in " ".join(text.split()):
        return ""
    body = re.sub(_MAKES_METADATA, r"autograd_meta(\1, requires_grad)", made[0])
    helpers = [
        re.search(rf"^inline \w+ {name}\(.*?^\}}\n", text, re.MULTILINE | re.DOTALL)
        for name in re.findall(r"\bimpl::(\w+)", body)
    ]
    if "AutogradMeta" in body or not all(helpers):
        return ""
    used = "".join(found[0] for found in helpers if found)
    return f"namespace opjit {{\n{_METADATA}namespace impl {{\n{used}}}\n{body}}}\n"


def _cuda_context(words: frozenset[str]) -> str:
    """Return ATen's CUDA context without the handles of cuBLAS, cuSPARSE and cuSOLVER, because a partial toolkit lacks their headers."""
    name = "ATen/cuda/CUDAContextLight.h"
    if any(re.search(_LIBRARIES, word) for word in words):
        return _filtered(name, lambda one: True)
    text = _filtered(name, lambda one: not re.search(_LIBRARIES, one))
    text = re.sub(
        r"^class TORCH_CUDA_CPP_API CUDABlas\w+ \{.*?^\};\n",
        "",
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    return re.sub(
        r"^TORCH_CUDA_CPP_API[^;{]*(?i:blas|sparse|solver|cudss)[^;{]*;\n",
        "",
        text,
        flags=re.MULTILINE,
    )
