"""Ranks that are killed at random moments, under eager calls and under a replayed CUDA graph.

Claim: no survivor hangs or loses its CUDA context, and each gets an error that names the killed rank.

    python -m tests.benchmarks.lost_ranks --kills 1000 --lanes 16      # two GPUs
    python -m tests.benchmarks.lost_ranks --kills 100 --lanes 2 --cpu

Each lane has a survivor that lives through all kills, and a partner that is forked anew for each. Every second kill is not seen by
pidfd, so that only the kernel's own time limit ends the wait.
"""

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import opjit
import opjit.distributed
from opjit.distributed import peer_groups
from opjit.errors import PeerLost

LIMIT = 1.0  # seconds that a kernel waits
CALLS = 20  # of a graph


def rounds(rank: int, store: Path, kind: str, device: str, watched: bool) -> Any:
    """Call the op in a group of two until the other rank is gone; returns the survivor's findings."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    watch = peer_groups._watch
    peer_groups._watch = watch if watched else lambda live: None
    group = opjit.distributed.peers(device=device, timeout=LIMIT)
    peer_groups._watch = watch
    op = torch.ops.opjit.all_reduce_ranks
    x = torch.full((random.choice((64, 5_000, 400_000)),), float(rank + 1), device=device)
    sizes: list[Any] = [None, None]
    dist.all_gather_object(sizes, x.numel())
    x = x[:1].expand(sizes[0]).contiguous()
    with torch.no_grad():
        result = op(x, group.name)
        synchronize(device)
        assert bool((result == 3).all()), "a wrong sum"
        graph = None
        if kind == "graph":
            stream = torch.cuda.Stream()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(CALLS):
                    op(x, group.name)
        dist.barrier()
        (store.parent / f"{store.name}.ready{rank}").touch()
        last = time.monotonic()
        while True:
            before = time.monotonic()
            try:
                if graph is not None:
                    graph.replay()
                else:
                    op(x, group.name)
                synchronize(device)
                group.check()
            except PeerLost as lost:
                return lost.ranks, time.monotonic() - last, lost.op
            except RuntimeError as error:
                if "PeerLost: rank" not in str(error):
                    raise
                found = caught(group)
                return found.ranks, time.monotonic() - last, found.op
            last = before


def caught(group: Any) -> PeerLost:
    try:
        group.check()
    except PeerLost as lost:
        return lost
    raise AssertionError("an op said that a rank was lost, and check() did not")


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def partner(rank: int, store: Path, kind: str, device: str, watched: bool) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    rounds(rank, store, kind, device, watched)


def lane(number: int, kills: int, device: str, folder: Path, requests: Any, out: Any) -> None:
    """A survivor: for each kill, ask the parent for a partner, and check this process afterwards."""
    random.seed(number)
    rank = number % 2
    if device == "cuda":
        torch.cuda.set_device(rank)
    opjit.get("all_reduce_ranks", device)
    for kill in range(kills):
        kind = "graph" if device == "cuda" and kill % 2 else "eager"
        watched = kill // 2 % 2 == 0
        store = folder / f"{number}-{kill}"
        requests.write(json.dumps([number, 1 - rank, str(store), kind, watched]) + "\n")
        requests.flush()
        lost, seconds, op = rounds(rank, store, kind, device, watched)
        y = torch.randn(1000, dtype=torch.float64, device=device)
        alive = abs(float(y.square().sum() - (y @ y))) < 1e-6 * float(y @ y)
        out.write(
            json.dumps([number, lost == (1 - rank,), seconds, alive, kind, watched, op]) + "\n"
        )
        out.flush()
        dist.destroy_process_group()


def forked(work: Any) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--cpu", action="store_true")
    chosen = parser.parse_args()
    device = "cpu" if chosen.cpu else "cuda"
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="lost-ranks-"))
    request_end, requests = os.pipe()
    result_end, results = os.pipe()
    each = chosen.kills // chosen.lanes
    lanes = []
    for number in range(chosen.lanes):

        def work(number: int = number) -> None:
            with os.fdopen(requests, "w") as asks, os.fdopen(results, "w") as out:
                lane(number, each, device, folder, asks, out)

        lanes.append(forked(work))
    print(f"{chosen.lanes} survivors, {each} kills each", flush=True)
    found = follow(chosen, device, request_end, result_end, each * chosen.lanes)
    for process in lanes:
        os.kill(process, signal.SIGKILL)
    report(found, each * chosen.lanes)
    shutil.rmtree(folder, ignore_errors=True)


def follow(chosen: Any, device: str, asks: int, answers: int, total: int) -> list[Any]:
    """Fork partners, kill each at a random moment after both ranks are ready, and collect what survivors report."""
    waiting: list[tuple[int, Path]] = []
    due: list[tuple[float, int]] = []
    found: list[Any] = []
    text = {asks: b"", answers: b""}
    end = time.monotonic() + chosen.seconds
    while len(found) < total and time.monotonic() < end:
        ready, _, _ = select.select([asks, answers], [], [], 0.002)
        for descriptor in ready:
            text[descriptor] += os.read(descriptor, 1 << 16)
            *lines, text[descriptor] = text[descriptor].split(b"\n")
            for line in map(json.loads, lines):
                if descriptor == answers:
                    found.append(line)
                    continue
                _, rank, store, kind, watched = line
                child = forked(lambda: partner(rank, Path(store), kind, device, watched))  # noqa: B023 - called at once
                waiting.append((child, Path(store)))
        now = time.monotonic()
        for child, store in list(waiting):
            if all((store.parent / f"{store.name}.ready{rank}").exists() for rank in (0, 1)):
                waiting.remove((child, store))
                due.append((now + random.random() * 0.05, child))
        for moment, child in list(due):
            if moment <= now:
                due.remove((moment, child))
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    for child, _ in waiting:
        os.kill(child, signal.SIGKILL)
    return found


def report(found: list[Any], total: int) -> None:
    named = sum(line[1] for line in found)
    alive = sum(line[3] for line in found)
    print(
        f"{len(found)} of {total} kills reported; the error names the rank: {named}; context alive: {alive}"
    )
    for kind in ("eager", "graph"):
        for watched in (True, False):
            times = sorted(line[2] for line in found if line[4:6] == [kind, watched])
            if times:
                how = "seen by pidfd" if watched else f"by the limit of {LIMIT} s alone"
                print(
                    f"{kind}, {how}: {len(times)} kills, from the last good call to the error: median {times[len(times) // 2]:.3f} s, "
                    f"longest {times[-1]:.3f} s"
                )


if __name__ == "__main__":
    main()
