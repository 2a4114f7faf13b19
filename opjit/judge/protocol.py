"""The protocol between the judge and its workers: typed messages, and files of memory that come with them.

The judge unpickles nothing that a worker sent: it reads the bytes of results, and their dtypes and
shapes in the message.
"""

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from opjit.judge.verdict import VerdictReached
from opjit.tensors import tensors_of
from opjit.testing.compare import dtype_name
from opjit.typed_json import typed

_INLINE = 60_000  # bytes of a message. Longer messages go into a file of memory
MESSAGE_LIMIT = 4 << 20  # bytes of a message, and of what may come with it beyond the results
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
DTYPES = {
    dtype_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its elements."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


Description = TensorSpec | bool | int | float | str | None


@dataclass(frozen=True)
class Fork:
    """Fork a keeper and its worker. The ends of their sockets are attached."""

    device: str
    bench: bool
    programs: bool  # whether candidates may start compilers and other programs
    memory: int  # bytes


@dataclass(frozen=True)
class Ask:
    """Call a method of a worker, or tell its keeper what to do."""

    method: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Done:
    """The request was carried out. The judge reads the facts only if no code of a candidate runs in the process."""

    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadedCandidate:
    """The candidate can be called."""

    isolation: list[str]
    key: str | None = None
    cached: bool = False


@dataclass(frozen=True)
class Ran:
    """The addresses and sizes of all results of a burst, if the judge reads them from the stopped worker."""

    addresses: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Described:
    """Results of the calls of a burst. If the judge did not read their bytes, these are attached."""

    results: tuple[tuple[Description, ...], ...]
    changed: bool  # inputs
    elements: dict[str, int]  # of torch's operators that ran
    evidence: str  # of a cheat, or an empty text


def forged(reason: object) -> VerdictReached:
    """Return the verdict on a worker whose messages or files are malformed."""
    return VerdictReached("cheat", f"writes to the pipes of the judge: {reason}")


M = TypeVar("M")


def decode(body: bytes | bytearray, kinds: Sequence[type[M]]) -> M:
    """Return the message of one of these classes. Raises `forged` for another class, or if a field has another type."""
    try:
        name, content = json.loads(body)
        for kind in kinds:
            if kind.__name__ == name:
                return typed(content, kind)  # type: ignore[no-any-return]
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"expected {expected}, got {name!r}")
    except (ValueError, TypeError, RecursionError) as error:
        raise forged(str(error)[:200]) from None


class Channel:
    """One end of a socket that keeps messages apart."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    @classmethod
    def pair(cls) -> tuple["Channel", "Channel"]:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one), cls(other)

    def send(self, message: object, *descriptors: int) -> None:
        """Send a message as JSON: the name of its class, and its fields."""
        body = json.dumps([type(message).__name__, vars(message)], default=vars).encode()
        if len(body) <= _INLINE:
            socket.send_fds(self.end, [body], descriptors)
        else:
            with closing(sealed(body)) as long:
                socket.send_fds(self.end, [b"-"], [long, *descriptors])

    def receive(
        self, kinds: Sequence[type[M]], seconds: float | None = None
    ) -> tuple[M, list[int]]:
        """Wait for a message of one of these classes, and its descriptors.

        Raises EOFError if the other end is gone, TimeoutError, or `forged`.
        """
        if self.end.gettimeout() != seconds:  # setting it is a system call that workers lack
            self.end.settimeout(seconds)
        try:
            body, descriptors, *_ = socket.recv_fds(self.end, _INLINE + 1, 4)
        except ConnectionError:
            raise EOFError from None
        if not body:
            raise EOFError

        try:
            if body == b"-" and descriptors:
                return decode(read_sealed(descriptors.pop(0), MESSAGE_LIMIT), kinds), descriptors
            return decode(body, kinds), descriptors
        except VerdictReached:
            for each in descriptors:
                os.close(each)
            raise


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Close a descriptor after the block, by one system call: Python's files make more, for which some workers die."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sealed(data: bytes | bytearray | memoryview) -> int:
    """Return a file of memory that nobody can change."""
    descriptor = os.memfd_create("opjit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def read_sealed(descriptor: int, limit: int) -> bytearray:
    """Read and close a file of memory. Raises `forged` if it is not sealed, or has more bytes than the limit."""
    with closing(descriptor):
        seals = -1
        with suppress(OSError):  # no file of memory
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if seals < 0 or seals & _SEALS != _SEALS:
            raise forged("a file that is not sealed")
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise forged(f"a file of {size} bytes, where at most {limit} are expected")

        data = bytearray()
        while len(data) < size:
            data += os.pread(descriptor, size - len(data), len(data))
        return data


def specs(values: Any) -> tuple[TensorSpec, ...]:
    """Return the dtypes and shapes of all tensors among values."""
    return tuple(_spec(each) for each in tensors_of(values))


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape))


def describe_result(result: Any) -> Description:
    if isinstance(result, torch.Tensor):
        return _spec(result)
    if isinstance(result, (int, float, type(None))):
        return result
    return repr(result)[:1000]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor on the CPU."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def decode_results(
    descriptions: Sequence[Description], data: memoryview
) -> tuple[list[Any], memoryview]:
    """Return the results of a call from their descriptions and bytes, and the bytes that follow.

    Raises `forged` if the bytes do not fit.
    """
    found = list[Any]()
    try:
        for each in descriptions:
            if not isinstance(each, TensorSpec):
                found.append(each)
                continue
            size = each.nbytes
            if min(each.shape, default=0) < 0 or size > len(data):
                raise ValueError("a tensor beyond its file")
            result = torch.empty(each.shape, dtype=DTYPES[each.dtype])
            if size:
                copy = bytearray(data[:size])
                result = torch.frombuffer(copy, dtype=result.dtype).reshape(each.shape)
            found.append(result)
            data = data[size:]
    except (KeyError, ValueError, RuntimeError, OverflowError) as error:
        raise forged(f"malformed results: {error}") from None
    return found, data
