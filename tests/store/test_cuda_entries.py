"""Entries for GPUs: each arch's own, and none for another CUDA runtime."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from opjit.errors import CacheWarning, EntryError
from opjit.store import manifest
from opjit.store.entry import Entry, verify
from opjit.store.store import Store
from tests import helpers
from tests.helpers import built, copy_cache, describe, write_op


@pytest.fixture(scope="module")
def cuda_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Entry]]:
    """An op and its entries for two GPUs, in one cache."""
    folder = write_op(tmp_path_factory.mktemp("cuda") / "plus")
    return folder, [built(folder, folder.parent / "cache", helpers.cuda_target(arch)) for arch in ("sm_80", "sm_90")]


@pytest.mark.slow
@pytest.mark.nvcc
def test_a_library_that_asks_for_another_cuda_runtime_is_refused_before_it_is_opened(cuda_once: tuple[Path, list[Entry]],
                                                                                     here: Path) -> None:
    target = helpers.cuda_target("sm_90")
    entry = copy_cache(cuda_once[1][1], here)
    major = int(target.runtime.removeprefix("cuda"))
    ours, other = (f"libcudart.so.{number}\0".encode() for number in (major, major - 1))
    content = entry.library.read_bytes().replace(ours, other)
    described = manifest.parse((entry.folder / manifest.NAME).read_bytes())._replace(sha256=hashlib.sha256(content).hexdigest())
    for name, text in ((entry.library.name, content), (manifest.NAME, described.dump())):
        (entry.folder / name).unlink()
        (entry.folder / name).write_bytes(text)
    with pytest.raises(EntryError, match=r"needs libcudart\.so\.\d+"):
        verify(entry.folder, target)
    with pytest.warns(CacheWarning, match="libcudart"):
        assert Store(here).find(describe(cuda_once[0], target)) is None
