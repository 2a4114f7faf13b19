"""An entry that a rank of a job wants: found in a cache, built by this rank, or taken from another one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from opjit import api, bundle, files, manifest
from opjit.environment import is_on
from opjit.errors import CacheWarning, EntryError, OpjitError
from opjit.op import Op
from opjit.plan import Survey, Wanted
from opjit.recipe import Recipe, base_key
from opjit.store import Entry, Store
from opjit.targets import Target

Make = Callable[[Recipe, Store], Entry]  # builds and publishes; see api.build_once


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
        return self.recipe.base

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
        if (self.recipe.key or described.key) != described.key or base_key(described.document) != self.any_compiler:
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
