"""Builds whose store fails; see also request/test_places.py and request/test_concurrency.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from opjit.builder import build
from opjit.errors import BuildError
from opjit.store import usage
from opjit.store.store import Store
from tests.helpers import caught, describe


def refuse(self: Store, *arguments: object) -> None:
    raise OSError("no room")


def test_a_binary_that_the_store_does_not_take_is_counted_once(op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "put", refuse)
    found = caught(op, tmp_path)
    [counts] = usage.of_process(Store(tmp_path).base)
    assert (counts["misses"], counts["builds"], counts["bytes"]) == (1, 1, found.entry.library.stat().st_size)
    assert "for this process only: no room" in found.warnings[0]


def test_a_binary_that_goes_nowhere_is_not_counted(op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "put", refuse)
    with pytest.raises(BuildError, match="cannot hold it: no room"):
        build.build(describe(op), Store(tmp_path), must_store=True)
    assert usage.of_process(Store(tmp_path).base)[0]["builds"] == 0
