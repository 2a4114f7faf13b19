"""The objects of a remote: bytes by name under a URL.

HTTP and HTTPS use Python's standard library, and other protocols use fsspec. The HTTP client of
fsspec is not used because it needs 0.2 s to import, reads bodies of any length, and has a thread
that does not survive a fork.
"""

import base64
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from opjit import files
from opjit.errors import EntryError, RemoteError

_Result = TypeVar("_Result")
_CHUNK = 1 << 18


class Objects(NamedTuple):
    """A remote, by its URL: ``https://host/folder``, ``s3://bucket/folder``, ``file:///folder``. Constructing one accesses nothing."""

    url: str

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0]

    @property
    def is_http(self) -> bool:
        return self.scheme in ("http", "https")

    @property
    def shown(self) -> str:
        """The URL for messages, without user and password."""
        try:
            parts = urlsplit(self.url)
        except ValueError:
            return self.scheme + "://…"
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))

    def load(self) -> None:
        """Import the package for the URL's protocol. Raises RemoteError if the URL is invalid, or a package is missing."""
        if "://" not in self.url or (self.is_http and ("?" in self.url or "#" in self.url)):
            raise RemoteError(
                f"expected a URL such as https://host/opjit, s3://bucket/opjit or file:///folder, got {self.shown!r}"
            )

        if self.is_http:
            return
        try:
            import fsspec

            fsspec.get_filesystem_class(self.scheme.rpartition("::")[2])
        except (ImportError, ValueError) as error:
            raise RemoteError(
                f"{self.shown} needs a package that is not installed: {error}; install fsspec and its package for the "
                "protocol, such as s3fs for s3:// or gcsfs for gs://"
            ) from error

    def read(self, name: str, limit: int, until: float) -> bytes:
        """Return an object's bytes.

        Raises FileNotFoundError if it does not exist, EntryError if it has more than `limit` bytes,
        and other errors if the network failed.
        """
        if self.is_http:
            content = self._request(name, limit, until)
        else:
            system, path = self._system(name)
            # One request, and an answer of limited size.
            content = bytes(system.cat_file(path, start=0, end=limit + 1))
        if len(content) > limit:
            raise EntryError(f"{name} is larger than {limit} bytes")
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write an object; not over HTTP. Object stores and local folders show it only when it is complete."""
        system, path = self._system(name)
        if self.scheme in ("file", "local"):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            files.write_whole(Path(path), content)
        else:
            system.makedirs(system._parent(path), exist_ok=True)
            system.pipe_file(path, content)

    def names(self, prefix: str) -> list[str]:
        """Return the names of all objects that start with ``prefix/``, sorted; not over HTTP, which cannot list them."""
        system, root = self._system(prefix)
        system.invalidate_cache()
        try:
            found = system.find(root)
        except FileNotFoundError:
            return []
        return sorted(
            f"{prefix}{path[len(root) :]}" for path in found if path.startswith(f"{root}/")
        )

    def _system(self, name: str) -> tuple[Any, str]:
        """Return the configured file system of fsspec, and an object's path in it."""
        from fsspec.core import url_to_fs

        system, path = url_to_fs(f"{self.url.rstrip('/')}/{name}")
        return system, str(path)

    def _request(self, name: str, limit: int, until: float) -> bytes:
        """Send a GET request.

        Reads the body in pieces, so that the server controls neither its length nor its pace.
        """
        import urllib.error
        import urllib.request

        url = urlsplit(self.url)
        address = urlunsplit(
            url._replace(
                netloc=url.netloc.rpartition("@")[2], path=f"{url.path.rstrip('/')}/{quote(name)}"
            )
        )
        request = urllib.request.Request(address)
        if url.username is not None:
            pair = f"{unquote(url.username)}:{unquote(url.password or '')}".encode()
            credentials = f"Basic {base64.b64encode(pair).decode('ascii')}"
            # Not sent to a server that this one redirects to.
            request.add_unredirected_header("Authorization", credentials)
        try:
            with urllib.request.build_opener().open(
                request, timeout=max(until - time.monotonic(), 0.01)
            ) as response:
                content = bytearray()
                while len(content) <= limit and (piece := response.read1(_CHUNK)):
                    content += piece
                    if time.monotonic() > until:
                        raise TimeoutError("the answer arrives too slowly")
                return bytes(content)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (404, 410):
                raise FileNotFoundError(name) from None
            raise RemoteError(f"it answers {error.code} {error.reason}") from None


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
