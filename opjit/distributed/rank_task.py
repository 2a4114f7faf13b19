"""A rank's task, to get the entry of a wanted binary: from a cache, by a build, or from another rank. And what ranks report about it."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from opjit import errors, request
from opjit.environment import is_on
from opjit.errors import BuildError, EntryError, OpjitError
from opjit.store import bundle
from opjit.store import manifest as manifests
from opjit.store.entry import Entry
from opjit.store.store import Store
from opjit.wanted import Wanted

_MAX_PARTS = 1 << 12


class RankTask:
    """A wanted binary, and what this rank has done to get its entry.

    Attributes:
        entry: the verified entry, once it is there.
        error: why there is none; an error in the op's source is the same on every rank.
        origin: ``"found"`` in a cache, ``"built"`` by this rank, or ``"taken"`` from another rank.
        name: what ranks with the same request call it.
        able: whether this rank may build it.
        failure: why this rank failed to build it, if another rank might succeed.
        taken: whether another rank has claimed it.
        claim: the claim's value when this rank last read it; `changed` is when that value was new, by this rank's clock.
        checked: when this rank last read the claim.
    """

    def __init__(self, binary: Wanted, entry: Entry | None, store: Store) -> None:
        self.binary, self.entry, self.store = binary, entry, store
        self.name = binary.name
        self.able = binary.buildable and not is_on("OPJIT_OFFLINE")
        self.error: OpjitError | None = None
        self.failure: OpjitError | None = None
        self.origin = "found"
        self.taken = False
        self.claim = ""
        self.changed = self.checked = 0.0

    def __str__(self) -> str:
        return str(self.binary)

    @property
    def settled(self) -> bool:
        return self.entry is not None or self.error is not None

    def look(self) -> bool:
        """Look into the cache again, where another process or another node may have put the entry; returns whether it is there."""
        if self.entry is None:
            folder = self.binary.folder(self.store)
            for each in (self.store.base, folder.parent, folder):
                with suppress(OSError):
                    os.listdir(each)  # NFS remembers a missing name for a minute, unless its folder is opened again
            self.entry = self.binary.find(self.store, warn=False)
            self.origin = "taken"
        return self.entry is not None

    def build(self) -> None:
        """Fetch or build the entry as `opjit.get` does; an error is stored in `error`."""
        try:
            self.entry = request.obtain(self.binary, self.store)
            self.origin = "built"
        except OpjitError as error:
            self.error = error

    def accept(self, content: bytes) -> None:
        """Put an entry's bytes into the store or, if that cannot be written, into a folder that lasts as long as this process.

        Raises:
            EntryError: the bytes are not this entry's.
            OSError: there is no space for them.
        """
        received = bundle.parse(content)
        manifest = manifests.parse(received.manifest)
        if not self.binary.accepts(manifest):
            raise EntryError("they belong to another entry")
        place = self.binary.folder(self.store, manifest) / manifest.key
        if self.binary.must_store:
            self.entry = self.store.receive(received, place, self.binary.kind)
        else:
            self.entry = self.store.receive_or_keep(received, place, self.binary.kind, str(self))
        self.origin = "taken"


class RankReport(NamedTuple):
    """What a rank reports to the others: an entry's key and in how many parts the job's store has its bytes, or an error.

    Attributes:
        error: the error's fields in JSON: kind, message, facts, and the rank that had it.
    """

    key: str = ""
    parts: int = 0
    error: dict[str, Any] | None = None

    @classmethod
    def of_error(cls, error: OpjitError, rank_name: str) -> RankReport:
        """Return a report of an error that every rank would have."""
        facts = {name: str(value) for name, value in vars(error).items() if isinstance(value, (str, Path))}
        return cls(error={"kind": type(error).__name__, "message": str(error), "facts": facts, "rank": rank_name})

    @classmethod
    def parse(cls, text: bytes) -> RankReport:
        """Read another rank's report, which is not trusted."""
        try:
            fields = json.loads(text)
            if isinstance(fields, dict) and isinstance(fields.get("error"), dict):
                return cls(error=fields["error"])
            key, parts = fields["key"], fields["parts"]
            if re.fullmatch("[0-9a-f]{64}", key) and type(parts) is int and 0 <= parts <= _MAX_PARTS:
                return cls(key, parts)
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        return cls(error={"kind": "BuildError", "message": "another rank sent an invalid result; do all ranks have the same opjit?"})

    def dump(self) -> str:
        return json.dumps({"error": self.error} if self.error else {"key": self.key, "parts": self.parts})

    def to_error(self, rank_name: str) -> OpjitError | None:
        """Return the reported error, as this rank raises it. Only opjit's own classes are made, and only with text."""
        if self.error is None:
            return None
        kind = getattr(errors, str(self.error.get("kind")), None)
        if not (isinstance(kind, type) and issubclass(kind, OpjitError)):
            kind = BuildError
        facts: dict[str, Any] = {"op": "", "target": "", "command": None, "log": None} if issubclass(kind, BuildError) else {}
        reported = self.error.get("facts")
        facts |= {str(name): str(value) for name, value in (reported if isinstance(reported, dict) else {}).items()}
        if facts.get("log") is not None:
            facts["log"] = Path(facts["log"])
        reporter = self.error.get("rank")
        source = f"\n(reported by {reporter})" if reporter not in (None, rank_name) else ""
        return errors._unpickled(kind, (f"{self.error.get('message')}{source}",), facts)
