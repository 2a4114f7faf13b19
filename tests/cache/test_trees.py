"""Trees: a program starts from the caches in a signed file, or from nothing in it."""

import json
import os
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from opjit import files
from opjit.cache import trees
from opjit.errors import EntryError, RemoteError
from opjit.share import trust
from opjit.store.bundle import Bundle, parse_bundle
from tests import helpers
from tests.helpers import SOMEBODY, as_root, cache_command, open_to_group, refused, tmpfs

VARIABLES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


class Packed(NamedTuple):
    """A tree, its signer's private key, and the files of its directories by their paths in it."""

    tree: Path
    key: Path
    contents: dict[str, bytes]


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packed:
    """A tree of two directories, whose signer is trusted; the directories are gone."""
    key, public = trust.keygen("ci", tmp_path / "keys")
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OPJIT_TRUST", public)
    generator = random.Random(1)
    contents = {
        f"{variable}/K{number}/{name}": generator.randbytes(300)
        for variable in VARIABLES
        for number in range(3)
        for name in ("kernel.cubin", "lib.so")
    }
    contents["TRITON_CACHE_DIR/empty.lock"] = b""
    for path, content in contents.items():
        place = tmp_path / "built" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    roots = {variable: tmp_path / "built" / variable for variable in VARIABLES}
    report = trees.pack_tree(tmp_path / "tree", roots, key)
    assert (sorted(report.moved), report.problems) == (sorted(contents), [])
    (tmp_path / "built").rename(tmp_path / "elsewhere")
    return Packed(tmp_path / "tree", key, contents)


def copied(variables: dict[str, str]) -> dict[str, bytes]:
    """The files of the directories to which variables lead."""
    return {
        f"{variable}/{place.relative_to(root)}": place.read_bytes()
        for variable, root in variables.items()
        for place in Path(root).rglob("*")
        if place.is_file()
    }


def signed(packed: Packed, roots: object, listed: object, payload: bytes = b"x") -> Path:
    """Write a tree with any manifest, signed by the trusted key."""
    manifest = json.dumps({"format": 1, "roots": roots, "files": listed}).encode()
    packed.tree.write_bytes(trust.signer(packed.key)(Bundle(manifest, payload)).dump())
    return packed.tree


def file(path: str, **changed: object) -> dict[str, Any]:
    """A file with the content ``x`` in a tree's manifest."""
    plain = {"size": 1, "sha256": files.sha256("x"), "modified": 0, "runs": False}
    return {"path": path, **plain, "has_paths": False, **changed}


def test_the_copy_has_the_files_and_nothing_else(packed: Packed) -> None:
    variables = trees.open_tree(packed.tree)
    assert tuple(variables) == VARIABLES
    assert copied(variables) == packed.contents
    for root in variables.values():
        assert files.replacement_risk(Path(root)) is None


def test_the_second_start_reads_and_writes_nothing_but_the_manifest(
    packed: Packed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variables = trees.open_tree(packed.tree)
    before = helpers.snapshot(tmp_path / "cache")
    monkeypatch.delattr(files, "write_whole")
    content = packed.tree.read_bytes()
    payload = parse_bundle(content).library
    packed.tree.write_bytes(content[: -len(payload)] + bytes(len(payload)))
    assert trees.open_tree(packed.tree) == variables
    assert helpers.snapshot(tmp_path / "cache") == before


@pytest.mark.slow
def test_no_flipped_byte_of_a_tree_reaches_a_program(packed: Packed, tmp_path: Path) -> None:
    good = packed.tree.read_bytes()
    generator = random.Random(2)
    for number in range(1000):
        damaged = bytearray(good)
        damaged[generator.randrange(len(good))] ^= 1 << generator.randrange(8)
        packed.tree.write_bytes(damaged)
        with pytest.raises(RemoteError):
            trees.open_tree(packed.tree)
        if number % 100 == 0:
            wrong = {
                place
                for place in (tmp_path / "cache").rglob("*.*")
                if place.read_bytes() not in packed.contents.values()
            }
            assert wrong == set()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.9, 0.999])
def test_a_tree_that_was_cut_off_is_refused_and_the_whole_one_is_used_then(
    packed: Packed, share: float
) -> None:
    good = packed.tree.read_bytes()
    packed.tree.write_bytes(good[: int(len(good) * share)])
    with pytest.raises(RemoteError, match="is not used"):
        trees.open_tree(packed.tree)
    packed.tree.write_bytes(good)
    assert copied(trees.open_tree(packed.tree)) == packed.contents


def test_only_a_tree_of_a_trusted_signer_is_opened(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, other = trust.keygen("other", tmp_path / "keys")
    monkeypatch.setenv("OPJIT_TRUST", other)
    with pytest.raises(RemoteError, match="no key in OPJIT_TRUST made its signature"):
        trees.open_tree(packed.tree)
    monkeypatch.delenv("OPJIT_TRUST")
    with pytest.raises(RemoteError, match="set OPJIT_TRUST"):
        trees.open_tree(packed.tree)
    assert not (tmp_path / "cache").exists()


def test_an_unsigned_tree_needs_the_word_unsigned(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees.pack_tree(tmp_path / "tree", {"A": tmp_path / "elsewhere" / VARIABLES[0]}, None)
    with pytest.raises(RemoteError, match="it is not signed"):
        trees.open_tree(packed.tree)
    monkeypatch.setenv("OPJIT_TRUST", "unsigned")
    monkeypatch.setattr(trust, "_warned", {"unsigned"})
    assert list(trees.open_tree(packed.tree)) == ["A"]


def test_a_tree_is_not_an_entry_and_an_entry_is_not_a_tree(packed: Packed) -> None:
    trusted = trust.required()
    with pytest.raises(EntryError):
        trusted.opened(packed.tree.read_bytes())
    entry = trust.signer(packed.key)(Bundle(b'{"format": 5}', b"library")).dump()
    packed.tree.write_bytes(entry)
    with pytest.raises(RemoteError, match="expected a file from `opjit cache pack --tree`"):
        trees.open_tree(packed.tree)


@pytest.mark.parametrize(
    ("roots", "listed"),
    [
        ({"A": "/a"}, [file("A/../../x")]),
        ({"A": "/a"}, [file("A/./x")]),
        ({"A": "/a"}, [file("A//x")]),
        ({"A": "/a"}, [file("A/x/")]),
        ({"A": "/a"}, [file("A/x\0")]),
        ({"A": "/a"}, [file("B/x")]),
        ({"A": "/a"}, [file("/etc/x")]),
        ({"../A": "/a"}, [file("../A/x")]),
        ({"A/b": "/a"}, [file("A/b")]),
        ({"A": "/a"}, [file("A/x", size="1")]),
        ({"A": "/a"}, [file("A/x", size=-1)]),
        ({"A": "/a"}, [file("A/x", size=2)]),
        ({"A": "/a"}, [file("A/x", sha256="0" * 64)]),
        ({"A": "/a"}, [{"path": "A/x"}]),
        ({"A": 1}, [file("A/x")]),
        ([], {}),
    ],
)
def test_a_wrong_manifest_writes_nothing_though_a_trusted_key_signed_it(
    packed: Packed, tmp_path: Path, roots: object, listed: object
) -> None:
    with pytest.raises(RemoteError, match="is not used"):
        trees.open_tree(signed(packed, roots, listed))
    assert not [place for place in tmp_path.rglob("x*") if place.is_file()]


def test_a_signed_manifest_that_is_right_is_used(packed: Packed) -> None:
    assert copied(trees.open_tree(signed(packed, {"A": "/a"}, [file("A/x")]))) == {"A/x": b"x"}


def test_files_that_changed_in_the_copy_are_written_again_and_what_a_program_added_stays(
    packed: Packed,
) -> None:
    variables = trees.open_tree(packed.tree)
    first, second = (Path(root, "K1", "lib.so") for root in variables.values())
    damaged = bytearray(first.read_bytes())
    damaged[7] ^= 1
    first.write_bytes(damaged)
    second.unlink()
    (first.parent / "new.cubin").write_bytes(b"by the program")
    before = packed.tree.read_bytes()
    assert copied(trees.open_tree(packed.tree)) == {
        **packed.contents,
        "TRITON_CACHE_DIR/K1/new.cubin": b"by the program",
    }
    assert packed.tree.read_bytes() == before


def test_a_start_that_is_killed_is_continued_by_the_next(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = files.write_whole
    left = iter(range(5))

    def write_some(path: Path, content: bytes, synced: bool = True) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        write(path, content, synced)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_whole", write_some)
        with pytest.raises(KeyboardInterrupt):
            trees.open_tree(packed.tree)
    assert copied(trees.open_tree(packed.tree)) == packed.contents


def test_starts_at_once_share_a_copy(packed: Packed) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(trees.open_tree, [packed.tree] * 24))
    assert all(each == found[0] for each in found)
    assert copied(found[0]) == packed.contents


def test_the_time_and_the_permission_of_files_are_kept(packed: Packed, tmp_path: Path) -> None:
    """ninja compares times."""
    built = tmp_path / "program"
    built.mkdir()
    (built / "tool").write_text("#!/bin/sh\n")
    (built / "tool").chmod(0o755)
    os.utime(built / "tool", ns=(1, 1234567890123456789))
    trees.pack_tree(packed.tree, {"TOOLS": built}, packed.key)
    status = Path(trees.open_tree(packed.tree)["TOOLS"], "tool").stat()
    assert (status.st_mtime_ns, status.st_mode & 0o777) == (1234567890123456789, 0o700)


def test_texts_lead_to_the_copy_and_binaries_stay_as_they_are(
    packed: Packed, tmp_path: Path
) -> None:
    """Triton lists the files of a kernel with their absolute paths."""
    root = tmp_path / "moved"
    root.mkdir()
    text = f'{{"a": "{root}/K/a.cubin", "b": "{root}", "c": "{root}2/x", "d": "/x{root}/y"}}'
    binary = f"\0{root}/K\0".encode()
    (root / "group.json").write_text(text)
    (root / "lib.so").write_bytes(binary)
    trees.pack_tree(packed.tree, {"MOVED": root}, packed.key)
    place = trees.open_tree(packed.tree)["MOVED"]
    found = json.loads(Path(place, "group.json").read_text())
    assert found == {
        "a": f"{place}/K/a.cubin",
        "b": place,
        "c": f"{root}2/x",
        "d": f"/x{root}/y",
    }
    assert Path(place, "lib.so").read_bytes() == binary


def test_files_that_others_could_have_written_are_not_packed(
    packed: Packed, tmp_path: Path
) -> None:
    root = tmp_path / "mixed"
    for name in ("good", "open"):
        (root / name).mkdir(parents=True)
        (root / name / "kernel").write_text(name)
    (root / "good" / "link").symlink_to(root / "good" / "kernel")
    open_to_group(root / "open")
    report = trees.pack_tree(packed.tree, {"MIXED": root}, packed.key)
    assert report.moved == ["MIXED/good/kernel"]
    link, folder = sorted(report.problems)
    assert "link is left out: " in link
    assert "open is left out: " in folder


@as_root
def test_a_copy_of_another_user_is_refused(packed: Packed) -> None:
    variables = trees.open_tree(packed.tree)
    os.chown(Path(variables["TRITON_CACHE_DIR"]).parent, SOMEBODY, -1)
    with pytest.raises(RemoteError, match=f"belongs to user {SOMEBODY}"):
        trees.open_tree(packed.tree)


@as_root
def test_a_full_disk_is_an_error_and_no_half_file(packed: Packed, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    with tmpfs(tmp_path / "cache", "size=40k"):
        with pytest.raises(RemoteError, match="No space left"):
            trees.open_tree(packed.tree)
        for place in (tmp_path / "cache").rglob("*.*"):
            assert place.read_bytes() in packed.contents.values()


def test_a_file_that_changes_while_it_is_packed_is_packed_as_it_was_read(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_bytes(b"before")
    described: Callable[..., tuple[trees.PackedFile, bytes]] = trees._described

    def change(place: Path, *others: Any) -> tuple[trees.PackedFile, bytes]:
        found = described(place, *others)
        place.write_bytes(b"changed")
        return found

    monkeypatch.setattr(trees, "_described", change)
    trees.pack_tree(tmp_path / "new", {"A": root}, packed.key)
    opened = trees.open_tree(tmp_path / "new", tmp_path / "copies")
    assert Path(opened["A"], "file").read_bytes() == b"before"
    assert sorted(tmp_path.glob(".*")) == []


@pytest.mark.slow
def test_the_commands_pack_a_tree_and_run_a_program_with_it(packed: Packed, tmp_path: Path) -> None:
    root = tmp_path / "elsewhere" / VARIABLES[0]
    tree = tmp_path / "new.tree"
    done = cache_command(
        "pack", str(tree), "--tree", "MY_CACHE", str(root), "--sign", str(packed.key)
    )
    assert done.output == "packed 7, 0 already there, 0 left out\n"
    program = tmp_path / "program.py"
    program.write_text("import os, sys; print(os.environ['MY_CACHE'], sys.argv[1:])")
    ran = helpers.command("run", "--tree", tree, program, "--tree", "x")
    place, words = ran.stdout.split(maxsplit=1)
    assert (place, words) == (trees.open_tree(tree)["MY_CACHE"], "['--tree', 'x']\n")


def test_wrong_words_are_errors(packed: Packed, tmp_path: Path) -> None:
    tree = tmp_path / "new.tree"
    for words, message in [
        (("--tree", "DIR"), "Option '--tree' requires 2 arguments"),
        (("add", "--tree", "A", str(tmp_path)), "expected OPs or --tree, got both"),
    ]:
        done = cache_command("pack", str(tree), *words)
        assert done.exit_code == 2
        assert message in done.output
    wrong = ("cache", "pack", tree, "--tree", "a", tmp_path)
    assert "expected the name of a variable" in refused(*wrong)
    empty = tmp_path / "nothing"
    assert "expected files in" in refused("cache", "pack", tree, "--tree", "A", empty)
    assert "No such file" in refused("run", "--tree", tree, sys.argv[0])
    assert not tree.exists()
