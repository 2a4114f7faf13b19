"""NVRTC and the C++ compiler compile the text that nvcc would: its macros, its branches, its types."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from opjit import backends
from opjit.backends.targets import Target
from opjit.builder import cuda, cuda_text, nvrtc, preprocessed
from opjit.builder.compile_step import CompilerFailed
from opjit.errors import CompileError
from opjit.recipe import nvcc_flags, toolchain
from tests.builder.test_cuda import (
    NVRTC,
    SCHEMA,
    code_of,
    fat_of,
    needs_nvrtc,
    op_of,
)
from tests.helpers import built, write_op

NVCC = toolchain.working_nvcc(None)
needs_same_release = pytest.mark.skipif(
    NVCC is None or NVRTC is None or not NVRTC.version.startswith(f"{NVCC.version} "),
    reason="the machine code of two releases differs, and there are no nvcc and NVRTC of one release",
)


def flat(output: str) -> str:
    return preprocessed.flatten(output, (), (), lambda path: path, {"GIVEN": "GIVEN 1"})


@pytest.mark.parametrize("compiler", ["gcc", "clang", "clang-19"])
@pytest.mark.parametrize("by_link", [False, True])
def test_a_header_that_a_foreign_header_lacks_is_empty(
    compiler: str, by_link: bool, tmp_path: Path
) -> None:
    """GCC names a header of the system by its real path where that is shorter than the link's."""
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    (tmp_path / "real").mkdir()
    (tmp_path / "real/torch.h").write_text("#include <thrust/complex.h>\nint torch;\n")
    folder = tmp_path / ("a-link-with-a-long-name" if by_link else "real")
    if by_link:
        folder.symlink_to(tmp_path / "real")
    (tmp_path / "a.c").write_text("#include <torch.h>\n")
    lacking = tmp_path / "lacking"
    command = [compiler, "-E", "-isystem", str(folder), "-idirafter", str(lacking), "a.c"]
    preprocessed.run_preprocessor(command, tmp_path, lacking, (str(folder),))
    assert (lacking / "thrust/complex.h").read_text() == ""
    shutil.rmtree(lacking)
    with pytest.raises(CompilerFailed, match="complex"):
        preprocessed.run_preprocessor(command, tmp_path, lacking, ("/elsewhere",))


def test_a_flat_text_has_the_author_s_lines_at_their_numbers() -> None:
    output = """\
# 0 "a.cu"
# 0 "<built-in>"
#define GIVEN 1
# 1 "a.cu"
#include "own.h"
# 1 "a.cu"
# 1 "own.h" 1
#define OWN 3
struct A { int a; };
# 2 "a.cu" 2
#include <math.h>
# 2 "a.cu"
# 1 "/usr/include/math.h" 1 3 4
double sin(double);
# 3 "a.cu" 2
#undef OWN
int b =
# 4 "a.cu" 3 4
       (__null)
# 4 "a.cu"
       ;
# 20 "a.cu"
int c;
"""
    lines = flat(output.replace('# 0 "<built-in>"\n', '# 0 "<built-in>" 3\n')).splitlines()
    assert lines[:4] == ['#line 1 "a.cu"', "", '#line 1 "own.h"', ""]
    assert lines[4] == "struct A { int a; };"
    before = ["#define GIVEN 1", "#define OWN 3", "#include <math.h>", "#undef GIVEN", "#undef OWN"]
    at = lines.index("#include <math.h>")
    assert lines[at - 2 : at + 3] == before
    assert "int b = (__null) ;" in lines
    assert lines[-2:] == ['#line 20 "a.cu"', "int c;"]


def test_the_name_of_a_file_may_have_quotes() -> None:
    assert flat('# 1 "a \\"b\\" \\\\ c.cu" 1\nint a;\n') == (
        '#line 1 "a \\"b\\" \\\\ c.cu"\nint a;\n'
    )


# --- nvcc's macros ------------------------------------------------------------------------------------------------------------------------


def told_by_nvcc(folder: Path, *flags: str) -> list[set[str]]:
    """The -D flags of nvcc's commands for the preprocessor: those of the host's pass, then those of each arch."""
    (folder / "k.cu").write_text("__global__ void k() {}\n")
    nvcc = f"{toolchain.require_nvcc(None).root}/bin/nvcc"
    command = [nvcc, "--dryrun", "-c", "k.cu", "-o", "k.o", *flags]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    commands = [line for line in done.stderr.splitlines() if " -E " in line]
    found = [set(re.findall(r"(?<= )-D\S+", line)) for line in commands]
    host = [one for one in found if not any(flag.startswith("-D__CUDA_ARCH__") for flag in one)]
    return host + [one for one in found if one not in host]


@pytest.mark.nvcc
@needs_same_release
@pytest.mark.parametrize(
    ("archs", "flags"),
    [
        (["sm_90"], []),
        (["sm_80", "sm_90a", "sm_100f"], []),
        (["sm_90"], ["--expt-relaxed-constexpr", "-G", "--use_fast_math", "-lineinfo"]),
    ],
)
def test_the_preprocessor_is_told_what_nvcc_tells_it(
    tmp_path: Path, archs: list[str], flags: list[str]
) -> None:
    numbers = [f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in archs]
    assert NVRTC is not None
    release = nvrtc.release(NVRTC.library)
    theirs = told_by_nvcc(tmp_path, *numbers, *flags)
    for arch, expected in zip(["", *archs], theirs, strict=True):
        own = {f"{flag}" for flag in cuda_text.nvcc_macros(arch, archs, release, flags)}
        same = {flag.removesuffix("=1") for flag in expected} - {"-D__CUDACC__", "-D__NVCC__"}
        assert {flag.removesuffix("=1") for flag in own} == same


# --- the same machine code ----------------------------------------------------------------------------------------------------------------


def machine_codes(
    source: str, folder: Path, *flags: str
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The instructions of a file's kernels by NVRTC, and by nvcc."""
    assert NVRTC is not None
    path = folder / "k.cu"
    path.write_text(source, encoding="utf-8")
    device, host = nvcc_flags.translated(["-std=c++17", "-O1", *flags])
    unit = cuda_text.CudaFile(
        str(path), host, [str(folder)], [f"-I{folder}"], device, flags, ["sm_90"], str, {}
    )
    cuda.compile_unit(unit, folder / "fast", toolchain.require_cxx(None), NVRTC)
    fast = fat_of((folder / "fast/opjit_kernel.fatbin").read_bytes())["sm_90"]
    nvcc = f"{toolchain.require_nvcc(None).root}/bin/nvcc"
    words = [nvcc, "-cubin", "-arch=sm_90", "-std=c++17", f"-I{folder}", *flags, "k.cu"]
    subprocess.run([*words, "-o", "slow.cubin"], cwd=folder, check=True, capture_output=True)
    return code_of(fast), code_of((folder / "slow.cubin").read_bytes())


USE = "__global__ void use(float *p) { p[threadIdx.x] = pick(p[threadIdx.x]); }\n"
CHOICE = """
#if CONDITION
__device__ float pick(float v) { return v * 2; }
#else
__device__ float pick(float v) { return v * 3 + 1; }
#endif
"""
CHOICES = {
    "CUDA_VERSION": "#include <cuda.h>\n" + CHOICE.replace("CONDITION", "CUDA_VERSION >= 11000"),
    "CUDART_VERSION": CHOICE.replace("CONDITION", "CUDART_VERSION >= 11000"),
    "__NVCC__": CHOICE.replace("CONDITION", "defined(__NVCC__)"),
    "__CUDACC_RTC__": CHOICE.replace("CONDITION", "defined(__CUDACC_RTC__)"),
    "release": CHOICE.replace(
        "CONDITION", "__CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ > 1000"
    ),
    "arch": CHOICE.replace("CONDITION", "defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900"),
    "the host's compiler": CHOICE.replace("CONDITION", "defined(__GNUC__) && !defined(__clang__)"),
    "pasted": "#define CAT(a, b) a##b\n" + CHOICE.replace("CONDITION", "CAT(CUDART_, VERSION) > 1"),
    "behind another macro": "#define NEW __NVCC__\n" + CHOICE.replace("CONDITION", "NEW"),
    "has_include": CHOICE.replace("CONDITION", "__has_include(<vector>)"),
    "a header of CUDA's": "#include <cuda_fp16.h>\n"
    + CHOICE.replace("CONDITION", "defined(__CUDA_FP16_H__)"),
    "cooperative groups": "#include <cooperative_groups.h>\n"
    + CHOICE.replace("CONDITION", "defined(_COOPERATIVE_GROUPS_H_)"),
    "atomics of pytorch_scatter": """
__device__ float pick(float v) {
    __shared__ double sum;
#if (defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 600 || CUDA_VERSION < 8000))
    sum += v;
#else
    atomicAdd(&sum, (double)v);
#endif
    return sum;
}
""",
    "constants": """#include <limits.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
__device__ float pick(float v) {
    return v * CHAR_MAX + FLT_TRUE_MIN + FLT_RADIX + FLT_DECIMAL_DIG + DBL_MAX_EXP + M_PI_4 * M_1_PI + M_LN10 + RAND_MAX + UINT8_C(3)
        + (float)INTPTR_MAX + (float)PTRDIFF_MAX + WCHAR_MAX + (isinf(v) ? INFINITY : -HUGE_VAL);
}
""",
    "checks": """#include <assert.h>
#include <stddef.h>
struct Two { int a; double b; };
__device__ float pick(float v) { assert(v > 0); return v + offsetof(Two, b) + (&v == NULL); }
""",
    "no checks": """#define NDEBUG
#include <assert.h>
__device__ float pick(float v) { assert(v > 0); return v; }
""",
    "a stringised name": """#define TEXT2(a) #a
#define TEXT(a) TEXT2(a)
__device__ float pick(float v) { return v + TEXT(CUDART_VERSION)[0]; }
""",
}


@pytest.mark.nvcc
@needs_same_release
@pytest.mark.parametrize("name", CHOICES)
def test_device_code_is_that_of_nvcc(name: str, tmp_path: Path) -> None:
    fast, slow = machine_codes(CHOICES[name] + USE, tmp_path)
    assert fast == slow


@pytest.mark.nvcc
@needs_same_release
def test_a_struct_has_one_layout_whatever_macros_it_asks(tmp_path: Path) -> None:
    code = """
struct Shape { int n;
#ifndef __CUDACC_RTC__
  long strides[4];
#endif
#ifdef __NVCC__
  char more[3];
#endif
  float scale; };
__global__ void use(Shape s, float *p) { p[threadIdx.x] = s.scale + sizeof(Shape); }
void go(float *p) { Shape s{}; s.scale = 2; use<<<1, 32>>>(s, p); }
"""
    fast, slow = machine_codes(code, tmp_path)
    assert fast == slow


LAYOUTS = {
    "another size": (
        "struct Job { float *to;\n#ifdef __CUDA_ARCH__\nint more[4];\n#endif\nint n; };",
        "Job",
    ),
    "members in another order": (
        "#ifdef __CUDA_ARCH__\nstruct Job { float *to; int n, m; };\n#else\nstruct Job { float *to; int m, n; };\n#endif",
        "Job",
    ),
    "another alignment": (
        "#ifdef __CUDA_ARCH__\n#define AT alignas(32)\n#else\n#define AT alignas(16)\n#endif\n"
        "struct AT Job { float *to; int n; char rest[16]; };",
        "Job",
    ),
    "a template": (
        "template <typename T> struct Of { T *to;\n#ifdef __CUDA_ARCH__\nint more[4];\n#endif\nint n; };",
        "Of<float>",
    ),
    "in a namespace": (
        "namespace own { struct Job { float *to;\n#ifdef __CUDA_ARCH__\nint more[4];\n#endif\nint n; }; }",
        "own::Job",
    ),
}


@needs_nvrtc
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_type_of_two_layouts_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    declared, kind = LAYOUTS[name]
    kernel = f"{declared}\n__global__ void kernel({kind} job) {{ job.to[threadIdx.x] = job.n; }}"
    launch = f"{kind} job{{}};\n    job.to = to;\n    kernel<<<1, n, 0, stream>>>(job);"
    target = Target(backends.for_device("cuda"), "sm_90", "cuda13")
    folder = write_op(tmp_path / "op", plus_cu=op_of(kernel, launch))
    with pytest.raises(
        CompileError, match=rf"another layout of job, of type {re.escape(kind)[:4]}"
    ):
        built(folder, tmp_path / "cache", target, SCHEMA)


@needs_nvrtc
def test_types_of_one_layout_are_no_error(tmp_path: Path) -> None:
    kernel = """
#include <cuda_fp16.h>
struct Base { int kind : 3; int rest : 5; };
struct alignas(16) Job : Base { const float *from; float *to, scale; int n; half h[3]; bool operator()() const { return n > 0; } };
template <typename T, int n> struct Pack { T values[n]; };
enum Kind { one, two };
template <typename T>
__global__ void kernel(const Job job, T scale, Pack<T, 3> pack, float3 three, Kind kind, dim3 grid, __half half, cudaStream_t stream)
{
    job.to[threadIdx.x] = job.from[threadIdx.x] * scale * pack.values[2] * three.x + kind + grid.x + (float)half;
}"""
    launch = """Job job{};
    job.from = from; job.to = to; job.n = n;
    kernel<float><<<1, n, 0, stream>>>(job, 2.0f, Pack<float, 3>{{1, 1, 1}}, float3{1, 1, 1}, two, dim3(1), __half(), stream);
    kernel<double><<<1, n, 0, stream>>>(job, 2.0, Pack<double, 3>{{1, 1, 1}}, float3{1, 1, 1}, two, dim3(1), __half(), stream);"""
    target = Target(backends.for_device("cuda"), "sm_90", "cuda13")
    folder = write_op(tmp_path / "op", plus_cu=op_of(kernel, launch))
    built(folder, tmp_path / "cache", target, SCHEMA)
