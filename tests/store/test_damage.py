"""Files of the cache that are damaged, in use, or left by a builder that was killed: what is loaded is whole, or built again."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from opjit import files
from opjit.store import manifest, prune
from opjit.store.entry import Entry
from opjit.store.store import Store
from tests import helpers
from tests.helpers import as_root, caught, copy_cache, process, tmpfs


@pytest.fixture
def copied(built_once: tuple[Path, Entry], here: Path) -> tuple[Path, Entry]:
    """The op, and a cache of its own that holds the entry already."""
    return built_once[0], copy_cache(built_once[1], here)


@as_root
def test_a_disk_that_is_full_when_the_manifest_is_written_costs_a_warning(op: Path, here: Path, tmp_path: Path,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    plain = files.write_synced

    def write(path: Path, content: bytes) -> None:
        if path.name == manifest.NAME and path.is_relative_to(here):
            subprocess.run(["dd", "if=/dev/zero", f"of={here}/filler", "bs=4k"], check=False, stderr=subprocess.DEVNULL)
            assert os.statvfs(here).f_bavail == 0
        plain(path, content)

    monkeypatch.setattr(files, "write_synced", write)
    here.mkdir(mode=0o700)
    with tmpfs(here, "size=4m"):
        after = caught(op, here)
        assert len(after.warnings) == 1
        assert "No space left on device" in after.warnings[0]
        assert after.entry.folder.is_relative_to(tmp_path / "tmp")
        assert helpers.entries(here) == []
        assert not list((here / "v1").glob("keytest.plus/*/*"))


def refuse_rmdir(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def rmdir(path: Any, *, dir_fd: int | None = None) -> None:
        raise OSError(code, os.strerror(code), os.fspath(path))

    monkeypatch.setattr(os, "rmdir", rmdir)


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ENOTEMPTY], ids=["EBUSY", "ENOTEMPTY"])
def test_a_staging_folder_that_is_busy_costs_nothing(op: Path, here: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    with monkeypatch.context() as patched:
        refuse_rmdir(patched, code)
        first = caught(op, here)
    assert first.warnings == []
    assert caught(op, here) == first
    (left,) = (here / "v1" / "staging").iterdir()
    os.utime(left, (1, 1))
    (op / "amount.h").write_text("#define AMOUNT 2.0f\n")
    assert caught(op, here).warnings == []
    assert list((here / "v1" / "staging").iterdir()) == [], "it is swept later, and the folder above it stays"
    assert len(helpers.entries(here)) == 2


def test_a_staging_folder_that_may_not_be_removed_is_told_of(op: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        refuse_rmdir(patched, errno.EACCES)
        first = caught(op, here)
    assert len(first.warnings) == 1
    assert "Permission denied" in first.warnings[0]
    assert str(here / "v1" / "staging") in first.warnings[0]
    assert caught(op, here) == helpers.Caught(first.entry, [])


@pytest.mark.parametrize("how", ["damaged", "cleared", "pruned"])
def test_a_rebuild_is_a_new_file_and_who_has_the_old_one_mapped_goes_on(copied: tuple[Path, Entry], here: Path,
                                                                        monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    op, entry = copied
    monkeypatch.setattr(prune, "_FRESH", 0.0)
    code = helpers.declare(op) + "import sys\nplus = opjit.get('keytest::plus', 'cpu')\n" + (
        "for line in sys.stdin: print(plus(torch.full((3,), float(line))).tolist(), flush=True)\n")
    with process(code) as user:

        def ask(number: float) -> str:
            assert user.stdin is not None
            user.stdin.write(f"{number}\n")
            user.stdin.flush()
            return user.stdout.readline()

        assert ask(1) == "[2.0, 2.0, 2.0]\n"
        inode = entry.library.stat().st_ino
        if how == "damaged":
            (entry.folder / manifest.NAME).write_text("")
            assert len(caught(op, here).warnings) == 1
        else:
            done = prune.clear(Store(here)) if how == "cleared" else prune.prune(Store(here), 1)
            assert done.removed == 1
            assert caught(op, here).warnings == []
        assert f" {inode} " in Path(f"/proc/{user.pid}/maps").read_text()
        assert entry.library.stat().st_ino != inode
        assert ask(2) == "[3.0, 3.0, 3.0]\n"
