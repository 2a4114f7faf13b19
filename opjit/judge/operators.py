"""The operators of torch that run in a block, to find candidates that call the reference's.

Operators that compute the same, such as linear and addmm, are one family.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.autograd import profiler
from torch.utils._python_dispatch import TorchDispatchMode

from opjit.declare.sample import tensors_of
from opjit.judge.verdict import VerdictReached

# Operators that make, move or view tensors, and compute nothing.
_FREE_NAMES = """empty empty_strided empty_like new_empty zeros ones full zeros_like ones_like full_like new_zeros new_ones
    new_full clone copy copy_ _to_copy to set_ view _unsafe_view reshape _reshape_alias expand permute transpose t unsqueeze
    squeeze slice select narrow detach detach_ alias as_strided unbind split cat stack contiguous item _local_scalar_dense
    resize_ fill_ zero_ arange scalar_tensor lift_fresh resolve_conj resolve_neg movedim flatten unflatten numpy_T"""
_FREE = frozenset(_FREE_NAMES.split())
_FAMILIES = {
    "matmul": "mm addmm bmm baddbmm addbmm matmul linear mv addmv dot vdot inner einsum tensordot _addmm_activation"
    " _scaled_mm _int_mm mkldnn_linear mkl_linear chain_matmul linalg_multi_dot addr outer ger",
    "convolution": "convolution _convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"
    " convolution_overrideable mkldnn_convolution cudnn_convolution cudnn_convolution_relu thnn_conv2d slow_conv3d"
    " _slow_conv2d_forward _conv_depthwise2d cudnn_convolution_transpose",
    "clamp": "relu relu6 clamp clamp_min clamp_max clip threshold hardtanh maximum minimum fmax fmin",
    "softmax": "softmax _softmax log_softmax _log_softmax special_softmax",
    "normalization": "native_layer_norm layer_norm native_batch_norm batch_norm _batch_norm_impl_index group_norm"
    " native_group_norm instance_norm rms_norm _fused_rms_norm cudnn_batch_norm _native_batch_norm_legit",
    "attention": "scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_flash_attention"
    " _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention"
    " _scaled_dot_product_cudnn_attention _flash_attention_forward _efficient_attention_forward",
    "sum": "sum mean nansum nanmean",
    "product": "mul div multiply divide true_divide addcmul addcdiv",
    "addition": "add sub subtract rsub",
    "variance": "var std var_mean std_mean",
}
_FAMILY_OF = {name: family for family, names in _FAMILIES.items() for name in names.split()}
# Operators that can also compute another family: a product is a convolution of one element.
_INCLUDED = {
    "convolution": "matmul",
    "cudnn_convolution_relu": "clamp",
    "_addmm_activation": "clamp",
}
_UNCOUNTED = ("inductor", "profiler", "prim")  # namespaces of operators that compute nothing
_PROBE = (3, 5, 7)  # the shape of a tensor that only the log uses


@cache
def known_operators() -> frozenset[str]:
    """Return the full names of the operators that are registered when this is first called."""
    return frozenset(name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names())


def _families_of(name: str) -> set[str]:
    """Return the families of an operator by its full name, which counts itself outside of aten."""
    namespace, _, plain = name.partition("::")
    if namespace != "aten":
        counts = name in known_operators() and namespace not in _UNCOUNTED
        return {name} if counts else set()
    if plain in _FREE:
        return set()
    plain = plain.removesuffix("_")
    family = _FAMILY_OF.get(plain, plain)
    return {family, _INCLUDED.get(plain, family), _INCLUDED.get(family, family)}


def largest(*values: Any) -> int:
    """Return the number of elements of the largest tensor among values."""
    return max((each.numel() for each in tensors_of(values)), default=0)


class Recorder(TorchDispatchMode):
    """Counts the elements of operators in this thread, by their full names."""

    def __init__(self, elements: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._elements = elements

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._elements[func._schema.name] += largest(args)
        return func(*args, **(kwargs or {}))


@contextmanager
def profiled(elements: Counter[str]) -> Iterator[None]:
    """Count the elements of operators in all threads, by torch's profiler, below all of Python's modes.

    Code cannot ask torch's functions in Python whether the profiler is on. Raises VerdictReached if it was switched off.
    """
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profiler.profile(record_shapes=True, experimental_config=every_thread) as profile:
        profiler._is_profiler_enabled = False
        yield
        torch.zeros(_PROBE).frac()
    complete = False
    for event in profile.function_events or ():
        shapes = event.input_shapes or []
        if list(_PROBE) in shapes:
            complete = True
        else:
            elements[event.name] += max(map(math.prod, shapes), default=0)
    if not complete:
        raise VerdictReached("cheat", "switches off torch's profiler")


def families(elements: Mapping[str, int], smallest: int) -> set[str]:
    """Return the families of operators that ran on at least so many elements, in all calls together."""
    totals = Counter[str]()
    for name, count in elements.items():
        totals.update(dict.fromkeys(_families_of(name), count))
    return {family for family, count in totals.items() if count >= max(1, smallest)}
