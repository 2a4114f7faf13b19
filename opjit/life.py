"""Signs of life among the ranks of a job: those that a rank gives while it builds or waits, and what it makes of the others'.

In the job's store that is the beat at the end of a claim, and the counters ``arrived``, ``left`` and ``pulse``; see job.py.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

from opjit import files, progress
from opjit.jobstore import JobStore, Lost
from opjit.ranks import Place

DEAD = 5.0  # seconds without a sign of life
LATE = 10.0  # seconds after its own start in which a rank still expects others to come


class Life:
    """This rank's signs of life while one call lasts.

    Attributes:
        started: when, by this rank's clock.
        pause: seconds between looks into the store.
        tick: seconds between signs.
        dead: seconds without a sign after which a rank is thought dead.
        hopeless: it waits for what it cannot build: no reason for others to wait for it.
    """

    def __init__(self, line: JobStore, place: Place, who: str) -> None:
        self.line, self.place = line, place
        self.started = time.monotonic()
        self.pause = max(0.01, place.size * 2.5e-4)  # 2,000 ranks ask the one server 4,000 times a second
        self.tick = max(0.5, place.size * 5e-4)
        self.dead = max(DEAD, 6 * self.tick)
        self.hopeless = False
        self._unique = f"{who}-{files.unique()[:8]}"
        self._claims: dict[str, str] = {}
        self._pulse: tuple[int, float] = (-1, self.started)
        self._guard, self._over = threading.Lock(), threading.Event()

    def begin(self) -> None:
        threading.Thread(target=self._beat, name="opjit-beat", daemon=True).start()

    def end(self) -> None:
        self._over.set()

    def claim(self, name: str, before: str = "") -> bool:
        """Become the one who provides an entry; `before` is the claim of one who died or gave up."""
        value = f"{generation(before) + 1} {self._unique} 0"
        if not self.line.exchange(f"claim/{name}", before, value):
            return False
        with self._guard:
            self._claims[name] = value
        return True

    def leave(self, name: str) -> str:
        """Give no more signs for a claim; its last value, or an empty text."""
        with self._guard:
            return self._claims.pop(name, "")

    def nobody_left(self) -> bool:
        """Whether no rank is at work any more, nor expected."""
        now, count = time.monotonic(), self.line.add("pulse", 0)
        if count != self._pulse[0]:
            self._pulse = (count, now)
        expected = self.line.add("arrived", 0) < self.place.size and now - self.started < LATE
        return not expected and now - self._pulse[1] > self.dead

    def _beat(self) -> None:
        """Say now and then that this rank lives and needs the store, and renew its claims."""
        beats = 0
        with suppress(Lost):
            while not self._over.wait(self.tick):
                beats += 1
                if not self.hopeless:
                    self.line.add("pulse")
                with self._guard:
                    for name, value in list(self._claims.items()):
                        renewed = f"{value.rpartition(' ')[0]} {beats}"
                        if self.line.exchange(f"claim/{name}", value, renewed):
                            self._claims[name] = renewed
                        else:
                            del self._claims[name]  # somebody thought this rank dead; both results are good

    def stay(self, owner: int) -> None:
        """Before rank 0 exits, and its store with it: let those finish that need it, as long as they live."""
        if os.getpid() != owner:  # a forked child
            return
        count, changed = -1, time.monotonic()
        with suppress(Lost), progress.shown("waiting for the ranks that still need rank 0's store"):
            while time.monotonic() - changed < self.dead:
                arrived, left = self.line.add("arrived", 0), self.line.add("left", 0)
                late = arrived < self.place.size and not self.place.one_node and time.monotonic() - self.started < LATE
                if left >= arrived and not late:
                    return
                if (now := self.line.add("pulse", 0)) != count or (left >= arrived and late):
                    count, changed = now, time.monotonic()
                time.sleep(max(0.05, self.pause))


def generation(claim: str) -> int:
    """How many ranks have tried, by a claim; 0 where there is none."""
    first = claim.partition(" ")[0]
    return int(first) if first.isdecimal() else 0
