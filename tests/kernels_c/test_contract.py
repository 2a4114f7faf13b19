"""The C contract: the headers stand on their own in C and C++, do what they say, and call only what torch has."""

import ctypes
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opjit import Op, backends, resources
from opjit.builder import glue
from opjit.catalog import registry
from opjit.recipe import toolchain
from opjit.testing import sanitize
from opjit.testing.samples import Skipped
from opjit.testing.sanitized import Sanitizers
from tests.helpers import BUNDLED, LEVELS, MakeOp, fresh
from tests.tensors import COMPLEX, REAL

HEADERS = resources.folder("kernels_c")
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
CC = shutil.which("gcc") or shutil.which("cc") or "cc"
CXX = shutil.which("g++") or shutil.which("c++")


def _compile(compiler: str, *arguments: str, text: str | None = None) -> None:
    done = subprocess.run(
        [compiler, *arguments], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[:8000]


C_HEADERS = [
    "opjit_shim.h",
    "opjit.h",
    "opjit_half.h",
    "opjit_complex.h",
    "opjit_convert.h",
    "opjit_elementwise.h",
    "opjit_random.h",
]


@pytest.mark.parametrize(
    ("header", "language", "flags"),
    [
        *((header, "c", ["-std=c11"]) for header in C_HEADERS),
        *((header, "c++", ["-std=c++17"]) for header in [*C_HEADERS, "opjit_printf.h"]),
        (
            "opjit_glue.h",
            "c",
            ["-std=c11", "-DOPJIT_LISTS=1", "-Wno-unused-function"],
        ),  # only a generated file uses all of it
        ("opjit_printf.h", "c", ["-std=gnu11"]),
    ],
)  # it takes functions of Linux's
def test_a_header_is_strict_c11_and_cpp17(header: str, language: str, flags: list[str]) -> None:
    compiler = CC if language == "c" else CXX
    if compiler is None:
        pytest.skip("no C++ compiler")
    for each in [compiler, *(["clang"] if header == "opjit.h" and shutil.which("clang") else [])]:
        _compile(
            each,
            *flags,
            *STRICT,
            f"-I{HEADERS}",
            "-fsyntax-only",
            "-x",
            language,
            "-",
            text=f'#include "{header}"\n',
        )


@pytest.mark.nvcc
def test_the_cuda_header_compiles_with_nvcc(tmp_path: Path) -> None:
    nvcc = toolchain.find_nvcc(None)
    assert nvcc is not None
    (tmp_path / "a.cu").write_text(
        '#include "opjit_convert.h"\n#include "opjit_cuda.h"\n#include "opjit_elementwise.h"\n'
    )
    _compile(
        f"{nvcc.root}/bin/nvcc",
        "-std=c++17",
        "-Xcompiler",
        "-Wall,-Wextra,-Werror",
        "-Werror=all-warnings",
        f"-I{HEADERS}",
        "-c",
        str(tmp_path / "a.cu"),
        "-o",
        str(tmp_path / "a.o"),
    )


USES_ALL = """
    #include "opjit.h"
    opjit_status all(const opjit_tensor *x, opjit_tensor *out);
    static opjit_status body(int64_t begin, int64_t end, void *context)
    {
        (void)context;
        OPJIT_CHECK(begin < end, "from %lld to %lld", (long long)begin, (long long)end);
        return OPJIT_OK;
    }
    opjit_status all(const opjit_tensor *x, opjit_tensor *out)
    {
        void *memory;
        OPJIT_TRY(opjit_scratch(&memory, 3, x));
        OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
        OPJIT_TRY(opjit_parallel_for(0, 3, 1, body, NULL));
        OPJIT_DISPATCH_REAL(x->dtype, "all", { *(scalar_t *)out->data = *(const scalar_t *)x->data; });
        OPJIT_DISPATCH_FLOATING(x->dtype, "all", { *(scalar_t *)out->data = *(const scalar_t *)x->data; });
        OPJIT_DISPATCH_INTEGRAL(x->dtype, "all", { *(scalar_t *)out->data = *(const scalar_t *)x->data; });
        switch (x->dtype) {
            OPJIT_CASES_FLOATING({ *(scalar_t *)out->data = 1; })
            OPJIT_CASE(OPJIT_FLOAT16, opjit_half, { *(scalar_t *)out->data = opjit_float_to_half(1.0f); })
            OPJIT_CASE(OPJIT_BFLOAT16, opjit_bfloat16, { *(scalar_t *)out->data = opjit_float_to_bfloat16(1.0f); })
        default: OPJIT_FAIL("not %s", opjit_dtype_name(x->dtype));
        }
        return OPJIT_OK;
    }
    """


USES_ELEMENTS = """
    #include "opjit_convert.h"
    #include "opjit_elementwise.h"
    opjit_status mean(const opjit_tensor *a, const opjit_tensor *b, opjit_tensor *out);
    static void row(int64_t n, void *const *data, const int64_t *strides, const void *context)
    {
        const float *a = (const float *)data[1], *b = (const float *)data[2], half = *(const float *)context;
        float *to = (float *)data[0];
        for (int64_t i = 0; i < n; i++)
            to[i * strides[0]] = half * (a[i * strides[1]] + b[i * strides[2]]);
    }
    opjit_status mean(const opjit_tensor *a, const opjit_tensor *b, opjit_tensor *out)
    {
        const opjit_tensor *tensors[3];
        const float half = 0.5f;
        opjit_elements elements;
        opjit_dtype dtype;
        OPJIT_TRY(opjit_result_dtype(a, b, &dtype));
        OPJIT_TRY(opjit_empty_broadcast(out, a, b, dtype));
        tensors[0] = out, tensors[1] = a, tensors[2] = b;
        OPJIT_TRY(opjit_elements_of(&elements, 3, tensors));
        opjit_split_complex(&elements);
        OPJIT_CHECK(opjit_is_packed(&elements), "not packed");
        opjit_convert(1, a->data, a->dtype, 1, out->data, dtype);
        opjit_store_float(out->data, 0, dtype, opjit_load_float(a->data, 0, a->dtype));
        opjit_store_int64(out->data, 0, dtype, opjit_load_int64(a->data, 0, a->dtype) + opjit_integer_of(half, dtype));
        opjit_rows_between(&elements, 0, 1, row, &half);
        return opjit_for_rows(&elements, row, &half);
    }
    """


@pytest.mark.parametrize("text", [USES_ALL, USES_ELEMENTS], ids=["opjit.h", "opjit_elementwise.h"])
@pytest.mark.parametrize(
    ("compiler", "flags"), [(CC, ["-x", "c", "-std=c11"]), (CXX, ["-x", "c++", "-std=c++17"])]
)
def test_every_macro_is_strict_in_use(compiler: str | None, flags: list[str], text: str) -> None:
    if compiler is None:
        pytest.skip("no C++ compiler")
    _compile(
        compiler, *flags, *STRICT, f"-I{HEADERS}", "-O2", "-S", "-o", os.devnull, "-", text=text
    )


def test_arguments_of_an_error_that_its_text_does_not_take_are_a_warning() -> None:
    wrong = '#include "opjit.h"\nopjit_status f(int a);\nopjit_status f(int a) { OPJIT_FAIL("%s", a); }\n'
    done = subprocess.run(
        [CC, "-std=c11", "-Wall", f"-I{HEADERS}", "-fsyntax-only", "-x", "c", "-"],
        input=wrong,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "format" in done.stderr


def _declared(weak: bool = False) -> set[str]:
    """The functions of torch that opjit calls, or those of them that may be missing."""
    shim = (HEADERS / "opjit_shim.h").read_text(encoding="utf-8")
    code = re.sub(r"/\*.*?\*/|^typedef [^;]*;", "", shim, flags=re.DOTALL | re.MULTILINE)
    before = r"__attribute__\(\(weak\)\)[^;]*?" if weak else ""
    return set(re.findall(rf"{before}\b((?:aoti_)?torch_\w+)\(", code))


def test_every_function_that_is_not_weak_is_in_the_running_torch() -> None:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    assert len(_declared()) > 40
    missing = {name for name in _declared() - _declared(weak=True) if not hasattr(library, name)}
    assert all("_cuda_" in name for name in missing), "these are in libtorch_cuda"


def test_the_weak_functions_are_those_that_came_after_2_10() -> None:
    """torch's header guards each function with the version that brought it."""
    header = Path(torch.__file__).parent / "include/torch/csrc/stable/c/shim.h"
    stated: dict[str, tuple[int, int]] = {}
    version = (0, 0)
    for line in header.read_text(encoding="utf-8").splitlines():
        guard = re.match(r"#if TORCH_FEATURE_VERSION >= TORCH_VERSION_(\d+)_(\d+)_0", line)
        version = (
            (int(guard[1]), int(guard[2]))
            if guard
            else (0, 0)
            if line.startswith("#endif")
            else version
        )
        for name in re.findall(r"\b((?:aoti_)?torch_\w+)\(", line):
            stated.setdefault(name, version)
    ours = _declared() & stated.keys()
    assert {name for name in ours if stated[name] > (2, 10)} == _declared(weak=True) & ours


@pytest.mark.skipif(CXX is None, reason="no C++ compiler")
def test_the_prototypes_are_torchs() -> None:
    """Declared a second time with torch's own types, a function whose prototype differs does not compile."""
    assert CXX is not None
    text = """
        #include <torch/csrc/inductor/aoti_torch/c/shim.h>
        #include <torch/csrc/stable/c/shim.h>
        #define torch_tensor_opaque AtenTensorOpaque
        #define torch_list_opaque StableListOpaque
        #define torch_string_opaque StringOpaque
        #define torch_library_opaque TorchLibraryOpaque
        #define torch_guard_opaque DeviceGuardOpaque
        #define torch_generator_opaque AtenGeneratorOpaque
        #include "opjit_shim.h"
        """
    include = Path(torch.__file__).parent / "include"
    _compile(
        CXX,
        "-std=c++20",
        "-fsyntax-only",
        "-w",
        f"-isystem{include}",
        f"-I{HEADERS}",
        "-x",
        "c++",
        "-",
        text=text,
    )


OWN = [
    "optest::everything",
    "optest::double",
    "optest::increment",
    "optest::parts",
    "optest::joined",
]


@pytest.mark.parametrize("arch", LEVELS)
@pytest.mark.usefixtures("everything", "double", "increment", "parts")
def test_every_c_op_is_strict_c11(arch: str, tmp_path: Path) -> None:
    backend = backends.for_device("cpu")
    march = next(flag for flag in backend.flags(arch, "").c if flag.startswith("-march="))
    for op in map(registry.find, [*BUNDLED, *OWN]):
        path = op.declaration.source(backend)
        for name, text in glue.render(op.schema, backend, path.name).items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        _compile(
            CC,
            "-std=c11",
            *STRICT,
            march,
            "-O3",
            "-S",
            "-o",
            os.devnull,
            "-fexceptions",
            "-fvisibility=hidden",
            *(f"-I{folder}" for folder in (path.parent, tmp_path, HEADERS)),
            str(tmp_path / "opjit_glue.c"),
        )


@pytest.fixture(scope="module")
def sanitizers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sanitizers]:
    """One process for all ops."""
    try:
        started = Sanitizers(
            ("address", "undefined"), 200.0, str(tmp_path_factory.mktemp("sanitized"))
        )
    except Skipped as reason:
        pytest.skip(str(reason))
    with started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BUNDLED, "optest::double", "optest::parts", "optest::joined"])
@pytest.mark.usefixtures("double", "parts")
def test_ops_are_clean_under_asan_and_ubsan(sanitizers: Sanitizers, name: str) -> None:
    """Every sample, every layout, with one thread and with four, and refused calls."""
    sanitizers.begin(registry.find(name), only=("results", "strides", "threads", "dtypes"))
    line = sanitizers.finding()[0]
    assert line.status == "ok", line.note


@pytest.mark.slow
@pytest.mark.usefixtures("sanitizers")
def test_generated_glue_is_clean_under_asan_and_ubsan(
    everything: Op, increment: Op, tmp_path: Path
) -> None:
    """With values of every type, with as few as may be, with those that the kernel refuses, and with tensors that it writes."""
    built = []
    for op in (everything, increment):
        folder = tmp_path / op.schema.name
        folder.mkdir()
        built.append(
            (str(op.folder), str(sanitize.instrumented(op, ("address", "undefined"), CC, folder)))
        )
    libraries = (
        subprocess.run(
            [CC, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    )
    code = f"""
        import ctypes
        from pathlib import Path
        import torch
        import opjit
        for folder, library in {built!r}:
            opjit.registry.declare_folder(Path(folder))
            assert ctypes.CDLL(library).opjit_register() == 0
        call = opjit.registry.find("optest::everything").overload
        full = [torch.ones(2, 3).t(), torch.ones(1), [torch.ones(2), torch.ones(0)], 1, 2, 3.0, True, "s", torch.int8, 1, 2, 3.0, True, "t",
                torch.int8, [1, 2], [3], [1.0], [True], [1, 2], [torch.ones(1)] * 2, [torch.ones(1)], [1], [1.0], [True], [1, 2]]
        none = [torch.tensor(1.0), None, [], 1, 2, 3.0, True, "", torch.int8, None, None, None, None, None, None, [], [], [], [], [1, 2],
                [torch.ones(1)] * 2, None, None, None, None, None]
        call(*full), call(*none)
        for refused in (-1, -2):
            try:
                call(*full[:3], refused, *full[4:])
            except RuntimeError as error:
                assert "optest::everything" in str(error), error
                print("refused")
        for dtype in (torch.float32, torch.int64, torch.int8):
            x = torch.zeros(5, 7, dtype=dtype)
            for view in (x, x.t(), x[1::2, ::3], x[:0], x[:0, :1, None].expand(0, 2**40, 2**40)):
                torch.ops.optest.increment(view)
        """
    options = "detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0:verify_asan_link_order=0"  # torch is not instrumented
    assert (
        fresh(code, {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": options}).stdout
        == "refused\n" * 2
    )


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of up to 5 dimensions that were sliced, permuted, expanded, squeezed and given odd strides."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 5]), max_size=5))
    x = torch.arange(math.prod(sizes), dtype=torch.float32).reshape(sizes)
    for d in range(x.dim()):
        start, step = draw(st.sampled_from([(0, 1), (0, 1), (0, 2), (1, 1), (1, 3)]))
        x = x[(slice(None),) * d + (slice(start, None, step),)]
    x = x.permute(draw(st.permutations(range(x.dim()))))
    if draw(st.booleans()):
        x = x.expand(
            [
                draw(st.sampled_from([2, 3])) if size == 1 and draw(st.booleans()) else size
                for size in x.shape
            ]
        )
    if draw(st.booleans()):
        x = x.unsqueeze(draw(st.integers(0, x.dim())))
    if draw(st.booleans()):  # a dimension of size 1 may have any stride
        x = x.as_strided(
            x.shape,
            [
                draw(st.sampled_from([0, 1, stride, 77])) if size == 1 else stride
                for size, stride in zip(x.shape, x.stride(), strict=True)
            ],
            x.storage_offset(),
        )
    if draw(st.integers(0, 9)) == 0:
        x = torch.arange(100.0).as_strided((2, 3, 4), draw(st.tuples(*[st.integers(0, 9)] * 3)))
    return x


# Of each op the parameters, as the schema and as C has them, and the kernel.
LAYOUTS = {
    "like": (
        "Tensor x",
        "",
        """
        OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
        """,
    ),
    "elements": (
        "Tensor x",
        "",
        """
        opjit_elements e;
        OPJIT_TRY(opjit_elements_of(&e, 1, &x));
        OPJIT_TRY(opjit_empty(out, 2, (int64_t[]){2, e.dim}, OPJIT_INT64, x));
        int64_t *to = out->data;
        for (int64_t d = 0; d < e.dim; d++) {
            to[d] = e.sizes[d];
            to[e.dim + d] = e.strides[d][0];
        }
        """,
    ),
    "offsets": (
        "Tensor x",
        "",
        """
        OPJIT_TRY(opjit_empty(out, 1, &x->numel, OPJIT_INT64, x));
        for (int64_t i = 0; i < x->numel; i++)
            ((int64_t *)out->data)[i] = opjit_offset(x, i);
        """,
    ),
    "walk": (
        "Tensor x, int begin, int end",
        "int64_t begin, int64_t end, ",
        """
        OPJIT_TRY(opjit_empty(out, 2, (int64_t[]){end - begin, 2}, OPJIT_INT64, x));
        int64_t *to = out->data;
        OPJIT_FOR_RANGE(i, begin, end, at, x) {
            *to++ = i;
            *to++ = at;
        }
        """,
    ),
    "walk2": (
        "Tensor x, Tensor y",
        "const opjit_tensor *y, ",
        """
        OPJIT_CHECK(opjit_same_sizes(x, y), "x and y must have one shape");
        OPJIT_TRY(opjit_empty(out, 2, (int64_t[]){2, x->numel}, OPJIT_INT64, x));
        int64_t *to = out->data;
        OPJIT_FOR_EACH2(i, at_x, x, at_y, y) {
            to[i] = at_x;
            to[x->numel + i] = at_y;
        }
        """,
    ),
}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Op]:
    """empty_like, elements in memory order, offsets and walks, as ops."""
    folder = tmp_path_factory.mktemp("layouts")
    declared = "import opjit\n"
    for name, (parameters, prototype, body) in LAYOUTS.items():
        declared += f"@opjit.op('optest::layout_{name}({parameters}) -> Tensor')\ndef {name}(x, *others): return x\n"
        (folder / f"layout_{name}.c").write_text(f"""
            #include "opjit_elementwise.h"
            opjit_status layout_{name}_cpu(const opjit_tensor *x, {prototype}opjit_tensor *out)
            {{{body}    return OPJIT_OK;
            }}
            """)
    (folder / "op.py").write_text(declared)
    registry.declare_folder(folder)
    return {name: registry.find(f"optest::layout_{name}") for name in LAYOUTS}


def _offsets(x: torch.Tensor) -> list[int]:
    """Where torch finds each element, in row-major order."""
    if x.numel() == 0:
        return []
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    found: list[int] = torch.arange(last + 1).as_strided(x.shape, x.stride()).flatten().tolist()
    return found


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, derandomize=True)
@given(x=views(), data=st.data())
def test_any_layout_is_read_as_torch_reads_it(
    layouts: dict[str, Op], x: torch.Tensor, data: st.DataObject
) -> None:
    """Each element is there: by its index, in a walk over any range of elements, over two tensors at once, and in the memory's order."""
    like = layouts["like"](x)
    expected = torch.empty_like(x)
    assert (like.shape, like.stride()) == (expected.shape, expected.stride()), (x.shape, x.stride())
    places = _offsets(x)
    assert layouts["offsets"](x).tolist() == places
    begin = data.draw(st.integers(0, x.numel()))
    end = data.draw(st.integers(begin, x.numel()))
    assert layouts["walk"](x, begin, end).tolist() == [[i, places[i]] for i in range(begin, end)]
    order = data.draw(st.permutations(range(x.dim())))
    y = torch.empty([x.shape[d] for d in order]).permute([order.index(d) for d in range(x.dim())])
    assert layouts["walk2"](x, y).tolist() == [places, _offsets(y)]
    sizes, strides = layouts["elements"](x).tolist()
    assert math.prod(sizes) == x.numel()
    if x.numel():
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        assert sorted(
            torch.arange(last + 1).as_strided(sizes, strides).flatten().tolist()
        ) == sorted(places)
    if x.numel() > 1:
        assert 1 not in sizes
        assert strides == sorted(strides, reverse=True)
        if x.is_contiguous() or torch._prims_common.is_non_overlapping_and_dense_or_false(x):
            assert (sizes, strides) == ([x.numel()], [1]), (
                "a permuted dense tensor is one dimension"
            )


def test_two_tensors_of_other_sizes_are_told_apart(layouts: dict[str, Op]) -> None:
    for shape in ((2, 3), (3, 2, 1), (3,), ()):
        with pytest.raises(RuntimeError, match="one shape"):
            layouts["walk2"](torch.ones(3, 2), torch.ones(shape))


def test_layouts_of_many_dimensions(layouts: dict[str, Op]) -> None:
    x = (
        torch.arange(2.0**12)
        .reshape((2,) * 12)
        .permute(*range(11, -1, -1))[..., None]
        .expand((2,) * 12 + (3,))
    )
    assert layouts["offsets"](x).tolist() == _offsets(x)
    assert layouts["walk"](x, 0, x.numel()).tolist() == [
        [i, at] for i, at in enumerate(_offsets(x))
    ]
    assert layouts["like"](x).stride() == torch.empty_like(x).stride()
    assert layouts["elements"](x).tolist() == [[4096, 3], [1, 0]]


def test_sizes_and_names_of_dtypes_are_torchs(make_op: MakeOp) -> None:
    op = make_op(
        "sizes(Tensor x, ScalarType d) -> (int, bool, bool)",
        """
        opjit_status sizes_cpu(const opjit_tensor *x, opjit_dtype d, int64_t *size, bool *floating, bool *integral)
        {
            OPJIT_CHECK(x->dtype == d, "%s", opjit_dtype_name(d));
            *size = (int64_t)opjit_dtype_size(d);
            *floating = opjit_is_floating(d);
            *integral = opjit_is_integral(d);
            return OPJIT_OK;
        }
        """,
    )
    for dtype in [*REAL, *COMPLEX]:
        size, floating, integral = op(torch.empty(1, dtype=dtype), dtype)
        assert (size, floating, integral) == (
            dtype.itemsize,
            dtype.is_floating_point,
            not dtype.is_floating_point and not dtype.is_complex,
        ), dtype
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert op(torch.ones(1).to(dtype), dtype) == (1, False, False)
    other = torch.float8_e5m2fnuz
    assert op(torch.ones(1).to(other), other) == (0, False, False)


@pytest.mark.usefixtures("increment")
def test_an_expanded_tensor_is_not_written() -> None:
    """torch's own ops refuse it in the same words."""
    with pytest.raises(
        RuntimeError,
        match="more than one element of the written-to tensor refers to a single memory location",
    ) as refused:
        torch.zeros(1).expand(3).add_(1)
    with pytest.raises(RuntimeError, match=re.escape(str(refused.value).splitlines()[0])):
        torch.ops.optest.increment(torch.zeros(1).expand(3))
    torch.ops.optest.increment(torch.zeros(1, 3)[:, ::2].expand(1, 2))
