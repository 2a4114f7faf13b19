"""Extensions with CUDA code, built without nvcc and without a GPU."""

import ctypes
import hashlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

import opjit
from opjit import files
from opjit.builder import cuda as builder_cuda
from opjit.builder import nvrtc
from opjit.builder.compile_step import CompilerFailed
from opjit.builder.cuda_text import CudaFile, folders_of_cuda
from opjit.builder.nvrtc import DeviceCode
from opjit.builder.torch_builder import CompiledSource
from opjit.cpp_extension import build, cuda, identity
from opjit.cpp_extension.identity import own_folders
from opjit.cpp_extension.light import Prepared, core, macros, streams, table
from opjit.cpp_extension.light import headers as light
from opjit.errors import CompileError, ToolMissing
from opjit.recipe import nvcc_flags, toolchain
from opjit.recipe.compilers import Compiler, Nvcc, Nvrtc
from opjit.recipe.nvcc_flags import NvccOnly
from opjit.store.manifest import NAME
from opjit.store.store import Store, default_root
from tests.helpers import no_nvcc

CPP = "torch::Tensor twice(torch::Tensor x);"
KERNEL = """
template <typename T> __device__ T below(T x, int width = warpSize) { return __shfl_down_sync(~0u, x, 1, width); }
template <typename T> __global__ void twice_kernel(const T *from, T *to, int n)
{
    using pack = typename std::aligned_storage<2 * sizeof(T), 2 * alignof(T)>::type;
    static_assert(alignof(pack) == 2 * sizeof(T));
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        to[i] = from[i] + from[i];
}
torch::Tensor twice(torch::Tensor x)
{
    float *memory;
    TORCH_CHECK(!x.is_cpu() || cudaMalloc(&memory, 4) != cudaSuccess || MAJOR_VERSION < 0);
    auto y = torch::empty_like(x);
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "twice", [&] {
        twice_kernel<scalar_t><<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), x.numel());
    });
    return y;
}
"""


@pytest.fixture
def _no_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if identity.find_nvrtc(None) is None:
        pytest.skip("this torch has no NVRTC")
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OPJIT_ARCH", "sm_90")
    no_nvcc(monkeypatch)


def described() -> dict[str, str]:
    [manifest] = Store(default_root()).base.glob(f"cpp_extension.*/*/*/{NAME}")
    found: dict[str, str] = json.loads(manifest.read_text(encoding="utf-8"))["built_with"]
    return found


@pytest.mark.usefixtures("_no_nvcc")
@pytest.mark.parametrize(
    "flags",
    [[], ["-O3", "--use_fast_math", "-lineinfo", "-Xptxas=-v", "-Xcompiler", "-O2,-Wall"]],
    ids=["plain", "flags"],
)
def test_an_extension_is_built_without_nvcc(
    flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "gcc")  # which torch hands to nvcc
    module = opjit.load_inline(
        "twice_cuda", CPP, KERNEL, functions=["twice"], extra_cuda_cflags=flags
    )
    assert module.twice.__doc__
    assert described()["headers"].startswith("light headers; NVRTC ")


@pytest.mark.usefixtures("_no_nvcc")
def test_what_nvrtc_compiled_serves_machines_with_nvcc_or_without_compilers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opjit.load_inline("twice_there", CPP, KERNEL, functions=["twice"])
    monkeypatch.setattr(build, "build", None)  # it is built already
    for finds in (
        {"find_nvcc": Nvcc("/nowhere", "13.0", "build 1")},
        {"find_nvrtc": None, "find_cxx": None},
    ):
        for name, found in finds.items():
            monkeypatch.setattr(toolchain, name, lambda *_, found=found: found)
        assert opjit.load_inline("twice_there", CPP, KERNEL, functions=["twice"]).twice.__doc__


@pytest.mark.usefixtures("_no_nvcc")
def test_headers_beside_the_file_are_split_too_and_enter_the_key(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/twice.cuh").write_text(KERNEL)
    (tmp_path / "twice.cu").write_text(
        '#include <torch/extension.h>\n#include "kernels/twice.cuh"\n'
        'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("twice", &twice); }\n'
    )
    opjit.load("twice_file", [str(tmp_path / "twice.cu")])
    assert described()["headers"].startswith("light headers; NVRTC ")
    (tmp_path / "kernels/twice.cuh").write_text(KERNEL.replace("from[i] + from[i]", "2 * from[i]"))
    opjit.load("twice_file", [str(tmp_path / "twice.cu")])
    assert len(list(Store(default_root()).base.glob(f"cpp_extension.*/*/*/{NAME}"))) == 2


@pytest.mark.usefixtures("_no_nvcc")
@pytest.mark.parametrize(
    ("code", "flags", "why"),
    [
        ("__managed__ float total;" + KERNEL, [], "it uses __managed__"),
        (KERNEL, ["-rdc=true"], "NVRTC does not have the flag -rdc=true"),
        ("static __managed__ float total;" + KERNEL, [], "it uses __managed__"),
    ],
    ids=["managed", "rdc", "static"],
)
def test_code_for_nvcc_alone_names_the_reason(code: str, flags: list[str], why: str) -> None:
    with pytest.raises(ToolMissing, match=f"twice_nvcc needs nvcc, as {why}"):
        opjit.load_inline("twice_nvcc", CPP, code, functions=["twice"], extra_cuda_cflags=flags)
    assert not list(Store(default_root()).base.glob(f"cpp_extension.*/*/*/{NAME}"))


@pytest.mark.slow
@pytest.mark.usefixtures("_no_nvcc")
def test_the_host_s_part_has_the_same_code_with_the_compiled_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = core.precompiled_core
    used = list[tuple[str, ...]]()

    def noted(known: core.Core, base: Path, cxx: Compiler) -> Path | None:
        used.append(known.flags)
        return compiled(known, base, cxx)

    def built() -> bytes:
        opjit.load_inline("cored", CPP, KERNEL, functions=["twice"])
        [library] = Store(default_root()).base.glob("cpp_extension.*/*/*/*.so")
        content = library.read_bytes()
        files.remove_tree(Store(default_root()).base)
        return content

    without = built()
    monkeypatch.setattr(core, "in_background", False)
    monkeypatch.setattr(core, "precompiled_core", noted)
    assert built() == without
    assert len(used) == 1  # both parts of the program share it


@pytest.mark.usefixtures("_no_nvcc")
@pytest.mark.parametrize("mistake", ["from[i] +;", "from[i] + unknown;"])
def test_a_mistake_in_a_kernel_is_shown_at_its_line(mistake: str) -> None:
    with pytest.raises(CompileError) as caught:
        opjit.load_inline(
            "twice_wrong", CPP, KERNEL.replace("from[i] + from[i];", mistake), functions=["twice"]
        )
    assert "cuda.cu" in str(caught.value)
    assert "error" in str(caught.value)
    assert not list(Store(default_root()).base.glob(f"cpp_extension.*/*/*/{NAME}"))


def test_flags_of_nvcc_are_sorted() -> None:
    again = "-U__CUDA_NO_HALF_CONVERSIONS__"  # after torch's own -D
    flags = [
        "-I/a",
        again,
        "-isystem=/b",
        "--compiler-options=-fPIC",
        "-Xcompiler=-O2,-g",
        "-std=c++17",
        "-arch=sm_90a",
        "--ptxas-options=-v",
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=compute_90",
    ]
    archs = ["sm_90a", "compute_90a", "sm_80", "compute_90"]
    assert cuda._sorted(flags) == (
        ["-I/a", "-isystem", "/b"],
        ["-fPIC", "-O2", "-g"],
        [again, "-std=c++17"],
        archs,
    )
    assert nvcc_flags.translated([again]) == ([again], [again])
    with pytest.raises(NvccOnly, match="no arch"):
        cuda._sorted(["-arch=native"])


FLAGS = ["-arch=sm_90", "-std=c++17"]


def unit_of(code: str, folder: Path, flags: list[str]) -> CudaFile:
    """A file whose text is its code, as if it had been preprocessed."""
    source = folder / "cuda.cu"
    source.write_text(code, encoding="utf-8")
    prepared = cast(
        "Any",
        SimpleNamespace(
            folders=[],
            users=(),
            theirs=(),
            folder_of=Path,
            write=lambda *_: None,
            write_first=lambda *_: ["-include", "first.h"],
            programs={"cuda": SimpleNamespace(code="")},
        ),
    )
    place = folder / "work" / "cuda"
    unused = cast("Any", None)
    unit = cuda._unit(str(source), flags, place, prepared, unused)
    return unit._replace(preprocess=lambda told, scratch: f'# 1 "{source}" 1\n{code}\n')


@pytest.mark.parametrize(
    ("code", "flags"),
    [
        ("struct P { float a; };\n__global__ void k(float *x, const P &p) { *x = p.a; }", []),
        ("__device__ int counter(0);" + KERNEL, []),
        (KERNEL, ["-Xcompiler=-DBLOCK=128"]),
        (KERNEL, ["-Xcompiler=-O2,-DBLOCK=128"]),
        (KERNEL, ["-DA=1,B=2"]),
    ],
    ids=["reference", "parentheses", "host-macro", "host-macros", "list"],
)
def test_code_that_would_mean_something_else_is_left_to_nvcc(
    tmp_path: Path, code: str, flags: list[str]
) -> None:
    unit = unit_of(KERNEL, tmp_path, FLAGS)
    assert cuda._adapted(unit, KERNEL).archs == ["sm_90", "compute_90"]
    with pytest.raises(NvccOnly):
        cuda._adapted(unit_of(code, tmp_path, [*FLAGS, *flags]), code)


@pytest.mark.parametrize(
    ("expression", "in_double"),
    [
        ("pow(x, 2)", True),
        ("std::pow(x, 2)", True),
        ("pow(x, n)", True),
        ("pow(x, 2.0)", True),
        ("pow(x, 2.0f)", False),
        ("powf(x, 2)", False),
        ("fmax(x, 0)", True),
        ("std::fmax(x, 0)", True),
        ("fmaxf(x, 0)", False),
        ("fmax(x, 0.f)", False),
        ("std::max(x, 0.f)", False),
        ("sqrt(x)", False),
        ("std::abs(x)", False),
        ("hypot(x, 1.0)", True),
    ],
)
def test_numbers_of_two_types_are_computed_as_by_nvcc(expression: str, in_double: bool) -> None:
    found = toolchain.find_nvrtc("", None)
    if found is None:
        pytest.skip("no NVRTC")
    code = f"__global__ void k(float x, int n) {{ static_assert(sizeof({expression}) == {8 if in_double else 4}); }}"
    folders = [
        str(light.OWN),
        str(Path(torch.__file__).parent / "include"),
        *found.headers.split(":"),
    ]
    options = [
        "--gpu-architecture=sm_90",
        "-default-device",
        "-std=c++17",
        "--pre-include=opjit_device.h",
        *(f"--include-path={folder}" for folder in folders),
    ]
    assert nvrtc.compile_for(found.library, code, "k.cu", cuda._headers(""), options, []).code


@pytest.mark.nvcc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("condition", "same"),
    [("TORCH_VERSION_MAJOR >= 2 && defined(C10_HOST_DEVICE)", True), ("PARALLEL", False)],
)
def test_a_file_for_nvcc_is_the_same_tokens_with_light_headers(
    tmp_path: Path, condition: str, same: bool
) -> None:
    cxx = toolchain.require_cxx(None)
    code = f"#include <torch/extension.h>\n#define PARALLEL AT_PARALLEL_OPENMP\n#if {condition}\n"
    code += "__global__ void k(float *x) { *x = 1; }\n#else\n__global__ void k(float *x) { *x = 2; }\n#endif\n"
    source = tmp_path / "k.cu"
    source.write_text(code)
    own = [f"-I{folder}" for folder in (light.OWN, light.OWN.parent)]
    torchs = [word for folder in own_folders() for word in ("-isystem", folder)]
    flags = [*own, *torchs, "-std=c++20", "-gencode=arch=compute_90,code=sm_90"]
    compilation = CompiledSource(str(source), "k.o", by_nvcc=True)
    base = Store(default_root()).base
    prepared = Prepared(base, tmp_path, cxx, False, (), ())
    nvcc = toolchain.require_nvcc(None)
    if same:
        cuda.check_for_nvcc(prepared, nvcc, compilation, flags, tmp_path / "scratch")
    else:
        with pytest.raises(streams.Different, match=r"k\.cu:\d"):
            cuda.check_for_nvcc(prepared, nvcc, compilation, flags, tmp_path / "scratch")


def test_macros_of_nvccs_flags_name_no_halves(tmp_path: Path) -> None:
    unit = unit_of(KERNEL, tmp_path, FLAGS)
    around = "#define __CUDA_NO_HALF_OPERATORS__ 1\n#include <cuda.h>\n#undef __CUDA_NO_HALF_OPERATORS__\n"
    text = f'{around}#line 1 "halves.cu"\n{KERNEL}'
    assert "-DOPJIT_HALVES" not in cuda._adapted(unit, text).device
    assert "-DOPJIT_HALVES" in cuda._adapted(unit, f"{text}using T = at::Half;\n").device


def lines_by_file(
    text: str, flags: Sequence[str], folders: tuple[str, ...]
) -> dict[str, list[str]]:
    """The preprocessed lines, with macros, of each header in some folders that a text includes."""
    command = [
        toolchain.require_cxx(None).path,
        "-x",
        "c++",
        "-std=c++20",
        "-E",
        "-dD",
        *flags,
        "-",
    ]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = {}
    path = ""
    for line in done.stdout.splitlines():
        if line.startswith("# "):
            path = line.split('"')[1]
        elif line.strip() and path.startswith(folders):
            found.setdefault(path, []).append(line)
    return found


def test_torchs_core_and_headers_of_cuda_are_the_same_in_either_order() -> None:
    """So the host's part of a .cu file may have the core before cuda_runtime.h, which comes first for nvcc."""
    found = identity.find_nvrtc(None)
    if found is None:
        pytest.skip("this torch has no NVRTC")
    folders = tuple(found.headers.split(":"))
    others = ("cuda_fp16", "cuda_bf16", "cublas_v2", "curand", "cusparse", "cusolverDn", "cudnn")
    there = [name for name in others if any(Path(each, f"{name}.h").is_file() for each in folders)]
    of_cuda = light.included(["cuda_runtime.h", *(f"{name}.h" for name in there)])
    of_torch = light.included(table.CORE)
    flags = [*macros.OWN_FLAGS, *folders_of_cuda(found.headers)]
    first, second = (
        lines_by_file(text, flags, (*own_folders(), *folders))
        for text in (of_torch + of_cuda, of_cuda + of_torch)
    )
    assert len(first) > 400
    assert first == second


SPLIT = {"11": "e8ee61e077e728f2"}  # what the split of three files is, by identity.LIGHT
HALVES = """
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
__global__ void add(at::PackedTensorAccessor32<at::Half, 1> x, __half y) { x[threadIdx.x] += at::Half(y); }
void run(torch::Tensor x) { add<<<1, 32, 0, at::cuda::getCurrentCUDAStream()>>>(x.packed_accessor32<at::Half, 1>(), __half(1)); }
"""
SHARED = """
#define THREADS 128
namespace own { __device__ __forceinline__ float twice(float x) { return 2 * x; } }
__global__ void __launch_bounds__(THREADS) k(float *x) { extern __shared__ float s[]; *s = pow(x[0], 2); x[0] = own::twice(*s); }
void run(float *x) { dim3 grid(2, 2); k<<<grid, THREADS, sizeof(float) * THREADS>>>(x); }
"""


def test_another_split_has_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(
        library: str,
        source: str,
        name: str,
        headers: Mapping[str, str],
        options: Sequence[str],
        expressions: Sequence[str],
    ) -> DeviceCode:
        told.append(repr((source, name, sorted(headers.items()), options, expressions)))
        return DeviceCode(b"", {}, "")

    def ran(command: list[str], work: Path) -> str:
        told.append(repr(command))
        return ""

    monkeypatch.setattr(builder_cuda, "run_tool", ran)
    monkeypatch.setattr(nvrtc, "compile_for", compiled)
    monkeypatch.setattr(nvrtc, "fatbin", lambda codes: b"")
    monkeypatch.setattr(nvrtc, "release", lambda library: "13.0.88")
    told: list[str] = []
    compiler = cast(
        "Any", SimpleNamespace(path="c++", version="gcc version 12", machine="", includes="")
    )
    for number, code in enumerate((KERNEL, HALVES, SHARED)):
        work = tmp_path / str(number)
        work.mkdir()
        unit = unit_of(code, work, [*FLAGS, "-O3", "-DOWN=1"])
        builder_cuda.compile_unit(
            unit,
            work / "cuda",
            compiler,
            cast("Any", SimpleNamespace(library="", headers="/nowhere", version="13.0 abc")),
        )
        told += [
            path.read_text(encoding="utf-8")
            for path in sorted((work / "cuda").rglob("*.c*"))
            if path.is_file()
        ]
    told.append(builder_cuda._registration({"_Z1k": "_Z1kPf"}, [(True, 4, "_Z1v", "_Z1vE")]))
    told += [
        light.code_of([path.read_text()])
        for path in sorted((light.OWN.parent / "nvrtc").rglob("*.h"))
    ]
    text = " ".join(" ".join(sorted(told)).split())
    for folder, name in ((tmp_path, "WORK"), (light.OWN.parent, "OPJIT"), (light.INCLUDE, "TORCH")):
        text = text.replace(str(folder), name)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert SPLIT.get(identity.LIGHT) == digest, (
        "increase identity.LIGHT, which is part of the key, and enter it with this digest"
    )


SAME_NAMES = """
#include <torch/extension.h>
inline int &calls() { static int n = 0; return n; }
namespace { template <typename T> T &own() { static T n = NUMBER; return n; } __device__ float unnamed = NUMBER; }
static __constant__ float constant[2] = {NUMBER, NUMBER};
__device__ float variable = NUMBER;
static __global__ void add(float *x);
template <typename T> __global__ void instance(T *x) { *x += 10 * unnamed; }
static __global__ void add(float *x) { *x += constant[1] + 100 * variable; }
void run_NUMBER(torch::Tensor x) { add<<<1, 1>>>(x.data_ptr<float>()); instance<<<1, 1>>>(x.data_ptr<float>()); }
int64_t host_NUMBER() { calls()++; return 10 * own<int>() + calls(); }
"""


def two_files(folder: Path, edited: str = "NUMBER") -> Any:
    """An extension of two CUDA files with the same names; in the second one a variable may have an edited value."""
    for number in "12":
        text = (
            SAME_NAMES.replace("variable = NUMBER", f"variable = {edited}")
            if number == "2"
            else SAME_NAMES
        )
        (folder / f"file{number}.cu").write_text(text.replace("NUMBER", number))
    names = [f"{kind}_{number}" for number in "12" for kind in ("run", "host")]
    declared = "".join(
        f"void {name}(torch::Tensor);" if name.startswith("run") else f"int64_t {name}();"
        for name in names
    )
    bound = "".join(f'm.def("{name}", &{name});' for name in names)
    (folder / "main.cpp").write_text(
        f"#include <torch/extension.h>\n{declared}\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{ {bound} }}\n"
    )
    return opjit.load(
        "two_files", [str(folder / name) for name in ("file1.cu", "file2.cu", "main.cpp")]
    )


@pytest.mark.slow
@pytest.mark.usefixtures("_no_nvcc")
def test_each_cuda_file_of_an_extension_has_its_own_kernels_and_variables(tmp_path: Path) -> None:
    module = two_files(tmp_path)
    assert (module.host_1(), module.host_2()) == (11, 22), (
        "an inline function's variable is one, an unnamed namespace's is each file's"
    )
    symbols = subprocess.run(
        ["readelf", "--syms", "--wide", module.__file__],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.split()
    assert {
        name: sum(symbol.startswith(f"{name}.") for symbol in symbols)
        for name in ("_Z3addPf", "_Z8instanceIfEvPT_", "variable", "_ZL8constant", "constant")
    } == {"_Z3addPf": 2, "_Z8instanceIfEvPT_": 2, "variable": 2, "_ZL8constant": 0, "constant": 2}
    before = {path.stat().st_ino for path in default_root().glob("v2/parts/*/object.o")}
    two_files(tmp_path, edited="1.5")
    assert (
        sum(path.stat().st_ino not in before for path in default_root().glob("v2/parts/*/object.o"))
        == 1
    ), "that of the edited file"


@pytest.mark.gpu
@pytest.mark.usefixtures("_no_nvcc")
def test_each_cuda_file_of_an_extension_runs_its_own_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPJIT_ARCH")
    module = two_files(tmp_path)
    x = torch.zeros(1, device="cuda")
    for number in (1, 2, 1):
        getattr(module, f"run_{number}")(x)
    assert x.item() == 111 * 4


@pytest.mark.usefixtures("_no_nvcc")
def test_nvcc_is_not_tried_when_a_cpp_file_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.cpp").write_text("#include <torch/extension.h>\nint x = wrong;\n")
    (tmp_path / "b.cu").write_text("#include <torch/extension.h>\n")
    monkeypatch.setattr(cuda, "compile_file", Mock(side_effect=CompilerFailed("b.cu")))
    with pytest.raises(CompileError, match=r"a\.cpp:2:9: error: 'wrong' was not declared"):
        opjit.load("two", [str(tmp_path / "a.cpp"), str(tmp_path / "b.cu")])


@pytest.mark.parametrize(("release", "other"), [(13020, False), (13000, True), (None, False)])
def test_nvrtc_does_not_read_headers_of_another_release_through_a_flag(
    tmp_path: Path, release: int | None, other: bool
) -> None:
    if release:
        (tmp_path / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {release}\n")
    nvrtc = Nvrtc("libnvrtc.so.13", "", "", "13.2 abc")
    for flag in (f"-isystem={tmp_path}", f"-I{tmp_path}"):
        assert cuda._is_of_another_release(flag, nvrtc) == other


@pytest.mark.nvcc
@pytest.mark.skipif(
    torch.version.cuda is None,
    reason="torch is a build without CUDA, so its builder has no libtorch_cuda to link",
)
def test_an_edit_of_a_header_of_nvcc_is_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OPJIT_ARCH", "sm_90")
    source = tmp_path / "value.cu"
    source.write_text('#include "value.cuh"\nextern "C" int value() { return VALUE; }\n')
    for expected in (3, 4):
        (tmp_path / "value.cuh").write_text(f"#define VALUE {expected}\n")
        path = opjit.load("value", [str(source)], is_python_module=False, fast=False)
        assert ctypes.CDLL(path).value() == expected


@pytest.mark.nvcc
@pytest.mark.skipif(
    torch.version.cuda is None,
    reason="torch is a build without CUDA, so its builder has no libtorch_cuda to link",
)
@pytest.mark.parametrize("fast", [True, False])
def test_what_a_partial_toolkit_lacks_is_that_of_pips_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    header = tmp_path / "nvidia" / "cu13" / "include" / "cusparse_of_pip.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define VALUE 3\n")
    (header.parent / "cuda_runtime_api.h").write_text("#error the toolkit has this\n")
    monkeypatch.setattr(toolchain, "cuda_wheels", lambda: [header.parents[2]])
    monkeypatch.setenv("OPJIT_ARCH", "sm_90")
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "value.cpp"
    source.write_text(
        '#include <cuda_runtime_api.h>\n#include <cusparse_of_pip.h>\nextern "C" int value() { return VALUE; }\n'
    )

    def value() -> int:
        path = opjit.load("of_pip", str(source), with_cuda=True, is_python_module=False, fast=fast)
        return int(ctypes.CDLL(str(path)).value())

    assert value() == 3
    header.write_text("#define VALUE 4\n")
    assert value() == 4, "its content is part of the key"
