"""Claims and heartbeats: how a rank shows the others of its job that it is alive, and how it notices that another is not.

In the job's store these are the beat at the end of a claim, and the counters ``arrived``, ``left`` and ``pulse``; see job.py.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from opjit import files, progress
from opjit.distributed.ranks import Rank
from opjit.distributed.rendezvous import JobStore, StoreLost

TIMEOUT = 5.0  # seconds without a heartbeat
ARRIVAL_TIMEOUT = 10.0  # seconds, from its own start, in which a rank expects others to arrive


class Presence:
    """This rank's claims and heartbeats during one call.

    Attributes:
        poll_interval: seconds between reads of the store.
        beat_interval: seconds between heartbeats.
        timeout: seconds without a heartbeat after which a rank counts as dead.
        is_stuck: this rank waits for an entry that it cannot build, so nobody should wait for this rank.
    """

    def __init__(self, jobstore: JobStore, rank: Rank, name: str) -> None:
        self.jobstore, self.rank = jobstore, rank
        self.poll_interval = max(0.01, rank.size * 2.5e-4)  # 2,000 ranks send 4,000 requests per second to the one server
        self.beat_interval = max(0.5, rank.size * 5e-4)
        self.timeout = max(TIMEOUT, 6 * self.beat_interval)
        self.is_stuck = False
        self._started = time.monotonic()
        self._holder = f"{name}-{files.unique()[:8]}"
        self._claims: dict[str, str] = {}
        self._pulse: tuple[int, float] = (-1, self._started)
        self._lock, self._stopped = threading.Lock(), threading.Event()

    def start(self) -> None:
        """Start the heartbeat."""
        threading.Thread(target=self._beat, name="opjit-beat", daemon=True).start()

    def stop(self) -> None:
        """Stop the heartbeat."""
        self._stopped.set()

    def claim(self, name: str, before: str = "") -> bool:
        """Claim an entry, unless its claim is no longer `before`: empty, or the claim of a rank that died or gave up."""
        value = f"{generation(before) + 1} {self._holder} 0"
        if not self.jobstore.compare_set(f"claim/{name}", before, value):
            return False
        with self._lock:
            self._claims[name] = value
        return True

    def drop_claim(self, name: str) -> str:
        """Stop renewing a claim; returns its last value, or an empty string."""
        with self._lock:
            return self._claims.pop(name, "")

    def job_is_idle(self) -> bool:
        """Return whether no rank is working, and none is expected to arrive."""
        return self._silence() > self.timeout and not self._expects_ranks()

    def _silence(self) -> float:
        """Seconds since another heartbeat was first seen, from any rank that needs the store."""
        now, count = time.monotonic(), self.jobstore.add("pulse", 0)
        if count != self._pulse[0]:
            self._pulse = (count, now)
        return now - self._pulse[1]

    def _expects_ranks(self) -> bool:
        return self.jobstore.add("arrived", 0) < self.rank.size and time.monotonic() - self._started < ARRIVAL_TIMEOUT

    def _beat(self) -> None:
        beats = 0
        with suppress(StoreLost):
            while not self._stopped.wait(self.beat_interval):
                beats += 1
                if not self.is_stuck:
                    self.jobstore.add("pulse")
                with self._lock:
                    for name, value in list(self._claims.items()):
                        renewed = f"{value.rpartition(' ')[0]} {beats}"
                        if self.jobstore.compare_set(f"claim/{name}", value, renewed):
                            self._claims[name] = renewed
                        else:
                            del self._claims[name]  # another rank took over from this one; both results are good

    def wait_for_others(self) -> None:
        """Keep rank 0, the store's host, from exiting while live ranks need the store."""
        self._pulse = (-1, time.monotonic())
        with suppress(StoreLost), progress.status("waiting for the ranks that still need rank 0's store"):
            while self._others_need_store():
                time.sleep(max(0.05, self.poll_interval))

    def _others_need_store(self) -> bool:
        if self.jobstore.add("left", 0) < self.jobstore.add("arrived", 0):
            return self._silence() <= self.timeout
        return self._expects_ranks() and not self.rank.one_node


def generation(claim: str) -> int:
    """Return the number of ranks that have tried, from a claim; 0 for no claim."""
    first = claim.partition(" ")[0]
    return int(first) if re.fullmatch(r"[0-9]{1,9}", first) else 0  # other programs may write to the store, too


def holder(claim: str) -> str:
    """Return the rank that holds a claim; empty if no rank is building the entry."""
    words = claim.split(" ")
    return words[1] if len(words) == 3 else ""


def at_exit(call: Callable[[], None]) -> None:
    """Call a function when this process exits, but not when a forked child does."""
    owner = os.getpid()
    atexit.register(lambda: call() if os.getpid() == owner else None)
