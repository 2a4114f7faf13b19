"""What the judge and its children say to each other: JSON, and tensors in sealed files of memory beside it. Children get torch's own files.
The judge takes no pickle from them: only bytes in a file that nobody can write to any more, and shapes."""

import ctypes
import fcntl
import io
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from opjit.declare.sample import tensors_of

_LARGEST = 60_000  # bytes of a message; longer ones go into a file of memory
_LONGEST = 4 << 30  # bytes of a file that the judge reads
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


class Untrusted(Exception):
    """A message that no child of ours sends."""


class Channel:
    """One end of a socket that keeps messages apart."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    @classmethod
    def pair(cls) -> tuple["Channel", "Channel"]:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one), cls(other)

    def send(self, message: dict[str, Any], *descriptors: int) -> None:
        body = json.dumps(message).encode()
        if len(body) <= _LARGEST:
            socket.send_fds(self.end, [body], descriptors)
        else:
            with closing(sealed(body)) as long:
                socket.send_fds(self.end, [b"-"], [long, *descriptors])

    def receive(self, seconds: float | None = None) -> tuple[dict[str, Any], list[int]]:
        """Wait for a message and its descriptors. Raises EOFError if the other end is gone, TimeoutError, or Untrusted."""
        if (
            self.end.gettimeout() != seconds
        ):  # setting it is a system call, which some children may not make
            self.end.settimeout(seconds)
        try:
            body, descriptors, *_ = socket.recv_fds(self.end, _LARGEST + 1, 4)
        except ConnectionError:
            body, descriptors = b"", []
        if not body:
            raise EOFError
        try:
            message = json.loads(content(descriptors.pop(0)) if body == b"-" else body)
            return {**message}, descriptors
        except (ValueError, RecursionError, IndexError, TypeError) as error:
            for each in descriptors:
                os.close(each)
            raise Untrusted(f"a message that is none: {error}") from None


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Close a descriptor after the block, by one system call: Python's files make more, for which some children die."""
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


def content(descriptor: int) -> bytearray:
    """Read and close a file of memory. Raises Untrusted if it is not sealed, or too long."""
    with closing(descriptor):
        seals = -1
        with suppress(OSError):  # no file of memory
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        size = os.fstat(descriptor).st_size
        if seals < 0 or seals & _SEALS != _SEALS or size > _LONGEST:
            raise Untrusted("a file that is not sealed, or too long")
        data = bytearray()
        while len(data) < size:
            data += os.pread(descriptor, size - len(data), len(data))
        return data


def saved(value: Any) -> int:
    """Return a file of memory with tensors and other values, for a child."""
    file = io.BytesIO()
    torch.save(value, file)
    return sealed(file.getbuffer())


def loaded(data: bytearray, device: str) -> Any:
    """Return what `saved` was given, in new memory of a device. For children."""
    return torch.load(io.BytesIO(data), map_location=device, weights_only=False)


def packed(results: Any, into: bytearray) -> Any:
    """Describe results in JSON's terms; the bytes of tensors go to `into`, one after another."""
    if isinstance(results, (list, tuple)):
        return [packed(each, into) for each in results]
    if not isinstance(results, torch.Tensor):
        return {
            "value": results
            if isinstance(results, (bool, int, float, type(None)))
            else repr(results)
        }
    tensor = results.detach().resolve_conj().resolve_neg().cpu().contiguous()
    into += (
        memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
        if tensor.numel()
        else b""
    )
    return spec(tensor)[0]


def spec(results: Any) -> list[dict[str, Any]]:
    """The dtypes and shapes of all tensors of results, in JSON's terms."""
    return [
        {"dtype": str(each.dtype).removeprefix("torch."), "shape": list(each.shape)}
        for each in tensors_of(results)
    ]


def unpacked(description: Any, data: bytearray, at: list[int]) -> Any:
    """Return the results that `packed` described, from the place `at[0]` on. Raises Untrusted."""
    try:
        if isinstance(description, list):
            return [unpacked(each, data, at) for each in description]
        if "value" in description:
            return description["value"]
        dtype, shape = DTYPES[description["dtype"]], torch.Size(description["shape"])
        start, at[0] = at[0], at[0] + shape.numel() * dtype.itemsize
        if min(shape, default=0) < 0 or at[0] > len(data):
            raise ValueError("a tensor beyond its file")
        return (
            torch.frombuffer(data[start : at[0]], dtype=dtype).reshape(shape)
            if shape.numel()
            else torch.empty(shape, dtype=dtype)
        )
    except (KeyError, ValueError, TypeError, RuntimeError, RecursionError, OverflowError) as error:
        raise Untrusted(f"results that are none: {error}") from None
