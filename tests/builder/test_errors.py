"""What goes wrong on the way to an op, and that each error says what a person can do about it."""

import errno
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from opjit import backends
from opjit.backends import targets
from opjit.builder import build, diagnosis
from opjit.errors import (
    BuildError,
    CacheWarning,
    CompileError,
    CompileWarning,
    ToolMissing,
)
from opjit.recipe import toolchain
from opjit.store.entry import Entry
from opjit.store.store import Store
from tests import helpers
from tests.helpers import (
    PLUS,
    PLUS_CUDA,
    built,
    cuda_target,
    describe,
    fake_compiler,
    fresh,
    program,
    write_op,
)

# --- sources that do not compile ----------------------------------------------------------------------------------------------------------


def refusal(op: Path, cache: Path) -> BuildError:
    with pytest.raises(BuildError) as caught:
        built(op, cache)
    assert helpers.entries(cache) == []
    assert list((cache / "v2" / "staging").iterdir()) == []
    assert caught.value.op == "keytest::plus"
    assert caught.value.target == str(targets.here(helpers.cpu()))
    return caught.value


def test_a_compile_error_leads_with_the_compiler_s_first_complaint_and_where_it_is(
    op: Path, tmp_path: Path
) -> None:
    wrong = "    int y = undeclared_name;\n    another mistake;\n    return OPJIT_OK;"
    (op / "plus.c").write_text(
        PLUS.replace("    return OPJIT_OK;", wrong)
        + "".join(f"int f{n}(void) {{ return missing_{n}; }}\n" for n in range(40))
    )
    error = refusal(op, tmp_path / "cache")
    assert isinstance(error, CompileError)
    first = str(error).splitlines()[0]
    assert re.fullmatch(
        re.escape(str(op / "plus.c")) + r":11:13: error: .*undeclared_name.* undeclared .*", first
    )
    assert "keytest::plus" in str(error)
    assert "-std=c++" not in str(error)
    assert error.command is not None
    assert toolchain.require_compiler(None).path in error.command.split()[:2], (
        "behind ccache, which torch puts there if it is installed"
    )
    assert " -c " in error.command
    assert error.log is not None
    assert str(error.log) in str(error)
    text = error.log.read_text()
    assert all(f"missing_{n}" in text for n in range(40)), "the log holds the complete output"
    assert error.command in text
    assert len(str(error).splitlines()) < 30


UNCHECKED = (
    "OPJIT_TRY(opjit_empty_like(out, x, x->dtype));",
    "opjit_empty_like(out, x, x->dtype);",
)
NOT_C = "an op's kernel is plain C over opjit.h"


@pytest.mark.parametrize(
    ("name", "text", "first"),
    [
        ("amount.h", "\n\nint 5x;\n", r"amount\.h:3:5: error: "),
        ("amount.h", None, r"plus\.c:2:10: fatal error: amount\.h: No such file"),
        ("amount.h", '#error "define AMOUNT"\n', r"amount\.h:1:2: error: "),
        ("plus.c", PLUS.replace("+ AMOUNT", "+ (float)made_up(1)"), r"plus\.c:10:.* 'made_up'"),
        (
            "plus.c",
            PLUS.replace(*UNCHECKED),
            r"plus\.c:\d+:.* ignoring return value of 'opjit_empty_like'",
        ),
        (
            "plus.c",
            PLUS.replace("return OPJIT_OK;", 'opjit_printf("plus"); return OPJIT_OK;'),
            rf'.*; {NOT_C}: #include "opjit_printf\.h"$',
        ),
    ],
)
def test_the_first_line_says_what_is_wrong_and_where(
    op: Path, tmp_path: Path, name: str, text: str | None, first: str
) -> None:
    (op / name).unlink() if text is None else (op / name).write_text(text)
    told = str(refusal(op, tmp_path / "cache")).splitlines()[0]
    assert re.match(first if first.startswith(".*") else f"{re.escape(str(op))}/{first}", told), (
        told
    )


@pytest.mark.parametrize(
    ("top", "hint"),
    [
        (
            "#include <torch/extension.h>\n",
            "an op cannot use torch's headers; build C++ code with opjit.load",
        ),
        (
            "#include <c10/core/Device.h>\n",
            "an op cannot use torch's headers; build C++ code with opjit.load",
        ),
        (
            "#include <vector>\n",
            "a header without .h is a C++ header; build C++ code with opjit.load",
        ),
        ('extern "C"\n', 'leave out extern "C"'),
        (
            '#include "opjit_cuda.h"\n',
            "opjit_cuda.h is for .cu files; include opjit.h",
        ),
        (
            "static void f(const opjit_tensor *x) { TORCH_CHECK(x->dim, 1); }\n",
            "write OPJIT_CHECK(condition, message) for TORCH_CHECK",
        ),
        (
            "static int f(const opjit_tensor *x) { auto n = x->dim; return n; }\n",
            "auto is C++; write the type",
        ),
        (
            "static float *f(const opjit_tensor *x) { return x.data_ptr<float>(); }\n",
            "write (const float *)x->data for x.data_ptr<float>()",
        ),
        (
            "static int f(const opjit_tensor *x) { return x->dtype == torch.float32; }\n",
            "write OPJIT_FLOAT32 for torch.float32",
        ),
        (
            "static void f(void) { at::parallel_for(0, 1, 1, 0); }\n",
            "this is C++; write it in C",
        ),
        (
            "static void f(const opjit_tensor *x) { AT_DISPATCH_FLOATING_TYPES(x->dtype, 1); }\n",
            "write OPJIT_DISPATCH_FLOATING(x->dtype, ",
        ),
        (
            "static int64_t f(const opjit_tensor *x) { return x->shape[0]; }\n",
            "a tensor has data, numel, dim, sizes",
        ),
        (
            "static opjit_status f(const opjit_tensor *x) { OPJIT_CHECK(x->dim); return OPJIT_OK; }\n",
            "OPJIT_CHECK takes a condition and a message",
        ),
        (
            "static float *f(const opjit_tensor *x) { return x->data_ptr<float>(); }\n",
            "write (const float *)x->data for x.data_ptr<float>()",
        ),
    ],
)
def test_habits_of_c_plus_plus_are_answered_with_what_an_op_s_kernel_is(
    op: Path, tmp_path: Path, top: str, hint: str
) -> None:
    (op / "plus.c").write_text(PLUS.replace("opjit_status plus_cpu", f"{top}opjit_status plus_cpu"))
    first = str(refusal(op, tmp_path / "cache")).splitlines()[0]
    assert f"; {NOT_C}: {hint}" in first
    assert "extra_include_paths" not in first


def test_a_call_with_too_few_arguments_shows_the_function(op: Path, tmp_path: Path) -> None:
    right = "OPJIT_TRY(opjit_empty_like(out, x, x->dtype));"
    (op / "plus.c").write_text(PLUS.replace(right, "out = opjit_empty_like(x);"))
    told = str(refusal(op, tmp_path / "cache"))
    assert "note: declared here" in told
    assert "opjit_status opjit_empty_like(opjit_tensor *out, " in told


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("a.cpp:1:1: error: 'torch' does not name a type", "#include <torch/extension.h>"),
        (
            "CUDAMacros.h:8:10: fatal error: c10/cuda/impl/cuda_cmake_macros.h: No such file or directory",
            "this torch is a build without CUDA",
        ),
    ],
)
def test_an_extension_that_lacks_torch_s_headers_is_told_which(line: str, hint: str) -> None:
    assert hint in diagnosis.with_advice(line)


SIZES = "OPJIT_TRY(opjit_empty(out, 1, OPJIT_SIZES(x->numel), x->dtype, x));"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (SIZES, "OPJIT_SIZES(n, m) is two arguments, the number of sizes and the sizes: "),
        *(
            (
                f'OPJIT_DISPATCH_ALL_FLOATING(x->dtype, "plus", {{ {body} }})',
                "C cannot compute with halves: read an element with opjit_load, compute in opmath_t",
            )
            for body in (
                "((scalar_t *)out->data)[0] = 2 * ((scalar_t *)x->data)[0];",
                "((scalar_t *)out->data)[0] = (scalar_t)(2.0 * (double)((scalar_t *)x->data)[0]);",
                "scalar_t sum = 0; (void)sum;",
            )
        ),
    ],
)
def test_a_macro_that_is_misused_is_explained(
    op: Path, tmp_path: Path, line: str, told: str
) -> None:
    (op / "plus.c").write_text(PLUS.replace("return OPJIT_OK;", f"{line}\n    return OPJIT_OK;"))
    first = str(refusal(op, tmp_path / "cache")).splitlines()[0]
    assert f"; {told}" in first


@pytest.mark.nvcc
def test_sizes_with_a_count_are_explained_in_cuda_too(tmp_path: Path) -> None:
    kernel = PLUS_CUDA.replace("return OPJIT_LAUNCHED", f"{SIZES}\n    return OPJIT_LAUNCHED")
    op = write_op(tmp_path / "plus", plus_cu=kernel)
    with pytest.raises(CompileError, match=re.escape("OPJIT_SIZES(n, m) is two arguments")):
        built(op, tmp_path / "cache", cuda_target("sm_90"))


def test_a_source_of_another_name_is_named(op: Path) -> None:
    (op / "plus.c").rename(op / "kernel.c")
    done = helpers.command("get", op, "--device", "cpu")
    assert re.search(r"expected plus\.c in \S+, found kernel\.c; rename it", done.stderr), done


@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("line", "changed", "told"),
    [
        (*UNCHECKED, "ignoring return value of .*opjit_empty_like"),
        (
            "return OPJIT_LAUNCHED();",
            "OPJIT_LAUNCHED(); return OPJIT_OK;",
            "ignoring return value of .*opjit_cuda_status",
        ),
        ("return OPJIT_LAUNCHED();", "", "control reaches end of non-void function"),
    ],
)
def test_a_status_that_is_not_looked_at_or_not_returned_does_not_compile_in_cuda_either(
    tmp_path: Path, line: str, changed: str, told: str
) -> None:
    op = write_op(tmp_path / "op", plus_cu=PLUS_CUDA.replace(line, changed))
    with pytest.raises(CompileError) as caught:
        built(op, tmp_path / "cache", cuda_target("sm_90"))
    assert re.search(told, str(caught.value).splitlines()[0])


def test_a_function_that_is_never_defined_is_found_when_the_op_is_built(
    op: Path, tmp_path: Path
) -> None:
    declared = PLUS.replace("\n\n", "\n\nfloat helper_without_body(float x);\n", 1)
    (op / "plus.c").write_text(declared.replace("+ AMOUNT", "+ helper_without_body(AMOUNT)"))
    error = refusal(op, tmp_path / "cache")
    assert isinstance(error, CompileError)
    assert (
        "undefined reference to `helper_without_body'; define it in the op's source"
        in str(error).splitlines()[0]
    )
    assert error.command is not None
    assert "-shared" in error.command


def test_a_static_kernel_is_shown_as_it_should_be(op: Path, tmp_path: Path) -> None:
    (op / "plus.c").write_text(
        PLUS.replace("opjit_status plus_cpu", "static opjit_status plus_cpu")
    )
    told = str(refusal(op, tmp_path / "cache"))
    assert re.search(
        r"plus\.c:4:21: error: plus_cpu does not match .* expected opjit_status plus_cpu.*found static opjit_status",
        told,
    )
    assert "\n" not in told


@pytest.mark.parametrize("before", ["#define AMOUNT oops", '#include "missing.h"'])
def test_a_build_that_failed_is_tried_again_after_a_change_of_what_it_read(
    op: Path, here: Path, before: str
) -> None:
    """Also of a header that it lacked: then the compiler cannot say what it would have read."""
    (op / "amount.h").write_text(before + "\n")
    code = f"""{helpers.declare(op)}
try:
    torch.ops.keytest.plus(torch.ones(1))
except opjit.errors.CompileError:
    place = {str(op / ("missing.h" if "missing" in before else "amount.h"))!r}
    Path(place).write_text("#define AMOUNT 1.0f\\n")
    print(torch.ops.keytest.plus(torch.ones(1)).item())
"""
    assert fresh(code).stdout == "2.0\n"


def test_a_build_that_failed_is_not_tried_again_by_calls_while_nothing_has_changed(
    op: Path, here: Path, tmp_path: Path
) -> None:
    (op / "plus.c").write_text(PLUS.replace("AMOUNT", "oops"))
    count = tmp_path / "count"
    compiler = fake_compiler(
        tmp_path / "cc", before=f"if {helpers.COMPILES}; then echo >> '{count}'; fi"
    )
    done = fresh(
        f"""{helpers.declare(op)}
def call():
    try:
        return torch.ops.keytest.plus(torch.ones(1)).item()
    except opjit.errors.CompileError as error:
        return len(open({str(count)!r}).read()), str(error)
first, second = call(), call()
assert second == (1, first[1] + "\\nNo input has changed since this build failed, so it was not tried again; "
                     "to try again, call opjit.get('keytest::plus', 'cpu')"), second
try:
    opjit.get("keytest::plus", "cpu")
except opjit.errors.CompileError as error:
    assert (len(open({str(count)!r}).read()), str(error).splitlines()[0]) == (2, first[1].splitlines()[0])
source = Path({str(op / "plus.c")!r})
source.write_text(source.read_text().replace("oops", "AMOUNT"))
print(call())
""",
        {"CC": str(compiler)},
    )
    assert done.stdout == "2.0\n"


@pytest.mark.parametrize(
    "header", ["Python.h", "torch/headeronly/version.h", "torch/csrc/inductor/aoti_torch/c/shim.h"]
)
def test_python_s_and_torch_s_headers_are_refused(op: Path, tmp_path: Path, header: str) -> None:
    (op / "plus.c").write_text(f"#include <{header}>\n" + PLUS)
    error = refusal(op, tmp_path / "cache")
    assert header in str(error) or isinstance(error, CompileError)


def test_a_source_that_breaks_off_no_matter_where_or_is_no_text_is_an_error_of_opjit(
    op: Path, tmp_path: Path
) -> None:
    for cut in (3, 60, 150, 300):
        (op / "plus.c").write_text(PLUS[:-cut])
        refusal(op, tmp_path / "cache")
    (op / "plus.c").write_bytes(bytes(range(256)) * 4)
    assert isinstance(refusal(op, tmp_path / "cache"), CompileError)


def test_a_brace_that_is_not_closed_is_reported_at_its_line(op: Path, tmp_path: Path) -> None:
    source = (op / "plus.c").read_text()
    line = source.count("\n", 0, source.index("    return OPJIT_OK;")) + 1
    block = """    OPJIT_DISPATCH_FLOATING(x->dtype, "plus", { // not the '{' of a comment
        (void)sizeof(scalar_t);
    )
    return OPJIT_OK;"""
    (op / "plus.c").write_text(source.replace("    return OPJIT_OK;", block, 1))
    place = f"{op}/plus.c:{line}:47: error: this '{{' is not closed"
    assert str(refusal(op, tmp_path / "cache")).startswith(place)
    (op / "plus.c").write_text(source.rstrip().removesuffix("}"))
    assert "error: this '{' is not closed" in str(refusal(op, tmp_path / "cache"))
    (op / "plus.c").write_text(source)


def test_a_format_that_does_not_fit_its_argument_is_warned_of_at_the_line(
    op: Path, tmp_path: Path
) -> None:
    source = (op / "plus.c").read_text()
    check = 'OPJIT_CHECK(x->dim >= 0, "expected a tensor, got %s", 1.5);\n    return OPJIT_OK;'
    (op / "plus.c").write_text(source.replace("return OPJIT_OK;", check, 1))
    with pytest.warns(CompileWarning, match=r"format '%s' expects argument of type 'char \*'"):
        built(op, tmp_path / "cache")


# --- compilers that lie -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", helpers.LIES)
def test_a_compiler_that_reports_success_and_leaves_no_library_is_named(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    lie = helpers.LIES[what].format(compiler=helpers.real_compiler(), python=sys.executable)
    fake = fake_compiler(
        tmp_path / "lying-cc", after=f"if {helpers.LINKS}; then {helpers.OUTPUT}; {lie}; code=0; fi"
    )
    monkeypatch.setenv("CC", str(fake))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is not the cache's fault
        error = refusal(op, tmp_path / "cache")
    assert "reported success" in str(error)
    assert str(fake) in str(error)
    assert error.command is not None
    assert str(fake) in error.command
    monkeypatch.delenv("CC")
    # And it has spoilt nothing for the next one.
    assert helpers.caught(op, tmp_path / "cache").warnings == []


def test_a_library_that_asks_for_more_than_it_may_is_not_published(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = helpers.real_compiler()
    subprocess.run(
        [
            real,
            "-shared",
            "-nostdlib",
            "-Wl,-soname,libextra.so.1",
            "-o",
            tmp_path / "libextra.so",
            "-x",
            "c",
            "/dev/null",
        ],
        check=True,
    )
    more = (
        f"if {helpers.LINKS}; then exec '{real}' \"$@\" -Wl,--no-as-needed -L{tmp_path} -lextra; fi"
    )
    monkeypatch.setenv(
        "CC", str(program(tmp_path / "cc", f"#!/bin/sh\n{more}\nexec '{real}' \"$@\"\n"))
    )
    assert "libextra.so.1" in str(refusal(op, tmp_path / "cache"))


def test_a_compiler_that_is_killed_is_an_error_of_opjit(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "CC",
        str(fake_compiler(tmp_path / "cc", before=f"if {helpers.COMPILES}; then kill -9 $$; fi")),
    )
    error = refusal(op, tmp_path / "cache")
    assert not isinstance(error, CompileError), (
        "the source may be good, so another rank of the job tries it"
    )
    assert "a tool was killed; try again, with more memory if it needs it" in str(error)


def test_a_staging_folder_that_cannot_be_examined_shows_no_raw_error(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (op / "plus.c").write_text(PLUS.replace("return OPJIT_OK;", "mistake;"))
    stat = os.stat

    def failing(path: Any, **settings: Any) -> os.stat_result:
        if re.search(r"/cache/v2/staging/[0-9a-f]{32}$", str(path)):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return stat(path, **settings)

    monkeypatch.setattr(os, "stat", failing)
    with (
        pytest.warns(CacheWarning, match="for this process only"),
        pytest.raises(CompileError, match="mistake"),
    ):
        built(op, tmp_path / "cache")


# --- the diagnosis ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "output",
    [
        "",
        "\n",
        "FAILED: x\n",
        "FAILED: x",
        "x" * 100_000,
        "\x00\udcff",
        "error:",
        "FAILED: a\nFAILED: b\n",
    ],
)
def test_any_output_of_a_failed_build_becomes_an_error_with_a_first_line(
    tmp_path: Path, output: str
) -> None:
    error = diagnosis.diagnose(output, "ns::op", "cpu x", tmp_path / "logs")
    assert str(error).strip()
    assert "ns::op" in str(error)


def test_an_error_says_nothing_twice(tmp_path: Path) -> None:
    output = """\
x.c:8:9: error: implicit declaration of function 'fminf' [-Werror=implicit-function-declaration]
    8 |     y = fminf(x, z);
      |         ^~~~~
x.c:2:1: note: include '<math.h>' or provide a declaration of 'fminf'
    1 | #include "opjit.h"
  +++ |+#include <math.h>
x.c:8:9: warning: incompatible implicit declaration of built-in function 'fminf' [-Wbuiltin-declaration-mismatch]
    8 |     y = fminf(x, z);
      |         ^~~~~
x.c:8:9: note: include '<math.h>' or provide a declaration of 'fminf'
x.c:9:5: error: 'n' undeclared (first use in this function)
x.c:9:5: note: each undeclared identifier is reported only once for each function it appears in
    9 |     n = 1;
      |     ^
cc1: some warnings being treated as errors
x.cu(3): note: kept
2 errors detected in the compilation of "x.cu".
1 warning and 2 errors generated.
"""
    error = diagnosis.diagnose(output, "ns::op", "cpu x", tmp_path / "logs")
    kept = [0, 1, 2, 3, 4, 5, 10, 15]
    lines = output.splitlines()
    assert str(error).splitlines()[:-1] == [
        lines[0],
        "while building ns::op for cpu x:",
        *(lines[index] for index in kept[1:]),
    ]
    assert error.log is not None
    assert error.log.read_text() == output


# --- edits while it is compiled -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "when"), [("plus.c", "before"), ("plus.c", "after"), ("amount.h", "after")]
)
def test_what_is_edited_while_the_compiler_runs_is_not_stored_under_the_old_key(
    op: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, when: str
) -> None:
    old = describe(op).key
    edit = f"if {helpers.COMPILES}; then sed -i 's/1.0f/5.0f/; s/AMOUNT;/AMOUNT + 4.0f;/' '{op}/{name}'; fi"
    with monkeypatch.context() as patched:
        patched.setenv("CC", str(fake_compiler(tmp_path / "cc", **{when: edit})))
        made = built(op, here)
    assert made.key != old
    assert [path.name for path in helpers.entries(here)] == [made.key]
    after = helpers.caught(op, here)
    assert after.warnings == []
    assert after.entry.key != old
    assert fresh(helpers.declare(op) + helpers.GET).stdout == "[6.0]\n"


def test_an_nvcc_of_another_major_version_than_torch_s_is_refused_before_it_compiles(
    op: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helpers.fake_nvcc(tmp_path / "toolkit" / "bin" / "nvcc", "V12.9.86")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.setattr(toolchain, "find_nvrtc", lambda runtime, notes: None)
    target = targets.named("sm_90", backends.for_device("cuda"), "13.0")
    with pytest.raises(
        ToolMissing,
        match=r"sm_90\.cuda13 needs a CUDA Toolkit .*, but the nvcc in .*toolkit is that of CUDA 12\.9",
    ):
        built(op, here, target)
    assert not here.exists() or helpers.entries(here) == []


# --- compilers that never end -------------------------------------------------------------------------------------------------------------


def test_a_compiler_that_hangs_is_ended_with_all_that_it_started(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    hangs = (
        f"if [ ! -e '{started}' ] && {helpers.COMPILES}; then echo $$ > '{started}'; sleep 1000; fi"
    )
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path / "cc", before=hangs)))
    monkeypatch.setenv("OPJIT_TIMEOUT", "5")
    with pytest.raises(
        BuildError, match="the compiler did not finish within 5 s, and was ended"
    ) as raised:
        built(op, tmp_path / "cache")
    assert not isinstance(raised.value, CompileError), "another rank's compiler may be good"
    helpers.until(lambda: not helpers.is_alive(int(started.read_text())))
    monkeypatch.delenv("OPJIT_TIMEOUT")
    assert built(op, tmp_path / "cache").library.is_file()


def test_a_compiler_that_does_not_say_who_it_is_is_no_compiler(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", str(program(tmp_path / "cc", "#!/bin/sh\nsleep 1000\n")))
    monkeypatch.setenv("OPJIT_TIMEOUT", "0.5")
    with pytest.raises(
        ToolMissing, match=r"the compiler did not finish within 0\.5 s, and was ended"
    ):
        built(op, tmp_path / "cache")


# --- advice -------------------------------------------------------------------------------------------------------------------------------


def test_a_mistake_inside_a_macro_of_opjit_leads_with_the_author_s_line(
    op: Path, tmp_path: Path
) -> None:
    source = (op / "plus.c").read_text()
    line = source.count("\n", 0, source.index("    return OPJIT_OK;")) + 3
    (op / "plus.c").write_text(
        source.replace(
            "    return OPJIT_OK;",
            """    OPJIT_DISPATCH_FLOATING(x->dtype, "plus", {
        const scalar_t *from = (const scalar_t *)x->data
        OPJIT_FOR_EACH(i, at, x)
            (void)from[at];
    })
    return OPJIT_OK;""",
            1,
        )
    )
    text = str(refusal(op, tmp_path / "cache"))
    assert re.match(
        rf"{re.escape(str(op))}/plus\.c:{line}:\d+: error: expected .* in what OPJIT_FOR_EACH expands to\n",
        text,
    ), text
    assert "opjit.h" not in text


@pytest.mark.parametrize(
    ("suffix", "output", "told"),
    [
        (
            ".c",
            "plus.c:(.text+0x30): undefined reference to `helper'",
            "/plus.c:3: error: undefined reference to `helper'; define it in",
        ),
        (
            ".cu",
            "ptxas fatal   : Unresolved extern function '_Z1gf'",
            "'; define it in the op's source, add the file that does",
        ),
        (
            ".cu",
            "ptxas /tmp/k.ptx, line 21; error   : Instruction 'wgmma.fence' not supported on .target 'sm_90'",
            '; for instructions of one GPU alone, declare the op with archs=["sm_90a"]',
        ),
        (
            ".cu",
            "/home/me/torch/own.cu:1:10: fatal error: Eigen/Dense: No such file or directory",
            "; pass the header's directory in extra_incl",
        ),
        (
            ".cpp",
            "k.cpp:1:10: fatal error: cusparse.h: No such file or directory",
            "whose name starts with nvidia-cusparse",
        ),
        (
            ".cpp",
            "/home/me/torch/own.cu:1:10: fatal error: Eigen/Dense: No such file or directory",
            "; pass the header's directory in extra_incl",
        ),
        (
            ".c",
            "plus.c:(.text+0x30): undefined reference to `GOMP_parallel'",
            "; an op runs on torch's threads: call opjit_parallel_for",
        ),
        (
            ".cu",
            "/x/include/torch/all.h:9:2: error: #error C++20 or later compatible compiler is required to use PyTorch.\nmore\nmore",
            "an op cannot use torch's headers; build C++ code with opjit.load\nwhile building keytest::plus for cpu\nfull",
        ),
        (
            ".c",
            "/o/plus.c:6:35: error: 'std' undeclared (first use in this function)",
            "this is C++; write it in C, or build C++ code with",
        ),
        (
            ".cu",
            "nvcc warning : incompatible redefinition for option 'std', the last value of this option was used\n"
            "ptxas error   : Entry function 'k' uses too much shared data (0x27100 bytes, 0xc000 max)",
            "max); a block has 48 KiB by default: ",
        ),
        (
            ".cu",
            "opjit_host.cpp:(.text+0x30): undefined reference to `helper(int)'",
            "of a library defines helper, declare it ",
        ),
        (
            ".cpp",
            "a.cpp:3:7: error: cannot convert 'at::DeprecatedTypeProperties' to 'c10::ScalarType'",
            "write x.scalar_type()",
        ),
        (
            ".cpp",
            "a.cpp:3:7: error: 'class at::Tensor' has no member named 'data'",
            "write x.data_ptr<T>()",
        ),
        (
            ".cpp",
            "a.cpp:3:7: error: 'AT_CHECK' was not declared in this scope",
            "AT_CHECK is TORCH_CHECK now",
        ),
        (
            ".cpp",
            "a.cpp:1:10: fatal error: THC/THC.h: No such file or directory",
            "THC left torch with 1.11",
        ),
        (".cu", 'a.cu(3): error: identifier "THCState" is undefined', "in an op its last argument"),
    ],
)
def test_advice_names_the_way_out(suffix: str, output: str, told: str, tmp_path: Path) -> None:
    source = tmp_path / f"plus{suffix}"
    source.write_text("int helper(int x);\n\nint plus(void) { return helper(3); }\n")
    expected = (
        (str(source), "opjit_status plus_cpu(const opjit_tensor *x)") if suffix != ".cpp" else None
    )
    error = diagnosis.diagnose(output, "keytest::plus", "cpu", tmp_path / "logs", expected)
    assert told in str(error), error
    assert str(error).startswith(("ptxas", str(source), output.splitlines()[0].rstrip("."))), error


# --- tools that are missing ---------------------------------------------------------------------------------------------------------------


TOOLS = ("as", "c++", "c++filt", "cc", "g++", "gcc", "ld", "readelf", "sh")
CODE = """\
#include "opjit_cuda.h"

opjit_status alone_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    return OPJIT_LAUNCHED();
}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "missing", [("readelf",), ("c++filt",), ("c++", "g++"), ("as",), ("ld",)], ids="+".join
)
def test_a_tool_that_path_has_not_is_named_with_its_package(
    missing: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "alone"
    tools = tmp_path / "bin"
    folder.mkdir()
    tools.mkdir()
    (folder / "op.py").write_text(
        "import opjit\n\n\n@opjit.op('tools::alone(Tensor x) -> Tensor')\ndef alone(x):\n"
        "    return x.new_empty(x.shape)\n"
    )
    (folder / "alone.cu").write_text(CODE)
    for tool in set(TOOLS) - set(missing):
        found = shutil.which(tool)
        if found:
            (tools / tool).symlink_to(os.path.realpath(found) if tool == "sh" else found)
    done = subprocess.run(
        [sys.executable, "-m", "opjit", "get", str(folder), "--arch", "sm_90"],
        capture_output=True,
        text=True,
        env=helpers.environment({"PATH": str(tools), "OPJIT_CACHE": str(tmp_path / "cache")}),
        check=False,
    )
    if done.returncode == 0 and missing[0] in ("as", "ld", "c++"):
        pytest.skip("the compiler finds its own")
    if "no CUDA compiler" in done.stderr or "needs nvcc" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 1, done
    first = done.stderr.splitlines()[0]
    assert any(tool in first for tool in missing) or "compiler" in first, first
    assert "install" in first, first
    assert "OPJIT_CACHE" not in first, first


@pytest.mark.parametrize(
    "line",
    [
        "gcc: fatal error: cannot execute 'as': execvp: No such file or directory",
        "collect2: fatal error: cannot find 'ld'",
    ],
)
def test_a_compiler_without_binutils_says_so(line: str, tmp_path: Path) -> None:
    error = diagnosis.diagnose(
        f"FAILED: x.o\ngcc x.c\n{line}\ncompilation terminated.\n",
        "ns::op",
        "cpu x",
        tmp_path / "logs",
    )
    assert (
        str(error).splitlines()[0]
        == f"{line}; install binutils (Debian and Ubuntu: apt install binutils)"
    )


# --- folders that no build file can name, or nobody enters --------------------------------------------------------------------------------


ODD = [b"new\nline", b"a\ttab", b"not UTF-8: \xff"]
# Root enters every folder, unless it gives up the right to.
_BOUND = [] if os.geteuid() else ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]


@pytest.mark.parametrize("name", ODD)
def test_a_cache_of_any_name_keeps_entries(name: bytes, tmp_path: Path) -> None:
    cache = tmp_path / os.fsdecode(name)
    with helpers.cache_warnings() as warned:
        entry = built(write_op(tmp_path / "plus"), cache)
    assert warned == []
    assert entry.library.is_relative_to(cache)


@pytest.mark.parametrize("name", ODD)
def test_an_op_in_a_folder_that_no_build_file_can_name_is_refused_by_that_name(
    name: bytes, tmp_path: Path
) -> None:
    folder = write_op(tmp_path / os.fsdecode(name))
    with pytest.raises(
        BuildError, match="which no build file can name; rename the directory"
    ) as raised:
        built(folder, tmp_path / "cache")
    assert ascii(str(folder)) in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        (["get", "./closed"], 2, "closed cannot be read (Permission denied: "),
        (["get", "./closed/op"], 2, "closed/op cannot be read (Permission denied: "),
        (
            ["precompile", "round_ste", "--store", "closed/store"],
            1,
            "closed/store cannot hold it: [Errno 13] Permission denied: ",
        ),
        (
            ["get", "round_ste", "--device", "cpu", "--build-directory", "closed/x"],
            1,
            "cannot be copied to 'closed/x': [Errno 13] ",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_folder_that_cannot_be_entered_is_one_message(
    arguments: Sequence[str], status: int, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    done = subprocess.run(
        [*_BOUND, sys.executable, "-m", "opjit", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=helpers.environment({"OPJIT_CACHE": str(tmp_path / "cache")}),
    )
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert expected in done.stderr


# --- stores that fail ---------------------------------------------------------------------------------------------------------------------


def test_a_binary_that_the_store_does_not_take_is_the_process_s_or_an_error_if_it_must_be_there(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Store.publish

    def publish(self: Store, *arguments: Any) -> Entry:
        if self.root == tmp_path:
            raise OSError("no room")
        return plain(self, *arguments)

    monkeypatch.setattr(Store, "publish", publish)
    found = helpers.caught(op, tmp_path)
    assert not found.entry.folder.is_relative_to(tmp_path)
    assert "for this process only: no room" in found.warnings[0]
    with pytest.raises(BuildError, match="cannot hold it: no room"):
        build.build(describe(op), Store(tmp_path), must_store=True)
