"""Kernels without host code: CUDA text and a rule in a comment of it, by which the judge's own code launches the kernel.

    // opjit: launch scale<float>(x, out, a, x.numel) grid=(x.numel + 255) / 256 block=256 shared=0

Arguments are those of the schema and its results (`out`; of several `out0`, `out1`), and integers computed from `x.numel`, `x.dim` and
`x.size[0]`. grid and block have up to three numbers, separated by commas; grid, block and shared come last, in this order.
"""

import ast
import ctypes
import operator
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from opjit.builder import glue, host_device_split, kernel_usage, nvrtc
from opjit.builder.compile_step import CompilerFailed, NvccOnly
from opjit.errors import CompileError, ToolMissing
from opjit.judge.protocol import DTYPES, TensorSpec
from opjit.recipe import toolchain
from opjit.recipe.schema import Schema, parse
from opjit.store.store import Store, default_root

RULE = re.compile(
    r"//[ \t]*opjit:[ \t]*launch[ \t]+(?P<kernel>[\w:]+(?:<[^>]*>)?)[ \t]*\((?P<arguments>.*)\)[ \t]+"
    r"grid=(?P<grid>.+?)[ \t]+block=(?P<block>.+?)(?:[ \t]+shared=(?P<shared>.+?))?[ \t]*$",
    re.MULTILINE,
)
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_GUARD, _GUARDED = 512, 0xA5  # bytes on each side of a result, and their value
_SHARED = 48 << 10  # bytes that a block may have without asking
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Kernel(NamedTuple):
    """A compiled kernel and its rule; the texts of the rule are expressions."""

    code: bytes
    symbol: str
    schema: Schema
    types: tuple[str, ...]
    arguments: str
    grid: str
    block: str
    shared: str
    registers: int | None
    spills: int | None

    def load(self) -> "LoadedKernel":
        """Load it into torch's context."""
        cuda, module, function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
        _checked(cuda, cuda.cuModuleLoadData(ctypes.byref(module), self.code))
        _checked(
            cuda, cuda.cuModuleGetFunction(ctypes.byref(function), module, self.symbol.encode())
        )
        return LoadedKernel(self, cuda, module, function)


class LoadedKernel(NamedTuple):
    """A kernel in torch's context."""

    kernel: Kernel
    cuda: ctypes.CDLL
    module: ctypes.c_void_p
    function: ctypes.c_void_p

    def unload(self) -> None:
        """Free its code. No launch may follow."""
        self.cuda.cuModuleUnload(self.module)

    def bind(
        self, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[torch.Tensor]
    ) -> Callable[[], None]:
        """Return a launch on the current stream with arguments and with memory for results."""
        kernel, cuda = self.kernel, self.cuda
        names = glue.c_names(kernel.schema)
        given = {
            **dict(zip(names, args, strict=False)),
            **kwargs,
            **dict(zip(names[len(kernel.schema.arguments) :], results, strict=True)),
        }
        values = [
            _c_value(kind, value)
            for kind, value in zip(kernel.types, evaluate(kernel.arguments, given), strict=True)
        ]
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
        )
        grid, block = (
            [*map(int, evaluate(text, given)), 1, 1][:3] for text in (kernel.grid, kernel.block)
        )
        [shared] = map(int, evaluate(kernel.shared, given))
        if shared > _SHARED:
            _checked(cuda, cuda.cuFuncSetAttribute(self.function, _MAX_DYNAMIC_SHARED, shared))

        def launch(_: object = values) -> None:  # the pointers keep nothing
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            if min(*grid, *block) > 0:
                _checked(
                    cuda,
                    cuda.cuLaunchKernel(
                        self.function, *grid, *block, shared, stream, pointers, None
                    ),
                )

        return launch


def compile_text(text: str, schema: str, arch: str) -> Kernel:
    """Compile CUDA text with NVRTC for an arch, such as ``"sm_90"``; its host functions are left out. Raises CompileError."""

    def refused(message: str) -> CompileError:
        return CompileError(message, op=schema.partition("(")[0], target=arch)

    rule = RULE.search(text)
    found = toolchain.find_nvrtc("", Store(default_root()).notes)
    if rule is None:
        raise refused("the text has no rule: // opjit: launch NAME(ARGUMENTS) grid=... block=...")
    if found is None:
        raise ToolMissing(
            "nvrtc",
            "a kernel without host code needs NVRTC: pip install nvidia-cuda-nvrtc, as a CUDA build of torch does",
        )
    kernel = rule["kernel"]
    headers = {"nv/target": nvrtc.own_header("nv_target.h")}
    options = [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "-default-device",
        "--ptxas-options=-v",
        *(f"--include-path={folder}" for folder in found.headers.split(":")),
    ]
    try:
        device = host_device_split.split(text, host_device_split.macros_of([text])).device
        source = f'#include "stdint.h"\n#line 1 "candidate.cu"\n{device}'
        compiled = nvrtc.compile_for(
            found.library, source, "candidate.cu", headers, options, [kernel]
        )
    except (CompilerFailed, NvccOnly) as error:
        raise refused(str(error)) from None
    usage = kernel_usage.parse(compiled.log)
    types, given = _parameters(text, kernel.partition("<")[0]), len(_expressions(rule["arguments"]))
    if len(types) != given:
        raise refused(f"the rule gives {kernel} {given} arguments, and it takes {len(types)}")
    registers, spills = (
        max((getattr(each, of) for each in usage), default=None) for of in ("registers", "spilled")
    )
    return Kernel(
        compiled.code,
        compiled.symbols[kernel],
        parse(schema),
        types,
        rule["arguments"],
        rule["grid"],
        rule["block"],
        rule["shared"] or "0",
        registers,
        spills,
    )


def _parameters(text: str, kernel: str) -> tuple[str, ...]:
    """The types of a kernel's parameters; ``*`` is any pointer."""
    plain = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    found = re.search(rf"\b{re.escape(kernel.rpartition('::')[2])}\s*\(([^)]*)\)\s*\{{", plain)
    parts = [
        part
        for part in (found[1] if found else "").split(",")
        if part.strip() and part.strip() != "void"
    ]
    return tuple(
        "*"
        if "*" in part
        else " ".join(part.split()[:-1]).replace("const ", "").replace(" const", "")
        for part in parts
    )


@cache
def _expressions(text: str) -> list[ast.expr]:
    """The expressions of a rule that commas separate."""
    found = ast.parse(f"[{text}]", mode="eval").body
    return found.elts if isinstance(found, ast.List) else [found]


def evaluate(text: str, given: dict[str, Any]) -> list[Any]:
    """The values of a rule's expressions."""

    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        if isinstance(node, ast.Name) and node.id in given:
            return given[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Attribute) and node.attr in ("numel", "dim"):
            return getattr(value(node.value), node.attr)()
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Attribute)
            and node.value.attr == "size"
        ):
            return value(node.value.value).shape[value(node.slice)]
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("min", "max")
        ):
            return (min if node.func.id == "min" else max)(map(value, node.args))
        raise ValueError(
            f"a rule has names, numbers, + - * / %, min, max, .numel, .dim and .size[...], not {ast.unparse(node)}"
        )

    return [value(each) for each in _expressions(text)]


_C_TYPES = {
    "*": ctypes.c_void_p,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "bool": ctypes.c_bool,
    "int": ctypes.c_int32,
    "unsigned": ctypes.c_uint32,
    "unsigned int": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "long": ctypes.c_int64,
    "long long": ctypes.c_int64,
    "size_t": ctypes.c_uint64,
}


def _c_value(kind: str, value: Any) -> Any:
    if kind not in _C_TYPES:
        raise ValueError(
            f"a rule passes pointers and {', '.join(list(_C_TYPES)[1:])}, and the kernel takes {kind}"
        )
    return _C_TYPES[kind](value.data_ptr() if isinstance(value, torch.Tensor) else value)


class GuardedResults:
    """Memory for the results of some calls: each result full of NaN's bytes, between guards."""

    def __init__(self, specs: Sequence[TensorSpec], calls: int, device: str) -> None:
        self._device = device
        self._buffers, self._inner, columns = [], [], []
        for each in specs:
            dtype = DTYPES[each.dtype]
            size = each.nbytes
            pitch = (
                -(-size // _GUARD) * _GUARD + 2 * _GUARD
            )  # so that each result is aligned as torch's are
            buffer = torch.full((calls, pitch), _GUARDED, dtype=torch.uint8, device=device)
            self._buffers.append(buffer)
            self._inner.append(buffer[:, _GUARD : _GUARD + size])
            columns.append(
                [row.view(dtype).reshape(each.shape) for row in self._inner[-1].unbind()]
            )
        self.of_calls = (
            [list(row) for row in zip(*columns, strict=True)]
            if specs
            else [[] for _ in range(calls)]
        )
        self.clear()

    def clear(self) -> None:
        """Fill results with NaN's bytes."""
        for inner in self._inner:
            inner.fill_(0xFF)

    def overrun(self) -> torch.Tensor:
        """Whether a guard was written, as a tensor: nothing waits for the device."""
        written = [
            part.ne(_GUARDED).any()
            for buffer, inner in zip(self._buffers, self._inner, strict=True)
            for part in (buffer[:, :_GUARD], buffer[:, _GUARD + inner.shape[1] :])
        ]
        return (
            torch.stack(written).any()
            if written
            else torch.zeros((), dtype=torch.bool, device=self._device)
        )


def _checked(cuda: ctypes.CDLL, code: int) -> None:
    if code:
        name = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(name))
        raise RuntimeError(f"CUDA error {(name.value or b'').decode()}")
