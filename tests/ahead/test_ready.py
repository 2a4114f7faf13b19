"""A list that is ready: what it needs is all there, or what is not is named."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import opjit
from opjit import cli
from opjit.backends import targets
from opjit.declare import oplist
from opjit.errors import CacheWarning, PrecompileError, RecordError
from tests import helpers
from tests.helpers import ROOT, entries, fresh

pytestmark = pytest.mark.usefixtures("here", "no_gpu")
CLUSTER = ROOT / "examples/11_cluster"
ARCH = targets.here(helpers.cpu()).arch


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """A list of an op in a folder and an inline op, all of whose entries are in the cache."""
    flags: dict[str, list[str]] = {name: [] for name in oplist.FLAGS}
    folder = helpers.write_op(tmp_path / "plus")
    code = {
        "cpu": helpers.PLUS.replace('#include "amount.h"', "#define AMOUNT 2.0f").replace(
            "plus_cpu", "more_cpu"
        )
    }
    ops = [
        oplist.RecordedOp("keytest::plus", helpers.SCHEMA, "cpu", ARCH, "", flags, str(folder)),
        oplist.RecordedOp(
            "keytest::more", "keytest::more(Tensor x) -> Tensor", "cpu", ARCH, "", flags, None, code
        ),
    ]
    path = tmp_path / "ops.json"
    path.write_text(oplist.dump_list(ops))
    assert len(opjit.precompile(recorded=path).built) == 2
    return path


def check(path: Path, *options: str) -> Result:
    return CliRunner().invoke(cli.main, ["precompile", "--check", str(path), *options])


def refused(path: Path, archs: Sequence[str] = (), **options: Any) -> str:
    with pytest.raises(PrecompileError) as caught:
        opjit.check_precompiled(path, archs, **options)
    return str(caught.value)


def test_a_list_whose_entries_are_all_there_is_ready_and_one_that_lost_an_entry_names_it(
    listed: Path, here: Path
) -> None:
    done = check(listed)
    assert (done.exit_code, done.output) == (0, f"all 2 entries of {listed} are there\n")
    assert opjit.check_precompiled(listed) == 2
    [gone] = [folder for folder in entries(here) if folder.parts[-3] == "keytest.plus"]
    shutil.rmtree(gone)
    done = check(listed)
    assert done.exit_code == 1
    assert f"keytest::plus for cpu {ARCH} was never built" in done.output
    assert "keytest::more" not in done.output
    with pytest.raises(PrecompileError, match="keytest::plus") as caught:
        opjit.check_precompiled(listed)
    assert [name for name, _ in caught.value.failed] == [f"keytest::plus for cpu {ARCH}"]
    assert len(opjit.precompile(recorded=listed).built) == 1
    assert opjit.check_precompiled(listed) == 2


def test_another_arch_source_or_compiler_is_named(
    listed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = next(arch for arch in helpers.LEVELS if arch != ARCH)
    assert f"keytest::plus for cpu {other} was never built" in refused(listed, [other])
    with monkeypatch.context() as patch:
        told = 'if [ "$1" = -v ]; then echo "Target: t"; echo "gcc version 99"; exit; fi'
        patch.setenv("CC", str(helpers.fake_compiler(tmp_path / "other", told)))
        assert re.search("keytest::plus for .* is not cached: gcc version 99", refused(listed))
    header = listed.parent / "plus/amount.h"
    text = header.read_text()
    header.write_text(text.replace("1.0", "3.0"))
    assert "is not cached: amount.h changed" in refused(listed)
    header.write_text(text)
    assert opjit.check_precompiled(listed) == 2
    with pytest.raises(RecordError, match="missing"):
        opjit.check_precompiled(tmp_path / "missing")


def test_a_damaged_library_is_missing(listed: Path, here: Path) -> None:
    [folder] = [folder for folder in entries(here) if folder.parts[-3] == "keytest.plus"]
    library = folder / "keytest.plus.so"
    content = library.read_bytes()
    for damaged, lacking in ((content[::-1], "the SHA-256"), (content[:-1], "the size")):
        library.write_bytes(damaged)
        with pytest.warns(CacheWarning, match=f"does not have {lacking}"):
            assert "keytest::plus for " in refused(listed)


def test_a_machine_without_a_compiler_accepts_what_any_has_built(
    listed: Path, tmp_path: Path
) -> None:
    done = fresh(
        f"import opjit; print(opjit.check_precompiled({str(listed)!r}))",
        helpers.no_compiler(tmp_path),
    )
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_a_named_store_is_ready_by_itself_and_as_a_layer(
    listed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opjit.precompile(recorded=listed, store=tmp_path / "layer")
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "empty"))
    refused(listed)
    assert opjit.check_precompiled(listed, store=tmp_path / "layer") == 2
    monkeypatch.setenv("OPJIT_LAYERS", str(tmp_path / "layer"))
    assert opjit.check_precompiled(listed) == 2
    refused(listed, store=tmp_path / "other")


def test_the_c_plus_plus_extensions_of_a_list_are_checked_too(tmp_path: Path) -> None:
    (tmp_path / "seven.cpp").write_text(
        '#include <Python.h>\nstatic PyModuleDef seven = {PyModuleDef_HEAD_INIT, "seven"};\n'
        "PyMODINIT_FUNC PyInit_seven(void) { return PyModule_Create(&seven); }\n"
    )
    call = oplist.RecordedExtension("load", {"name": "seven", "sources": ["seven.cpp"]}, None)
    path = tmp_path / "ops.json"
    path.write_text(oplist.dump_list([], [call]))
    opjit.precompile(recorded=path, extensions=True)
    assert opjit.check_precompiled(path, extensions=True) == 1
    (tmp_path / "seven.cpp").write_text("// changed\n")
    assert "seven for " in refused(path, extensions=True)


def test_a_prolog_and_a_server_start_only_if_all_is_there(listed: Path, here: Path) -> None:
    def prolog() -> subprocess.CompletedProcess[str]:
        tools = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        return subprocess.run(
            ["/bin/sh", CLUSTER / "prolog.sh", listed, here],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PATH": tools},
        )

    served = ("-m", "json.tool", "--help")
    assert prolog().stdout == f"all 2 entries of {listed} are there\n"
    assert helpers.script(CLUSTER / "serve.py", listed, *served).stdout.startswith("usage:")
    shutil.rmtree(entries(here)[0])
    assert prolog().returncode == 1
    done = helpers.script(CLUSTER / "serve.py", listed, *served)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"not serving: {listed} is not ready")


@pytest.mark.parametrize("name", ["prolog.sh", "pod.yml", "serve.py", "warm.yml"])
def test_each_file_is_short_and_its_commands_are_opjit_s(name: str) -> None:
    text = (CLUSTER / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) < 50
    for command in re.findall(r"opjit (precompile [^|#\n]+)", text):
        words = shlex.split(command)[1:]
        cli.main.commands["precompile"].make_context("precompile", words)
