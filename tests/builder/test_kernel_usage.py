"""`opjit get -v`: what each CUDA kernel takes of a GPU, whichever compiler made it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from opjit import backends
from opjit.backends import targets
from opjit.builder import build, kernel_usage
from opjit.builder.kernel_usage import KernelUsage
from opjit.recipe import toolchain
from opjit.store.store import Store
from tests import helpers
from tests.helpers import PLUS_CUDA, describe, no_nvcc, no_nvrtc, write_op

# A template and a plain kernel; the array in shared memory has 1024 bytes.
KERNELS = PLUS_CUDA.replace(
    "static __global__",
    """\
template <typename T> static __global__ void reverse(T *x)
{
    __shared__ T tile[256];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = tile[255 - threadIdx.x];
}

static __global__""",
    1,
).replace(
    "    plus_kernel<<<",
    "    reverse<float><<<1, 256, 0, stream>>>((float *)out->data);\n    plus_kernel<<<",
)
NVRTC = toolchain.find_nvrtc("", None)


@pytest.mark.nvcc
@pytest.mark.parametrize(
    "way",
    [no_nvrtc, pytest.param(no_nvcc, marks=pytest.mark.skipif(NVRTC is None, reason="no NVRTC"))],
)
def test_each_kernel_of_each_arch_has_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Callable[[pytest.MonkeyPatch], None]
) -> None:
    way(monkeypatch)
    recipe = describe(
        write_op(tmp_path / "op", plus_cu=KERNELS),
        targets.named("sm_80+sm_90", backends.for_device("cuda"), "13.0"),
    )
    found = {
        (each.kernel, each.arch): each for each in build.usage_of(recipe, Store(tmp_path / "cache"))
    }
    assert found.keys() == {
        (kernel, arch)
        for kernel in ("plus_kernel", "reverse<float>")
        for arch in ("sm_80", "sm_90")
    }
    assert {each.shared for (kernel, _), each in found.items() if kernel == "reverse<float>"} == {
        1024
    }
    assert all(0 < each.registers <= 64 and each.spilled == 0 for each in found.values())


@pytest.mark.nvcc
def test_get_with_v_prints_a_table_and_only_the_path_on_stdout(tmp_path: Path, here: Path) -> None:
    op = write_op(tmp_path / "op", plus_cu=KERNELS)
    done = helpers.command("get", op, "--arch", "sm_90", "-v", COLUMNS="80")
    assert Path(done.stdout.strip()).is_file(), done.stderr
    assert done.stderr.split()[:6] == ["kernel", "arch", "regs", "smem", "stack", "spill"]
    assert any(
        line.split()[:4:3] == ["reverse<float>", "1024"] for line in done.stderr.splitlines()
    )


def test_spills_and_stack_are_those_of_the_kernel_and_not_of_a_function_that_it_calls() -> None:
    output = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4copyPf' for 'sm_90'
ptxas info    : Function properties for _Z4copyPf
    64 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 64 bytes cumulative stack size, 2048 bytes smem, 400 bytes cmem[0]
ptxas info    : Function properties for _Z6helperf
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
    assert kernel_usage.parse(output) == [KernelUsage("copy", "sm_90", 40, 2048, 64, 20)]
    assert kernel_usage.parse("") == []
