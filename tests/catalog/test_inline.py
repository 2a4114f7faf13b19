"""Ops whose sources are strings."""

import copy
import gc
import linecache
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import opjit
from opjit.catalog import registry
from opjit.errors import CompileError, CompileWarning, DeclarationError, NoKernel, UnknownOp
from tests.helpers import elementwise, ended, fresh

SIGNATURE = "(Tensor x, float a) -> Tensor"
TIMES = "(float)a * from[i]"
PLUS = "(float)a + from[i]"
CUDA = """
static __global__ void scale_kernel(const float *from, float *to, float a, int64_t n)
{
    OPJIT_KERNEL_LOOP(i, n)
        to[i] = FORMULA;
}

opjit_status NAME_cuda(const opjit_tensor *x, double a, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    scale_kernel<<<opjit_blocks(x->numel, 256), 256, 0, stream>>>((const float *)x->data, (float *)out->data, (float)a, x->numel);
    return OPJIT_LAUNCHED();
}
"""


def source(name: str, formula: str = TIMES) -> str:
    return elementwise(name, formula, "double a, ")


def declare(name: str, formula: str = TIMES, **more: Any) -> opjit.Op:
    return opjit.inline(name + SIGNATURE, c=source(name, formula), **{"like": "x", **more})


@pytest.mark.torch
def test_a_string_is_an_op(tmp_path: Path) -> None:
    scale = declare("scale")
    x = torch.arange(4.0)
    assert scale.qualified == "inline::scale"
    for called in (scale, torch.ops.inline.scale, opjit.get("inline::scale", "cpu")):
        assert called(x, 2.5).tolist() == [0.0, 2.5, 5.0, 7.5]
    assert torch.compile(lambda t: scale(t, 2.0) + 1, fullgraph=True, backend="aot_eager")(
        x
    ).tolist() == [1.0, 3.0, 5.0, 7.0]
    torch.library.opcheck(scale.overload, (x, 2.0))
    assert (
        opjit.inline(
            "inltest::named(Tensor x, float a) -> Tensor", c=source("named"), like="x"
        ).qualified
        == "inltest::named"
    )


def test_a_copied_or_pickled_module_holds_the_same_op() -> None:
    op = declare("copied")
    model = torch.nn.ReLU()
    vars(model)["op"] = op
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.op is op
    told = pickle.dumps(op)
    registry.remove(registry.find("inline::copied"))
    with pytest.raises(
        UnknownOp,
        match="inline::copied was pickled by a process that declared it in inline code at",
    ):
        pickle.loads(told)


def test_declared_again_the_op_is_the_same_with_the_new_code_at_once() -> None:
    op = declare("again")
    x = torch.ones(2)
    overload = op.overload
    packet = torch.ops.inline.again
    compiled = torch.compile(lambda t: op(t, 2.0), fullgraph=True, backend="aot_eager")
    assert compiled(x).tolist() == [2.0, 2.0]
    for formula, expected in ((PLUS, 3.0), (TIMES, 2.0), (PLUS + " + 1", 4.0), (TIMES, 2.0)):
        assert declare("again", formula) is op
        assert op.overload is overload
        for called in (op, overload, packet):
            assert called(x, 2.0).tolist() == [expected] * 2
        assert compiled(x).tolist() == [expected] * 2


@pytest.mark.torch
def test_with_another_schema_it_is_another_op_of_the_name_and_who_holds_the_old_one_is_safe() -> (
    None
):
    op = declare("changed")
    old = op.overload
    x = torch.ones(2)
    assert op(x, 2.0).tolist() == [2.0, 2.0]
    text = source("changed", f"{TIMES} + b").replace("double a", "double a, int64_t b")
    assert opjit.inline("changed(Tensor x, float a, int b) -> Tensor", c=text, like="x") is op
    gc.collect()
    assert op(x, 2.0, 5).tolist() == [7.0, 7.0]
    assert torch.ops.inline.changed(x, 2.0, 5).tolist() == [7.0, 7.0]
    for _ in range(3):
        with pytest.raises(RuntimeError, match="missing value for argument 'b'"):
            old(x, 2.0)
    assert declare("changed")(x, 2.0).tolist() == [2.0, 2.0]  # the first schema and code again


def test_code_that_does_not_compile_leaves_the_op_as_it_was() -> None:
    op = declare("wrong")
    x = torch.ones(2)
    assert op(x, 2.0).tolist() == [2.0, 2.0]
    with pytest.raises(CompileError) as caught:
        declare("wrong", "undeclared_name", like=None)
    first, second = str(caught.value).splitlines()[:2]
    # Line 7 of the string.
    assert first.startswith("wrong.c:7:35: error: 'undeclared_name' undeclared")
    assert second.startswith("while building inline::wrong for cpu")
    assert "opjit-inline-" not in str(caught.value)
    with pytest.raises(CompileError):
        opjit.inline("wrong(Tensor x) -> Tensor", c="nonsense", like="x")
    assert op(x, 2.0).tolist() == [2.0, 2.0]
    assert torch.empty_like(op(x.to("meta"), 2.0)).shape == (2,)


LITERAL = """
import opjit

op = opjit.inline("literal(Tensor x) -> Tensor", like="x", c=\'\'\'
opjit_status literal_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    return wrong;
}\'\'\')
twice = opjit.inline("twice(Tensor x) -> Tensor", like="x", c="return 1; /* \\n */ }")
"""


def test_an_error_names_the_line_of_the_program_that_contains_the_code(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LITERAL)
    names: dict[str, Any] = {}
    exec(compile(LITERAL, str(program), "exec"), names)
    with pytest.raises(CompileError) as caught:
        names["op"](torch.ones(1))
    assert str(caught.value).startswith(f"{program}:7:12: error: 'wrong' undeclared")
    assert f"literal is inline code at {program}:4" in str(caught.value)
    with pytest.raises(CompileError) as caught:
        names["twice"](torch.ones(1))
    assert str(caught.value).startswith("twice.c:1:")  # the text has an escape
    assert f"twice is inline code at {program}:9" in str(caught.value)


RUNS = """
import opjit

op = opjit.inline("runs(Tensor x) -> Tensor", like="x", c='''
opjit_status runs_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_CHECK(x->dim == 7, "expected 7 dimensions, got %s", x->dim);
    return OPJIT_OK;
}''')
"""


def test_a_warning_and_a_run_time_error_name_the_line_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))  # a cached op does not warn again
    program = tmp_path / "program.py"
    program.write_text(RUNS)
    names: dict[str, Any] = {}
    exec(compile(RUNS, str(program), "exec"), names)
    with pytest.warns(CompileWarning, match="format") as caught:
        opjit.get("inline::runs", "cpu")
    assert {(warning.filename, warning.lineno) for warning in caught} == {(str(program), 7)}

    program.write_text(RUNS.replace("got %s", "not fewer").replace(", x->dim);", ");"))
    linecache.checkcache(str(program))
    exec(compile(program.read_text(), str(program), "exec"), names)
    with pytest.raises(RuntimeError) as raised:
        names["op"](torch.ones(1))
    assert f"expected 7 dimensions, not fewer [{program}:7]" in str(raised.value)


def test_a_source_for_one_device_less_takes_its_kernel_away() -> None:
    op = declare("less")
    assert op(torch.ones(1), 2.0).tolist() == [2.0]
    opjit.inline("less" + SIGNATURE, cuda=CUDA.replace("NAME", "less"), like="x")
    with pytest.raises(
        NoKernel,
        match="inline::less has no kernel for cpu: its inline code is for cuda only; declare it again",
    ):
        op(torch.ones(1), 2.0)


def refused(
    kind: type[opjit.errors.OpjitError], match: str, schema: str = "bad" + SIGNATURE, **given: Any
) -> None:
    """Declare, and call where that is taken: both within one sentence's reach."""
    with pytest.raises(kind, match=match) as caught:
        opjit.inline(schema, **{"like": "x", "c": source("bad"), **given})(torch.ones(1), 1.0)
    assert "opjit-inline-" not in str(caught.value)


@pytest.mark.parametrize(
    ("c", "told"),
    [
        (
            source("good"),
            r"^bad\.c: error: it does not define bad_cpu, which inline::bad calls: expected opjit_status bad_cpu\(const opjit_tensor \*x, "
            r"double a, opjit_tensor \*out\), found opjit_status good_cpu\(const opjit_tensor .*\)\n"
            r"bad is inline code at \S+test_inline\.py:\d+$",
        ),
        (
            "\n#include <missing.h>\n" + source("bad"),
            r"^bad\.c:2:10: fatal error: missing\.h: No such file or directory; pass the header's directory in extra_include_paths",
        ),
    ],
)
def test_code_that_does_not_compile_is_answered_in_a_sentence(c: str, told: str) -> None:
    refused(CompileError, told, c=c)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"c": None}, r"expected code for an op; pass c= with opjit_status bad_cpu\("),
        ({"c": b"bytes"}, "the code of bad.c must be a string, not b'bytes'"),
        *(
            (
                {"like": like},
                r"like=.*: expected the name of a Tensor argument for each result.* pass a function as fake=",
            )
            for like in ("y", "a", ["x", "x"], [])
        ),
        ({"fake": torch.empty_like}, "give one of them"),
        ({"extra_cflags": ["-ffast-math"]}, "extra_cflags cannot hold '-ffast-math'"),
        (
            {"extra_include_paths": ["no-such-folder"]},
            f"no directory .*/no-such-folder; a relative path starts from {os.getcwd()}$",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(given: dict[str, Any], match: str) -> None:
    refused(DeclarationError, match, **given)


def test_two_modules_cannot_declare_one_name(tmp_path: Path) -> None:
    declare("shared")
    call = compile(f"opjit.inline({'shared' + SIGNATURE!r}, c='', like='x')", "other.py", "eval")
    with pytest.raises(
        DeclarationError,
        match=r"inline code at \S+test_inline\.py:\d+, the other in inline code at other\.py:1",
    ):
        eval(call, {"opjit": opjit, "__name__": "other"})
    with pytest.raises(
        DeclarationError,
        match=r"two ops are named opjit::allreduce: one is declared in \S+, the other in inline code at",
    ):
        opjit.inline("opjit::allreduce(Tensor x) -> Tensor", c="", like="x")


@pytest.mark.torch
def test_without_like_or_fake_it_runs_and_tracing_it_says_what_is_missing() -> None:
    op = declare("untraced", like=None)
    assert op(torch.ones(1), 2.0).tolist() == [2.0]
    with pytest.raises(
        DeclarationError, match=r"inline::untraced lacks a fake kernel.*like= or fake="
    ):
        op(torch.ones(1, device="meta"), 2.0)


def test_like_takes_a_name_for_each_result_and_fake_takes_any_function() -> None:
    two = opjit.inline(
        "two(Tensor x, *, Tensor y) -> (Tensor, Tensor)",
        like=["y", "x"],
        c="""
        opjit_status two_cpu(const opjit_tensor *x, const opjit_tensor *y, opjit_tensor *out0, opjit_tensor *out1)
        {
            OPJIT_TRY(opjit_empty_like(out0, y, y->dtype));
            return opjit_empty_like(out1, x, x->dtype);
        }""",
    )
    x = torch.ones(2, 3).t()
    y = torch.ones(4, dtype=torch.int8)
    for device in ("cpu", "meta"):
        got = two(x.to(device), y=y.to(device))
        assert [(t.shape, t.dtype, t.stride()) for t in got] == [
            (y.shape, y.dtype, y.stride()),
            (x.shape, x.dtype, x.stride()),
        ]
    count = opjit.inline(
        "count(Tensor x) -> int",
        fake=lambda x: x.numel(),
        c="""
        opjit_status count_cpu(const opjit_tensor *x, int64_t *out) { *out = x->numel; return OPJIT_OK; }""",
    )
    assert (count(torch.ones(6)), count(torch.ones(6, device="meta"))) == (6, 6)


def test_an_op_without_results_needs_neither() -> None:
    op = opjit.inline(
        "fill(Tensor(a!) x) -> ()",
        c="""
        opjit_status fill_cpu(opjit_tensor *x) { memset(x->data, 0, (size_t)x->numel); return OPJIT_OK; }""",
    )
    x = torch.ones(3, dtype=torch.uint8)
    torch.compile(op.overload, fullgraph=True, backend="aot_eager")(x)
    assert x.tolist() == [0, 0, 0]


def test_flags_and_include_folders_from_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "offset.h").write_text("#define OFFSET 10.0f\n")
    monkeypatch.chdir(tmp_path)
    text = '#include "offset.h"\n' + source("flagged", f"{TIMES} + OFFSET + MORE")
    op = opjit.inline(
        "flagged" + SIGNATURE,
        c=text,
        like="x",
        extra_cflags=["-DMORE=5"],
        extra_include_paths=["include"],
    )
    monkeypatch.chdir("/")
    assert op(torch.ones(1), 1.0).tolist() == [16.0]


@pytest.mark.torch
def test_a_backward_is_added_replaced_and_missed() -> None:
    def slope(op: opjit.Op) -> float:
        x = torch.ones(1, requires_grad=True)
        return torch.autograd.grad(op(x, 3.0), x)[0].item()

    op = declare("curve")
    op.setup_context(lambda ctx, inputs, output: setattr(ctx, "a", inputs[1]))
    op.backward(lambda ctx, grad: (grad * ctx.a, None))
    assert slope(op) == 3.0
    overload = op.overload
    assert declare("curve", PLUS).overload is overload
    with pytest.raises(RuntimeError, match=r"is not implemented; add one with @curve\.backward"):
        slope(op)
    op.backward(lambda ctx, grad: (grad, None))
    assert slope(op) == 1.0


def test_sources_that_are_lost_are_written_again(here: Path) -> None:
    op = declare("lost")
    op.write_code()
    path = op.declaration.source(opjit.backends.for_device("cpu"))
    path.unlink()
    assert op(torch.ones(1), 2.0).tolist() == [2.0]
    assert path.read_text() == source("lost")


def test_later_processes_with_an_inline_op_share_the_note_on_what_its_build_read(
    tmp_path: Path,
) -> None:
    code = f"""
        import torch, opjit
        from opjit.recipe import reads
        kept = reads._noted
        reads._noted = lambda note, places: found if (found := kept(note, places)) else print("compared")
        c = {source("noted")!r}
        opjit.inline("noted{SIGNATURE}", c=c, like="x")(torch.ones(1), 3.0)
        """
    cache = {"OPJIT_CACHE": str(tmp_path / "cache")}
    printed = [fresh(code, cache).stdout for _ in range(3)]
    assert printed[2] == ""


def test_nothing_is_left_behind_and_a_forked_child_has_its_own(tmp_path: Path) -> None:
    code = f"""
        import os, torch, opjit
        c = {source("left")!r}
        def made(formula):
            return opjit.inline("left{SIGNATURE}", c=c.replace({TIMES!r}, formula), like="x")(torch.ones(1), 3.0).item()
        print(made({TIMES!r}), flush=True)
        if os.fork() == 0:
            print(made({PLUS!r}), flush=True)
            os._exit(0)
        os.wait()
        print(made({TIMES!r}))
        """
    (tmp_path / "tmp").mkdir()
    done = fresh(
        code,
        {"TMPDIR": str(tmp_path / "tmp"), "OPJIT_CACHE": str(tmp_path / "cache")},
        flags=("-W", "ignore"),
    )
    assert done.stdout.split() == ["3.0", "4.0", "3.0"]
    # The locks' folder.
    left = {path.name.rpartition("-")[0] for path in (tmp_path / "tmp").iterdir()} - {"opjit"}
    assert left <= {"opjit-inline"}  # the child's own, as it left without a word
    assert (
        len([path for path in (tmp_path / "tmp").iterdir() if path.name.startswith("opjit-inline")])
        == 1
    )


@pytest.mark.gpu
def test_both_languages_serve_both_devices() -> None:
    for formula, expected in (("a * from[i]", 6.0), ("a + from[i]", 5.0)):
        cuda = CUDA.replace("NAME", "both").replace("FORMULA", formula)
        op = opjit.inline(
            "both" + SIGNATURE,
            c=source("both", formula.replace("a ", "(float)a ")),
            cuda=cuda,
            like="x",
        )
        for device in ("cpu", "cuda"):
            assert op(torch.full((1000,), 2.0, device=device), 3.0).eq(expected).all()


def test_an_error_of_the_code_ends_in_the_caller_s_lines() -> None:
    """The frames of opjit's request, cache and build tell a user nothing: N14 showed 46 lines."""
    code = (
        "import torch, opjit\n"
        'op = opjit.inline("f(Tensor x) -> Tensor", c="opjit_status f_cpu(const opjit_tensor *x, opjit_tensor *out) {{ {} }}")\n{}'
    )
    for text, call, most in (
        ("retrun OPJIT_OK;", "op(torch.ones(1))", 2),
        ("retrun OPJIT_OK;", "opjit.get('inline::f', 'cpu')", 2),
        ("return OPJIT_OK;", "op(torch.ones(1).to_sparse())", 2),
        ("retrun OPJIT_OK;", "torch.ops.inline.f(torch.ones(1))", 3),  # one is torch's
    ):
        done = ended(code.format(text, call))
        frames = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
        assert frames[0].startswith('  File "<string>", line 3')
        assert len(frames) <= most, done.stderr
        assert not [line for line in frames if "builder" in line or "request.py" in line], (
            done.stderr
        )
