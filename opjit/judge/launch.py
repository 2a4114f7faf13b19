"""Kernels without host code: CUDA text, and a launch configuration in a comment of it.

    // opjit: launch scale<float>(x, out, a, x.numel) grid=(x.numel + 255) / 256 block=256 shared=0

The arguments are names of the schema, the results `out` (or `out0`, `out1`), and integers computed
from `x.numel`, `x.dim` and `x.size[0]`. grid and block have up to three numbers, separated by
commas. grid, block and shared come last, in this order. The judge launches the kernel.
"""

import ast
import ctypes
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from opjit.builder import kernel_usage, nvrtc
from opjit.builder.compile_step import CompilerFailed
from opjit.builder.cuda_reader import CudaReader
from opjit.builder.host_device_split import Halves
from opjit.errors import DeclarationError, ToolMissing
from opjit.judge.protocol import DTYPES, TensorSpec
from opjit.judge.verdict import VerdictReached
from opjit.recipe import compilers, toolchain
from opjit.recipe.nvcc_flags import NvccOnly
from opjit.recipe.schema import Schema, c_names, parse
from opjit.store.store import default_store

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
_GUARD = 512
_GUARDED = 0xA5  # bytes on each side of a result, and their value
_SHARED = 48 << 10  # bytes that a block may have without asking
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@dataclass(eq=False)
class Kernel:
    """A compiled kernel and the expressions of its launch configuration."""

    code: bytes
    symbol: str
    schema: Schema
    types: tuple[str, ...]
    rule: re.Match[str]
    registers: int | None
    spills: int | None

    def load(self, driver: str = "libcuda.so.1") -> None:
        """Load it into torch's context."""
        cuda = self._cuda = ctypes.CDLL(driver)
        self._module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        symbol = self.symbol.encode()
        self._check(cuda.cuModuleLoadData(ctypes.byref(self._module), self.code))
        self._check(cuda.cuModuleGetFunction(ctypes.byref(self._function), self._module, symbol))

    def unload(self) -> None:
        """Free its code. No launch may follow."""
        self._cuda.cuModuleUnload(self._module)

    def _check(self, code: int) -> None:
        if code:
            name = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(name))
            raise RuntimeError(f"CUDA error {(name.value or b'').decode()}")

    def bind(
        self, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[torch.Tensor]
    ) -> Callable[[], None]:
        """Return a launch on the current stream with arguments and with memory for results."""
        cuda = self._cuda
        names = c_names(self.schema)
        result_names = names[len(self.schema.arguments) :]
        given = dict(zip(names, args, strict=False))
        given |= kwargs
        given |= dict(zip(result_names, results, strict=True))

        rule = self.rule
        numbers = evaluate(rule["arguments"], given)
        values = [_c_value(*each) for each in zip(self.types, numbers, strict=True)]
        addresses = [ctypes.addressof(value) for value in values]
        pointers = (ctypes.c_void_p * len(values))(*addresses)
        grid = _three_integers(rule["grid"], given)
        block = _three_integers(rule["block"], given)
        [shared] = map(int, evaluate(rule["shared"] or "0", given))
        if shared > _SHARED:
            self._check(cuda.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared))

        def launch(_: object = values) -> None:  # the pointers do not keep the values alive
            if min(*grid, *block) <= 0:
                return
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            sizes = (*grid, *block, shared)
            self._check(cuda.cuLaunchKernel(self._function, *sizes, stream, pointers, None))

        return launch


def _three_integers(text: str, given: dict[str, Any]) -> list[int]:
    found = [int(value) for value in evaluate(text, given)]
    return [*found, 1, 1][:3]


def compile_text(text: str, schema: str, arch: str) -> Kernel:
    """Compile CUDA text without its host functions, for an arch such as ``"sm_90"``.

    Raises DeclarationError if the configuration does not fit, VerdictReached if NVRTC refuses the text, or ToolMissing without NVRTC.
    """
    rule = RULE.search(text)
    if rule is None:
        expected = "// opjit: launch NAME(ARGUMENTS) grid=... block=..."
        raise DeclarationError(f"expected a launch configuration: {expected}")
    found = toolchain.find_nvrtc("", default_store().notes)
    if found is None:
        raise ToolMissing(
            "nvrtc",
            "a kernel without host code needs NVRTC: pip install nvidia-cuda-nvrtc, or install a CUDA build of torch",
        )
    kernel = rule["kernel"]
    try:
        halves = Halves(text)
        compiled = _compile(halves.device, kernel, found, arch)
        types = _parameter_types(halves, kernel)
    except (CompilerFailed, NvccOnly) as error:
        raise VerdictReached("compile", str(error)[:4000], reusable=True) from None

    given = len(_expressions(rule["arguments"]))
    if len(types) != given:
        raise DeclarationError(
            f"the launch configuration passes {given} arguments to {kernel}, which has {len(types)}"
        )
    usage = kernel_usage.parse(compiled.log)
    registers = max((each.registers for each in usage), default=None)
    spills = max((each.spilled for each in usage), default=None)
    symbol = compiled.symbols[kernel]
    return Kernel(compiled.code, symbol, parse(schema), types, rule, registers, spills)


def _compile(device: str, kernel: str, found: compilers.Nvrtc, arch: str) -> nvrtc.DeviceCode:
    headers = {"nv/target": nvrtc.own_header("nv_target.h")}
    options = [f"--gpu-architecture={arch}", "--std=c++17", "-default-device", "--ptxas-options=-v"]
    options += [f"--include-path={folder}" for folder in found.headers.split(":")]
    source = f'#include "stdint.h"\n#line 1 "candidate.cu"\n{device}'
    return nvrtc.compile_for(found.library, source, "candidate.cu", headers, options, [kernel])


def _parameter_types(reader: CudaReader, kernel: str) -> tuple[str, ...]:
    """Return the types of a kernel's parameters, with ``*`` for any pointer."""
    name = kernel.partition("<")[0].rpartition("::")[2]
    for found in reader.kernels():
        if reader.words[found.name] == name:
            codes = [reader.code(each.begin, each.named) for each in reader.parameters(found)]
            return tuple(["*" if "*" in code else code.replace("const ", "") for code in codes])
    return ()


@cache
def _expressions(text: str) -> list[ast.expr]:
    """Return the expressions of a text, which commas separate."""
    found = ast.parse(f"[{text}]", mode="eval").body
    return found.elts if isinstance(found, ast.List) else [found]


def evaluate(text: str, given: dict[str, Any]) -> list[Any]:
    """Return the values of a launch configuration's expressions. Raises ValueError for other syntax."""
    return [_value(each, given) for each in _expressions(text)]


def _value(node: ast.AST, given: dict[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name) if name in given:
            return given[name]
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            compute = _OPERATIONS[type(operation)]
            return compute(_value(left, given), _value(right, given))
        case ast.Attribute(value=tensor, attr="numel" | "dim" as method):
            return getattr(_value(tensor, given), method)()
        case ast.Subscript(value=ast.Attribute(value=tensor, attr="size"), slice=index):
            return _value(tensor, given).shape[_value(index, given)]
        case ast.Call(func=ast.Name(id="min"), args=args):
            return min(_value(each, given) for each in args)
        case ast.Call(func=ast.Name(id="max"), args=args):
            return max(_value(each, given) for each in args)
    known = "names, numbers, + - * / %, min, max, .numel, .dim and .size[...]"
    raise ValueError(f"a launch configuration supports {known}, got {ast.unparse(node)}")


# The types of parameters, and their names in ctypes.
_C_TYPE_NAMES = """
    *: c_void_p
    float: c_float
    double: c_double
    bool: c_bool
    int: c_int32
    unsigned: c_uint32
    unsigned int: c_uint32
    int32_t: c_int32
    uint32_t: c_uint32
    int64_t: c_int64
    long: c_int64
    long long: c_int64
    size_t: c_uint64
"""
_C_TYPES = dict(re.findall(r"(\S.*): (.+)", _C_TYPE_NAMES))


def _c_value(kind: str, value: Any) -> Any:
    if kind not in _C_TYPES:
        known = ", ".join([*_C_TYPES][1:])
        raise ValueError(f"expected a parameter that is a pointer or {known}, got {kind}")
    number = value.data_ptr() if isinstance(value, torch.Tensor) else value
    return getattr(ctypes, _C_TYPES[kind])(number)


class PreparedCalls:
    """Calls of a kernel with inputs and with memory for their results: each result full of NaN's bytes, between guards."""

    def __init__(
        self, kernel: Kernel, inputs: Sequence[Any], specs: Sequence[TensorSpec], device: str
    ) -> None:
        calls = len(inputs)
        self.inputs = inputs
        self.results: list[list[torch.Tensor]] = [[] for _ in range(calls)]
        self._device = device
        self._results = list[torch.Tensor]()
        self._guards = list[torch.Tensor]()
        for each in specs:
            size = each.nbytes
            pitch = -(-size // _GUARD) * _GUARD + 2 * _GUARD  # aligned as torch's results are
            memory = torch.full((calls, pitch), _GUARDED, dtype=torch.uint8, device=device)
            results = memory[:, _GUARD : _GUARD + size]
            self._results.append(results)
            self._guards += [memory[:, :_GUARD], memory[:, _GUARD + size :]]
            for call, result in zip(self.results, results.unbind(), strict=True):
                call.append(result.view(DTYPES[each.dtype]).reshape(each.shape))
        self.clear()
        pairs = zip(inputs, self.results, strict=True)
        self.functions = [kernel.bind(args, kwargs, memory) for (args, kwargs), memory in pairs]

    def clear(self) -> None:
        """Fill results with NaN's bytes."""
        for each in self._results:
            each.fill_(0xFF)

    def overrun(self) -> torch.Tensor:
        """Return whether a guard was written, as a tensor: nothing waits for the device."""
        written = [each.ne(_GUARDED).any() for each in self._guards]
        untouched = torch.zeros((), dtype=torch.bool, device=self._device)
        return torch.stack([untouched, *written]).any()
