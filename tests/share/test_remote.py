"""The remote: it may help, and whatever it does, an op works, in bounded time, and nothing untrusted is parsed, written or loaded."""

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from opjit import files
from opjit.builder import build
from opjit.errors import CacheWarning, EntryError, OpjitError, RemoteError
from opjit.recipe.document import document_key
from opjit.recipe.recipe import Recipe
from opjit.share import remote, trust
from opjit.share.transport import Objects
from opjit.store import manifest
from opjit.store.bundle import Bundle
from opjit.store.store import Store
from tests import helpers, remotes
from tests.attacks import make
from tests.helpers import SOMEBODY, Cases, as_root, cache_warnings, until
from tests.remotes import (
    Answer,
    Behaviour,
    Handler,
    Published,
    Server,
    ask,
    drip,
    endless,
    from_folder,
    half_then_reset,
    serving,
)


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: Published) -> None:
    """An empty cache, the signer of `published` trusted, no remote, and no memory of one that failed."""
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OPJIT_TRUST", published.public)
    monkeypatch.setenv("no_proxy", "*")
    remotes.forget(monkeypatch)


@pytest.fixture
def held(published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A remote in a folder of the test's own, which OPJIT_REMOTE names."""
    folder = tmp_path / "remote"
    shutil.copytree(published.folder, folder)
    monkeypatch.setenv("OPJIT_REMOTE", folder.as_uri())
    return folder


@pytest.fixture
def no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a remote does right is not held against the clock of a machine that runs other tests; tests/benchmarks/remote.py does."""
    monkeypatch.setattr(
        build, "build", Mock(side_effect=AssertionError("this was to be fetched, not built"))
    )
    monkeypatch.setattr(remote, "_IN_ALL", 60.0)


@contextmanager
def remote_at(behave: Behaviour) -> Iterator[Server]:
    """A web server that OPJIT_REMOTE names."""
    with serving(behave) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPJIT_REMOTE", server.url)
        yield server


GET = f"print(opjit.get('{remotes.NAMESPACE}::plus', 'cpu')(torch.ones(2)).tolist())\n"


def was_fetched(answer: Answer, published: Published) -> bool:
    return (
        not answer.was_built
        and answer.warnings == []
        and answer.entry.library.read_bytes() == published.library
    )


def was_built_with_one_warning(answer: Answer, published: Published, *words: str) -> bool:
    assert len(answer.warnings) == 1, answer.warnings
    for word in words:
        assert word in answer.warnings[0]
    return answer.was_built and answer.entry.library.read_bytes() == published.library


def test_an_entry_that_somebody_signed_and_pushed_is_fetched_and_is_a_hit_then(
    published: Published, held: Path, no_build: None, tmp_path: Path
) -> None:
    assert was_fetched(ask(published.op), published)
    assert remote.problem() is None
    shutil.rmtree(held)
    assert was_fetched(ask(published.op), published)
    before = helpers.snapshot(tmp_path / "cache")
    assert was_fetched(ask(published.op), published)
    assert helpers.snapshot(tmp_path / "cache") == before
    assert not list((tmp_path / "cache" / "v2" / "staging").iterdir())


def test_a_machine_without_a_compiler_gets_the_entry_of_the_same_sources(
    published: Published, held: Path, tmp_path: Path
) -> None:
    code = helpers.declare(published.op.folder) + GET
    assert helpers.fresh(code, helpers.no_compiler(tmp_path)).stdout == "[2.0, 2.0]\n"
    (entry,) = helpers.entries(tmp_path / "cache")
    assert entry.name == published.entry.key


@pytest.mark.parametrize("latency", [0.0, 0.2])
def test_a_web_server_s_files_are_a_remote_also_when_it_takes_its_time(
    published: Published, no_build: None, monkeypatch: pytest.MonkeyPatch, latency: float
) -> None:
    with serving(from_folder(published.folder, latency)) as server:
        monkeypatch.setenv("OPJIT_REMOTE", f"{server.url}/")
        assert was_fetched(ask(published.op), published)
        assert server.asked == [f"/{published.pointer}", f"/{published.name}"]


def test_a_large_entry_over_a_slow_line_is_fetched(published: Published, no_build: None) -> None:
    def behave(handler: Handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        time.sleep(0.2)
        if handler.path.endswith(".key"):
            handler.wfile.write((published.folder / published.pointer).read_bytes())
            return
        for start in range(0, len(published.content), 8192):
            handler.wfile.write(published.content[start : start + 8192])
            time.sleep(0.02)

    with remote_at(behave):
        assert was_fetched(ask(published.op), published)


def test_an_object_store_is_a_remote_before_and_after_a_fork(
    published: Published, no_build: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed: with moto it takes 300 MB")
    server = pytest.importorskip(
        "moto.server", reason="moto is not installed: it takes 250 MB"
    ).ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {
            "ENDPOINT_URL": f"http://{host}:{port}",
            "ACCESS_KEY_ID": "x",
            "SECRET_ACCESS_KEY": "x",
            "DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        objects = Objects("s3://bucket/opjit")
        objects._system("")[0].mkdir("bucket")
        assert objects.names("v2") == []
        objects.write(published.name, published.content)
        assert objects.names("v2") == [published.name]
        monkeypatch.setenv("OPJIT_REMOTE", objects.url)
        assert was_fetched(ask(published.op), published)
        assert _succeeded(_started(published, tmp_path / "child"))
        monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "again"))
        objects._system(published.pointer)[0].rm(objects._system(published.name)[1])
        missing = published.recipe(tmp_path / "again").ways
        assert remote.fetch(missing, Store(tmp_path / "again")) is None  # not there is no failure
    finally:
        server.stop()


def _succeeded(child: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _started(published: Published, cache: Path) -> int:
    """The process id of a forked child that exits with 0 if it fetches the entry into the cache."""
    with warnings.catch_warnings():
        # Python 3.12 says that forks and threads go badly together.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.environ["OPJIT_CACHE"] = str(cache)
            os._exit(0 if was_fetched(ask(published.op), published) else 1)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(2)
    return child


def test_a_child_forked_while_the_remote_is_asked_asks_for_itself(
    published: Published, no_build: None, tmp_path: Path
) -> None:
    asked = threading.Event()

    def behave(handler: Handler) -> None:
        asked.set()
        from_folder(published.folder, 0.3)(handler)

    with remote_at(behave):
        recipe = published.recipe(tmp_path / "first")
        thread = threading.Thread(
            target=remote.fetch, args=(recipe.ways, Store(tmp_path / "first"))
        )
        thread.start()
        assert asked.wait(10)
        assert _succeeded(_started(published, tmp_path / "child"))
        thread.join()
        assert helpers.found(Store(tmp_path / "first"), recipe) is not None


def test_of_many_processes_of_a_machine_one_fetches(
    published: Published, no_build: None, tmp_path: Path
) -> None:
    with remote_at(from_folder(published.folder, 0.3)) as server:
        children = [_started(published, tmp_path / "cache") for _ in range(6)]
        assert [_succeeded(child) for child in children] == [True] * 6
        assert server.asked == [f"/{published.pointer}", f"/{published.name}"]


def test_a_cache_that_cannot_be_written_leaves_what_was_fetched_to_this_process(
    published: Published,
    held: Path,
    no_build: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "file"))
    answer = ask(published.op)
    assert len(answer.warnings) == 1
    assert "OPJIT_CACHE" in answer.warnings[0]
    assert answer.entry.library.read_bytes() == published.library
    assert not answer.was_built
    assert (tmp_path / "file").read_text() == "mine"


def test_the_user_and_password_of_a_url_are_sent_to_its_server_only_and_never_shown(
    published: Published, no_build: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def with_password(url: str) -> None:
        monkeypatch.setenv("OPJIT_REMOTE", url.replace("://", "://me:hunter2%21@"))

    with (
        serving(from_folder(published.folder)) as second,
        serving(lambda it: _redirect(it, second.url + it.path)) as first,
    ):
        with_password(first.url)
        assert was_fetched(ask(published.op), published)
        assert first.headers[0]["Authorization"] == "Basic bWU6aHVudGVyMiE="
        assert "Authorization" not in second.headers[0]
    with serving(lambda handler: handler.answer(b"", 500)) as broken:
        with_password(broken.url)
        assert "hunter2" not in refused(published, tmp_path)


def _drip_header(handler: Handler) -> None:
    for _ in range(600):
        handler.wfile.write(b"H")
        time.sleep(0.05)


def _redirect(handler: Handler, to: str) -> None:
    handler.send_response(302)
    handler.send_header("Location", to)
    handler.end_headers()


FAULTS: dict[str, Behaviour] = {
    "500": lambda handler: handler.answer(b"oops", 500),
    "403": lambda handler: handler.answer(b"no", 403),
    "status-with-escape-codes": lambda handler: handler.send_response(500, "\x1b[2J" * 50),
    "reset-at-once": lambda handler: handler.reset(),
    "reset-mid-body": half_then_reset,
    "hang": lambda handler: time.sleep(600),
    "slow-drip": drip,
    "slow-drip-of-headers": _drip_header,
    "endless-body": endless,
    "redirect-loop": lambda handler: _redirect(handler, handler.path + "x"),
    "redirect-to-a-file": lambda handler: _redirect(handler, "file:///etc/passwd"),
    "not-http": lambda handler: handler.wfile.writelines([b"SSH-2.0-OpenSSH_9.6\r\n\r\n"]),
    "empty": lambda handler: handler.answer(b""),
    "html": lambda handler: handler.answer(b"<html>Please log in</html>"),
    "length-too-long": lambda handler: handler.answer(b"opjit entry 1\n", length=10**12),
    "length-negative": lambda handler: handler.answer(b"opjit entry 1\n", length=-5),
}


def refused(published: Published, tmp_path: Path, recipe: Recipe | None = None) -> str:
    """The one warning of a request that the remote did not serve; nothing was written."""
    wanted = (recipe or published.recipe(tmp_path / "nothing")).ways
    with cache_warnings() as texts:
        assert remote.fetch(wanted, Store(tmp_path / "fresh")) is None
    assert not (tmp_path / "fresh").exists()
    [text] = texts
    return text


@pytest.mark.parametrize("behave", FAULTS.values(), ids=FAULTS.keys())
def test_a_remote_that_fails_costs_one_warning_and_a_moment_and_is_not_asked_again(
    published: Published, other: Published, behave: Behaviour, tmp_path: Path
) -> None:
    with remote_at(behave) as server:
        started = time.monotonic()
        warning = refused(published, tmp_path)
        assert server.url in warning
        assert warning.isprintable()
        # On a busy machine; the benchmark holds it against a second.
        assert time.monotonic() - started < 100
        asked = len(server.asked)
        if behave is FAULTS["500"]:
            assert (again := ask(other.op)).was_built
            assert again.warnings == []
        assert remote.fetch(other.recipe(tmp_path).ways, Store(tmp_path)) is None
        assert len(server.asked) == asked


@pytest.mark.parametrize("behave", [drip, FAULTS["hang"]], ids=["slow-drip", "hang"])
def test_a_request_that_was_given_up_ends_by_itself(
    published: Published, behave: Behaviour, tmp_path: Path
) -> None:
    before = threading.enumerate()
    with remote_at(behave):
        with pytest.warns(CacheWarning):
            remote.fetch(published.recipe(tmp_path).ways, Store(tmp_path))
        # The server goes on for 600 s.
        until(
            lambda: (
                not any(
                    thread.name == "opjit-timeout"
                    for thread in threading.enumerate()
                    if thread not in before
                )
            ),
            100,
        )


def test_no_more_is_read_than_an_object_may_have() -> None:
    with serving(endless) as server, pytest.raises(EntryError, match="larger than 1000 bytes"):
        Objects(server.url).within(10).read("v2/x", 1000)


def test_a_remote_that_takes_no_connections_costs_one_warning(
    published: Published, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (
        remotes.black_hole() as url,
        socket.socket() as taken,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        taken.bind(("127.0.0.1", 0))  # nobody listens
        refusing, mute = (f"http://127.0.0.1:{each.getsockname()[1]}" for each in (taken, silent))
        for address, told in (
            (url, url),
            (refusing, "refused"),
            (mute, mute),
            ("https://opjit.invalid/cache", "opjit.invalid"),
        ):
            monkeypatch.setenv("OPJIT_REMOTE", address)
            assert told in refused(published, tmp_path)


def test_a_name_server_or_a_file_system_that_hangs_costs_one_warning(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither has a time limit that a caller could set."""
    release = threading.Event()

    def hang(*args: object, **kwargs: object) -> None:
        release.wait(60)
        raise OSError("too late")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setenv("OPJIT_REMOTE", "http://slow.invalid")
    answer = ask(published.op)
    release.set()
    assert was_built_with_one_warning(answer, published, "no answer in")


def test_what_is_not_there_is_no_failure(published: Published, other: Published) -> None:
    with remote_at(from_folder(published.folder)) as server:
        first = ask(other.op)
        assert (first.was_built, first.warnings) == (True, [])
        assert was_fetched(ask(published.op), published)
        assert server.asked[1:] == [f"/{published.pointer}", f"/{published.name}"]


def test_a_process_ends_while_its_remote_still_hangs(published: Published) -> None:
    code = helpers.declare(published.op.folder) + "warnings.simplefilter('ignore')\n" + GET
    with remote_at(FAULTS["hang"]):
        started = time.monotonic()
        done = helpers.fresh(code)
        assert (done.stdout, done.stderr) == ("[2.0, 2.0]\n", "")
        assert time.monotonic() - started < 200  # the server would take 600


def test_offline_asks_no_remote_and_says_so(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    with remote_at(from_folder(published.folder)) as server:
        monkeypatch.setenv("OPJIT_OFFLINE", "1")
        with pytest.raises(OpjitError, match=r"OPJIT_OFFLINE forbids building or downloading it"):
            ask(published.op)
        assert server.asked == []


@pytest.mark.parametrize(
    "url",
    [
        "/srv/opjit",
        "opjit",
        "http://host/x?token=1",
        "nosuch://host/x",
        "http://[::1/x",
        "http://host:port/",
        "http:///",
    ],
)
def test_an_address_that_is_none_costs_one_warning(
    published: Published, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str
) -> None:
    monkeypatch.setenv("OPJIT_REMOTE", url)
    refused(published, tmp_path)
    if "://" not in url:
        monkeypatch.delenv("OPJIT_TRUST")
        assert "expected a URL" in str(remote.problem()), (
            "first, as a key is useless without a remote"
        )


def test_what_is_wrong_with_a_remote_can_be_asked(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(from_folder(published.folder)) as server:
        monkeypatch.setenv("OPJIT_REMOTE", server.url)
        assert remote.problem() is None
        monkeypatch.delenv("OPJIT_TRUST")
        assert "OPJIT_TRUST" in str(remote.problem())
    monkeypatch.setenv("OPJIT_TRUST", "ed25519:" + "A" * 43 + "=")
    assert "refused" in str(remote.problem())


def test_without_a_trusted_key_nothing_is_asked_for_and_a_warning_says_what_to_do(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPJIT_TRUST")
    with remote_at(from_folder(published.folder)) as server:
        assert was_built_with_one_warning(
            ask(published.op), published, "OPJIT_TRUST", "opjit keygen"
        )
        assert server.asked == []


@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "ed25519:",
        "ed25519:AAAA",
        "ed25519:!!!!",
        "ed25519",
        "/nowhere.pub",
        "relative.pub",
        "unsigned:/nowhere.pub",
        "/etc",
        "/etc/passwd",
        ":",
        "::",
    ],
)
def test_trust_that_cannot_be_understood_trusts_nobody(
    published: Published, held: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    monkeypatch.setenv("OPJIT_TRUST", text)
    warning = refused(published, tmp_path)
    assert "OPJIT_TRUST" in warning
    assert "expected" in warning


def test_any_of_several_keys_will_do_and_paths_and_keys_may_be_mixed(
    published: Published,
    other: Published,
    held: Path,
    no_build: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPJIT_TRUST", f"{other.public}:{published.private.with_suffix('.pub')}")
    assert was_fetched(ask(published.op), published)


def _link(path: Path) -> None:
    path.rename(path.with_name("real.pub"))
    path.with_name("real.pub").chmod(0o666)
    path.symlink_to(path.with_name("real.pub"))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda path: path.chmod(0o666), id="loosened"),
        pytest.param(_link, id="linked"),
        pytest.param(
            lambda path: os.chown(path, SOMEBODY, SOMEBODY), marks=as_root, id="given-away"
        ),
    ],
)
def test_a_key_that_somebody_else_may_have_written_is_not_believed(
    published: Published,
    held: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    change: Callable[[Path], None],
) -> None:
    key = tmp_path / "ci.pub"
    shutil.copy(published.private.with_suffix(".pub"), key)
    change(key)
    monkeypatch.setenv("OPJIT_TRUST", str(key))
    assert re.search(f"{re.escape(str(key))}.*not trusted", refused(published, tmp_path))


def test_a_missing_package_is_named(
    published: Published, held: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for package, url, told in (
        ("gcsfs", "gs://bucket/opjit", "gcsfs"),
        (
            "cryptography.hazmat.primitives.asymmetric.ed25519",
            held.as_uri(),
            "pip install cryptography",
        ),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setenv("OPJIT_REMOTE", url)
        assert told in refused(published, tmp_path)


def test_unsigned_entries_are_used_where_that_is_said_and_then_it_is_said_aloud_once(
    published: Published,
    held: Path,
    no_build: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (held / published.name).write_bytes(published.bundle._replace(signature=None).dump())
    monkeypatch.setenv("OPJIT_TRUST", "unsigned")
    first = ask(published.op)
    assert len(first.warnings) == 1
    assert (
        "anyone who can write to the remote chooses the code that this process runs"
        in first.warnings[0]
    )
    assert first.entry.library.read_bytes() == published.library
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "another"))
    assert was_fetched(ask(published.op), published)


def test_keys_that_openssl_makes_sign_and_are_trusted(
    published: Published,
    held: Path,
    no_build: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    private = tmp_path / "o.key"
    public = tmp_path / "o.pub"
    subprocess.run(
        ["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(private)], check=True
    )
    subprocess.run(
        ["openssl", "pkey", "-in", str(private), "-pubout", "-out", str(public)], check=True
    )
    private.chmod(0o600)
    public.chmod(0o644)
    (held / published.name).write_bytes(trust.signer(private)(published.bundle).dump())
    monkeypatch.setenv("OPJIT_TRUST", str(public))
    assert was_fetched(ask(published.op), published)


def test_the_command_makes_a_pair_of_keys_and_overwrites_none(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        private, public = trust.keygen("ci", tmp_path / "keys")
    finally:
        os.umask(old)
    assert private.stat().st_mode & 0o777 == 0o600
    assert files.trust_problem(tmp_path / "keys" / "ci.pub") is None
    before = helpers.snapshot(tmp_path)
    with pytest.raises(RemoteError, match="nothing is overwritten"):
        trust.keygen("ci", tmp_path / "keys")
    private.rename(tmp_path / "keys" / "kept")
    with pytest.raises(RemoteError, match="nothing is overwritten"):
        trust.keygen("ci", tmp_path / "keys")
    assert sorted(path.name for path in (tmp_path / "keys").iterdir()) == ["ci.pub", "kept"]
    assert before.keys() - helpers.snapshot(tmp_path).keys() == {str(private)}
    for name in ("", "../ci", "a/b", ".hidden"):
        with pytest.raises(RemoteError, match="key's name"):
            trust.keygen(name, tmp_path)
    assert len(public) == len("ed25519:") + 44


def test_a_private_key_that_others_can_read_or_that_is_none_signs_nothing(
    published: Published, tmp_path: Path
) -> None:
    key = tmp_path / "ci.key"
    shutil.copy(published.private, key)
    key.chmod(0o640)
    with pytest.raises(RemoteError, match="chmod 600"):
        trust.signer(key)
    key.chmod(0o600)
    for text in (b"", b"junk", published.private.with_suffix(".pub").read_bytes()):
        key.write_bytes(text)
        with pytest.raises(RemoteError, match="expected a PEM file"):
            trust.signer(key)
    with pytest.raises(RemoteError, match="expected a PEM file"):
        trust.signer(tmp_path / "nowhere")


def test_nothing_is_parsed_before_its_signature_is_right(
    published: Published,
    other: Published,
    held: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    recipe = published.recipe(tmp_path)
    parsed = list[bytes]()
    monkeypatch.setattr(manifest, "parse", parsed.append)
    for content in (
        published.bundle._replace(signature=None),
        published.bundle._replace(signature=bytes(64)),
        trust.signer(other.private)(published.bundle),
    ):
        (held / published.name).write_bytes(content.dump())
        remotes.forget(monkeypatch)
        assert "sign" in refused(published, tmp_path, recipe)
    assert parsed == []


def _resigned(published: Published, content: bytes | None = None, **fields: object) -> Bundle:
    """Signed by the trusted key itself: what a thief of the key, or a builder that was broken into, could push."""
    described = json.loads(published.bundle.manifest)
    described.update(fields)
    if "document" in fields:
        described["key"] = document_key(described["document"])
    text = (json.dumps(described, sort_keys=True, indent=1) + "\n").encode()
    return trust.signer(published.private)(
        Bundle(text, published.library if content is None else content)
    )


def _flipped(published: Published, at: int) -> Bundle:
    text = bytearray(published.bundle.manifest)
    text[at] ^= 1
    return published.bundle._replace(manifest=bytes(text))


def _of_another(published: Published, name: str) -> Bundle:
    document = json.loads(published.bundle.manifest)["document"]
    other = {
        "arch": "x86-64-v2" if document["arch"] != "x86-64-v2" else "x86-64-v3",
        "toolchain": {**document["toolchain"], "version": "0.0.1"},
    }
    return _resigned(published, document={**document, name: other[name]})


EVIL = b"#!/bin/sh\necho evil\n"
# What makes the object of `published` out of it and of another op, pushed by somebody who is not trusted.
ATTACKS = Cases[Callable[[Published, Published], Bundle]]()


@ATTACKS("unsigned")
def _(published: Published, other: Published) -> Bundle:
    return published.bundle._replace(signature=None)


@ATTACKS("signed-by-another-key")
def _(published: Published, other: Published) -> Bundle:
    return trust.signer(other.private)(published.bundle)


@ATTACKS("signature-of-another-manifest")
def _(published: Published, other: Published) -> Bundle:
    return published.bundle._replace(signature=_resigned(published, size=1).signature)


@ATTACKS("signature-of-zeros")
def _(published: Published, other: Published) -> Bundle:
    return published.bundle._replace(signature=bytes(64))


ATTACKS.update(
    {
        f"manifest-bit-{at}": lambda published, other, at=at: _flipped(published, at)  # type: ignore[misc]
        for at in (0, 1, 100, 1000, -2)
    }
)


@ATTACKS("library-swapped")
def _(published: Published, other: Published) -> Bundle:
    return published.bundle._replace(library=other.library)


@ATTACKS("library-one-byte-more")
def _(published: Published, other: Published) -> Bundle:
    return published.bundle._replace(library=published.library + b"\0")


@ATTACKS("library-appended")
def _(published: Published, other: Published) -> Bundle:
    return published.bundle._replace(library=published.library + other.content)


@ATTACKS("library-bit-flipped")
def _(published: Published, other: Published) -> Bundle:
    return published.bundle._replace(library=published.library[:-1] + b"\xff")


@ATTACKS("another-op-s-entry")
def _(published: Published, other: Published) -> Bundle:
    return trust.signer(published.private)(other.bundle)


@ATTACKS("another-arch-s-entry")
def _(published: Published, other: Published) -> Bundle:
    return _of_another(published, "arch")


@ATTACKS("another-compiler-s-entry")
def _(published: Published, other: Published) -> Bundle:
    return _of_another(published, "toolchain")


@ATTACKS("another-key")
def _(published: Published, other: Published) -> Bundle:
    return _resigned(published, key="0" * 64)


@ATTACKS("library-of-no-machine")
def _(published: Published, other: Published) -> Bundle:
    return _resigned(published, EVIL, size=len(EVIL), sha256=hashlib.sha256(EVIL).hexdigest())


@ATTACKS("extra-field")
def _(published: Published, other: Published) -> Bundle:
    return _resigned(published, extra=1)


@ATTACKS("library-by-a-path")
def _(published: Published, other: Published) -> Bundle:
    return _resigned(published, library="../../../../evil.so")


@ATTACKS("size-too-large")
def _(published: Published, other: Published) -> Bundle:
    return _resigned(published, size=10**30)


@ATTACKS("size-negative")
def _(published: Published, other: Published) -> Bundle:
    return _resigned(published, size=-1)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_an_entry_that_is_not_what_a_trusted_key_signed_is_refused_with_one_warning_and_nothing_is_written(
    published: Published,
    other: Published,
    held: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    attack: Callable[[Published, Published], Bundle],
) -> None:
    (held / published.name).write_bytes(attack(published, other).dump())
    assert str(held) in refused(published, tmp_path)
    if attack is ATTACKS["library-swapped"]:
        remotes.forget(monkeypatch)
        assert was_built_with_one_warning(ask(published.op), published, str(held))


def test_the_files_of_attacks_are_the_ones_that_the_generator_writes() -> None:
    committed = {
        path.name: path.read_bytes() for path in make.HERE.iterdir() if path.suffix == ".opjit"
    }
    assert committed == make.FILES


@pytest.mark.parametrize("trusted", ["keys", "unsigned"])
@pytest.mark.parametrize("name", [name for name in make.FILES if name.endswith(".opjit")])
def test_a_hostile_body_is_refused_with_one_warning_whether_or_not_a_signature_is_asked_for(
    published: Published,
    held: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    trusted: str,
) -> None:
    shutil.copy(make.HERE / name, held / published.name)
    if trusted == "unsigned":
        monkeypatch.setenv("OPJIT_TRUST", "unsigned")
        monkeypatch.setattr(trust, "_warned", {"unsigned"})
    refused(published, tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"0" * 63, b"0" * 65, b"../" * 21 + b"x", b"G" * 64, b"<html>", b"0" * 10_000]
)
def test_a_pointer_that_names_no_key_is_refused(
    published: Published, held: Path, tmp_path: Path, content: bytes
) -> None:
    (held / published.base).write_bytes(content)
    refused(published, tmp_path, replace(published.recipe(tmp_path), toolchain=None))


def test_a_pointer_leads_to_nothing_that_was_built_from_something_else(
    published: Published, other: Published, held: Path, tmp_path: Path
) -> None:
    """Pointers are unsigned: a writer can name any entry that the trusted key ever signed."""
    old = trust.signer(published.private)(other.bundle)
    (held / published.name).with_name(f"{other.entry.key}.opjit").write_bytes(old.dump())
    (held / published.base).write_text(other.entry.key)
    assert "built from other sources" in refused(
        published, tmp_path, replace(published.recipe(tmp_path), toolchain=None)
    )


def test_a_hostile_library_is_never_opened(
    published: Published, held: Path, tmp_path: Path
) -> None:
    """One that does its harm in a constructor."""
    source = tmp_path / "evil.c"
    marker = tmp_path / "marker"
    source.write_text(
        f'#include <stdio.h>\n__attribute__((constructor)) static void evil(void) {{ fopen("{marker}", "w"); }}\n'
    )
    subprocess.run(
        [helpers.real_compiler(), "-shared", "-fPIC", "-o", str(tmp_path / "evil.so"), str(source)],
        check=True,
    )
    (held / published.name).write_bytes(
        published.bundle._replace(library=(tmp_path / "evil.so").read_bytes()).dump()
    )
    code = helpers.declare(published.op.folder) + (
        "with warnings.catch_warnings(record=True) as seen:\n    warnings.simplefilter('always')\n"
        f"    print(opjit.get('{published.op.qualified}', 'cpu')(torch.ones(2)).tolist(), len(seen))\n"
    )
    assert helpers.fresh(code).stdout == "[2.0, 2.0] 1\n"
    assert not marker.exists()
    subprocess.run(
        [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(tmp_path / 'evil.so')!r})"],
        check=True,
    )
    assert marker.exists(), "the library does no harm: the test shows nothing"
