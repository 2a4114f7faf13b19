"""Debug builds: debuggers and profilers show the author's lines, and the binaries stay on this machine."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import opjit
from opjit import backends, request
from opjit.backends import targets
from opjit.builder import build
from opjit.cache import transfer
from opjit.recipe import toolchain
from opjit.recipe.flags import for_debugger
from opjit.store.entry import Entry
from opjit.store.store import Store
from tests import helpers
from tests.helpers import built, cuda_target, declare, describe, fresh, no_nvcc, no_nvrtc, write_op

GDB = shutil.which("gdb")
# A tool as Nsight Systems is, for NVTX: it writes the name of each range that a program opens. 1: the table of tables, and of the core's
# functions; 9: nvtxRangePushA.
NVTX_TOOL = r"""
#include <stdint.h>
#include <stdio.h>
struct tables {
    size_t size;
    int (*find)(int module, void (****functions)(void), unsigned int *count);
};
static int open_range(const char *name)
{
    return printf("range %s\n", name);
}
int InitializeInjectionNvtx2(const struct tables *(*find)(uint32_t));
int InitializeInjectionNvtx2(const struct tables *(*find)(uint32_t))
{
    void (***functions)(void);
    unsigned int count;
    if (!find(1)->find(1, &functions, &count) || count <= 9)
        return 0;
    *functions[9] = (void (*)(void))open_range;
    return 1;
}
"""
NVRTC = toolchain.find_nvrtc("", None)
CALL = "print(torch.ops.keytest.plus(torch.arange(4.)).tolist())\n"


def debug_build(op: Path, here: Path) -> Entry:
    done = helpers.command("get", op, "--device", "cpu", "--debug")
    library = Path(done.stdout.strip())
    assert library.is_file(), done.stderr
    return Entry(library.parent, library.parent.name, library)


@pytest.mark.skipif(GDB is None, reason="no gdb")
def test_gdb_stops_at_the_author_s_line_and_shows_variables(
    op: Path, here: Path, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(declare(op) + CALL)
    commands = [
        "set breakpoint pending on",
        "set debuginfod enabled off",
        "break plus.c:10 if i == 2",
        "run",
        "info locals",
        "print x->numel",
        "bt 2",
        "list",
        "kill",
    ]
    done = subprocess.run(
        [
            str(GDB),
            "-nx",
            "-batch",
            *(word for each in commands for word in ("-ex", each)),
            "--args",
            sys.executable,
            str(program),
        ],
        env=helpers.environment({"OPJIT_DEBUG": "1"}),
        capture_output=True,
        text=True,
        check=False,
    )
    if "ptrace" in done.stderr:
        pytest.skip("gdb may not trace processes here")
    assert re.search(
        rf"hit Breakpoint 1, plus_cpu .* at {re.escape(str(op))}/plus\.c:10\n", done.stdout
    ), done.stdout + done.stderr
    assert "i = 2\n" in done.stdout
    assert "$1 = 4\n" in done.stdout
    assert "#1 " in done.stdout
    assert re.search(r"^10\t.*\+ AMOUNT;$", done.stdout, re.MULTILINE), "the author's source"


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_call_opens_an_nvtx_range_with_the_op_s_name(device: str, tmp_path: Path) -> None:
    """With autograd and without, as for any operator of torch, and also in the kernel that opjit registers for calls without a gradient."""
    tool = tmp_path / "tool.so"
    words = [helpers.real_compiler(), "-shared", "-fPIC", "-x", "c", "-", "-o", str(tool)]
    subprocess.run(words, input=NVTX_TOOL, text=True, check=True)
    code = f"""
        import torch, opjit
        if {device!r} == "cpu":
            torch.cuda.synchronize = lambda: None  # emit_nvtx waits for a GPU, which may not be there
        x = torch.ones(3, device={device!r})
        y = torch.ones(3, device={device!r}, requires_grad=True)
        with torch.autograd.profiler.emit_nvtx():
            torch.ops.opjit.add_custom(x, x)
            with torch.inference_mode():
                torch.ops.opjit.add_custom(x, x)
            torch.ops.opjit.add_custom(y, y).sum().backward()
    """
    done = fresh(code, {"NVTX_INJECTION64_PATH": str(tool)}, cold=True)
    ranges = re.findall(r"^range opjit::(\w+),", done.stdout, re.MULTILINE)
    assert ranges == [*["add_custom"] * 3, "add_custom_backward"]


def test_a_debug_build_has_a_key_of_its_own_and_is_asked_for_by_the_variable(
    op: Path, here: Path
) -> None:
    entry = debug_build(op, here)
    ordinary = fresh(declare(op) + "print(opjit.explain('keytest::plus', 'cpu').key)").stdout
    debug = fresh(
        declare(op) + "print(opjit.explain('keytest::plus', 'cpu').key)", {"OPJIT_DEBUG": "1"}
    ).stdout
    assert f"{entry.key}\n" == debug != ordinary
    told = fresh(
        declare(op) + "print(opjit.explain('keytest::plus', 'cpu'))", {"OPJIT_DEBUG": "1"}
    ).stdout
    assert ": a hit" in told
    assert (
        fresh(declare(op) + "print(opjit.explain('keytest::plus', 'cpu'))").stdout.find(
            "debug build: none, "
        )
        > 0
    )


def test_a_debug_build_of_a_copy_elsewhere_is_another_as_it_names_its_folder(
    op: Path, here: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(op, tmp_path / "copy")
    assert len({debug_build(each, here).key for each in (op, copy)}) == 2


def test_a_debug_build_names_the_author_s_file_and_no_folder_of_the_build(
    op: Path, here: Path
) -> None:
    content = debug_build(op, here).library.read_bytes()
    assert f"{op}".encode() in content
    assert b"staging" not in content


def test_a_debug_build_goes_into_no_remote(op: Path, here: Path, tmp_path: Path) -> None:
    debug = debug_build(op, here)
    ordinary = built(op, here)
    report = transfer.push((tmp_path / "remote").as_uri(), sign=None)
    assert ([Path(name).stem for name in report.moved], report.problems) == ([ordinary.key], [])
    assert debug.folder.is_dir()


def test_a_debug_build_goes_into_no_wheel(op: Path, here: Path, tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    done = helpers.command(
        "wheel", op, "--arch", targets.here(helpers.cpu()).arch, "-o", tmp_path, OPJIT_DEBUG="1"
    )
    assert "OPJIT_DEBUG is set, but a wheel cannot contain debug builds" in done.stderr
    assert list(tmp_path.glob("*.whl")) == []


def test_a_debug_build_asks_no_remote(
    op: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = fresh(
        declare(op) + helpers.GET,
        {"OPJIT_DEBUG": "1", "OPJIT_REMOTE": "file:///nowhere", "OPJIT_TRUST": "unsigned"},
        flags=("-W", "error"),
    )
    assert done.stdout == "[2.0]\n"


def test_an_inline_op_may_be_built_for_a_debugger(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
        opjit_status twice_cpu(const opjit_tensor *x, int64_t *out)
        {
            *out = 2 * x->numel;
            return OPJIT_OK;
        }"""
    op = opjit.inline("debugtest::twice(Tensor x) -> int", c=code)
    monkeypatch.setenv("OPJIT_DEBUG", "1")
    entry = request.entry(op, targets.here(helpers.cpu()))
    assert b".debug_line" in entry.library.read_bytes()
    document = json.loads((entry.folder / "manifest.json").read_bytes())["document"]
    assert document["debug"] == str(op.folder)
    monkeypatch.delenv("OPJIT_DEBUG")
    assert b".debug_line" not in request.entry(op, targets.here(helpers.cpu())).library.read_bytes()


@pytest.mark.nvcc
@pytest.mark.parametrize(
    "way",
    [no_nvrtc, pytest.param(no_nvcc, marks=pytest.mark.skipif(NVRTC is None, reason="no NVRTC"))],
)
def test_a_kernel_for_cuda_has_its_lines_in_a_debug_build(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    here: Path,
    way: Callable[[pytest.MonkeyPatch], None],
) -> None:
    op = write_op(tmp_path / "op")
    target = cuda_target("sm_90")
    way(monkeypatch)
    recipe = describe(op, target)
    content = build.build(
        replace(recipe, flags=for_debugger(recipe.flags)), Store(here)
    ).library.read_bytes()
    assert b".nv_debug_line_sass" in content or b".debug_line" in content
    assert f"{op}".encode() in content


@pytest.mark.skipif(
    NVRTC is None, reason="no NVRTC: torch is a CPU build, and there is no CUDA Toolkit with it"
)
def test_line_information_in_an_ordinary_build_names_no_folder_of_this_machine(
    tmp_path: Path, here: Path
) -> None:
    assert NVRTC is not None
    target = targets.named("sm_90", backends.for_device("cuda"), NVRTC.version)
    contents = []
    for name in ("one", "two"):
        recipe = describe(write_op(tmp_path / name), target)
        recipe = replace(
            recipe, flags=recipe.flags._replace(cuda=(*recipe.flags.cuda, "-lineinfo"))
        )
        contents.append(build.build(recipe, Store(tmp_path / f"cache-{name}")).library.read_bytes())
    assert contents[0] == contents[1]
    assert b"plus.cu" in contents[0]
    assert str(Path.cwd()).encode() not in contents[0]
    assert str(tmp_path).encode() not in contents[0]


@pytest.mark.nvcc
def test_nvcc_leaves_line_information_out_and_why_says_so(
    tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = write_op(tmp_path / "op")
    target = cuda_target("sm_90")
    no_nvrtc(monkeypatch)
    recipe = describe(op, target)
    recipe = replace(recipe, flags=recipe.flags._replace(cuda=(*recipe.flags.cuda, "-lineinfo")))
    entry = build.build(recipe, Store(here))
    assert str(tmp_path).encode() not in entry.library.read_bytes()
    remark = json.loads((entry.folder / "manifest.json").read_bytes())["built_with"]["cuda"]
    assert remark.endswith(
        "; without line information, in which nvcc names directories of this machine"
    )
