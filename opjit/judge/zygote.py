"""The process that forks the judge's workers. It has imported torch and builders, and never gets the task or a result.

judge ──forks────  zygote ──fork── keeper ──fork── worker     runs one candidate, see worker.py
  └──────────────── control ─────────┘               │
  └──────────────── requests ────────────────────────┘
"""

import os
import signal
import socket
import sys
import warnings
from contextlib import suppress
from pathlib import Path

from opjit import files
from opjit.builder import torch_builder
from opjit.judge import keeper, worker
from opjit.judge.protocol import Channel, Done, Fork


def main(forks: Channel, scratch: Path) -> None:
    """Fork a keeper for each message until the judge is gone, then remove their folder."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Python warns of threads. NumPy's threads end before a fork. CUDA's driver starts one when it is loaded.
    warnings.simplefilter("ignore", DeprecationWarning)
    worker.import_all()
    with suppress(BrokenPipeError):  # the judge ended meanwhile
        forks.send(Done())
    with suppress(EOFError):
        while True:
            asked, ends = forks.receive([Fork])
            if asked.programs:
                torch_builder.torch_module()  # for all workers
            if os.fork() == 0:
                forks.end.close()
                control, requests = (Channel(socket.socket(fileno=end)) for end in ends)
                keeper.keep(control, requests, scratch / files.random_name(), asked)
            for end in ends:
                os.close(end)
    with suppress(ChildProcessError):
        os.wait()  # for all, because SIGCHLD is ignored
    files.remove_tree(scratch)


if __name__ == "__main__":
    main(Channel(socket.socket(fileno=int(sys.argv[1]))), Path(sys.argv[2]))
