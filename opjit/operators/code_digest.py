"""A digest of plain functions, so that equal digests mean equal behavior in two processes.

A function has a digest only if these rules describe it completely. torch.compile never reuses the graphs of any other function.

1. It is a Python function without attributes. Its constants, defaults and closure, and the globals that it reads, are values of rule 2.
2. A value is a literal (a number, a string, None, a dtype, a device, or a tuple of these), an opjit op, an op of ATen, a member of
   `_MODULES`, a built-in function such as `len`, or a function with a digest.
3. The function imports nothing, and only reads such values from the dictionaries of modules, ``shapes.rows``.
4. Any other attribute is one of a type in `_TYPES`, such as ``x.shape``, or one that a function stores, such as ``ctx.size``.

The version of torch, which is part of each of its keys, describes the functions of torch and the operators of its tensors.
"""

import dis
import os
import types
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.function import BackwardCFunction

from opjit import files
from opjit.declare.declaration import Declaration
from opjit.declare.op_state import OpState

_OF_TORCH = (torch.dtype, torch.device, torch.memory_format, torch.layout)
_LITERALS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), *_OF_TORCH)
_TYPES = (*_OF_TORCH, torch.Size, torch.SymInt, torch.Tensor, BackwardCFunction, dict, list, tuple)
_BUILTINS = (abs, all, any, bool, enumerate, float, int, isinstance, len, map, max, min, partial)
_MORE = (range, reversed, slice, sum, zip, RuntimeError, ValueError, torch.SymBool, torch.finfo)
_PURE = (*_TYPES, *_BUILTINS, *_MORE, torch._check, torch.is_grad_enabled)
_MODULES = (
    "math",
    "torch._C._linalg",
    "torch._C._nn",
    "torch._C._special",
    "torch._tensor",
    "torch.autograd.function",
    "torch.distributed.tensor.placement_types",
    "torch.functional",
    "torch.fx.experimental.symbolic_shapes",
    "torch.nn.functional",
)
_METHODS = (types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MethodDescriptorType)
_SPACES = (types.ModuleType, torch._ops._Ops, torch._ops._OpNamespace, OpOverloadPacket)
_FIELDS = (
    "co_argcount",
    "co_cellvars",
    "co_code",
    "co_exceptiontable",
    "co_flags",
    "co_freevars",
    "co_kwonlyargcount",
    "co_names",
    "co_posonlyargcount",
    "co_varnames",
)


class NoDigest(Exception):
    """A function reads a value, which the message names, that the rules do not describe."""


def digest(declaration: Declaration, declarations: Mapping[str, Declaration]) -> str:
    """Return the digest of a declaration and of those, among `declarations`, of the ops that it calls. Raises NoDigest."""
    reader = _Reader(declarations)
    try:
        reader.read_declaration(declaration)
        reader.read_attributes()
    except (KeyError, RecursionError, ValueError) as error:  # a name, nesting, or an empty cell
        raise NoDigest(repr(error)) from None
    return files.sha256("\n".join(reader.words))


class _Reader:
    """Spells values as words."""

    def __init__(self, declarations: Mapping[str, Declaration]) -> None:
        self.words = list[str]()
        self._declarations = declarations
        self._known: dict[int, Any] = {}  # the functions and ops that were read, by id
        self._attributes = defaultdict[str, bool](bool)  # whether a function stores each

    def read_declaration(self, declaration: Declaration) -> None:
        for part, value in declaration.traced_parts().items():
            self.words.append(part)
            self.read(value)

    def read(self, value: Any) -> None:
        """Spell a value by rule 2."""
        kind = type(value)
        if kind in _LITERALS:
            self.words.append(f"{kind.__name__} {value!r}")
        elif kind is tuple:
            self.words.append(f"{len(value)} values")
            for each in value:
                self.read(each)
        elif _is_described(value):
            self.words.append(f"{getattr(value, '__module__', '')} {value.__qualname__}")
        elif id(value) in self._known:
            self.words.append(f"again {[*self._known].index(id(value))}")
        elif isinstance(value, (OpState, OpOverload, OpOverloadPacket)):
            self._known[id(value)] = value
            self._read_op(value.qualified if isinstance(value, OpState) else str(value))
        elif kind is FunctionType and not vars(value) and type(value.__globals__) is dict:
            self._known[id(value)] = value
            named = value.__kwdefaults__ or {}
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            self.read((value.__defaults__, *named, *named.values(), *cells))
            self._read_code({**value.__builtins__, **value.__globals__}, value.__code__)
        else:
            raise NoDigest(f"a value of type {kind.__module__}.{kind.__qualname__}")

    def _read_op(self, name: str) -> None:
        """Spell an op, ``ns::name`` or ``ns.name.overload``, by its declaration."""
        self.words.append(name)
        namespace, op, *_ = name.replace("::", ".").split(".")
        if namespace != "aten":
            self.read_declaration(self._declarations[f"{namespace}::{op}"])

    def _read_code(self, names: Mapping[str, Any], code: CodeType) -> None:
        """Spell code with its globals, and note the attributes of values that are unknown before a call."""
        self.words += [repr(getattr(code, field, None)) for field in _FIELDS]
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._read_code(names, constant)
            else:
                self.read(constant)
        found: list[Any] = []  # the global, or the attribute of a module, before the instruction
        for each in dis.get_instructions(code):
            loads = each.opname in ("LOAD_ATTR", "LOAD_METHOD")
            if loads and not each.is_jump_target and found and type(found[0]) in _SPACES:
                found = [vars(found[0])[each.argval]]
                continue
            for value in found:
                self.read(value)
            found = [names[each.argval]] if each.opname == "LOAD_GLOBAL" else []
            if loads or each.opname == "STORE_ATTR":
                self._attributes[each.argval] |= not loads
            elif not found and (each.opcode in dis.hasname or each.opname == "MATCH_CLASS"):
                raise NoDigest(f"{each.opname} {each.argval}")

    def read_attributes(self) -> None:
        """Read the attributes of types by name, because a program can change some types and ops."""
        bases = dict.fromkeys(base for kind in _TYPES for base in kind.__mro__)
        for name, stored in sorted(self._attributes.items()):
            found = [vars(base)[name] for base in bases if name in vars(base)]
            changed = name.startswith("__") or any(
                name in vars(each) for each in self._known.values()
            )
            if changed or not (found or stored):
                raise NoDigest(f"the attribute {name}")
            self.read(tuple(found))


def _is_described(value: Any) -> bool:
    """Return whether a value is a method of a type, an op of ATen, in `_PURE`, or a function or class of a module in `_MODULES`."""
    kind = type(value)
    if kind is FunctionType:
        of_torch = value.__code__.co_filename.startswith(os.path.dirname(torch.__file__))
        return of_torch and not vars(value) and _is_listed(value)
    called = kind is BuiltinFunctionType or isinstance(value, type)
    return kind in _METHODS or (called and _is_listed(value))


def _is_listed(value: Any) -> bool:
    aten = getattr(torch._C._VariableFunctions, value.__name__, None)
    return value.__module__ in _MODULES or any(value is each for each in (aten, *_PURE))
