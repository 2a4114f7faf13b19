"""One rank's part in building a job's missing entries, each once in the whole job.

The ranks meet in torch.distributed's store. A rank that misses an entry claims and builds it; the others wait for its result. A claim saves
work and is no lock, as two equal results are both good: after CLAIM_TIMEOUT without a result, another rank claims the entry. A rank that
fails gives up its claim. A rank that cannot build waits until no rank can, or for GIVE_UP_TIMEOUT, and raises its own reason. For each
entry, by its key, the store has

    claim/<key>         the rank that builds it; empty if it gave up
    result/<key>        JSON: the entry's key and the number of its parts, or an error: the op's source's, or that of the third try
    bytes/<key>/<n>     the entry's parts; a rank whose cache shows the entry does not read them
    failed/<key>        a counter of the ranks that failed to build it
    unable/<entry>      a counter of the ranks that cannot build it with any compiler

and for the whole job the counters ``arrived`` and ``left`` (of calls). If rank 0 hosts the store, it stays at its exit until these are
equal, for HOST_TIMEOUT at most.
"""

from __future__ import annotations

import atexit
import math
import os
import re
import socket
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

from opjit import progress
from opjit.builder import budget
from opjit.distributed.rank_task import RankReport, RankTask
from opjit.distributed.ranks import Rank
from opjit.distributed.rendezvous import JobStore, StoreLost
from opjit.errors import CacheWarning, CompileError, EntryError
from opjit.store import bundle

CLAIM_TIMEOUT = 60.0  # seconds
HOST_TIMEOUT = 2 * CLAIM_TIMEOUT
GIVE_UP_TIMEOUT = 600.0  # seconds
ARRIVAL_TIMEOUT = 10.0  # seconds, from its own start, in which rank 0 expects others to arrive
_PART_BYTES = 1 << 20  # torch's store accepts 8 MiB at once, but serves no other rank meanwhile
_TRIES = 3  # ranks that try a build which fails for a reason that may be the rank's own


class Job:
    """This rank's part in the job during one call.

    Args:
        show: shows a line of progress.
        jobs: builds at once on this machine; None is what `budget.jobs` finds.
    """

    def __init__(self, jobstore: JobStore, rank: Rank, show: Callable[[str], None], jobs: int | None) -> None:
        self.jobstore, self.rank, self.show, self.jobs = jobstore, rank, show, jobs
        self.name = f"rank-{rank.number}-on-{socket.gethostname()}"
        self.poll_interval = max(0.01, rank.size * 2.5e-4)  # 2,000 ranks send 4,000 requests per second to the one server
        self.check_interval = max(0.5, rank.size * 5e-4)
        self.started = time.monotonic()
        self.last_slot_attempt = -math.inf
        self.last_shown = ""
        if jobstore.hosted:
            owner = os.getpid()
            atexit.register(lambda: self._wait_for_others() if os.getpid() == owner else None)  # not in a forked child

    def run(self, offers: list[RankTask], missing: list[RankTask]) -> None:
        """Publish the entries that others may miss, and settle the missing ones."""
        # Each rank starts at another entry, so that builders rarely compete for a claim.
        first = self.rank.number * len(missing) // self.rank.size
        order = missing[first:] + missing[:first]
        try:
            self.jobstore.add("arrived")
            for task in offers:
                assert task.entry is not None
                if task.name in task.binary.names(task.entry) and self._claim(task):
                    self._publish(task)
            for task in order:
                if not task.able:
                    self.jobstore.add(f"unable/{task}")
            for task in order:
                while not task.settled:
                    if not self._build_some(order):
                        self._wait(task, sum(not each.settled for each in missing))
        finally:
            with suppress(StoreLost):
                self.jobstore.add("left")

    def _wait_for_others(self) -> None:
        """Keep rank 0, the store's host, from exiting while others need the store."""
        end = time.monotonic() + HOST_TIMEOUT
        with suppress(StoreLost), progress.status("waiting for the ranks that still need rank 0's store"):
            while self._others_need_store() and time.monotonic() < end:
                time.sleep(max(0.05, self.poll_interval))

    def _others_need_store(self) -> bool:
        left, arrived = self.jobstore.add("left", 0), self.jobstore.add("arrived", 0)
        late = arrived < self.rank.size and not self.rank.one_node and time.monotonic() - self.started < ARRIVAL_TIMEOUT
        return left < arrived or late

    # --- building -------------------------------------------------------------------------------------------------------------------

    def _build_some(self, tasks: list[RankTask]) -> bool:
        """Build the entries that no rank has claimed, if this machine has a free slot; returns whether it built any."""
        free = [task for task in tasks if task.able and not task.taken and not task.settled]
        if not free or time.monotonic() - self.last_slot_attempt < self.check_interval:
            return False
        self.last_slot_attempt = time.monotonic()
        release = self._take_slot(budget.NVCC_JOB if any(task.binary.large for task in free) else budget.C_JOB)
        if release is None:
            return False
        built = False
        try:
            for task in free:
                task.taken = True
                if self.jobstore.get(f"result/{task.name}") is None and self._claim(task):
                    self._build(task)
                    built = True
        finally:
            release()
        return built

    def _take_slot(self, need: int) -> Callable[[], None] | None:
        """Take one of the slots for builds that this user's ranks share on this machine; returns the function that frees it, or None.

        A slot is a lock, so the kernel frees it when its holder dies. If the holder is frozen, the slot counts as free.
        """
        from opjit.store import lock  # late: 30 ms of a warm start of 8 ranks (tests/benchmarks/ranks.py)

        for number in range(budget.jobs(need, self.jobs)):
            release = lock.try_acquire(f"building-{number}")
            if release is not None:
                return release
            with suppress(OSError):
                if time.time() - (lock.folder() / f"building-{number}.json").stat().st_mtime > lock.HEARTBEAT_TIMEOUT:
                    return lambda: None
        return None

    def _claim(self, task: RankTask) -> bool:
        """Claim an entry, unless its claim is no longer the one that this rank last read."""
        return self.jobstore.compare_set(f"claim/{task.name}", task.claim, self.name)

    def _build(self, task: RankTask) -> None:
        task.build()
        if task.entry is not None:
            self._publish(task)
            return
        error = task.error
        assert error is not None
        if isinstance(error, CompileError) or self.jobstore.add(f"failed/{task.name}") >= _TRIES:
            self.jobstore.set(f"result/{task.name}", RankReport.of_error(error, self.name).dump())
        else:  # the cause may be this rank's own
            task.error, task.failure, task.able = None, error, False
            self.jobstore.compare_set(f"claim/{task.name}", self.name, "")
            self.jobstore.add(f"unable/{task}")

    def _publish(self, task: RankTask) -> None:
        """Report an entry to the other ranks, and send its bytes."""
        entry, parts = task.entry, 0
        assert entry is not None
        with suppress(OSError, EntryError):  # the entry was removed: ranks that want it build it
            content = bundle.of(entry.folder).dump()
            for start in range(0, len(content), _PART_BYTES):
                self.jobstore.set(f"bytes/{entry.key}/{parts}", content[start:start + _PART_BYTES])
                parts += 1
        for name in task.binary.names(entry):
            self.jobstore.set(f"result/{name}", RankReport(entry.key, parts).dump())

    # --- waiting --------------------------------------------------------------------------------------------------------------------

    def _wait(self, task: RankTask, left: int) -> None:
        """Check once for another rank's result; settle the entry, or sleep."""
        result = self.jobstore.get(f"result/{task.name}")
        if result is not None:
            self._settle(task, RankReport.parse(result))
            return
        if time.monotonic() - task.checked >= self.check_interval:
            self._check_claim(task, left)
        if not task.settled:
            time.sleep(self.poll_interval)

    def _check_claim(self, task: RankTask, left: int) -> None:
        """Check who builds an entry: this rank may replace a builder that takes too long, and gives up if no rank can build it."""
        task.checked = now = time.monotonic()
        claim = (self.jobstore.get(f"claim/{task.name}") or b"").decode(errors="surrogateescape")
        if claim != task.claim:
            task.claim, task.changed = claim, now
        task.taken = bool(claim) and now - task.changed <= CLAIM_TIMEOUT
        shown = re.sub(r"[^\w.-]", "?", claim[:80])
        text = f"waiting for {task}, {f'which {shown} is building' if claim else 'which no rank is building yet'}; {left} left"
        if text != self.last_shown:
            self.last_shown = text
            self.show(text)
        if not task.able and (now - self.started > GIVE_UP_TIMEOUT or self.jobstore.add(f"unable/{task}", 0) >= self.rank.size):
            task.error = task.failure
            if task.error is None:
                task.build()  # fails with the reason why this rank cannot build it

    def _settle(self, task: RankTask, report: RankReport) -> None:
        """Take another rank's error or entry. One rank of each node fetches the bytes, and the others find the entry in the cache."""
        if not task.look():
            task.error = report.to_error(self.name)
        if report.parts and not task.settled:
            self._fetch(task, report)
        if not task.settled:  # after the release: a build takes the same lock
            task.build()

    def _fetch(self, task: RankTask, report: RankReport) -> None:
        from opjit.store import lock

        with lock.held(report.key, lambda holder: self.show(f"waiting for {task}: {holder}")):
            if task.look():
                return
            try:
                task.accept(b"".join(self.jobstore.get(f"bytes/{report.key}/{number}") or b"" for number in range(report.parts)))
            except (EntryError, OSError) as error:
                warnings.warn(CacheWarning(f"{task} is built here, because the bytes that another rank sent cannot be used: {error}"),
                              stacklevel=2)
