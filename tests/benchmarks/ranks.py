"""What the ranks of a job wait for: `opjit.distributed.ready` of eight ranks on two separate caches, against one process alone.

Validates first (each rank's results; one compile of each op in the whole job), then prints medians and PASS or FAIL:

    python tests/benchmarks/ranks.py [ROUNDS]

Cold is a job whose nodes have nothing. Warm is one whose nodes have all, beyond the start of a process group, which every job pays.
Cold ranks are forked from a process that has imported torch and its extension builder. Warm ones are fresh processes, as a job's are,
which meet at a barrier first; those that are no ranks meet at one made of files.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import torch
import torch.distributed as dist

import opjit
import opjit.distributed
from opjit import request
from opjit.catalog import registry
from opjit.store import inventory
from opjit.store.store import Store

RANKS = 8
OPS = 8
C = """#include "opjit.h"

opjit_status add{n}_cpu(const opjit_tensor *x, opjit_tensor *out)
{{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = ((const float *)x->data)[i] + {n}.0f;
    return OPJIT_OK;
}}
"""
PY = """import torch
import opjit

for n in range({count}):
    @opjit.op(f"bench_ranks::add{{n}}(Tensor x) -> Tensor")
    def add(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)
"""
NAMES = [f"bench_ranks::add{n}" for n in range(OPS)]


def job(work: Path, ranks: int, group: bool, told: bool = True) -> tuple[float, float]:
    """Seconds from the fork until the last rank is ready, and what the slowest rank's `ready` took.

    Args:
        group: fresh processes, which make a process group first and meet at its barrier.
        told: tell the processes that they are ranks.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shutil.rmtree(work / "results", ignore_errors=True)
    (work / "results").mkdir()
    started = time.perf_counter()
    if group:
        command = [sys.executable, __file__, "--rank", str(work)]
        running = [
            subprocess.Popen([*command, str(rank), str(ranks), str(port), str(int(told))])
            for rank in range(ranks)
        ]
        ended = [process.wait() for process in running]
    else:
        ended = [
            os.waitpid(child, 0)[1]
            for child in [_forked(work, rank, ranks, port, started) for rank in range(ranks)]
        ]
    if any(ended):
        sys.exit("a rank failed; its message is above")
    results = [json.loads(path.read_text()) for path in (work / "results").iterdir()]
    return max(result[0] for result in results), max(result[1] for result in results)


def _forked(work: Path, rank: int, ranks: int, port: int, started: float) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _rank(work, rank, ranks, port, False, True, started)
            code = 0
        finally:
            os._exit(code)
    return child


def _fresh(work: Path, rank: int, ranks: int, port: int, told: bool) -> None:
    """In a process of its own."""
    torch.set_num_threads(1)
    registry.declare_folder(work / "ops")
    _rank(work, rank, ranks, port, True, told, time.perf_counter())


def _rank(
    work: Path, rank: int, ranks: int, port: int, group: bool, told: bool, started: float
) -> None:
    node = work / f"node{rank * 2 // ranks}"
    (node / "tmp").mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(node / "tmp")
    os.environ |= {
        "OPJIT_CACHE": str(node / "cache"),
        "TMPDIR": str(node / "tmp"),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if told and ranks > 1:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank % (ranks // 2)),
            "MASTER_ADDR": "127.0.0.1",
            "LOCAL_WORLD_SIZE": str(ranks // 2),
            "MASTER_PORT": str(port),
        }
    if group and told:
        dist.init_process_group("gloo")
        dist.barrier()
    elif group:
        (work / f"come{port}-{rank}").touch()
        while len(list(work.glob(f"come{port}-*"))) < ranks:
            time.sleep(0.001)
    begun = time.perf_counter()
    ops = opjit.distributed.ready(NAMES, "cpu")
    ended = time.perf_counter()
    for n, op in enumerate(ops):
        assert torch.equal(op(torch.ones(3)), torch.full((3,), 1.0 + n))
    (work / "results" / str(rank)).write_text(json.dumps([ended - started, ended - begun]))
    while len(list((work / "results").iterdir())) < ranks:  # as a training goes on
        time.sleep(0.01)
    if group and told:
        dist.destroy_process_group()


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    torch.set_num_threads(1)
    request.import_builder()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "ops").mkdir()
        (work / "ops" / "op.py").write_text(PY.format(count=OPS))
        for n in range(OPS):
            (work / "ops" / f"add{n}.c").write_text(C.format(n=n))
        counter = work / "compiled"
        compiler = work / "cc"
        real = shutil.which(os.environ.get("CC", "gcc"))
        compiler.write_text(
            f"#!/bin/sh\ncase \" $* \" in *' -c '*opjit_glue.c*) echo $$ >> '{counter}';; esac\nexec '{real}' \"$@\"\n"
        )
        compiler.chmod(0o755)
        os.environ["CC"] = str(compiler)
        registry.declare_folder(work / "ops")
        alone = []
        together = []
        warm = []
        again = []
        for _ in range(rounds):
            _forget(work, counter)
            alone.append(job(work, 1, False)[1])
            _forget(work, counter)
            together.append(job(work, RANKS, False)[0])
            compiled = len(counter.read_text().split())
            held = [
                sum(1 for _ in inventory.scan(Store(work / f"node{n}" / "cache"))) for n in range(2)
            ]
            if compiled != OPS or held != [OPS, OPS]:
                sys.exit(
                    f"expected {OPS} compiles in the job and as many entries on each node; found {compiled} and {held}"
                )
            warm.append(job(work, RANKS, True)[1])
            again.append(job(work, RANKS, True, told=False)[1])
        common.show(
            f"{RANKS} ranks on two separate caches, {OPS} C ops",
            [
                common.ratio(
                    "ready, cold, against one process that builds all", together, alone, at_most=1.5
                ),
                common.alone("ready, warm, beyond the process group's start", warm, at_most=0.05),
                common.alone("  (the same in as many processes that are no ranks)", again),
            ],
        )


def _forget(work: Path, counter: Path) -> None:
    for n in range(2):
        shutil.rmtree(work / f"node{n}", ignore_errors=True)
    counter.write_text("")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        of_rank, of_ranks, at_port, is_told = map(int, sys.argv[3:7])
        _fresh(Path(sys.argv[2]), of_rank, of_ranks, at_port, bool(is_told))
    else:
        main()
