"""Folders on the way to the cache: what lies where others could swap it is not loaded, and the op works all the same."""

import grp
import os
import pwd
import shutil
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from opjit import files, tune
from opjit.errors import CacheWarning
from opjit.store import store as store_module
from opjit.store.entry import Entry
from opjit.store.store import Store, default_root
from tests import helpers
from tests.helpers import SOMEBODY, Cases, as_root, caught, describe, fresh, open_to_group, write_op

ME = pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture
def root(built_once: tuple[Path, Entry], tmp_path: Path) -> Path:
    """A cache with the op's entry, two folders below one of the test's own."""
    place = tmp_path / "outer" / "inner" / "cache"
    place.parent.mkdir(parents=True, mode=0o755)
    shutil.copytree(built_once[1].folder.parents[3], place)
    place.chmod(0o700)
    return place


def give(path: Path, user: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    os.chown(path, user, user, follow_symlinks=False)


def swap(path: Path, target: Path | str) -> Path:
    """Put a symbolic link in a path's place; what was there is beside it."""
    moved = path.with_name(f"{path.name}-moved")
    path.rename(moved)
    path.symlink_to(target or moved)
    return moved


def link_of_somebody(root: Path) -> None:
    swap(root.parent, "")
    give(root.parent, SOMEBODY)


def link_into_the_open(root: Path) -> None:
    """A link of one's own to a folder that others can swap."""
    moved = swap(root, "")
    (root.parents[1] / "open").mkdir()
    moved.rename(root.parents[1] / "open" / "cache")
    (root.parents[1] / "open").chmod(0o777)
    root.unlink()
    root.symlink_to("../open/../open/cache")


def op_folder_is_a_link(root: Path) -> None:
    swap(root / "v2" / "keytest.plus", "")


def loop(root: Path) -> None:
    shutil.rmtree(root.parent)
    root.parent.symlink_to("inner-too")
    (root.parents[1] / "inner-too").symlink_to("inner")


DANGERS = Cases[Callable[[Path], None]]()


@DANGERS("parent-world-writable")
def _(root: Path) -> None:
    root.parent.chmod(0o777)


@DANGERS("grandparent-world-writable")
def _(root: Path) -> None:
    root.parents[1].chmod(0o757)


@DANGERS("parent-group-writable")
def _(root: Path) -> None:
    open_to_group(root.parent)


@DANGERS("parent-of-another-user")
def _(root: Path) -> None:
    give(root.parent, SOMEBODY)


@DANGERS("grandparent-of-another-user")
def _(root: Path) -> None:
    give(root.parents[1], SOMEBODY)


@DANGERS("root-with-the-sticky-bit")
def _(root: Path) -> None:
    root.chmod(0o1777)


DANGERS["root-group-writable"] = open_to_group


@DANGERS("root-of-another-user")
def _(root: Path) -> None:
    give(root, SOMEBODY)


DANGERS["link-of-another-user"] = link_of_somebody
DANGERS["link-to-where-others-write"] = link_into_the_open


@DANGERS("format-folder-world-writable")
def _(root: Path) -> None:
    (root / "v2").chmod(0o777)


@DANGERS("op-folder-world-writable")
def _(root: Path) -> None:
    (root / "v2" / "keytest.plus").chmod(0o777)


@DANGERS("arch-folder-group-writable")
def _(root: Path) -> None:
    (open_to_group(next((root / "v2" / "keytest.plus").iterdir())))


@DANGERS("op-folder-of-another-user")
def _(root: Path) -> None:
    give(root / "v2" / "keytest.plus", SOMEBODY)


DANGERS["op-folder-is-a-link"] = op_folder_is_a_link


@pytest.mark.parametrize("danger", DANGERS.values(), ids=DANGERS.keys())
def test_what_others_can_swap_is_not_loaded_and_one_warning_says_what_to_do(
    op: Path, root: Path, danger: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    danger(root)
    before = helpers.snapshot(root.parents[1])
    after = caught(op, root)
    assert len(after.warnings) == 1, after.warnings
    assert "OPJIT_CACHE" in after.warnings[0]
    assert str(root.parents[1]) in after.warnings[0]
    assert not after.entry.folder.resolve().is_relative_to(root.parents[1])
    assert (
        after.entry.library.read_bytes()
        == next(path for path in root.resolve().rglob("*plus.so")).read_bytes()
    )
    changed = {
        name
        for name, status in helpers.snapshot(root.parents[1]).items()
        if before.get(name) != status
    }
    assert all(
        "/staging" in name or "/parts" in name or name.endswith("/v2") for name in changed
    ), changed
    assert helpers.found(Store(root), describe(op)) is None, "and from now on without a word"


def test_parts_that_others_can_exchange_between_their_check_and_the_link_are_not_linked(
    op: Path, root: Path
) -> None:
    first = caught(op, root).entry.library.read_bytes()
    shutil.rmtree(root / "v2" / "keytest.plus")
    [parts] = (root / "v2" / "parts").iterdir()
    (root / "v2" / "parts").chmod(0o777)
    before = helpers.snapshot(parts.parent)
    after = caught(op, root)
    assert [f"{parts.parent} can be written by other users" in text for text in after.warnings] == [
        True
    ]
    assert not after.entry.folder.is_relative_to(root)
    assert after.entry.library.read_bytes() == first
    assert helpers.snapshot(parts.parent) == before


def test_a_folder_that_was_closed_is_used_by_the_same_process_and_not_once_it_is_open_again(
    op: Path, root: Path
) -> None:
    root.parent.chmod(0o777)
    with pytest.warns(
        CacheWarning, match=r"\(mode 777\), so other users .*; chmod go-w .*OPJIT_CACHE"
    ):
        assert helpers.found(Store(root), describe(op)) is None
    root.parent.chmod(0o755)
    assert helpers.found(Store(root), describe(op)) is not None
    root.parent.chmod(0o777)
    assert helpers.found(Store(root), describe(op)) is None


SAFE = Cases[Callable[[Path, pytest.MonkeyPatch], object]]()


@SAFE("sticky-parent")
def _(root: Path, patch: pytest.MonkeyPatch) -> None:
    root.parent.chmod(0o1777)


@SAFE("link")
def _(root: Path, patch: pytest.MonkeyPatch) -> None:
    swap(root, "")


@SAFE("parent-is-a-link")
def _(root: Path, patch: pytest.MonkeyPatch) -> None:
    swap(root.parent, "")


@SAFE("own-group")
def _(root: Path, patch: pytest.MonkeyPatch) -> None:
    own_group(root, patch)


@SAFE("link-over-a-link")
def _(root: Path, patch: pytest.MonkeyPatch) -> None:
    ([swap(each, "") for each in (root, root.parent, root.parents[1])])


@SAFE("relative-link")
def _(root: Path, patch: pytest.MonkeyPatch) -> None:
    swap(root, "../inner/./cache-moved")


@pytest.mark.parametrize("name", SAFE)
def test_what_only_this_user_can_swap_is_used(
    op: Path, root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    SAFE[name](root, monkeypatch)
    assert caught(op, root).warnings == []
    assert caught(op, root).entry.folder.is_relative_to(root)
    if name == "link":
        other = caught(
            write_op(root.parents[2] / "other" / "plus", amount_h="#define AMOUNT 3.0f\n"), root
        )
        assert other.warnings == [], "and what is new is kept there"
        assert other.entry.folder.is_relative_to(root)


@pytest.mark.parametrize(
    ("name", "members", "accounts"),
    [("staff", [], []), (ME, ["somebody"], []), (ME, [], ["somebody"]), ("staff", [ME], ["other"])],
)
def test_a_group_with_another_member_or_without_a_known_one_is_others(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    members: list[str],
    accounts: list[str],
) -> None:
    own_group(root, monkeypatch, name, members, accounts)
    assert "can be written by other users (mode 775" in (files.replacement_risk(root) or "")


@pytest.mark.parametrize(
    ("name", "members", "accounts"),
    [(ME, [], []), ("staff", [ME], []), ("staff", [], [ME]), (ME, [ME], [ME])],
)
def test_a_group_without_another_member_is_the_user(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    members: list[str],
    accounts: list[str],
) -> None:
    own_group(root, monkeypatch, name, members, accounts)
    assert files.replacement_risk(root) is None


@pytest.mark.parametrize("folder", ["outer", "outer/inner"])
def test_what_others_cannot_reach_is_not_theirs_to_replace(
    root: Path, tmp_path: Path, folder: str
) -> None:
    closed = tmp_path / folder
    root.chmod(0o777)
    for mode in (0o755, 0o750, 0o701):
        closed.chmod(mode)
        assert "can be written by other users (mode 777" in (files.replacement_risk(root) or "")
    closed.chmod(0o700)
    assert files.replacement_risk(root) is None
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o777)
    elsewhere.chmod(0o777)
    (closed / "link").symlink_to("/" + str(elsewhere))
    risk = files.replacement_risk(closed / "link")
    assert "can be written by other users (mode 777" in (risk or ""), "the link leads out of it"


def test_one_process_a_day_warns_that_the_cache_is_not_used(
    op: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.mkdir()
    here.chmod(0o777)

    def warnings_of_a_process() -> int:
        monkeypatch.setattr(store_module, "_warned", set())
        return sum("is not used" in text for text in caught(op, here).warnings)

    assert [warnings_of_a_process() for _ in range(3)] == [1, 0, 0]
    [note] = (here.parent / "tmp").glob("opjit-*/*.warned")
    os.utime(note, (0, 0))
    assert warnings_of_a_process() == 1, "a day has passed"
    here.chmod(0o757)
    assert warnings_of_a_process() == 1, "it is another problem"
    note.parent.chmod(0o777)
    assert warnings_of_a_process() == 1, "others may have made the note"


def own_group(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str = ME,
    members: Sequence[str] = (),
    accounts: Sequence[str] = (),
) -> None:
    """Let this user's main group write in the folder above a cache. It has a name, members, and accounts whose main group it is."""
    group = os.stat(root.parent).st_gid
    root.parent.chmod(0o775)
    monkeypatch.setattr(pwd, "getpwuid", lambda user: SimpleNamespace(pw_name=ME, pw_gid=group))
    monkeypatch.setattr(
        grp, "getgrgid", lambda number: SimpleNamespace(gr_name=name, gr_mem=members)
    )
    monkeypatch.setattr(files, "_accounts", lambda number: frozenset(accounts))


def test_the_accounts_of_a_group_are_those_whose_main_group_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accounts = [SimpleNamespace(pw_name=name, pw_gid=gid) for name, gid in (("a", 7), ("b", 8))]
    monkeypatch.setattr(pwd, "getpwall", lambda: accounts)
    files._accounts.cache_clear()
    assert files._accounts(7) == {"a"}
    files._accounts.cache_clear()


def test_an_access_control_list_is_others(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one, the group's bits in the mode are the most that any user or group in the list may do."""
    own_group(root, monkeypatch)
    # The owner, somebody, the group, the mask.
    entries = [
        (0x01, 7, -1),
        (0x02, 7, SOMEBODY),
        (0x04, 5, -1),
        (0x10, 7, -1),
        (0x20, 5, -1),
    ]
    try:
        os.setxattr(
            root.parent,
            "system.posix_acl_access",
            struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *each) for each in entries),
        )
    except OSError as error:
        pytest.skip(f"no access control lists here: {error}")
    assert "can be written by other users (mode 775" in (files.replacement_risk(root) or "")


def test_a_cache_that_is_not_there_yet_is_made_only_where_nobody_else_can_swap_it(
    op: Path, tmp_path: Path
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    after = caught(op, tmp_path / "open" / "new" / "cache")
    assert len(after.warnings) == 1
    assert not (tmp_path / "open" / "new" / "cache" / "v2" / "staging").exists()
    assert helpers.entries(tmp_path / "open" / "new" / "cache") == []


def test_a_cache_that_somebody_makes_while_the_way_to_it_is_looked_at_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "outer" / "cache"
    look = files.replacement_risk

    def overtaken(folder: Path, trusted_as: Path | None = None) -> str | None:
        found = look(folder, trusted_as)
        root.mkdir(parents=True)
        root.parent.chmod(0o777)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(files, "replacement_risk", overtaken)
        Store(root).problem()
    assert "can be written by other users" in str(Store(root).problem())


def test_a_loop_of_links_is_no_cache_and_no_hang(op: Path, root: Path) -> None:
    loop(root)
    after = caught(op, root)
    assert len(after.warnings) == 1
    assert "symbolic link" in after.warnings[0]


@pytest.mark.slow
@as_root
def test_a_container_without_the_host_s_root_uses_its_cache(op: Path, somebodys: Path) -> None:
    """In a user namespace that maps no other ids, / and /tmp belong to nobody that it knows."""
    shutil.copytree(op, somebodys / "plus")
    for path in somebodys.rglob("*"):
        os.chown(path, SOMEBODY, SOMEBODY)
    home = somebodys
    code = (
        "import ctypes, os\n"
        "if ctypes.CDLL(None).unshare(0x10000000) != 0: raise SystemExit(print('no namespaces'))\n"
        f"for name, text in (('setgroups', 'deny'), ('uid_map', '0 {SOMEBODY} 1')):\n"
        "    with open(f'/proc/self/{name}', 'w') as file: file.write(text)\n"
        "assert (os.stat('/').st_uid, os.geteuid()) == (65534, 0)\n"
        + helpers.declare(home / "plus")
        + "warnings.simplefilter('error')\nprint(opjit.get('keytest::plus', 'cpu')(torch.ones(1)).tolist())\n"
    )
    before = ("setpriv", f"--reuid={SOMEBODY}", f"--regid={SOMEBODY}", "--clear-groups")
    if (
        shutil.which("setpriv") is None
        or subprocess.run(
            [*before, sys.executable, "-c", "import torch"], capture_output=True, check=False
        ).returncode
        != 0
    ):
        pytest.skip("no setpriv, or a Python that other users cannot run")
    env = {"OPJIT_CACHE": str(home / "cache"), "HOME": str(home), "TMPDIR": str(home)}
    told = fresh(code, env, before=before).stdout
    if told == "no namespaces\n":
        pytest.skip("user namespaces are not allowed here")
    assert told == "[2.0]\n"
    assert len(helpers.entries(home / "cache")) == 1


def test_a_layer_that_others_can_swap_is_not_used_and_one_warning_says_so(
    op: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("OPJIT_LAYERS", str(root))
    root.parent.chmod(0o777)
    with pytest.warns(
        CacheWarning, match=r"\(mode 777\), so other users .*; chmod go-w .*OPJIT_LAYERS"
    ):
        assert helpers.found(Store(default_root()), describe(op), above=True) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert helpers.found(Store(default_root()), describe(op), above=True) is None
        root.parent.chmod(0o755)
        assert helpers.found(Store(default_root()), describe(op), above=True) is not None


@pytest.mark.parametrize("danger", ["package", "prebuilt"])
def test_binaries_beside_a_source_that_others_can_swap_are_not_used(
    op: Path, root: Path, tmp_path: Path, danger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "empty"))
    package = tmp_path / "package"
    (package / "plus").mkdir(parents=True)
    shutil.copytree(op, package / "plus", dirs_exist_ok=True)
    root.rename(package / "plus" / "prebuilt")
    recipe = describe(package / "plus")
    assert helpers.found(Store(default_root()), recipe, above=True) is not None
    (package if danger == "package" else package / "plus" / "prebuilt").chmod(0o777)
    with pytest.warns(
        CacheWarning,
        match=r"\(mode 777\), so other users .*; chmod go-w .*a directory that only you can write",
    ):
        assert helpers.found(Store(default_root()), recipe, above=True) is None


READERS: dict[str, Callable[[Store], object]] = {
    "toolchain": lambda place: place.notes,
    "seen": lambda place: place.seen("0" * 64),
    "tuned": lambda place: tune._read_choice("name", ["TILE=1"], place),
}


@pytest.mark.parametrize("name", READERS)
def test_a_folder_of_notes_that_others_can_write_is_named_once(root: Path, name: str) -> None:
    place = Store(root)
    READERS[name](place)
    folder = place.base / name
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            assert not READERS[name](place)
    [warned] = found
    assert warned.category is CacheWarning
    assert f"{folder} can be written by other users (mode 777); chmod go-w" in str(warned.message)
