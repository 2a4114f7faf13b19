"""Findings name the author's line instead of a header of opjit, the helper's rule, and a remedy that fits."""

import re
from pathlib import Path

import pytest

from tests.helpers import command, fresh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

OP = """\
import torch
import opjit

@opjit.op("blame::row(Tensor x) -> Tensor")
def row(x):
    return torch.empty_like(x)

@row.reference
def reference(x):
    return x.sum().expand_as(x).contiguous()

@row.samples
def samples(device):
    yield (torch.arange(128.0, device=device),)
"""
KERNEL = """\
#include "opjit_reduce.h"
static __global__ void row_kernel(const float *x, float *out, int n)
{
    const int i = threadIdx.x;
    MISTAKE
}

opjit_status row_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    row_kernel<<<1, 128, 0, stream>>>((const float *)x->data, (float *)out->data, (int)x->numel);
    return OPJIT_LAUNCHED();
}
"""
LINE = 5
RULE = (
    "all threads of a block must call opjit_block_reduce, and their number must be a multiple of 32"
)


def _found(folder: Path, mistake: str, threads: int = 128) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "op.py").write_text(OP)
    kernel = KERNEL.replace("MISTAKE", mistake).replace("1, 128", f"1, {threads}")
    (folder / "row.cu").write_text(kernel)
    done = command("test", folder, "--device", "cuda", "--only", "races")
    assert done.returncode == 1, done
    return done.stdout


@pytest.mark.parametrize(
    ("mistake", "threads", "said"),
    [
        ("out[i] = opjit_load(x + i + 1);", 128, "reads 4 bytes out of bounds: in no tensor"),
        ("if (i < 50) return; out[i] = opjit_block_reduce(x[i], opjit_add());", 128, RULE),
        ("if (i < 50) out[i] = opjit_block_reduce(x[i], opjit_add());", 128, RULE),
        ("out[i] = opjit_block_reduce(x[i], opjit_add());", 100, RULE),
        ("out[0] += x[i];", 128, "use atomicAdd()"),
        ("out[0] = x[i];", 128, "several threads write one place: use atomicAdd()"),
    ],
)
def test_a_finding_names_the_authors_line_and_a_remedy(
    mistake: str, threads: int, said: str, tmp_path: Path, no_gpu: None
) -> None:
    text = _found(tmp_path / "op", mistake, threads)
    assert f"row.cu:{LINE}: " in text
    assert said in text


def test_no_shell_reads_the_path_of_the_cache(
    tmp_path: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "it's $(touch ran)"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("OPJIT_CACHE", str(cache))
    assert f"row.cu:{LINE}: " in _found(tmp_path / "op", "out[i] = x[i + 1];")


# Statements of a kernel of 128 threads, or of its host function, and what is found at their line.
WARP_RULE = "all lanes of a warp must call opjit_warp_reduce"
OF_KERNEL = [
    ("if (i >= 64) return; out[i] = opjit_block_reduce(x[i], opjit_add());", RULE),
    ("if (i < 64) __syncthreads(); else opjit_block_reduce(x[i], opjit_add());", RULE),
    (
        "if (i < 50) opjit_block_reduce(x[i], opjit_add()); else opjit_block_reduce(x[i], opjit_maximum());",
        RULE,
    ),
    ("if (i < 16) opjit_warp_reduce(x[i], opjit_add()); __syncthreads();", WARP_RULE),
    ("opjit_put(out + i / 2, 1.0f);", "use atomicAdd()"),
    ("if (i % 2) opjit_put(out, 1.0f); else out[0] = 2;", "race on `out`, byte 0"),
    ("if (i >= 100) return; __syncthreads();", "28 of 128 threads of block 0 do not come"),
    ("if (i < 100) __syncthreads();", "28 of 128 threads of block 0 do not come"),
    ("((float *)x)[i] = 1;", "writes `x`, an input that the op's schema does not let it change"),
    ("out[i] = 100 / (n - 128);", "divides an integer by 0"),
    ("out[i] = host[0];", "reads 4 bytes out of bounds: in a variable of the host"),
    ("out[i] = x[i + 1];", "in no tensor, at byte 512 of the nearest, `x`, which has 512"),
]
OF_HOST = [
    (
        "cudaMemcpyAsync(out->data, x->data, 516, cudaMemcpyDeviceToDevice, stream);",
        "writes 516 bytes out of bounds: only the first 512 are in `out`",
    ),
    (
        "cudaMemcpyAsync(&host, (float *)x->data + 128, 4, cudaMemcpyDeviceToHost, stream);",
        "reads 4 bytes out of bounds: in no tensor, at byte 512 of the nearest, `x`",
    ),
    (
        "cudaMemsetAsync(out->data, 0, 516, stream);",
        "writes 516 bytes out of bounds: only the first 512 are in `out`",
    ),
]
RIGHT = [
    "cudaMemcpyAsync(&host, x->data, 4, cudaMemcpyDeviceToHost, stream);",
    "cudaMemcpyAsync(out->data, &host, 4, cudaMemcpyHostToDevice, stream);",
    "cudaMemsetAsync((float *)out->data + 1, 0, 508, stream);",
]
# Their lines are those of the statements: the first is line 5.
SOURCE = """#include "opjit_collective.h"
#include "opjit_reduce.h"
static __global__ void mistakes(const float *x, float *out, int n, int mode, const float *host) {
    const int i = threadIdx.x; out[i] = x[i]; __syncthreads(); switch (mode) {
{kernel} }
}
opjit_status mistake_cuda(const opjit_tensor *x, int64_t mode, opjit_tensor *out, cudaStream_t stream) {
    float host = 1; OPJIT_TRY(opjit_empty_like(out, x, x->dtype)); switch (mode) {
{host} }
    mistakes<<<1, 128, 0, stream>>>((const float *)x->data, (float *)out->data, (int)x->numel, (int)mode, &host);
    return OPJIT_LAUNCHED();
}
"""
CALLS = """
    import torch, opjit, sys
    mistake = opjit.inline("mistake(Tensor x, int mode) -> Tensor", cuda=sys.stdin.read(), like="x")
    for mode in range({modes}):
        try:
            mistake(torch.arange(128.0), mode)
            print("nothing")
        except RuntimeError as error:
            print(error)
"""


def _cases(statements: list[str], first: int) -> str:
    cases = enumerate(statements, first)
    return "\n".join(f"case {mode}: {{ {statement} break; }}" for mode, statement in cases)


def test_each_mistake_is_found_at_the_authors_line(no_gpu: None, tmp_path: Path) -> None:
    found = [*OF_KERNEL, *OF_HOST]
    kernel = _cases([statement for statement, _ in OF_KERNEL], 0)
    host = _cases([*(statement for statement, _ in OF_HOST), *RIGHT], len(OF_KERNEL))
    source = tmp_path / "mistake.cu"
    source.write_text(SOURCE.replace("{kernel}", kernel).replace("{host}", host))
    modes = len(found) + len(RIGHT)
    calls = CALLS.replace("sys.stdin.read()", f"open({str(source)!r}).read()")
    printed = fresh(
        calls.replace("{modes}", str(modes)), {"OPJIT_EMULATE": "1"}
    ).stdout.splitlines()
    lines = source.read_text().splitlines()
    for mode, ((statement, said), text) in enumerate(zip(found, printed, strict=False)):
        line = next(n for n, each in enumerate(lines, 1) if each.startswith(f"case {mode}:"))
        assert re.search(rf"mistake\.cu:{line}: |line {line};", text), (statement, text)
        assert said in text, (statement, text)
        assert "opjit_reduce.h:71: " not in text
    assert printed[len(found) :] == ["nothing"] * len(RIGHT)


def test_a_local_array_that_nobody_sets_is_not_zero(no_gpu: None) -> None:
    code = """
        import torch, opjit
        K = r'''
        static __global__ void sum(const float *x, float *out, int n)
        {
            float part[4];
            for (int k = threadIdx.x; k < n; k++)
                part[k % 4] += x[k];
            out[threadIdx.x] = part[0] + part[threadIdx.x % 4];
        }
        opjit_status local_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
        {
            OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
            sum<<<1, 64, 0, stream>>>((const float *)x->data, (float *)out->data, (int)x->numel);
            return OPJIT_LAUNCHED();
        }'''
        print(opjit.inline("local(Tensor x) -> Tensor", cuda=K, like="x")(torch.ones(64)).isnan().all().item())
    """
    for how in ("1", "fast"):
        assert fresh(code, {"OPJIT_EMULATE": how}).stdout == "True\n"


NOT_EMULATED = [
    (
        "__global__ void k(cudaTextureObject_t t, float *o) { o[0] = tex1Dfetch<float>(t, 0); }",
        "textures",
    ),
    ("texture<float, 1> t; __global__ void k(float *o) { o[0] = tex1Dfetch(t, 0); }", "textures"),
    ("__global__ void __cluster_dims__(2, 1, 1) k(float *o) { o[0] = 1; }", "clusters of blocks"),
    ("__cluster_dims__(2) __global__ void k(float *o) { o[0] = 1; }", "clusters of blocks"),
    ("__global__ void k(float *o) { o[0] = __vabsdiffu4(3, 4); }", "this name of CUDA"),
]


def test_a_feature_that_is_not_emulated_is_named(no_gpu: None) -> None:
    code = f"""
        import torch, opjit
        for text, feature in {NOT_EMULATED!r}:
            try:
                opjit.inline("lacks(Tensor x) -> Tensor", cuda=text + '''
        opjit_status lacks_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
        {{ return OPJIT_OK; }}''', like="x")(torch.ones(2))
            except opjit.errors.NoKernel as error:
                print(f"{{feature}}" in str(error))
    """
    assert fresh(code, {"OPJIT_EMULATE": "1"}).stdout == "True\n" * len(NOT_EMULATED)
