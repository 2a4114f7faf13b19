"""Builds whose store fails; see also request/test_places.py and request/test_concurrency.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from opjit.builder import build
from opjit.errors import BuildError
from opjit.store.store import Store
from tests.helpers import caught, describe


def refuse(self: Store, *arguments: object) -> None:
    raise OSError("no room")


def test_a_binary_that_the_store_does_not_take_is_the_process_s(op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "put", refuse)
    found = caught(op, tmp_path)
    assert not found.entry.folder.is_relative_to(tmp_path)
    assert "for this process only: no room" in found.warnings[0]


def test_a_binary_that_must_be_in_the_store_goes_nowhere_else(op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "put", refuse)
    with pytest.raises(BuildError, match="cannot hold it: no room"):
        build.build(describe(op), Store(tmp_path), must_store=True)
