"""The samples of an op with a ``str group`` on several ranks of this machine: ``opjit test --ranks 2``."""

import os
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from opjit import api, distributed
from opjit.catalog import arguments
from opjit.errors import BadSetting, PeerLost
from opjit.operators.op import Op
from opjit.testing.checks import tally
from opjit.testing.compare import assert_same
from opjit.testing.isolation import Child
from opjit.testing.samples import effects

_TIMEOUT = 60.0  # seconds that a rank may be late


def compare_across_ranks(names: Sequence[str], ranks: int, device: str | None) -> int:
    """Compare every sample with the reference on all ranks at once, and print a line for each op. Returns 1 if a rank failed.

    CPU ranks are processes that share memory. On CUDA, each rank has one GPU.

    Raises:
        BadSetting: there are not as many GPUs, or a group cannot have that many ranks.
    """
    chosen = device or "cpu"
    gpus = torch.cuda.device_count() if chosen == "cuda" else ranks
    if not 1 <= ranks <= distributed.MAX_RANKS or gpus < ranks:
        raise BadSetting(
            f"--ranks is {ranks}; expected 1 to {distributed.MAX_RANKS}, and a GPU for each rank on CUDA"
        )
    failed = 0
    for op in [op for name in names for op in arguments.ops(name)]:
        found = _on_ranks(op, ranks, chosen)
        errors = [text for text, _ in found if text]
        samples = tally(min(count for _, count in found), "sample")
        verdict = "FAILED" if errors else "ok"
        print(f"{op.qualified} on {ranks} ranks ({chosen}): {verdict}, {samples}")
        for text in errors:
            print(f"  {text}")
        failed |= bool(errors)
    return failed


def _on_ranks(op: Op, ranks: int, device: str) -> list[tuple[str, int]]:
    """Return each rank's error, empty for none, and the number of its samples."""
    if device == "cpu":
        # One build, before the fork; a process that used CUDA cannot fork.
        api.get(op.qualified, device)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="opjit-ranks-"))
        run = partial(_rank, op, ranks, device, folder)
        children = [stack.enter_context(Child(partial(run, rank))) for rank in range(ranks)]
        return [_received(child, rank) for rank, child in enumerate(children)]


def _received(child: Child, rank: int) -> tuple[str, int]:
    try:
        text, count = child.messages.recv()
    except EOFError:
        return f"rank {rank}: the process {child.end()}", 0
    child.end()
    return text, count


def _rank(op: Op, ranks: int, device: str, folder: str, rank: int, sender: Connection) -> None:
    """Run as one rank, and send how it went."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    count = 0
    text = ""
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        backend = "nccl" if device == "cuda" else "gloo"
        store = f"file://{Path(folder) / 'store'}"
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
        group = distributed.peers(device=device, timeout=_TIMEOUT)
        for sample in op.samples_on(device):
            expected = effects(op.reference_function, op, sample)
            assert_same(effects(op.overload, op, sample), expected, sample)
            count += 1
        group.check()
        dist.barrier()
    except (AssertionError, PeerLost) as error:
        text = f"rank {rank}: {error}"
    except Exception:  # in the op or in its op.py
        text = f"rank {rank}: {traceback.format_exc().splitlines()[-1]}"
    sender.send((text, count))
    os._exit(0)
