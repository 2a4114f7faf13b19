"""``opjit judge``: verdicts as lines, for files, for a socket, and of a task itself."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import torch

from opjit.judge import referee
from opjit.judge.scheduler import Judge
from opjit.judge.task import Task, on
from opjit.judge.verdict import Verdict

_COLOURS = {"correct": "green", "noisy": "yellow", "cheat": "magenta"}


async def judge_files(judge: Judge, files: Iterable[Path], out: Any) -> None:
    """Print a line for each candidate as it is ready: JSON to a file, or else words to the terminal."""
    async with judge:
        for ready in asyncio.as_completed(
            [judge(path.read_text("utf-8", "replace"), str(path)) for path in files]
        ):
            verdict = await ready
            print(
                verdict.json() if out is not None else shown(verdict),
                file=out or sys.stdout,
                flush=True,
            )


def shown(verdict: Verdict) -> str:
    """A verdict for people."""
    word = click.style(f"{verdict.verdict:<8}", _COLOURS.get(verdict.verdict, "red"))
    times = (
        ""
        if verdict.median_us is None or verdict.reference_us is None
        else (
            f"{verdict.median_us:.4g} us, reference {verdict.reference_us:.4g} us, +-{verdict.spread or 0:.0%}"
        )
    )
    where = (
        f" on ({verdict.sample})"
        if verdict.sample and verdict.verdict in ("crash", "timeout")
        else ""
    )
    return "  ".join(
        filter(None, (f"{word} {verdict.candidate}", times, f"{verdict.message}{where}"))
    )


async def serve(judge: Judge, path: Path) -> None:
    """Answer on a socket: a line of JSON with a candidate's text, and its name, gets the line of its verdict, in the order of verdicts."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def one(line: bytes) -> None:
            try:
                asked = json.loads(line)
                reply = (
                    await judge(asked["text"], str(asked.get("candidate", "candidate")))
                ).json()
            except (ValueError, KeyError, TypeError) as error:
                reply = json.dumps(
                    {
                        "error": f'expected a line such as {{"candidate": "a.c", "text": "..."}}: {error!r}'
                    }
                )
            with suppress(ConnectionError):
                writer.write(reply.encode() + b"\n")
                await writer.drain()

        pending = [asyncio.ensure_future(one(line)) async for line in reader]
        await asyncio.gather(*pending)
        writer.close()

    async with judge:
        with suppress(FileNotFoundError):
            path.unlink()
        server = await asyncio.start_unix_server(answer, path, limit=64 << 20)
        path.chmod(0o600)
        try:
            async with server:
                await server.serve_forever()
        finally:
            path.unlink(missing_ok=True)


def lint(task: Task) -> list[str]:
    """Say what would pass though it computes nothing: zeros, ones, the first input, the result of the call before."""
    calls = [
        call
        for call in task.samples
        if any(isinstance(each, torch.Tensor) and each.numel() for each in call.results)
    ]
    ways: dict[str, Callable[[Any, int, int], Any]] = {
        "zeros": lambda each, *_: (
            torch.zeros_like(each) if isinstance(each, torch.Tensor) else each
        ),
        "ones": lambda each, *_: torch.ones_like(each) if isinstance(each, torch.Tensor) else each,
        "the first input": lambda each, number, index: next(
            iter(calls[number].sample.tensors()), each
        ),
        "the result of the call before": lambda each, number, index: calls[number - 1].results[
            index
        ],
    }
    passed = {
        name: sum(
            referee.compare(
                [on(make(each, number, index), "cpu") for index, each in enumerate(call.results)],
                call,
            )
            is None
            for number, call in enumerate(calls)
        )
        for name, make in ways.items()
    }
    return [
        f"{name} would pass {count} of {len(calls)} samples"
        for name, count in passed.items()
        if count
    ]


def run(judge: Judge, files: Sequence[Path], out: Any, socket: Path | None) -> None:
    """Judge files, or serve a socket, until it is done or a signal comes."""

    async def main() -> None:
        task = asyncio.current_task()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, lambda: task and task.cancel())
        await (serve(judge, socket) if socket else judge_files(judge, files, out))

    with suppress(asyncio.CancelledError):
        asyncio.run(main())
        return
    sys.exit(130)
