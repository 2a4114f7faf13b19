"""Builds whose store fails; see also request/test_places.py and request/test_concurrency.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opjit.builder import build
from opjit.errors import BuildError
from opjit.store.entry import Entry
from opjit.store.store import Store
from tests.helpers import caught, describe

PUT = Store.put


@pytest.fixture(autouse=True)
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store takes nothing."""
    def put(self: Store, *arguments: Any) -> Entry:
        if self.root == tmp_path:
            raise OSError("no room")
        return PUT(self, *arguments)

    monkeypatch.setattr(Store, "put", put)


def test_a_binary_that_the_store_does_not_take_is_the_process_s(op: Path, tmp_path: Path) -> None:
    found = caught(op, tmp_path)
    assert not found.entry.folder.is_relative_to(tmp_path)
    assert "for this process only: no room" in found.warnings[0]


def test_a_binary_that_must_be_in_the_store_goes_nowhere_else(op: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="cannot hold it: no room"):
        build.build(describe(op), Store(tmp_path), must_store=True)
