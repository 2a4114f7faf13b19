"""The process of one GPU, which opjit.judge.gpus starts."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection

from opjit.errors import OpjitError
from opjit.judge.scheduler import Judge


def judge_until_closed(options: str, *ends: str) -> None:
    """Judge the candidates of all connections, in a process for one GPU."""
    connections = [Connection(int(end)) for end in ends]
    judge = Judge(**json.loads(options), workers=len(ends))
    try:
        judge.start()
    except OpjitError as error:
        connections[0].send(error)
        return

    def answer(connection: Connection) -> None:
        with suppress(EOFError, ConnectionError):
            while True:
                connection.send(judge.judge(*connection.recv()))

    connections[0].send(None)
    with ThreadPoolExecutor(len(ends)) as threads:
        threads.map(answer, connections)
    judge.close()


if __name__ == "__main__":
    judge_until_closed(*sys.argv[1:])
