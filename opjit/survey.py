"""Pairs of an op and a target, and which of them a store lacks. Builds and loads nothing.

    >>> pairs = survey.pairs(catalog.all_ops(), survey.targets_of(["x86-64-v3", "sm_90"], store))
    >>> known = survey.Survey(store)
    >>> [str(pair) for pair in pairs if known.find(pair) is None]
    ['opjit::allreduce for cuda sm_90.cuda13']
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from opjit import backends
from opjit.backends import Backend, targets
from opjit.backends.targets import Target
from opjit.declare.op import Op
from opjit.errors import NoKernel, UnknownArch
from opjit.recipe import toolchain
from opjit.recipe.headers import Scan
from opjit.recipe.recipe import Recipe
from opjit.store import layers
from opjit.store.entry import Entry
from opjit.store.store import Store


class Pair(NamedTuple):
    """An op and a target for which it has a kernel."""

    op: Op
    target: Target

    def __str__(self) -> str:
        return f"{self.op.qualified} for {self.target}"


def targets_of(archs: Sequence[str], store: Store) -> list[Target]:
    """Return the targets of archs, each once. Without archs, return this machine's, one for each kind of device. Raises UnknownArch if no
    backend, or no compiler on this machine, builds for one of them.

    Args:
        archs: such as ``["x86-64-v3", "sm_90"]``.
        store: has the notes on the CUDA toolkit.
    """
    if not archs:
        return [targets.here(backend) for backend in backends.all_backends() if backend.available() is None]
    return [target_of(arch, store) for arch in dict.fromkeys(archs)]


def target_of(arch: str, store: Store, backend: Backend | None = None) -> Target:
    """Return the target of one arch, like `targets_of`; `backend` narrows the search."""
    target, here = toolchain.target_of(arch, store.notes, backend), platform.machine()
    if target.backend.name == "cpu" and (arch == "aarch64") != (here == "aarch64"):
        raise UnknownArch(f"{arch} cannot be built here: gcc on this {here} machine compiles for {here} only; leave it out, and build for "
                          "it on a machine of that kind")
    return target


def pairs(ops: Iterable[Op], targets: Sequence[Target]) -> list[Pair]:
    """Pair each op with each target for which it has a kernel, in the given order and without duplicates."""
    found = []
    for op in dict.fromkeys(ops):
        kernels = op.backends()
        found += [Pair(op, target) for target in targets if target.backend.name in kernels]
    return found


class Survey:
    """Looks up the binaries of many pairs at one moment. Shared headers and compilers are examined once.

    A build describes its op anew, so it sees files that change later.

    Args:
        layers: accept binaries beside an op's source and in OPJIT_LAYERS; False for a store that must be complete without them.
    """

    def __init__(self, store: Store, layers: bool = True) -> None:
        self._store = store
        self._layers = layers
        self._scan = Scan()
        self._compilers: dict[str, list[dict[str, str]]] = {}

    def recipe(self, pair: Pair) -> Recipe:
        """Return a pair's recipe. Raises NoKernel if the kernel was removed, OSError if a file cannot be read."""
        backend = pair.target.backend
        if backend.name not in self._compilers:
            self._compilers[backend.name] = toolchain.identities_of(backend, pair.target.runtime, self._store.notes)
        return pair.op.recipe(pair.target, self._compilers[backend.name], self._scan)

    def find(self, pair: Pair) -> Entry | None:
        """Return the verified binary of a pair; None if there is none or a source cannot be read. Warns of damaged ones."""
        try:
            return self.look(self.recipe(pair))
        except (OSError, NoKernel):
            return None  # the build will report the error

    def look(self, recipe: Recipe) -> Entry | None:
        """Return the verified binary of a recipe, or None."""
        return (layers.find(recipe) if self._layers else None) or self._store.find(recipe)
