"""One rank's part in building a job's missing entries, each once in the whole job.

The ranks meet in the store of torch.distributed. A rank that misses an entry claims it, builds it
and publishes the result, and the other ranks wait. A claim only saves work. It is not a lock,
because two equal results are both good: after CLAIM_TIMEOUT without a result, another rank claims
the entry. A rank that cannot build waits for a rank that can. If none can, or after
GIVE_UP_TIMEOUT, it raises the reason why it cannot build. For each entry, the store has

    claim/<key>         the rank that builds it; empty if it gave up
    result/<key>        the JSON of a RankResult
    bytes/<key>/<n>     the entry's parts; a rank does not read them if its cache shows the entry
    failed/<key>        a counter of the ranks that failed to build it
    unable/<entry>      a counter of the ranks that cannot build it with any compiler

and for the whole job the counters ``arrived`` and ``left``, which count calls. If rank 0 hosts the
store, it exits only when these are equal, or after HOST_TIMEOUT.
"""

import atexit
import json
import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from opjit import progress, request
from opjit.distributed.ranks import Rank
from opjit.distributed.rendezvous import JobStore, StoreLost
from opjit.environment import is_on
from opjit.errors import BuildError, CompileError, EntryError, OpjitError, warn_of_cache
from opjit.store import bundle, manifest
from opjit.store.entry import Entry
from opjit.store.store import KEY, Store
from opjit.typed_json import typed
from opjit.wanted import BinaryRequest

CLAIM_TIMEOUT = 60.0  # seconds
HOST_TIMEOUT = 2 * CLAIM_TIMEOUT
GIVE_UP_TIMEOUT = 600.0  # seconds
ARRIVAL_TIMEOUT = 10.0  # seconds after its start in which rank 0 expects other ranks to arrive
# torch's store accepts 8 MiB at once, but does not serve another rank during this time.
_PART_BYTES = 1 << 20
_MAX_PARTS = 1 << 12
_TRIES = 3  # ranks that try a build which fails for a reason that may affect only this rank


class RankResult(NamedTuple):
    """The report of a rank to the other ranks: an entry's key and the number of parts of its
    bytes in the store, or an error's text.
    """

    key: str = ""
    parts: int = 0
    error: str = ""
    in_source: bool = False  # the error is in the op's source

    @classmethod
    def parse(cls, text: bytes) -> "RankResult":
        """Read another rank's result, which is not trusted."""
        try:
            found: RankResult = typed(json.loads(text), cls)
            is_entry = KEY.fullmatch(found.key) and 0 <= found.parts <= _MAX_PARTS
            if found.error or is_entry:
                return found
        except (ValueError, TypeError, RecursionError):
            pass
        return cls(error="another rank sent an invalid result; do all ranks have the same opjit?")

    def dump(self) -> str:
        return json.dumps(self._asdict())


class RankTask:
    """A requested binary, and this rank's progress in getting its entry."""

    def __init__(self, wanted: BinaryRequest, entry: Entry | None, store: Store) -> None:
        self.wanted = wanted
        self.entry = entry
        self.store = store
        self.name = wanted.name  # the name of the request on all ranks
        has_compiler = any(way.toolchain is not None for way in wanted.ways)
        self.able = has_compiler and not is_on("OPJIT_OFFLINE")
        self.error: OpjitError | None = None  # why there is no entry
        self.failure: OpjitError | None = (
            None  # the error after which this rank is not able to build it
        )
        self.built = False  # by this rank
        self.claim = b""
        self.since = 0.0  # the claim when this rank last read it, and the time at which it changed by this rank's clock

    def __str__(self) -> str:
        return str(self.wanted)

    @property
    def done(self) -> bool:
        return self.entry is not None or self.error is not None

    def look(self) -> bool:
        """Look into the cache again, where another process or another node may have put the entry; returns whether it is there."""
        folder = self.wanted.folder(self.store)
        for each in (self.store.base, folder.parent, folder):
            with suppress(OSError):
                # NFS remembers a missing name for a minute, unless its folder is opened again.
                os.listdir(each)
        self.entry = self.wanted.find(self.store, warn=False)
        return self.entry is not None

    def build(self) -> None:
        try:
            self.entry = request.fetch_or_build(self.wanted, self.store)
            self.built = True
        except OpjitError as error:
            self.error = error

    def accept(self, content: bytes) -> None:
        """Keep an entry's bytes in the store or, if that fails, for this process.

        Raises EntryError if they belong to another entry, and OSError if the disk is full.
        """
        received = bundle.parse_bundle(content)
        described = manifest.parse(received.manifest)
        if not any(way.fits(described.document) for way in self.wanted.ways):
            raise EntryError("they belong to another entry")
        place = self.wanted.folder(self.store, described) / described.key
        target = self.wanted.inputs.op_target
        if self.wanted.must_store:
            self.entry = self.store.receive(received, place, target)
        else:
            self.entry = self.store.receive_or_keep(received, place, target, str(self))


class Job:
    """This rank's part in the job during one call; `show` shows a line of progress."""

    def __init__(self, jobstore: JobStore, rank: Rank, show: Callable[[str], None]) -> None:
        self.jobstore = jobstore
        self.rank = rank
        self.show = show
        self.name = f"rank-{rank.number}-on-{socket.gethostname()}"
        # 2,000 ranks send some 4,000 requests per second to the one server.
        self.poll_interval = max(0.02, rank.size * 1e-3)
        self.started = time.monotonic()
        self.shown = ""
        if jobstore.hosted:
            owner = os.getpid()
            # A forked child must not wait.
            atexit.register(lambda: self._wait_for_others() if os.getpid() == owner else None)

    def run(self, offers: list[RankTask], missing: list[RankTask]) -> None:
        """Publish the entries that other ranks may miss, and settle the missing entries."""
        # Each rank starts with a different entry, so that builders rarely compete for a claim.
        first = self.rank.number * len(missing) // self.rank.size
        order = missing[first:] + missing[:first]
        try:
            self.jobstore.add("arrived")
            for task in offers:
                assert task.entry is not None
                if self._claim(task):
                    self._publish(task, task.entry)
            for task in order:
                if not task.able:
                    self.jobstore.add(f"unable/{task}")
                elif self.jobstore.get(f"result/{task.name}") is None and self._claim(task):
                    self._build(task)
            for task in order:
                while not task.done:
                    self._wait(task, sum(not each.done for each in missing))
        finally:
            with suppress(StoreLost):
                self.jobstore.add("left")

    def _wait_for_others(self) -> None:
        """Keep rank 0, the store's host, from exiting while other ranks need the store."""
        end = time.monotonic() + HOST_TIMEOUT
        with (
            suppress(StoreLost),
            progress.status("waiting for the ranks that still need rank 0's store"),
        ):
            while (now := time.monotonic()) < end:
                left = self.jobstore.add("left", 0)
                arrived = self.jobstore.add("arrived", 0)
                late = (
                    arrived < self.rank.size
                    and not self.rank.one_node
                    and now - self.started < ARRIVAL_TIMEOUT
                )
                if left >= arrived and not late:
                    return
                time.sleep(max(0.05, self.poll_interval))

    def _claim(self, task: RankTask) -> bool:
        """Claim an entry, unless its claim has changed since this rank last read it."""
        return (
            self._read_claim(
                task, self.jobstore.compare_set(f"claim/{task.name}", task.claim, self.name)
            )
            == self.name
        )

    def _read_claim(self, task: RankTask, claim: bytes) -> str:
        if claim != task.claim:
            task.claim = claim
            task.since = time.monotonic()
        return claim.decode(errors="replace")

    def _build(self, task: RankTask) -> None:
        """Build an entry that this rank has claimed, and publish it or the error, or give up the claim."""
        task.build()
        if task.entry is not None:
            self._publish(task, task.entry)
            return
        error = task.error
        name = task.name
        in_source = isinstance(error, CompileError)
        if in_source or self.jobstore.add(f"failed/{name}") >= _TRIES:
            self.jobstore.set(
                f"result/{name}",
                RankResult(error=f"{error}\n(reported by {self.name})", in_source=in_source).dump(),
            )
        else:  # the cause may affect only this rank
            task.error, task.failure, task.able = None, error, False
            self.jobstore.compare_set(f"claim/{name}", self.name.encode(), "")
            self.jobstore.add(f"unable/{task}")

    def _publish(self, task: RankTask, entry: Entry) -> None:
        """Report an entry to the other ranks, and send its bytes."""
        parts = 0
        with suppress(OSError, EntryError):  # the entry was removed: ranks that want it build it
            content = bundle.of(entry.folder).dump()
            for start in range(0, len(content), _PART_BYTES):
                self.jobstore.set(
                    f"bytes/{entry.key}/{parts}", content[start : start + _PART_BYTES]
                )
                parts += 1
        result = RankResult(entry.key, parts).dump()
        for way in task.wanted.ways:  # the entry answers requests with and without a compiler
            self.jobstore.set(f"result/{way.key}", result)
            self.jobstore.set(f"result/{way.base}", result)

    def _wait(self, task: RankTask, left: int) -> None:
        """Check once for another rank's result.

        Then settle the entry, replace a builder that is too slow, or sleep.
        """
        result = self.jobstore.get(f"result/{task.name}")
        if result is not None:
            self._settle(task, RankResult.parse(result))
            return
        builder = self._read_claim(task, self.jobstore.get(f"claim/{task.name}") or b"")
        if (
            task.able
            and (not builder or time.monotonic() - task.since > CLAIM_TIMEOUT)
            and self._claim(task)
        ):
            self._build(task)
            return
        late = time.monotonic() - self.started > GIVE_UP_TIMEOUT
        if not task.able and (late or self.jobstore.add(f"unable/{task}", 0) >= self.rank.size):
            task.error = task.failure
            if task.error is None:
                task.build()  # fails with the reason why this rank cannot build it
            return
        who = re.sub(r"[^\w.-]", "?", builder[:80])
        text = f"waiting for {task}, {f'which {who} is building' if who else 'which no rank is building yet'}; {left} left"
        if text != self.shown:
            self.shown = text
            self.show(text)
        time.sleep(self.poll_interval)

    def _settle(self, task: RankTask, result: RankResult) -> None:
        """Use another rank's error or entry.

        One rank of each node fetches the bytes, and the other ranks find the entry in the cache.
        """
        if task.look():
            return
        if result.error:
            inputs = task.wanted.inputs
            kind = CompileError if result.in_source else BuildError
            task.error = kind(result.error, op=inputs.name, target=inputs.purpose)
            return
        if result.parts:
            self._fetch(task, result)
        if not task.done:  # after the release, because a build needs the same lock
            task.build()

    def _fetch(self, task: RankTask, result: RankResult) -> None:
        # This import takes 30 ms of a warm start of 8 ranks (tests/benchmarks/ranks.py).
        from opjit import lock

        with lock.held(result.key, lambda holder: self.show(f"waiting for {task}: {holder}")):
            if task.look():
                return
            try:
                task.accept(
                    b"".join(
                        self.jobstore.get(f"bytes/{result.key}/{number}") or b""
                        for number in range(result.parts)
                    )
                )
            except (EntryError, OSError) as error:
                warn_of_cache(
                    f"{task} is built here, because the bytes that another rank sent cannot be used: {error}"
                )
