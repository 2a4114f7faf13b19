"""A requested binary: its inputs, its paths in caches, and its build."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from opjit import backends
from opjit.backends import Backend, targets
from opjit.backends.targets import Target
from opjit.errors import CompileError
from opjit.recipe import gpu_archs, toolchain
from opjit.recipe.build_inputs import BuildInputs
from opjit.recipe.recipe import Recipe
from opjit.store import layers
from opjit.store.entry import Entry
from opjit.store.manifest import Manifest
from opjit.store.store import Store, default_store

if TYPE_CHECKING:
    from opjit.declare.op_state import OpState

W = TypeVar("W", bound="BinaryRequest")


@dataclass(frozen=True)
class BinaryRequest:
    """A requested binary of an op, a C++ extension or a shared library. str() names it in messages.

    Attributes:
        must_store: whether it must end up in the store. A layer's entry or a private folder does not count then.
        by_torch: whether torch's builder makes it.
    """

    inputs: BuildInputs
    must_store: bool = False
    by_torch: ClassVar[bool] = True

    def __str__(self) -> str:
        return str(self.inputs)

    @property
    def ways(self) -> Sequence[BuildInputs]:
        """Inputs with equally good binaries, the preferred first."""
        return self.inputs.ways

    @property
    def name(self) -> str:
        """The entry's name among processes with the same request: the key of all that is known before a build."""
        return self.ways[0].key

    def folder(self, store: Store, manifest: Manifest | None = None) -> Path:
        """Return the folder of its entries, or of the one with a manifest."""
        document = self.ways[0].request if manifest is None else manifest.document
        return store.base / self.inputs.place_of(document)

    def find(self, store: Store, warn: bool = True) -> Entry | None:
        """Return the verified entry in a layer or the store, or None."""
        return layers.find(self.ways, store, not self.must_store, warn)

    def in_store(self: W) -> W:
        """Return the request for a binary in the store: a layer's entry or a private folder does not count."""
        return replace(self, must_store=True)

    def now(self: W, store: Store) -> W:
        """Return the request for the sources as they are now."""
        return replace(self, inputs=self.inputs.now())

    def fetch(self, store: Store) -> Entry | None:
        """Fetch the entry from the remote into the store, or return None."""
        return self.fetch_ways(self.ways, store)

    def fetch_ways(self, ways: Sequence[BuildInputs], store: Store) -> Entry | None:
        """Fetch an entry of ways with one base key."""
        if not os.environ.get("OPJIT_REMOTE"):
            return None
        from opjit.share import remote

        return remote.fetch(ways, store)

    def build(self, store: Store) -> Entry:
        """Build it and publish the entry."""
        raise NotImplementedError


@dataclass(frozen=True)
class RecipeRequest(BinaryRequest):
    """A requested library of an op, which this process may lack."""

    inputs: Recipe

    def fetch(self, store: Store) -> Entry | None:
        return None if self.inputs.flags.debug else super().fetch(store)

    def build(self, store: Store) -> Entry:
        from opjit.builder import build

        return build.build(self.inputs, store, self.must_store)


@dataclass(frozen=True)
class OpRequest(RecipeRequest):
    """A requested library of an op for a target."""

    op: OpState = field(kw_only=True)

    @property
    def target(self) -> Target:
        return self.inputs.target

    def now(self, store: Store) -> OpRequest:
        return replace(self, inputs=describe(self.op, self.target, store))

    def build(self, store: Store) -> Entry:
        self.op.write_code()
        wanted = self.now(store) if self.op.declaration.code else self
        try:
            return super(OpRequest, wanted).build(store)
        except CompileError as error:
            code = self.op.declaration.code
            if code is not None:
                error.args = (code.in_program(str(error), self.op.schema.name),)
            self.op.failed[self.target.backend.name] = self.name, error
            raise


def of_op(op: OpState, target: Target, store: Store) -> OpRequest:
    """Return the request for an op's library for a target, from its sources and the compilers as they are now."""
    return OpRequest(describe(op, target, store), op=op)


def describe(op: OpState, target: Target, store: Store) -> Recipe:
    """Return an op's recipe for a target, from its sources and the compilers as they are now."""
    return op.declaration.recipe(target, toolchain.identities_of(target, store.notes))


def here(backend: Backend) -> Target:
    """Return the target of kernels for this process. Raises DeviceUnavailable if it cannot use such a device."""
    return gpu_archs.served(targets.here(backend), default_store().notes)


def target_of(device: object, arch: str | None) -> Target:
    """Return the target of an arch or, without one, of this machine's device of that kind."""
    if arch is None:
        return here(backends.for_device(targets.device_type(device)))
    backend = None if device is None else backends.for_device(targets.device_type(device))
    notes = default_store().notes
    return gpu_archs.require_supported(toolchain.target_of(arch, notes, backend), notes)
