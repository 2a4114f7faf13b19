"""OPJIT_EMULATE=1: a public program for torch's `load_inline` with CUDA sources runs on CPU tensors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cpp_extension.corpus.calls import cuda
from tests.emulate import extensions
from tests.helpers import command, ended, fresh

CODE = """
    import torch, opjit, warnings
    CUDA = r'''
    __global__ void roll(const float *x, float *y, int n, int mode)
    {
        __shared__ float s[64];
        const int t = threadIdx.x;
        s[t] = t < n ? x[t] : 0;
        if (mode != 1)
            __syncthreads();
        if (t < n || mode == 2)
            y[t] = s[(t + 1) % 64];
    }
    torch::Tensor turn(torch::Tensor x, int mode)
    {
        TORCH_CHECK(x.is_cuda(), "turn takes a CUDA tensor");
        auto y = torch::empty_like(x);
        roll<<<1, 64>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.numel(), mode);
        return y;
    }'''
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            module = opjit.load_inline(
                "emulated_turn", "torch::Tensor turn(torch::Tensor x, int mode);", CUDA, functions="turn"
            )
        print([str(each.message)[:44] for each in caught])
    print(module.turn(torch.arange(64.), 0)[:3].tolist())
    for mode, size in ((1, 64), (2, 40)):
        try:
            module.turn(torch.ones(size), mode)
        except RuntimeError as error:
            print(error)
    print(opjit.get("add_custom")(torch.ones(2), torch.ones(2)).tolist())
"""


def test_a_program_runs_on_cpu_tensors_and_says_so(no_gpu: None) -> None:
    done = fresh(CODE, {"OPJIT_EMULATE": "1"})
    warned, right, race, bounds, later = done.stdout.splitlines()
    assert warned == "['OPJIT_EMULATE is set, so CUDA kernels run em']"
    assert right == "[1.0, 2.0, 3.0]"
    assert re.match(
        r"emulated: emulated_turn\.cu:(6|10): race on shared memory `s`, .* in line (6|10);", race
    )
    assert re.fullmatch(
        r"emulated: emulated_turn\.cu:10: block 0 thread \d+ writes 4 bytes out of bounds: "
        r"at byte \d+ of memory that has 160 bytes",
        bounds,
    )
    assert later == "[2.0, 2.0]"
    why = command("why", "emulated_turn")
    assert "its CUDA code is emulated on the CPU" in " ".join(why.stdout.split())


def test_a_program_is_not_emulated_by_default(no_gpu: None) -> None:
    done = ended(CODE, {"OPJIT_EMULATE": None, "OPJIT_ARCH": None, "TORCH_CUDA_ARCH_LIST": None})
    assert "no GPU is visible" in done.stderr, done


def test_a_feature_that_is_not_emulated_is_an_error_at_its_line(no_gpu: None) -> None:
    code = """
        import opjit
        CUDA = '''#include <torch/types.h>
        #include <mma.h>
        '''
        opjit.load_inline("emulated_wmma", "", CUDA)
    """
    done = ended(code, {"OPJIT_EMULATE": "1"})
    assert "emulated_wmma.cu:2: tensor cores are not emulated" in done.stderr, done


def test_a_flag_that_only_nvcc_has_is_an_error_that_names_it(no_gpu: None) -> None:
    code = """
        import opjit
        opjit.load_inline("emulated_flag", "", "__global__ void k() {}", extra_cuda_cflags=["-arch=sm_90"])
    """
    done = ended(code, {"OPJIT_EMULATE": "1"})
    assert (
        "NoKernel: emulated_flag is not emulated: NVRTC does not have the flag -arch=sm_90"
        in done.stderr
    )


SHIFT = """\
#pragma once
template <typename T>
__global__ void shift(const T *x, T *y, int n)
{
    __shared__ T tile[64];
    const int t = threadIdx.x;
    tile[t] = t < n ? x[t] : 0;
    SYNC
    if (t < n)
        y[t] = tile[(t + 1) % 64];
}
"""
LAUNCH = """\
#include <torch/types.h>
#include "parts/shift.cuh"
at::Tensor shifted(const at::Tensor &x)
{
    TORCH_CHECK(x.is_cuda(), "shifted takes a CUDA tensor");
    auto y = at::empty_like(x);
    shift<float><<<1, 64>>>(x.data_ptr<float>(), y.data_ptr<float>(), (int)x.numel());
    return y;
}
"""
BINDING = """\
#include <torch/extension.h>
at::Tensor shifted(const at::Tensor &x);
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("shifted", &shifted); }
"""


@pytest.mark.parametrize("right", [True, False])
def test_files_and_their_headers_run_on_cpu_tensors(
    right: bool, tmp_path: Path, no_gpu: None
) -> None:
    (tmp_path / "parts").mkdir()
    sync = "__syncthreads();" if right else ""
    (tmp_path / "parts/shift.cuh").write_text(SHIFT.replace("SYNC", sync))
    (tmp_path / "shift.cu").write_text(LAUNCH)
    (tmp_path / "binding.cpp").write_text(BINDING)
    code = f"""
        import torch, opjit, warnings
        warnings.simplefilter("ignore")  # that kernels are emulated
        folder = {str(tmp_path)!r}
        module = opjit.load("emulated_shift", [f"{{folder}}/binding.cpp", f"{{folder}}/shift.cu"])
        try:
            print(module.shifted(torch.arange(64.))[:3].tolist())
        except RuntimeError as error:
            print(error)
    """
    done = fresh(code, {"OPJIT_EMULATE": "1"})
    line = r"emulated: shift\.cuh:(7|10): race on shared memory `tile`, .* in line (7|10);.*\n"
    expected = re.escape("[1.0, 2.0, 3.0]\n") if right else line
    assert re.fullmatch(expected, done.stdout), done


@pytest.mark.slow
@pytest.mark.parametrize("name", [program.name for program in cuda.PROGRAMS[::6]])
def test_a_public_program_is_right(name: str, no_gpu: None) -> None:
    """`python -m tests.emulate.extensions` runs all of them."""
    code = f"from tests.emulate import extensions; raise SystemExit(extensions.main([{name!r}]))"
    done = fresh(code, {"OPJIT_EMULATE": "1"})
    assert done.stdout == f"{name} (emulated): right\n"


def test_each_function_of_the_programs_has_a_reference() -> None:
    for program in cuda.PROGRAMS:
        called = {call.partition("m.")[2].partition("(")[0] for call in program.calls}
        assert {
            name.partition(".")[0].partition(",")[0] for name in called
        } <= extensions.REFERENCES.keys()
