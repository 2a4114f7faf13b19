"""One rank's part in building a job's missing entries, each once.

The ranks meet in torch.distributed's store. Under each entry's key there is

    claim/<key>         "<generation> <who> <beat>": who builds it; the beat changes while that rank lives
    result/<key>        JSON: the entry's key and the number of its parts below, or the error that its source gives
    bytes/<key>/<n>     the entry, in parts, where somebody may need them

and, for the whole job, counters: ``arrived`` and ``left`` of the calls, ``pulse`` of whoever still needs the store, and ``elsewhere``,
which is set by a rank that does not see the cache of the first that lacked something (``token``).

What a rank wants is in item.py, how it knows that another lives, in life.py, and how many build at once on a machine, in slots.py.
"""

from __future__ import annotations

import atexit
import math
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from opjit import budget, bundle, files, life, telling
from opjit.errors import CacheWarning, CompileError, EntryError
from opjit.item import Item
from opjit.jobstore import ANSWER, JobStore, Lost
from opjit.life import Life, generation
from opjit.ranks import Place
from opjit.store import Store

_PART = 1 << 20  # bytes; a store takes 8 MiB at once, and answers nobody else meanwhile
_looked: set[tuple[object, object]] = set()  # jobs in which this process has told whether it sees the same cache as others
_TRIES = 3  # ranks that try a build that fails for reasons which may be a rank's own


class Job:
    """This rank's part in the job while one call lasts."""

    def __init__(self, line: JobStore, place: Place, store: Store, say: Callable[[str], None], jobs: int | None) -> None:
        self.line, self.place, self.store, self.say, self.jobs = line, place, store, say, jobs
        self.who = f"rank-{place.rank}-on-{socket.gethostname()}"
        self.life = Life(line, place, self.who)
        self.slot_asked = -life.DEAD
        self.slots: dict[int, tuple[object, float]] = {}  # the notes of who has a slot, and when they changed by this rank's clock
        self.last_said = ""
        self.token: Path | None = None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.life.end()
        if self.token is not None:
            files.remove_tree(self.token)
        self.line.count("left")
        if self.line.hosted:
            atexit.register(self.life.stay, os.getpid())
        else:
            self.line.close()

    def offer(self, items: list[Item]) -> None:
        """The part of a rank that lacks nothing: give what others may lack, in a thread beside whatever comes next. The process
        ends when that is done."""
        self.line.count("arrived")
        thread = threading.Thread(target=self._offer_and_leave, args=(items,), name="opjit-offer", daemon=True)
        thread.start()
        atexit.register(self._end, thread, os.getpid())

    def _offer_and_leave(self, items: list[Item]) -> None:
        with suppress(Lost):
            self._offer(items)
        self.line.count("left")
        if not self.line.hosted:
            self.line.close()

    def _offer(self, items: list[Item]) -> None:
        seen_by_all: bool | None = None  # asked once for all that is offered
        for item in items:
            if item.entry is not None and (item.name == item.entry.key or item.name == item.any_compiler) and self.life.claim(item.name):
                seen_by_all = self._seen_by_all() if seen_by_all is None else seen_by_all
                self._publish(item, seen_by_all)

    def _end(self, thread: threading.Thread, owner: int) -> None:
        if os.getpid() == owner:  # not a forked child
            thread.join(ANSWER)
            if self.line.hosted:
                self.life.stay(owner)

    def run(self, offers: list[Item], missing: list[Item]) -> None:
        """The part of a rank that lacks something: settle each item that is missing."""
        self._find_place()
        self.line.count("arrived")
        self.life.begin()
        self._offer(offers)
        # Each rank starts elsewhere in the list, so that those who build meet seldom.
        self._queue(missing)
        turn = self.place.rank * len(missing) // self.place.size
        order = missing[turn:] + missing[:turn]
        for item in order:
            while not item.settled:
                if not self._build_some(order):
                    self._wait(item, len(missing) - sum(each.settled for each in missing))

    def _queue(self, missing: list[Item]) -> None:
        """Leave C ops to a few ranks at first: each that builds compiles opjit's runtime too, which takes as long as an op or two."""
        if missing:
            worth = math.ceil(sum(1.0 if item.target.backend.uses_nvcc else 0.25 for item in missing))
            if self.line.add(f"builders/{missing[0].name}") > worth:
                self.slot_asked = time.monotonic() + self.life.tick

    def _find_place(self) -> None:
        """Find out whether this rank sees the same cache as the first rank that lacked something."""
        token = self.line.read("token")
        if token is None:
            try:
                self.token = self.store.stage()
                name = self.token.name
            except (OSError, EntryError):
                name = "none"  # what is built here stays here
            token = name.encode() if self.line.exchange("token", "", name) else self.line.read("token")
        if token is not None and not (self.store.base / "staging" / token.decode(errors="replace")).is_dir():
            self.line.write("elsewhere", "1")
        if (self.place.address, self.place.attempt) not in _looked:
            _looked.add((self.place.address, self.place.attempt))
            self.line.count("looked")

    # --- building -------------------------------------------------------------------------------------------------------------------

    def _build_some(self, items: list[Item]) -> bool:
        """Build what nobody has claimed, if this machine has a core to spare; whether anything was built."""
        free = [item for item in items if item.able and not item.taken and not item.settled]
        if not free or time.monotonic() - self.slot_asked < self.life.tick:
            return False
        self.slot_asked = time.monotonic()
        from opjit import slots  # with the locks, which a warm call does without

        with ExitStack() as stack:
            heavy = any(item.target.backend.uses_nvcc for item in free)
            if not slots.take(stack, budget.jobs(budget.NVCC_JOB if heavy else budget.C_JOB, self.jobs), self.slots):
                return False
            built = 0
            for item in free:
                item.taken = True
                if self.line.read(f"result/{item.name}") is None and self.life.claim(item.name):
                    self._build(item)
                    built += 1
        return built > 0

    def _build(self, item: Item) -> None:
        item.build()
        if item.entry is not None:
            self._publish(item, self._seen_by_all())
            return
        claim = self.life.leave(item.name)
        error = item.error
        assert error is not None
        if isinstance(error, CompileError) or generation(claim) >= _TRIES:
            self.line.write(f"result/{item.name}", telling.failure(error, self.who))
        else:  # this rank's trouble, maybe
            item.error, item.failure, item.able = None, error, False
            self.line.exchange(f"claim/{item.name}", claim, f"{generation(claim)} free 0")

    def _seen_by_all(self) -> bool:
        """Whether every rank has said that it sees this cache."""
        return self.line.add("looked", 0) >= self.place.size and self.line.read("elsewhere") is None

    def _publish(self, item: Item, seen_by_all: bool) -> None:
        """Tell the others where it is, and give them the bytes unless all of them see this cache."""
        entry, parts = item.entry, 0
        assert entry is not None
        if not (seen_by_all and entry.folder.is_relative_to(self.store.base)):
            with suppress(OSError, EntryError):  # it went away: whoever wants it builds it
                content = bundle.of(entry.folder).dump()
                pieces = [content[start:start + _PART] for start in range(0, len(content), _PART)]
                for number, piece in enumerate(pieces):
                    self.line.write(f"bytes/{entry.key}/{number}", piece)
                parts = len(pieces)
        for name in {entry.key, item.any_compiler}:
            self.line.write(f"result/{name}", telling.entry(entry.key, parts))
        self.life.leave(item.name)

    # --- waiting --------------------------------------------------------------------------------------------------------------------

    def _wait(self, item: Item, left: int) -> None:
        """Look once for what another rank makes of it; settle it, take it over, or sleep."""
        result = self.line.read(f"result/{item.name}")
        if result is not None:
            self._settle(item, result)
            return
        now = time.monotonic()
        if now - item.looked >= self.life.tick:
            item.looked = now
            claim = (self.line.read(f"claim/{item.name}") or b"").decode(errors="replace")
            item.taken = bool(claim)
            holder = claim.split(" ")[1] if claim.count(" ") == 2 else "a rank with time"
            self._tell(f"waiting for {item}, which {holder.rpartition('-')[0] or holder} builds; {left} left")
            if claim != item.seen[0]:
                item.seen = (claim, now)
            elif claim and (holder == "free" or now - item.seen[1] > self.life.dead) and item.able:
                if self.life.claim(item.name, claim):
                    self._build(item)
                item.seen = ("", now)
                return
            self.life.hopeless = not item.able and holder in ("free", "a rank with time")
            if not item.able and self.life.nobody_left():
                item.error = item.failure
                if item.error is None:
                    item.build()  # says what it is that forbids it
                return
        time.sleep(self.life.pause)

    def _tell(self, text: str) -> None:
        if text != self.last_said:
            self.last_said = text
            self.say(text)

    def _settle(self, item: Item, result: bytes) -> None:
        key, parts, error = telling.read(result)
        if error is not None:
            item.error = telling.remade(error, self.who)
            return
        deadline = time.monotonic() + life.DEAD
        while not item.look():
            if parts:
                # One of a node's ranks takes them; the others find them in the cache, or do not wait any longer.
                from opjit import lock  # importing it takes as long as a warm call

                release = lock.attempt(key)
                if release is not None or time.monotonic() > deadline:
                    try:
                        good = item.look() or self._fetch(item, key, parts)
                    finally:
                        if release is not None:
                            release()
                    if not good:
                        item.build()
                    return
                time.sleep(self.life.pause)
                continue
            if error is not None or time.monotonic() > deadline:
                item.build()  # whoever told it has gone, and the entry as well
                return
            time.sleep(max(0.1, self.life.pause))
            key, parts, error = telling.read(self.line.read(f"result/{item.name}") or result)
        item.origin = "taken"

    def _fetch(self, item: Item, key: str, parts: int) -> bool:
        """Take an entry's bytes out of the store; whether they were good."""
        pieces = [self.line.read(f"bytes/{key}/{number}") or b"" for number in range(parts)]
        try:
            item.accept(b"".join(pieces))
        except (EntryError, OSError) as error:
            warnings.warn(CacheWarning(f"what another rank sent of {item} is not used: {error}; it is built here"), stacklevel=2)
            return False
        return True
