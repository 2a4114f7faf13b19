"""CUDA without nvcc: files in many styles compile by NVRTC and the C++ compiler, and compute the same as torch does."""

import contextlib
import struct
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import opjit
from opjit import backends, request, why
from opjit.backends.targets import Target
from opjit.builder import build, cuda, cuda_text, glue, nvrtc
from opjit.builder.compile_step import CompilerFailed
from opjit.builder.host_device_split import Halves
from opjit.errors import CompileError, NoKernel, ToolMissing
from opjit.recipe import flags, nvcc_flags, toolchain
from opjit.recipe import recipe as recipes
from opjit.recipe.nvcc_flags import NvccOnly
from opjit.store import elf
from opjit.store.entry import Entry, read
from opjit.store.store import Store
from tests import helpers
from tests.helpers import built, describe, is_emulated, no_nvcc, no_nvrtc, write_op

NVRTC = toolchain.find_nvrtc("", None)
needs_nvrtc = pytest.mark.skipif(
    NVRTC is None, reason="no NVRTC: torch is a CPU build, and there is no CUDA Toolkit with it"
)
SCHEMA = "keytest::plus(Tensor x) -> Tensor"
OPS = [
    pytest.param(op, id=op.schema.name, marks=[pytest.mark.slow] * (op.schema.name == "matmul"))
    for op in opjit.catalog.registry.all_ops()  # the compilers need 10 s for matmul
]
LAUNCH = "kernel<<<opjit_blocks(n, 256), 256, 0, stream>>>(from, to, n);"
Reference = Callable[[torch.Tensor], torch.Tensor]


def op_of(device: str, launch: str = LAUNCH, includes: str = "") -> str:
    """A .cu file: device code, and a host function that launches it on `from`, `to` and `n`."""
    return f"""{includes}
#include "opjit_cuda.h"

{device}

opjit_status plus_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "plus takes contiguous float32");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    const float *from = (const float *)x->data;
    float *to = (float *)out->data;
    const int n = (int)x->numel;
    {launch}
    return OPJIT_LAUNCHED();
}}
"""


def each(expression: str, before: str = "", qualifiers: str = "static") -> str:
    """A kernel that computes an expression of v, an element."""
    return f"""{before}
{qualifiers} __global__ void kernel(const float *from, float *to, int n)
{{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {{
        float v = from[i];
        to[i] = {expression};
    }}
}}"""


# The styles of the CUDA samples, llm.c, language models' kernels and tutorials. Each has a file and its reference.
COUNTING = each("v + 1").replace("if (i < n) {", "if (i < n) { atomicAdd(&count, 1);")
SECOND = each("2 * v").replace("kernel", "second")
THEN_SECOND = LAUNCH + "\n    " + LAUNCH.replace("kernel", "second").replace("(from", "(to")
SPECIAL = each("v + 10", qualifiers="").replace("kernel(", "kernel<2>(")
STYLES: dict[str, tuple[str, Reference]] = {
    "plain": (op_of(each("2 * v")), lambda x: 2 * x),
    "extern C": (op_of(each("v + 1", qualifiers='extern "C"')), lambda x: x + 1),
    "unnamed namespace": (
        op_of("namespace {" + each("v + 1", qualifiers="") + "}"),
        lambda x: x + 1,
    ),
    "namespace": (
        op_of(
            "namespace a { namespace b {" + each("v + 1", qualifiers="") + "} }", "a::b::" + LAUNCH
        ),
        lambda x: x + 1,
    ),
    "launch bounds": (
        op_of(each("v + 1", qualifiers="__launch_bounds__(256, 2)")),
        lambda x: x + 1,
    ),
    "device function": (
        op_of(
            each("twice(v)", "__device__ __forceinline__ float twice(float v) { return 2 * v; }")
        ),
        lambda x: 2 * x,
    ),
    "host and device function": (
        op_of(
            each("twice(v)", "__host__ __device__ inline float twice(float v) { return 2 * v; }"),
            'OPJIT_CHECK(twice(2) == 4, "no");\n    ' + LAUNCH,
        ),
        lambda x: 2 * x,
    ),
    "macro of spaces": (
        op_of(
            "#define HD __host__ __device__\n"
            + each("twice(v)", "HD inline float twice(float v) { return 2 * v; }")
        ),
        lambda x: 2 * x,
    ),
    "template": (
        op_of(
            "template <typename T>\n" + each("v + T(1)"), LAUNCH.replace("kernel", "kernel<float>")
        ),
        lambda x: x + 1,
    ),
    "instance that is never launched": (
        op_of(
            "template <typename T>\n"
            + each("v + T(1)")
            + """
static void *never() { return (void *)&kernel<double>; }""",
            LAUNCH.replace("kernel", "kernel<float>"),
        ),
        lambda x: x + 1,
    ),
    "template of a host function": (
        op_of(
            "template <typename T>\n"
            + each("v + T(1)")
            + """
template <typename T> static void run(const T *from, T *to, int n, cudaStream_t stream)
{ kernel<T><<<(n + 127) / 128 + 1, 128, 0, stream>>>(from, to, n); }
""",
            "run<float>(from, to, n, stream);",
        ),
        lambda x: x + 1,
    ),
    "parameter pack": (
        op_of(
            """template <typename... T> __global__ void kernel(const float *from, float *to, int n, T... more)
{ int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) to[i] = (from[i] + ... + more); }""",
            LAUNCH.replace("n);", "n, 1.0f, 2);"),
        ),
        lambda x: x + 3,
    ),
    "struct argument": (
        op_of(
            """struct job { const float *from; float *to; int n; float add; };
__global__ void kernel(const __grid_constant__ job j)
{ int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < j.n) j.to[i] = j.from[i] + j.add; }""",
            "kernel<<<n / 256 + 1, 256, 0, stream>>>({from, to, n, 1.0f});",
        ),
        lambda x: x + 1,
    ),
    "dynamic shared memory": (
        op_of(
            """__global__ void kernel(const float *from, float *to, int n)
{
    extern __shared__ float tile[];
    int i = blockIdx.x * 256 + threadIdx.x;
    tile[threadIdx.x] = i < n ? from[i] : 0;
    __syncthreads();
    if (i < n) to[i] = 2 * tile[threadIdx.x];
}""",
            """OPJIT_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536));
    kernel<<<dim3(n / 256 + 1), dim3(256), 65536, stream>>>(from, to, n);""",
        ),
        lambda x: 2 * x,
    ),
    "constant memory that is set": (
        op_of(
            "static __constant__ float factor;\n" + each("factor * v"),
            """float two = 2;
    OPJIT_CUDA_CHECK(cudaMemcpyToSymbolAsync(factor, &two, sizeof two, 0, cudaMemcpyHostToDevice, stream));
    OPJIT_CUDA_CHECK(cudaStreamSynchronize(stream));
    """
            + LAUNCH,
        ),
        lambda x: 2 * x,
    ),
    "device variable in a namespace": (
        op_of(
            "namespace { __device__ int count; }\n" + COUNTING,
            f"""void *address;
    OPJIT_CUDA_CHECK(cudaGetSymbolAddress(&address, count));
    OPJIT_CUDA_CHECK(cudaMemsetAsync(address, 0, sizeof(int), stream));
    {LAUNCH}
    int found = 0;
    OPJIT_CUDA_CHECK(cudaMemcpyAsync(&found, address, sizeof found, cudaMemcpyDeviceToHost, stream));
    OPJIT_CUDA_CHECK(cudaStreamSynchronize(stream));
    OPJIT_CHECK(found == n, "counted %d", found);""",
        ),
        lambda x: x + 1,
    ),
    "cooperative groups": (
        op_of(
            """namespace cg = cooperative_groups;
__global__ void kernel(const float *from, float *to, int n)
{
    cg::thread_block block = cg::this_thread_block();
    cg::thread_block_tile<32> warp = cg::tiled_partition<32>(block);
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float v = cg::reduce(warp, 1.0f, cg::plus<float>{});
    if (i < n) to[i] = from[i] + v;
}""",
            includes="#include <cooperative_groups.h>\n#include <cooperative_groups/reduce.h>",
        ),
        lambda x: x + 32,
    ),
    "bfloat16": (
        op_of(
            "typedef __nv_bfloat16 floatX;\n" + each("(float)((floatX)v)"),
            includes="#include <cuda_bf16.h>",
        ),
        lambda x: x.bfloat16().float(),
    ),
    "math": (
        op_of(
            each("tanhf(0.5f * v) + expf(-fabsf(v)) + rsqrtf(1 + v * v)"),
            includes="#include <math.h>",
        ),
        lambda x: torch.tanh(0.5 * x) + torch.exp(-x.abs()) + torch.rsqrt(1 + x * x),
    ),
    "C++ on the host": (
        op_of(
            each("v + 1"),
            "std::vector<int> sizes{256};\n    kernel<<<n / 256 + 1, sizes[0], 0, stream>>>(from, to, n);",
            "#include <vector>\n#include <algorithm>\n#include <string>",
        ),
        lambda x: x + 1,
    ),
    "assert and printf": (
        op_of(
            each("v + 1").replace(
                "float v", 'assert(n > 0); if (n < 0) printf("%d\\n", i); float v'
            ),
            includes="#include <assert.h>\n#include <stdio.h>",
        ),
        lambda x: x + 1,
    ),
    "macro that launches": (
        op_of(
            "#define RUN(k, ...) k<<<n / 256 + 1, 256, 0, stream>>>(__VA_ARGS__)\n" + each("v + 1"),
            "RUN(kernel, from, to, n);",
        ),
        lambda x: x + 1,
    ),
    "cudaLaunchKernel": (
        op_of(
            each("v + 1"),
            """void *arguments[] = {(void *)&from, (void *)&to, (void *)&n};
    OPJIT_CUDA_CHECK(cudaLaunchKernel((const void *)kernel, dim3(n / 256 + 1), dim3(256), arguments, 0, stream));""",
        ),
        lambda x: x + 1,
    ),
    "cudaLaunchKernelEx": (
        op_of(
            each("v + 1"),
            """cudaLaunchConfig_t config = {};
    config.gridDim = dim3(n / 256 + 1), config.blockDim = dim3(256), config.stream = stream;
    OPJIT_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, from, to, n));""",
        ),
        lambda x: x + 1,
    ),
    "macro that defines a kernel": (
        op_of(
            """#define KERNEL(name) \\
    __global__ void name(const float *from, float *to, int n) \\
    { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) to[i] = from[i] + 1; }
KERNEL(kernel)"""
        ),
        lambda x: x + 1,
    ),
    "constants of C's headers": (
        op_of(
            each(
                "v * (float)(M_1_PI / M_1_PI) + (CHAR_MAX > 0) + (RAND_MAX > 0 && isfinite(-INFINITY + v)) + (p == NULL)"
            ).replace("float v", "int *p = NULL; float v"),
            includes="#include <limits.h>\n#include <math.h>\n#include <stdlib.h>",
        ),
        lambda x: x + 2,
    ),
    "two kernels": (op_of(each("v + 1") + SECOND, THEN_SECOND), lambda x: 2 * (x + 1)),
    "overloaded kernels": (
        op_of(
            each("v + 1", qualifiers="") + each("v + 2", qualifiers="").replace("int n", "long n")
        ),
        lambda x: x + 1,
    ),
    "specialised kernel": (
        op_of(
            "template <int k>\n" + each("v + k", qualifiers="") + "template <>\n" + SPECIAL,
            LAUNCH.replace("kernel", "kernel<2>"),
        ),
        lambda x: x + 10,
    ),
    "declared before": (
        op_of(
            "static __global__ void kernel(const float *from, float *to, int n);\n"
            + each("v + 1", qualifiers="")
        ),
        lambda x: x + 1,
    ),
    "class with methods": (
        op_of(
            """template <typename T> class row {
public:
    __host__ __device__ explicit row(T *at) : at_(at) {}
    __device__ T get(int i) const { return __ldg(at_ + i); }
private:
    T *at_;
};
"""
            + each("row<const float>(from).get(i) + 1 + 0 * v")
        ),
        lambda x: x + 1,
    ),
    "cub": (
        op_of(
            """__global__ void kernel(const float *from, float *to, int n)
{
    typedef cub::BlockReduce<float, 256> reduce;
    __shared__ typename reduce::TempStorage storage;
    __shared__ float sum;
    int i = blockIdx.x * 256 + threadIdx.x;
    float v = reduce(storage).Sum(1.0f);
    if (threadIdx.x == 0) sum = v;
    __syncthreads();
    if (i < n) to[i] = from[i] + sum;
}""",
            includes="#include <cub/block/block_reduce.cuh>",
        ),
        lambda x: x + 256,
    ),
}


def entry_of(tmp_path: Path, source: str, arch: str = "sm_90") -> Entry:
    target = Target(backends.for_device("cuda"), arch, "cuda13")
    return built(write_op(tmp_path / "op", plus_cu=source), tmp_path / "cache", target, SCHEMA)


def compiler_of(entry: Entry) -> str:
    return read(entry.folder)[0].built_with["cuda"]


@needs_nvrtc
@pytest.mark.parametrize("style", STYLES)
def test_a_file_in_this_style_needs_no_nvcc(tmp_path: Path, style: str) -> None:
    assert compiler_of(entry_of(tmp_path, STYLES[style][0])).startswith("NVRTC ")


@pytest.mark.parametrize("style", STYLES)
def test_a_file_in_this_style_computes_as_its_reference(style: str, cuda_device: str) -> None:
    name = "".join(filter(str.isalnum, style))
    op = opjit.inline(
        f"{name}(Tensor x) -> Tensor",
        cuda=STYLES[style][0].replace("plus_cuda", f"{name}_cuda"),
        like="x",
    )
    if is_emulated() and style == "cub":
        with pytest.raises(NoKernel, match="CUB and Thrust are not emulated"):
            op(torch.ones(4))
        return
    for size in (4, 1024, 100_000):
        x = torch.randn(size, device=cuda_device)
        torch.testing.assert_close(op(x), STYLES[style][1](x), rtol=1e-5, atol=1e-5)


# --- machine code -------------------------------------------------------------------------------------------------------------------------


def code_of(cubin: bytes) -> dict[str, bytes]:
    """The instructions of each kernel in a cubin, an ELF file."""
    at, size, count, names = (
        *struct.unpack_from("<Q", cubin, 40),
        *struct.unpack_from("<3H", cubin, 58),
    )
    sections = [struct.unpack_from("<IIQQQQII", cubin, at + index * size) for index in range(count)]
    strings = cubin[sections[names][4] :]
    named = {
        strings[section[0] : strings.index(b"\0", section[0])].decode(): section
        for section in sections
    }
    return {
        name: cubin[section[4] : section[4] + section[5]]
        for name, section in named.items()
        if name.startswith(".text.")
    }


def fat_of(content: bytes) -> dict[str, bytes]:
    found = {}
    at = 16
    while at < len(content):
        _, _, header, size, _, _, _, _, arch, _, _, flags = struct.unpack_from(
            "<HHIQIIHHIIIQ", content, at
        )
        found[f"sm_{arch}{'a' if flags & 0x100000 else 'f' if flags & 0x200000 else ''}"] = content[
            at + header : at + header + size
        ]
        at += header + size
    return found


@pytest.mark.nvcc
@needs_nvrtc
@pytest.mark.parametrize("op", OPS)
def test_a_bundled_op_s_machine_code_is_that_of_nvcc(tmp_path: Path, op: opjit.Op) -> None:
    target = op.declaration.target(Target(backends.for_device("cuda"), "sm_90", "cuda13"))
    recipe = op.declaration.recipe(target, toolchain.identities_of(target, None))
    nvcc = toolchain.require_nvcc(None)
    compiler = toolchain.require_compiler(None)
    assert NVRTC is not None
    source = tmp_path / "opjit_kernel.cu"
    source.write_text(
        glue.render(recipe.schema, backends.for_device("cuda"), recipe.source.name)[
            "opjit_kernel.cu"
        ]
    )
    cuda.compile_kernels(recipe, [source], tmp_path, compiler, NVRTC)
    fast = code_of(
        fat_of((tmp_path / "opjit_kernel" / "opjit_kernel.fatbin").read_bytes())[target.arch]
    )
    subprocess.run(
        [
            f"{nvcc.root}/bin/nvcc",
            "-cubin",
            f"-arch={target.arch}",
            "-std=c++17",
            f"-I{recipe.folder}",
            f"-I{recipe.folder.parent}",
            "-o",
            "slow.cubin",
            source,
        ],
        cwd=tmp_path,
        check=True,
    )
    slow = code_of((tmp_path / "slow.cubin").read_bytes())
    in_one_file = [
        each for each in opjit.catalog.registry.all_ops() if each.folder == recipe.folder
    ]
    if len(in_one_file) == 1:
        assert fast.keys() == slow.keys()
    else:  # nvcc also compiles the kernels of the file's other ops
        assert fast
        assert fast.keys() <= slow.keys()
    same = [name for name in fast if fast[name] == slow[name]]
    if NVRTC.version.partition(" ")[0] == nvcc.version and op.schema.name not in (
        "all_reduce_rms_norm",
        "allreduce",
        "lltm_backward",
        "matmul",
    ):
        assert len(same) == len(fast)
    for name in fast.keys() - set(same):  # some ops differ a little, and so do other versions
        assert abs(len(fast[name]) - len(slow[name])) < 0.1 * len(slow[name]) + 256, name


@pytest.mark.nvcc
def test_a_fat_binary_is_as_nvidia_s_tool_writes_it(tmp_path: Path) -> None:
    archs = ["sm_80", "sm_90", "sm_90a", "sm_100", "sm_120f"]
    (tmp_path / "k.cu").write_text("__global__ void kernel(float *x) { x[threadIdx.x] *= 2; }")
    numbers = [f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in archs]
    subprocess.run(
        [
            f"{toolchain.require_nvcc(None).root}/bin/nvcc",
            "-fatbin",
            *numbers,
            "--compress-mode=none",
            "-o",
            "k.fatbin",
            "k.cu",
        ],
        cwd=tmp_path,
        check=True,
    )
    content = (tmp_path / "k.fatbin").read_bytes()
    cubins = fat_of(content)
    assert sorted(cubins) == sorted(archs)
    assert nvrtc.fatbin(cubins) == content


@needs_nvrtc
@pytest.mark.parametrize(("version", "seeds"), [("12.8 abc", []), ("13.0 abc", ["opjit"])])
def test_nvrtc_gets_a_seed_if_its_release_has_that_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, seeds: list[str]
) -> None:
    assert NVRTC is not None
    given: list[str] = []

    def compile_for(
        path: str, source: str, name: str, more: object, options: list[str], expressions: object
    ) -> nvrtc.DeviceCode:
        given.extend(options)
        return nvrtc.DeviceCode(b"", {}, "")

    monkeypatch.setattr(nvrtc, "compile_for", compile_for)
    device, host = nvcc_flags.translated(backends.for_device("cuda").flags("sm_90", "cuda12").cuda)
    unit = cuda_text.CudaFile("k.cu", host, [], [], device, [], ["sm_90"], str, {})
    cuda._compile_device(unit, [""], NVRTC._replace(version=version), [])
    assert [flag.partition("=")[2] for flag in given if "seed" in flag] == seeds


@needs_nvrtc
def test_what_waits_for_nvrtc_is_compiled_in_another_process_to_the_same_bytes() -> None:
    found = toolchain.find_nvrtc("", None)
    assert found is not None

    def compiled(code: str) -> nvrtc.DeviceCode:
        return nvrtc.compile_for(
            found.library,
            code,
            "k.cu",
            {"two.h": "#define TWO 2\n"},
            ["--gpu-architecture=sm_90"],
            ["scale<int>"],
        )

    code = '#include "two.h"\ntemplate <typename T> __global__ void scale(T *x) { *x *= TWO; }'
    here = compiled(code)
    with ThreadPoolExecutor(1) as pool, nvrtc._turn:
        assert pool.submit(compiled, code).result() == here
        with pytest.raises(CompilerFailed, match="TWICE"):
            pool.submit(compiled, code.replace("TWO;", "TWICE;")).result()


@pytest.mark.nvcc
@needs_nvrtc
def test_ptx_in_a_fat_binary_has_the_header_that_nvidia_s_tool_writes(tmp_path: Path) -> None:
    found = toolchain.find_nvrtc("", None)
    assert found is not None
    code = "__global__ void kernel(float *x) { *x = 1; }"
    ptx = nvrtc.compile_for(
        found.library, code, "k.cu", {}, ["--gpu-architecture=compute_90"], []
    ).code
    (tmp_path / "k.ptx").write_bytes(ptx.rstrip(b"\0"))
    subprocess.run(
        [
            f"{toolchain.require_nvcc(None).root}/bin/fatbinary",
            "--create",
            "k.fatbin",
            "--compress=false",
            "--image3=kind=ptx,sm=90,file=k.ptx",
        ],
        cwd=tmp_path,
        check=True,
    )
    theirs, ours = (
        bytearray(content[:96])
        for content in ((tmp_path / "k.fatbin").read_bytes(), nvrtc.fatbin({"compute_90": ptx}))
    )
    for header in (theirs, ours):
        header[8:16] = header[24:32] = bytes(8)  # sizes: the tool leaves out comments and tabs
    theirs[40:44] = ours[40:44]  # the version of PTX, which is that of the compiler
    assert ours == theirs


def test_variables_and_declarations_of_the_host_are_not_in_the_device_s_part() -> None:
    text = """\
std::vector<Tensor> launch(Tensor x, double scale = 1);
static std::map<int, Tensor> kept;
template <typename T> void map(T x);
const int threads = 256;
__constant__ float table[4];
__device__ float twice(float x);
extern __shared__ float scratch[];
using Number = float;
struct Pair { float a, b; };
MAKE_KERNEL(float);
"""
    device = Halves(text).device
    assert [line for line in device.splitlines() if line.strip(";")] == text.splitlines()[3:]
    assert device.count("\n") == text.count("\n")


# --- which compiler -----------------------------------------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("op", OPS)
def test_every_bundled_op_builds_without_the_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: opjit.Op
) -> None:
    no_nvcc(monkeypatch)
    target = Target(backends.for_device("cuda"), "sm_80+sm_90+sm_100", "cuda13")
    entry = request.entry(op, target, Store(tmp_path))
    assert compiler_of(entry).startswith("NVRTC ")
    own = op.declaration.target(target).arch
    assert elf.inspect(entry.library.read_bytes()).cuda_archs == {*own.split("+")}


REFUSED = {
    "managed memory": "__managed__ int count;\n" + each("v + 1"),
    "two variables in one declaration": "__device__ int first, second;\n" + each("v + 1"),
}


@pytest.mark.nvcc
@needs_nvrtc
@pytest.mark.parametrize("code", REFUSED)
def test_what_only_nvcc_takes_is_built_by_nvcc_and_why_says_so(tmp_path: Path, code: str) -> None:
    entry = entry_of(tmp_path, op_of(REFUSED[code]))
    assert compiler_of(entry).startswith("nvcc V")
    recipe = describe(
        tmp_path / "op", Target(backends.for_device("cuda"), "sm_90", "cuda13"), SCHEMA
    )
    assert helpers.found(Store(tmp_path / "cache"), recipe) is not None, "the next request finds it"
    shown = str(why.compare(recipe, Store(tmp_path / "cache"), entry.folder))
    assert f"CUDA code by {compiler_of(entry)}" in shown
    assert ", as " in shown


@needs_nvrtc
def test_what_only_nvcc_takes_is_an_error_without_nvcc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_nvcc(monkeypatch)
    with pytest.raises(
        ToolMissing, match="needs nvcc, as it uses __managed__; install the CUDA Toolkit"
    ):
        entry_of(tmp_path, op_of(REFUSED["managed memory"]))


@pytest.mark.nvcc
@needs_nvrtc
@pytest.mark.parametrize(("first", "then"), [(no_nvcc, no_nvrtc), (no_nvrtc, no_nvcc)])
def test_a_cache_filled_with_one_compiler_serves_a_machine_with_the_other(
    tmp_path: Path,
    first: Callable[[pytest.MonkeyPatch], None],
    then: Callable[[pytest.MonkeyPatch], None],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        first(patch)
        made = entry_of(tmp_path, STYLES["plain"][0])
    with pytest.MonkeyPatch.context() as patch:
        then(patch)
        assert entry_of(tmp_path, STYLES["plain"][0]).folder == made.folder
    assert entry_of(tmp_path, STYLES["plain"][0]).folder == made.folder, "and one that has both"


@needs_nvrtc
def test_the_author_s_flags_and_folders_reach_both_parts(tmp_path: Path) -> None:
    source = op_of(
        each("ADD(v) + MORE"), 'OPJIT_CHECK(ADD(1) == 2, "no");' + LAUNCH, '#include "more.h"'
    )
    folder = write_op(tmp_path / 'a "quoted" \\ folder', plus_cu=source)
    more = tmp_path / "more"
    more.mkdir()
    (more / "more.h").write_text("#define MORE 3\n")
    given = ["-DADD(x)=(x+int{1})", "--use_fast_math", "-Xptxas=-O2", "-Xcompiler=-O2"]
    extra = flags.check_flags("keytest::plus", folder, (), given, (), [more])
    plain = describe(folder, Target(backends.for_device("cuda"), "sm_90", "cuda13"), SCHEMA)
    joined = flags.join(plain.flags, extra, plain.target)
    compilers = toolchain.identities_of(plain.target, None)
    recipe = recipes.describe(plain.schema, plain.target, plain.source, joined, compilers)
    assert compiler_of(build.build(recipe, Store(tmp_path / "cache"))).startswith("NVRTC ")


# --- mistakes -----------------------------------------------------------------------------------------------------------------------------

# A file, the text of the line that is wrong, and a word of the message.
MISTAKES = {
    "in device code": (op_of(each("v + wrong")), "v + wrong", "wrong"),
    "in host code": (
        op_of(each("v + 1"), "int m = wrong;\n    " + LAUNCH),
        "int m = wrong",
        "wrong",
    ),
    "of a brace": (op_of(each("v + 1") + "}"), "}}", ""),
    "of a header": (
        op_of(each("v + 1"), includes='#include "missing.h"'),
        "missing.h",
        "missing.h",
    ),
    "of an argument": (op_of(each("v + 1"), LAUNCH.replace("to, n", 'to, "n"')), '"n"', "int"),
    "of a launch": (op_of(each("v + 1"), "kernel<<<>>>(from, to, n);"), "<<<>>>", ""),
}


@needs_nvrtc
@pytest.mark.parametrize("with_nvcc", [pytest.param(True, marks=pytest.mark.nvcc), False])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_at_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str, with_nvcc: bool
) -> None:
    if not with_nvcc:
        no_nvcc(monkeypatch)
    source, wrong, text = MISTAKES[mistake]
    line = next(
        number for number, each_line in enumerate(source.splitlines(), 1) if wrong in each_line
    )
    with pytest.raises((CompileError, ToolMissing)) as caught:
        entry_of(tmp_path, source)
    shown = str(caught.value)
    assert text in shown
    if isinstance(caught.value, CompileError):
        assert f"plus.cu:{line}:" in shown or f"plus.cu({line}): " in shown, shown
    assert not list((tmp_path / "cache" / "v2").glob("keytest.plus/*/*")), "nothing half-built"


@needs_nvrtc
def test_an_arch_that_the_compiler_does_not_know_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_nvcc(monkeypatch)
    with pytest.raises(CompileError, match="gpu-architecture"):
        entry_of(tmp_path, STYLES["plain"][0], "sm_10")


# --- the split ----------------------------------------------------------------------------------------------------------------------------


def test_both_parts_keep_every_line_at_its_number() -> None:
    for source, _ in STYLES.values():
        parts = Halves(source)
        assert parts.host.count("\n") == parts.device.count("\n") == source.count("\n")


@pytest.mark.parametrize("text", ["{", "f(]", "a <<< b;", "k<<<1, 2>>>;"])
def test_a_file_that_is_not_understood_is_left_to_nvcc(text: str) -> None:
    with pytest.raises(NvccOnly):
        Halves(text)


WORDS = [
    "{",
    "}",
    "(",
    ")",
    "<",
    ">",
    "<<<",
    ">>>",
    ";",
    "::",
    "kernel",
    "__global__",
    "__device__",
    "void",
    "template",
    "typename",
    "T",
    ",",
    "=",
    "namespace",
    "struct",
    "#define x \\\n y\n",
    "/*",
    "*/",
    "//",
    "\n",
    '"',
    "'",
    "int",
    "extern",
    "1",
]


@given(st.lists(st.sampled_from(WORDS), max_size=40))
def test_any_text_is_split_or_refused(words: list[str]) -> None:
    text = " ".join(words)
    with contextlib.suppress(NvccOnly):
        parts = Halves(text)
        assert parts.host.count("\n") == parts.device.count("\n") == text.count("\n")
