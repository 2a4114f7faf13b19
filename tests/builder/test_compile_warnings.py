"""The warnings of compilers that succeed: each once, at the author's line, and only about the author's files."""

import re
import warnings
from pathlib import Path

import pytest

from opjit.builder import compile_warnings
from opjit.errors import CompileWarning
from tests import helpers
from tests.helpers import PLUS, PLUS_CUDA, built, cuda_target, write_op

SHIFTED = PLUS.replace(
    "    return OPJIT_OK;", "    out->numel += 0 * (1 << 40);\n    return OPJIT_OK;"
)


def warned(folder: Path, cache: Path, arch: str | None = None) -> list[tuple[str, int, str]]:
    """Each warning of a build: file, line and text."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        built(folder, cache, cuda_target(arch) if arch else None)
    assert all(one.category is CompileWarning for one in seen)
    return [(one.filename, one.lineno, str(one.message)) for one in seen]


def test_a_warning_of_a_build_that_succeeds_comes_once_at_the_author_s_line(tmp_path: Path) -> None:
    op = write_op(tmp_path / "op", plus_c=SHIFTED)
    [(file, line, text)] = warned(op, tmp_path / "cache")
    assert (file, line) == (str(op / "plus.c"), 11)
    assert "-Wshift-count-overflow" in text
    assert warned(op, tmp_path / "cache") == [], "a hit compiles nothing"


LARGE = PLUS.replace(
    "    return OPJIT_OK;",
    """\
    volatile float all[500000];
    for (int64_t i = 0; i < x->numel; i++)
        all[i] = 0;
    return OPJIT_OK;""",
)


def test_a_kernel_whose_locals_fill_a_stack_is_warned_of_with_a_way_out(tmp_path: Path) -> None:
    op = write_op(tmp_path / "op", plus_c=LARGE)
    [(file, line, text)] = warned(op, tmp_path / "cache")
    assert (file, line) == (str(op / "plus.c"), LARGE.count("\n"))
    assert re.fullmatch(
        r"the frame size of 20000\d\d bytes is larger than 1048576 bytes \[-Wframe-larger-than=\]: a thread's stack has "
        r"some MB, and .* with SIGSEGV; allocate the memory with opjit_scratch, or pass .*",
        text,
    )
    allowed = helpers.OP_PY.replace('Tensor")', 'Tensor", extra_cflags=["-Wno-frame-larger-than"])')
    assert allowed != helpers.OP_PY
    code = (
        helpers.declare(write_op(tmp_path / "allowed", plus_c=LARGE, op_py=allowed)) + helpers.GET
    )
    done = helpers.fresh(code, {"OPJIT_CACHE": str(tmp_path / "cache")})
    assert (done.stdout, done.stderr) == ("[2.0]\n", "")


def test_a_warning_about_a_header_of_the_author_s_is_at_its_line(tmp_path: Path) -> None:
    op = write_op(tmp_path / "op", amount_h='#define AMOUNT 1.0f\n#warning "an old header"\n')
    [(file, line, text)] = warned(op, tmp_path / "cache")
    assert (file, line) == (str(op / "amount.h"), 2)
    assert "an old header" in text


@pytest.mark.nvcc
def test_a_warning_about_cuda_code_comes_once(tmp_path: Path) -> None:
    text = PLUS_CUDA.replace(
        "    OPJIT_KERNEL_LOOP", "    int on_device = 3;\n    OPJIT_KERNEL_LOOP"
    )
    op = write_op(tmp_path / "op", plus_cu=text)
    [(file, line, told)] = warned(op, tmp_path / "cache", "sm_90")
    assert (file, line) == (str(op / "plus.cu"), 6)
    assert "on_device" in told


def test_get_with_w_gives_all_warnings_whether_there_is_a_binary_or_not(
    tmp_path: Path, here: Path
) -> None:
    op = write_op(tmp_path / "op", plus_c=SHIFTED.replace("{\n", "{\n    int unused = 3;\n", 1))
    for _ in range(2):
        told = helpers.command("get", op, "--device", "cpu", "-W").stderr
        assert (
            f"{op / 'plus.c'}:6: warning: unused variable 'unused' [-Wunused-variable]\n  int unused = 3;\n"
            in told
        )
        assert told.count(f"{op / 'plus.c'}:12: warning: left shift count >= width of type") == 1
    assert helpers.command("get", op, "--device", "cpu").stderr == ""


@pytest.mark.parametrize("name", helpers.BUNDLED)
def test_a_bundled_op_has_no_warnings(name: str) -> None:
    assert helpers.command("get", name, "--device", "cpu", "-W").stderr == ""


def test_an_inline_op_s_warning_shows_its_line_and_no_path_of_opjit_s(here: Path) -> None:
    done = helpers.fresh("""
        import opjit, torch
        op = opjit.inline("shifted(Tensor x) -> int", c='''
        opjit_status shifted_cpu(const opjit_tensor *x, int64_t *out)
        {
            *out = 1 << 40;
            return OPJIT_OK;
        }''')
        op(torch.ones(1))
        """)
    assert re.fullmatch(
        r"shifted\.c:4: CompileWarning: left shift .*\n  \*out = 1 << 40;\n", done.stderr
    )


def test_a_warning_about_a_macro_of_opjit_s_is_at_the_line_that_uses_it() -> None:
    output = """\
In file included from /op/plus.c:1:
/opjit/opjit.h:90:20: warning: comparison is always true [-Wtype-limits]
   90 | #define OPJIT_X(a) ((a) < 3)
      |                    ^
/op/plus.c:7:5: note: in expansion of macro 'OPJIT_X'
    7 |     OPJIT_X(a);
/opjit/opjit_runtime.c:9:1: warning: about opjit alone
ptxas warning : Stack size for entry function cannot be statically determined
"""
    assert compile_warnings.find_warnings(
        output * 2, {"/op/plus.c": "/op/plus.c"}.get, "/op/plus.cu"
    ) == [
        ("/op/plus.c", 7, "comparison is always true [-Wtype-limits]"),
        ("/op/plus.cu", 1, "ptxas: Stack size for entry function cannot be statically determined"),
    ]


def test_the_form_of_nvcc_s_and_nvrtc_s_warnings_is_known() -> None:
    output = 'plus.cu(5): warning #177-D: variable "x" was declared but never referenced\n      int x;\n          ^\n\nRemark: ...\n'
    assert compile_warnings.find_warnings(output, {"plus.cu": "/op/plus.cu"}.get, "") == [
        ("/op/plus.cu", 5, 'variable "x" was declared but never referenced')
    ]
