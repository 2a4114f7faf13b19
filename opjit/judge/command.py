"""``opjit judge``: verdicts as lines, for files, for a socket, and of a task itself."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import torch
from torch.utils._pytree import tree_map_only

from opjit.errors import BadSetting
from opjit.judge import referee
from opjit.judge.scheduler import Judge
from opjit.judge.task import Task
from opjit.judge.verdict import Verdict
from opjit.tensors import tensors_of

_COLORS = {"correct": "green", "noisy": "yellow", "cheat": "magenta", "emulated": "cyan"}
_LONGEST_LINE = 64 << 20  # bytes of a candidate


async def judge_files(judge: Judge, candidates: Iterable[Path], out: Any) -> None:
    """Print a line for each candidate as it is ready: JSON to a file or, without one, words to the terminal."""
    async with judge:
        pending = [judge(path.read_text("utf-8", "replace"), str(path)) for path in candidates]
        for ready in asyncio.as_completed(pending):
            verdict = await ready
            line = shown(verdict) if out is None else verdict.json()
            click.echo(line, file=out)  # without colors in a file or a pipe


def shown(verdict: Verdict) -> str:
    """Return a verdict for people."""
    word = click.style(f"{verdict.verdict:<8}", _COLORS.get(verdict.verdict, "red"))
    parts = [f"{word} {verdict.candidate}"]
    if verdict.median_us is not None and verdict.reference_us is not None:
        parts.append(
            f"{verdict.median_us:.4g} us, reference {verdict.reference_us:.4g} us,"
            f" +-{verdict.spread or 0:.0%}"
        )
    message = verdict.message
    if verdict.sample and verdict.verdict in ("crash", "timeout"):
        message += f" on ({verdict.sample})"
    if message:
        parts.append(message)
    return "  ".join(parts)


async def serve(judge: Judge, path: Path) -> None:
    """Answer on a socket, for its owner only.

    A line of JSON with a candidate's text and its name gets the line of its verdict, in the order of verdicts.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def judge_line(line: bytes) -> None:
            reply = await _reply(judge, line)
            with suppress(ConnectionError):
                writer.write(reply.encode() + b"\n")
                await writer.drain()

        pending = [asyncio.ensure_future(judge_line(line)) async for line in reader]
        await asyncio.gather(*pending)
        writer.close()

    async with judge:
        listener = _bind(path)
        made = os.stat(path)
        server = await asyncio.start_unix_server(answer, sock=listener, limit=_LONGEST_LINE)
        try:
            async with server:
                await server.serve_forever()
        finally:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(path), made):  # another program may have replaced it
                    path.unlink()


def _bind(path: Path) -> socket.socket:
    """Make a socket that only its owner can use. Raises BadSetting if the path exists."""
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        reason = error.strerror
        if path.exists():
            reason = "it exists, and opjit removes no file that it did not make"
        raise BadSetting(f"--serve {path}: {reason}. Remove it, or name another path") from None
    finally:
        os.umask(before)
    return listener


async def _reply(judge: Judge, line: bytes) -> str:
    try:
        asked = json.loads(line)
        text = asked["text"]
        verdict = await judge(text, str(asked.get("candidate", "candidate")))
        return verdict.json()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        expected = 'expected a line such as {"candidate": "a.c", "text": "..."}'
        return json.dumps({"error": f"{expected}: {error!r}"})
    except Exception as error:  # the client waits for an answer
        return json.dumps({"error": f"the judge failed: {error!r}"})


def lint(task: Task) -> list[str]:
    """Report trivial results that would pass: zeros, ones, the first input, the results of the call before."""
    calls = [
        call for call in task.samples if any(each.numel() for each in tensors_of(call.results))
    ]
    passed: Counter[str] = Counter()
    for number, call in enumerate(calls):
        inputs = call.sample.tensors()
        trivial = {
            "zeros": tree_map_only(torch.Tensor, torch.zeros_like, call.results),
            "ones": tree_map_only(torch.Tensor, torch.ones_like, call.results),
            "the first input": [inputs[0] if inputs else each for each in call.results],
            "the result of the call before": calls[number - 1].results,
        }
        for name, results in trivial.items():
            on_cpu = tree_map_only(torch.Tensor, torch.Tensor.cpu, results)
            passed[name] += referee.compare(on_cpu, call) is None
    return [
        f"{name} would pass {count} of {len(calls)} samples"
        for name, count in passed.items()
        if count
    ]


def run(judge: Judge, candidates: Sequence[Path], out: Any, path: Path | None) -> None:
    """Judge files, or serve a socket, until it is done or a signal comes."""

    async def main() -> None:
        task = asyncio.current_task()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, lambda: task and task.cancel())
        if path is not None:
            await serve(judge, path)
        else:
            await judge_files(judge, candidates, out)

    with suppress(asyncio.CancelledError):
        asyncio.run(main())
        return
    sys.exit(130)
