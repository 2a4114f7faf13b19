"""The fast way for C++ extensions: light headers with torch's names, which bring what a program mentions and nothing else.

torch/extension.h takes a C++ compiler 17 to 20 seconds, whatever a program uses. The facade (kernels_c/facade) takes half a second: a
tensor that libtorch's functions accept as their own, the declarations of the operators that the program names, cut out of torch's headers,
and a binding for functions. A program that names anything else goes torch's way, as does one that does not compile this way.

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
from opjit.builder import parts
from opjit.cpp_extension.identity import Extension
from opjit.recipe.toolchain import Compiler

HEADERS = resources.folder("kernels_c") / "facade"
_INCLUDE = Path(torch.__file__).parent / "include"
_TESTED = ((2, 13), (2, 15))  # versions of torch whose layouts the facade was compared with
# Headers that the facade replaces, and headers of torch's that it includes or that include only those.
_REPLACED = """torch/extension.h torch/all.h torch/torch.h torch/types.h torch/python.h torch/csrc/utils/pybind.h ATen/ATen.h ATen/Functions.h
ATen/NativeFunctions.h ATen/TensorOperators.h ATen/TensorIndexing.h ATen/ScalarOps.h ATen/core/Tensor.h ATen/core/TensorBase.h
ATen/core/TensorBody.h ATen/core/ATen_fwd.h ATen/core/Scalar.h ATen/core/ScalarType.h ATen/Scalar.h ATen/ScalarType.h ATen/Tensor.h
ATen/TensorOptions.h ATen/Device.h ATen/core/grad_mode.h c10/core/Device.h c10/core/DeviceType.h c10/core/DefaultDtype.h c10/core/GradMode.h
c10/core/Layout.h c10/core/MemoryFormat.h c10/core/Scalar.h c10/core/ScalarType.h c10/core/ScalarTypeToTypeMeta.h c10/core/SymInt.h
c10/core/SymIntArrayRef.h c10/core/TensorImpl.h c10/core/TensorOptions.h c10/core/WrapDimMinimal.h c10/util/ArrayRef.h c10/util/Optional.h
c10/util/OptionalArrayRef.h c10/util/typeid.h c10/util/intrusive_ptr.h pybind11/pybind11.h pybind11/stl.h""".split()
_TORCHS = ("torch/", "ATen/", "c10/", "caffe2/", "pybind11/", "Python.h", "numpy/")
_KEPT = """ATen/Dispatch.h ATen/Dispatch_v2.h ATen/AccumulateType.h ATen/OpMathType.h ATen/NumericUtils.h ATen/Parallel.h
ATen/core/TensorAccessor.h ATen/core/Reduction.h c10/macros/Macros.h c10/macros/Export.h c10/util/Exception.h c10/util/Half.h
c10/util/BFloat16.h c10/util/complex.h c10/util/irange.h c10/util/accumulate.h c10/util/SmallVector.h torch/headeronly/version.h c10/util/TypeCast.h c10/util/MathConstants.h""".split()
_ON_DEMAND = {  # headers that bring what a program mentions
    "ATen/Dispatch.h": re.compile(r"\bAT_DISPATCH_\w+"),
    "ATen/Parallel.h": re.compile(r"\b(?:parallel_for|get_num_threads|set_num_threads|get_thread_num|in_parallel_region)\b"),
    "ATen/core/Reduction.h": re.compile(r"\bReduction\s*::|_loss\b|\bbinary_cross_entropy|\bkl_div\b"),
    "torch/headeronly/version.h": re.compile(r"\bTORCH_VERSION\w*"),
    "c10/util/accumulate.h": re.compile(r"\b(?:sum|multiply|numelements\w*)_integers\b"),
    "c10/util/SmallVector.h": re.compile(r"\bSmallVector\w*"),
    "c10/util/irange.h": re.compile(r"\birange\b"),
    "algorithm": re.compile(r"\bstd\s*::\s*(?:sort|stable_sort|partial_sort|nth_element|fill|fill_n|copy|copy_n|reverse|max_element|min_element|"
                            r"transform|for_each|find|find_if|count|count_if|swap|unique|lower_bound|upper_bound|all_of|any_of|none_of|clamp|"
                            r"generate|shuffle|rotate|min|max)\b"),
    "numeric": re.compile(r"\bstd\s*::\s*(?:accumulate|iota|inner_product|partial_sum|reduce|gcd|lcm)\b"),
    "iostream": re.compile(r"\b(?:cout|cerr|endl)\b"),
    "iomanip": re.compile(r"\bset(?:precision|w|fill)\b"),
    "thread": re.compile(r"\bthread\b"),
    "mutex": re.compile(r"\b(?:mutex|lock_guard|unique_lock|once_flag|call_once)\b"),
    "atomic": re.compile(r"\batomic\b"),
    "chrono": re.compile(r"\bchrono\b"),
    "random": re.compile(r"\b(?:mt19937(?:_64)?|\w+_distribution|random_device)\b"),
    "set": re.compile(r"\bstd\s*::\s*(?:multi)?set\b"),
    "unordered_set": re.compile(r"\bunordered_(?:multi)?set\b"),
    "deque": re.compile(r"\bdeque\b"),
    "queue": re.compile(r"\b(?:priority_)?queue\b"),
    "stack": re.compile(r"\bstd\s*::\s*stack\b"),
    "list": re.compile(r"\bstd\s*::\s*list\b"),
    "bitset": re.compile(r"\bbitset\b"),
    "variant": re.compile(r"\bstd\s*::\s*(?:variant|visit|monostate)\b"),
    "cfloat": re.compile(r"\b(?:FLT|DBL)_\w+"),
    "cassert": re.compile(r"\bassert\b"),
    "cstdio": re.compile(r"\b(?:s?n?printf|puts)\b"),
}
_ONLY_TORCH = {  # what the facade does not have, with the reason to name
    re.compile(r"\btorch\s*::\s*(?:nn|jit|data|optim|serialize|fft|linalg|special|stable|cuda)\b"): "a part of torch beyond operators",
    re.compile(r"\bautograd\s*::\s*(?:Function|AutogradContext|Node|Edge)\b|\bAutogradContext\b"): "torch::autograd::Function",
    re.compile(r"\b(?:STABLE_)?TORCH_LIBRARY\w*"): "TORCH_LIBRARY",
    re.compile(r"\bpy(?:bind11)?\s*::\s*(?!(?:arg|module_?|none|call_guard|gil_scoped_release|gil_scoped_acquire|overload_cast|return_value_policy)\b)(\w+)"): "pybind11's {}",
    re.compile(r"\bPYBIND11_(?!MODULE\b)\w+|\bnoconvert\b|\bdef_submodule\b"): "a part of pybind11 beyond functions",
    re.compile(r"\b(?:IValue|TensorIterator\w*|DispatchKey\w*|Dispatcher|GeneratorImpl|Generator|Storage|StorageImpl|Node|TypeKind|Dimname)\b"): "{}",
    re.compile(r"\b(?:globalContext|detail::getDefault\w+|getDefaultCPUGenerator|vec::\w+|Vectorized)\b"): "{}",
    re.compile(r"\bPy[A-Z]\w+"): "Python's C interface",
    re.compile(r"\bc10\s*::\s*(?:List|Dict|intrusive_ptr|Error|IndexError|ValueError|DispatchKey)\b"): "a class of c10's",
    re.compile(r"\bmanual_seed\b"): "torch::manual_seed",
}
_ALWAYS = ("add add_ sub sub_ mul mul_ div div_ remainder remainder_ bitwise_and bitwise_and_ bitwise_or bitwise_or_ bitwise_xor bitwise_xor_ "
           "bitwise_not neg lt le gt ge eq ne fill_ copy_ select item to empty_like").split()  # opjit_tensor.h's own
_VALUES = re.compile(r"\b(?:torch|at)\s*::\s*tensor\s*\(")  # torch::tensor({1, 2}), and the words that its header names
_VALUES_HEADER = "torch/csrc/api/include/torch/detail/TensorDataContainer.h"
_VALUES_WORDS = ("scalar_tensor", "empty", "clone")
_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.S)
_WORD = re.compile(r"[A-Za-z_]\w*")


@functools.cache
def version() -> str:
    """What the key has of the facade: a digest of its headers and of this module."""
    made = hashlib.sha256()
    for path in (*sorted(HEADERS.iterdir()), HEADERS.parent / "opjit_shim.h", Path(__file__)):
        made.update(path.read_bytes())
    return made.hexdigest()[:16]


def texts(extension: Extension) -> list[str]:
    """An extension's sources, and the headers that come with them."""
    files = [extension.place(name) for name in extension.inputs]
    contents = [Path(path).read_bytes() for path in files if not path.endswith((".a", ".o", ".so"))]
    return [content.decode("utf-8", "replace") for content in (*extension.texts, *contents)]


def refusal(extension: Extension, implicit: bool) -> str | None:
    """Why the facade does not take an extension: a thing that it names, or a header that it includes. None: it may.

    Args:
        implicit: whether torch's builder adds torch/extension.h.
    """
    if extension.program or extension.archs is not None:
        return "it is a program" if extension.program else "it has CUDA sources"
    if not _TESTED[0] <= tuple(map(int, torch.__version__.split(".")[:2])) <= _TESTED[1]:
        return f"the light headers were not tested with torch {torch.__version__}"
    found = texts(extension)
    included = {header for text in found for header in includes(text)}
    unknown = sorted(header for header in included if header.startswith(_TORCHS) and header not in (*_REPLACED, *_KEPT))
    if unknown:
        return f"it includes {unknown[0]}"
    if not implicit and not included & {*_REPLACED}:
        return "it includes none of torch's headers"
    for code in map(_code, found):
        for pattern, reason in _ONLY_TORCH.items():
            named = pattern.search(code)
            if named:
                return f"it names {reason.format(named[named.lastindex or 0])}"
    return None


def _code(text: str) -> str:
    """A text without its comments."""
    return _COMMENT.sub(lambda found: found[1] or " ", text)


def includes(text: str) -> list[str]:
    """The headers that a text names."""
    return re.findall(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', text, re.M)


def write(texts: Iterable[str], folder: Path) -> list[str]:
    """Write the headers for a program. Returns the folders to search before torch's."""
    code = "\n".join(map(_code, texts))
    words = {*_WORD.findall(code), *_ALWAYS, *_VALUES_WORDS}
    values = f"#include <ATen/Dispatch.h>\n#include <{_VALUES_HEADER}>\n" if _VALUES.search(code) else ""
    methods, bodies = _methods()
    named = sorted(words & methods.keys())
    roots = sorted({root for word in words if (root := _root(word))})
    wanted = [header for header, pattern in _ON_DEMAND.items() if pattern.search(code)]
    lines = "".join(f"#include <{header}>\n" for header in wanted)
    files = {
        "opjit_operators.h": "#pragma once\n" + "".join(_cut(f"{root}_ops") for root in roots),
        "opjit_methods.h": "".join(methods[name] for name in named),
        "opjit_functions.h": "#pragma once\n" + _headers_first(wanted) + "namespace at {\n" + "".join(bodies[name] for name in named) + "}\n"
        + "".join(_cut(root) for root in roots),
        "opjit_factories.h": "#pragma once\n" + lines + values + _factories(words, bool(values)),
    }
    for name in _REPLACED:
        files[name] = "#pragma once\n#include <opjit_torch.h>\n"
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
    def make(staged: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            include = [f"-I{path}" for path in write([], Path(folder))]
            parts.run(cxx, ["-std=c++17", "-O1", "-fPIC", *include, "-isystem", str(_INCLUDE), "-c", str(HEADERS / "opjit_bind.cpp")], staged)

    content = ["facade", version(), torch.__version__, cxx.version, cxx.machine]
    return parts.kept(base, content, ("opjit_bind.o",), make) / "opjit_bind.o"


def _headers_first(wanted: Iterable[str]) -> str:
    """Headers that torch's functions need in their own declarations."""
    return "".join(f"#include <{header}>\n" for header in wanted if header == "ATen/core/Reduction.h")


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
    """A header of ATen/ops without its includes."""
    try:
        text = (_INCLUDE / "ATen/ops" / f"{name}.h").read_text()
    except FileNotFoundError:
        return ""  # an operator that is only a method
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))


@functools.cache
def _methods() -> tuple[dict[str, str], dict[str, str]]:
    """Tensor's methods that are operators, by name: their declarations, and their definitions."""
    text = (_INCLUDE / "ATen/core/TensorBody.h").read_text()
    declarations: dict[str, str] = {}
    start = text.index("//Tensor * add(Tensor & b);")
    for found in re.finditer(r"^  [\w:<>, &]+? ?\b(\w+)\([^\n]*\) const;\n", text[start:text.index("\n};\n", start)], re.M):
        if "Dimname" not in found[0] and "QScheme" not in found[0]:
            declarations[found[1]] = declarations.get(found[1], "") + found[0]
    definitions: dict[str, str] = {}
    for found in re.finditer(r"^inline [^\n]*? Tensor::(\w+)\([^\n]*\n(?:    [^\n]*\n)*\}\n", text, re.M):
        if "Dimname" not in found[0] and "QScheme" not in found[0]:
            definitions[found[1]] = definitions.get(found[1], "") + found[0]
    return {name: text for name, text in declarations.items() if name in definitions}, definitions


def _factories(words: set[str], values: bool) -> str:
    """torch::'s functions that make tensors: those of at:: with options.requires_grad."""
    text = (_INCLUDE / "torch/csrc/autograd/generated/variable_factories.h").read_text()
    found = re.finditer(r"^inline at::Tensor (\w+)\([^\n]*\{\n(?:  [^\n]*\n)*\}\n", text, re.M)
    kept = [one[0].replace("at::AutoDispatchBelowADInplaceOrView guard;", "") for one in found
            if one[1] in words and one[1] != "from_blob" and (values or one[1] != "tensor") and "Dimname" not in one[0] and "Generator" not in one[0]]
    return "namespace torch {\n" + "".join(kept) + "}\n"
