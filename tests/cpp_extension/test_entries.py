"""`opjit why` for a C++ extension."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import opjit
from opjit import loader
from opjit.cli import main
from opjit.cpp_extension import binary
from opjit.cpp_extension.entries import entries
from opjit.errors import CompileError
from opjit.store.store import Store
from tests import helpers


def why(*words: str) -> Result:
    return CliRunner().invoke(main, ["why", *words])


@pytest.mark.torch
def test_each_entry_says_what_it_was_made_from_and_what_changed(here: Path, tmp_path: Path) -> None:
    source = tmp_path / "plain.cpp"
    header = tmp_path / "value.h"
    source.write_text(
        "#define TEXT(name) #name\n#include TEXT(value.h)\nint value() { return VALUE; }\n"
    )
    header.write_text("#define VALUE 1\n")
    paths = []
    for flags in ([], ["-DMORE"]):
        header.write_text(header.read_text() + "//\n")
        paths.append(
            Path(
                str(
                    opjit.load(
                        "extension_why", str(source), extra_cflags=flags, is_python_module=False
                    )
                )
            )
        )
        helpers.date(paths[-1].parent, 1e9 + len(paths))
    newest, oldest = entries("extension_why", Store(here))
    assert [newest.folder, oldest.folder] == [path.parent for path in reversed(paths)]
    assert [tuple(difference) for difference in newest.differences] == [
        ("header", "value.h changed"),
        ("flag", "-DMORE is new"),
    ]
    assert oldest.differences == ()
    text = why("extension_why").output
    assert text.startswith("extension_why, a C++ extension: 2 entries in the cache\n  built ")
    assert "    from plain.cpp; c: -DMORE\n" in text
    assert "    changed since the one before: flag: -DMORE is new\n" in text
    assert why("cpp_extension.extension_why").output == text
    found = json.loads(why("extension_why", "--json").output)
    assert [each["folder"] for each in found] == [str(newest.folder), str(oldest.folder)]
    assert "--device and --arch need an op" in why("extension_why", "--device", "cpu").output


def test_an_extension_that_is_not_in_the_cache_is_named(here: Path) -> None:
    assert (
        f"no entry of a C++ extension 'absent' in the cache {here}"
        in why("cpp_extension.absent").output
    )
    assert "no op named 'opjit::absent' is declared" in why("absent").output


def test_a_build_that_failed_after_the_entries_is_found_by_name(here: Path, tmp_path: Path) -> None:
    source = tmp_path / "late.cpp"
    source.write_text("int value() { return one; }\n")
    with pytest.raises(CompileError) as error:
        opjit.load("why_failed", str(source), is_python_module=False)
    for name in ("why_failed", "cpp_extension.why_failed"):
        assert (
            why(name).output
            == f"why_failed, a C++ extension: the last build failed just now; full output: {error.value.log}\n"
        )
    assert json.loads(why("why_failed", "--json").output) == [{"failed": str(error.value.log)}]
    source.write_text("int value() { return 1; }\n")
    opjit.load("why_failed", str(source), is_python_module=False)
    assert why("why_failed").output.startswith(
        "why_failed, a C++ extension: 1 entry in the cache\n"
    )


def test_inline_sources_are_sources(here: Path) -> None:
    for number in (1, 2):
        path = opjit.load_inline(
            "inline_why",
            f"int value() {{ return {number}; }}",
            is_python_module=False,
            no_implicit_headers=True,
        )
        helpers.date(Path(str(path)).parent, 1e9 + number)
    newest, _ = entries("inline_why", Store(here))
    assert [tuple(difference) for difference in newest.differences] == [
        ("source", "cpp_sources changed")
    ]
    assert "from 1 cpp_sources; no flags" in str(newest)


def test_a_library_that_was_replaced_after_its_verification_is_not_delivered(
    op: Path, tmp_path: Path
) -> None:
    entry = helpers.built(op, tmp_path / "cache")
    entry.library.write_bytes(b"another")
    with pytest.raises(loader.Gone, match="was replaced after it was verified"):
        binary.copy_library(entry, tmp_path / "late.so")
    assert not (tmp_path / "late.so").exists()
