"""The operators of torch that run in a block, to find candidates that call the reference's.

Operators that compute the same, such as linear and addmm, are one family.
"""

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from opjit.declare.sample import tensors_of

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
_PROBE = (3, 5, 7)  # the shape of a tensor that only the log uses


def _family(name: str) -> str | None:
    """Return the family of an operator by its full name, or None if it computes nothing."""
    namespace, _, plain = name.partition("::")
    if namespace != "aten" or plain in _FREE:
        return None
    plain = plain.removesuffix("_")
    return _FAMILY_OF.get(plain, plain)


def largest(*values: Any) -> int:
    """Return the number of elements of the largest tensor among values."""
    return max((each.numel() for each in tensors_of(values)), default=0)


class Recorder(TorchDispatchMode):
    """Records families of operators in this thread, of tensors with at least so many elements."""

    def __init__(self, smallest: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.families: set[str] = set()
        self._smallest = smallest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        family = _family(func._schema.name)
        if family is not None and largest(args) >= self._smallest:
            self.families.add(family)
        return func(*args, **(kwargs or {}))


class OperatorLog(AbstractContextManager["OperatorLog"]):
    """Records families of operators in all threads, by torch's profiler, below all of Python's modes."""

    def __init__(self, smallest: int) -> None:
        self.families: set[str] = set()
        self.complete = False  # whether the profiler was on until the end
        self._smallest = smallest
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profile = profile(record_shapes=True, experimental_config=every_thread)

    def __enter__(self) -> "OperatorLog":
        self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        torch.zeros(_PROBE).frac()
        self._profile.__exit__(None, None, None)
        for event in self._profile.function_events or ():
            shapes = event.input_shapes or []
            if list(_PROBE) in shapes:
                self.complete = True
                continue
            family = _family(event.name)
            elements = max((math.prod(shape) for shape in shapes), default=0)
            if family is not None and elements >= self._smallest:
                self.families.add(family)
