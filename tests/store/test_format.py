"""FORMAT.md says what the code does: its example parses and has the key that it names, and its tables name every field and limit."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opjit.cpp_extension.identity import Extension
from opjit.errors import EntryError
from opjit.recipe.document import FORMAT, base_key, document_key
from opjit.recipe.reads import Places
from opjit.share import remote
from opjit.store import bundle, manifest, store
from opjit.store.bundle import Bundle
from opjit.store.manifest import Manifest
from tests.helpers import describe

SPEC = Path(store.__file__).with_name("FORMAT.md").read_text(encoding="utf-8")
LIBRARY = b"\x7fELF"


def example(name: str) -> str:
    """The block of code below a marker."""
    found = re.search(rf"<!-- example: {re.escape(name)} -->\n```\w*\n(.*?)```", SPEC, re.DOTALL)
    assert found is not None
    return found[1]


def first_column(heading: str) -> list[str]:
    """The names in the first column of the table below a heading."""
    section = SPEC.partition(f"{heading}\n")[2].partition("\n#")[0]
    return [
        name
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", row)
    ]


def canonical(value: Any) -> str:
    """Section 4, written down again."""
    if isinstance(value, dict):
        return (
            "{"
            + ",".join(f"{canonical(name)}:{canonical(value[name])}" for name in sorted(value))
            + "}"
        )
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, str):
        units = value.encode("utf-16-be", "surrogatepass")
        return (
            '"'
            + "".join(
                character(int.from_bytes(units[i : i + 2], "big")) for i in range(0, len(units), 2)
            )
            + '"'
        )
    return (
        {None: "null", True: "true", False: "false"}[value]
        if value is None or isinstance(value, bool)
        else str(int(value))
    )


def character(unit: int) -> str:
    short = {
        0x22: '\\"',
        0x5C: "\\\\",
        0x08: "\\b",
        0x09: "\\t",
        0x0A: "\\n",
        0x0C: "\\f",
        0x0D: "\\r",
    }
    return short.get(unit) or (chr(unit) if 0x20 <= unit <= 0x7E else f"\\u{unit:04x}")


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def test_the_example_is_what_a_writer_writes_and_has_the_keys_that_it_names() -> None:
    text = example("manifest.json").encode("ascii")
    described = manifest.parse(text)
    assert described.dump() == text
    assert (described.size, described.sha256) == (len(LIBRARY), hashlib.sha256(LIBRARY).hexdigest())
    key, base = example("keys").split()
    assert (
        described.key
        == document_key(described.document)
        == sha256(canonical(described.document))
        == key
    )
    assert (
        base_key(described.document)
        == sha256(
            canonical(
                {
                    **described.document,
                    "toolchain": None,
                    "inputs": {},
                    "absent": {},
                }
            )
        )
        == base
    )


def test_the_example_s_bundle_starts_as_it_says() -> None:
    text = example("manifest.json").encode("ascii")
    sent = Bundle(text, LIBRARY).dump()
    assert sent.startswith(example("bundle").encode("ascii"))
    assert bundle.parse_bundle(sent) == Bundle(text, LIBRARY)
    assert (f"{len(sent):,} bytes" in SPEC, f"{len(text):,} bytes" in SPEC) == (True, True)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"b": [1, True, False, None], "a": {"z": -7}},
        {"é": '\u007f \x1f\\"\n\t\b\f\r/'},
        {"\uffff": 1, "\U0001f600": "\U0001f600"},
        {"path": "\udcff"},
    ],
)
def test_canonical_json_is_as_section_4_describes_it(document: dict[str, Any]) -> None:
    assert document_key(document) == sha256(canonical(document))


def test_the_tables_name_every_field(tmp_path: Path) -> None:
    assert set(first_column("## 3. manifest.json")) == set(json.loads(example("manifest.json")))
    assert set(first_column("## 3. manifest.json")) == {"format", *Manifest._fields}
    folder = tmp_path / "plus"
    folder.mkdir()
    (folder / "plus.c").touch()
    assert first_column("### An op") == list(describe(folder).document())
    extension = Extension(
        "name", (), {}, Places("/"), {}, None, "", {}, (), {}, None, light="0" * 16
    )
    stable = replace(extension, stable="2.13")
    assert sorted(first_column("### A C++ extension")) == sorted(
        {**extension.document(), **stable.document()}
    )


def test_it_names_the_limits_and_versions_of_the_code() -> None:
    assert f"{manifest.MAX_BYTES:,} bytes" in SPEC
    assert f"at most {remote.MAX_BYTES >> 20} MiB" in SPEC
    assert f"| `format`, in manifest and document | {FORMAT} |" in SPEC
    assert f"| directory `{store.VERSION}` | {store.VERSION[1:]} |" in SPEC
    never = re.search(r"^- (.*) never hold entries", SPEC, re.MULTILINE)
    assert never is not None
    assert set(re.findall(r"`(\w+)`", never[1])) == store.SPECIAL


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("a" * 251, True),
        ("a" * 252, False),
        ("_.so", True),
        (".so", False),
        ("a/b", False),
        ("a-b", False),
        ("é", False),
        ("", False),
    ],
)
def test_a_library_s_name_is_one_of_the_pattern(name: str, taken: bool) -> None:
    pattern = re.search(r"file name: `([^`]+)`", SPEC)
    assert pattern is not None
    text = json.dumps({**json.loads(example("manifest.json")), "library": name}).encode("ascii")
    assert bool(re.fullmatch(pattern[1], name)) is taken
    if taken:
        assert manifest.parse(text).library == name
    else:
        with pytest.raises(EntryError, match="library"):
            manifest.parse(text)
