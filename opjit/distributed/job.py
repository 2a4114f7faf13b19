"""One rank's part in building a job's missing entries, each once in the whole job.

The ranks meet in torch.distributed's store. For each entry, by its key, the store has

    claim/<key>         "<generation> <rank> <beat>": the rank that builds it, and a beat that changes while that rank is alive; the
                        generation alone after a rank gave up
    result/<key>        JSON: the entry's key and the number of its parts, or the error in the op's source
    bytes/<key>/<n>     the entry's parts; a rank whose cache shows the entry does not read them

and for the whole job the counters ``arrived`` and ``left`` (of calls) and ``pulse`` (of ranks that still need the store).
"""

from __future__ import annotations

import math
import re
import socket
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

from opjit.builder import budget
from opjit.distributed import presence
from opjit.distributed.presence import Presence
from opjit.distributed.rank_task import RankReport, RankTask
from opjit.distributed.ranks import Rank
from opjit.distributed.rendezvous import ANSWER_TIMEOUT, JobStore, StoreLost
from opjit.errors import CacheWarning, CompileError, EntryError
from opjit.store import bundle

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
        self.presence = Presence(jobstore, rank, self.name)
        self.last_slot_attempt = -math.inf
        self.last_shown = ""
        if jobstore.hosted:
            presence.at_exit(self.presence.wait_for_others)

    def offer(self, entries: list[RankTask]) -> None:
        """For a rank that misses nothing: publish what others may miss, in a thread. The process waits for it at its exit."""
        thread = threading.Thread(target=self._offer_and_leave, args=(entries,), name="opjit-offer", daemon=True)
        thread.start()
        presence.at_exit(lambda: thread.join(ANSWER_TIMEOUT))

    def _offer_and_leave(self, entries: list[RankTask]) -> None:
        with suppress(StoreLost):
            self.jobstore.add("arrived")
            self._offer(entries)
        self._leave()

    def _offer(self, entries: list[RankTask]) -> None:
        for wanted in entries:
            fits = wanted.entry is not None and wanted.name in wanted.binary.names(wanted.entry)
            if fits and self.presence.claim(wanted.name):
                self._publish(wanted)

    def _leave(self) -> None:
        with suppress(StoreLost):
            self.jobstore.add("left")
        if not self.jobstore.hosted:
            self.jobstore.close()

    def run(self, offers: list[RankTask], missing: list[RankTask]) -> None:
        """For a rank that misses entries: settle each of them."""
        # Each rank starts at another entry, so that builders rarely compete for a claim.
        first = self.rank.number * len(missing) // self.rank.size
        order = missing[first:] + missing[:first]
        try:
            self.jobstore.add("arrived")
            self.presence.start()
            self._offer(offers)
            for wanted in order:
                while not wanted.settled:
                    if not self._build_some(order):
                        self._wait(wanted, sum(not each.settled for each in missing))
        finally:
            self.presence.stop()
            self._leave()

    # --- building -------------------------------------------------------------------------------------------------------------------

    def _build_some(self, entries: list[RankTask]) -> bool:
        """Build the entries that no live rank has claimed, if this machine has a free slot; returns whether it built any."""
        free = [wanted for wanted in entries if wanted.able and not wanted.taken and not wanted.settled]
        if not free or time.monotonic() - self.last_slot_attempt < self.presence.beat_interval:
            return False
        self.last_slot_attempt = time.monotonic()
        release = self._take_slot(budget.NVCC_JOB if any(wanted.binary.large for wanted in free) else budget.C_JOB)
        if release is None:
            return False
        built = False
        try:
            for wanted in free:
                wanted.taken = True
                if self.jobstore.get(f"result/{wanted.name}") is None and self.presence.claim(wanted.name, wanted.claim):
                    self._build(wanted)
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

    def _build(self, wanted: RankTask) -> None:
        wanted.build()
        if wanted.entry is not None:
            self._publish(wanted)
            return
        claim = self.presence.drop_claim(wanted.name)
        error = wanted.error
        assert error is not None
        if isinstance(error, CompileError) or presence.generation(claim) >= _TRIES:
            self.jobstore.set(f"result/{wanted.name}", RankReport.of_error(error, self.name).dump())
        else:  # the cause may be this rank's own
            wanted.error, wanted.failure, wanted.able = None, error, False
            self.jobstore.compare_set(f"claim/{wanted.name}", claim, str(presence.generation(claim)))

    def _publish(self, wanted: RankTask) -> None:
        """Report an entry to the other ranks, and send its bytes."""
        entry, parts = wanted.entry, 0
        assert entry is not None
        with suppress(OSError, EntryError):  # the entry was removed: ranks that want it build it
            content = bundle.of(entry.folder).dump()
            for start in range(0, len(content), _PART_BYTES):
                self.jobstore.set(f"bytes/{entry.key}/{parts}", content[start:start + _PART_BYTES])
                parts += 1
        for name in wanted.binary.names(entry):
            self.jobstore.set(f"result/{name}", RankReport(entry.key, parts).dump())
        self.presence.drop_claim(wanted.name)

    # --- waiting --------------------------------------------------------------------------------------------------------------------

    def _wait(self, wanted: RankTask, left: int) -> None:
        """Check once for another rank's result; settle the entry, or sleep."""
        result = self.jobstore.get(f"result/{wanted.name}")
        if result is not None:
            self._settle(wanted, result)
            return
        if time.monotonic() - wanted.checked >= self.presence.beat_interval:
            self._check_claim(wanted, left)
        if not wanted.settled:
            time.sleep(self.presence.poll_interval)

    def _check_claim(self, wanted: RankTask, left: int) -> None:
        """Check who is building an entry: this rank may replace a dead builder, and gives up if no rank can build it."""
        wanted.checked = now = time.monotonic()
        claim = (self.jobstore.get(f"claim/{wanted.name}") or b"").decode(errors="surrogateescape")
        if claim != wanted.claim:
            wanted.claim, wanted.changed = claim, now
        holder = presence.holder(claim)
        wanted.taken = bool(holder) and now - wanted.changed <= self.presence.timeout
        shown = re.sub(r"[^\w.-]", "?", holder.rpartition("-")[0])
        builder = f"which {shown} is building" if holder else "which no rank is building yet"
        text = f"waiting for {wanted}, {builder}; {left} left"
        if text != self.last_shown:
            self.last_shown = text
            self.show(text)
        self.presence.is_stuck = not wanted.able and not wanted.taken
        if not wanted.able and self.presence.job_is_idle():
            wanted.error = wanted.failure
            if wanted.error is None:
                wanted.build()  # fails with the reason why this rank cannot build it

    def _settle(self, wanted: RankTask, result: bytes) -> None:
        """Take another rank's error or entry; a shared cache may show the entry a little later."""
        deadline = time.monotonic() + presence.TIMEOUT
        while not wanted.settled and not wanted.look():
            reported = RankReport.parse(result)
            late = time.monotonic() > deadline
            wanted.error = reported.to_error(self.name)
            if reported.parts:
                self._fetch(wanted, reported, late)
            elif late and not wanted.settled:
                wanted.build()  # the reporting rank has gone, and the entry with it
            if not wanted.settled:
                time.sleep(max(0.05, self.presence.poll_interval))
                result = self.jobstore.get(f"result/{wanted.name}") or result

    def _fetch(self, wanted: RankTask, reported: RankReport, late: bool) -> None:
        """Fetch an entry's bytes. One rank of each node does, and the others find the entry in the cache; if it is late, each rank does."""
        from opjit.store import lock

        release = lock.try_acquire(reported.key)
        if release is None and not late:
            return
        try:
            if not wanted.look():
                parts = [self.jobstore.get(f"bytes/{reported.key}/{number}") or b"" for number in range(reported.parts)]
                wanted.accept(b"".join(parts))
        except (EntryError, OSError) as error:
            warnings.warn(CacheWarning(f"{wanted} is built here, because the bytes that another rank sent cannot be used: {error}"),
                          stacklevel=2)
        finally:
            if release is not None:
                release()
        if wanted.entry is None:
            wanted.build()  # after the release: a build takes the same lock
