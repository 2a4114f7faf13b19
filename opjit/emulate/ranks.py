"""``opjit test OP --ranks 4 --emulate``: a kernel across GPUs runs emulated, with all ranks in one process.

A rank is a thread, and its device is emulated. The kernels of all ranks run side by side, in an order that a seed decides, so that the
checks see the accesses of all ranks."""

import mmap
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from opjit import distributed
from opjit.catalog import arguments
from opjit.declare.sample import Sample
from opjit.distributed.peer_groups import this_thread
from opjit.distributed.peer_memory import (
    COUNT_BYTES,
    INBOX_BYTES,
    LOST_BYTES,
    SIGNAL_BYTES,
    Members,
    PeerMemory,
    address_of,
    words_in,
)
from opjit.emulate import build
from opjit.emulate.checks import compile_both
from opjit.errors import BadSetting, PeerLost
from opjit.operators.op import Op
from opjit.progress import tally
from opjit.testing.across_ranks import RankOutcome, print_outcome
from opjit.testing.compare import assert_same
from opjit.testing.isolation import Child
from opjit.testing.samples import Skipped, declared_samples, effects

_TIMEOUT = 10.0  # seconds; the clock of emulated kernels leaps if all threads only wait
_IN_A_ROW = 3  # calls without a meeting of the ranks between them, as in a program
_SMALL = 2000  # elements of a sample with checked accesses
_LARGE = 1 << 19  # elements of any other sample
_CALLS = 12  # of each size
_SCHEDULES = (1, 2, 3)  # seeds
_Value = TypeVar("_Value")


def run(names: Sequence[str], ranks: int) -> int:
    """Compare samples with the reference on emulated ranks, and look for races between ranks. Prints a line for each op.

    Returns:
        1 if a rank failed or an op is not emulated, otherwise 0.

    Raises:
        BadSetting: a group cannot have that many ranks.
    """
    if not 1 <= ranks <= distributed.MAX_RANKS:
        raise BadSetting(f"--ranks is {ranks}; expected 1 to {distributed.MAX_RANKS}")
    failed = False
    for op in [op for name in names for op in arguments.ops(name)]:
        title = f"{op.qualified} on {ranks} ranks (cuda, emulated on the CPU, no timing)"
        build.warn_of_mistakes(op)
        try:
            compile_both(op)
        except Skipped as reason:
            print(f"{title}: FAILED, {reason}")
            failed = True
            continue
        right = _in_child(op, ranks, checked=False)
        races = _in_child(op, ranks, checked=True)
        calls = (
            f"{tally(min(races)[0], 'call')} checked for races and bounds, "
            f"and {tally(min(right)[0], 'larger call')}"
        )
        failed |= not print_outcome(title, calls, races, right)
    return int(failed)


def _in_child(op: Op, ranks: int, checked: bool) -> list[RankOutcome]:
    with Child(lambda pipe: pipe.send(_run_ranks(op, ranks, checked))) as child:
        try:
            outcomes: list[RankOutcome] = child.messages.recv()
        except EOFError:
            return [(0, f"the process {child.end()}: {child.stderr()}")] * ranks
    return outcomes


@dataclass(frozen=True)
class _ThreadRank(Members):
    """A thread of this process in the place of a rank's process."""

    barrier: threading.Barrier
    values: list[Any]  # of all ranks, who share the list

    def exchange(self, value: _Value) -> list[_Value]:
        self.values[self.rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values

    def obtain(self, size: int, device: torch.device) -> PeerMemory:
        """Get memory as a group has it on GPUs, and make it known to the checks."""
        counts = mmap.mmap(-1, COUNT_BYTES)
        lost = self.exchange(mmap.mmap(-1, LOST_BYTES))[0]
        starts, own = self._memory({"signals": SIGNAL_BYTES, "inbox": INBOX_BYTES, "buffer": size})
        see = build.runtime().emu_see
        see(address_of(counts), COUNT_BYTES, f"the counts of rank {self.rank}".encode(), False)
        if self.rank == 0:
            see(address_of(lost), LOST_BYTES, b"the error words", False)
        self.exchange(None)
        return PeerMemory(0, starts, address_of(counts), words_in(lost), [], (own, counts, lost))

    def reach(self, size: int, device: torch.device) -> tuple[list[int], Any]:
        return self._memory({"tensor": size})

    def _memory(self, parts: dict[str, int]) -> tuple[list[int], Any]:
        """Get zeroed memory on each rank, with parts that the checks know by their names."""
        own = mmap.mmap(-1, sum(parts.values()))
        place = address_of(own)
        for name, size in parts.items():
            build.runtime().emu_see(place, size, f"the {name} of rank {self.rank}".encode(), False)
            place += size
        return self.exchange(address_of(own)), own


def _run_ranks(op: Op, ranks: int, checked: bool) -> list[RankOutcome]:
    """Make all calls of an op on all ranks of this process."""
    torch.set_num_threads(1)
    build.install_emulated(op, checked)
    barrier = threading.Barrier(ranks)
    values: list[Any] = [None] * ranks

    def be(rank: int) -> RankOutcome:
        name = f"rank {rank} of {ranks}"
        this_thread.members = _ThreadRank(name, rank, ranks, None, barrier, values)
        return _calls_of_rank(op, this_thread.members, checked)

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(be, range(ranks)))


def _calls_of_rank(op: Op, members: _ThreadRank, checked: bool) -> RankOutcome:
    """Make the calls of a rank: a few in a row, then the ranks meet and compare them with the reference."""
    calls = 0
    try:
        group = distributed.peers(device="cpu", timeout=_TIMEOUT)
        samples = _chosen(op, members, checked)
        for seed in _SCHEDULES if checked else _SCHEDULES[:1]:
            build.runtime().emu_set_seed(seed)
            for start in range(0, len(samples), _IN_A_ROW):
                row = range(start, start + _IN_A_ROW)
                batch = [samples[number % len(samples)] for number in row]
                expected = [effects(op.reference_function, op, sample) for sample in batch]
                outcomes = _launch(partial(_results, op, batch), members)
                error = _error_of_call(outcomes, expected, batch)
                errors = members.exchange(error)
                if not any("race on" in each for each in errors):
                    group.check()  # a race explains more than a rank that waits
                if any(errors):
                    return calls, error
                calls += sum(sample.numel > 0 for sample in batch)
    except threading.BrokenBarrierError:
        pass  # another rank raised an error, which it reports
    except PeerLost as error:  # on all ranks
        return calls, str(error)
    except Exception as error:  # in the op.py
        members.barrier.abort()
        return calls, f"{type(error).__name__}: {error}"
    return calls, ""


def _chosen(op: Op, members: _ThreadRank, checked: bool) -> list[Sample]:
    """Choose the samples by rank 0's numbers, because all ranks make the same calls."""
    samples = declared_samples(op, "cpu")
    small = max(_SMALL, min(sample.numel for sample in samples))
    sizes = range(small + 1) if checked else range(small + 1, _LARGE)
    kinds = {sample.kind: n for n, sample in enumerate(samples) if sample.numel in sizes}
    numbers = members.exchange(list(kinds.values())[:_CALLS])[0]
    return [samples[number] for number in numbers]


def _launch(calls: partial[Any], members: _ThreadRank) -> Any:
    """Make calls as a rank, while another thread runs the kernels of all ranks."""
    runtime = build.runtime()
    conductor = threading.Thread(target=runtime.emu_conduct)
    members.exchange(None)
    if members.rank == 0:
        runtime.emu_begin_ranks(members.world)
        conductor.start()
    members.exchange(None)
    runtime.emu_be_rank(members.rank)
    try:
        results = calls()
    finally:
        runtime.emu_be_host()
        if members.rank == 0:
            conductor.join()
            runtime.emu_end_ranks()
    members.exchange(None)  # the calls of all ranks have ended
    return results


def _results(op: Op, batch: Sequence[Sample]) -> list[list[Any] | str]:
    """The results of calls, or an error in the place of the last."""
    found = list[list[Any] | str]()
    for sample in batch:
        try:
            found.append(effects(op.overload, op, sample))
        except RuntimeError as error:
            text = str(error).partition(" emulated: ")[2]
            found.append(f"{text or error} on ({sample})")
            break
    return found


def _error_of_call(
    outcomes: Sequence[list[Any] | str], expected: Sequence[Any], batch: Sequence[Sample]
) -> str:
    """The first error of calls in a row, or an empty text."""
    for outcome, wanted, sample in zip(outcomes, expected, batch, strict=False):
        if isinstance(outcome, str):
            return outcome
        try:
            assert_same(outcome, wanted, sample)
        except AssertionError as error:
            return str(error)
    return ""
