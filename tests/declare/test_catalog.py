"""What a name, a tensor or a dtype finds: the op, or a message that says what there is."""

from __future__ import annotations

import pytest
import torch

import opjit
from opjit.errors import UnknownOp


@pytest.mark.parametrize("name", ["allredduce", "opjit::all_reduce", "Allreduce"])
def test_an_unknown_op_is_answered_with_the_closest_names(name: str) -> None:
    with pytest.raises(UnknownOp, match=r"no op named 'opjit::.*'.*did you mean allreduce\?") as caught:
        opjit.get(name, "cpu")
    assert caught.value.closest == ["allreduce"]
    assert isinstance(caught.value, KeyError)


def test_an_unknown_op_like_no_other_is_answered_with_the_command_that_lists_them() -> None:
    with pytest.raises(UnknownOp, match="opjit list"):
        opjit.get("zzzzzzzz")


@pytest.mark.parametrize(("dtype", "name"), [
    (torch.complex64, "complex64"), (torch.float8_e4m3fn, "float8_e4m3fn"), (torch.float8_e4m3fnuz, "an unsupported dtype"),
])
def test_a_wrong_dtype_is_answered_with_its_name(dtype: torch.dtype, name: str) -> None:
    with pytest.raises(RuntimeError, match=f"allreduce.*not {name}"):
        opjit.get("allreduce", "cpu")(torch.zeros(3).to(dtype))
