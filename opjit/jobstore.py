"""The store that the ranks of a job meet in: torch.distributed's, which the job has or gets anyway.

Every question goes through a thread of its own, because torch asks without a time limit: where the store's host is gone, frozen or cut
off, the rank hears `Lost` after a while instead of hanging.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

from opjit.ranks import Place

ANSWER = 15.0  # seconds that an answer may take
_hosted: dict[tuple[str, int], Any] = {}  # the stores that this process is the host of, for as long as it lives


class Lost(Exception):
    """The job's store is not there, or not any more; says why."""


class JobStore:
    """A connection to the job's store. Keys are opjit's own; torch's are not touched.

    Attributes:
        hosted: the store goes with this process.
    """

    def __init__(self, opened: Callable[[], Any], hosted: bool = False) -> None:
        self.hosted = hosted
        self._questions: SimpleQueue[tuple[str, tuple[Any, ...], SimpleQueue[Any]] | None] = SimpleQueue()
        self._lost: str | None = None
        self._thread = threading.Thread(target=self._answer, args=(opened, self._questions), name="opjit-jobstore", daemon=True)
        self._thread.start()

    @staticmethod
    def _answer(opened: Callable[[], Any], questions: SimpleQueue[tuple[str, tuple[Any, ...], SimpleQueue[Any]] | None]) -> None:
        store: Any = None
        while (question := questions.get()) is not None:
            name, arguments, answer = question
            try:
                if store is None:
                    store = opened()
                answer.put((True, getattr(store, name)(*arguments)))
            except (RuntimeError, OSError, ValueError) as error:  # torch's errors are RuntimeErrors
                answer.put((False, (str(error).splitlines() or [type(error).__name__])[0]))

    def _ask(self, name: str, *arguments: Any) -> Any:
        if self._lost is None:
            answer: SimpleQueue[Any] = SimpleQueue()
            self._questions.put((name, arguments, answer))
            try:
                good, value = answer.get(timeout=ANSWER)
                if good:
                    return value
                self._lost = value
            except Empty:
                self._lost = f"no answer in {ANSWER:.0f} s"
        raise Lost(self._lost)

    def read(self, key: str) -> bytes | None:
        """What a key holds; None for a key that nobody set. Never waits for one, as torch's get does."""
        content: bytes | None = self._ask("get", key) if self._ask("check", [key]) else None
        return content

    def write(self, key: str, content: bytes | str) -> None:
        """Write a key, without waiting for it; a later question is asked when that is done."""
        self._questions.put(("set", (key, content), SimpleQueue()))

    def count(self, key: str) -> None:
        """Add 1 to a counter, without waiting for it."""
        self._questions.put(("add", (key, 1), SimpleQueue()))

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter; 0 reads it."""
        return int(self._ask("add", key, amount))

    def exchange(self, key: str, expected: str, wanted: str) -> bool:
        """Write a key if it holds what is expected; an empty text expects that nobody set it."""
        return bool(self._ask("compare_set", key, expected, wanted) == wanted.encode())

    def close(self) -> None:
        """Hang up. Waits until all that was written has arrived: a process that ends while a thread is in torch's code is aborted."""
        self._questions.put(None)
        if self._lost is None:
            self._thread.join(ANSWER)


def connect(place: Place, patience: float, needless: Callable[[], bool]) -> JobStore:
    """Connect to the job's store; rank 0 is its host, unless torchrun is.

    A process group that exists lends its store. Else the store is made as `init_process_group` makes it, so that one which is
    called later, with the same MASTER_PORT, uses the same.

    Args:
        patience: seconds to wait for its host.
        needless: asked now and then meanwhile; True ends the wait.

    Raises:
        Lost: it cannot be reached.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise Lost("this build of torch has no torch.distributed")
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    prefix = f"opjit/1/{place.attempt}"
    if dist.is_initialized():
        group = dist.group.WORLD
        assert group is not None
        try:
            lent = group.get_group_store()
        except RuntimeError as error:
            raise Lost(f"the process group has no store: {(str(error).splitlines() or [''])[0]}") from None
        # A connection of its own: one of torch's answers one question at a time.
        return JobStore(lambda: PrefixStore(prefix, lent.clone() if hasattr(lent, "clone") else lent))
    if place.address is None:
        raise Lost("nothing says where rank 0 is; set MASTER_ADDR and MASTER_PORT to a host and a port of it")
    host, port = place.address
    limit = timedelta(seconds=ANSWER)
    libuv = os.environ.get("USE_LIBUV", "1") == "1"
    if place.rank == 0 and not place.agent:
        try:
            if place.address not in _hosted:  # multi_tenant: whoever else in this process asks for that port gets the same server
                _hosted[place.address] = TCPStore(host, port, None, True, limit, False, multi_tenant=True, use_libuv=libuv)
        except (RuntimeError, OSError, ValueError) as error:
            raise Lost(f"rank 0 cannot be the host of a store at {host}:{port}: {(str(error).splitlines() or [''])[0]}") from None
        server = _hosted[place.address]
        return JobStore(lambda: PrefixStore(prefix, server), hosted=True)
    _wait_for(host, port, patience, needless)
    return JobStore(lambda: PrefixStore(prefix, TCPStore(host, port, None, False, limit, False, use_libuv=libuv)))


def _wait_for(host: str, port: int, patience: float, needless: Callable[[], bool]) -> None:
    """Wait until somebody listens there. torch's own wait cannot be ended, and prints a line for each attempt."""
    end, pause = time.monotonic() + patience, 0.02
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(2.0, patience))).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise Lost(f"no answer from {host}:{port}: {error}") from None
        if needless():
            raise Lost("nothing is missing any more")
        time.sleep(pause)
        pause = min(0.5, pause * 1.5)
