"""Push, pull, pack, unpack: exactly the sent entries arrive, with their signatures."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import subprocess
import tarfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from opjit.backends import targets
from opjit.cache import transfer
from opjit.cli import main
from opjit.errors import RemoteError
from opjit.share import remote, transport, trust
from opjit.store.entry import verify
from tests import helpers, remotes
from tests.attacks import make
from tests.helpers import SOMEBODY, as_root, tmpfs
from tests.remotes import Published, ask, from_folder, serving


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: Published, other: Published) -> Path:
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
def receive(empty: Path, published: Published, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
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
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def good(cache: Path, *published: Published) -> bool:
    """Whether the cache holds these entries, as they were built, and no other."""
    found = {verify(folder, targets.here(helpers.cpu()))[0].library.read_bytes() for folder in helpers.entries(cache)}
    return found == {each.library for each in published} and not list((cache / "v1" / "staging").iterdir())


# --- push and pull ---------------------------------------------------------------------------------------------------------------


def test_what_was_pushed_is_pulled_into_another_cache_and_neither_happens_twice(
    published: Published, other: Published, tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch, receive: Callable[..., None]
) -> None:
    url = (tmp_path / "remote").as_uri()
    first = opjit("cache", "push", url, "--sign", published.private)
    assert (first.exit_code, first.output.splitlines()[-1]) == (0, "uploaded 2, 0 already there, 0 left out")
    before = helpers.snapshot(tmp_path / "remote")
    again = opjit("cache", "push", url, "--sign", published.private)
    assert (again.exit_code, again.output) == (0, "uploaded 0, 2 already there, 0 left out\n")
    assert helpers.snapshot(tmp_path / "remote") == before
    assert names(tmp_path / "remote") == sorted([published.name, published.pointer, other.name, other.pointer])
    receive()
    monkeypatch.setenv("OPJIT_REMOTE", url)
    assert opjit("cache", "pull").output.splitlines() == [other.name, published.name, "fetched 2, 0 already there, 0 left out"]
    assert good(empty, published, other)
    before = helpers.snapshot(empty)
    assert opjit("cache", "pull").output == "fetched 0, 2 already there, 0 left out\n"
    assert helpers.snapshot(empty) == before


def test_only_the_ops_that_are_named_are_pushed_and_pulled(
    published: Published, other: Published, tmp_path: Path, receive: Callable[..., None]
) -> None:
    url = (tmp_path / "remote").as_uri()
    assert transfer.push(url, sign=published.private, ops=[other.op.qualified]).moved == [other.name]
    assert transfer.push(url, sign=published.private).moved == [published.name]
    receive()
    assert transfer.pull(url, ops=[published.op.qualified]).moved == [published.name]
    missing = opjit("cache", "pull", url, "nobody::nothing")
    assert missing.exit_code == 1
    assert "nobody::nothing is left out: " + url + " has no entry of it" in missing.output


def test_entries_for_other_machines_are_pushed_and_pulled_too(published: Published, tmp_path: Path, receive: Callable[..., None]) -> None:
    from opjit import request

    here = targets.here(helpers.cpu()).arch
    request.entry(published.op, targets.named("x86-64-v2" if here != "x86-64-v2" else "x86-64-v3"))
    url = (tmp_path / "remote").as_uri()
    assert len(transfer.push(url, sign=published.private, ops=[published.op.qualified]).moved) == 2
    receive()
    assert len(transfer.pull(url).moved) == 2


def test_a_push_says_whether_it_signs(published: Published, tmp_path: Path) -> None:
    url = (tmp_path / "remote").as_uri()
    for words in ((), ("--unsigned", "--sign", published.private)):
        refused = opjit("cache", "push", url, *words)
        assert refused.exit_code == 2
        assert "--sign KEY" in refused.output
    assert not (tmp_path / "remote").exists()
    assert opjit("cache", "push", url, "--unsigned").exit_code == 0
    assert b" -\n" in (tmp_path / "remote" / published.name).read_bytes()[:100]


def test_an_entry_that_is_not_in_order_is_named_and_not_pushed(published: Published, other: Published, cache: Path, tmp_path: Path) -> None:
    library = cache / published.entry.library.relative_to(published.entry.folder.parents[3])
    content = library.read_bytes()
    library.unlink()
    library.write_bytes(content[:-1])
    result = opjit("cache", "push", (tmp_path / "remote").as_uri(), "--sign", published.private)
    assert result.exit_code == 1
    assert f"{library.parent} is left out: its library does not have the size in its manifest" in result.output
    assert names(tmp_path / "remote") == sorted([other.name, other.pointer])


def test_an_entry_under_another_op_s_name_is_named_and_not_pushed(published: Published, cache: Path, tmp_path: Path) -> None:
    folder = cache / published.entry.folder.relative_to(published.entry.folder.parents[3])
    shutil.copytree(folder, cache / "v1" / "remoteother.plus" / "x86-64-v2" / folder.name)
    result = opjit("cache", "push", (tmp_path / "remote").as_uri(), "--sign", published.private)
    assert result.exit_code == 1
    assert "it lies among another op's entries" in result.output


def test_a_push_that_is_killed_in_the_middle_leaves_no_half_of_an_entry(published: Published, tmp_path: Path) -> None:
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
    published: Published, other: Published, tmp_path: Path, empty: Path, receive: Callable[..., None]
) -> None:
    url = (tmp_path / "remote").as_uri()
    transfer.push(url, sign=published.private, ops=[published.op.qualified])
    transfer.push(url, sign=other.private, ops=[other.op.qualified])
    lost = (tmp_path / "remote" / published.name).with_name("0" * 64 + ".opjit")
    lost.write_bytes(published.content)  # a good one, under another's name
    (tmp_path / "remote" / "v1" / "README").write_text("not an entry")
    receive()
    result = opjit("cache", "pull", url)
    assert result.exit_code == 1
    assert f"{other.name} is left out: no key in OPJIT_TRUST made its signature" in result.output
    assert f"{'0' * 64}.opjit is left out: it holds an entry of {published.op.qualified}" in result.output
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


def test_a_pull_that_trusts_nobody_says_what_to_do(published: Published, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPJIT_CACHE", str(empty))
    refused = opjit("cache", "pull", published.url)
    assert refused.exit_code == 1
    assert "set OPJIT_TRUST to the public key" in refused.output
    assert not empty.exists()


def test_a_web_server_cannot_list_its_entries() -> None:
    refused = opjit("cache", "pull", "https://host/opjit")
    assert refused.exit_code == 1
    assert "https://host/opjit cannot list its entries: set OPJIT_REMOTE" in refused.output


def test_a_push_to_what_cannot_be_written_is_a_one_line_error() -> None:
    for url, told in (("https://host/opjit", "Error: https://host/opjit is only read over HTTP: push to the storage behind it"),
                      ("file:///proc/nowhere", "Error: file:///proc/nowhere cannot be written: ")):
        refused = opjit("cache", "push", url, "--unsigned")
        assert refused.exit_code == 1
        assert refused.output.startswith(told)


def test_without_an_address_or_with_one_that_is_none_the_commands_say_what_is_expected() -> None:
    for words in (("push", "--unsigned"), ("pull",)):
        assert "OPJIT_REMOTE" in opjit("cache", *words).output
        assert "nosuch" in opjit("cache", words[0], "nosuch://x", *words[1:]).output


@pytest.mark.parametrize("failing", ["open", "unlink"])
def test_a_pack_in_a_folder_that_cannot_be_entered_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Even if the staged file cannot be removed."""
    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(os, "replace", lambda *_: refuse(tmp_path) if failing == "unlink" else None)
    done = opjit("cache", "pack", "/proc/nowhere/pack.tar" if failing == "open" else tmp_path / "pack.tar")
    assert done.exit_code == 1
    assert "pack.tar cannot be written: " in done.output


def test_a_remote_that_never_answers_is_given_up(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_SECONDS", 0.3)
    monkeypatch.setenv("OPJIT_TRUST", published.public)
    monkeypatch.setattr(transport.Objects, "names", lambda self, prefix: time.sleep(30))
    with pytest.raises(RemoteError, match="no answer"):
        transfer.pull(published.url)


@as_root
def test_a_full_disk_is_said(published: Published, tmp_path: Path, empty: Path, receive: Callable[..., None]) -> None:
    url = (tmp_path / "remote").as_uri()
    transfer.push(url, sign=published.private)
    receive()
    empty.mkdir(mode=0o700)
    with tmpfs(empty, "size=20k"):
        refused = opjit("cache", "pull", url)
        assert refused.exit_code == 1
        assert "No space left on device" in refused.output
        assert helpers.entries(empty) == []


# --- pack and unpack -------------------------------------------------------------------------------------------------------------


def test_a_pack_is_unpacked_into_another_cache_and_the_same_entries_give_the_same_bytes(
    published: Published, other: Published, tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = opjit("cache", "pack", tmp_path / "a.tar")
    assert (packed.exit_code, packed.output) == (0, "packed 2, 0 already there, 0 left out\n")
    transfer.pack(tmp_path / "b.tar")
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    assert not list(tmp_path.glob(".*"))
    monkeypatch.setenv("OPJIT_CACHE", str(empty))
    unpacked = opjit("cache", "unpack", tmp_path / "a.tar")
    assert unpacked.output.splitlines() == [other.name, published.name, "unpacked 2, 0 already there, 0 left out"]
    assert good(empty, published, other)
    assert opjit("cache", "unpack", tmp_path / "a.tar").output == "unpacked 0, 2 already there, 0 left out\n"


def test_a_pack_is_a_plain_tar_in_order_without_dates_and_owners(published: Published, other: Published, tmp_path: Path) -> None:
    transfer.pack(tmp_path / "a.tar", sign=published.private)
    with tarfile.open(tmp_path / "a.tar", "r:") as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == [*sorted([published.name, other.name]), *sorted([published.pointer, other.pointer])]
    assert {(member.mtime, member.uid, member.gid, member.uname, member.mode, member.type) for member in members} == {
        (0, 0, 0, "", 0o644, tarfile.REGTYPE)}


def test_a_pack_untarred_on_a_web_server_is_a_remote(
    published: Published, tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch, receive: Callable[..., None]
) -> None:
    transfer.pack(tmp_path / "a.tar", sign=published.private)
    (tmp_path / "www").mkdir()
    subprocess.run(["tar", "xf", str(tmp_path / "a.tar"), "-C", str(tmp_path / "www")], check=True)
    receive()
    monkeypatch.setattr(remote, "_IN_ALL", 60.0)
    with serving(from_folder(tmp_path / "www")) as server:
        monkeypatch.setenv("OPJIT_REMOTE", server.url)
        answer = ask(published.op)
        assert not answer.was_built
        assert answer.warnings == []
        assert good(empty, published)
        (tmp_path / "www" / "v1" / "sm_80+sm_90").write_bytes(b"two archs")
        assert transport.Objects(server.url).read("v1/sm_80+sm_90", 100, time.monotonic() + 60) == b"two archs"


def test_a_pack_takes_the_place_of_another_whole_or_not_at_all(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.tar").write_text("old")
    shutil.rmtree(cache)
    nothing = opjit("cache", "pack", tmp_path / "a.tar")
    assert nothing.exit_code == 1
    assert "there is no entry to pack" in nothing.output
    assert (tmp_path / "a.tar").read_text() == "old"
    assert not list(tmp_path.glob(".*"))
    refused = opjit("cache", "pack", tmp_path / "nowhere" / "a.tar")
    assert "cannot be written" in refused.output


def test_a_pack_that_somebody_else_could_have_written_must_be_signed(
    published: Published, other: Published, tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = tmp_path / "a.tar"
    transfer.pack(pack, sign=published.private)
    transfer.pack(tmp_path / "own.tar")
    pack.chmod(0o666)
    monkeypatch.setenv("OPJIT_CACHE", str(empty))
    refused = opjit("cache", "unpack", pack)
    assert refused.exit_code == 1
    assert "can be written by others" in refused.output
    monkeypatch.setenv("OPJIT_TRUST", "unsigned")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "can be written by others" in opjit("cache", "unpack", pack).output
    monkeypatch.setenv("OPJIT_TRUST", other.public)
    refused = opjit("cache", "unpack", pack)
    assert (refused.exit_code, refused.output.count("is left out: no key in OPJIT_TRUST made its signature")) == (1, 2)
    assert not empty.exists()
    monkeypatch.setenv("OPJIT_TRUST", published.public)
    refused = opjit("cache", "unpack", tmp_path / "own.tar")
    assert (refused.exit_code, refused.output.count("it is not signed")) == (1, 2)
    assert not empty.exists()
    assert opjit("cache", "unpack", pack).exit_code == 0
    assert good(empty, published, other)


@as_root
@pytest.mark.parametrize("how", ["owner", "link"])
def test_a_pack_of_another_user_or_behind_a_link_is_refused(tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    transfer.pack(tmp_path / "a.tar")
    if how == "owner":
        os.chown(tmp_path / "a.tar", SOMEBODY, SOMEBODY)
    else:
        (tmp_path / "a.tar").rename(tmp_path / "real.tar")
        (tmp_path / "a.tar").symlink_to(tmp_path / "real.tar")
    monkeypatch.setenv("OPJIT_CACHE", str(empty))
    refused = opjit("cache", "unpack", tmp_path / "a.tar")
    assert refused.exit_code == 1
    assert "is not unpacked" in refused.output
    assert not empty.exists()


# What is said of them.
PACKS = {
    **dict.fromkeys(("dotdot.tar", "absolute.tar", "extra.tar"), "its name is not an entry's"),
    **dict.fromkeys(("links.tar", "devices.tar", "long-name.tar", "sparse.tar"), "it is not a plain file"),
    **dict.fromkeys(("bomb.tar", "bomb-octal.tar", "negative.tar"), "its size exceeds the file's"),
    **dict.fromkeys(("not-a-tar.tar", "damaged-header.tar", "no-end.tar"), "damaged or truncated"),
}


@pytest.mark.parametrize("name", [name for name in make.FILES if name.endswith(".tar")])
def test_a_hostile_pack_leaves_nothing_anywhere_and_every_member_is_named(
    tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("OPJIT_CACHE", str(empty))
    shutil.copy(make.HERE / name, tmp_path / name)
    before = helpers.snapshot(tmp_path)
    result = opjit("cache", "unpack", tmp_path / name)
    assert result.exit_code == 1
    assert result.output.splitlines()[-1].startswith("unpacked 0, 0 already there, ")
    assert PACKS[name] in result.output
    assert helpers.snapshot(tmp_path) == before


def _with(pack: Path, *members: tuple[str, bytes]) -> Path:
    """A pack with more members in front."""
    made = pack.with_name("made.tar")
    with tarfile.open(made, "w", format=tarfile.USTAR_FORMAT) as archive, tarfile.open(pack, "r:") as old:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for member in old.getmembers():
            archive.addfile(member, old.extractfile(member))
    return made


def test_what_is_hostile_or_damaged_in_a_pack_is_named_and_the_rest_is_unpacked(
    published: Published, other: Published, tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer.pack(tmp_path / "a.tar")
    swapped = published.bundle._replace(library=other.library).dump()
    key = other.entry.key
    made = _with(tmp_path / "a.tar", ("../../evil", b"x"), (published.name.replace("v1/", "v1/x"), published.content),
                 (other.name.replace(key, "1" * 64), swapped), (published.name, swapped),
                 (published.name.replace("remotetest", "opjit"), published.content))
    monkeypatch.setenv("OPJIT_CACHE", str(empty))
    result = opjit("cache", "unpack", made)
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == "unpacked 2, 0 already there, 5 left out"
    assert good(empty, published, other)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_a_file_of_a_pack_that_follows_a_link_of_its_name_is_left_out(
    published: Published, tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes
) -> None:
    """tar would write through the link, so whoever made that meant harm."""
    link = tarfile.TarInfo(published.name)
    link.type, link.linkname = kind, "/etc/passwd"
    transfer.pack(tmp_path / "a.tar")
    made = tmp_path / "made.tar"
    made.write_bytes(link.tobuf(tarfile.USTAR_FORMAT) + (tmp_path / "a.tar").read_bytes())
    monkeypatch.setenv("OPJIT_CACHE", str(empty))
    result = opjit("cache", "unpack", made)
    assert result.exit_code == 1
    assert "its name is also that of something else than a file" in result.output
    assert len(list(empty.rglob("*.so"))) == 1, "the other entry"


@pytest.mark.parametrize("keep", [0, 100, 511, 512, 700, -5000, -11000])
def test_a_pack_that_was_cut_off_says_so_and_gives_what_is_whole(
    published: Published, tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    transfer.pack(tmp_path / "a.tar", ops=[published.op.qualified])
    content = (tmp_path / "a.tar").read_bytes()
    end = len(content) - len(content[:].rstrip(b"\0"))
    cut = content[:keep] if keep >= 0 else content[:len(content) - end + keep]
    (tmp_path / "a.tar").write_bytes(cut)
    monkeypatch.setenv("OPJIT_CACHE", str(empty))
    result = opjit("cache", "unpack", tmp_path / "a.tar")
    assert result.exit_code == 1
    assert "damaged or truncated" in result.output


def test_the_library_functions_do_what_the_commands_do(
    published: Published, tmp_path: Path, empty: Path, receive: Callable[..., None]
) -> None:
    said: list[str] = []
    report = transfer.push(f"memory://{tmp_path.name}", sign=published.private, say=said.append)
    assert report.moved == said
    receive()
    assert transfer.pull(f"memory://{tmp_path.name}").moved == report.moved
    assert transport.Objects(f"memory://{tmp_path.name}").names("v1") != []
    assert len(helpers.entries(empty)) == 2


def test_keygen_prints_what_to_set(tmp_path: Path) -> None:
    result = opjit("keygen", "ci", tmp_path)
    assert result.exit_code == 0
    assert (tmp_path / "ci.key").stat().st_mode & 0o777 == 0o600
    [line] = [line for line in result.output.splitlines() if line.startswith("export OPJIT_TRUST=ed25519:")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPJIT_TRUST", line.partition("=")[2])
        [inline] = trust.configured().keys  # type: ignore[union-attr]
        patch.setenv("OPJIT_TRUST", str(tmp_path / "ci.pub"))
        assert trust.configured() == trust.Trust((inline,))
    assert opjit("keygen", "ci", tmp_path).exit_code == 1
