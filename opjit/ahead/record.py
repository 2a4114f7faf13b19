"""``opjit record``: list the ops and C++ extensions that a program uses in all its processes. OPJIT_RECORD names a file, to which each
process appends a line when it first readies an op for a target, or loads an extension; at its end, they become one sorted list."""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from opjit import files, processes
from opjit.declare import oplist
from opjit.declare.oplist import RecordedExtension, RecordedOp
from opjit.errors import RecordError, warn_of_cache


def record(command: Sequence[str], output: Path) -> int:
    """Run a command, write the list of its ops, and return its exit code, or 128 plus its signal. Raises RecordError if either fails."""
    # Next to the list, so that a job's other nodes may see it.
    raw = output.absolute().with_name(f".{output.name}.{files.random_name()}")
    try:
        raw.touch(0o600, exist_ok=False)
        code = _run_command(command, {**os.environ, "OPJIT_RECORD": str(raw)})
        files.write_whole(output, oplist.dump_list(*_gather(raw)).encode())
    except OSError as error:
        raise RecordError(
            f"the list cannot be written to {output}: {error}; name another file with -o"
        ) from error
    finally:
        with suppress(OSError):
            raw.unlink()
    return code


def _run_command(command: Sequence[str], environment: dict[str, str]) -> int:
    """Survive the signals that end the command: a terminal sends Ctrl-C to it directly, and this
    process forwards the other signals.
    """
    process: subprocess.Popen[bytes] | None = None

    def send_on(number: int, frame: FrameType | None) -> None:
        if process is not None and number != signal.SIGINT:
            process.send_signal(number)

    try:
        with processes.handling((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), send_on):
            process = subprocess.Popen(command, env=environment)
            code = process.wait()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecordError(
            f"{command[0]!r} cannot be run: {reason}; what follows -- is a program with its arguments"
        ) from error
    return code if code >= 0 else 128 - code


def _gather(raw: Path) -> tuple[list[RecordedOp], list[RecordedExtension]]:
    """Read the lines of all processes.

    A truncated line, for example after the disk was full, is skipped with a warning.
    """
    ops = []
    extensions = []
    bad = 0
    for text in raw.read_bytes().splitlines():
        try:
            fields = json.loads(text)
            if isinstance(fields, dict) and "function" in fields:
                extensions.append(oplist.parse_extension(fields))
            else:
                ops.append(oplist.parse_op(fields))
        except (TypeError, ValueError, RecursionError):
            bad += 1
    if bad:
        warn_of_cache(
            f"skipped {bad} unreadable records, so the list misses these ops; check the free "
            "disk space and record again"
        )
    return ops, extensions
