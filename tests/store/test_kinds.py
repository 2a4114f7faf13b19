"""Kinds of files in place of a cache's: each is replaced, and the op works; nothing blocks, and nothing endless is read."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from opjit import cache
from opjit.store.entry import Entry
from tests import helpers
from tests.helpers import as_root, caught


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
def test_an_op_is_built_whatever_took_the_place_of_a_file(entry: Entry, op: Path, tmp_path: Path, kind: Callable[[Path], object]) -> None:
    root = tmp_path / "cache"
    replaced = [path for path in sorted(root.rglob("*")) if path.is_file() and path.suffix in (".so", ".o", ".json")]
    assert {path.name for path in replaced} >= {"manifest.json", "parts.json", "opjit_runtime.o", "libtorch_cpu.so", "keytest.plus.so"}
    for path in replaced:
        path.unlink()
        kind(path)
    found = caught(op, root)
    assert found.entry.folder.is_relative_to(root)
    assert caught(op, root) == helpers.Caught(found.entry, []), "the second request is a silent hit"


@pytest.mark.parametrize("kind", ["pipe", "20 GB", "folder", "link"])
def test_verify_names_what_took_the_place_of_a_file_and_does_not_wait_for_it(entry: Entry, tmp_path: Path, kind: str) -> None:
    for name in ("manifest.json", "keytest.plus.so"):
        shutil.move(entry.folder / name, tmp_path / name)
        KINDS[kind](entry.folder / name)
        (finding,) = cache.verify()
        assert finding.verdict == "bad", finding
        os.rmdir(entry.folder / name) if kind == "folder" else (entry.folder / name).unlink()
        shutil.move(tmp_path / name, entry.folder / name)


@as_root
@pytest.mark.parametrize("linked", ["v1", "v1/toolchain"])
def test_root_writes_nothing_through_a_link_in_a_cache_of_somebody_else(op: Path, somebodys: Path, tmp_path: Path, linked: str) -> None:
    """Neither notes on compilers nor counters nor parts."""
    root, target = somebodys / "cache", tmp_path / "target"
    target.mkdir()
    (root / linked).parent.mkdir(parents=True)
    (root / linked).symlink_to(target)
    subprocess.run(["chown", "-Rh", f"{helpers.SOMEBODY}", root], check=True)
    code = helpers.declare(op) + "warnings.simplefilter('ignore')\nopjit.get('keytest::plus', 'cpu')\n"
    helpers.fresh(code, {"OPJIT_CACHE": str(root)})
    assert list(target.iterdir()) == []
    assert [path for path in root.rglob("*") if path.lstat().st_uid == 0] == []
