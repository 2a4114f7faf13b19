"""The words that light headers know: which of torch's headers they replace, which they bring on demand, and what is left to torch."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import torch

from opjit.cpp_extension.identity import Extension

_TESTED = ((2, 11), (2, 15))  # versions of torch whose layouts were compared
_LARGEST = 1 << 20  # characters; a request reads them all, and a program of this size spends its time elsewhere
_TORCHS = ("torch/", "ATen/", "c10/", "caffe2/", "pybind11/", "Python.h", "numpy/")
# Headers of torch's that light ones replace.
REPLACED = (
    "torch/extension.h", "torch/all.h", "torch/torch.h", "torch/types.h", "torch/python.h", "torch/csrc/utils/pybind.h", "ATen/ATen.h",
    "ATen/Functions.h", "ATen/NativeFunctions.h", "ATen/TensorOperators.h", "ATen/TensorIndexing.h", "ATen/ScalarOps.h",
    "ATen/core/Tensor.h", "ATen/core/TensorBase.h", "ATen/core/TensorBody.h", "ATen/core/ATen_fwd.h", "ATen/core/Scalar.h",
    "ATen/core/ScalarType.h", "ATen/Scalar.h", "ATen/ScalarType.h", "ATen/Tensor.h", "ATen/TensorOptions.h", "ATen/Device.h",
    "ATen/core/grad_mode.h", "c10/core/Device.h", "c10/core/DeviceType.h", "c10/core/DefaultDtype.h", "c10/core/GradMode.h",
    "c10/core/Layout.h", "c10/core/MemoryFormat.h", "c10/core/Scalar.h", "c10/core/ScalarType.h", "c10/core/ScalarTypeToTypeMeta.h",
    "c10/core/SymInt.h", "c10/core/SymIntArrayRef.h", "c10/core/TensorImpl.h", "c10/core/TensorOptions.h", "c10/core/WrapDimMinimal.h",
    "c10/util/ArrayRef.h", "c10/util/Optional.h", "c10/util/OptionalArrayRef.h", "c10/util/typeid.h", "c10/util/intrusive_ptr.h",
    "pybind11/pybind11.h", "pybind11/stl.h", "c10/core/Stream.h", "ATen/DeviceGuard.h", "ATen/cuda/CUDAContext.h",
    "ATen/cuda/CUDAContextLight.h", "ATen/cuda/Exceptions.h", "c10/cuda/CUDAFunctions.h", "c10/cuda/CUDAGuard.h", "c10/cuda/CUDAStream.h",
)
# Headers of torch's that need only those.
KEPT = (
    "ATen/Dispatch.h", "ATen/Dispatch_v2.h", "ATen/AccumulateType.h", "ATen/OpMathType.h", "ATen/NumericUtils.h", "ATen/Parallel.h",
    "ATen/core/TensorAccessor.h", "ATen/core/Reduction.h", "c10/macros/Macros.h", "c10/macros/Export.h", "c10/util/Exception.h",
    "c10/util/Half.h", "c10/util/BFloat16.h", "c10/util/complex.h", "c10/util/irange.h", "c10/util/accumulate.h",
    "c10/util/SmallVector.h", "torch/headeronly/version.h", "c10/util/TypeCast.h", "c10/util/MathConstants.h",
    "c10/cuda/CUDAException.h", "c10/cuda/CUDAMacros.h", "c10/cuda/CUDAMathCompat.h", "c10/util/Deprecated.h",
)
ON_DEMAND = {  # headers that bring what a program mentions
    "ATen/Dispatch.h": re.compile(r"\bAT_DISPATCH_\w+"),
    "ATen/Parallel.h": re.compile(r"\b(?:parallel_for|get_num_threads|set_num_threads|get_thread_num|in_parallel_region)\b"),
    "ATen/core/Reduction.h": re.compile(r"\bReduction\s*::|_loss\b|\bbinary_cross_entropy|\bkl_div\b"),
    "torch/headeronly/version.h": re.compile(r"\bTORCH_VERSION\w*"),
    "c10/util/accumulate.h": re.compile(r"\b(?:sum|multiply|numelements\w*)_integers\b"),
    "c10/util/SmallVector.h": re.compile(r"\bSmallVector\w*"),
    "c10/util/irange.h": re.compile(r"\birange\b"),
    "algorithm": re.compile(r"\bstd\s*::\s*(?:sort|stable_sort|partial_sort|nth_element|fill|fill_n|copy|copy_n|reverse|max_element|"
                            r"min_element|"
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
_BINDING = "arg module_? none call_guard gil_scoped_release gil_scoped_acquire overload_cast return_value_policy".replace(" ", "|")
_CLASSES = ("IValue TensorIterator\\w* DispatchKey\\w* Dispatcher GeneratorImpl Generator Storage StorageImpl Node TypeKind Dimname List "
            "Dict Error intrusive_ptr IndexError ValueError globalContext Vectorized").replace(" ", "|")
_ONLY_TORCH = {  # what light headers do not have, with the reason to name
    re.compile(r"\btorch\s*::\s*(?:nn|jit|data|optim|serialize|fft|linalg|special|stable|cuda)\b"): "a part of torch beyond operators",
    re.compile(r"\bautograd\s*::\s*(?:Function|AutogradContext|Node|Edge)\b|\bAutogradContext\b"): "torch::autograd::Function",
    re.compile(r"\b(?:STABLE_)?TORCH_LIBRARY\w*"): "TORCH_LIBRARY",
    re.compile(rf"\bpy(?:bind11)?\s*::\s*(?!(?:{_BINDING})\b)(\w+)"): "pybind11's {}",
    re.compile(r"\bPYBIND11_(?!MODULE\b)\w+|\bnoconvert\b|\bdef_submodule\b"): "a part of pybind11 beyond functions",
    re.compile(rf"\b(?:at|c10|torch)\s*::\s*(?:\w+\s*::\s*)*({_CLASSES})\b"): "{}",
    re.compile(r"\b(?:getDefault\w+Generator|manual_seed)\b"): "torch's random numbers",
    re.compile(r"\b(?:PY_\w+|Py_\w+|Py(?!Torch\b)[A-Z]\w+)"): "Python's C interface",
    re.compile(r"(?:\.|->|::)\s*(?:std|var)(?:_mean)?\s*\("
               r"|\b(?:var|(?:std|var)_mean)\s*\("): "std or var",
    re.compile(r"\bthrow_with_nested\b"): "std::throw_with_nested",
    re.compile(r"\b(getCurrentCUDABlas\w*|getCudnnHandle|CUDACachingAllocator|CUDAEvent|CUDAGraph|Philox\w*|CUDAGeneratorImpl|"
               r"getCurrentCUDASolver\w*|CUDAStreamGuard|DeviceGuard|TORCH_DSA\w*)\b"): "{}",
    re.compile(r"\bR\""): "a raw string",
}
# Words of #if and #ifdef that mean the same with both kinds of headers, and flags for the linker that bring no code.
_ANYWHERE = re.compile(r"defined|__cplusplus|__CUDACC__|__CUDA_ARCH__|_OPENMP|NDEBUG|__GNUC__|__clang__|_WIN32|_MSC_VER|__linux__|"
                       r"__x86_64__|__aarch64__|__(?:AVX|SSE|FMA|ARM|F16C)\w*|TORCH_VERSION\w*|TORCH_EXTENSION_NAME|[uU]?[lL]*|true|false")
_LINK = re.compile(r"-l(?:m|pthread|dl|rt|gomp|stdc\+\+)|-fopenmp|-pthread|-O\d|-s|-Wl,-(?:O\d|z,\w+|s|-as-needed)")
_CONDITION = re.compile(r"^[ \t]*#[ \t]*(?:if|ifdef|ifndef|elif)\b(.*(?:\\\n.*)*)", re.M)
_DEFINED = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.M)
_WORD = re.compile(r"[A-Za-z_]\w*")
_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\')|//[^\n]*|/\*.*?\*/', re.S)


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
    if extension.program:
        return "it is a program"
    if not _TESTED[0] <= tuple(map(int, torch.__version__.split(".")[:2])) <= _TESTED[1]:
        return f"the light headers were not tested with torch {torch.__version__}"
    if extension.libraries or not all(_LINK.fullmatch(word) for word in extension.flags["link"]):
        return "it links a library, which may hold functions of torch's headers"
    if any(word.startswith(("-D_GLIBCXX", "-U")) for word in extension.flags["c"]) or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "its flags or this Python change the layout of objects"
    try:
        found = texts(extension)
    except OSError as error:
        return f"{error.filename} cannot be read"
    if sum(map(len, found)) > _LARGEST:
        return "it is large"
    included = {header for text in found for header in includes(text)}
    unknown = sorted(header for header in included if header.startswith(_TORCHS) and header not in (*REPLACED, *KEPT))
    if unknown:
        return f"it includes {unknown[0]}"
    if not implicit and not included & {*REPLACED}:
        return "it includes none of torch's headers"
    code = "\n".join(map(code_of, found))
    for pattern, reason in _ONLY_TORCH.items():
        named = pattern.search(code)
        if named:
            return f"it names {reason.format(named[named.lastindex or 0])}"
    asked = {word for line in _CONDITION.findall(code) for word in _WORD.findall(line)}
    unknown = sorted(word for word in asked - set(_DEFINED.findall(code)) if not _ANYWHERE.fullmatch(word))
    return f"a condition of its preprocessor names {unknown[0]}, which torch's headers may define" if unknown else None


def includes(text: str) -> list[str]:
    """The headers that a text names."""
    return re.findall(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', text, re.M)


def code_of(text: str) -> str:
    """A text without its comments."""
    return _COMMENT.sub(lambda found: found[1] or " ", text)
