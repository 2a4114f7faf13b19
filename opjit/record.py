"""``opjit record``: which ops a program uses, for which targets, over all of its processes.

The program runs with OPJIT_RECORD naming a file, to which each process appends a line when it first readies an op for a target. At the
end the lines become one sorted list, however the program ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from opjit import backends, files, oplist
from opjit.errors import CacheWarning, RecordError
from opjit.op import Op
from opjit.oplist import Line
from opjit.targets import Target


def note(op: Op, target: Target, path: str) -> None:
    """Append an op to the file, in one write: other processes do the same. Trouble is a warning, as the op works all the same."""
    text = json.dumps(_line(op, target).fields(), sort_keys=True) + "\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        try:
            os.write(descriptor, text.encode("ascii"))
        finally:
            os.close(descriptor)
    except OSError as error:
        warnings.warn(CacheWarning(f"{op.qualified} is not recorded: OPJIT_RECORD names {path!r}: {error}"), stacklevel=2)


def _line(op: Op, target: Target) -> Line:
    added: list[tuple[str, ...]] = [(), (), (), ()]
    if op.extra is not None:
        added = [op.extra.c, op.extra.cuda, op.extra.link, op.extra.include]
    flags = {name: [_written(flag) for flag in each] for name, each in zip(oplist.FLAGS, added, strict=True)}
    code = None
    if op.code is not None:
        code = {backend.name: op.code.texts[backend.suffix] for backend in backends.all_backends() if backend.suffix in op.code.texts}
    return Line(op.qualified, op.schema.text, target.backend.name, target.arch, target.runtime, flags,
                None if code else str(op.folder), code)


def _written(flag: str) -> str:
    """As its author wrote it: see extras, where braces were doubled."""
    return flag.replace("{{", "{").replace("}}", "}")


def run(command: Sequence[str], output: Path) -> int:
    """Run a command and leave the list of the ops that it used; returns its exit code, or 128 and the signal that ended it.

    Raises:
        RecordError: the list cannot be written there, or there is no such command.
    """
    raw = output.absolute().with_name(f".{output.name}.{files.unique()}")  # where other nodes of a job may see it too
    try:
        os.close(os.open(raw, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise RecordError(f"the list cannot be written to {output}: {error}; name another file with -o") from error
    try:
        code = _run(command, {**os.environ, "OPJIT_RECORD": str(raw)})
        _write(output, _gather(raw))
    finally:
        with suppress(OSError):
            raw.unlink()
    return code


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    with _passed_on() as children:
        try:
            process = subprocess.Popen(command, env=environment)
        except (OSError, ValueError) as error:
            raise RecordError(f"{command[0]!r} cannot be run: {error}") from error
        children.append(process)
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _passed_on() -> Iterator[list[subprocess.Popen[Any]]]:
    """Outlive what ends the command: a terminal's Ctrl-C reaches it by itself, and what is sent to this process is sent on."""
    children: list[subprocess.Popen[Any]] = []

    def send_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            if number != signal.SIGINT:
                child.send_signal(number)

    before = {number: signal.signal(number, send_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield children
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _gather(raw: Path) -> list[Line]:
    """The lines of all processes; one that was cut off, as by a full disk, is left out with a warning."""
    found, bad = [], 0
    for text in raw.read_bytes().splitlines():
        try:
            found.append(oplist.line(json.loads(text)))
        except (ValueError, RecursionError):
            bad += 1
    if bad:
        warnings.warn(CacheWarning(f"{bad} ops are not in the list: what was written of them cannot be read; was the disk full?"),
                      stacklevel=2)
    return found


def _write(output: Path, lines: list[Line]) -> None:
    temporary = output.absolute().with_name(f".{output.name}.{files.unique()}")
    try:
        files.write_synced(temporary, oplist.dump(lines).encode("ascii"))
        os.replace(temporary, output)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise RecordError(f"the list cannot be written to {output}: {error}; name another file with -o") from error
