"""Record and replay: every op that a program's processes use is in the list, and the list builds it elsewhere without running a thing."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import opjit
from opjit.ahead.plan import plan_recorded
from opjit.backends import targets
from opjit.catalog import registry
from opjit.declare import oplist
from opjit.errors import CacheWarning, PrecompileError, RecordError
from opjit.store.store import Store, default_root
from opjit.wanted import OpRequest
from tests import helpers
from tests.helpers import entries, fresh, write_op

pytestmark = pytest.mark.usefixtures("here")
ARCH = targets.here(helpers.cpu()).arch
SCALE = helpers.elementwise("scale", "(float)a * FACTOR * from[i]", "double a, ")
INLINE = f"""
import torch, opjit
scale = opjit.inline("scale(Tensor x, float a) -> Tensor", c={SCALE!r}, like="x",
                     extra_cflags=["-DFACTOR=1.0f", "-DBRACED={{1}}"])
print(scale(torch.ones(2), 2.0).tolist(), flush=True)
"""


def record(output: Path, *program: str, **changes: str | None) -> subprocess.CompletedProcess[str]:
    return helpers.command("record", "-o", output, "--", *program, **changes)


def python(code: str) -> tuple[str, str, str]:
    return sys.executable, "-c", textwrap.dedent(code)


def one(**changed: Any) -> dict[str, Any]:
    """An op of a list."""
    fields: dict[str, Any] = {
        "op": "keytest::plus",
        "schema": helpers.SCHEMA,
        "backend": "cpu",
        "arch": ARCH,
        "runtime": "",
        "folder": "/no/such/folder",
        "flags": {name: [] for name in oplist.FLAGS},
    }
    fields.update(changed)
    return {name: value for name, value in fields.items() if value is not None}


def write_list(path: Path, *ops: object) -> Path:
    path.write_text(json.dumps({"format": 1, "ops": list(ops)}))
    return path


@pytest.mark.slow
def test_every_op_of_every_process_is_in_the_list_once_and_the_command_s_output_and_exit_code_are_passed_on(
    tmp_path: Path,
) -> None:
    write_op(tmp_path / "plus")
    code = (
        INLINE
        + f"""
import os, subprocess, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: torch has threads, and the process forks
opjit.add_path({str(tmp_path / "plus")!r})
print(opjit.get("keytest::plus", "cpu")(torch.ones(1)).tolist(), flush=True)
for _ in range(2):
    if os.fork() == 0:
        opjit.get("tensor_negate", "cpu")
        scale(torch.ones(2), 3.0)
        os._exit(0)
    os.wait()
subprocess.run([sys.executable, "-c", "import torch, opjit; torch.ops.opjit.allreduce(torch.ones(3))"], check=True)
sys.exit(3)
"""
    )
    done = record(tmp_path / "ops.json", *python(code))
    assert (done.returncode, done.stdout) == (3, "[2.0, 2.0]\n[2.0]\n")
    lines = oplist.read_list(tmp_path / "ops.json")[0]
    told = f"wrote {tmp_path / 'ops.json'}: {len(lines)} ops, 0 extensions and kernels\n"
    assert done.stderr == told
    assert [line.op for line in lines] == [
        "inline::scale",
        "keytest::plus",
        "opjit::allreduce",
        "opjit::tensor_negate",
    ]
    assert {(line.backend, line.arch, line.runtime) for line in lines} == {("cpu", ARCH, "")}
    assert lines[0].code == {"cpu": SCALE}
    assert lines[0].flags == {
        "c": ["-DFACTOR=1.0f", "-DBRACED={1}"],
        "cuda": [],
        "link": [],
        "include": [],
        "cuda_link": [],
        "sources": [],
    }
    assert (lines[1].folder, lines[1].schema) == (str(tmp_path / "plus"), helpers.SCHEMA)
    assert [path.name for path in tmp_path.glob(".ops.json*")] == []


def test_a_program_that_is_killed_leaves_the_list_of_what_it_used(tmp_path: Path) -> None:
    done = record(
        tmp_path / "ops.json",
        *python(INLINE + f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"),
    )
    assert done.returncode == 128 + signal.SIGKILL
    assert [line.op for line in oplist.read_list(tmp_path / "ops.json")[0]] == ["inline::scale"]


def test_a_signal_to_the_recorder_reaches_the_program_and_the_list_is_written(
    tmp_path: Path,
) -> None:
    code = INLINE + "import time\nprint('ready', flush=True)\ntime.sleep(100)"
    process = helpers.started_command("record", "-o", tmp_path / "ops.json", "--", *python(code))
    while process.stdout.readline() != "ready\n":
        assert process.poll() is None
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    process.end()
    assert len(oplist.read_list(tmp_path / "ops.json")[0]) == 1


def test_an_inline_op_that_gets_new_code_is_recorded_with_both(tmp_path: Path) -> None:
    code = (
        INLINE
        + f"""
scale = opjit.inline("scale(Tensor x, float a) -> Tensor", c={SCALE!r}, like="x", extra_cflags=["-DFACTOR=3.0f"])
print(scale(torch.ones(1), 1.0).tolist())
"""
    )
    assert record(tmp_path / "ops.json", *python(code)).stdout == "[2.0, 2.0]\n[3.0]\n"
    assert len(oplist.read_list(tmp_path / "ops.json")[0]) == 2


def test_a_list_that_cannot_be_written_is_said_before_the_program_runs_and_a_missing_program_leaves_none(
    tmp_path: Path,
) -> None:
    done = record(tmp_path / "missing" / "ops.json", *python("print('ran')"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: the list cannot be written to ")
    assert "Traceback" not in done.stderr
    done = record(tmp_path / "ops.json", "no-such-program")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: 'no-such-program' cannot be run: ")
    assert list(tmp_path.glob("*ops.json*")) == []


@pytest.mark.parametrize("place", ["missing/file", "", "link"])
def test_trouble_with_the_recording_is_one_warning_and_the_op_works(
    tmp_path: Path, place: str
) -> None:
    (tmp_path / "target").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    code = (
        "import warnings, torch, opjit\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(3): total = opjit.get('allreduce', 'cpu')(torch.ones(3)).item()\n"
        "print(total, [one.category.__name__ for one in seen])\n"
    )
    assert fresh(code, {"OPJIT_RECORD": str(tmp_path / place)}).stdout == "3.0 ['CacheWarning']\n"
    assert (tmp_path / "target").read_text() == ""


def test_a_line_that_was_cut_off_is_left_out_with_a_warning(tmp_path: Path) -> None:
    from opjit.ahead import record

    raw = tmp_path / "raw"
    raw.write_text(json.dumps(one()) + "\n" + json.dumps(one(arch="x"))[:40])
    with pytest.warns(CacheWarning, match="skipped 1 unreadable records"):
        ops, extensions = record._gather(raw)
    assert (len(ops), extensions) == (1, [])


@pytest.mark.slow
def test_what_was_recorded_is_built_elsewhere_and_serves_the_program_without_a_compiler(
    tmp_path: Path,
) -> None:
    write_op(tmp_path / "plus")
    code = (
        INLINE
        + f"""
opjit.add_path({str(tmp_path / "plus")!r})
print(opjit.get("keytest::plus", "cpu")(torch.ones(1)).tolist(), torch.ops.opjit.allreduce(torch.ones(3)).item())
"""
    )
    assert record(tmp_path / "ops.json", *python(code)).returncode == 0
    other = {"OPJIT_CACHE": str(tmp_path / "other")}
    done = helpers.command("precompile", "--from", tmp_path / "ops.json", **other)
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 built, 0 already there, 0 skipped, 0 failed" in done.stdout
    assert (
        fresh(code, {**other, **helpers.no_compiler(tmp_path)}).stdout == "[2.0, 2.0]\n[2.0] 3.0\n"
    )


def test_of_a_folder_that_only_the_list_names_nothing_is_run_and_its_kernel_gets_the_key_of_its_declaration(
    tmp_path: Path,
) -> None:
    folder = write_op(
        tmp_path / "plus",
        op_py=f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).write_text('')\n",
    )
    listed = write_list(tmp_path / "ops.json", one(folder=str(folder)))
    assert len(opjit.precompile(recorded=listed).built) == 1
    assert not (tmp_path / "ran").exists()
    assert helpers.found(Store(default_root()), helpers.describe(folder)) is not None


def test_a_namespace_that_only_the_list_has_is_searched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each search reads OPJIT_PATH and compares the name with those of all ops."""
    folder = str(write_op(tmp_path / "plus"))
    searched = []
    find = registry.find

    def counted(name: str) -> opjit.Op:
        searched.append(name)
        return find(name)

    monkeypatch.setattr(registry, "find", counted)
    names = ("onlylisted::plus", "onlylisted::minus", "onlylisted::times")
    rows = [one(op=name, schema=f"{name}(Tensor x) -> Tensor", folder=folder) for name in names]
    plan_recorded(write_list(tmp_path / "ops.json", *rows), [ARCH], None)
    assert searched == ["onlylisted::plus"]


def test_the_flags_of_the_list_are_checked_like_those_of_a_declaration(tmp_path: Path) -> None:
    folder = write_op(tmp_path / "plus")
    for flag in ("-fplugin=/tmp/evil.so", "-B/tmp", "-wrapper=evil"):
        flags = {**{name: [] for name in oplist.FLAGS}, "c": [flag]}
        with pytest.raises(PrecompileError, match="extra_cflags cannot hold"):
            opjit.precompile(
                recorded=write_list(tmp_path / "ops.json", one(folder=str(folder), flags=flags))
            )


def test_with_archs_each_op_of_the_list_is_built_for_those(tmp_path: Path) -> None:
    folder = write_op(tmp_path / "plus")
    (folder / "plus.cu").unlink()
    listed = write_list(
        tmp_path / "ops.json",
        one(folder=str(folder)),
        one(folder=str(folder), arch=helpers.LEVELS[-1]),
    )
    plan = plan_recorded(listed, [ARCH, "sm_90"], None)
    assert (
        [wanted.target.arch for wanted in plan.wanted if isinstance(wanted, OpRequest)],
        plan.skipped,
    ) == ([ARCH], 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"op": "elsewhere::op", "schema": "elsewhere::op(Tensor x) -> Tensor"},
            "elsewhere::op is not here: .* name the directory .* OPJIT_PATH",
        ),
        ({"folder": "relative/place"}, "is not here"),
        ({"op": "keytest::other"}, "expected a schema of keytest::other in the list"),
        (
            {
                "schema": "keytest::plus(",
            },
            "keytest::plus",
        ),
        ({"folder": None, "code": {"fpga": "int x;"}}, "no backend for device 'fpga'"),
        (
            {
                "op": "opjit::allreduce",
                "schema": "opjit::allreduce(Tensor x, *, ScalarType? dtype=None) -> Tensor",
                "backend": "fpga",
            },
            "lacks the backend 'fpga'",
        ),
        (
            {
                "op": "opjit::allreduce",
                "schema": "opjit::allreduce(Tensor x, *, ScalarType? dtype=None) -> Tensor",
                "arch": "x86-64-v9",
            },
            "unknown arch 'x86-64-v9'",
        ),
    ],
)
def test_an_op_that_cannot_be_built_here_is_a_one_line_error_and_the_rest_is_built(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    folder = write_op(tmp_path / "good")
    text = helpers.SCHEMA.replace("plus", "good")
    (folder / "good.c").write_text((folder / "plus.c").read_text().replace("plus_", "good_"))
    listed = write_list(
        tmp_path / "ops.json",
        one(op="keytest::good", schema=text, folder=str(folder)),
        one(**changed),
    )
    with pytest.raises(PrecompileError, match=message) as caught:
        opjit.precompile(recorded=listed)
    assert len(caught.value.failed) == 1
    assert len(entries(default_root())) == 1


BAD = {
    "empty": b"",
    "not JSON": b"{",
    "not text": b"\xff\xfe",
    "a list": b"[]",
    "another format": b'{"format": 2, "ops": []}',
    "a true format": b'{"format": true, "ops": []}',
    "more": b'{"format": 1, "ops": [], "more": 1}',
    "no ops": b'{"format": 1, "ops": {}}',
    "deep": b"[" * 100_000,
    "a string": b'{"format": 1, "ops": ["opjit::allreduce"]}',
    **{
        f"{name} changed": json.dumps({"format": 1, "ops": [one(**{name: value})]}).encode()
        for name, value in [
            ("op", 1),
            ("schema", None),
            ("arch", ["x"]),
            ("runtime", None),
            ("folder", 1),
            ("flags", {}),
            ("flags", {"c": "-O3"}),
            ("flags", {**{name: [] for name in oplist.FLAGS}, "c": [1]}),
            ("more", "x"),
            ("code", {"cpu": "x"}),
            ("schema", "\ud800"),
        ]
    },
    **{
        f"extension {number}": json.dumps({"format": 1, "ops": [], "extensions": [each]}).encode()
        for number, each in enumerate(
            [
                1,
                {},
                {"function": "load", "arguments": {"name": "x"}},
                {"function": "exec", "arguments": {"name": "x"}, "archs": None},
                {"function": "load", "arguments": {}, "archs": None},
                {"function": "load", "arguments": {"name": "x"}, "archs": 9},
                {"function": "load", "arguments": {"name": "x", "sources": [1]}, "archs": None},
                {"function": "load", "arguments": {"name": "\ud800"}, "archs": None},
            ]
        )
    },
    "extensions without a list": b'{"format": 1, "ops": [], "extensions": {}}',
    "code without text": json.dumps(
        {"format": 1, "ops": [one(folder=None, code={"cpu": 1})]}
    ).encode(),
    "code of nothing": json.dumps({"format": 1, "ops": [one(folder=None, code={})]}).encode(),
}


def test_an_invalid_or_missing_list_is_refused_with_a_one_line_error(tmp_path: Path) -> None:
    path = tmp_path / "ops.json"
    with pytest.raises(RecordError, match="No such file or directory"):
        opjit.precompile(recorded=path)
    for name, content in BAD.items():
        path.write_bytes(content)
        with pytest.raises(
            RecordError, match=r"ops\.json is not a list from `opjit record`: .*; record it again"
        ) as caught:
            opjit.precompile(recorded=path)
        assert "\n" not in str(caught.value), name
        assert len(str(caught.value)) < 600, name


def test_a_list_says_the_same_whatever_the_order_of_the_processes() -> None:
    lines = [
        oplist.parse_op(one(op=name, arch=arch)) for name in ("a::b", "a::a") for arch in ("y", "x")
    ]
    assert oplist.dump_list(lines) == oplist.dump_list([*reversed(lines), lines[1]])
    assert [(each["op"], each["arch"]) for each in json.loads(oplist.dump_list(lines))["ops"]] == [
        ("a::a", "x"),
        ("a::a", "y"),
        ("a::b", "x"),
        ("a::b", "y"),
    ]


def test_inline_code_that_does_not_compile_is_named_as_what_it_is_and_leaves_no_files(
    tmp_path: Path,
) -> None:
    listed = write_list(tmp_path / "ops.json", one(folder=None, code={"cpu": "nonsense"}))
    done = helpers.command("precompile", "--from", listed)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: keytest::plus (inline code):")
    assert [
        path.name for path in (tmp_path / "tmp").iterdir() if path.name != f"opjit-{os.geteuid()}"
    ] == []


def test_a_list_without_ops_says_so(tmp_path: Path) -> None:
    done = record(tmp_path / "ops.json", *python("print(1)"))
    nothing = "the program called no op and loaded no C++ extension"
    told = f"wrote {tmp_path / 'ops.json'}: 0 ops, 0 extensions and kernels; {nothing}\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", told)
