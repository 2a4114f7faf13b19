"""Devices, archs and the CPU's level: what is asked for is found, or refused with what there is."""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import opjit
from opjit import backends, batch, files, wanted
from opjit.backends import cpu, targets
from opjit.errors import DeviceUnavailable, UnknownArch, UnknownDevice
from opjit.recipe import compilers, gpu_archs, toolchain
from opjit.store.store import default_store
from tests import helpers
from tests.builder.test_cuda import needs_nvrtc


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


@pytest.mark.parametrize(
    ("arch", "served"),
    [
        ("sm_107", "sm_103"),  # a GPU that is newer than the compiler
        ("sm_103", "sm_103"),
        ("sm_101", "sm_100"),
        ("sm_90+sm_107", "sm_90+sm_103"),
        ("sm_107+sm_103", "sm_103"),
        ("sm_107a", "sm_107a"),  # code for sm_103 lacks the features that `a` selects
        ("sm_137", "sm_137"),  # no architecture of this compiler runs there
    ],
)
def test_an_arch_that_the_compiler_lacks_falls_back_to_the_newest_that_serves_it(
    monkeypatch: pytest.MonkeyPatch, arch: str, served: str
) -> None:
    nvcc = compilers.Nvcc("/cuda", "13.0", "V13.0.88", "sm_75 sm_90 sm_100 sm_103 sm_110 sm_120")
    monkeypatch.setattr(toolchain, "working_nvcc", lambda notes: nvcc)
    monkeypatch.setattr(toolchain, "find_nvrtc", lambda runtime, notes: None)
    target = targets.named(arch, backends.for_device("cuda"), "13.0")
    assert gpu_archs.served(target, None).arch == served


@pytest.mark.parametrize("arch", ["sm_91", "sm_90+sm_91"])
def test_an_arch_that_a_user_names_and_the_compiler_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    nvcc = compilers.Nvcc("/cuda", "13.0", "V13.0.88", "sm_75 sm_90 sm_100 sm_103 sm_110 sm_120")
    monkeypatch.setattr(toolchain, "working_nvcc", lambda notes: nvcc)
    monkeypatch.setattr(toolchain, "find_nvrtc", lambda runtime, notes: None)
    told = rf"no installed CUDA compiler supports {re.escape(arch)}; build for sm_90, which"
    with pytest.raises(UnknownArch, match=told):
        wanted.target_of("cuda", arch)
    with pytest.raises(UnknownArch, match=told):
        batch.targets_of([arch], default_store())


@pytest.mark.parametrize("listed", ["6.0", "9.0;6.0+PTX", "99.9"])
def test_an_extension_for_an_arch_that_the_compiler_lacks_is_refused_before_it_is_built(
    monkeypatch: pytest.MonkeyPatch, listed: str, here: Path
) -> None:
    nvcc = compilers.Nvcc("/cuda", "13.0", "V13.0.88", "sm_75 sm_90")
    monkeypatch.setattr(toolchain, "working_nvcc", lambda notes: nvcc)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    with pytest.raises(UnknownArch, match=r"no installed CUDA compiler supports .*; use sm_75, "):
        opjit.load_inline("old", "int f();", cuda_sources="int f() { return 1; }", functions=["f"])


def test_a_gpu_that_the_compiler_lacks_gets_code_that_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvcc = compilers.Nvcc("/cuda", "13.0", "V13.0.88", "sm_90 sm_100 sm_103")
    monkeypatch.setattr(toolchain, "working_nvcc", lambda notes: nvcc)
    monkeypatch.setattr(toolchain, "find_nvrtc", lambda runtime, notes: None)
    cuda = backends.for_device("cuda")
    monkeypatch.setattr(type(cuda), "available", lambda self: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (10, 7))
    assert wanted.here(cuda).arch == "sm_103"
    assert cuda.runs("sm_103")


@pytest.mark.nvcc
def test_nvcc_names_the_archs_that_it_supports() -> None:
    nvcc = toolchain.find_nvcc(None)
    assert nvcc is not None
    assert "sm_90" in nvcc.archs.split()
    assert all(re.fullmatch(r"sm_\d+\w?", arch) for arch in nvcc.archs.split())


@needs_nvrtc
def test_nvrtc_names_the_archs_that_it_supports_and_a_note_keeps_them(tmp_path: Path) -> None:
    nvrtc = toolchain.find_nvrtc("", None)
    assert nvrtc is not None
    found = gpu_archs.supported_by(nvrtc, tmp_path)
    assert "sm_90" in found
    [note] = tmp_path.iterdir()
    files.write_checked(note, ["sm_1"])
    assert gpu_archs.supported_by(nvrtc, tmp_path) == {"sm_1"}
