"""Every CUDA op is clean under compute-sanitizer, which would notice."""

import re
from pathlib import Path

import pytest

from opjit.catalog import registry
from opjit.testing import sanitize
from tests.helpers import BUNDLED, is_across_ranks, op_py

pytestmark = pytest.mark.gpu

WRONG = {
    "memcheck": "to[n] = 1",
    "racecheck": "__shared__ volatile float last; last = threadIdx.x; to[1] = last",
    "initcheck": "to[0] = to[1]",
    "synccheck": "if (threadIdx.x % 32 <= 16) __syncwarp(0xffff)",
}
SAMPLES = "{0}.reference(torch.zeros_like)\n{0}.samples(lambda device: [torch.zeros(64, device=device)])\n"
WRONG_CU = """
#include "opjit_cuda.h"
static __global__ void wrong_kernel(float *to, int64_t n)
{{
    to[threadIdx.x] = 0;
    {statement};
}}
opjit_status {name}_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    wrong_kernel<<<1, {threads}, 0, stream>>>((float *)out->data, x->numel);
    return OPJIT_LAUNCHED();
}}
"""


@pytest.fixture(scope="module")
def sanitizer() -> str:
    found = sanitize.find_tool()
    if found is None:
        pytest.skip("no compute-sanitizer: it comes with the CUDA Toolkit")
    return found


@pytest.mark.parametrize("tool", list(sanitize.FOR_CUDA))
@pytest.mark.usefixtures("parts")
def test_every_cuda_op_is_clean_under_compute_sanitizer(sanitizer: str, tool: str) -> None:
    known = map(registry.find, (*BUNDLED, "optest::parts", "optest::joined"))
    ops = [op for op in known if "cuda" in op.backends() and not is_across_ranks(op)]
    names = [op.qualified for op in ops]
    done = sanitize.under_tool(sanitizer, tool, ops)
    assert done.returncode == 0, done.stdout
    assert all(
        re.search(rf"^{name}: [1-9]\d* calls$", done.stdout, re.MULTILINE) for name in names
    ), done.stdout


@pytest.mark.parametrize("tool", list(sanitize.FOR_CUDA))
def test_compute_sanitizer_would_notice(sanitizer: str, tool: str, tmp_path: Path) -> None:
    name = f"wrong_under_{tool}"
    (tmp_path / "op.py").write_text(
        op_py(f"optest::{name}(Tensor x) -> Tensor") + SAMPLES.format(name)
    )
    (tmp_path / f"{name}.cu").write_text(
        WRONG_CU.format(name=name, statement=WRONG[tool], threads=1 if tool == "initcheck" else 64)
    )
    [op] = registry.add_path(tmp_path)
    done = sanitize.under_tool(sanitizer, tool, [op])
    assert done.returncode == sanitize.FOUND, done.stdout
    assert "wrong_kernel" in done.stdout
