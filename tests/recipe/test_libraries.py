"""Archives, objects, libraries and more sources: they link, run, are part of the key by their content, and ship in a wheel."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import opjit
from opjit import backends, request
from opjit.backends import targets
from opjit.backends.targets import Target
from opjit.declare import oplist
from opjit.errors import BuildError, DeclarationError
from opjit.recipe import libraries, toolchain
from opjit.recipe.flags import check_flags
from opjit.store import elf
from tests import helpers
from tests.helpers import declare, fresh, no_compiler, no_nvcc, no_nvrtc

# The op multiplies by FACTOR(), which is defined elsewhere.
KERNEL = '#include "opjit.h"\nfloat factor(void);\n' + helpers.elementwise(
    "NAME", "factor() * from[i]"
)
# sqrtf shows that an archive may need the libraries that opjit links with.
FACTOR = "#include <math.h>\nfloat factor(void) { volatile float square = VALUE; return sqrtf(square); }\n"
CUDA = """\
#include "opjit_cuda.h"
void multiply(const float *from, float *to, int64_t n, cudaStream_t stream);
static __global__ void multiply_kernel(const float *from, float *to, int64_t n) { *to = 0; }  // the other file's is another
opjit_status NAME_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    multiply_kernel<<<1, 1, 0, stream>>>((const float *)x->data, (float *)out->data, x->numel);
    multiply((const float *)x->data, (float *)out->data, x->numel, stream);
    return OPJIT_LAUNCHED();
}
"""
CUDA_FACTOR = """\
#include "opjit_cuda.h"
static __global__ void multiply_kernel(const float *from, float *to, int64_t n)
{
    OPJIT_KERNEL_LOOP(i, n)
        to[i] = 3.0f * from[i];
}
void multiply(const float *from, float *to, int64_t n, cudaStream_t stream)
{
    multiply_kernel<<<opjit_blocks(n, 256), 256, 0, stream>>>(from, to, n);
}
"""
BLAS = """\
#include "opjit_cuda.h"
#include <cublas_v2.h>
static cublasHandle_t handle;
opjit_status NAME_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    if (handle == NULL)
        OPJIT_CHECK(cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS, "no handle");
    OPJIT_CHECK(cublasSetStream(handle, stream) == CUBLAS_STATUS_SUCCESS, "no stream");
    OPJIT_CUDA_CHECK(cudaMemsetAsync(out->data, 0, (size_t)x->numel * 4, stream));
    const float three = 3;
    cublasStatus_t status = cublasSaxpy(handle, (int)x->numel, &three, (const float *)x->data, 1, (float *)out->data, 1);
    OPJIT_CHECK(status == CUBLAS_STATUS_SUCCESS, "cublasSaxpy failed");
    return OPJIT_OK;
}
"""
CUBLAS = libraries.find_cuda_library("cublas", "cuda13")
NVRTC = toolchain.find_nvrtc("", None)
CUDA_13 = Target(backends.for_device("cuda"), "sm_90", "cuda13")


def write_op(folder: Path, extra: str, **more: str) -> Path:
    """An op's folder; names in `more` have ``_`` for the dot."""
    folder.mkdir(parents=True)
    (folder / "op.py").write_text(
        helpers.op_py(f"linktest::{folder.name}(Tensor x) -> Tensor", f", {extra}")
    )
    for name, text in {f"{folder.name}_c": KERNEL, **more}.items():
        stem, _, suffix = name.rpartition("_")
        (folder / f"{stem}.{suffix}").write_text(text.replace("NAME", folder.name))
    return folder


def archive(path: Path, value: float = 9.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    compiled(path.with_suffix(".o"), value)
    subprocess.run(["ar", "rcsD", path, path.with_suffix(".o")], check=True)
    path.with_suffix(".o").unlink()
    return path


def compiled(path: Path, value: float, *options: str) -> Path:
    source = path.with_suffix(".factor.c")
    source.write_text(FACTOR)
    options = options or ("-c",)
    subprocess.run(
        [
            helpers.real_compiler(),
            "-O2",
            "-fPIC",
            f"-DVALUE={value}",
            *options,
            source,
            "-o",
            path,
            "-lm",
        ],
        check=True,
    )
    source.unlink()
    return path


def shared(folder: Path, *options: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return compiled(folder / "libfactor.so", 9.0, "-shared", *options)


def call(folder: Path, changes: dict[str, str | None] | None = None) -> str:
    return fresh(
        declare(folder) + f"print(torch.ops.linktest.{folder.name}(torch.ones(2)).tolist())",
        changes,
    ).stdout


def key(folder: Path) -> str:
    """The key of the op's entry, which is built if the cache has none."""
    code = f"opjit.get('linktest::{folder.name}', 'cpu')\n"
    code += f"print(opjit.explain('linktest::{folder.name}', 'cpu').key)"
    return fresh(declare(folder) + code).stdout


def test_a_static_archive_is_linked_and_its_content_is_in_the_key_but_not_its_place(
    tmp_path: Path, here: Path
) -> None:
    op = write_op(tmp_path / "one", 'extra_ldflags=["vendor/libfactor.a"]')
    archive(op / "vendor" / "libfactor.a")
    assert call(op) == "[3.0, 3.0]\n"
    first = key(op)
    moved = shutil.copytree(op, tmp_path / "elsewhere" / "one")
    assert key(moved) == first
    archive(op / "vendor" / "libfactor.a", 16.0)
    told = fresh(declare(op) + "print(opjit.explain('linktest::one', 'cpu'))").stdout
    assert "library: vendor/libfactor.a changed\n" in told
    assert key(op) != first
    assert call(op) == "[4.0, 4.0]\n"


def test_an_archive_outside_the_op_s_folder_has_the_same_key_anywhere(
    tmp_path: Path, here: Path
) -> None:
    keys = []
    for place in ("here", "far/away"):
        path = archive(tmp_path / place / "libfactor.a")
        keys.append(
            key(write_op(tmp_path / place.replace("/", "-") / "op", f'extra_ldflags=["{path}"]'))
        )
    assert keys[0] == keys[1]
    done = helpers.command(
        "wheel",
        tmp_path / "here" / "op",
        "--arch",
        targets.here(helpers.cpu()).arch,
        "-o",
        tmp_path,
    )
    assert "<library 0>/libfactor.a, which is outside" in done.stderr


@pytest.mark.parametrize("name", ["libfactor.a", "libfactor.so", "factor.o"])
def test_a_library_in_a_folder_or_an_object_is_linked_and_its_content_is_in_the_key(
    tmp_path: Path, here: Path, name: str
) -> None:
    given = ["vendor/factor.o"] if name.endswith(".o") else ["-Lvendor", "-lfactor", "-lm"]
    op = write_op(tmp_path / "one", f"extra_ldflags={given}")
    if name.endswith(".a"):
        archive(op / "vendor" / name)
    elif name.endswith(".o"):
        (op / "vendor").mkdir()
        compiled(op / "vendor" / name, 9.0)
    else:
        shared(op / "vendor", "-Wl,-soname,libfactor.so.1")
    assert call(op) == "[3.0, 3.0]\n"
    assert (
        call(shutil.copytree(op, tmp_path / "elsewhere" / "one"), {"CC": "/no/compiler"})
        == "[3.0, 3.0]\n"
    ), "the same binary"
    first = key(op)
    with open(op / "vendor" / name, "ab") as file:
        file.write(b"\n")
    assert key(op) != first


def test_a_shared_library_without_a_soname_is_refused_as_the_binary_would_name_its_path(
    tmp_path: Path, here: Path
) -> None:
    folder = write_op(tmp_path / "one", 'extra_ldflags=["-Lvendor", "-lfactor"]')
    shared(folder / "vendor")
    [op] = opjit.add_path(folder)
    with pytest.raises(
        BuildError,
        match=r"at that path, because that library lacks a soname; link it with -Wl,-soname,libfactor\.so",
    ):
        request.entry(op, targets.here(helpers.cpu()))


def test_more_sources_are_compiled_each_by_itself_and_their_headers_are_in_the_key(
    tmp_path: Path, here: Path
) -> None:
    op = write_op(
        tmp_path / "one", 'extra_sources=["more/factor.c", "value.cu"]', value_cu="not for the CPU"
    )
    (op / "more").mkdir()
    (op / "more" / "factor.c").write_text('#include "value.h"\n' + FACTOR)
    (op / "more" / "value.h").write_text("#define VALUE 9\n")
    assert call(op) == "[3.0, 3.0]\n"
    (op / "more" / "value.h").write_text("#define VALUE 16\n")
    assert call(op) == "[4.0, 4.0]\n"
    (op / "more" / "factor.c").write_text("float factor(void) { return oops; }\n")
    done = helpers.command("get", op, "--device", "cpu")
    assert done.stderr.startswith(f"Error: {op}/more/factor.c:1:") or done.stderr.startswith(
        "Error: more/factor.c:1:"
    ), done.stderr
    assert (
        "source: more/factor.c changed"
        in fresh(declare(op) + "print(opjit.explain('linktest::one', 'cpu'))").stdout
    )


def test_a_file_that_is_compiled_by_itself_or_included_gives_two_keys(
    tmp_path: Path, here: Path
) -> None:
    one = write_op(
        tmp_path / "here" / "one",
        'extra_sources=["factor.c"]',
        factor_c=FACTOR,
        one_c='#include "factor.c"\n' + KERNEL,
    )
    other = write_op(
        tmp_path / "there" / "one", "", factor_c=FACTOR, one_c='#include "factor.c"\n' + KERNEL
    )
    asked = "print(opjit.explain('linktest::one', 'cpu').key)"
    assert fresh(declare(one) + asked).stdout != fresh(declare(other) + asked).stdout


def test_an_inline_op_may_have_more_sources_and_archives(
    tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive(tmp_path / "libfactor.a")
    (tmp_path / "half.c").write_text("float half(float x) { return x / 2; }\n")
    monkeypatch.chdir(tmp_path)
    code = "float half(float x);\n" + KERNEL.replace("NAME", "inlined").replace(
        "= factor()", "= half(factor())"
    )
    op = opjit.inline(
        "linktest::inlined(Tensor x) -> Tensor",
        c=code,
        like="x",
        extra_ldflags=["libfactor.a"],
        extra_sources=["half.c"],
    )
    assert op(torch.ones(1)).item() == 1.5
    recorded = oplist._recorded(op, targets.here(helpers.cpu())).flags
    assert (recorded["link"], recorded["sources"]) == (
        [str(tmp_path / "libfactor.a")],
        [str(tmp_path / "half.c")],
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"extra_sources": ["missing.c"]},
            r"extra_sources names 'missing\.c', but there is no file",
        ),
        ({"extra_sources": ["code.cpp"]}, "expected a source for a backend"),
        ({"extra_sources": "code.c"}, "extra_sources is a list of paths"),
        ({"extra_cuda_ldflags": "-lcublas"}, "extra_cuda_ldflags is a list of strings"),
        (
            {"extra_cuda_ldflags": ["-Wl,-rpath,/opt"]},
            r"extra_cuda_ldflags cannot hold '-Wl,-rpath,/opt': .*static archives",
        ),
        ({"extra_cuda_ldflags": ["-lc10_cuda"]}, "one version of torch"),
        (
            {"extra_ldflags": ["missing.a"]},
            r"extra_ldflags cannot hold 'missing\.a': there is no file .*/missing\.a; a relative",
        ),
    ],
)
def test_what_would_not_link_is_refused_when_the_op_is_declared(
    tmp_path: Path, given: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code.cpp").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DeclarationError, match=says):
        opjit.inline("linktest::refused(Tensor x) -> ()", c="", **given)  # type: ignore[arg-type]


def test_arguments_of_the_linker_survive_a_recorded_list(tmp_path: Path) -> None:
    shared(tmp_path / "vendor")
    archive(tmp_path / "libother.a")
    given = ["-Lvendor", "-lfactor", "libother.a", "-lz"]
    resolved = libraries.resolve("op", "extra_ldflags", tmp_path, given)
    assert resolved == (str(tmp_path / "vendor/libfactor.so"), str(tmp_path / "libother.a"), "-lz")
    assert (
        libraries.resolve("op", "extra_ldflags", Path("/"), libraries.as_written(resolved))
        == resolved
    )


def test_ops_with_an_archive_a_library_and_a_second_source_ship_in_a_wheel(tmp_path: Path) -> None:
    one = write_op(tmp_path / "one", 'extra_ldflags=["vendor/libfactor.a"]')
    archive(one / "vendor" / "libfactor.a")
    two = write_op(
        tmp_path / "two", 'extra_sources=["factor.c"]', factor_c=FACTOR.replace("VALUE", "9")
    )
    three = write_op(tmp_path / "three", 'extra_ldflags=["-Lvendor", "-lfactor"]')
    shared(three / "vendor", "-Wl,-soname,libfactor.so.1")
    arch = targets.here(helpers.cpu()).arch
    done = helpers.command(
        "wheel",
        one,
        two,
        three,
        "--arch",
        arch,
        "-o",
        tmp_path,
        OPJIT_CACHE=str(tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
    ]
    subprocess.run([*pip, done.stdout.strip()], check=True)
    for folder in (one, two, three):
        shutil.rmtree(folder)
    path = os.pathsep.join([str(site), str(helpers.ROOT), os.environ.get("PYTHONPATH", "")])
    code = "import torch, opjit\nprint([opjit.get(f'linktest::{n}', 'cpu')(torch.ones(1)).item() for n in ('one', 'two', 'three')])"
    changes = {**no_compiler(tmp_path), "PYTHONPATH": path, "OPJIT_CACHE": str(tmp_path / "empty")}
    assert fresh(code, changes).stdout == "[3.0, 3.0, 3.0]\n"


@pytest.mark.parametrize(
    ("name", "declared", "taken"),
    [
        ("libz.so.1", ["-lz"], True),
        ("libcublas.so.13", ["-l:libcublas.so.13"], True),
        ("libcublas.so.12", ["-l:libcublas.so.13"], False),
        ("libfactor.so.1", ["vendor/libfactor.so"], True),
        ("libfactor.so.1", ["vendor/libfactor.a"], False),
        ("libx.so", ["-ly"], False),
    ],
)
def test_a_library_is_declared_by_its_flag_or_its_file(
    name: str, declared: list[str], taken: bool
) -> None:
    names = elf.names(declared)
    assert (elf._link_name(name) in names or f":{name}" in names) is taken


@pytest.mark.nvcc
@pytest.mark.parametrize(
    "nvrtc", [False, pytest.param(True, marks=pytest.mark.skipif(NVRTC is None, reason="no NVRTC"))]
)
def test_a_second_cuda_source_links(
    tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch, nvrtc: bool
) -> None:
    (no_nvcc if nvrtc else no_nvrtc)(monkeypatch)
    [op] = opjit.add_path(
        write_op(
            tmp_path / f"second{int(nvrtc)}",
            'extra_sources=["more.cu"]',
            more_cu=CUDA_FACTOR,
            **{f"second{int(nvrtc)}_cu": CUDA},
        )
    )
    assert b"multiply_kernel" in request.entry(op, CUDA_13).library.read_bytes() or not nvrtc


def test_torch_s_cuda_libraries_are_found_by_name_and_named_by_their_soname(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    for name in ("libcudart.so.13", "libcudnn.so.9", "libcudnn.so.9.1.0", "libcudnn_ops.so.9"):
        (folder / name).touch()
    monkeypatch.setattr(toolchain, "cuda_wheels", lambda: [tmp_path / "nvidia"])
    no_nvrtc(monkeypatch)
    if libraries.find_cuda_library("cudnn", "cuda13") != (
        "libcudnn.so.9",
        str(folder / "libcudnn.so.9"),
    ):
        pytest.skip("this process has loaded cuDNN")
    (tmp_path / "op").mkdir()
    extra = check_flags("op", tmp_path / "op", (), (), (), (), ("-lcudnn", "-lz"))
    backend = CUDA_13.backend
    flags = libraries.for_cuda(
        backend.flags("sm_90", "cuda13")._replace(link=extra.cuda_link), "cuda13"
    )
    assert flags.link == ("-l:libcudnn.so.9", "-lz")
    assert libraries.arguments(flags) == [str(folder / "libcudnn.so.9"), "-lz"]
    assert libraries.to_open(flags) == [str(folder / "libcudnn.so.9")]
    assert libraries.find_cuda_library("cudnn", "cuda12") is None, (
        "its folder is that of another CUDA"
    )


HAS_CUBLAS = (
    CUBLAS is not None and (Path(CUBLAS.path).parent.parent / "include/cublas_v2.h").exists()
)
needs_cublas = pytest.mark.skipif(not HAS_CUBLAS, reason="no cuBLAS")


@needs_cublas
def test_an_op_over_cublas_links_without_a_gpu_and_names_no_path(
    tmp_path: Path, here: Path
) -> None:
    [op] = opjit.add_path(
        write_op(tmp_path / "blas", 'extra_cuda_ldflags=["-lcublas"]', blas_cu=BLAS)
    )
    entry = request.entry(op, CUDA_13)
    content = entry.library.read_bytes()
    assert CUBLAS is not None
    assert CUBLAS.soname in elf.inspect(content).needed
    assert (
        os.path.dirname(CUBLAS.path).encode()
        not in content + (entry.folder / "manifest.json").read_bytes()
    )


@needs_cublas
def test_an_op_over_cublas_ships_in_a_wheel_without_the_library(tmp_path: Path) -> None:
    op = write_op(tmp_path / "blas", 'extra_cuda_ldflags=["-lcublas"]', blas_cu=BLAS)
    done = helpers.command(
        "wheel", op, "--arch", "sm_90", "-o", tmp_path, OPJIT_CACHE=str(tmp_path / "cache")
    )
    assert done.returncode == 0, done.stderr
    assert CUBLAS is not None
    with zipfile.ZipFile(done.stdout.strip()) as wheel:
        [library] = [name for name in wheel.namelist() if name.endswith(".so")]
        assert CUBLAS.soname in elf.inspect(wheel.read(library)).needed


@pytest.mark.gpu
@needs_cublas
def test_ops_over_cublas_and_of_two_sources_run(tmp_path: Path, here: Path) -> None:
    opjit.add_path(
        write_op(tmp_path / "blasrun", 'extra_cuda_ldflags=["-lcublas"]', blasrun_cu=BLAS)
    )
    opjit.add_path(
        write_op(
            tmp_path / "tworun", 'extra_sources=["more.cu"]', tworun_cu=CUDA, more_cu=CUDA_FACTOR
        )
    )
    x = torch.arange(1000.0, device="cuda")
    for name in ("blasrun", "tworun"):
        assert torch.equal(opjit.get(f"linktest::{name}", "cuda")(x), 3 * x)
