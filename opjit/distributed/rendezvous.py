"""The store of torch.distributed, in which the ranks of a job meet.

A thread sends each request, because torch's calls do not have a time limit: if the store's host has
exited, hangs or lost its network, the rank gets `StoreLost` after ANSWER_TIMEOUT.
"""

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from opjit.distributed.ranks import Rank
from opjit.share.transport import with_timeout

ANSWER_TIMEOUT = 15.0  # seconds
# torch raises RuntimeErrors, and a TimeoutError is an OSError
_STORE_ERRORS = (
    RuntimeError,
    OSError,
    ValueError,
)
_hosted: dict[tuple[str, int], Any] = {}  # the stores that this process hosts, until it exits


class StoreLost(Exception):
    """The job's store is unreachable; the message contains the reason."""


class JobStore:
    """The job's store, under a separate prefix of keys.

    The first request calls `connect`. A `hosted` store ends with this process.
    """

    def __init__(self, connect: Callable[[], Any], hosted: bool = False) -> None:
        self.hosted = hosted
        self._connect = connect
        self._store = None
        self._lost: str | None = None

    def _call(self, method: str, *arguments: Any) -> Any:
        def call() -> Any:
            self._store = self._store or self._connect()
            return getattr(self._store, method)(*arguments)

        if self._lost is None:
            try:
                return with_timeout(call, ANSWER_TIMEOUT)
            except _STORE_ERRORS as error:
                self._lost = _first_line(error)
        raise StoreLost(self._lost)

    def get(self, key: str) -> bytes | None:
        """Return a key's value, or None. Unlike torch's get, it does not wait until the key is set."""
        return bytes(self._call("get", key)) if self._call("check", [key]) else None

    def set(self, key: str, value: bytes | str) -> None:
        self._call("set", key, value)

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter and return its value; an amount of 0 only reads it."""
        return int(self._call("add", key, amount))

    def compare_set(self, key: str, expected: bytes, value: str) -> bytes:
        """Set a key if it has the expected value, which is empty for an unset key.

        Returns its value afterwards.
        """
        return bytes(self._call("compare_set", key, expected, value))


def connect(rank: Rank, timeout: float) -> JobStore:
    """Connect to the process group's store or, without a process group, to a store on MASTER_PORT,
    which torchrun or rank 0 hosts.

    It is made in the same way as by `init_process_group`, so a later `init_process_group` with the
    same MASTER_PORT shares it. Raises StoreLost if its host does not answer in `timeout` seconds.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise StoreLost("this build of torch does not include torch.distributed")
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    prefix = f"opjit/1/{rank.restarts}"
    if dist.is_initialized():
        group = dist.group.WORLD
        assert group is not None
        try:
            shared: Any = group.get_group_store()
        except RuntimeError as error:
            raise StoreLost(f"the process group lacks a store: {_first_line(error)}") from None
        # A separate connection, because one connection handles one request at a time.
        return JobStore(lambda: PrefixStore(prefix, shared.clone()))
    if rank.address is None:
        raise StoreLost(
            "rank 0's address is unknown; set MASTER_ADDR and MASTER_PORT to rank 0's host and a free port there"
        )
    host, port = rank.address
    limit = timedelta(seconds=ANSWER_TIMEOUT)
    libuv = os.environ.get("USE_LIBUV", "1") == "1"
    if rank.number == 0 and not rank.agent_store:
        try:
            # multi_tenant: other users of this port in this process get the same server
            if rank.address not in _hosted:
                _hosted[rank.address] = TCPStore(
                    host, port, None, True, limit, False, multi_tenant=True, use_libuv=libuv
                )
        except _STORE_ERRORS as error:
            raise StoreLost(
                f"rank 0 cannot host a store at {host}:{port}: {_first_line(error)}"
            ) from None
        server = _hosted[rank.address]
        return JobStore(lambda: PrefixStore(prefix, server), hosted=True)
    _wait_for(host, port, timeout)
    return JobStore(
        lambda: PrefixStore(
            prefix, TCPStore(host, port, None, False, limit, False, use_libuv=libuv)
        )
    )


def _wait_for(host: str, port: int, timeout: float) -> None:
    """Wait for a server.

    The wait of torch would print a line for each attempt.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(2.0, timeout))).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise StoreLost(f"no answer from {host}:{port}: {error}") from None
        time.sleep(0.1)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
