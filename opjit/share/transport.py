"""The objects of a remote: bytes by name under a URL. Over HTTP(S) with what Python brings, anywhere else through fsspec.

HTTP is not left to fsspec's asynchronous client: importing that takes 0.2 s, it reads a body of any length into memory, and its
thread does not survive a fork. One blocking request with a timeout, in a thread that may be given up, has none of that.
"""

from __future__ import annotations

import base64
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from opjit import files
from opjit.errors import EntryError, RemoteError

if TYPE_CHECKING:
    from http.client import HTTPResponse

_Result = TypeVar("_Result")
_CHUNK = 1 << 18


class Objects(NamedTuple):
    """A remote, by its URL: ``https://host/folder``, ``s3://bucket/folder``, ``file:///folder``. Making the object touches nothing."""

    url: str

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0]

    @property
    def is_http(self) -> bool:
        return self.scheme in ("http", "https")

    @property
    def shown(self) -> str:
        """The URL for people to read: without a password."""
        try:
            parts = urlsplit(self.url)
        except ValueError:
            return self.scheme + "://…"
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))

    def check(self) -> None:
        """Refuse a URL that is none.

        Raises:
            RemoteError: says what one looks like.
        """
        if "://" not in self.url or (self.is_http and ("?" in self.url or "#" in self.url)):
            raise RemoteError(f"expected a URL such as https://host/opjit, s3://bucket/opjit or file:///folder, got {self.shown!r}")

    def load(self) -> None:
        """Import what speaks the URL's protocol; no network is used.

        Raises:
            RemoteError: the URL is none, or a package is missing.
        """
        self.check()
        if self.is_http:
            return
        try:
            import fsspec

            fsspec.get_filesystem_class(self.scheme.rpartition("::")[2])
        except (ImportError, ValueError) as error:
            raise RemoteError(f"{self.shown} needs a package that is not here: {error}; install fsspec, and the one that it names for "
                              "the protocol, such as s3fs for s3:// and gcsfs for gs://") from error

    def read(self, name: str, limit: int, until: float) -> bytes:
        """An object's bytes.

        Args:
            limit: of bytes; a longer object is an error.
            until: time.monotonic() after which a body that still comes in is given up.

        Raises:
            FileNotFoundError: there is no such object.
            EntryError: it is too long.
            Exception: whatever else the network and its libraries can do.
        """
        if self.is_http:
            content = self._request(name, limit, until)
        else:
            system, path = self._system(name)
            # One request for an object store. It answers with no more than was asked for.
            content = bytes(system.cat_file(path, start=0, end=limit + 1))
        if len(content) > limit:
            raise EntryError(f"{name} is larger than {limit} bytes")
        return content

    def write(self, name: str, content: bytes) -> None:
        """Put an object there; not for HTTP. It appears whole, as far as the place can do that: object stores can, and a local folder."""
        system, path = self._system(name)
        if self._local:
            _write_whole(Path(path), content)
            return
        system.makedirs(system._parent(path), exist_ok=True)
        system.pipe_file(path, content)

    def has(self, name: str) -> bool:
        """Whether an object is there; not for HTTP."""
        system, path = self._system(name)
        return bool(system.exists(path))

    def names(self, prefix: str) -> list[str]:
        """The names of all objects that start with ``prefix/``, in order; not for HTTP, which has no listing."""
        system, root = self._system(prefix)
        system.invalidate_cache()
        try:
            found = system.find(root)
        except FileNotFoundError:
            return []
        return sorted(f"{prefix}{path[len(root):]}" for path in found if path.startswith(f"{root}/"))

    @property
    def _local(self) -> bool:
        return self.scheme in ("file", "local")

    def _system(self, name: str) -> tuple[Any, str]:
        """Fsspec's file system, with the options of its own configuration, and the path of an object in it."""
        from fsspec.core import url_to_fs

        system, path = url_to_fs(f"{self.url.rstrip('/')}/{name}")
        return system, str(path)

    def _request(self, name: str, limit: int, until: float) -> bytes:
        """One GET. The body is read in pieces, so that neither its length nor its pace is the server's to choose."""
        import urllib.error
        import urllib.request

        url = urlsplit(self.url)
        address = urlunsplit(url._replace(netloc=url.netloc.rpartition("@")[2], path=f"{url.path.rstrip('/')}/{quote(name)}"))
        request = urllib.request.Request(address)
        for header, value in self._headers().items():
            request.add_unredirected_header(header, value)  # nobody else's server is told a password
        opener = urllib.request.OpenerDirector()
        for handler in (urllib.request.ProxyHandler, urllib.request.HTTPHandler, urllib.request.HTTPSHandler, urllib.request.UnknownHandler,
                        urllib.request.HTTPDefaultErrorHandler, urllib.request.HTTPRedirectHandler, urllib.request.HTTPErrorProcessor):
            opener.add_handler(handler())
        try:
            response: HTTPResponse
            with opener.open(request, timeout=max(until - time.monotonic(), 0.01)) as response:
                return _read_body(response, limit, until)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (404, 410):
                raise FileNotFoundError(name) from None
            raise RemoteError(f"it answers {error.code} {error.reason}") from None

    def _headers(self) -> dict[str, str]:
        """From the user and password in the URL, and from fsspec's configuration of the protocol, for a token or a key."""
        from fsspec.config import conf

        url = urlsplit(self.url)
        headers: dict[str, str] = {}
        if url.username is not None:
            pair = f"{unquote(url.username)}:{unquote(url.password or '')}".encode()
            headers["Authorization"] = f"Basic {base64.b64encode(pair).decode('ascii')}"
        configured = conf.get(self.scheme, {})
        unknown = configured.keys() - {"headers"}
        if unknown:
            raise RemoteError(f"fsspec's configuration of {self.scheme} sets {', '.join(sorted(unknown))}; opjit follows `headers` only")
        return {**headers, **configured.get("headers", {})}


def in_time(call: Callable[[], _Result], seconds: float) -> _Result:
    """What a function returns, or raises, if it does so in time; a thread that is still at it is left to itself.

    A name server, a connection and a network filesystem can each keep a caller for minutes, so only a thread can be given up.

    Raises:
        TimeoutError: it took longer.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="opjit remote", daemon=True).start()
    if not done.wait(seconds):
        raise TimeoutError(f"no answer in {seconds:.1f} s")
    if errors:
        raise errors[0]
    return results[0]


def _read_body(response: HTTPResponse, limit: int, until: float) -> bytes:
    content = bytearray()
    while len(content) <= limit:
        piece = response.read1(_CHUNK)
        if not piece:
            break
        content += piece
        if time.monotonic() > until:
            raise TimeoutError("the answer comes in too slowly")
    return bytes(content)


def _write_whole(path: Path, content: bytes) -> None:
    """In a folder that others may share: whatever the umask allows, and complete or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{files.unique()}")
    try:
        files.write_synced(staged, content)
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)
    files.sync(path.parent)
