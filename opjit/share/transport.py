"""The objects of a remote: bytes by name under a URL.

HTTP, HTTPS and container registries use Python's standard library, and other protocols use fsspec. The
HTTP client of fsspec is not used because it needs 0.2 s to import, reads bodies of any length, and has a
thread that does not survive a fork.
"""

import base64
import json
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urlencode, urljoin, urlsplit

from opjit import files, processes
from opjit.errors import BadSetting, EntryError, RemoteError

_Result = TypeVar("_Result")
_CHUNK = 1 << 18
_URL = r"oci://[\w.:\[\]-]+/[a-z0-9._/-]*[a-z0-9]|https?://[^?#]*|(?!oci:|https?:).+://.*"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_OBJECT = "application/vnd.opjit.object.v1"
_TITLE = "org.opencontainers.image.title"
_ANSWER_BYTES = 16 << 20  # of a registry's answer, except an object
_logins: dict[
    tuple[str, str], str
] = {}  # the header with which a registry allowed the last request


class Registry(NamedTuple):
    """A repository of a container registry.

    An object is an artifact with one layer. Its tag is the last part of the object's name.
    """

    host: str
    repository: str
    until: float

    def read(self, name: str, limit: int) -> bytes:
        """Return an object's bytes, as `Objects.read` does."""
        _, digest = self._layer(name.rpartition("/")[2])
        if not digest:
            raise FileNotFoundError(name)
        content, _ = self._ask(f"blobs/{digest}", limit)
        if len(content) <= limit and digest != f"sha256:{files.sha256(content)}":
            raise EntryError(f"{name} does not have the digest in its manifest")
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write an object. It appears with its manifest, which is sent last."""
        layer = {**self._upload(content), "annotations": {_TITLE: name}}
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": self._upload(b"{}"),
            "layers": [layer],
        }
        path = f"manifests/{name.rpartition('/')[2]}"
        self._ask(path, method="PUT", content=json.dumps(manifest).encode(), kind=_MANIFEST)

    def names(self) -> list[str]:
        """Return the names of all entries."""
        tags: list[str] = []
        path = "tags/list?n=1000"
        while path:
            content, headers = self._ask(path)
            tags += json.loads(content)["tags"] or []
            path = headers.get("Link", "").partition("<")[2].partition(">")[0]
        layers = processes.in_parallel(self._layer, [tag for tag in tags if tag.endswith(".opjit")])
        return [name for name, _ in layers]

    def _layer(self, tag: str) -> tuple[str, str]:
        """Return the name and the digest of an object. Both are empty if it does not exist, or if it is another artifact."""
        try:
            content, _ = self._ask(f"manifests/{tag}")
            (layer,) = json.loads(content)["layers"]
            return layer["annotations"][_TITLE], layer["digest"]
        except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
            return "", ""

    def _upload(self, content: bytes) -> dict[str, Any]:
        """Send bytes to the registry, and return their descriptor."""
        digest = f"sha256:{files.sha256(content)}"
        _, headers = self._ask("blobs/uploads/", method="POST", content=b"")
        place = urlsplit(headers["Location"])
        address = f"{place.path}?{place.query}&digest={digest}"
        self._ask(address, method="PUT", content=content)
        return {"mediaType": _OBJECT, "digest": digest, "size": len(content)}

    def _ask(self, path: str, limit: int = _ANSWER_BYTES, **request: Any) -> tuple[bytes, Message]:
        address = urljoin(f"{_server(self.host)}/v2/{self.repository}/", path)
        return _send(address, self.until, limit, _logins.get(self[:2], ""), self._log_in, **request)

    def _log_in(self, challenge: str) -> str:
        """Return the header that a registry asks for: the password that `docker login` has stored, or a token for it."""
        login = ""
        folder = os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker")
        with suppress(OSError, ValueError, TypeError, KeyError):
            settings = json.loads(files.read_regular(f"{folder}/config.json"))
            login = f"Basic {settings['auths'][self.host]['auth']}"
        if challenge.lower().startswith("bearer"):
            asked = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
            realm = urlsplit(asked.pop("realm", ""))
            address = f"{_server(realm.netloc)}{realm.path}?{urlencode(asked)}"
            content, _ = _send(address, self.until, _ANSWER_BYTES, login)
            answer = json.loads(content)
            login = f"Bearer {answer.get('token') or answer['access_token']}"
        _logins[self[:2]] = login
        return login


class Objects(NamedTuple):
    """A remote, by its URL: ``https://host/folder``, ``s3://bucket/folder``, ``file:///folder``, ``oci://host/repository``.

    Constructing one accesses nothing.

    Attributes:
        until: the time of `time.monotonic` at which a request is given up.
    """

    url: str
    until: float = 0.0

    def within(self, seconds: float) -> "Objects":
        """Return the same remote, with this time for the next requests."""
        return self._replace(until=time.monotonic() + seconds)

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0]

    @property
    def is_http(self) -> bool:
        return self.scheme in ("http", "https")

    @property
    def shown(self) -> str:
        """The URL for messages, without user and password."""
        return re.sub("^([^/]*//)[^/?#]*@", r"\1", self.url)

    @property
    def registry(self) -> Registry | None:
        """The repository of an ``oci://`` URL."""
        host, _, repository = self.url.removeprefix("oci://").partition("/")
        return Registry(host, repository, self.until) if self.scheme == "oci" else None

    def load(self) -> None:
        """Import the package for the URL's protocol. Raises BadSetting if the URL is invalid, RemoteError if a package is missing."""
        if not re.fullmatch(_URL, self.url):
            raise BadSetting(
                "expected a URL such as https://host/opjit, s3://bucket/opjit, oci://host/repository or file:///folder, "
                f"got {self.shown!r}"
            )
        if self.is_http or self.registry:
            return
        try:
            import fsspec

            fsspec.get_filesystem_class(self.scheme.rpartition("::")[2])
        except (ImportError, ValueError) as error:
            raise RemoteError(
                f"{self.shown} needs a package that is not installed: {error}; install fsspec and its package for the "
                "protocol, such as s3fs for s3:// or gcsfs for gs://"
            ) from error

    def read(self, name: str, limit: int) -> bytes:
        """Return an object's bytes.

        Raises FileNotFoundError if it does not exist, EntryError if it has more than `limit` bytes,
        and other errors if the network failed.
        """
        if self.registry:
            content = self.registry.read(name, limit)
        elif self.is_http:
            content = self._get(name, limit)
        else:
            system, path = self._system(name)
            # One request, and an answer of limited size.
            content = bytes(system.cat_file(path, start=0, end=limit + 1))
        if len(content) > limit:
            raise EntryError(f"{name} is larger than {limit} bytes")
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write an object; not over HTTP. Registries, object stores and local folders show it only when it is complete."""
        if self.registry:
            self.registry.write(name, content)
            return
        system, path = self._system(name)
        if self.scheme in ("file", "local"):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            files.write_whole(Path(path), content)
        else:
            system.makedirs(system._parent(path), exist_ok=True)
            system.pipe_file(path, content)

    def names(self, prefix: str) -> list[str]:
        """Return the names of all objects that start with ``prefix/``, sorted; not over HTTP, which cannot list them. A registry lists only
        entries.
        """
        with suppress(FileNotFoundError):
            if self.registry:
                names = self.registry.names()
            else:
                system, root = self._system(prefix)
                system.invalidate_cache()
                names = [f"{prefix}{path[len(root) :]}" for path in system.find(root)]
            return sorted(name for name in names if name.startswith(f"{prefix}/"))
        return []

    def _system(self, name: str) -> tuple[Any, str]:
        """Return the configured file system of fsspec, and an object's path in it."""
        from fsspec.core import url_to_fs

        system, path = url_to_fs(f"{self.url.rstrip('/')}/{name}")
        return system, str(path)

    def _get(self, name: str, limit: int) -> bytes:
        """Send a GET request to a web server."""
        url = urlsplit(self.url)
        host = url.netloc.rpartition("@")[2]
        address = f"{url.scheme}://{host}{url.path.rstrip('/')}/{quote(name)}"
        login = ""
        if url.username is not None:
            pair = f"{unquote(url.username)}:{unquote(url.password or '')}".encode()
            login = f"Basic {base64.b64encode(pair).decode()}"
        return _send(address, self.until, limit, login)[0]


def _server(host: str) -> str:
    """Return the URL of a host that may get a password: with TLS, or on this machine."""
    here = urlsplit(f"//{host}").hostname in ("localhost", "127.0.0.1", "::1")
    return f"http://{host}" if here else f"https://{host}"


def _send(
    address: str,
    until: float,
    limit: int,
    login: str = "",
    log_in: Callable[[str], str] | None = None,
    method: str = "GET",
    content: bytes | None = None,
    kind: str = "application/octet-stream",
) -> tuple[bytes, Message]:
    """Send a request, and return the answer's body, at most a little longer than `limit`, and its headers.

    Reads the body in pieces, so that the server controls neither its length nor its pace. If the server refuses `login`, `log_in` gets its
    challenge and returns another one. Raises FileNotFoundError, RemoteError, and the errors of the network.
    """
    import urllib.error
    import urllib.request

    headers = {"Accept": f"{_MANIFEST}, */*", "Content-Type": kind}
    request = urllib.request.Request(address, content, headers, method=method)
    if login:
        # Not sent to a server that this one redirects to.
        request.add_unredirected_header("Authorization", login)
    try:
        with urllib.request.build_opener().open(
            request, timeout=max(until - time.monotonic(), 0.01)
        ) as response:
            body = bytearray()
            while len(body) <= limit and (piece := response.read1(_CHUNK)):
                body += piece
                if time.monotonic() > until:
                    raise TimeoutError("the answer arrives too slowly")
            return bytes(body), response.headers
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 401 and log_in:
            login = log_in(error.headers.get("WWW-Authenticate", ""))
            return _send(address, until, limit, login, None, method, content, kind)
        failure = FileNotFoundError if error.code in (404, 410) else RemoteError
        raise failure(f"it answers {error.code} {error.reason}") from None


def with_timeout(call: Callable[[], _Result], seconds: float) -> _Result:
    """Call a function in a thread, which TimeoutError abandons: a name server or a network filesystem can block for minutes."""
    answer: Future[_Result] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="opjit-timeout", daemon=True).start()
    if not wait([answer], seconds).done:
        raise TimeoutError(f"no answer in {seconds:.1f} s")
    return answer.result()
