"""Requests for many ops and targets at once.

    >>> pairs = batch.pairs(registry.all_ops(), batch.targets_of(["x86-64-v3", "sm_90"], store))
    >>> [str(wanted) for wanted in batch.requests(pairs, store) if wanted.find(store) is None]
    ['opjit::allreduce for cuda sm_90.cuda13']
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opjit import backends
from opjit.backends import Backend, targets
from opjit.backends.targets import Target
from opjit.declare.op import Op
from opjit.errors import BuildError, OpjitError
from opjit.recipe import toolchain
from opjit.recipe.headers import Scan
from opjit.store.store import Store
from opjit.wanted import OpBinary, refuse_other_host


def targets_of(archs: Sequence[str], store: Store) -> list[Target]:
    """Return the targets of archs, each once. Without archs, return this machine's, one for each kind of device. Raises UnknownArch if no
    backend, or no compiler on this machine, builds for one of them."""
    if not archs:
        return [targets.here(backend) for backend in backends.all_backends() if backend.available() is None]
    return [target_of(arch, store) for arch in dict.fromkeys(archs)]


def target_of(arch: str, store: Store, backend: Backend | None = None) -> Target:
    """Return the target of one arch, like `targets_of`; `backend` narrows the search."""
    target = toolchain.target_of(arch, store.notes, backend)
    refuse_other_host(target)
    return target


def pairs(ops: Iterable[Op], targets: Sequence[Target]) -> list[tuple[Op, Target]]:
    """Pair each op with each target for which it has a kernel, in the given order and without duplicates."""
    found = []
    for op in dict.fromkeys(ops):
        kernels = op.backends()
        found += [(op, target) for target in targets if target.backend.name in kernels]
    return found


def requests(pairs: Iterable[tuple[Op, Target]], store: Store, must_store: bool = False,
             failed: list[tuple[str, OpjitError]] | None = None) -> list[OpBinary]:
    """Return the requests of pairs of an op and a target. Shared headers and compilers are examined once. `failed` gets the names of pairs
    whose sources cannot be read or compiled, with the errors."""
    scan, compilers, found = Scan(), dict[str, list[dict[str, str]]](), list[OpBinary]()
    for op, target in pairs:
        name, runtime = f"{op.qualified} for {target}", target.runtime
        if target.backend.name not in compilers:
            compilers[target.backend.name] = toolchain.identities_of(target.backend, runtime, store.notes)
        try:
            found.append(OpBinary(op, target, op.recipe(target, compilers[target.backend.name], scan), must_store))
        except (OSError, OpjitError) as error:
            if failed is None:
                raise
            text = f"{name} was not built: {type(error).__name__}: {error}"
            failed.append((name, error if isinstance(error, OpjitError) else BuildError(text, op=op.qualified, target=str(target))))
    return found
