"""What a store shall hold: pairs of an op and a target, and which of them are not in it yet. Nothing is built or loaded here.

    >>> pairs = plan.pairs(catalog.all_ops(), plan.targets_of(["x86-64-v3", "sm_90"], store))
    >>> survey = plan.Survey(store)
    >>> [str(pair) for pair in pairs if survey.find(pair) is None]
    ['opjit::allreduce for cuda sm_90.cuda13']
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from opjit import api, backends, layers, targets, toolchain
from opjit.backends import Backend
from opjit.errors import NoKernel, UnknownArch
from opjit.headers import Scan
from opjit.op import Op
from opjit.recipe import Recipe
from opjit.store import Entry, Store
from opjit.targets import Target


class Wanted(NamedTuple):
    """An op, and a target that it has a kernel for."""

    op: Op
    target: Target

    def __str__(self) -> str:
        return f"{self.op.qualified} for {self.target}"


def targets_of(archs: Sequence[str], store: Store) -> list[Target]:
    """The targets of archs, each once; of no archs: this machine's, one for each device kind that is here.

    Args:
        archs: such as ``["x86-64-v3", "sm_90"]``, of any backends.
        store: its notes tell the CUDA toolkit's version.

    Raises:
        UnknownArch: no backend builds for one of them, or this machine's compilers do not.
    """
    if not archs:
        return [targets.here(backend) for backend in backends.all_backends() if backend.available() is None]
    return [target_of(arch, store) for arch in dict.fromkeys(archs)]


def target_of(arch: str, store: Store, backend: Backend | None = None) -> Target:
    """The target of one arch, as `targets_of` finds it; of a backend, if it is known."""
    target, here = targets.named(arch, backend), platform.machine()
    if target.backend.uses_nvcc:
        nvcc = toolchain.find_nvcc(store.notes)
        return targets.named(arch, target.backend, nvcc.version if nvcc else None)
    if target.backend.name == "cpu" and (arch == "aarch64") != (here == "aarch64"):
        raise UnknownArch(f"{arch} cannot be built here: gcc on this {here} machine compiles for {here} only; leave it out, and build for "
                          "it on such a machine")
    return target


def pairs(ops: Iterable[Op], targets: Sequence[Target]) -> list[Wanted]:
    """Each op with each target that it has a kernel for, in the order given; an op that comes twice is taken once."""
    found = []
    for op in dict.fromkeys(ops):
        kernels: dict[str, bool] = {}
        for target in targets:
            if target.backend.name not in kernels:
                kernels[target.backend.name] = _has_kernel(op, target.backend)
            if kernels[target.backend.name]:
                found.append(Wanted(op, target))
    return found


def _has_kernel(op: Op, backend: Backend) -> bool:
    try:
        op.source(backend)
    except NoKernel:
        return False
    return True


class Survey:
    """Looks for the binaries of many pairs at one moment: what they share, the headers and the compilers, is looked at once.

    A file that changes later is seen by whoever builds: that describes the op anew.

    Args:
        layers: a binary beside the op's source, or in a store that OPJIT_LAYERS names, will do; for a store that is to be complete
            by itself, only what is in that.
    """

    def __init__(self, store: Store, layers: bool = True) -> None:
        self._store = store
        self._layers = layers
        self._scan = Scan()
        self._compilers: dict[str, dict[str, str] | None] = {}

    def recipe(self, wanted: Wanted) -> Recipe:
        """What the op is built from for the target.

        Raises:
            NoKernel: its kernel is gone.
            OSError: a file of it cannot be read.
        """
        backend = wanted.target.backend
        if backend.name not in self._compilers:
            self._compilers[backend.name] = api.compilers(backend, self._store)
        return api.recipe_of(wanted.op, wanted.target, self._compilers[backend.name], self._scan)

    def find(self, wanted: Wanted) -> Entry | None:
        """The verified binary of a pair; None where there is none, and where nobody can say. A damaged one gets a CacheWarning."""
        try:
            return self.look(self.recipe(wanted))
        except (OSError, NoKernel):
            return None  # whoever builds it will say why it cannot be

    def look(self, recipe: Recipe) -> Entry | None:
        """The verified binary of a recipe."""
        return (layers.find(recipe) if self._layers else None) or self._store.find(recipe)
