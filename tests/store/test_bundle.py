"""An entry as one string of bytes: it arrives as it was sent, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opjit.backends import targets
from opjit.errors import EntryError
from opjit.store import bundle
from opjit.store.entry import Entry, read
from opjit.store.store import Store
from tests import helpers


@pytest.fixture
def entry(built_once: tuple[Path, Entry]) -> Entry:
    return built_once[1]


def _place(root: Store, entry: Entry) -> Path:
    return root.base.joinpath(*entry.folder.parts[-3:])


def test_an_entry_arrives_in_another_store_as_it_was(entry: Entry, tmp_path: Path) -> None:
    sent = bundle.parse(bundle.of(entry.folder).dump())
    root = Store(tmp_path)
    arrived = root.receive(sent, _place(root, entry), targets.here(helpers.cpu()))
    assert arrived.library.read_bytes() == entry.library.read_bytes()
    assert sorted(path.name for path in arrived.folder.iterdir()) == sorted([entry.library.name, "manifest.json"])
    assert not list((root.base / "staging").iterdir())


def test_a_signature_travels_with_it(entry: Entry) -> None:
    signed = bundle.of(entry.folder)._replace(signature=bytes(range(64)))
    assert bundle.parse(signed.dump()) == signed


@pytest.mark.parametrize("keep", [0, 10, 20, 200, -1])
def test_a_bundle_that_was_cut_off_is_refused_and_nothing_is_left(entry: Entry, tmp_path: Path, keep: int) -> None:
    root = Store(tmp_path)
    with pytest.raises(EntryError):
        root.receive(bundle.parse(bundle.of(entry.folder).dump()[:keep]), _place(root, entry), None)
    assert not helpers.entries(root.root)
    assert not root.base.exists() or not list((root.base / "staging").iterdir())


def test_a_bundle_of_another_key_is_refused(entry: Entry, tmp_path: Path) -> None:
    root = Store(tmp_path)
    with pytest.raises(EntryError, match="another key"):
        root.receive(bundle.of(entry.folder), _place(root, entry).with_name("0" * 64), None)
    assert not helpers.entries(root.root)


@given(st.binary(max_size=300) | st.binary(max_size=300).map(lambda rest: b"opjit entry 1\n5 -\n" + rest))
def test_no_bytes_make_the_reader_raise_anything_else(content: bytes) -> None:
    try:
        parsed = bundle.parse(content)
    except EntryError:
        return
    assert parsed.dump() == content


def test_the_reader_trusts_no_length(entry: Entry) -> None:
    described, library, _ = read(entry.folder)
    for length in ("99999999", "0", "-5", "1e3"):
        with pytest.raises(EntryError):
            bundle.parse(f"opjit entry 1\n{length} -\n".encode() + described.dump() + library)
