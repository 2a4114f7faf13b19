"""A device for torch in Python: ``toy``, which uses the memory of the CPU. It does not depend on opjit.

A toy tensor shares its memory with a CPU tensor, by DLPack. This file implements allocation, copies and views. For all other ops, a
fallback runs torch's CPU kernel on the same memory. Streams, random numbers and the dtypes of autocast are in toy_module.py.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import toy_module
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

NAME = "toy"
_ON_CPU, _ON_ANOTHER = 1, 12  # DLPack's kDLCPU and kDLExtDev, which torch reads as PrivateUse1
_IN_LOW_PRECISION = ("mm", "addmm", "bmm", "linear", "matmul", "convolution")  # under autocast


class _Label(ctypes.Structure):
    """The first fields of a DLManagedTensor."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_index", ctypes.c_int32))


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.POINTER(_Label), (ctypes.py_object, ctypes.c_char_p)


def _labelled(tensor: torch.Tensor, device_type: int) -> torch.Tensor:
    capsule = torch.to_dlpack(tensor)
    label = _pointer(capsule, b"dltensor").contents
    label.device_type, label.device_index = device_type, 0
    return torch.from_dlpack(capsule)


def _host(value: Any) -> Any:
    """Return the CPU tensor with the memory of a toy tensor, and any other value unchanged."""
    return _labelled(value, _ON_CPU) if isinstance(value, torch.Tensor) and value.device.type == NAME else value


def _toy(value: Any) -> Any:
    """Return the toy tensor with the memory of a CPU tensor, and any other value unchanged."""
    return _labelled(value, _ON_ANOTHER) if isinstance(value, torch.Tensor) and value.device.type == "cpu" else value


def _empty(size: list[int], *, dtype: torch.dtype | None = None, memory_format: torch.memory_format | None = None, **_: Any) -> Any:
    return _toy(torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: list[int], stride: list[int], *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return _toy(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source: torch.Tensor, to: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _host(to).copy_(_host(source))
    return to


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any op of torch with its CPU kernel, on the memory of the arguments, so that it can write them."""
    written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def down(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        host = _host(value)
        if host is value:
            return value
        if host.numel() == 0:  # perhaps a result that the kernel will resize, which what came from DLPack cannot
            host = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype)
        written[id(host)] = host, value
        return host

    if any(argument.name == "generator" for argument in op._schema.arguments) and kwargs.get("generator") is None:
        kwargs = {**kwargs, "generator": toy_module.default_generators[0]}

    def up(value: Any) -> Any:
        if id(value) not in written:
            return _toy(value)
        host, argument = written[id(value)]
        if argument.shape != host.shape:
            argument.set_(_toy(host))
        return argument

    return tree_map(up, op(*tree_map(down, args), **tree_map(down, kwargs)))


def _view(op: Any) -> Any:
    """Run torch's CPU kernel, which works for every device because it only reads sizes and strides."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return lambda *args, **kwargs: op.redispatch(keys, *args, **kwargs)


def _in_low_precision(op: Any) -> Any:
    """Run an op under autocast: float32 tensors of this device are first converted to the dtype of autocast."""
    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME)

        def lower(value: Any) -> Any:
            wanted = isinstance(value, torch.Tensor) and value.device.type == NAME and value.dtype == torch.float32
            return value.to(dtype) if wanted else value

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return op(*tree_map(lower, args), **tree_map(lower, kwargs))

    return run


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_built(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def has_primary_context(self, device_index: int) -> bool:
        return True


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


def install() -> list[torch.library.Library]:
    """Make ``device="toy"`` a device of torch, for as long as you keep the result."""
    rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, toy_module)  # torch.toy
    generate_methods_for_privateuse1_backend()  # Tensor.toy(), Tensor.is_toy, Module.toy()
    torch._C._acc.register_python_privateuseone_hook(_Hooks())
    torch._C._acc.register_python_privateuseone_device_guard(_Guard())
    aten, everything = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    aten.impl("empty.memory_format", _empty, "PrivateUse1")
    aten.impl("empty_strided", _empty_strided, "PrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    ops = torch.ops.aten
    for op in (ops.as_strided.default, ops.view.default, ops._reshape_alias.default,
               ops.set_.source_Tensor, ops.set_.source_Storage_storage_offset):
        aten.impl(op, _view(op), "PrivateUse1")
    everything.fallback(_fallback, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # other ops keep their dtypes
    for name in _IN_LOW_PRECISION:
        aten.impl(name, _in_low_precision(getattr(ops, name).default), "AutocastPrivateUse1")
    return [aten, everything]
