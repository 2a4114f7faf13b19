"""What a library carries beside its binaries: each op's folder, so fake kernels and backwards; several ops."""

import shutil
import subprocess
from pathlib import Path

import pytest

import opjit
from opjit.catalog import registry
from opjit.errors import BuildError, DeclarationError
from tests import helpers
from tests.helpers import command, elsewhere, fresh

SCALE_C = """\
#include "opjit.h"

opjit_status {name}_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
{{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    OPJIT_FOR_EACH(i, at, x)
        ((float *)out->data)[i] = ((const float *)x->data)[at] * (float)a;
    return OPJIT_OK;
}}
"""
# An op and the op of its backward, with a fake kernel that comes from two modules beside op.py.
SCALE_PY = """\
import torch
import opjit
from .shapes import like
from . import marks

@opjit.op("{ns}::scale(Tensor x, float a) -> Tensor", extra_cflags=["-DUNUSED=1"], extra_include_paths=["include"])
def scale(x, a):
    assert marks.DONE
    return like(x)

@opjit.op("{ns}::scale_grad(Tensor grad, float a) -> Tensor")
def scale_grad(grad, a):
    return like(grad)

@scale.setup_context
def setup(ctx, inputs, output):
    ctx.a = inputs[1]

@scale.backward
def backward(ctx, grad):
    return scale_grad(grad, ctx.a), None
"""
LOAD = """
import sys
import torch, opjit
loaded = opjit.load_library({path!r})
scale = torch.ops.{ns}.scale.default
"""
USE = """
x = torch.randn(5, requires_grad=True)
out = scale(x, 3.0)
assert torch.equal(out, x * 3.0)
out.sum().backward()
assert torch.equal(x.grad, torch.full((5,), 3.0))
assert scale(torch.ones(2, 3, device="meta"), 1.0).shape == (2, 3)
compiled = torch.compile(lambda x: scale(x, 2.0).sin(), fullgraph=True, backend="aot_eager")
assert torch.allclose(compiled(x), (x * 2.0).sin())
torch.autograd.grad(compiled(x).sum(), x)
print(sorted(set(torch.library.opcheck(scale, (x, 2.0)).values())))
"""


def write_scale(folder: Path, ns: str, op_py: str = SCALE_PY) -> Path:
    (folder / "include").mkdir(parents=True)
    (folder / "op.py").write_text(op_py.format(ns=ns))
    (folder / "shapes.py").write_text(
        "from .marks import DONE\n\n\ndef like(x):\n    assert DONE\n    return x.new_empty(x.shape)\n"
    )
    (folder / "marks.py").write_text("DONE = True\n")
    (folder / "unused.py").write_text("raise ImportError('no op imports it')\n")
    for name in ("scale", "scale_grad"):
        (folder / f"{name}.c").write_text(SCALE_C.format(name=name))
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library named my_ops of one op, whose backward needs another. Its sources and the cache are gone."""
    folder = tmp_path_factory.mktemp("scale")
    source = write_scale(folder / "scale", "libtest")
    code = f"""
import opjit
opjit.add_path({str(source)!r})
print(opjit.build_library("libtest::scale", {str(folder / "build")!r}, "cpu", name="my_ops"))
"""
    path = Path(fresh(code, {"OPJIT_CACHE": str(folder / "cache")}).stdout.strip())
    shutil.rmtree(source)
    shutil.rmtree(folder / "cache")
    assert path == folder / "build" / "my_ops" / "libtest.scale.so"
    return path


@pytest.mark.torch
def test_another_process_has_the_fake_kernel_and_the_backward(built: Path, tmp_path: Path) -> None:
    code = LOAD.format(path=str(built), ns="libtest") + "assert loaded is scale\n" + USE
    assert fresh(code, elsewhere(tmp_path)).stdout == "['SUCCESS']\n"


@pytest.mark.torch
def test_an_op_of_a_library_is_unpickled_in_another_process(built: Path, tmp_path: Path) -> None:
    load = LOAD.format(path=str(built), ns="libtest")
    fresh(
        load + f"import pickle\npickle.dump(scale, open({str(tmp_path / 'op.pkl')!r}, 'wb'))",
        elsewhere(tmp_path),
    )
    again = f"import pickle, torch\nprint(pickle.load(open({str(tmp_path / 'op.pkl')!r}, 'rb'))(torch.ones(1), 2.0).item())\n"
    assert (
        fresh(load + again, elsewhere(tmp_path)).stdout
        == fresh("import opjit\n" + again, elsewhere(tmp_path)).stdout
        == "2.0\n"
    )


def test_the_folder_loads_all_its_ops(built: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(built.parent, tmp_path / "moved", symlinks=True)
    code = (
        LOAD.format(path=str(moved), ns="libtest")
        + "assert loaded == [scale, torch.ops.libtest.scale_grad.default]\n"
        + USE
    )
    assert fresh(code, elsewhere(tmp_path)).stdout == "['SUCCESS']\n"


def test_several_ops_make_one_library_and_the_command_follows(tmp_path: Path) -> None:
    first = write_scale(tmp_path / "scale", "libone")
    second = helpers.write_op(tmp_path / "plus")
    code = f"""
import opjit
opjit.add_path({str(first)!r})
opjit.add_path({str(second)!r})
print(opjit.build_library(["libone::scale", "keytest::plus"], {str(tmp_path / "build")!r}, "cpu", name="both"))
"""
    settings = {"OPJIT_CACHE": str(tmp_path / "cache")}
    assert fresh(code, settings).stdout == f"{tmp_path}/build/both\n"
    done = command(
        "get",
        first,
        second,
        "--device",
        "cpu",
        "--build-directory",
        tmp_path / "by",
        "--name",
        "both",
        **settings,
    )
    assert done.stdout == f"{tmp_path}/by/both\n{tmp_path}/by/both.so\n", done.stderr
    by, beside = (
        [path.relative_to(tmp_path / each) for path in sorted((tmp_path / each).rglob("*"))]
        for each in ("by", "build")
    )
    assert by == beside
    code = f"""
import torch, opjit
print([str(op) for op in opjit.load_library({str(tmp_path / "by" / "both")!r})])
print(torch.ops.keytest.plus(torch.ones(1)), torch.ops.libone.scale(torch.ones(1), 4.0))
"""
    assert fresh(code, elsewhere(tmp_path)).stdout == (
        "['keytest.plus.default', 'libone.scale.default', 'libone.scale_grad.default']\ntensor([2.]) tensor([4.])\n"
    )


def test_a_name_is_taken_once_and_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = write_scale(tmp_path / "scale", "libname")
    registry.add_path(folder)
    path = opjit.build_library("libname::scale", tmp_path / "build", "cpu", name="mine")
    before = helpers.snapshot(path.parent)
    assert opjit.build_library("libname::scale", tmp_path / "build", "cpu", name="mine") == path
    with pytest.raises(
        BuildError,
        match=r"build/mine exists with different content, and opjit does not overwrite it; remove it, or choose",
    ):
        opjit.build_library("allreduce", tmp_path / "build", "cpu", name="mine")
    assert helpers.snapshot(path.parent) == before
    (tmp_path / "build" / "notes").write_text("years")
    with pytest.raises(BuildError, match="exists with different content"):
        opjit.build_library("libname::scale", tmp_path / "build", "cpu", name="notes")
    assert (tmp_path / "build" / "notes").read_text() == "years"
    assert sorted(each.name for each in (tmp_path / "build").iterdir()) == [
        "mine",
        "mine.so",
        "notes",
    ]


def test_a_name_that_is_no_folder_name_and_a_library_of_no_op_are_refused(tmp_path: Path) -> None:
    for name in ("", "a/b", "..", ".hidden", "-x", "a b", "a\n", "ü", "x" * 101):
        with pytest.raises(
            BuildError,
            match="is not a valid name for an op package: expected at most 100 letters, digits",
        ):
            opjit.build_library("allreduce", tmp_path, "cpu", name=name)
    with pytest.raises(BuildError, match="expected at least one op, got an empty list"):
        opjit.build_library([], tmp_path, "cpu")
    assert list(tmp_path.iterdir()) == []


def test_an_op_py_that_changed_after_it_was_read_is_refused(tmp_path: Path) -> None:
    folder = helpers.write_op(
        tmp_path / "later", op_py=helpers.OP_PY.replace("keytest::plus", "laterlib::plus")
    )
    registry.add_path(folder)
    (folder / "op.py").write_text((folder / "op.py").read_text() + "\n# changed\n")
    with pytest.raises(
        DeclarationError,
        match=r"op\.py changed after this process read it; build the library in a new process",
    ):
        opjit.build_library("laterlib::plus", tmp_path / "build", "cpu")


@pytest.mark.parametrize(
    ("added", "says"),
    [
        (
            "import no_such_package",
            r"its plus/op\.py raised ModuleNotFoundError: No module named 'no_such_package'",
        ),
        ("raise KeyError('weights')", r"its plus/op\.py raised KeyError: 'weights'"),
    ],
)
def test_an_op_py_that_fails_elsewhere_is_one_message_and_leaves_nothing(
    added: str, says: str, tmp_path: Path
) -> None:
    guarded = f"import os\nif os.environ.get('ELSEWHERE'):\n    {added}\n"
    folder = helpers.write_op(tmp_path / "plus", op_py=helpers.OP_PY + guarded)
    code = (
        helpers.declare(folder)
        + f"print(opjit.build_library('keytest::plus', {str(tmp_path / 'build')!r}, 'cpu'))"
    )
    path = fresh(code, {"OPJIT_CACHE": str(tmp_path / "cache")}).stdout.strip()
    code = f"""
import os, re
import torch, opjit
try:
    opjit.load_library({path!r})
except opjit.errors.LoadError as error:
    assert re.search({says!r}, str(error)), error
assert not hasattr(torch.ops.keytest, "plus")
del os.environ["ELSEWHERE"]
print(opjit.load_library({path!r})(torch.ones(1)).tolist())
"""
    assert fresh(code, {**elsewhere(tmp_path), "ELSEWHERE": "1"}).stdout == "[2.0]\n"


def test_a_shared_library_of_the_author_comes_along_unless_it_lies_outside_the_op_s_folder(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "plus"
    outside = tmp_path / "outside"
    helpers.write_op(
        folder,
        op_py=helpers.OP_PY.replace('Tensor")', 'Tensor", extra_ldflags=["-Lvendor", "-lamount"])'),
        amount_h="float amount(void);\n#define AMOUNT amount()\n",
    )
    (folder / "vendor").mkdir()
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libamount.so",
        "-o",
        str(folder / "vendor" / "libamount.so"),
        "-x",
        "c",
        "-",
    ]
    subprocess.run(command, check=True, text=True, input="float amount(void) { return 5.0f; }")
    helpers.write_op(
        outside,
        op_py=helpers.OP_PY.replace("keytest::plus", "outside::plus").replace(
            'Tensor")', 'Tensor", extra_ldflags=["-L../plus/vendor", "-lamount"])'
        ),
    )
    registry.add_path(outside)
    with pytest.raises(
        DeclarationError,
        match=r"outside::plus is linked with .*libamount\.so, which is outside the directory",
    ):
        opjit.build_library("outside::plus", tmp_path / "build", "cpu")
    code = (
        helpers.declare(folder)
        + f"print(opjit.build_library('keytest::plus', {str(tmp_path / 'build')!r}, 'cpu'))"
    )
    path = Path(fresh(code, {"OPJIT_CACHE": str(tmp_path / "cache")}).stdout.strip())
    shutil.rmtree(folder)
    use = f"import torch, opjit\nprint(opjit.load_library({str(path)!r})(torch.ones(1)).tolist())"
    assert fresh(use, elsewhere(tmp_path)).stdout == "[6.0]\n"
