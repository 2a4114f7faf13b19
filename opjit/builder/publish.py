"""Where a build publishes its entry: in the store or, if that fails, in a folder of this process.

    for attempt in attempts(...):
        with attempt as staged:
            attempt.publish(...)  # the entry made in staged/entry
    return attempt.entry
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from opjit import files, progress
from opjit.backends.targets import Target
from opjit.errors import BuildError, CacheWarning, CompileError, EntryError, UntrustedFolder
from opjit.store import prune, usage
from opjit.store.entry import Entry, verify
from opjit.store.manifest import Manifest
from opjit.store.store import Store, default_root


class Subject(NamedTuple):
    """A binary to build.

    Attributes:
        name: qualified name of an op, or name of a C++ extension.
        purpose: for messages: the target, or the versions of torch and Python.
        target: of an op; None for an extension.
        shelf: folder of the store for its entries.
        unread: names the inputs that cannot be read, so that the binary has no key; None if there are none.
        must_store: do not fall back to a folder of this process.
    """

    name: str
    purpose: str
    target: Target | None
    shelf: Path
    unread: str | None = None
    must_store: bool = False

    def __str__(self) -> str:
        return f"{self.name} for {self.purpose}"

    def fault(self, what: str, command: str | None = None) -> BuildError:
        """Make an error of its build."""
        return BuildError(f"{self} was not built: {what}", op=self.name, target=self.purpose, command=command)


def attempts(subject: Subject, store: Store) -> Iterator[Attempt]:
    """Yield attempts to build and publish: in the store, then, if the store fails, in a folder of this process. Raises BuildError if the
    binary must be stored, and the store failed."""
    usage.miss(store.base)
    reason: Exception | None = EntryError(f"{subject.unread}, so the binary has no key") if subject.unread else None
    if reason is None:
        try:
            attempt = Attempt(subject, store, store.stage())
        except (OSError, EntryError) as error:
            reason = error
        else:
            yield attempt
            reason = attempt.trouble
    if reason is not None:
        _refuse_or_warn(subject, store, reason)
        try:
            folder = files.until_exit()
        except OSError as error:
            raise _unpublishable(subject, reason, error) from error
        yield Attempt(subject, store, folder, reason)


class Attempt:
    """One attempt, as a context manager: its block makes an entry in the folder ``entry`` of a staging folder, and publishes it.

    Args:
        reason: why the store is not used; None for an attempt in the store.

    Attributes:
        base: folder for parts and logs: the store's, or the private one.
        entry: the published entry.
        trouble: the store's error; it ends the block, not the loop.
    """

    def __init__(self, subject: Subject, store: Store, staged: Path, reason: Exception | None = None) -> None:
        self._subject, self._store, self._staged, self._reason = subject, store, staged, reason
        self._started = time.perf_counter()
        self.base = store.base if reason is None else staged
        self.trouble: Exception | None = None
        self.entry: Entry

    def __enter__(self) -> Path:
        return self._staged

    def publish(self, described: Manifest) -> None:
        """Move the entry to its place. If another process published it first, take that entry."""
        usage.built(self._store.base, described.size)
        progress.step("publishing")
        made = self._staged / "entry"
        if self._reason is None:
            self.entry = self._store.put(made, self._subject.shelf / described.key, described, self._subject.target)
        else:
            place = self._staged / described.key
            os.rename(made, place)
            self.entry, _ = verify(place, self._subject.target)
        self.entry = replace(self.entry, origin="built")
        progress.log(f"built {self._subject} in {time.perf_counter() - self._started:.2f} s: {self.entry.folder}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if self._reason is not None:
            if isinstance(error, (OSError, EntryError)):
                raise _unpublishable(self._subject, self._reason, error) from error
            return False
        removed = not self._staged.is_dir()
        files.remove_tree(self._staged)
        if error is None:
            if self._store.root == default_root():  # other stores are never pruned
                prune.after_build(self._store, self.entry.folder)
            return False
        if isinstance(error, (OSError, EntryError)) or (isinstance(error, CompileError) and removed):
            self.trouble = error  # a removed folder makes the compilers fail
        return self.trouble is not None


def _refuse_or_warn(subject: Subject, store: Store, reason: Exception) -> None:
    if subject.must_store and subject.unread:
        raise subject.fault(f"{reason}; make it readable") from reason
    if subject.must_store:
        advice = "or name another store" if isinstance(reason, UntrustedFolder) else "make room there or name another store"
        raise subject.fault(f"the store {store.root} cannot hold it: {reason}; {advice}") from reason
    if isinstance(reason, UntrustedFolder):
        store.warn_unused(str(reason))
        return
    advice = "make it readable" if subject.unread else "set OPJIT_CACHE to a folder of your own"
    warnings.warn(CacheWarning(f"the cache cannot be used, so {subject.name} is built for this process only: {reason}; {advice}"),
                  stacklevel=3)


def _unpublishable(subject: Subject, reason: Exception, error: Exception) -> BuildError:
    return subject.fault(f"the cache cannot be used ({reason}), nor a temporary folder ({error}); set OPJIT_CACHE or TMPDIR to a folder "
                         "that you can write")
