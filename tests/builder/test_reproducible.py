"""The same inputs make the same bytes: in any folder, from any place, under any settings, for any user."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from opjit import cache, manifest
from opjit.cli import main
from opjit.recipe import document_key
from opjit.store import Store
from tests import helpers
from tests.helpers import SOMEBODY, as_root, built, cuda_target, fresh, write_op

CODE = """\
import hashlib, sys
from pathlib import Path
from tests import helpers
folder, cache, arch = sys.argv[1:]
target = helpers.cuda_target(arch) if arch else None
entry = helpers.built(Path(folder), Path(cache), target)
print(entry.key, hashlib.sha256(entry.library.read_bytes()).hexdigest())
"""


def elsewhere(folder: Path, cache: Path, arch: str, changes: dict[str, str | None], *before: str, cwd: Path, mask: int = 0o022) -> str:
    """Key and digest of a build in another process."""
    done = subprocess.run([*before, sys.executable, "-c", CODE, str(folder), str(cache), arch], env=helpers.environment(changes), cwd=cwd,
                          umask=mask, text=True, capture_output=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("arch", ["", pytest.param("sm_90", marks=pytest.mark.nvcc)], ids=["cpu", "cuda"])
def test_another_folder_home_place_mask_and_order_of_the_environment_make_the_same_bytes(tmp_path: Path, arch: str) -> None:
    here = built(write_op(tmp_path / "plus"), tmp_path / "cache", cuda_target(arch) if arch else None)
    expected = f"{here.key} {hashlib.sha256(here.library.read_bytes()).hexdigest()}"
    for name, mask in (("a much longer name of a folder with blanks", 0o077), ("b", 0o000)):
        far = tmp_path / name
        (far / "tmp").mkdir(parents=True)
        folder = write_op(far / "deeper" / "still" / "plus")
        for path in folder.iterdir():
            os.utime(path, (1, 1))
        changes: dict[str, str | None] = {
            "HOME": str(far), "TMPDIR": str(far / "tmp"), "USER": name, "LANG": "de_DE.UTF-8", "TZ": "Asia/Tokyo", "SOURCE_DATE_EPOCH": "1",
            "COLUMNS": "40", "CFLAGS": "-O0", "LDFLAGS": "-Wl,--build-id",
        }
        assert elsewhere(folder, far / "cache", arch, changes, cwd=far, mask=mask) == expected


@as_root
@pytest.mark.parametrize("arch", ["", pytest.param("sm_90", marks=pytest.mark.nvcc)], ids=["cpu", "cuda"])
def test_another_user_makes_the_same_bytes(tmp_path: Path, somebodys: Path, arch: str) -> None:
    here = built(write_op(tmp_path / "plus"), tmp_path / "cache", cuda_target(arch) if arch else None)
    folder = write_op(somebodys / "plus")
    for path in somebodys.rglob("*"):
        os.chown(path, SOMEBODY, SOMEBODY)
    switch = ("setpriv", f"--reuid={SOMEBODY}", f"--regid={SOMEBODY}", "--clear-groups")
    if shutil.which("setpriv") is None or subprocess.run([*switch, sys.executable, "-c", "import torch, pytest"], check=False,
                                                         capture_output=True).returncode != 0:
        pytest.skip("no setpriv, or a Python that other users cannot run")
    changes: dict[str, str | None] = {"HOME": str(somebodys), "TMPDIR": str(somebodys), "PYTHONDONTWRITEBYTECODE": "1"}
    told = elsewhere(folder, somebodys / "cache", arch, changes, *switch, cwd=somebodys)
    assert told == f"{here.key} {hashlib.sha256(here.library.read_bytes()).hexdigest()}"
    (entry,) = helpers.entries(somebodys / "cache")
    assert entry.stat().st_uid == SOMEBODY


def command(op: Path, *arguments: str) -> Result:
    """`opjit cache …`, where the op is declared."""
    from opjit import catalog

    catalog.declare_folder(op)
    return CliRunner().invoke(main, ["cache", *arguments])


def test_verify_builds_again_what_a_declared_op_would_have_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, op = tmp_path / "cache", write_op(tmp_path / "plus")
    monkeypatch.setenv("OPJIT_CACHE", str(root))
    entry = built(op, root)
    before = helpers.snapshot(root)
    result = command(op, "verify", "--rebuild")
    assert (result.exit_code, result.output) == (0, "1 entry: 1 the same when built again\n")
    assert helpers.snapshot(root) == before

    content = bytearray(entry.library.read_bytes())  # somebody's own build: in itself it is in order
    at = content.index(b"plus takes float32")
    content[at:at + 4] = b"PLUS"
    described = manifest.parse((entry.folder / manifest.NAME).read_bytes())
    entry.library.unlink()
    entry.library.write_bytes(content)
    (entry.folder / manifest.NAME).write_bytes(described._replace(sha256=hashlib.sha256(content).hexdigest()).dump())
    assert command(op, "verify").exit_code == 0
    result = command(op, "verify", "--rebuild")
    assert result.exit_code == 1
    assert result.output.startswith("different when built again: keytest::plus")
    assert [finding.verdict for finding in cache.verify(rebuild=True)] == ["different when built again"]

    (op / "amount.h").write_text("#define AMOUNT 6.0f\n")
    result = command(op, "verify", "--rebuild")
    assert result.exit_code == 0
    assert result.output.startswith("not rebuilt: keytest::plus")
    assert result.output.endswith("1 entry: 1 good, not rebuilt\n")


@pytest.mark.nvcc
def test_verify_builds_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    op = write_op(tmp_path / "plus")
    built(op, tmp_path / "cache", cuda_target("sm_90"))
    code = helpers.declare(op) + "print([finding.verdict for finding in opjit.cache.verify(rebuild=True)])\n"
    assert fresh(code, {"OPJIT_CACHE": str(tmp_path / "cache")}).stdout == "['the same when built again']\n"


def test_an_entry_of_an_op_that_nobody_declares_is_not_rebuilt(tmp_path: Path) -> None:
    op = write_op(tmp_path / "plus")
    entry = built(op, tmp_path / "cache")
    described = manifest.parse((entry.folder / manifest.NAME).read_bytes())
    document = {**described.document, "schema": "nobodys::plus(Tensor x) -> Tensor"}
    folder = Store(tmp_path / "cache").base / "nobodys.plus" / entry.folder.parent.name / document_key(document)
    folder.parent.mkdir(parents=True)
    entry.folder.rename(folder)
    folder.parents[1].chmod(0o700)
    (folder / manifest.NAME).write_bytes(described._replace(document=document, key=folder.name).dump())
    code = "import opjit\n[found] = opjit.cache.verify(rebuild=True)\nprint(found.verdict, '|', found.reason)\n"
    assert fresh(code, {"OPJIT_CACHE": str(tmp_path / "cache")}).stdout == "good | no op of that name is declared here\n"
