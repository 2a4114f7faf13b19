"""The process of one GPU, which opjit.judge.gpus starts."""

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from opjit.errors import DeviceUnavailable, OpjitError
from opjit.judge.scheduler import Judge


def judge_until_closed(options: str, *ends: str) -> None:
    """Judge the candidates of all connections, in a process for one GPU."""
    connections = [Connection(int(end)) for end in ends]
    judge = Judge(**json.loads(options), workers=len(ends))
    failure = _outcome(judge.start)
    connections[0].send((0, failure))
    if failure:
        return

    def answer(connection: Connection) -> None:
        with suppress(EOFError, ConnectionError):
            while True:
                number, *candidate = connection.recv()
                connection.send((number, _outcome(judge.judge, *candidate)))

    with ThreadPoolExecutor(len(ends)) as threads:
        threads.map(answer, connections)
    judge.close()


def _outcome(function: Callable[..., Any], *arguments: str) -> Any:
    """Return a function's result or its error, because the judge waits for either."""
    try:
        return function(*arguments)
    except OpjitError as error:
        return error
    except Exception as error:
        return DeviceUnavailable(f"the process that judges on one of the GPUs failed: {error!r}")


if __name__ == "__main__":
    judge_until_closed(*sys.argv[1:])
