"""A container registry as a remote: Debian's docker-registry, and a registry of a few lines that misbehaves as it is told."""

import base64
import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock
from urllib.parse import parse_qs, urlsplit

import pytest

from opjit.builder import build
from opjit.cache import transfer
from opjit.errors import BadSetting, RemoteError
from opjit.share import remote, transport
from opjit.share.transport import Objects
from tests import helpers, remotes
from tests.helpers import cache_command, until
from tests.remotes import Handler, Published, Server, ask, serving

PROGRAM = "docker-registry"
LOGIN = base64.b64encode(b"ci:secret").decode()
HTPASSWD = "ci:$2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n"  # of LOGIN
CONFIGURATION = """
version: 0.1
log: {level: error}
storage: {filesystem: {rootdirectory: FOLDER/data}}
http: {addr: "127.0.0.1:PORT"}
"""
PASSWORD = "auth: {htpasswd: {realm: test, path: FOLDER/htpasswd}}\n"


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: Published) -> Path:
    """An empty cache, the signer of `published` trusted, and no password. Returns the directory of Docker's settings."""
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OPJIT_TRUST", published.public)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(remote, "_IN_ALL", 60.0)
    monkeypatch.setattr(remote, "_AT_LEAST", 60.0)
    monkeypatch.setattr(transport, "_logins", {})
    remotes.forget(monkeypatch)
    return tmp_path / "docker"


@pytest.fixture
def no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = AssertionError("this was to be fetched, not built")
    monkeypatch.setattr(build, "build", Mock(side_effect=failure))


class Debian(NamedTuple):
    """A running registry, the directory of its blobs, and its process."""

    host: str
    data: Path
    process: "subprocess.Popen[bytes]"

    @property
    def url(self) -> str:
        return f"oci://{self.host}/team/opjit"


@pytest.fixture(params=["open", "password"])
def registry(request: pytest.FixtureRequest, tmp_path: Path, settings: Path) -> Iterator[Debian]:
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"{PROGRAM} is not installed: apt-get install {PROGRAM}")
    host = f"127.0.0.1:{helpers.free_port()}"
    text = CONFIGURATION + (PASSWORD if request.param == "password" else "")
    place = tmp_path / "registry.yml"
    place.write_text(text.replace("FOLDER", str(tmp_path)).replace("PORT", host[10:]))
    (tmp_path / "htpasswd").write_text(HTPASSWD)
    log_in(settings, host)
    with subprocess.Popen([PROGRAM, "serve", place], stderr=subprocess.DEVNULL) as process:
        try:
            found = Debian(host, tmp_path / "data", process)
            until(lambda: answers(found), process=process)
            yield found
        finally:
            process.kill()


def answers(registry: Debian) -> bool:
    try:
        return Objects(registry.url).within(5).names("v2") == []
    except OSError:
        return False


def log_in(settings: Path, host: str) -> None:
    """What `docker login` writes."""
    settings.mkdir(exist_ok=True)
    (settings / "config.json").write_text(json.dumps({"auths": {host: {"auth": LOGIN}}}))


def push(published: Published, url: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPJIT_CACHE", str(published.entry.folder.parents[3]))
        return transfer.push(url, sign=published.private).moved


def test_entries_are_pushed_to_a_registry_pulled_and_fetched(
    registry: Debian, published: Published, other: Published, no_build: None, tmp_path: Path
) -> None:
    assert push(published, registry.url) == [published.name]
    assert push(published, registry.url) == []
    assert push(other, registry.url) == [other.name]
    pulled = transfer.pull(registry.url, ops=[published.op.qualified])
    assert pulled.moved == [published.name]
    refused = transfer.pull(registry.url)
    assert (refused.moved, refused.there) == ([], 1)
    assert "no key in OPJIT_TRUST made its signature" in refused.problems[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPJIT_CACHE", str(tmp_path / "node"))
        patch.setenv("OPJIT_REMOTE", registry.url)
        assert remote.problem() is None
        answer = ask(published.op)
    assert answer.warnings == []
    assert answer.entry.library.read_bytes() == published.library


def test_a_changed_blob_and_a_registry_that_is_gone_cost_one_warning_and_a_build(
    registry: Debian,
    published: Published,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    push(published, registry.url)
    monkeypatch.setenv("OPJIT_REMOTE", registry.url)
    digest = hashlib.sha256(published.content).hexdigest()
    [blob] = registry.data.rglob(f"{digest}/data")
    blob.write_bytes(published.content[:-1] + b"x")
    answer = ask(published.op)
    assert answer.was_built
    assert "does not have the digest in its manifest" in answer.warnings[0]
    registry.process.kill()
    registry.process.wait()
    remotes.forget(monkeypatch)
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "node"))
    answer = ask(published.op)
    assert answer.was_built
    assert "refused" in answer.warnings[0]
    refused = cache_command("pull", registry.url)
    assert refused.output.startswith(f"Error: {registry.url} cannot be used: ")


@pytest.mark.parametrize("registry", ["password"], indirect=True)
def test_without_a_login_the_error_says_what_to_do(
    registry: Debian, published: Published, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (settings / "config.json").write_text("{}")
    monkeypatch.setattr(transport, "_logins", {})
    with pytest.raises(RemoteError, match=r"it answers 401 Unauthorized .*docker login"):
        push(published, registry.url)
    with pytest.raises(RemoteError, match="docker login"):
        transfer.pull(registry.url)


class Small:
    """A registry that asks for a token, and lists one tag per page.

    `faults` maps parts of paths to the status that they get.
    """

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.faults: dict[str, int] = {}
        self.cut = False

    def __call__(self, handler: Handler) -> None:
        url = urlsplit(handler.path)
        content = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        for part, status in self.faults.items():
            if part in url.path:
                handler.answer(b"", status)
                return
        if url.path == "/token":
            asked = parse_qs(url.query)
            assert handler.headers["Authorization"] == f"Basic {LOGIN}"
            assert asked["service"] == ["small"]
            handler.answer(json.dumps({"token": asked["scope"][0]}).encode())
            return
        scope = "repository:team/opjit:pull"
        scope += "" if handler.command == "GET" else ",push"
        if not handler.headers.get("Authorization", "").startswith(f"Bearer {scope}"):
            realm = f"http://{handler.headers['Host']}/token"
            challenge = f'Bearer realm="{realm}",service="small",scope="{scope}"'
            self.answer(handler, 401, {"WWW-Authenticate": challenge})
            return
        getattr(self, handler.command.lower())(handler, url.path, url.query, content)

    def answer(self, handler: Handler, status: int, headers: dict[str, str]) -> None:
        handler.send_response(status)
        for name, value in {**headers, "Content-Length": "0"}.items():
            handler.send_header(name, value)
        handler.end_headers()

    def post(self, handler: Handler, path: str, query: str, content: bytes) -> None:
        # A proxy that ends TLS may send the wrong scheme and host.
        self.answer(handler, 202, {"Location": f"http://inner{path}1?state=2"})

    def put(self, handler: Handler, path: str, query: str, content: bytes) -> None:
        place = path.rpartition("/")[2]
        if "/blobs/" in path:
            asked = parse_qs(query)
            assert asked["state"] == ["2"]
            assert asked["digest"] == [f"sha256:{hashlib.sha256(content).hexdigest()}"]
            self.blobs[asked["digest"][0]] = content
        else:
            described = json.loads(content)
            assert handler.headers["Content-Type"] == described["mediaType"]
            for each in (described["config"], *described["layers"]):
                assert len(self.blobs[each["digest"]]) == each["size"]
            self.manifests[place] = content
        handler.answer(b"", 201)

    def get(self, handler: Handler, path: str, query: str, content: bytes) -> None:
        place = path.rpartition("/")[2]
        if path.endswith("/tags/list"):
            self.list_tags(handler, path, query)
            return
        found = (self.blobs if "/blobs/" in path else self.manifests).get(place)
        if found is None:
            handler.answer(b"", 404)
        elif self.cut and "/blobs/" in path:
            handler.answer(found[: len(found) // 2], length=len(found))
        else:
            handler.answer(found)

    def list_tags(self, handler: Handler, path: str, query: str) -> None:
        last = parse_qs(query).get("last", [""])[0]
        later = [tag for tag in sorted(self.manifests) if tag > last]
        text = json.dumps({"name": "team/opjit", "tags": later[:1]}).encode()
        handler.send_response(200)
        if later[1:]:
            handler.send_header("Link", f'<{path}?n=1&last={later[0]}>; rel="next"')
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text)


class Running(NamedTuple):
    small: Small
    server: Server

    @property
    def url(self) -> str:
        return self.server.url.replace("http://", "oci://") + "/team/opjit"


@pytest.fixture
def running(settings: Path) -> Iterator[Running]:
    """The small registry, for which the user has logged in."""
    small = Small()
    with serving(small) as server:
        log_in(settings, urlsplit(server.url).netloc)
        yield Running(small, server)


def test_a_registry_that_asks_for_tokens_and_lists_in_pages_is_a_remote(
    running: Running, published: Published, other: Published, no_build: None, tmp_path: Path
) -> None:
    running.small.manifests["latest.opjit"] = b'{"layers": []}'  # somebody else's artifact
    assert push(published, running.url) == [published.name]
    assert push(other, running.url) == [other.name]
    assert transfer.pull(running.url).moved == [published.name]
    logins = [headers.get("Authorization") for headers in running.server.headers]
    paths = running.server.asked
    asked = [path for path, login in zip(paths, logins, strict=True) if login == f"Basic {LOGIN}"]
    assert [urlsplit(path).path for path in asked] == ["/token", "/token"]  # to read, and to write
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPJIT_CACHE", str(tmp_path / "node"))
        patch.setenv("OPJIT_REMOTE", running.url)
        answer = ask(published.op)
    assert (answer.was_built, answer.warnings) == (False, [])


@pytest.mark.parametrize("status", [401, 403, 429, 500])
def test_a_registry_that_refuses_is_one_error_and_one_warning(
    running: Running, published: Published, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    running.small.faults["/team/"] = status
    with pytest.raises(RemoteError, match=f"cannot be used: it answers {status} "):
        push(published, running.url)
    with pytest.raises(RemoteError, match=f"cannot be used: it answers {status} "):
        transfer.pull(running.url)
    monkeypatch.setenv("OPJIT_REMOTE", running.url)
    answer = ask(published.op)
    assert answer.was_built
    assert len(answer.warnings) == 1
    assert f"it answers {status} " in answer.warnings[0]


def test_a_repository_that_cannot_be_made_is_an_error(
    running: Running, published: Published
) -> None:
    running.small.faults["/uploads/"] = 404
    with pytest.raises(RemoteError, match="cannot be written: it answers 404 Not Found"):
        push(published, running.url)


def test_a_refused_token_is_an_error(running: Running, published: Published) -> None:
    running.small.faults["/token"] = 401
    with pytest.raises(RemoteError, match=r"it answers 401 Unauthorized .*docker login"):
        push(published, running.url)


def test_a_connection_that_is_cut_is_an_error_and_writes_nothing(
    running: Running, published: Published, tmp_path: Path
) -> None:
    push(published, running.url)
    running.small.cut = True
    done = transfer.pull(running.url)
    assert done.moved == []
    assert "does not have the digest in its manifest" in done.problems[0]
    assert not (tmp_path / "cache").exists()


def test_a_missing_object_is_a_miss_and_another_artifact_is_none(
    running: Running, published: Published, tmp_path: Path
) -> None:
    objects = Objects(running.url).within(60)
    for text in (None, b"{", b"[]", b'{"layers": [{}]}', b'{"layers": [{"digest": 1}, 2]}'):
        if text is not None:
            running.small.manifests["K.opjit"] = text
        with pytest.raises(FileNotFoundError):
            objects.read("v2/demo.x/cpu/K.opjit", 100)
        assert objects.names("v2") in ([], [""])


@pytest.mark.parametrize(
    "url",
    ["oci://host", "oci://host/", "oci://host/Upper", "oci://me:pw@host/x", "oci://host/x?tag=1"],
)
def test_an_address_of_a_registry_needs_a_host_and_a_repository(url: str) -> None:
    with pytest.raises(BadSetting, match="oci://host/repository") as caught:
        transfer.pull(url)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "server"),
    [
        ("ghcr.io", "https://ghcr.io"),
        ("localhost.example.com", "https://localhost.example.com"),
        ("10.0.0.1:5000", "https://10.0.0.1:5000"),
        ("localhost", "http://localhost"),
        ("127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("[::1]:5000", "http://[::1]:5000"),
    ],
)
def test_only_this_machine_is_asked_without_tls(host: str, server: str) -> None:
    assert transport._server(host) == server
