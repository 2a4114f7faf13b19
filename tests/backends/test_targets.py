"""Devices, archs and the CPU's level: what is asked for is found, or refused with what there is."""

import re
from unittest.mock import Mock

import pytest
import torch

import opjit
from opjit import backends
from opjit.backends import cpu, targets
from opjit.errors import DeviceUnavailable, UnknownArch, UnknownDevice
from tests import helpers


def test_where_nothing_tells_the_cpu_s_flags_ops_are_built_for_the_lowest_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a chroot without /proc."""
    monkeypatch.setattr(cpu, "open", Mock(side_effect=FileNotFoundError), raising=False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    cpu._host_arch.cache_clear()
    try:
        assert cpu.Cpu().host_arch() == "x86-64-v2"
    finally:
        cpu._host_arch.cache_clear()


@pytest.mark.parametrize(
    ("device", "says"),
    [
        *(
            (name, re.escape(repr(name)))
            for name in list[object](
                (
                    "gpu9",
                    "3.7",
                    "",
                    "cuda:x",
                    "cpu:many",
                    "cpu:0:1",
                    3.7,
                    True,
                    ["cpu"],
                    {},
                    "CPU",
                    "cpu ",
                    "cuda:-1",
                )
            )
        ),
        *(
            (name, r"no backend for device '\w+'; there are: cpu, cuda")
            for name in ("meta", torch.device("meta"), "xpu", "mps:0")
        ),
    ],
)
def test_an_unknown_device_is_refused_and_named_and_one_without_a_backend_with_the_ones_there_are(
    device: object, says: str
) -> None:
    with pytest.raises(UnknownDevice, match=says) as caught:
        opjit.get("allreduce", device)
    assert "cpu" in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_every_spelling_of_a_device_gives_the_same_op(device: object) -> None:
    assert opjit.get("allreduce", device) is torch.ops.opjit.allreduce.default


@pytest.mark.parametrize(
    "arch",
    ["sm_9", "sm90", "x86-64-v9", "", "native", "sm_90+", "sm_90+x86-64-v3", "../evil", "sm_90\n"],
)
def test_an_unknown_arch_is_refused_with_the_ones_there_are(arch: str) -> None:
    with pytest.raises(UnknownArch, match=r"unknown arch .*; known: .*x86-64-v3.*sm_90") as caught:
        targets.named(arch)
    assert isinstance(caught.value, ValueError)


def test_an_unknown_arch_in_the_environment_is_refused_and_not_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPJIT_ARCH", "x86-64-v99")
    with pytest.raises(UnknownArch, match="x86-64-v99"):
        targets.here(helpers.cpu())
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setenv("OPJIT_ARCH", "x86-64-v3")
    with pytest.raises(
        UnknownArch, match="x86-64-v3', which is for x86_64, and this machine is aarch64"
    ):
        targets.here(helpers.cpu())
    monkeypatch.undo()
    monkeypatch.setenv("OPJIT_ARCH", "sm_90")  # another backend's
    assert targets.here(helpers.cpu()).arch != "sm_90"


def test_a_cuda_op_without_a_gpu_says_how_to_build_it_all_the_same() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceUnavailable, match="opjit get OP --arch sm_90"):
        opjit.get("allreduce", "cuda")


def test_the_notes_of_missing_backends_are_whole_sentences() -> None:
    for backend in backends.all_backends():
        missing = backend.available()
        assert missing is None or " " in missing
