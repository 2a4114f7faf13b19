"""Requests for many ops and targets at once."""

from collections.abc import Iterable, Sequence

from opjit import backends
from opjit.backends.targets import Target
from opjit.declare.op_state import OpState
from opjit.errors import BadSetting, BuildError, Failures, OpjitError
from opjit.recipe import gpu_archs, toolchain
from opjit.store.store import Store
from opjit.wanted import OpRequest, here


def targets_of(archs: Sequence[str], store: Store, hosts: Sequence[str] = ()) -> list[Target]:
    """Return the targets of archs for each host CPU in `hosts`, without duplicates.

    Without archs, return this machine's targets, one for each kind of device.
    """
    if archs:
        return list(
            dict.fromkeys(
                gpu_archs.require_supported(
                    toolchain.target_of(arch, store.notes, None, host), store.notes
                )
                for arch in archs
                for host in hosts or (None,)
            )
        )
    if hosts:
        raise BadSetting(
            f"hosts are {', '.join(hosts)}, without architectures to build for; add --arch, for example sm_90, neoverse-v2 or x86-64-v3"
        )
    return [here(backend) for backend in backends.all_backends() if backend.available() is None]


def pairs(ops: Iterable[OpState], targets: Sequence[Target]) -> list[tuple[OpState, Target]]:
    """Pair each op with each target for which it has a kernel, in the given order and without duplicates."""
    found = []
    for op in dict.fromkeys(ops):
        kernels = op.backends()
        found += [(op, target) for target in targets if target.backend.name in kernels]
    return found


def requests(
    pairs: Iterable[tuple[OpState, Target]],
    store: Store,
    must_store: bool = False,
    failed: Failures | None = None,
) -> list[OpRequest]:
    """Return the requests of pairs, with the ops' variants.

    If the sources of an op cannot be read or compiled, `failed` gets the error.
    """
    compilers = dict[tuple[str, str], list[toolchain.ToolVersions]]()
    found = []
    for op, target in pairs:
        name = f"{op.qualified} for {target}"
        kind = (target.backend.name, target.host)
        if kind not in compilers:
            compilers[kind] = toolchain.identities_of(target, store.notes)
        labels = op.declaration.labels(target.backend)[1:]
        try:
            for each in (op, *(op.variant(target.backend, label) for label in labels)):
                recipe = each.declaration.recipe(target, compilers[kind])
                found.append(OpRequest(recipe, must_store, op=each))
        except (OSError, OpjitError) as error:
            if failed is None:
                raise
            if not isinstance(error, OpjitError):
                text = f"{name} was not built: {type(error).__name__}: {error}"
                error = BuildError(text, op=op.qualified, target=str(target))
            failed.append((name, error))
    return found
