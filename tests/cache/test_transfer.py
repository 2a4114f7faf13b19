"""Push, pull, pack, unpack: exactly the sent entries arrive, with their signatures."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from opjit import cache as opjit_cache
from opjit.backends import targets
from opjit.cache import transfer, trees
from opjit.cli import main
from opjit.errors import RemoteError
from opjit.share import remote, transport, trust
from opjit.store.entry import verify
from tests import helpers, remotes
from tests.attacks import make
from tests.helpers import as_root, refused, tmpfs
from tests.remotes import Published, ask, from_folder, serving


@pytest.fixture(autouse=True)
def cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: Published, other: Published
) -> Path:
    """A cache with the entries of both ops; nobody is trusted."""
    folder = tmp_path / "cache"
    for each in (published, other):
        shutil.copytree(each.entry.folder.parents[3], folder, dirs_exist_ok=True)
    monkeypatch.setenv("OPJIT_CACHE", str(folder))
    monkeypatch.setenv("no_proxy", "*")
    remotes.forget(monkeypatch)
    return folder


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """Another cache, without anything."""
    return tmp_path / "empty"


@pytest.fixture
def receive(
    empty: Path, published: Published, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """``receive()``: from now on this process has the empty cache, and trusts the signer of `published`."""

    def change() -> None:
        monkeypatch.setenv("OPJIT_CACHE", str(empty))
        monkeypatch.setenv("OPJIT_TRUST", published.public)

    return change


def opjit(*words: object) -> Result:
    """The command; what it says must not be a traceback."""
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def names(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def good(cache: Path, *published: Published) -> bool:
    """Whether the cache holds these entries, as they were built, and no other."""
    found = {
        verify(folder, targets.here(helpers.cpu()))[0].library.read_bytes()
        for folder in helpers.entries(cache)
    }
    return found == {each.library for each in published} and not list(
        (cache / "v2" / "staging").iterdir()
    )


def test_what_was_pushed_is_pulled_into_another_cache_and_neither_happens_twice(
    published: Published,
    other: Published,
    tmp_path: Path,
    empty: Path,
    monkeypatch: pytest.MonkeyPatch,
    receive: Callable[..., None],
) -> None:
    url = (tmp_path / "remote").as_uri()
    first = opjit("cache", "push", url, "--sign", published.private)
    assert (first.exit_code, first.output.splitlines()[-1]) == (
        0,
        "uploaded 2, 0 already there, 0 left out",
    )
    before = helpers.snapshot(tmp_path / "remote")
    again = opjit("cache", "push", url, "--sign", published.private)
    assert (again.exit_code, again.output) == (0, "uploaded 0, 2 already there, 0 left out\n")
    assert helpers.snapshot(tmp_path / "remote") == before
    assert names(tmp_path / "remote") == sorted(
        [each for held in (published, other) for each in (held.name, held.pointer, held.base)]
    )
    receive()
    monkeypatch.setenv("OPJIT_REMOTE", url)
    assert opjit("cache", "pull").output.splitlines() == [
        other.name,
        published.name,
        "fetched 2, 0 already there, 0 left out",
    ]
    assert good(empty, published, other)
    before = helpers.snapshot(empty)
    assert opjit("cache", "pull").output == "fetched 0, 2 already there, 0 left out\n"
    assert helpers.snapshot(empty) == before


def test_only_the_ops_that_are_named_are_pushed_and_pulled(
    published: Published, other: Published, tmp_path: Path, receive: Callable[..., None]
) -> None:
    url = (tmp_path / "remote").as_uri()
    assert transfer.push(url, sign=published.private, ops=[other.op.qualified]).moved == [
        other.name
    ]
    assert transfer.push(url, sign=published.private).moved == [published.name]
    receive()
    assert transfer.pull(url, ops=[published.op.qualified]).moved == [published.name]
    missing = opjit("cache", "pull", url, "nobody::nothing")
    assert missing.exit_code == 1
    assert (
        "nobody::nothing is left out: " + url + " does not contain an entry of it" in missing.output
    )


def test_a_push_says_whether_it_signs(published: Published, tmp_path: Path) -> None:
    url = (tmp_path / "remote").as_uri()
    for words in ((), ("--unsigned", "--sign", published.private)):
        misused = opjit("cache", "push", url, *words)
        assert misused.exit_code == 2
        assert "--sign KEY" in misused.output
    assert not (tmp_path / "remote").exists()
    assert opjit("cache", "push", url, "--unsigned").exit_code == 0
    assert b" -\n" in (tmp_path / "remote" / published.name).read_bytes()[:100]


def test_an_entry_that_is_not_in_order_is_named_and_not_pushed(
    published: Published, other: Published, cache: Path, tmp_path: Path
) -> None:
    library = cache / published.entry.library.relative_to(published.entry.folder.parents[3])
    shutil.copytree(
        library.parent, cache / "v2" / "remoteother.plus" / "x86-64-v2" / library.parent.name
    )
    content = library.read_bytes()
    library.unlink()
    library.write_bytes(content[:-1])
    result = opjit("cache", "push", (tmp_path / "remote").as_uri(), "--sign", published.private)
    assert result.exit_code == 1
    assert (
        f"{library.parent} is left out: its library does not have the size in its manifest"
        in result.output
    )
    assert "which is not the one in its name" in result.output
    assert names(tmp_path / "remote") == sorted([other.name, other.pointer, other.base])


def test_a_push_that_is_killed_in_the_middle_leaves_no_half_of_an_entry(
    published: Published, tmp_path: Path
) -> None:
    code = (
        "import os, signal\nfrom pathlib import Path\nfrom opjit import files; from opjit.cache import transfer\n"
        "def half(path, content):\n"
        "    path.write_bytes(content[:len(content) // 2])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.write_synced = half\n"
        f"transfer.push({(tmp_path / 'remote').as_uri()!r}, sign=Path({str(published.private)!r}))\n"
    )
    killed = helpers.ended(code)
    assert killed.returncode == -signal.SIGKILL
    assert [name for name in names(tmp_path / "remote") if name.endswith((".opjit", ".key"))] == []
    assert len(transfer.push((tmp_path / "remote").as_uri(), sign=published.private).moved) == 2


def test_a_pull_names_what_is_not_trusted_or_damaged_and_takes_the_rest(
    published: Published,
    other: Published,
    tmp_path: Path,
    empty: Path,
    receive: Callable[..., None],
) -> None:
    url = (tmp_path / "remote").as_uri()
    transfer.push(url, sign=published.private, ops=[published.op.qualified])
    transfer.push(url, sign=other.private, ops=[other.op.qualified])
    lost = (tmp_path / "remote" / published.name).with_name("0" * 64 + ".opjit")
    lost.write_bytes(published.content)  # a good one, under another's name
    (tmp_path / "remote" / "v2" / "README").write_text("not an entry")
    receive()
    result = opjit("cache", "pull", url)
    assert result.exit_code == 1
    assert f"{other.name} is left out: no key in OPJIT_TRUST made its signature" in result.output
    assert (
        f"{'0' * 64}.opjit is left out: it contains an entry of {published.op.qualified}"
        in result.output
    )
    assert good(empty, published)


@pytest.mark.parametrize("name", [name for name in make.FILES if name.endswith(".opjit")])
def test_a_pull_leaves_a_hostile_object_out_whether_or_not_a_signature_is_asked_for(
    published: Published, tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    place = tmp_path / "remote" / published.name
    place.parent.mkdir(parents=True)
    shutil.copy(make.HERE / name, place)
    monkeypatch.setenv("OPJIT_CACHE", str(empty))
    for trusted in (published.public, "unsigned"):
        monkeypatch.setenv("OPJIT_TRUST", trusted)
        monkeypatch.setattr(trust, "_warned", {"unsigned"})
        report = transfer.pull(place.parents[3].as_uri())
        assert (report.moved, len(report.problems)) == ([], 1)
        assert not empty.exists()


def test_a_pull_that_trusts_nobody_says_what_to_do(
    published: Published, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPJIT_CACHE", str(empty))
    assert "set OPJIT_TRUST to the public key" in refused("cache", "pull", published.url)
    assert not empty.exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("pull", "https://host/opjit"),
            "cannot push to https://host/opjit or pull everything from it, because HTTP remotes are read-only and cannot list entries",
        ),
        (
            ("push", "https://host/opjit", "--unsigned"),
            "cannot push to https://host/opjit or pull everything from it, because HTTP remotes are read-only and cannot list entries",
        ),
        (
            ("push", "file:///proc/nowhere", "--unsigned"),
            "file:///proc/nowhere cannot be written: ",
        ),
    ],
)
def test_what_a_remote_cannot_do_is_a_one_line_error(words: tuple[str, ...], told: str) -> None:
    assert refused("cache", *words).startswith(f"Error: {told}")


def test_without_an_address_or_with_one_that_is_none_the_commands_say_what_is_expected() -> None:
    for words in (("push", "--unsigned"), ("pull",)):
        assert "OPJIT_REMOTE" in opjit("cache", *words).output
        assert "nosuch" in opjit("cache", words[0], "nosuch://x", *words[1:]).output


def test_a_remote_that_never_answers_is_given_up(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_SECONDS", 0.3)
    monkeypatch.setenv("OPJIT_TRUST", published.public)
    monkeypatch.setattr(transport.Objects, "names", lambda self, prefix: time.sleep(30))
    with pytest.raises(RemoteError, match="no answer"):
        transfer.pull(published.url)


@as_root
def test_a_full_disk_is_said(
    published: Published, tmp_path: Path, empty: Path, receive: Callable[..., None]
) -> None:
    url = (tmp_path / "remote").as_uri()
    transfer.push(url, sign=published.private)
    receive()
    empty.mkdir(mode=0o700)
    with tmpfs(empty, "size=20k"):
        assert "No space left on device" in refused("cache", "pull", url)
        assert helpers.entries(empty) == []


def test_a_push_to_a_folder_makes_a_remote_for_a_web_server(
    published: Published,
    tmp_path: Path,
    empty: Path,
    monkeypatch: pytest.MonkeyPatch,
    receive: Callable[..., None],
) -> None:
    transfer.push((tmp_path / "www").as_uri(), sign=published.private)
    receive()
    monkeypatch.setattr(remote, "_IN_ALL", 60.0)
    with serving(from_folder(tmp_path / "www")) as server:
        monkeypatch.setenv("OPJIT_REMOTE", server.url)
        answer = ask(published.op)
        assert not answer.was_built
        assert answer.warnings == []
        assert good(empty, published)
        (tmp_path / "www" / "v2" / "sm_80+sm_90").write_bytes(b"two archs")
        assert transport.Objects(server.url).within(60).read("v2/sm_80+sm_90", 100) == b"two archs"


def test_a_pack_has_what_a_push_writes_and_is_unpacked_into_another_cache(
    published: Published,
    other: Published,
    tmp_path: Path,
    empty: Path,
    receive: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = opjit("cache", "pack", tmp_path / "ops.pack", "--sign", published.private)
    assert (packed.exit_code, packed.output) == (0, "packed 2, 0 already there, 0 left out\n")
    transfer.push((tmp_path / "remote").as_uri(), sign=published.private)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    receive()
    [copy] = trees.open_tree(tmp_path / "ops.pack", tmp_path / "copy").values()
    assert names(Path(copy)) == names(tmp_path / "remote")
    for name in names(Path(copy)):
        assert Path(copy, name).read_bytes() == (tmp_path / "remote" / name).read_bytes()
    unpacked = opjit("cache", "unpack", tmp_path / "ops.pack")
    assert unpacked.output.splitlines() == [
        other.name,
        published.name,
        "unpacked 2, 0 already there, 0 left out",
    ]
    assert good(empty, published, other)
    assert (
        opjit("cache", "unpack", tmp_path / "ops.pack").output
        == "unpacked 0, 2 already there, 0 left out\n"
    )
    assert os.listdir(tmp_path / "tmp") == []


def test_an_entry_of_a_pack_that_is_not_in_order_stays_out(
    published: Published, tmp_path: Path, empty: Path, receive: Callable[..., None]
) -> None:
    objects = {
        "swapped": (
            published.name,
            published.bundle._replace(library=published.library + b"x").dump(),
        ),
        "renamed": (published.name.replace("remotetest", "opjit"), published.content),
        "longer": (published.name, published.content + b"x"),
    }
    receive()
    for kind, (name, content) in objects.items():
        place = tmp_path / kind / name
        place.parent.mkdir(parents=True)
        place.write_bytes(content)
        trees.pack_tree(tmp_path / "ops.pack", {"ENTRIES": tmp_path / kind}, published.private)
        left_out = opjit("cache", "unpack", tmp_path / "ops.pack")
        assert left_out.exit_code == 1
        assert f"{name} is left out: " in left_out.output
        assert left_out.output.endswith("unpacked 0, 0 already there, 1 left out\n")
    assert helpers.entries(empty) == []


def test_a_pack_that_no_trusted_key_signed_or_that_has_no_entries_is_refused(
    published: Published, tmp_path: Path, empty: Path, receive: Callable[..., None]
) -> None:
    assert len(opjit_cache.pack(tmp_path / "ops.pack", ops=[published.op.qualified]).moved) == 1
    trees.pack_tree(tmp_path / "engines.tree", {"DIR": tmp_path / "cache"}, published.private)
    unpack = ("cache", "unpack", tmp_path / "ops.pack")
    assert f"nothing from {tmp_path / 'ops.pack'} is trusted: set OPJIT_TRUST" in refused(*unpack)
    receive()
    assert "it is not signed" in refused(*unpack)
    told = refused("cache", "unpack", tmp_path / "engines.tree")
    assert "engines.tree has no entries; pass it to `opjit run --tree`" in told
    assert helpers.entries(empty) == []


def test_a_pack_that_cannot_be_made_leaves_the_one_before(
    published: Published, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "ops.pack").write_text("before")
    for words, said in (
        (("ops.pack", "nobody::nothing"), "expected entries to pack"),
        (("none/ops.pack",), "cannot be written"),
    ):
        failed = opjit("cache", "pack", tmp_path / words[0], *words[1:])
        assert failed.exit_code == 1
        assert said in failed.output
    assert (tmp_path / "ops.pack").read_text() == "before"
    assert not list(tmp_path.glob(".*"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPJIT_TRUST", published.public)
        for name in ("pipe", "none.pack", "cache"):
            assert opjit("cache", "unpack", tmp_path / name).exit_code != 0


def test_the_library_functions_do_what_the_commands_do(
    published: Published, tmp_path: Path, empty: Path, receive: Callable[..., None]
) -> None:
    said: list[str] = []
    report = transfer.push(f"memory://{tmp_path.name}", sign=published.private, say=said.append)
    assert report.moved == said
    receive()
    assert transfer.pull(f"memory://{tmp_path.name}").moved == report.moved
    assert transport.Objects(f"memory://{tmp_path.name}").names("v2") != []
    assert len(helpers.entries(empty)) == 2


def test_keygen_prints_what_to_set(tmp_path: Path) -> None:
    result = opjit("keygen", "ci", tmp_path)
    assert result.exit_code == 0
    assert (tmp_path / "ci.key").stat().st_mode & 0o777 == 0o600
    [line] = [
        line
        for line in result.output.splitlines()
        if line.startswith("export OPJIT_TRUST=ed25519:")
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPJIT_TRUST", line.partition("=")[2])
        [inline] = trust.required().keys
        patch.setenv("OPJIT_TRUST", str(tmp_path / "ci.pub"))
        assert trust.required() == trust.Trust((inline,))
    assert opjit("keygen", "ci", tmp_path).exit_code == 1
