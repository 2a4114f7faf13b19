"""What the tests of the remote share: keys, an op with its signed entry, and web servers that behave as they are told."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import pytest

from opjit import request
from opjit.backends import targets
from opjit.cache import transfer, verification
from opjit.catalog import registry
from opjit.operators.op import Op
from opjit.recipe.recipe import Recipe
from opjit.share import remote, trust
from opjit.store import manifest
from opjit.store.bundle import Bundle, parse_bundle
from opjit.store.entry import Entry
from opjit.store.store import Store
from opjit.wanted import describe
from tests import helpers

NAMESPACE = "remotetest"


def declare(folder: Path, namespace: str = NAMESPACE, amount: float = 1.0) -> Op:
    """The op `plus` in a namespace of its own, declared in this process."""
    helpers.write_op(
        folder,
        op_py=helpers.OP_PY.replace("keytest::", f"{namespace}::"),
        amount_h=f"#define AMOUNT {amount}f\n",
    )
    registry.declare_folder(folder)
    return registry.find(f"{namespace}::plus")


class Answer(NamedTuple):
    """What came of a request for an op."""

    entry: Entry
    warnings: list[str]

    @property
    def was_built(self) -> bool:
        """Here, and not fetched: only a build leaves its commands beside the binary."""
        return (self.entry.folder / "build.ninja").is_file()


class Published(NamedTuple):
    """An op, what a build of it gives, and a remote that holds it, signed: the names of the entry's object and of the pointer to it."""

    op: Op
    entry: Entry
    folder: Path
    private: Path
    public: str
    name: str
    pointer: str
    base: str  # the pointer of machines without a compiler
    content: bytes

    @property
    def url(self) -> str:
        return self.folder.as_uri()

    @property
    def bundle(self) -> Bundle:
        return parse_bundle(self.content)

    @property
    def library(self) -> bytes:
        return self.entry.library.read_bytes()

    def recipe(self, cache: Path) -> Recipe:
        return describe(self.op, targets.here(helpers.cpu()), Store(cache))


def ask(op: Op) -> Answer:
    """What the first request for an op gives with the settings at hand; only opjit's own warnings may come."""
    with helpers.cache_warnings() as texts:
        entry = request.entry(op, targets.here(helpers.cpu()))
    return Answer(entry, texts)


def publish(folder: Path, namespace: str = NAMESPACE, amount: float = 1.0) -> Published:
    """Build an op and push its entry to a folder that is a remote."""
    op = declare(folder / "plus", namespace, amount)
    private, public = trust.keygen("ci", folder / "keys")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPJIT_CACHE", str(folder / "cache"))
        entry = ask(op).entry
        transfer.push((folder / "remote").as_uri(), sign=private, ops=[op.qualified])
    described = manifest.parse((entry.folder / manifest.NAME).read_bytes())
    origin = verification.origin(described)
    base, pointer = origin.pointers
    return Published(
        op,
        entry,
        folder / "remote",
        private,
        public,
        origin.name,
        pointer,
        base,
        (folder / "remote" / origin.name).read_bytes(),
    )


@contextmanager
def black_hole() -> Iterator[str]:
    """The URL of a socket that drops connections: its queue is full, and no process accepts from it."""
    with ExitStack() as stack:
        silent = stack.enter_context(socket.socket())
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        yield f"http://127.0.0.1:{silent.getsockname()[1]}"


Behaviour = Callable[["Handler"], None]


class Server(ThreadingHTTPServer):
    """A web server whose answers a function gives; it keeps the paths and the headers of all requests."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, behave: Behaviour) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave = behave
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """The client went away, as it should."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.server.headers.append(dict(self.headers))
        self.server.behave(self)

    def do_POST(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        self.do_GET()

    def answer(self, content: bytes, status: int = 200, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)

    def reset(self) -> None:
        """Close the connection as a crashed server does."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(behave: Behaviour) -> Iterator[Server]:
    with Server(behave) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def from_folder(folder: Path, latency: float = 0.0) -> Behaviour:
    """What a plain file server does."""

    def behave(handler: Handler) -> None:
        time.sleep(latency)
        path = folder / unquote(handler.path).lstrip("/")
        if path.is_file():
            handler.answer(path.read_bytes())
        else:
            handler.answer(b"not here", 404)

    return behave


def drip(handler: Handler) -> None:
    """A byte now and then, for 600 s."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(12_000):
        handler.wfile.write(b"o")
        time.sleep(0.05)


def endless(handler: Handler) -> None:
    """More than anybody takes."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(10_000):
        handler.wfile.write(bytes(1 << 20))


def half_then_reset(handler: Handler) -> None:
    """The first bytes of an entry, and then no more."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    handler.wfile.write(b"opjit entry 1\n")
    handler.reset()


def forget(patch: pytest.MonkeyPatch) -> None:
    """As in a fresh process: no remote has failed, nothing was said."""
    patch.setattr(remote, "_failed", set())
    patch.setattr(trust, "_warned", set())
