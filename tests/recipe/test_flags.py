"""An op's own flags, libraries and include folders: they reach the compiler and the key, and none of them can break a promise."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import opjit
from opjit import request, wanted
from opjit.backends import targets
from opjit.backends.targets import Target
from opjit.builder import build, torch_builder
from opjit.catalog import registry
from opjit.errors import BuildError, CompileError, DeclarationError
from opjit.recipe import recipe, toolchain
from opjit.recipe.flags import check_flags, join
from opjit.store import elf
from opjit.store.entry import Entry, check_library, read
from opjit.store.store import Store, default_root
from tests import helpers
from tests.helpers import MakeOp, describe

# An op that returns what VALUE is to the compiler.
VALUE = """\
#include <omp.h>
#ifdef HEADER
#include "value.h"
#endif

opjit_status value_cpu(const opjit_tensor *x, int64_t *out)
{
    (void)x;
    *out = VALUE;
    return OPJIT_OK;
}
"""
TEXT = VALUE.replace(
    "    *out = VALUE;\n    return OPJIT_OK;\n", '    (void)out;\n    OPJIT_FAIL("%s", VALUE);\n'
)
Declare = Callable[..., opjit.Op]
X = torch.ones(1)


@pytest.fixture
def declare(make_op: MakeOp) -> Declare:
    """``declare(source, extra_cflags=[...], ...)``: an op ``value(Tensor x) -> int`` in a namespace of its own."""
    return lambda source=VALUE, **options: make_op(
        "value(Tensor x) -> int", source, fake=lambda x: 0, **options
    )


def here() -> Target:
    return targets.here(helpers.cpu())


def document(op: opjit.Op, target: Target | None = None) -> dict[str, Any]:
    """What the op's key is the hash of, but for the op's name."""
    return {**wanted.describe(op, target or here(), Store(default_root())).document(), "schema": ""}


def test_a_macro_reaches_the_kernel_and_another_value_is_another_entry(declare: Declare) -> None:
    first, second = (declare(extra_cflags=[f"-DVALUE={value}"]) for value in (20000, 6000))
    assert (first(X), second(X)) == (20000, 6000)
    assert document(first) != document(second)
    assert document(first) == document(declare(extra_cflags=("-DVALUE=20000",)))
    assert document(first)["flags"]["c"][-1] == "-DVALUE=20000"


def test_flags_come_behind_opjit_s_own(declare: Declare) -> None:
    source = VALUE.replace("VALUE;", "0;\n#ifdef __OPTIMIZE__\n    *out = 1;\n#endif")
    assert declare(source)(X) == 1
    assert declare(source, extra_cflags=["-O0"])(X) == 0
    assert (
        declare(source.replace("__OPTIMIZE__", "__OPTIMIZE_SIZE__"), extra_cflags=["-Os"])(X) == 1
    )
    assert declare(extra_cflags=["-DVALUE=1", "-UVALUE", "-DVALUE=2"])(X) == 2, (
        "in the author's order"
    )


def test_a_flag_is_one_argument_whatever_is_in_it(declare: Declare) -> None:
    text = "a b it's {folder} and { $HOME $$ `id` a,b;c back\\slash smörgås @unique"
    op = declare(TEXT, extra_cflags=['-DVALUE="' + text.replace("\\", "\\\\") + '"'])
    with pytest.raises(RuntimeError, match=re.escape(f"value: {text} [value.c")):
        op(X)


def test_a_flag_is_one_word_of_the_build_that_torch_describes(tmp_path: Path) -> None:
    flags = [f"-DX={text}" for code in range(32, 256) if (text := chr(code)).isprintable()]
    flags += [f"{each}{each} {each}" for each in flags] + ["".join(flags)]
    (tmp_path / "a.cpp").touch()
    arguments = {
        "name": "a",
        "sources": [str(tmp_path / "a.cpp")],
        "extra_cflags": [torch_builder.quote(flag) for flag in flags],
        "build_directory": str(tmp_path),
    }
    build = torch_builder.describe_build("load", arguments, {}, {})
    assert build.cxx_flags[-len(flags) :] == flags


def test_flags_for_one_language_leave_the_other_s_key_alone(declare: Declare) -> None:
    cuda = targets.named("sm_90", cuda_version="13.0")
    plain = declare(cuda="\n")
    both = declare(cuda="\n", extra_cflags=["-DVALUE=1"], extra_cuda_cflags=["-DVALUE=2"])
    assert document(both, cuda)["flags"]["c"] == document(plain, cuda)["flags"]["c"]
    assert document(both, cuda)["flags"]["cuda"] == [
        *document(plain, cuda)["flags"]["cuda"],
        "-DVALUE=2",
    ]
    assert "-DVALUE=2" not in json.dumps(document(both))


def test_warnings_that_an_author_asks_for_find_nothing_in_opjit_s_own_part(
    declare: Declare,
) -> None:
    flags = [
        "-Wall",
        "-Wextra",
        *(f"-Werror={name}" for name in ("all", "extra", "shadow", "undef", "strict-prototypes")),
    ]
    assert declare(extra_cflags=["-DVALUE=3", *flags])(X) == 3


CUDA_VALUE = """\
#if VALUE != 5 || !defined(__CUDACC__)
#error VALUE is not 5
#endif

opjit_status value_cuda(const opjit_tensor *x, int64_t *out, cudaStream_t stream)
{
    (void)x, (void)stream;
    *out = HOST;
    OPJIT_FAIL("%s", TEXT);
    return OPJIT_OK;
}
"""


@pytest.mark.nvcc
def test_flags_reach_nvcc_and_its_host_compiler(declare: Declare) -> None:
    text = "".join(filter(str.isprintable, map(chr, range(32, 256))))
    text = text.translate(dict.fromkeys(map(ord, '$`\\"')))  # the first three are refused
    flags = [
        "-DVALUE=5",
        f'-DTEXT="{text}"',
        "-Xcompiler=-DHOST=1,-Wall",
        "--use_fast_math",
        "-Xptxas=-O2",
        "-std=c++20",
    ]
    entry = request.entry(
        declare(cuda=CUDA_VALUE, extra_cuda_cflags=flags), helpers.cuda_target("sm_90")
    )
    assert f"{text}\0".encode() in entry.library.read_bytes()
    with pytest.raises(CompileError, match="VALUE is not 5"):
        request.entry(
            declare(cuda=CUDA_VALUE, extra_cuda_cflags=flags[1:]), helpers.cuda_target("sm_90")
        )


def with_header(folder: Path, value: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "value.h").write_text('#include "inner.h"\n')
    (folder / "inner.h").write_text(f"#define VALUE {value}\n")
    return folder


def test_a_header_of_an_include_folder_enters_the_key_by_its_content(
    declare: Declare, tmp_path: Path
) -> None:
    here_ = with_header(tmp_path / "here", "7")
    there = with_header(tmp_path / "over" / "there", "7")
    first, second = (
        declare(extra_cflags=["-DHEADER"], extra_include_paths=[folder])
        for folder in (here_, str(there))
    )
    assert first(X) == second(X) == 7
    assert document(first) == document(second)
    built = [request.entry(op, here(), Store(default_root())) for op in (first, second)]
    written, other = (read(entry.folder)[0].document for entry in built)
    assert written == {**other, "schema": written["schema"]}
    assert set(written["inputs"]) >= {"<include 0>/value.h", "<include 0>/inner.h"}
    assert str(tmp_path) not in json.dumps(written)
    with_header(here_, "8")
    assert request.entry(first, here(), Store(default_root())).key != built[0].key


def test_a_relative_include_folder_starts_from_the_op_s_folder(
    declare: Declare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_header(tmp_path / "shared" / "include", "9")
    monkeypatch.chdir("/")
    assert declare(extra_cflags=["-DHEADER"], extra_include_paths=["../shared/include"])(X) == 9


def test_the_first_include_folder_with_a_header_wins_and_the_op_s_own_comes_before(
    declare: Declare, tmp_path: Path
) -> None:
    folders = [with_header(tmp_path / name, value) for name, value in (("a", "1"), ("b", "2"))]
    assert declare(extra_cflags=["-DHEADER"], extra_include_paths=folders[::-1])(X) == 2
    op = declare(extra_cflags=["-DHEADER"], extra_include_paths=folders)
    with_header(op.folder, "3")
    assert op(X) == 3


def test_an_include_folder_leaves_no_path_in_the_binary(tmp_path: Path) -> None:
    """Nor does the folder around the op, given as an include folder, change a byte."""
    named = helpers.PLUS.replace('plus takes float32, not %s"', '%s %s %s", where, __FILE__')
    built = []
    for place in ("one", "another and longer"):
        op = helpers.write_op(tmp_path / place / "plus", plus_c=named)
        (op / "amount.h").unlink()
        (tmp_path / place / "include").mkdir()
        (tmp_path / place / "include" / "amount.h").write_text(
            "static const char where[] = __FILE__;\n#define AMOUNT 1.0f\n"
        )
        described = describe(op)
        flags = join(
            described.flags,
            check_flags("op", op, (), (), (), ["../include", ".."]),
            described.target,
        )
        compilers = toolchain.identities_of(described.target, None)
        wanted = recipe.describe(
            described.schema, described.target, described.source, flags, compilers
        )
        built.append(build.build(wanted, Store(tmp_path / place / "cache")))
    contents = [entry.library.read_bytes() for entry in built]
    assert built[0].key == built[1].key
    assert contents[0] == contents[1]
    assert b"amount.h\0" in contents[0]
    assert str(tmp_path).encode() not in contents[0]


def test_an_include_folder_does_not_open_the_door_to_torch_s_headers(declare: Declare) -> None:
    source = VALUE.replace("#include <omp.h>", "#include <torch/headeronly/version.h>")
    op = declare(
        source,
        extra_cflags=["-DVALUE=1"],
        extra_include_paths=[Path(torch.__file__).parent / "include"],
    )
    with pytest.raises(BuildError, match=r"an op is plain C over opjit\.h"):
        op(X)


def test_an_include_folder_that_is_not_there_is_refused_with_the_place_looked_at(
    declare: Declare, tmp_path: Path
) -> None:
    with pytest.raises(
        DeclarationError,
        match=rf"names 'nowhere', but there is no directory {tmp_path}/\w+/nowhere;",
    ):
        declare(extra_include_paths=["nowhere"])


OPENMP = {
    "extra_cflags": ["-fopenmp", "-DVALUE=omp_get_num_procs() > 0"],
    "extra_ldflags": ["-lgomp"],
}


def test_a_declared_library_is_linked_and_what_is_not_declared_is_not(declare: Declare) -> None:
    op = declare(**OPENMP)
    assert op(X) == 1
    # Found, so verified, with the manifest's word on what it may ask for.
    entry = request.entry(op, here())
    assert "libgomp.so.1" in elf.inspect(entry.library.read_bytes()).needed
    assert (
        json.loads((entry.folder / "manifest.json").read_text())["document"]["flags"]["link"][0]
        == "-lgomp"
    )
    with pytest.raises(CompileError, match="undefined reference to `omp_get_num_procs'"):
        declare(extra_cflags=OPENMP["extra_cflags"])(X)


def test_a_library_that_was_not_declared_is_refused_before_it_is_loaded(declare: Declare) -> None:
    entry: Entry = request.entry(declare(**OPENMP), here())
    content = entry.library.read_bytes()
    check_library(content, here(), ["-lm", "-lgomp"])
    with pytest.raises(
        Exception, match=r"needs libgomp\.so\.1, which the op does not declare in extra_ldflags"
    ):
        check_library(content, here(), ["-lm", "-lgom", "-lgomp.so"])


REFUSED = {
    "extra_cflags": {
        "-ffast-math": "-fno-math-errno",
        "-Ofast": "-fno-math-errno",
        "-funsafe-math-optimizations": "denormals",
        "-march=native": "OPJIT_ARCH=x86-64-v4",
        "-march=x86-64-v4": "OPJIT_ARCH",
        "-mavx512f": "__attribute__",
        "-mtune=native": "arch",
        "-mfma": "__builtin_cpu_supports",
        "-I/opt/include": "extra_include_paths",
        "-isystem": "extra_include_paths",
        "-include": "#include line",
        "-includex.h": "#include line",
        "@flags.txt": "would not be in the key",
        "-lz": "extra_ldflags",
        "-L/opt": "extra_ldflags",
        "-Wl,-rpath,/opt": "extra_ldflags",
        "-static": "extra_ldflags",
        "-std=c++17": "-std=gnu17",
        "-std=gnu99": "-std=gnu17",
        "-std=c9x": "-std=gnu17",
        "-std=c89": "-std=gnu17",
        "-ansi": "-std=gnu17",
        "-xc++": "follows from its file",
        "-fno-exceptions": "the default",
        "-fshort-enums": "relies on the default",
        "-fvisibility=default": "relies on the default",
        "-fplugin=x.so": "the key does not cover",
        "-fprofile-use=x": "the key does not cover",
        "-ffile-prefix-map=a=b": "the key does not cover",
        "-fopt-info-all=/tmp/told.txt": "the key does not cover",
        "-fcondition-coverage": "the key does not cover",
        "-fcompare-debug=-fplugin=/tmp/x.so": "runs other programs",
        "-fcompare-debug": "runs other programs",
        "-fpass-plugin=x": "runs other programs",
        "-fuse-ld=x": "runs other programs",
        "-fmodule-mapper=|id": "runs other programs",
        "-fdebug-compilation-dir=/tmp": "plain words",
        "-frandom-seed=-g": "plain words",
        "-flto=auto": "the default",
        "-fstack-usage": "the key does not cover",
        "-fsanitize-ignorelist=x": "the key does not cover",
        "-Wno-x=a;id": "plain words",
        "-mtune=x -fplugin=y": "plain words",
        "-g": "OPJIT_DEBUG=1",
        "-ggdb3": "opjit get --debug",
        "-Werror": "-Werror=vla",
        "kernel2.c": "starts with '-'",
        "-D": "'-DNAME=value'",
        "-O3 -DX": "does not support this flag",
        "-DX\n": "line break",
        "--coverage": "does not support this flag",
        "-Wp,-D,X": "does not support this flag",
        "-o": "does not support this flag",
        "": "does not support this flag",
    },
    "extra_cuda_cflags": {
        "-gencode=arch=compute_90,code=sm_90": "OPJIT_ARCH=sm_90a",
        "-arch=sm_90": "opjit get",
        "--gpu-architecture=sm_90": "OPJIT_ARCH",
        "-G": "OPJIT_DEBUG=1",
        "-device-debug": "opjit get --debug",
        "-Xcompiler": "'-Xcompiler=-Wall'",
        "-Xcompiler=-Wall,-ffast-math": "denormals",
        "-Xcompiler=-march=native": "OPJIT_ARCH",
        "-I.": "extra_include_paths",
        "--options-file=x": "would not be in the key",
        "-rdc=true": "does not support this flag",
        "-ccbin=clang": "does not support this flag",
        "-std=gnu17": "c\\+\\+20",
        "-std=c++14": "c\\+\\+20",
        "-lcublas": "extra_ldflags",
        '-DHOME="$HOME"': "to a shell",
        "-DX=`id`": "to a shell",
        "-Xcompiler=-DX=$(id)": "plain words",
        '-DX="\\\\";id;"': "to a shell",
        "-Xcompiler=-DX=1;id": "plain words",
        "-Xcompiler=-DX=1|id": "plain words",
        "-Xcompiler=-DX=1>x": "plain words",
        "-Xcompiler=-DX='1": "plain words",
        "-Xptxas=-v;id": "plain words",
        "-Xptxas=-v>x": "plain words",
        "-Xcompiler=-DX=&id": "plain words",
        "-Wno-x;id": "plain words",
        "-Xcompiler=-fplugin=x": "runs other programs",
        "-Xcudafe=--preinclude=x.h": "#include line",
        "-Xptxas=-v,--options-file=x": "would not be in the key",
    },
    "extra_ldflags": {
        "-L/opt/lib": "there is no directory /opt/lib",
        "-L/": "holds no libNAME.so and no libNAME.a",
        "-Wl,-rpath,/opt": "-lNAME",
        "-static": "-lNAME",
        "-ffast-math": "-lNAME",
        "-l:libz.a": "-lNAME",
        "libz.a": "there is no file",
        "/opt/libz.so.1": "'-L/opt', '-lz'",
        "-ltorch_python": "one version of torch",
        "-lc10": "one version",
        "-lpython3.11": "one version",
    },
}


@pytest.mark.parametrize(
    ("parameter", "flag", "says"),
    [(name, flag, says) for name, flags in REFUSED.items() for flag, says in flags.items()],
)
def test_a_flag_that_would_break_a_promise_is_refused_with_another_way(
    parameter: str, flag: str, says: str
) -> None:
    given: dict[str, Any] = {parameter: [flag]}
    with pytest.raises(DeclarationError, match=says) as caught:
        opjit.op("flagtest::refused(Tensor x) -> ()", **given)(lambda x: None)
    assert str(caught.value).startswith(f"flagtest::refused: {parameter} cannot hold {flag!r}: ")
    assert registry.declared("flagtest::refused") is None


@pytest.mark.parametrize(
    ("parameter", "flags"),
    [
        (
            "extra_cflags",
            [
                "-DSTACK_SIZE=20000",
                "-DF(x)=x",
                "-UNDEBUG",
                "-O2",
                "-Os",
                "-Wall",
                "-Wno-unused",
                "-Werror=vla",
                "-w",
                "-std=c11",
                "-std=gnu2x",
                "-std=c18",
                "-fopt-info",
                "-funroll-loops",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-fassociative-math",
                "-fopenmp-simd",
                "-mtune=znver3",
                "-mprefer-vector-width=512",
                "-mno-avx512f",
                "-pthread",
                "-fsanitize=undefined",
            ],
        ),
        (
            "extra_cuda_cflags",
            [
                "-DX",
                "-O2",
                "-std=c++20",
                "--use_fast_math",
                "-use_fast_math",
                "--ftz=true",
                "-maxrregcount=64",
                "--expt-relaxed-constexpr",
                "--expt-extended-lambda",
                "-Xptxas=-v,-dlcm=cg",
                "-Xcompiler=-Wall,-O2",
                "--diag-suppress=177",
                "-Xcudafe=--diag_suppress=177",
            ],
        ),
        ("extra_ldflags", ["-lz", "-lstdc++", "-lm", "-lfoo-1.2"]),
    ],
)
def test_what_authors_usually_need_is_passed_on(
    tmp_path: Path, parameter: str, flags: list[str]
) -> None:
    given: dict[str, Any] = {
        "cflags": (),
        "cuda_cflags": (),
        "ldflags": (),
        "include_paths": (),
        parameter.removeprefix("extra_"): flags,
    }
    found = check_flags("op", tmp_path, **given)
    assert (
        list(
            {"extra_cflags": found.c, "extra_cuda_cflags": found.cuda, "extra_ldflags": found.link}[
                parameter
            ]
        )
        == flags
    )


@pytest.mark.parametrize(
    "parameter", ["extra_cflags", "extra_cuda_cflags", "extra_ldflags", "extra_include_paths"]
)
@pytest.mark.parametrize("value", ["-lz", 5, [5], [None], object()])
def test_what_is_no_list_of_texts_is_refused_in_a_sentence(parameter: str, value: Any) -> None:
    with pytest.raises(DeclarationError, match=re.escape(f", not {value!r}")) as caught:
        opjit.op("flagtest::refused(Tensor x) -> ()", **{parameter: value})(lambda x: None)
    assert str(caught.value).startswith(f"flagtest::refused: {parameter} is a list of ")
