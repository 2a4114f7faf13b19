"""Runs a compiler, and keeps its object file in the cache: ``python -IS compiler_launcher.py plan.json c++ -c one.cpp -o one.o``.

ninja runs this file for each source, so it imports neither opjit nor torch: 30 ms. An object is kept as soon as it is complete, so a build
that fails or is killed later leaves it to the next one. `opjit.cpp_extension.objects` writes the plan and uses the objects.

A kept object is one file: the SHA-256 of what follows, a line of JSON, the compiler's list of headers, and the object.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

# What makes an object depend on more than the command and the files that the scan and the compiler name: dates, and files without #include.
_MORE = re.compile(rb'__(?:DATE|TIME|TIMESTAMP)__|\bincbin\b|\.include[ \t]*\\?"|#[ \t]*embed\b')


def main(plan: str, *command: str) -> int:
    """Run the compiler; return its exit code. That an object cannot be kept is no error."""
    code = os.spawnvp(os.P_WAIT, command[0], command)
    if code == 0:
        with suppress(OSError, ValueError, KeyError), open(plan, encoding="ascii") as file:
            _keep(json.load(file), command)
    return code if code >= 0 else 128 - code  # as a shell does for a signal


def _keep(plan: Mapping[str, Any], command: Sequence[str]) -> None:
    output = command[command.index("-o") + 1]
    with open(f"{output}.d", "rb") as file:
        listed = file.read()
    with open(output, "rb") as file:
        content = file.read()
    key, inputs = plan["objects"][output]["key"], plan["objects"][output]["inputs"]
    paths = (os.path.join(os.getcwd(), name) for name in _prerequisites(os.fsdecode(listed)))
    more = {path for path in paths if path not in inputs and not os.path.realpath(path).startswith(tuple(plan["trusted"]))}
    digests = {path: _digest(path, plan["started"]) for path in (*inputs, *more)}
    if all(digests[path] == digest for path, digest in inputs.items()):
        _write(plan["folder"], key, pack({path: digests[path] for path in more}, listed, content))


def _prerequisites(text: str) -> list[str]:
    """Return the files in a compiler's list of headers; as `opjit.recipe.headers.read_dependencies`, which this file cannot import."""
    rules = text.replace("\\\n", " ").split("\n")
    names = [name for rule in rules for name in re.split(r"(?<!\\)\s+", rule.partition(": ")[2].strip())]
    return [re.sub(r"\\([ #:])", r"\1", name).replace("$$", "$") for name in names if name]


def _digest(path: str, started: int) -> str:
    """Return the SHA-256 of a file that the compiler read. Raises ValueError if the object may not be kept because of it."""
    with open(path, "rb") as file:
        content = file.read()
        if os.fstat(file.fileno()).st_ctime_ns >= started:
            raise ValueError("it changed after the build began, so what the compiler read is unknown")
    if _MORE.search(content):
        raise ValueError("its meaning depends on the date, or on files that no #include names")
    return hashlib.sha256(content).hexdigest()


def pack(found: Mapping[str, str], listed: bytes, content: bytes) -> bytes:
    """Make the bytes of a kept object.

    Args:
        found: the SHA-256 of the headers that only the compiler found.
        listed: the compiler's list of headers.
        content: the object.
    """
    rest = json.dumps({"found": found, "listed": len(listed)}).encode() + b"\n" + listed + content
    return hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest


def unpack(content: bytes) -> tuple[dict[str, str], bytes, bytes]:
    """Return what `pack` got. Raises ValueError if the bytes are damaged."""
    digest, rest = content[:64], memoryview(content)[65:]
    if hashlib.sha256(rest).hexdigest().encode() != digest:
        raise ValueError("it does not have the SHA-256 in its first line")
    start = content.index(b"\n", 65) + 1
    head = json.loads(content[65:start])
    return dict(head["found"]), content[start:start + head["listed"]], content[start + head["listed"]:]


def _write(folder: str, key: str, content: bytes) -> None:
    """Write a file that appears by one rename. It is not flushed to disk: a damaged one is compiled again."""
    temporary = os.path.join(folder, f".{key}.{os.urandom(16).hex()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(content)
        os.replace(temporary, os.path.join(folder, key))
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt ends the compiler too; a traceback of this file would help nobody
    sys.exit(main(*sys.argv[1:]))
