"""One rank's part in building a job's missing entries, each once.

The ranks meet in torch.distributed's store. Under each entry's key there is

    claim/<key>         "<generation> <who> <beat>": who builds it; the beat changes while that rank lives
    result/<key>        JSON: the entry's key and the number of its parts below, or the error that its source gives
    bytes/<key>/<n>     the entry, in parts, where somebody may need them

and, for the whole job, counters: ``arrived`` and ``left`` of the calls, ``pulse`` of whoever still needs the store, and ``elsewhere``,
which is set by a rank that does not see the cache of the first that lacked something (``token``).
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
from functools import cached_property
from pathlib import Path
from typing import Any

from opjit import api, budget, bundle, files, manifest, progress, telling
from opjit.environment import is_on
from opjit.errors import CacheWarning, CompileError, EntryError, OpjitError
from opjit.jobstore import ANSWER, JobStore, Lost
from opjit.op import Op
from opjit.plan import Survey, Wanted
from opjit.ranks import Place
from opjit.recipe import Recipe, document_key
from opjit.store import Entry, Store
from opjit.targets import Target

DEAD = 5.0  # seconds without a sign of life
LATE = 10.0  # seconds after its own start in which a rank still expects others to come
_PART = 1 << 20  # bytes; a store takes 8 MiB at once, and answers nobody else meanwhile
_looked: set[tuple[object, object]] = set()  # jobs in which this process has told whether it sees the same cache as others
Make = Callable[[Recipe, Store], Entry]  # builds and publishes; see api.build_once
_TRIES = 3  # ranks that try a build that fails for reasons which may be a rank's own


class Item:
    """An entry that this rank wants.

    Attributes:
        name: its key; where no compiler is known, the key of all but the compiler.
        able: whether this rank may build it.
        taken: whether some rank has claimed it.
        failure: why this rank could not build it, where another might.
        seen: the claim's last value, and when it changed by this rank's clock.
        looked: when the claim was last looked at.
    """

    def __init__(self, op: Op, target: Target, survey: Survey, store: Store, make: Make | None) -> None:
        self.op, self.target, self.store, self.make = op, target, store, make
        self.recipe = survey.recipe(Wanted(op, target))
        key = self.recipe.key
        self.name = key or self.any_compiler
        self.able = key is not None and not is_on("OPJIT_OFFLINE")
        self.entry = survey.look(self.recipe)
        self.error: OpjitError | None = None
        self.failure: OpjitError | None = None
        self.origin = "found"
        self.taken = False
        self.seen: tuple[str, float] = ("", 0.0)
        self.looked = 0.0

    def __str__(self) -> str:
        return f"{self.op.qualified} for {self.target}"

    @cached_property
    def any_compiler(self) -> str:
        """The key of all but the compiler."""
        return _any_compiler(self.recipe.document())

    @property
    def folder(self) -> Path:
        return self.store.folder(self.recipe.schema.qualified, self.target)

    @property
    def settled(self) -> bool:
        return self.entry is not None or self.error is not None

    def look(self) -> bool:
        """Look into the cache again: another process of the node, or another node, may have put it there."""
        if self.entry is None:
            for folder in (self.store.base, self.folder.parent, self.folder):
                with suppress(OSError):
                    os.listdir(folder)  # NFS remembers for a minute that a name was not there, until its folder is opened anew
            self.entry = self.store.find(self.recipe, quiet=True)
        return self.entry is not None

    def build(self) -> None:
        """Build it as `opjit.get` does; the error is kept."""
        try:
            self.entry, self.origin = api.build_once(self.op, self.recipe, self.store, self.make), "built"
        except OpjitError as error:
            self.error = error

    def accept(self, content: bytes) -> None:
        """Take bytes for the entry, into the store or, where that cannot be written, into a folder that goes with the process.

        Raises:
            EntryError: they are not of this entry.
            OSError: there is no room for them.
        """
        received = bundle.parse(content)
        described = manifest.parse(received.manifest)
        if (self.recipe.key or described.key) != described.key or _any_compiler(described.document) != self.any_compiler:
            raise EntryError("they are of another entry")
        place = self.folder / described.key
        try:
            self.entry = self.store.receive(received, place, self.target)
        except OSError as error:
            if self.make is not None:
                raise
            warnings.warn(CacheWarning(f"the cache cannot be used, so {self.op.qualified} is there for this process only: {error}"),
                          stacklevel=2)
            private = Store(files.until_exit())
            self.entry = private.receive(received, private.base / place.relative_to(self.store.base), self.target)
        self.origin = "taken"


class Job:
    """This rank's part in the job while one call lasts."""

    def __init__(self, line: JobStore, place: Place, store: Store, say: Callable[[str], None], jobs: int | None) -> None:
        self.line, self.place, self.store, self.say, self.jobs = line, place, store, say, jobs
        self.who = f"rank-{place.rank}-on-{socket.gethostname()}"
        self.unique = f"{self.who}-{files.unique()[:8]}"
        self.pause = max(0.01, place.size * 2.5e-4)  # s between looks: 2,000 ranks ask the one server 4,000 times a second
        self.tick = max(0.5, place.size * 5e-4)
        self.dead = max(DEAD, 6 * self.tick)
        self.started = time.monotonic()
        self.claims: dict[str, str] = {}
        self.hopeless = False  # waits for what it cannot build: no reason for others to wait for it
        self.pulse: tuple[int, float] = (-1, self.started)
        self.slot_asked = -DEAD
        self.slots: dict[int, tuple[object, float]] = {}  # the notes of who has a slot, and when they changed by this rank's clock
        self.last_said = ""
        self.guard, self.over = threading.Lock(), threading.Event()
        self.token: Path | None = None

    def __enter__(self) -> Job:
        self.beats = threading.Thread(target=self._beat, name="opjit-beat", daemon=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        if self.token is not None:
            files.remove_tree(self.token)
        self.line.count("left")
        if self.line.hosted:
            atexit.register(self._stay, os.getpid())
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
            if item.entry is not None and (item.name == item.entry.key or item.name == item.any_compiler) and self._claim(item):
                seen_by_all = self._seen_by_all() if seen_by_all is None else seen_by_all
                self._publish(item, seen_by_all)

    def _end(self, thread: threading.Thread, owner: int) -> None:
        if os.getpid() == owner:  # not a forked child
            thread.join(ANSWER)
            if self.line.hosted:
                self._stay(owner)

    def run(self, offers: list[Item], missing: list[Item]) -> None:
        """The part of a rank that lacks something: settle each item that is missing."""
        self._find_place()
        self.line.count("arrived")
        self.beats.start()
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
                self.slot_asked = time.monotonic() + self.tick

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
        if not free or time.monotonic() - self.slot_asked < self.tick:
            return False
        self.slot_asked = time.monotonic()
        with ExitStack() as stack:
            heavy = any(item.target.backend.uses_nvcc for item in free)
            if not _slot(stack, budget.jobs(budget.NVCC_JOB if heavy else budget.C_JOB, self.jobs), self.slots):
                return False
            built = 0
            for item in free:
                item.taken = True
                if self.line.read(f"result/{item.name}") is None and self._claim(item):
                    self._build(item)
                    built += 1
        return built > 0

    def _claim(self, item: Item, before: str = "") -> bool:
        """Become the one who provides it; `before` is the claim of one who died or gave up."""
        value = f"{_generation(before) + 1} {self.unique} 0"
        if not self.line.exchange(f"claim/{item.name}", before, value):
            return False
        with self.guard:
            self.claims[item.name] = value
        return True

    def _build(self, item: Item) -> None:
        item.build()
        if item.entry is not None:
            self._publish(item, self._seen_by_all())
            return
        with self.guard:
            claim = self.claims.pop(item.name, "")
        error = item.error
        assert error is not None
        if isinstance(error, CompileError) or _generation(claim) >= _TRIES:
            self.line.write(f"result/{item.name}", telling.failure(error, self.who))
        else:  # this rank's trouble, maybe
            item.error, item.failure, item.able = None, error, False
            self.line.exchange(f"claim/{item.name}", claim, f"{_generation(claim)} free 0")

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
        with self.guard:
            self.claims.pop(item.name, None)

    # --- waiting --------------------------------------------------------------------------------------------------------------------

    def _wait(self, item: Item, left: int) -> None:
        """Look once for what another rank makes of it; settle it, take it over, or sleep."""
        result = self.line.read(f"result/{item.name}")
        if result is not None:
            self._settle(item, result)
            return
        now = time.monotonic()
        if now - item.looked >= self.tick:
            item.looked = now
            claim = (self.line.read(f"claim/{item.name}") or b"").decode(errors="replace")
            item.taken = bool(claim)
            holder = claim.split(" ")[1] if claim.count(" ") == 2 else "a rank with time"
            self._tell(f"waiting for {item}, which {holder.rpartition('-')[0] or holder} builds; {left} left")
            if claim != item.seen[0]:
                item.seen = (claim, now)
            elif claim and (holder == "free" or now - item.seen[1] > self.dead) and item.able:
                if self._claim(item, claim):
                    self._build(item)
                item.seen = ("", now)
                return
            self.hopeless = not item.able and holder in ("free", "a rank with time")
            if not item.able and self._nobody_left():
                item.error = item.failure
                if item.error is None:
                    item.build()  # says what it is that forbids it
                return
        time.sleep(self.pause)

    def _tell(self, text: str) -> None:
        if text != self.last_said:
            self.last_said = text
            self.say(text)

    def _settle(self, item: Item, result: bytes) -> None:
        key, parts, error = telling.read(result)
        if error is not None:
            item.error = telling.remade(error, self.who)
            return
        deadline = time.monotonic() + DEAD
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
                time.sleep(self.pause)
                continue
            if error is not None or time.monotonic() > deadline:
                item.build()  # whoever told it has gone, and the entry as well
                return
            time.sleep(max(0.1, self.pause))
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

    def _nobody_left(self) -> bool:
        """Whether no rank is at work any more, nor expected."""
        now, count = time.monotonic(), self.line.add("pulse", 0)
        if count != self.pulse[0]:
            self.pulse = (count, now)
        expected = self.line.add("arrived", 0) < self.place.size and now - self.started < LATE
        return not expected and now - self.pulse[1] > self.dead

    # --- signs of life --------------------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Say now and then that this rank lives and needs the store, and renew its claims."""
        beats = 0
        with suppress(Lost):
            while not self.over.wait(self.tick):
                beats += 1
                if not self.hopeless:
                    self.line.add("pulse")
                with self.guard:
                    for name, value in list(self.claims.items()):
                        renewed = f"{value.rpartition(' ')[0]} {beats}"
                        if self.line.exchange(f"claim/{name}", value, renewed):
                            self.claims[name] = renewed
                        else:
                            del self.claims[name]  # somebody thought this rank dead; both results are good

    def _stay(self, owner: int) -> None:
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


def _slot(stack: ExitStack, jobs: int, seen: dict[int, tuple[object, float]]) -> bool:
    """One of the builds that this user's ranks run on this machine at a time. The kernel frees it when its holder dies; one whose holder
    gives no sign of life does not count."""
    from opjit import lock

    for number in range(jobs):
        name = f"building-{number}"
        release = lock.attempt(name)
        if release is not None:
            stack.callback(release)
            return True
        sign, now = files.stamp(lock.folder() / f"{name}.json"), time.monotonic()
        if number not in seen or seen[number][0] != sign:
            seen[number] = sign, now
        elif now - seen[number][1] > lock.SILENCE:
            return True
    return False


def _generation(claim: str) -> int:
    first = claim.partition(" ")[0]
    return int(first) if first.isdecimal() else 0


def _any_compiler(document: dict[str, Any]) -> str:
    """The key of all but the compiler."""
    return document_key({**document, "toolchain": None})
