"""Building ahead: all that is missing, each once, several at a time; what dies or fails takes nothing else with it."""

import contextlib
import errno
import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import opjit
from opjit import cli, files
from opjit.ahead import compiler_parts, precompile
from opjit.ahead.plan import plan_ops
from opjit.batch import pairs, requests, targets_of
from opjit.catalog import registry
from opjit.errors import BadSetting, CompileError, NoKernel, PrecompileError
from opjit.store import prune, store
from opjit.store.prune import MARKER
from opjit.store.store import Store
from opjit.wanted import OpRequest, describe
from tests import helpers
from tests.helpers import OnCompile, as_root, entries, fresh, good, is_alive, tmpfs, until

pytestmark = pytest.mark.usefixtures("here", "no_gpu")
_numbers = itertools.count()
ARCHS = helpers.LEVELS[:2]


def make_ops(root: Path, names: Sequence[str], namespace: str = "") -> list[str]:
    """Folders of small ops in a namespace of their own; returns the ops' names."""
    namespace = namespace or f"ahead{next(_numbers)}"
    for name in names:
        helpers.write_op(
            root / name, op_py=helpers.op_py(f"{namespace}::{name}(Tensor x) -> Tensor")
        )
        for suffix in (".c", ".cu"):
            plus = root / name / f"plus{suffix}"
            (root / name / f"{name}{suffix}").write_text(
                plus.read_text().replace("plus_", f"{name}_")
            )
            plus.unlink()
    return [f"{namespace}::{name}" for name in names]


def command(*arguments: str | Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return helpers.command("precompile", *arguments, **changes)


def test_what_is_missing_is_built_once_and_the_next_run_builds_nothing(
    tmp_path: Path, here: Path, log: Path
) -> None:
    names = make_ops(tmp_path / "ops", ["one", "two", "three"])
    report = opjit.precompile([tmp_path / "ops"], ARCHS)
    assert (len(report.built), report.there, report.failed) == (3 * len(ARCHS), [], [])
    assert sorted(good(here)) == sorted(names * len(ARCHS))
    assert len(log.read_text().split()) == 3 * len(ARCHS)
    again = opjit.precompile(names, ARCHS)
    assert (again.built, len(again.there)) == ([], 3 * len(ARCHS))
    assert len(log.read_text().split()) == 3 * len(ARCHS)


def test_all_is_every_op_that_can_be_found(tmp_path: Path, here: Path) -> None:
    names = make_ops(tmp_path / "ops", ["one", "two"], "found")
    done = command("--all", "--arch", ARCHS[0], OPJIT_PATH=str(tmp_path / "ops"))
    assert (done.returncode, done.stderr) == (0, "")
    assert set(good(here)) == {*helpers.BUNDLED, *names}


def test_an_op_without_a_kernel_for_an_arch_is_skipped_and_counted_unless_nothing_is_left_of_it(
    tmp_path: Path,
) -> None:
    name, other = make_ops(tmp_path / "ops", ["one", "two"])
    (tmp_path / "ops/one/one.cu").unlink()
    registry.add_path(tmp_path / "ops")
    plan = plan_ops([name, other], [*ARCHS, "sm_90"], None)
    assert (len(plan.wanted), plan.skipped) == (2 * len(ARCHS) + 1, 1)
    with pytest.raises(
        NoKernel, match=f"{name} has no kernel for cuda sm_90.* it has kernels for cpu"
    ):
        plan_ops([name, other], ["sm_90"], None)


@pytest.mark.slow
@pytest.mark.nvcc
def test_cuda_ops_are_built_for_several_archs_without_a_gpu(here: Path) -> None:
    report = opjit.precompile(["allreduce"], ["sm_80", "sm_90"])
    assert len(report.built) == 2
    assert sorted(folder.parts[-2].partition(".")[0] for folder in entries(here)) == [
        "sm_80",
        "sm_90",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["allreduce", "--arch", "sm_9"], "unknown arch 'sm_9'"),
        (["nonsense"], "no op named 'opjit::nonsense' is declared"),
        (["/no/such/folder"], "there is no directory /no/such/folder"),
        ([], "expected OPs, --all, --from FILE"),
        (["allreduce", "--all"], "expected OPs, --all, --from FILE"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_built(
    here: Path, arguments: list[str], message: str
) -> None:
    done = CliRunner().invoke(cli.main, ["precompile", *arguments])
    assert done.exit_code in (1, 2)
    assert message in done.output
    assert isinstance(done.exception, SystemExit)
    assert entries(here) == []


def test_a_string_in_place_of_a_list_is_told_how_to_write_one() -> None:
    for function, arguments, told in (
        (opjit.precompile, ("allreduce",), "ops is a list of strings, not the string 'allreduce'"),
        (
            opjit.precompile,
            (["allreduce"], "sm_90"),
            "archs is a list of strings, not the string 'sm_90'",
        ),
        (opjit.distributed.ready, ("allreduce",), r"write \['allreduce'\]"),
    ):
        with pytest.raises(BadSetting, match=told):
            function(*arguments)


def test_a_named_store_is_complete_by_itself_readable_for_all_and_serves_as_a_layer(
    tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [name] = make_ops(tmp_path / "ops", ["one"])
    opjit.precompile([tmp_path / "ops"])  # what the cache has does not count
    layer = tmp_path / "image" / "layer"
    before = os.umask(0o077)
    try:
        report = opjit.precompile([tmp_path / "ops"], store=layer)
    finally:
        os.umask(before)
    assert len(report.built) == 1
    [folder] = entries(layer)
    assert all(
        path.stat().st_mode & 0o055 == 0o055
        for path in [folder, *folder.parents]
        if path.is_relative_to(layer)
    )
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in folder.iterdir())
    code = (
        helpers.declare(tmp_path / "ops" / "one")
        + f"print(opjit.get({name!r}, 'cpu')(torch.ones(2)).tolist())\n"
    )
    environment = {
        "OPJIT_LAYERS": str(layer),
        "OPJIT_CACHE": str(tmp_path / "empty"),
        "OPJIT_OFFLINE": "1",
    }
    assert fresh(code, environment).stdout == "[2.0, 2.0]\n"
    assert len(opjit.precompile([tmp_path / "ops"], store=layer).there) == 1
    opjit.cache.clear()
    monkeypatch.setenv("OPJIT_LAYERS", str(layer))
    assert len(opjit.precompile([tmp_path / "ops"]).there) == 1, (
        "what a layer has need not be in the cache"
    )
    assert entries(here) == []


def test_a_named_store_keeps_what_it_has_whatever_the_bounds_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_ops(tmp_path / "ops", ["one", "two"])
    opjit.precompile([tmp_path / "ops" / "one"], [ARCHS[0]], store=tmp_path / "layer")
    [old] = entries(tmp_path / "layer")
    for path in (*old.iterdir(), tmp_path / "layer" / "v2" / MARKER):
        path.touch()
        os.utime(path, (1, 1))
    monkeypatch.setenv("OPJIT_CACHE_SIZE", "1k")
    monkeypatch.setattr(prune, "_FRESH", 0.0)
    assert (
        len(opjit.precompile([tmp_path / "ops"], [ARCHS[0]], store=tmp_path / "layer").there) == 1
    )
    assert old.exists()
    assert len(entries(tmp_path / "layer")) == 2


def test_ranks_build_the_rest_where_one_op_has_lost_its_kernel(
    tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_ops(tmp_path / "ops", ["one", "two"])
    plan = plan_ops([tmp_path / "ops"], [ARCHS[0]], None)
    (tmp_path / "ops" / "two" / "two.c").unlink()
    of_a_job = SimpleNamespace(needs_store=True)
    monkeypatch.setattr(precompile, "ranks", SimpleNamespace(current=lambda: of_a_job))
    report = precompile.build_plan(plan)
    assert [pair.op.schema.name for pair in report.built if isinstance(pair, OpRequest)] == ["one"]
    [(name, error)] = report.failed
    assert "two" in name
    assert isinstance(error, NoKernel)


def test_an_unreadable_source_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_ops(tmp_path / "ops", ["one"])
    real = files.read_regular

    def read(path: str, *most: int) -> Any:
        if str(path).endswith("one.c"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, *most)

    monkeypatch.setattr(files, "read_regular", read)
    with pytest.raises(
        PrecompileError, match=r"one\.c cannot be read \(Permission denied\).*; make it readable"
    ):
        opjit.precompile([tmp_path / "ops"], [ARCHS[0]])


@as_root
def test_a_store_that_is_full_is_a_failure_for_what_it_cannot_keep(
    tmp_path: Path, here: Path
) -> None:
    make_ops(tmp_path / "ops", ["one", "two"])
    here.mkdir(mode=0o700)
    with tmpfs(here, "size=60k"), pytest.raises(PrecompileError) as caught:
        opjit.precompile([tmp_path / "ops"])
    assert len(caught.value.failed) == 2
    assert all(
        "cannot hold it: [Errno 28] No space left on device" in str(error)
        for _, error in caught.value.failed
    )
    # The kernel was not built once more for a process that ends.
    assert list((tmp_path / "tmp").glob("opjit-*/v2/*/*/*/*.so")) == []


@as_root
def test_a_store_that_is_read_only_serves_what_it_has_and_fails_for_the_rest(
    tmp_path: Path, here: Path
) -> None:
    name, other = make_ops(tmp_path / "ops", ["one", "two"])
    here.mkdir(mode=0o700)
    with tmpfs(here, "size=16m"):
        opjit.precompile([tmp_path / "ops" / "one"])
        subprocess.run(["mount", "-o", "remount,ro", str(here)], check=True)
        assert len(opjit.precompile([name]).there) == 1
        done = command(tmp_path / "ops")
        assert done.returncode == 1
        assert "0 built, 1 already there, 0 skipped, 1 failed" in done.stdout
        assert f"Error: {other} for " in done.stderr
        assert "Read-only file system" in done.stderr


def test_an_op_that_does_not_compile_is_told_by_the_compiler_s_first_line_and_the_rest_is_built(
    tmp_path: Path, here: Path
) -> None:
    names = make_ops(tmp_path / "ops", ["one", "two", "three"])
    (tmp_path / "ops/two/two.c").write_text('#include "opjit.h"\nnonsense\n')
    done = command(tmp_path / "ops")
    assert done.returncode == 1
    assert set(good(here)) == {names[0], names[2]}
    assert f"failed: {names[1]} for cpu " in done.stdout
    assert "2 built, 0 already there, 0 skipped, 1 failed" in done.stdout
    assert done.stderr.splitlines()[0].startswith(f"Error: {tmp_path / 'ops/two/two.c'}:2:")
    assert "Traceback" not in done.stderr
    with pytest.raises(PrecompileError, match="1 failed") as caught:
        opjit.precompile([tmp_path / "ops"])
    [(name, error)] = caught.value.failed
    assert name.startswith(names[1])
    assert isinstance(error, CompileError)
    assert error.log is not None
    assert error.log.is_file()


def test_what_is_missing_on_the_machine_is_told_once_for_all_ops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    make_ops(tmp_path / "ops", ["one", "two", "three"])
    changes = {
        name: value for name, value in helpers.no_compiler(tmp_path).items() if value is not None
    }
    done = command(tmp_path / "ops", **changes)
    assert done.returncode == 1
    assert done.stderr.count("no C compiler") == 1
    assert "(for 3 builds: " in done.stderr


def test_a_compiler_that_is_killed_fails_its_own_op_and_the_rest_is_built(
    tmp_path: Path, here: Path, on_compile: OnCompile
) -> None:
    names = make_ops(tmp_path / "ops", ["one", "two", "three", "four"])
    on_compile('case " $* " in *ops/two*) kill -9 $$;; esac')
    with pytest.raises(PrecompileError) as caught:
        opjit.precompile([tmp_path / "ops"], [ARCHS[0]], jobs=2)
    [(name, error)] = caught.value.failed
    assert name.startswith(names[1])
    assert "a tool was killed; try again, with more memory if it needs it" in str(error)
    assert set(good(here)) == {names[0], names[2], names[3]}
    (cc := tmp_path / "own-cc").write_text(cc.read_text().replace("kill -9 $$", "true"))
    assert len(opjit.precompile([tmp_path / "ops"], [ARCHS[0]]).built) >= 1
    assert set(good(here)) == set(names)


@pytest.fixture
def slow(tmp_path: Path, on_compile: OnCompile) -> Path:
    """A compiler that hangs at the op `two` as long as there is the file `hang`; returns the file of its process ids."""
    (tmp_path / "hang").write_text("")
    pids = tmp_path / "pids"
    on_compile(
        f"case \" $* \" in *ops/two*) if [ -e '{tmp_path}/hang' ]; then echo $$ >> '{pids}'; sleep 100; fi;; esac"
    )
    return pids


@pytest.mark.no_qemu(
    "qemu does not pass on how a program of another machine ended, nor its session"
)
@pytest.mark.parametrize(
    ("how", "whom"),
    [
        (signal.SIGKILL, "it"),
        (signal.SIGINT, "it"),
        (signal.SIGTERM, "its whole job"),  # as a job scheduler may
    ],
)
def test_a_command_that_is_ended_in_the_middle_leaves_nothing_half_done_and_the_next_one_goes_on(
    tmp_path: Path, here: Path, slow: Path, how: signal.Signals, whom: str
) -> None:
    names = make_ops(tmp_path / "ops", ["one", "three", "two"])
    process = helpers.started_command(
        "precompile", tmp_path / "ops", "--arch", ARCHS[0], "--jobs", "1"
    )
    until(slow.exists, process=process)  # the compiler is at work on the last op
    for each in (
        pid
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if whom == "its whole job" or pid == process.pid
    ):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(each) == process.pid:
                os.kill(each, how)
    err = process.communicate()[1]
    assert process.returncode == (-how if how == signal.SIGKILL else 128 + how)
    told = f"interrupted by {how.name}; finished builds are kept, and the same command continues from there\n"
    assert err == ("" if how == signal.SIGKILL else told)
    [pid] = map(int, slow.read_text().split())
    if how == signal.SIGKILL:  # which nothing can answer
        os.kill(pid, how)
    until(lambda: not is_alive(pid))  # the compiler ends
    if how != signal.SIGKILL:
        until(lambda: os.listdir(here / "v2" / "staging") == [])
    assert set(good(here)) == {names[0], names[1]}
    (tmp_path / "hang").unlink()
    done = command(tmp_path / "ops", "--arch", ARCHS[0])
    assert "1 built, 2 already there, 0 skipped, 0 failed" in done.stdout
    assert set(good(here)) == set(names)


def test_two_commands_at_once_build_each_entry_once_between_them(
    tmp_path: Path, here: Path, log: Path
) -> None:
    names = make_ops(tmp_path / "ops", [f"op{number}" for number in range(6)])
    both = [
        helpers.started_command("precompile", tmp_path / "ops", "--arch", ARCHS[0], "--jobs", "2")
        for _ in range(2)
    ]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert len(log.read_text().split()) == 6
    assert sum(int(out.splitlines()[-1].split()[0]) for out, _ in outputs) == 6
    assert set(good(here)) == set(names)


@pytest.mark.slow
def test_on_a_terminal_one_display_changes_in_place_and_the_summary_stays(tmp_path: Path) -> None:
    names = make_ops(tmp_path / "ops", ["one", "two"])
    code, text = helpers.on_terminal("precompile", tmp_path / "ops", TERM="xterm", COLUMNS="120")
    assert code == 0
    assert all(name in text for name in names)
    assert "building " in text
    assert "2 of 2 done" in text
    assert "built: " not in text
    assert (
        text.rstrip().splitlines()[-1].startswith("\x1b")
        or "2 built, 0 already there" in text.splitlines()[-1]
    )


def test_a_run_that_has_nothing_to_do_imports_nothing_for_builds_and_displays_and_writes_nothing(
    tmp_path: Path, here: Path
) -> None:
    make_ops(tmp_path / "ops", ["one", "two"], "idle")
    time.sleep(2.1)  # a note of a younger file is written again at the next hit
    opjit.precompile([tmp_path / "ops"], ARCHS)
    before = helpers.snapshot(here)
    code = f"""
import sys, opjit
report = opjit.precompile([{str(tmp_path / "ops")!r}], {ARCHS!r})
assert len(report.there) == 2 * {len(ARCHS)}, report
print([name for name in ("rich", "click", "filelock", "torch.utils.cpp_extension", "opjit.builder.build",
                         "opjit.catalog.inline", "opjit.ahead.record") if name in sys.modules])
"""
    assert fresh(code).stdout == "[]\n"
    assert helpers.snapshot(here) == before


def test_requests_for_many_have_the_keys_that_a_get_gives(tmp_path: Path) -> None:
    make_ops(tmp_path / "ops", ["one", "two", "three"])
    ops = registry.add_path(tmp_path / "ops")
    local = Store(store.default_root())
    wanted = pairs(ops, targets_of(ARCHS, local))
    found = requests(wanted, local)
    assert [each.inputs.key for each in found] == [describe(*pair, local).key for pair in wanted]
    assert [each.find(local) for each in found] == [None] * len(wanted)


def test_the_parts_for_the_compilers_are_made_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(compiler_parts, "make_parts", lambda store, write: made.append(store.root))
    assert opjit.precompile([], store=tmp_path / "layer").built == []
    assert made == []
    assert opjit.precompile([], store=tmp_path / "layer", warm_compilers=True).built == []
    assert made == [tmp_path / "layer"]


@pytest.mark.slow
def test_the_parts_for_the_compilers_are_made_once_for_every_cache_with_the_layer(
    tmp_path: Path, here: Path
) -> None:
    layer = tmp_path / "layer"
    done = helpers.command(
        "precompile", "--warm-compilers", "--store", layer, TORCH_CUDA_ARCH_LIST="9.0"
    )
    assert done.returncode == 0, done.stderr
    assert {entry.parent.name for entry in layer.glob("v2/cpp_extension.*/*")} <= {
        "cpp_extension.opjit_autograd"
    }
    listed = helpers.command("cache", "ls", OPJIT_CACHE=str(layer)).stdout
    assert re.search(r"^parts of builds: \d+, \d+", listed, re.MULTILINE), listed
    parts = list(layer.glob("v2/parts/**/*"))  # shared ones have a folder of their own
    assert parts
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in parts)
    assert any(path.suffix == ".gch" for path in parts)
    code = """
import opjit, torch
text = "at::Tensor twice(at::Tensor x) { return x * 2; }"
print(opjit.load_inline("warmed", text, functions="twice").twice(torch.ones(1)).item())
"""
    found = fresh(code, {"OPJIT_LAYERS": str(layer), "OPJIT_CACHE": str(tmp_path / "cache")})
    assert found.stdout == "2.0\n"
    kept = [path.name for path in tmp_path.glob("cache/v2/parts/**/*") if path.is_file()]
    assert [name for name in kept if name != "object.o" and not name.endswith(".json")] == []


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is a build without CUDA")
def test_the_parts_of_cuda_extensions_are_made_ahead(tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    archs = {"TORCH_CUDA_ARCH_LIST": "9.0"}
    done = helpers.command("precompile", "--warm-compilers", "--store", layer, **archs)
    assert done.returncode == 0, done.stderr
    code = """
import opjit
kernel = "#include <torch/extension.h>\\n__global__ void other() {}\\nat::Tensor twice(at::Tensor x) { other<<<1, 1>>>(); return x; }"
opjit.load_inline("warmed", "at::Tensor twice(at::Tensor x);", kernel, functions="twice")
"""
    settings = {"OPJIT_LAYERS": str(layer), "OPJIT_CACHE": str(tmp_path / "cache"), **archs}
    fresh(code, settings)
    # The program's own objects are kept, and nothing else was made.
    kept = tmp_path.glob("cache/v2/parts/*")
    assert [each for each in kept if not (each / "object.o").exists()] == []
