"""Pruning and clearing: which entries go, and that no process that uses the cache meanwhile notices."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from opjit import cache
from opjit.builder import parts
from opjit.errors import BadSetting
from opjit.recipe.document import FORMAT
from opjit.store import inventory, manifest, prune
from opjit.store.entry import Entry
from opjit.store.prune import MARKER, clear
from opjit.store.store import Store, first
from tests import helpers, zygote
from tests.helpers import (
    DAY,
    GET,
    as_root,
    built,
    cache_command,
    caught,
    date,
    describe,
    fresh,
    keys,
    mounted,
    planted,
    tmpfs,
    write_op,
)

YEAR_2100 = 4102444800.0
Clock = Callable[[float], None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """``clock(seconds)``: from now on, pruning reads a clock that is so much ahead, as if that time had passed."""
    return lambda seconds: monkeypatch.setattr(
        prune, "time", SimpleNamespace(time=lambda: time.time() + seconds)
    )


def test_what_was_not_used_for_longest_goes_first_until_the_rest_is_small_enough(
    entry: Entry, clock: Clock
) -> None:
    folders = [entry.folder, *planted(entry, 4)]
    clock(10 * DAY)
    for age, folder in enumerate(folders):
        date(folder, time.time() - age * DAY)
    one = cache.entries()[0].size
    done = cache.prune(size=3 * one + 2000)
    assert (done.removed, done.kept, done.failed, done.fresh) == (2, 3, 0, 0)
    assert (keys(), done.size) == (
        {folder.name for folder in folders[:3]},
        sum(item.size for item in cache.entries()),
    )
    assert list((entry.folder.parents[2] / "staging").iterdir()) == []


def test_a_read_counts_as_a_use_and_so_does_a_build(entry: Entry, clock: Clock) -> None:
    read, written, unused = planted(entry, 3)
    clock(100 * DAY)
    now = time.time() + 100 * DAY
    date(read, used=now - 5 * DAY, written=now - 99 * DAY)
    date(written, used=now - 99 * DAY, written=now - 5 * DAY)
    date(unused, used=now - 91 * DAY)
    shutil.rmtree(entry.folder)
    assert cache.prune().removed == 1
    assert keys() == {read.name, written.name}


def test_a_hit_is_a_use_on_a_filesystem_that_notes_reads(op: Path, entry: Entry) -> None:
    long_ago = time.time() - 80 * DAY
    date(entry.folder, long_ago)
    found = helpers.found(Store(Path(os.environ["OPJIT_CACHE"])), describe(op))
    if entry.library.stat().st_atime == long_ago:
        pytest.skip("this filesystem is mounted with noatime")
    assert found == entry
    assert time.time() - cache.entries()[0].used < DAY


def test_what_nobody_used_for_ninety_days_goes_and_the_rest_stays(
    entry: Entry, clock: Clock
) -> None:
    clock(200 * DAY)
    (other,) = planted(entry, 1)
    date(entry.folder, time.time() + 109 * DAY)
    date(other, time.time() + 111 * DAY)
    assert cache.prune().removed == 1
    assert keys() == {other.name}
    assert cache.prune(age="80d").removed == 1
    assert keys() == set()
    assert not entry.folder.parents[1].exists(), "folders that are empty then go too"


@pytest.mark.parametrize("when", [0.0, YEAR_2100], ids=["1970", "2100"])
def test_a_fresh_entry_stays_whatever_its_dates_say(entry: Entry, when: float) -> None:
    for path in [*entry.folder.iterdir(), entry.folder]:
        os.utime(path, (when, when))
    done = cache.prune(size=1, age=1.0)
    assert (done.removed, done.kept, done.fresh) == (0, 1, 1)


def test_entries_dated_ahead_of_the_clock_do_not_stop_the_others_from_going_nor_stay_for_ever(
    entry: Entry, clock: Clock
) -> None:
    future, middle = planted(entry, 2)
    clock(200 * DAY)
    date(future, YEAR_2100)
    date(entry.folder, 0)
    date(middle, time.time() + 199 * DAY)
    assert cache.prune(size=sum(item.size for item in cache.entries()) - 1, age=0).removed == 1
    assert keys() == {future.name, middle.name}, "1970 is older than what has no date"
    assert cache.prune(size="0").removed == 1, (
        "a date ahead says nothing, so it is the day when the entry appeared: 200 days ago"
    )
    assert keys() == {middle.name}


def test_a_clock_set_back_by_years_keeps_neither_everything_nor_wipes_what_is_fresh(
    entry: Entry, clock: Clock
) -> None:
    clock(-20 * 365 * DAY)
    assert cache.prune(size=1).removed == 1, (
        "it appeared in what is the future now: of an unknown age, so the oldest"
    )
    clock(-600)
    again = Store(Path(os.environ["OPJIT_CACHE"]))
    assert helpers.found(again, describe(write_op(entry.folder.parents[4] / "plus"))) is None


@as_root
def test_what_cannot_be_removed_is_said_and_the_others_go_all_the_same(
    entry: Entry, clock: Clock
) -> None:
    folders = planted(entry, 3)
    clock(200 * DAY)
    for age, folder in enumerate([entry.folder, *folders]):
        date(folder, time.time() + age)
    (folders[0] / "busy").mkdir()
    with mounted(folders[0], "-t", "tmpfs", "none"):
        done = cache.prune(size=1, age=0)
        assert (done.removed, done.failed) == (3, 1)
        result = cache_command("prune")
        assert (result.exit_code, result.output.splitlines()[-1]) == (
            1,
            "Error: 1 entry could not be removed",
        )
    assert keys() == {folders[0].name}


@as_root
def test_a_read_only_cache_is_not_pruned_and_that_is_one_sentence(entry: Entry) -> None:
    root = Path(os.environ["OPJIT_CACHE"])
    with mounted(root, "--bind", str(root)), mounted(root, "-o", "remount,ro,bind"):
        for arguments in (["prune"], ["clear"]):
            result = cache_command(*arguments)
            assert result.exit_code == 1
            assert re.fullmatch(
                r"Error: nothing can be removed from the cache .*: you cannot write to it\n",
                helpers.without_pointer(result.output),
            ), result.output
        # The inner umount needs it.
        subprocess.run(["mount", "-t", "tmpfs", "none", str(root)], check=True)
    assert keys() == {entry.key}


@as_root
def test_a_disk_without_room_for_a_folder_can_be_pruned(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    root = tmp_path / "small"
    root.mkdir(mode=0o700)
    with tmpfs(root, "nr_inodes=64"):
        monkeypatch.setenv("OPJIT_CACHE", str(root))
        first = built(op, root)
        monkeypatch.setattr(prune, "_FRESH", 0.0)
        with contextlib.suppress(OSError):  # no space left
            for number in range(100):
                (root / f"mine{number}").write_text("")
        with pytest.raises(OSError, match="No space left"):
            (root / "folder").mkdir()
        done = cache.prune(size=1)
        assert (done.removed, done.failed) == (1, 0)
        assert not first.folder.exists()


def test_a_pruner_that_is_killed_leaves_no_half_of_an_entry(entry: Entry, op: Path) -> None:
    planted(entry, 3)
    code = (
        "import os, signal, shutil\nfrom opjit import cache, files; from opjit.store import prune\n"
        "prune._FRESH = 0\n"
        "def half(folder):\n"
        "    if not (folder / 'manifest.json').exists(): return shutil.rmtree(folder)\n"
        "    os.unlink(sorted(folder.iterdir())[0])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.remove_tree = half\n"
        "cache.prune(size=1)\n"
    )
    killed = helpers.ended(code)
    assert killed.returncode == -signal.SIGKILL
    assert len(keys()) < 4
    assert {finding.verdict for finding in cache.verify()} <= {"good"}
    for path in (entry.folder.parents[2] / "staging").iterdir():
        os.utime(path, (1, 1))
    cache.prune()
    assert list((entry.folder.parents[2] / "staging").iterdir()) == []


def test_pruners_that_run_at_the_same_time_do_not_disturb_each_other(entry: Entry) -> None:
    planted(entry, 40)
    code = (
        "from opjit import cache\nfrom opjit.store import prune\n"
        "prune._FRESH = 0\ndone = cache.prune(size=1)\nprint(done.kept, done.failed)\n"
    )
    children = [helpers.started(code) for _ in range(3)]
    assert [child.communicate()[0] for child in children] == ["0 0\n"] * 3
    assert keys() == set()
    assert list((entry.folder.parents[2] / "staging").iterdir()) == []


def test_what_another_version_of_opjit_keeps_here_is_not_touched(
    entry: Entry, op: Path, clock: Clock
) -> None:
    """An older or newer opjit has another folder, or writes another format; and a user may have put something there."""
    root = Path(os.environ["OPJIT_CACHE"])
    (newer,) = planted(entry, 1)
    fields = json.loads((newer / manifest.NAME).read_bytes())
    (newer / manifest.NAME).write_text(
        json.dumps({**fields, "format": FORMAT + 1, "fields": ["of", "tomorrow"]})
    )
    with (
        helpers.cache_warnings() as texts
    ):  # every request that looks through the folder would warn
        assert (
            first(newer.parent, None, lambda manifest: manifest.document.get("format") is None)
            is None
        )
    assert texts == []
    shutil.copytree(root / "v2", root / "v3")
    for name in ("notes.txt", "v2/notes.txt", f"v2/{entry.folder.parts[-3]}/notes.txt"):
        (root / name).write_text("mine")
        os.utime(root / name, (0, 0))
    (root / "v2" / "mine" / "folder" / "inner").mkdir(parents=True)
    clock(1000 * DAY)
    kept = {
        path
        for path in root.rglob("*")
        if path.is_file() and (path.is_relative_to(root / "v3") or path.name == "notes.txt")
    }
    assert cache.prune(size=1).removed == 2
    assert cache.clear().failed == 0
    assert {path for path in kept if not path.exists()} == set()
    assert (root / "v2" / "mine" / "folder" / "inner").is_dir()
    assert caught(op, root).warnings == []


def test_old_logs_and_notes_go_and_fresh_ones_stay(entry: Entry, clock: Clock) -> None:
    base = entry.folder.parents[2]
    (base / "logs").mkdir()
    (base / "toolchain").mkdir(exist_ok=True)
    parts = base / "parts" / ("0" * 64)
    parts.mkdir(parents=True)
    names = [
        "logs/ns.op.20200101-000000.0123.log",
        f"toolchain/cc-{'0' * 16}.json",
        f"toolchain/own-{'0' * 8}-{'0' * 16}.json",
        f"parts/{parts.name}/libtorch_cpu.so",
    ]
    unfinished = base / "logs" / f".x.log.{'a' * 32}"
    for name in names:
        (base / name).write_text("old")
        os.utime(base / name, (time.time() - 91 * DAY,) * 2)
    os.utime(parts, (time.time() - 91 * DAY,) * 2)
    unfinished.write_text("")
    os.utime(unfinished, (1, 1))
    (base / "logs" / "ns.op.today.0123.log").write_text("new")
    cache.prune()
    assert [path.name for path in (base / "logs").iterdir()] == ["ns.op.today.0123.log"]
    assert not any((base / name).exists() for name in names)
    assert not parts.exists()
    assert keys() == {entry.key}


def test_parts_that_a_build_may_be_linking_with_stay_at_any_age(entry: Entry) -> None:
    """A build dates the parts that it uses: access times may be a day old."""

    def make(staged: Path) -> None:
        (staged / "part").write_text("text")

    base = entry.folder.parents[2]
    used = parts.kept(base, "content", ["part"], (), make)
    for path in (used, *used.iterdir()):
        os.utime(path, (time.time() - DAY,) * 2)
    assert parts.kept(base, "content", ["part"], (), make) == used
    cache.prune(age=1.0)
    assert used.is_dir()
    for path in (used, *used.iterdir()):
        os.utime(path, (time.time() - DAY,) * 2)
    cache.prune(age=1.0)
    assert not used.exists()


def test_sizes_and_ages_are_read_as_people_write_them() -> None:
    sizes = {
        "0": 0,
        "5GiB": 5 << 30,
        "5G": 5 << 30,
        "5gb": 5 * 10**9,
        "1.5 MiB": 3 << 19,
        "17": 17,
        "17b": 17,
        "2TiB": 2 << 40,
    }
    assert {text: prune.parse_size(text) for text in sizes} == sizes
    ages = {"30d": 30 * DAY, "12h": DAY / 2, "2w": 14 * DAY, "90": 90 * DAY, "0": 0, "1m": 60.0}
    assert {text: prune.parse_age(text) for text in ages} == ages


@pytest.mark.parametrize("text", ["", "x", "-1", "5 GiBs", "1e9", "nan", "10 %", "5PiB", "9" * 400])
def test_what_is_no_size_or_age_is_one_sentence(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for read in (prune.parse_size, prune.parse_age):
        with pytest.raises(BadSetting, match=r"expected an? (size|age) such as"):
            read(text)
    result = cache_command("prune", "--size", text)
    assert (result.exit_code, len(result.output.splitlines())) == (2, 2)  # and where its causes are
    if text:
        monkeypatch.setenv("OPJIT_CACHE_SIZE", text)
        assert "OPJIT_CACHE_SIZE: expected a size" in cache_command("prune").output


def grown(op: Path, number: int) -> Path:
    """The op with other sources, so that it is built."""
    return write_op(
        op.parent / f"grown{os.urandom(4).hex()}" / "plus", amount_h=f"#define AMOUNT {number}.0f\n"
    )


@pytest.fixture
def old(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """An entry that is not fresh; with another one it is over the bound."""
    monkeypatch.setenv(
        "OPJIT_CACHE_SIZE", f"{1.5 * next(inventory.scan(Store(entry.folder.parents[3]))).size:.0f}"
    )
    monkeypatch.setattr(prune, "_FRESH", 0.0)
    date(entry.folder, 1000)
    mark(entry.folder.parents[3])
    return entry


def mark(root: Path, when: float | None = None) -> None:
    """Note when the cache was pruned last: yesterday, if at no other time."""
    (root / "v2" / MARKER).write_text("")
    os.utime(root / "v2" / MARKER, (when or time.time() - DAY - 60,) * 2)


def test_a_build_prunes_once_a_day_and_a_hit_never(old: Entry, op: Path) -> None:
    root = Path(os.environ["OPJIT_CACHE"])
    assert caught(op, root).warnings == []
    assert old.folder.exists()
    first = built(grown(op, 2), root)
    assert not old.folder.exists()
    assert first.folder.exists(), "what was built now is there, whatever the bound"
    second = built(grown(op, 3), root)
    assert first.folder.exists()
    assert second.folder.exists()


@pytest.mark.parametrize("when", [YEAR_2100, None], ids=["future", "yesterday"])
def test_a_marker_of_another_day_means_that_it_is_due_and_is_put_right(
    old: Entry, op: Path, when: float | None
) -> None:
    root = Path(os.environ["OPJIT_CACHE"])
    mark(root, when)
    built(grown(op, 2), root)
    assert not old.folder.exists()
    assert abs(time.time() - (root / "v2" / MARKER).stat().st_mtime) < 3600


def test_a_bound_that_makes_no_sense_is_one_warning_and_the_op_is_built(
    old: Entry, op: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPJIT_CACHE_SIZE", "plenty")
    after = caught(grown(op, 2), Path(os.environ["OPJIT_CACHE"]))
    assert len(after.warnings) == 1
    assert "OPJIT_CACHE_SIZE" in after.warnings[0]
    assert old.folder.exists()


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[Callable[[str], zygote.Process]]:
    """``stopped(code)``: a process that has stopped itself with SIGSTOP."""
    with ExitStack() as stack:

        def start(code: str) -> zygote.Process:
            child = stack.enter_context(helpers.process(code))
            helpers.until(lambda: helpers.state(child.pid) == "T", process=child)
            return child

        yield start


STOP = "def stop():\n    import os, signal\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
HOOKS = {
    "between the look and the library": "from opjit.store import manifest\nplain = manifest.parse\n"
    "def parse(text):\n    found = plain(text)\n"
    "    manifest.parse = plain\n    stop()\n    return found\nmanifest.parse = parse\n",
    "between the verification and dlopen": "from opjit import loader\nplain = loader.open_library\ndef opened(*arguments):\n"
    "    loader.open_library = plain\n    stop()\n    return plain(*arguments)\n"
    "loader.open_library = opened\n",
}
removed = pytest.mark.parametrize(
    "remove",
    [lambda: cache.clear(), lambda: shutil.rmtree(os.environ["OPJIT_CACHE"])],
    ids=["clear", "rm"],
)


@removed
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS.keys())
def test_a_cache_that_is_cleared_during_a_look_up_is_a_miss(
    entry: Entry,
    op: Path,
    stopped: Callable[[str], zygote.Process],
    hook: str,
    remove: Callable[[], object],
) -> None:
    child = stopped(helpers.declare(op) + STOP + hook + GET)
    remove()
    assert not entry.folder.exists()
    os.kill(child.pid, signal.SIGCONT)
    assert child.communicate() == ("[2.0]\n", "")
    assert entry.folder.exists(), "it was built again"


@removed
def test_a_cache_that_is_cleared_during_a_publication_gives_a_working_op(
    entry: Entry, op: Path, stopped: Callable[[str], zygote.Process], remove: Callable[[], object]
) -> None:
    shutil.rmtree(entry.folder.parents[1])
    hook = (
        "from opjit import files\nplain = files.put_in_place\ndef appear(*arguments):\n"
        "    files.put_in_place = plain\n    stop()\n"
        "    return plain(*arguments)\nfiles.put_in_place = appear\n"
    )
    child = stopped(helpers.declare(op) + STOP + hook + GET)
    remove()
    os.kill(child.pid, signal.SIGCONT)
    told, warned = child.communicate()
    assert told == "[2.0]\n"
    assert "Traceback" not in warned


def test_an_entry_that_goes_away_every_time_is_built_where_nobody_clears(
    entry: Entry, op: Path
) -> None:
    code = helpers.declare(op) + (
        "from opjit import cache, loader\n"
        "plain = loader.open_library\n"
        "def cleared_before(*given):\n    cache.clear()\n    return plain(*given)\n"
        "loader.open_library = cleared_before\n"
    )
    assert fresh(code + GET).stdout == "[2.0]\n"


def test_a_cache_that_is_removed_under_the_compiler_gives_a_working_op(
    entry: Entry, op: Path, tmp_path: Path
) -> None:
    root = os.environ["OPJIT_CACHE"]
    compiler = helpers.fake_compiler(
        tmp_path / "cc", before=f"if {helpers.COMPILES}; then rm -rf '{root}'; fi"
    )
    done = fresh(
        helpers.declare(op) + "warnings.simplefilter('ignore')\n" + GET, {"CC": str(compiler)}
    )
    assert done.stdout == "[2.0]\n"


@pytest.mark.slow
def test_four_processes_get_what_others_clear_all_the_time(entry: Entry, op: Path) -> None:
    code = helpers.declare(op) + (
        "import sys, ctypes\nfrom opjit import loader, request, wanted\nwarnings.simplefilter('ignore')\n"
        "target = wanted.target_of('cpu', None)\nplus = registry.find('keytest::plus')\nsys.stdin.read(1)\n"
        "for _ in range(3): request._load_kernel(plus, target, None).unload()\n" + GET
    )
    children = [helpers.started(code) for _ in range(4)]
    for child in children:
        child.send("")
    try:
        until = time.monotonic() + 200
        while any(child.poll() is None for child in children) and time.monotonic() < until:
            clear(Store(Path(os.environ["OPJIT_CACHE"])))
            time.sleep(0.02)
        assert [(child.wait(1), child.communicate()) for child in children] == [
            (0, ("[2.0]\n", ""))
        ] * 4
    finally:
        for child in children:
            child.end()


def test_nothing_that_a_builder_writes_on_its_way_looks_like_an_entry(
    op: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at while the compiler runs, and when the entry is complete but not published."""
    seen = []
    plain = Store.publish

    def publish(self: Store, staged: Path, *rest: object) -> Entry:
        seen.append(
            (
                cache.entries(),
                helpers.entries(self.root),
                helpers.found(self, describe(op)),
                sorted(path.name for path in staged.iterdir()),
            )
        )
        return plain(self, staged, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "publish", publish)
    built(op, here)
    assert seen == [
        ([], [], None, ["build.ninja", "keytest.plus.so", "manifest.json", "opjit_glue.c"])
    ]
    assert len(keys()) == 1


def test_two_hosts_with_one_process_id_never_share_a_temporary_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    assert len({Store(tmp_path / "cache").stage() for _ in range(50)}) == 50
