"""A requested binary: its inputs, its paths in caches, and its build."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from opjit.errors import BuildError, CompileError, NotCached, OpjitError
from opjit.recipe import gpu_archs, toolchain
from opjit.store import layers
from opjit.store.entry import Entry
from opjit.store.manifest import Manifest
from opjit.store.store import Store, default_root

if TYPE_CHECKING:
    from opjit.backends import Backend
    from opjit.backends.targets import Target
    from opjit.declare.op_state import OpState
    from opjit.recipe.recipe import Recipe

W = TypeVar("W", bound="Wanted")


class Wanted(Protocol):
    """A requested binary of an op, a C++ extension or a shared library. str() names it in messages."""

    @property
    def must_store(self) -> bool:
        """Whether it must end up in the store; a layer's entry or a private folder does not count then."""

    @property
    def lock(self) -> str:
        """The name of its builder's lock."""

    @property
    def by_torch(self) -> bool:
        """Whether torch's builder makes it."""

    def find(self, store: Store, warn: bool = True, hashed: bool = True) -> Entry | None:
        """Return the verified entry in a layer or the store, or None.

        Without `hashed`, only its presence is checked, and it cannot be loaded.
        """

    def miss(self, store: Store) -> str:
        """Return the reason why there is no entry."""

    def refusal(self, text: str) -> OpjitError:
        """Make the error for a binary that must not be built."""

    def fault(self, text: str) -> BuildError:
        """Make the error for a build that failed."""

    def in_store(self: W) -> W:
        """Return the request for a binary in the store: a layer's entry or a private folder does not count."""

    def now(self: W, store: Store) -> W:
        """Return the request for the sources as they are now."""

    def fetch(self, store: Store) -> Entry | None:
        """Fetch the entry from the remote into the store, or return None."""

    def build(self, store: Store) -> Entry:
        """Build it and publish the entry."""

    # Used by the ranks of a job, which build binaries for each other; see opjit.distributed.

    @property
    def name(self) -> str:
        """The entry's name among the ranks with the same request: the key of all that is known before a build."""

    @property
    def buildable(self) -> bool:
        """Whether a compiler is here."""

    @property
    def kind(self) -> Target | None:
        """The target of an op; None for another binary."""

    def folder(self, store: Store, manifest: Manifest | None = None) -> Path:
        """Return the folder of its entries, or of the one with a manifest."""

    def names(self, entry: Entry) -> set[str]:
        """Return the names of the requests that an entry answers."""

    def accepts(self, manifest: Manifest) -> bool:
        """Return whether an entry with this manifest answers the request."""


class OpBinary(NamedTuple):
    op: OpState
    target: Target
    recipe: Recipe
    must_store: bool = False

    def __str__(self) -> str:
        return str(self.recipe)

    @property
    def lock(self) -> str:
        return self.recipe.key or self.op.qualified.replace("::", ".")

    @property
    def name(self) -> str:
        return self.recipe.key or self.recipe.base

    @property
    def buildable(self) -> bool:
        return self.recipe.key is not None

    @property
    def kind(self) -> Target:
        return self.target

    def folder(self, store: Store, manifest: Manifest | None = None) -> Path:
        document = self.recipe.document() if manifest is None else manifest.document
        return store.folder(self.op.qualified, self.target, document)

    def names(self, entry: Entry) -> set[str]:
        return {*self.recipe.keys, self.recipe.base}

    def accepts(self, manifest: Manifest) -> bool:
        return self.recipe.fits(manifest.document)

    @property
    def by_torch(self) -> bool:
        return True

    def find(self, store: Store, warn: bool = True, hashed: bool = True) -> Entry | None:
        return (None if self.must_store else layers.find(self.recipe, hashed)) or store.find(
            self.recipe, warn, hashed
        )

    def miss(self, store: Store) -> str:
        from opjit import why

        return why.compare(self.recipe, store).reason

    def refusal(self, text: str) -> OpjitError:
        return NotCached(text, op=self.op.qualified, target=str(self.target))

    def fault(self, text: str) -> BuildError:
        return BuildError(text, op=self.op.qualified, target=str(self.target))

    def in_store(self) -> OpBinary:
        return self._replace(must_store=True)

    def now(self, store: Store) -> OpBinary:
        return self._replace(recipe=describe(self.op, self.target, store))

    def fetch(self, store: Store) -> Entry | None:
        if self.recipe.flags.debug or not os.environ.get("OPJIT_REMOTE"):
            return None
        from opjit.share import remote

        return remote.fetch(remote.query_for(self.recipe), store)

    def build(self, store: Store) -> Entry:
        from opjit.builder import build

        self.op.write_code()
        try:
            return build.build(
                self.now(store).recipe if self.op.declaration.code else self.recipe,
                store,
                self.must_store,
            )
        except CompileError as error:
            self.op.failed[self.target.backend.name] = self.name, error
            raise


def describe(op: OpState, target: Target, store: Store) -> Recipe:
    """Return an op's recipe for a target, from its sources and the compilers as they are now."""
    return op.declaration.recipe(target, toolchain.identities_of(target, store.notes))


def here(backend: Backend) -> Target:
    """Return the target of kernels for this process. Raises DeviceUnavailable if it cannot use such a device."""
    from opjit.backends import targets

    return gpu_archs.served(targets.here(backend), Store(default_root()).notes)


def target_of(device: object, arch: str | None) -> Target:
    """Return the target of an arch or, without one, of this machine's device of that kind."""
    from opjit import backends
    from opjit.backends import targets

    if arch is None:
        return here(backends.for_device(targets.device_type(device)))
    backend = None if device is None else backends.for_device(targets.device_type(device))
    notes = Store(default_root()).notes
    return gpu_archs.served(toolchain.target_of(arch, notes, backend), notes)
