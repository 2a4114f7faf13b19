"""Files of the cache that are damaged, in use, or left by a builder that was killed: what is loaded is whole, or built again."""

import errno
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opjit import cache, files
from opjit.errors import CacheWarning, EntryError
from opjit.store import manifest, prune
from opjit.store.entry import Entry, verify
from opjit.store.store import Store
from tests import helpers
from tests.helpers import as_root, built, caught, describe, process, tmpfs


@as_root
def test_a_disk_that_is_full_when_the_manifest_is_written_costs_a_warning(
    op: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = files.write_synced

    def write(path: Path, content: bytes) -> None:
        if path.name == manifest.NAME and path.is_relative_to(here):
            subprocess.run(
                ["dd", "if=/dev/zero", f"of={here}/filler", "bs=4k"],
                check=False,
                stderr=subprocess.DEVNULL,
            )
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
        assert not list((here / "v2").glob("keytest.plus/*/*"))


def refuse_rmdir(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def rmdir(path: Any, *, dir_fd: int | None = None) -> None:
        raise OSError(code, os.strerror(code), os.fspath(path))

    monkeypatch.setattr(os, "rmdir", rmdir)


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ENOTEMPTY], ids=["EBUSY", "ENOTEMPTY"])
def test_a_staging_folder_that_is_busy_costs_nothing(
    op: Path, here: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with monkeypatch.context() as patched:
        refuse_rmdir(patched, code)
        first = caught(op, here)
    assert first.warnings == []
    assert caught(op, here) == first
    (left,) = (here / "v2" / "staging").iterdir()
    os.utime(left, (1, 1))
    (op / "amount.h").write_text("#define AMOUNT 2.0f\n")
    assert caught(op, here).warnings == []
    assert list((here / "v2" / "staging").iterdir()) == [], (
        "it is swept later, and the folder above it stays"
    )
    assert len(helpers.entries(here)) == 2


def test_a_staging_folder_that_may_not_be_removed_is_told_of(
    op: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        refuse_rmdir(patched, errno.EACCES)
        first = caught(op, here)
    assert len(first.warnings) == 1
    assert "Permission denied" in first.warnings[0]
    assert str(here / "v2" / "staging") in first.warnings[0]
    assert caught(op, here) == helpers.Caught(first.entry, [])


@pytest.mark.parametrize("how", ["damaged", "cleared", "pruned"])
def test_a_rebuild_is_a_new_file_and_who_has_the_old_one_mapped_goes_on(
    op: Path, entry: Entry, here: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(prune, "_FRESH", 0.0)
    code = (
        helpers.declare(op)
        + "import sys\nplus = opjit.get('keytest::plus', 'cpu')\n"
        + (
            "for line in sys.stdin: print(plus(torch.full((3,), float(line))).tolist(), flush=True)\n"
        )
    )
    with process(code) as user:

        def ask(number: float) -> str:
            user.send(str(number))
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


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(20 << 30)


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "link": lambda path: path.symlink_to("/dev/zero"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "20 GB": _sparse,
    "nothing": lambda path: None,
    "an empty file": Path.touch,
    "deep JSON": lambda path: path.write_text("[" * 100_000),
    "text": lambda path: path.write_text('{"stamp": []}'),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_an_op_is_built_whatever_took_the_place_of_a_file(
    entry: Entry, op: Path, tmp_path: Path, kind: Callable[[Path], object]
) -> None:
    root = tmp_path / "cache"
    replaced = [
        path
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.suffix in (".so", ".o", ".json")
    ]
    assert {path.name for path in replaced} >= {
        "manifest.json",
        "parts.json",
        "opjit_runtime.o",
        "libtorch_cpu.so",
        "keytest.plus.so",
    }
    for path in replaced:
        path.unlink()
        kind(path)
    found = caught(op, root)
    assert found.entry.folder.is_relative_to(root)
    assert caught(op, root) == helpers.Caught(found.entry, []), "the second request is a silent hit"


@pytest.mark.parametrize("kind", ["pipe", "20 GB", "folder", "link"])
def test_verify_names_what_took_the_place_of_a_file_and_does_not_wait_for_it(
    entry: Entry, tmp_path: Path, kind: str
) -> None:
    for name in ("manifest.json", "keytest.plus.so"):
        shutil.move(entry.folder / name, tmp_path / name)
        KINDS[kind](entry.folder / name)
        (finding,) = cache.verify()
        assert finding.verdict == "bad", finding
        os.rmdir(entry.folder / name) if kind == "folder" else (entry.folder / name).unlink()
        shutil.move(tmp_path / name, entry.folder / name)


@as_root
@pytest.mark.parametrize("linked", ["v2", "v2/toolchain"])
def test_root_writes_nothing_through_a_link_in_a_cache_of_somebody_else(
    op: Path, somebodys: Path, tmp_path: Path, linked: str
) -> None:
    """Neither notes on compilers nor counters nor parts."""
    root = somebodys / "cache"
    target = tmp_path / "target"
    target.mkdir()
    (root / linked).parent.mkdir(parents=True)
    (root / linked).symlink_to(target)
    subprocess.run(["chown", "-Rh", f"{helpers.SOMEBODY}", root], check=True)
    code = (
        helpers.declare(op) + "warnings.simplefilter('ignore')\nopjit.get('keytest::plus', 'cpu')\n"
    )
    helpers.fresh(code, {"OPJIT_CACHE": str(root)})
    assert list(target.iterdir()) == []
    assert [path for path in root.rglob("*") if path.lstat().st_uid == 0] == []


@pytest.mark.slow
@pytest.mark.nvcc
def test_a_library_that_asks_for_another_cuda_runtime_is_refused_before_it_is_opened(
    op: Path, here: Path
) -> None:
    target = helpers.cuda_target("sm_90")
    entry = built(op, here, target)
    major = int(target.runtime.removeprefix("cuda"))
    ours, other = (f"libcudart.so.{number}\0".encode() for number in (major, major - 1))
    content = entry.library.read_bytes().replace(ours, other)
    described = manifest.parse((entry.folder / manifest.NAME).read_bytes())._replace(
        sha256=hashlib.sha256(content).hexdigest()
    )
    for name, text in ((entry.library.name, content), (manifest.NAME, described.dump())):
        (entry.folder / name).unlink()
        (entry.folder / name).write_bytes(text)
    with pytest.raises(EntryError, match=r"needs libcudart\.so\.\d+"):
        verify(entry.folder, target)
    with pytest.warns(CacheWarning, match="libcudart"):
        assert helpers.found(Store(here), describe(op, target)) is None
