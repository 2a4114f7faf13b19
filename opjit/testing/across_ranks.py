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
from opjit.errors import BadSetting, OpjitError
from opjit.operators.op import Op
from opjit.progress import tally
from opjit.testing.compare import assert_same
from opjit.testing.isolation import Child
from opjit.testing.samples import declared_samples, expected_of, results_of

_TIMEOUT = 60.0  # seconds that a rank may be late


# Of a rank: the number of calls that were right, and its error, empty for none.
RankOutcome = tuple[int, str]


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
    failed = False
    for op in [op for name in names for op in arguments.ops(name)]:
        if chosen == "cpu":
            # One build, before the fork; a process that used CUDA cannot fork.
            api.get(op.qualified, chosen)
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="opjit-ranks-"))
            run = partial(_rank, op, ranks, chosen, folder)
            children = [stack.enter_context(Child(partial(run, rank))) for rank in range(ranks)]
            found = list(map(_received, children))
        note = tally(min(found)[0], "sample")
        failed |= not print_outcome(f"{op.qualified} on {ranks} ranks ({chosen})", note, found)
    return int(failed)


def print_outcome(title: str, note: str, *found: Sequence[RankOutcome]) -> bool:
    """Print the line of an op that ran on all ranks, once or more often, and its errors, one of which is that no call was made.

    Returns whether there is none.
    """
    ranks: dict[str, dict[str, None]] = {}
    for rank, (_, error) in (each for outcomes in found for each in enumerate(outcomes)):
        ranks.setdefault(error, {})[str(rank)] = None
    errors = [f"rank {', '.join(who)}: {error}" for error, who in ranks.items() if error]
    if not errors and not any(min(outcomes)[0] for outcomes in found):
        errors = ["nothing was tested: no sample could be called"]
    print(f"{title}: {'FAILED' if errors else 'ok'}, {note}")
    for text in errors:
        print(f"  {text}")
    return not errors


def _received(child: Child) -> RankOutcome:
    try:
        result: RankOutcome = child.messages.recv()
    except EOFError:
        return 0, f"the process {child.end()}"
    child.end()
    return result


def _rank(op: Op, ranks: int, device: str, folder: str, rank: int, sender: Connection) -> None:
    """Run as one rank, and send its result."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    calls = 0
    error = ""
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        backend = "nccl" if device == "cuda" else "gloo"
        store = f"file://{Path(folder) / 'store'}"
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
        group = distributed.peers(device=device, timeout=_TIMEOUT)
        for sample in declared_samples(op, device):
            expected = expected_of(op, sample)
            assert_same(results_of(op, sample), expected, sample)
            calls += sample.numel > 0
        group.check()
        dist.barrier()
    except (AssertionError, OpjitError) as reason:
        error = str(reason)
    except Exception:  # in the op or in its op.py
        error = traceback.format_exc().splitlines()[-1]
    sender.send((calls, error))
    os._exit(0)
