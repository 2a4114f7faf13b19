"""An entry as one string of bytes: it arrives as it was sent, or not at all."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opjit.errors import EntryError
from opjit.store import bundle
from opjit.store.entry import Entry
from opjit.store.store import Store
from tests import helpers


@pytest.fixture
def entry(built_once: tuple[Path, Entry]) -> Entry:
    return built_once[1]


def _place(root: Store, entry: Entry) -> Path:
    return root.base.joinpath(*entry.folder.parts[-3:])


@pytest.mark.parametrize("keep", [0, 10, 20, 200, -1])
def test_a_bundle_that_was_cut_off_is_refused_and_nothing_is_left(
    entry: Entry, tmp_path: Path, keep: int
) -> None:
    root = Store(tmp_path)
    with pytest.raises(EntryError):
        root.receive(
            bundle.parse_bundle(bundle.of(entry.folder).dump()[:keep]), _place(root, entry), None
        )
    assert not helpers.entries(root.root)
    assert not root.base.exists() or not list((root.base / "staging").iterdir())


@given(
    st.binary(max_size=300)
    | st.binary(max_size=300).map(lambda rest: b"opjit entry 1\n5 -\n" + rest)
)
def test_no_bytes_make_the_reader_raise_anything_else(content: bytes) -> None:
    try:
        parsed = bundle.parse_bundle(content)
    except EntryError:
        return
    assert parsed.dump() == content
