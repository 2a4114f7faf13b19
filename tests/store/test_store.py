"""The store: what may be loaded, what happens to what may not, and that an op works whatever state the cache is in."""

import contextlib
import errno
import json
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from opjit import files, request
from opjit.backends import targets
from opjit.builder import build
from opjit.errors import BuildError, CacheWarning, EntryError
from opjit.store import elf, layers, manifest
from opjit.store.entry import Entry, verify
from opjit.store.store import Store, default_root
from tests import helpers
from tests.helpers import (
    LEVELS,
    SOMEBODY,
    Cases,
    as_root,
    built,
    cache_warnings,
    caught,
    describe,
    fresh,
    mounted,
    tmpfs,
    write_op,
)


def rewrite(path: Path, content: bytes) -> None:
    """Damage a file; a new one, because the old one may be mapped."""
    path.unlink()
    path.write_bytes(content)


def swap_for(path: Path, make: Callable[[Path], None]) -> None:
    """Put something else in a path's place."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    make(path)


def edit(name: str, value: object) -> Callable[[Entry], None]:
    """Change a field of the manifest; None removes it."""

    def change(entry: Entry) -> None:
        path = entry.folder / manifest.NAME
        fields = json.loads(path.read_bytes())
        if value is None:
            del fields[name]
        else:
            fields[name] = value
        rewrite(path, json.dumps(fields).encode())

    return change


def swap_for_link(entry: Entry) -> None:
    entry.folder.rename(entry.folder.with_name("moved"))
    entry.folder.symlink_to(entry.folder.with_name("moved"))


def link_the_library(entry: Entry) -> None:
    entry.library.rename(entry.folder.parent / "moved.so")
    entry.library.symlink_to(entry.folder.parent / "moved.so")


def be_another_s_entry(entry: Entry) -> None:
    """Good, but of another key: somebody renamed it."""
    other = write_op(entry.folder.parents[3] / "other", amount_h="#define AMOUNT 7.0f\n")
    theirs = built(other, entry.folder.parents[3] / "other-cache")
    shutil.rmtree(entry.folder)
    shutil.copytree(theirs.folder, entry.folder)


def flip(at: int) -> Callable[[Entry], None]:
    def damage(entry: Entry) -> None:
        content = bytearray(entry.library.read_bytes())
        content[at] ^= 0xFF
        rewrite(entry.library, bytes(content))

    return damage


DAMAGES = Cases[Callable[[Entry], None]]()


@DAMAGES("library-empty")
def _(entry: Entry) -> None:
    rewrite(entry.library, b"")


@DAMAGES("library-one-byte-short")
def _(entry: Entry) -> None:
    rewrite(entry.library, entry.library.read_bytes()[:-1])


@DAMAGES("library-tail-zeroed")
def _(entry: Entry) -> None:
    (rewrite(entry.library, entry.library.read_bytes()[:-512] + bytes(512)))


DAMAGES["library-first-byte"] = flip(0)
DAMAGES["library-code-byte"] = flip(0x1200)
DAMAGES["library-last-byte"] = flip(-1)


@DAMAGES("library-grown")
def _(entry: Entry) -> None:
    rewrite(entry.library, entry.library.read_bytes() + b"\0")


DAMAGES["library-is-a-link"] = link_the_library


@DAMAGES("library-group-writable")
def _(entry: Entry) -> None:
    helpers.open_to_group(entry.library)


@DAMAGES("manifest-empty")
def _(entry: Entry) -> None:
    rewrite(entry.folder / manifest.NAME, b"")


@DAMAGES("manifest-one-byte-short")
def _(entry: Entry) -> None:
    (rewrite(entry.folder / manifest.NAME, (entry.folder / manifest.NAME).read_bytes()[:-3]))


@DAMAGES("manifest-not-text")
def _(entry: Entry) -> None:
    rewrite(entry.folder / manifest.NAME, b"\xff\xfe\x00")


@DAMAGES("manifest-too-large")
def _(entry: Entry) -> None:
    (rewrite(entry.folder / manifest.NAME, b" " * (manifest.MAX_BYTES + 1)))


@DAMAGES("manifest-world-writable")
def _(entry: Entry) -> None:
    (entry.folder / manifest.NAME).chmod(0o666)


@DAMAGES("manifest-is-a-folder")
def _(entry: Entry) -> None:
    swap_for(entry.folder / manifest.NAME, os.mkdir)


@DAMAGES("manifest-is-a-pipe")
def _(entry: Entry) -> None:
    swap_for(entry.folder / manifest.NAME, os.mkfifo)


@DAMAGES("library-is-a-pipe")
def _(entry: Entry) -> None:
    swap_for(entry.library, os.mkfifo)


DAMAGES["folder-is-a-link"] = swap_for_link


@DAMAGES("folder-group-writable")
def _(entry: Entry) -> None:
    helpers.open_to_group(entry.folder)


@DAMAGES("folder-world-writable")
def _(entry: Entry) -> None:
    entry.folder.chmod(0o757)


@DAMAGES("folder-is-a-file")
def _(entry: Entry) -> None:
    swap_for(entry.folder, os.mknod)


DAMAGES["another-s-entry"] = be_another_s_entry


@DAMAGES("manifest-missing")
def _(entry: Entry) -> None:
    (entry.folder / manifest.NAME).unlink()


@DAMAGES("library-missing")
def _(entry: Entry) -> None:
    entry.library.unlink()


# No entry at all: a miss like any other.
SILENT = (
    "another-s-entry",  # it is of other inputs
    "folder-is-a-file",
    "manifest-missing",
    "library-missing",
)
if os.geteuid() == 0:
    DAMAGES["folder-of-another-user"] = lambda entry: os.chown(entry.folder, SOMEBODY, SOMEBODY)
    DAMAGES["library-of-another-user"] = lambda entry: os.chown(entry.library, SOMEBODY, SOMEBODY)
    DAMAGES["manifest-of-another-user"] = lambda entry: os.chown(
        entry.folder / manifest.NAME, SOMEBODY, SOMEBODY
    )

# Of these it is enough that the entry is not used: what follows is the same as above.
FIELDS: dict[str, Callable[[Entry], None]] = {
    "extra-field": edit("extra", 1),
    "library-outside": edit("library", "../../evil.so"),
    "library-absolute": edit("library", "/tmp/evil.so"),
    "library-with-nul": edit("library", "a\0b.so"),
    "library-with-surrogate": edit("library", "\ud800.so"),
    "library-hidden": edit("library", ".."),
    "library-empty-name": edit("library", ""),
    "library-very-long": edit("library", "x" * 5000 + ".so"),
    **{
        f"{name}-missing": edit(name, None)
        for name in ("format", "key", "document", "library", "size", "sha256", "built_with")
    },
    **{
        f"{name}-wrong": edit(name, value)
        for name, value in (
            ("format", 99),
            ("key", "0" * 64),
            ("document", {}),
            ("size", 1),
            ("sha256", "0" * 64),
            ("built_with", []),
        )
    },
    **{
        f"{name}-of-another-type": edit(name, value)
        for name, value in (
            ("format", True),
            ("key", 5),
            ("document", "x"),
            ("library", ["x"]),
            ("size", "1"),
            ("sha256", {}),
        )
    },
    "size-a-float": edit("size", 1.0),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_entry_gives_one_warning_and_is_rebuilt_and_is_a_silent_hit_then(
    op: Path, here: Path, entry: Entry, damage: str
) -> None:
    assert built(op, here) == entry
    good = entry.library.read_bytes()
    DAMAGES[damage](entry)
    after = caught(op, here)
    assert len(after.warnings) == (damage not in SILENT), after.warnings
    assert all(str(entry.folder) in text for text in after.warnings)
    assert after.entry == entry
    assert entry.library.read_bytes() == good
    notes = (
        Store(here).base / "seen"
    )  # the first request after two seconds notes the signatures of new files

    def kept() -> dict[str, tuple[int, int, int]]:
        found = helpers.snapshot(here)
        return {path: state for path, state in found.items() if not path.startswith(str(notes))}

    before = kept()
    assert caught(op, here).warnings == []
    assert kept() == before


@pytest.mark.parametrize("damage", FIELDS)
def test_an_entry_with_a_wrong_field_in_its_manifest_is_not_used(
    op: Path, here: Path, entry: Entry, damage: str
) -> None:
    recipe = describe(op)
    store = Store(here)
    assert helpers.found(store, recipe) == entry
    FIELDS[damage](entry)
    with cache_warnings() as seen:
        assert helpers.found(store, recipe) is None
    of_another_format = damage.startswith("format-")  # another opjit may share the store
    assert len(seen) == (not of_another_format)
    assert all(entry.key in text for text in seen)
    assert layers.find(recipe.ways, store, False, False) is None


def test_a_request_warns_once_though_it_looks_twice(make_op: helpers.MakeOp, here: Path) -> None:
    """`request.entry` looks before it takes the lock, and again behind it."""
    op = make_op(
        "noop(Tensor x) -> ()",
        "opjit_status noop_cpu(const opjit_tensor *x) { (void)x; return OPJIT_OK; }",
    )
    target = targets.here(helpers.cpu())
    first = request.entry(op, target)
    rewrite(first.library, b"")
    with cache_warnings() as texts:
        assert request.entry(op, target) == first
    assert len(texts) == 1


@as_root
def test_a_user_takes_entries_of_his_own_and_of_root_and_of_nobody_else(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = targets.here(helpers.cpu())
    # A real switch would need a Python that others can run.
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    assert verify(entry.folder, target)[0] == entry
    for path in [entry.folder, *entry.folder.iterdir()]:
        os.chown(path, SOMEBODY, SOMEBODY)
    assert verify(entry.folder, target)[0] == entry
    os.chown(entry.library, SOMEBODY + 1, SOMEBODY + 1)
    with pytest.raises(EntryError, match=f"belongs to user {SOMEBODY + 1}, not to you or root"):
        verify(entry.folder, target)


FUZZED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def parses_or_is_refused(text: bytes) -> None:
    with contextlib.suppress(EntryError):
        parsed = manifest.parse(text)
        (Path("/nowhere") / parsed.library).exists()  # its name is one that the system takes
        assert Path("/nowhere", parsed.library).parent == Path("/nowhere")


@given(text=st.binary(max_size=200))
@example(text=b"\xef\xbb\xbf{}")
@example(text=b"[" * 100_000)
@example(text=b'{"format": 1e999}')
@example(text=b'{"format": ' + b"9" * 5000 + b"}")
def test_no_bytes_make_the_manifest_parser_raise_anything_else(text: bytes) -> None:
    parses_or_is_refused(text)


@FUZZED
@given(data=st.data())
def test_no_flipped_byte_in_a_manifest_goes_unseen_where_it_matters(
    built_once: tuple[Path, Entry], data: st.DataObject
) -> None:
    text = bytearray((built_once[1].folder / manifest.NAME).read_bytes())
    good = manifest.parse(bytes(text))
    at = data.draw(st.integers(0, len(text) - 1))
    text[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(EntryError):
        found = manifest.parse(bytes(text))
        # Only what the hashes cover otherwise may differ.
        assert (found.key, found.document) == (
            good.key,
            good.document,
        )


@pytest.mark.parametrize("depth", [200, 1000, 100_000])
def test_a_deeply_nested_document_is_refused(depth: int) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    fields = (
        '{"format": 2, "key": "k", "library": "x.so", "size": 1, "sha256": "s", "built_with": {}, "document": '
        + nested
        + "}"
    )
    with pytest.raises(EntryError):
        manifest.parse(fields.encode())


@FUZZED
@given(data=st.data())
def test_no_damage_makes_the_reader_of_libraries_raise_anything_else(
    built_once: tuple[Path, Entry], data: st.DataObject
) -> None:
    content = bytearray(built_once[1].library.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(
            st.integers(0, min(1023, len(content) - 1)) | st.integers(0, len(content) - 1)
        )
        content[at] = data.draw(st.integers(0, 255))
    kept = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    with contextlib.suppress(EntryError):
        elf.inspect(bytes(content[:kept]))
    beyond_all_memory = bytearray(built_once[1].library.read_bytes())
    beyond_all_memory[39] = 0x80  # the last byte of the program headers' offset
    with pytest.raises(EntryError, match="not a readable shared library"):
        elf.inspect(bytes(beyond_all_memory))


def staged(recipe: Any, store: Store) -> tuple[Path, Any]:
    """A complete entry in a staging folder."""
    entry = build.build(recipe, store)
    folder = store.stage()
    entry.folder.rename(folder / "entry")
    return folder / "entry", manifest.parse((folder / "entry" / manifest.NAME).read_bytes())


def test_who_loses_a_race_uses_the_winner_s_entry(op: Path, here: Path) -> None:
    recipe = describe(op)
    store = Store(here)
    mine, _ = staged(recipe, store)
    winner = build.build(recipe, store)
    inode = winner.library.stat().st_ino
    assert store.publish(mine, winner.folder, recipe.target) == winner
    assert winner.library.stat().st_ino == inode


@pytest.mark.parametrize(
    "damage",
    [
        "library-empty",
        "manifest-empty",
        "folder-is-a-link",
        "folder-is-a-file",
        "folder-world-writable",
    ],
)
def test_a_winner_that_is_no_good_is_moved_aside(op: Path, here: Path, damage: str) -> None:
    recipe = describe(op)
    store = Store(here)
    mine, described = staged(recipe, store)
    inode = (mine / described.library).stat().st_ino
    winner = build.build(recipe, store)
    DAMAGES[damage](winner)
    published = store.publish(mine, winner.folder, recipe.target)
    assert published.library.stat().st_ino == inode
    assert verify(published.folder, recipe.target)[0] == published


def test_an_entry_holds_the_named_files_and_is_only_its_owner_s(
    built_once: tuple[Path, Entry],
) -> None:
    folder = built_once[1].folder
    assert sorted(path.name for path in folder.iterdir()) == [
        "build.ninja",
        "keytest.plus.so",
        "manifest.json",
        "opjit_glue.c",
    ]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(files.trust_problem(path) is None for path in [folder, *folder.iterdir()])
    assert list((folder.parents[2] / "staging").iterdir()) == []


@pytest.mark.parametrize("stage", ["before-library", "before-manifest", "before-rename"])
def test_a_builder_killed_before_the_rename_leaves_no_entry_and_nothing_that_blocks(
    op: Path, here: Path, stage: str
) -> None:
    code = (
        helpers.declare(op)
        + f"""
import os, signal
from opjit import files
from opjit.store import store
def die(*args, **kwargs): os.kill(os.getpid(), signal.SIGKILL)
plain = files.write_synced
def write(path, content):
    die() if {stage!r} == f"before-{{'library' if path.name.endswith('.so') else path.stem}}" else plain(path, content)
files.write_synced = write
if {stage!r} == "before-rename": store.Store.publish = die
opjit.get("keytest::plus", "cpu")
"""
    )
    killed = helpers.ended(code, {"OPJIT_CACHE": str(here)})
    assert killed.returncode == -signal.SIGKILL
    assert helpers.entries(here) == []
    assert len(list((here / "v2" / "staging").iterdir())) == 1
    assert caught(op, here).warnings == []
    assert len(list((here / "v2" / "staging").iterdir())) == 1, (
        "a fresh staging folder may be somebody's: it stays"
    )


def test_old_staging_folders_are_swept_and_fresh_ones_stay(op: Path, here: Path) -> None:
    staging = here / "v2" / "staging"
    staging.mkdir(parents=True, mode=0o700)
    for age, name in ((25 * 3600, "old"), (60, "fresh"), (-86400 * 400, "future")):
        (staging / name).mkdir()
        (staging / name / "file").write_text("")
        os.utime(staging / name, (time.time() - age,) * 2)
    (here / "v2").chmod(0o700)
    here.chmod(0o700)
    built(op, here)
    assert sorted(path.name for path in staging.iterdir()) == ["fresh", "future"]


@pytest.mark.parametrize("when", [0, 4102444800])  # 1970 and 2100
def test_dates_decide_nothing_about_an_entry(op: Path, here: Path, entry: Entry, when: int) -> None:
    for path in [entry.folder, *entry.folder.iterdir()]:
        os.utime(path, (when, when))
    assert caught(op, here).warnings == []


@as_root
def test_a_read_only_cache_serves_hits_silently_and_a_miss_is_built_for_the_process(
    op: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    other = write_op(tmp_path / "other" / "plus", amount_h="#define AMOUNT 5.0f\n")
    cache.mkdir(mode=0o700)
    with tmpfs(cache, "size=16m"):
        warm = built(op, cache)
        api_code = (
            "with warnings.catch_warnings(record=True) as seen:\n    warnings.simplefilter('always')\n"
            "    print(opjit.get('keytest::plus', 'cpu')(torch.ones(1)).tolist(), [one.category.__name__ for one in seen])\n"
        )
        with mounted(
            cache, "-o", "remount,ro"
        ):  # one umount below is enough: a remount adds no mount
            before = helpers.snapshot(cache)
            assert caught(op, cache) == helpers.Caught(warm, [])
            env = {"OPJIT_CACHE": str(cache)}
            assert fresh(helpers.declare(op) + api_code, env).stdout == "[2.0] []\n"
            assert (
                fresh(helpers.declare(other) + api_code, env).stdout == "[6.0] ['CacheWarning']\n"
            )
            assert helpers.snapshot(cache) == before
            # The inner umount needs it.
            subprocess.run(["mount", "-t", "tmpfs", "none", str(cache)], check=True)


@as_root
@pytest.mark.parametrize("size", [4, 40, 100])
def test_an_op_works_with_one_warning_when_the_disk_fills_up(
    op: Path, tmp_path: Path, size: int
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    with tmpfs(cache, f"size={size}k"):
        after = caught(op, cache)
        assert (not after.warnings) == after.entry.folder.is_relative_to(cache)
        if after.warnings:
            assert len(after.warnings) == 1
            assert "No space left on device" in after.warnings[0]
            assert helpers.entries(cache) == []
        assert verify(after.entry.folder, targets.here(helpers.cpu()))[0] == after.entry


def test_an_op_works_with_one_warning_where_the_cache_is_a_file(op: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    after = caught(op, tmp_path / "file")
    assert len(after.warnings) == 1
    assert "OPJIT_CACHE" in after.warnings[0]
    assert (tmp_path / "file").read_text() == "mine"


def test_without_any_temporary_folder_the_error_says_what_to_set(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    recipe = describe(op)
    refuse = FileNotFoundError(errno.ENOENT, "No usable temporary directory found")
    monkeypatch.setattr("tempfile.mkdtemp", Mock(side_effect=refuse))
    expected = r"No usable temporary directory found\); set OPJIT_CACHE or TMPDIR"
    with pytest.warns(CacheWarning), pytest.raises(BuildError, match=expected):
        build.build(recipe, Store(tmp_path / "file" / "cache"))


@pytest.mark.slow
def test_the_folder_of_a_private_build_goes_with_its_process_also_a_worker_of_multiprocessing(
    op: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    code = helpers.declare(op) + (
        "import multiprocessing, os, sys\nwarnings.simplefilter('ignore')\n"
        "def private(): return len(list(Path(os.environ['TMPDIR']).glob('opjit-*/v2/*/*/*/*.so')))\n"
        "def work(): assert opjit.get('keytest::plus', 'cpu')(torch.ones(1)).tolist() == [2.0] and private() == 1\n"
        "worker = multiprocessing.get_context('fork').Process(target=work)\nworker.start()\nworker.join()\n"
        "print(worker.exitcode, private())\nwork()\nsys.stdout.flush()\n"
        "if os.fork() == 0: sys.exit()\n"
        "os.wait()\nprint(private())\n"
    )
    done = fresh(
        code,
        {"OPJIT_CACHE": str(tmp_path / "file"), "TMPDIR": str(tmp_path / "tmp")},
        flags=("-X", "dev", "-W", "ignore::DeprecationWarning"),
    )
    assert done.stdout == "0 0\n1\n"
    assert [
        path.name
        for path in (tmp_path / "tmp").iterdir()
        if not path.name.startswith(f"opjit-{os.geteuid()}")
    ] == []
    assert "Implicitly cleaning up" not in done.stderr


@pytest.mark.parametrize(
    "odd",
    [
        "with a space/quo'te/dol$lar$HOME/back\\slash/smörgås-日本/per%cent {brace}/ha#sh/-dash/~tilde",
        'dou"ble/co:lon/pi|pe/equal=s/semi;colon&and/ edge ',
    ],
)
def test_odd_characters_in_the_paths_of_the_cache_and_of_the_op_do_no_harm(
    tmp_path: Path, odd: str, built_once: tuple[Path, Entry]
) -> None:
    cache = tmp_path / odd / "cache"
    op = write_op(tmp_path / odd / "plus")
    first = caught(op, cache)
    assert first.warnings == []
    assert first.entry.folder.is_relative_to(tmp_path / odd)
    assert caught(op, cache) == first
    assert (first.entry.key, first.entry.library.read_bytes()) == (
        built_once[1].key,
        built_once[1].library.read_bytes(),
    )


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_no_umask_makes_an_entry_that_is_not_trusted(op: Path, here: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        first = caught(op, here)
        assert first.warnings == []
        assert caught(op, here) == first
    finally:
        os.umask(before)
    assert [
        files.trust_problem(path) for path in [here, *here.rglob("*")] if files.trust_problem(path)
    ] == []


def test_the_default_root_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("OPJIT_CACHE", "~/there")
    assert default_root() == Path("/home/somebody/there")
    monkeypatch.setenv("OPJIT_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_root() == Path("/xdg/opjit")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_root() == Path("/home/somebody/.cache/opjit")
    monkeypatch.setenv("OPJIT_CACHE", "relative")
    monkeypatch.chdir(tmp_path)
    assert default_root() == tmp_path / "relative"
    monkeypatch.chdir("/")
    assert default_root() == tmp_path / "relative"  # as long as this process lives
    monkeypatch.delenv("OPJIT_CACHE")
    monkeypatch.delenv("HOME")
    assert default_root().is_absolute()


def test_a_user_without_a_home_or_a_name_gets_a_cache_of_his_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "OPJIT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError("getpwuid(): uid not found")))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir("/")
    assert default_root() == tmp_path / f"opjit-{os.geteuid()}" / "cache"
    assert Store(default_root()).stage().is_dir()
    assert stat.S_IMODE((tmp_path / f"opjit-{os.geteuid()}").stat().st_mode) == 0o700


@pytest.mark.parametrize("home", ["/", "/nonexistent/home"])
def test_import_never_fails_for_want_of_a_home(home: str) -> None:
    fresh("import opjit", {"HOME": home, "OPJIT_CACHE": None})


def test_two_archs_share_a_cache(op: Path, here: Path) -> None:
    first, second = (built(op, here, targets.named(arch)) for arch in LEVELS[:2])
    assert first.folder.parent != second.folder.parent
    assert caught(op, here, targets.named(LEVELS[0])) == helpers.Caught(first, [])
    assert caught(op, here, targets.named(LEVELS[1])) == helpers.Caught(second, [])


def test_without_a_compiler_an_entry_of_the_same_sources_is_a_hit_and_one_of_others_is_not(
    op: Path, here: Path
) -> None:
    first = built(op, here)
    store = Store(here)
    assert helpers.found(store, replace(describe(op), toolchain=None)) == first
    (op / "amount.h").write_text("#define AMOUNT 9.0f\n")
    assert helpers.found(store, replace(describe(op), toolchain=None)) is None


def test_a_stray_file_in_the_cache_harms_nobody(op: Path, here: Path) -> None:
    first = built(op, here)
    for folder in (here, here / "v2", first.folder.parent, here / "v2" / "staging"):
        (folder / "stray").write_text("?")
        (folder / "stray-folder").mkdir()
    assert caught(op, here) == helpers.Caught(first, [])
    assert helpers.entries(here) == [first.folder]
