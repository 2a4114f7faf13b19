"""The choice of an op's variant: measured once for a device and for tensors of about the same size,
and kept in the store.

    <root>/v2/tuned/<SHA-256>   JSON: the chosen variant, and its seconds. The name is the SHA-256 of the key of the first variant's binary,
                                the names of all variants, the device's model, and the bucket of sizes

A record is read like any file of a cache, from the read-only caches first. A record is ignored if
it does not name a variant of the op. Nothing is measured while a CUDA graph is captured: the
recorded choice runs or, without a record, the first variant.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from opjit import backends, batch, files, loader, processes, progress, request
from opjit.backends import Backend, cpu
from opjit.declare.op_state import OpState
from opjit.environment import is_on
from opjit.errors import EntryError, OpjitError
from opjit.measure.plan import Arguments, ratio
from opjit.measure.timing import measure, plan_of, wait
from opjit.recipe.recipe import Recipe
from opjit.store import layers
from opjit.store.store import TUNED, Store, default_store
from opjit.tensors import tensors_of
from opjit.typed_json import typed
from opjit.wanted import RecipeRequest, here

_FINALISTS = 16  # variants that are measured at length
_NEAR = 1.3  # of the best time at a first look, up to which a variant is one
_SLOW = 1e-3  # seconds of a call above which a variant that is four times slower than the best is dropped
# With fewer processes or builds, importing torch in each costs more than Python's lock.
_PROCESSES = 4
_BUILDS = 64
Candidates = dict[str, Callable[..., Any]]  # calls, by the label of the variant that they run


class Choice(NamedTuple):
    """A variant that runs, and the seconds that a call took when it was measured."""

    variant: str
    seconds: float


def kernel_for_call(
    op: OpState, backend: Backend, number: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """Return the kernel of the variant with a number or, without a number, of the variant for a
    call's tensors, which later calls with tensors of about the same size also run.
    """
    request.ready(op, backend)
    with op.lock:
        loaded = op.loaded[backend.name]
        labels = op.declaration.labels(backend)
        if number is not None:
            return _kernel_of(op, backend, labels[number])
        bucket = loaded.registered.opjit_force_variant(None)
        found = loaded.kernel
        if labels and is_on("OPJIT_TUNE", unset=True):
            try:
                choice = measure_or_read(op, backend, bucket, (args, kwargs))
                if choice is None:
                    return found  # for this call alone
                found = _kernel_of(op, backend, choice.variant)
            except (OpjitError, OSError) as error:
                progress.logger().warning(
                    f"{op.qualified} runs its first variant, because the variants cannot be "
                    f"built: {error}"
                )
        loaded.registered.opjit_set_variant(bucket, found)
        return found


def tune(
    op: OpState, backend: Backend, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Choice | None:
    """Measure an op's variants with a call's arguments, and record the choice for sizes like these.

    Returns None if nothing is measured.
    """
    request.ready(op, backend)
    with op.lock, torch.inference_mode():
        loaded = op.loaded[backend.name]
        loaded.registered.opjit_enable_variants()
        try:
            _call(
                loaded.registered.opjit_force_variant, loaded.kernel, op.overload, *args, **kwargs
            )
        finally:  # the call has set its bucket
            bucket = loaded.registered.opjit_force_variant(None)
        return measure_or_read(op, backend, bucket, (args, kwargs), again=True)


def measure_or_read(
    op: OpState, backend: Backend, bucket: int, inputs: Arguments, again: bool = False
) -> Choice | None:
    """Return the recorded choice for a bucket of sizes unless `again`, or measure all variants that can be built, with a call's inputs.
    Returns None where nothing can be measured. The caller holds the op's lock."""
    store = default_store()
    labels = op.declaration.labels(backend)
    tensors = tensors_of(inputs)
    index = (tensors[0].device.index or 0) if tensors else 0
    clock = backends.clock_of(backend.name)
    model = clock.model(index) if clock else ""  # the choice depends on it
    if backend.device_type == "cpu":
        model = cpu.identity()
    identity = json.dumps([op.loaded[backend.name].key, labels, model, f"{bucket:016x}"])
    name = files.sha256(identity)
    found = None if again else _read_choice(name, labels, store)
    if found is not None or (clock and torch.cuda.is_current_stream_capturing()):
        return found
    from opjit import lock

    with (
        progress.status(f"tuning {op.qualified}") as say,
        lock.held(name, lambda holder: say(f"waiting for {op.qualified}: {holder}")),
    ):
        if not again:  # another process may have measured during the wait
            found = _read_choice(name, labels, store)
        if found is None:
            with torch.cuda.device(index if clock else -1):
                found = _measured(op, backend, inputs, store)
            if found is not None:
                files.write_note(store.base / TUNED / name, json.dumps(found._asdict()))
    return found


def _read_choice(name: str, labels: list[str], store: Store) -> Choice | None:
    """Return a recorded choice among variants of these names."""
    for each in (*map(Store, layers.named()), store):
        with suppress(OSError, EntryError, ValueError, TypeError, RecursionError):
            if each.trusted(each.base / TUNED):
                fields = json.loads(files.read(each.base / TUNED / name, 1 << 20))
                choice: Choice = typed(fields, Choice)
                if choice.variant in labels:
                    return choice
    return None


def _measured(op: OpState, backend: Backend, inputs: Arguments, store: Store) -> Choice | None:
    """Measure with the inputs of a call; returns None for a call that the first variant refuses."""
    loaded = op.loaded[backend.name]
    if op.schema.mutates or op.schema.draws:  # the tensors and generators of the call do not change
        inputs = tree_map(_private_copy, inputs)
    on_gpu = backends.clock_of(backend.name) is not None
    drawing = torch.random.fork_rng(
        [torch.cuda.current_device()] if on_gpu else [], enabled=op.schema.draws
    )
    try:
        with torch.inference_mode(), drawing:
            if not _running(op, backend, {"": loaded.kernel}, inputs):
                return None
            _build_variants(op, backend, store)
            labels = op.declaration.labels(backend)
            kernels = {each: loaded.variants[each] for each in labels if each in loaded.variants}
            candidates = _running(op, backend, kernels, inputs)
            return _best(candidates, inputs, backend.name)
    finally:
        loaded.registered.opjit_force_variant(None)


def _private_copy(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.clone_state()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _kernel_of(op: OpState, backend: Backend, label: str) -> int:
    """Return the kernel of a variant, which is opened or built."""
    known = op.loaded[backend.name].variants
    if label not in known:
        target = here(backend)
        entry = request.entry(op.variant(backend, label), target)
        libraries = op.declaration.libraries(target)
        known[label] = loader.open_kernel(entry, op.qualified, libraries)
    return known[label]


def _build_variants(op: OpState, backend: Backend, store: Store) -> None:
    """Build the variants that are missing, side by side, and open all. One that cannot be built is left out."""
    from opjit.builder import budget

    op.write_code()
    target = here(backend)
    known = op.loaded[backend.name].variants
    failed = []
    wanted = dict(
        zip(op.declaration.labels(backend), batch.requests([(op, target)], store), strict=True)
    )
    job = budget.NVCC_JOB if backend.uses_nvcc else budget.C_JOB
    size = min(budget.jobs(job), len(wanted))
    missing = [each.inputs for each in wanted.values() if each.find(store, warn=False) is None]
    if size >= _PROCESSES and len(missing) >= _BUILDS and not is_on("OPJIT_OFFLINE"):
        _build_elsewhere(missing, store, size)

    libraries = op.declaration.libraries(target)
    with processes.pool(size) as pool:
        running = {
            label: pool.submit(request.obtain, each, store) for label, each in wanted.items()
        }
        for label, build in running.items():
            try:
                entry = build.result()
            except OpjitError as error:
                failed.append(error)
            else:
                known[label] = loader.open_kernel(entry, op.qualified, libraries)
    if failed:
        progress.logger().warning(
            f"{len(failed)} of {len(wanted)} variants of {op.qualified} are left out: {failed[0]}"
        )


def _build_elsewhere(recipes: Sequence[Recipe], store: Store, size: int) -> None:
    """Build recipes in `size` processes, with what they cannot build or store left to threads."""
    parts = [recipes[start::size] for start in range(size)]
    build = partial(processes.call_elsewhere, _build_recipes, store)
    try:
        processes.in_parallel(build, parts, size)
    except Exception as error:  # a process was killed, or lacks the class of the backend
        progress.log(f"threads build variants, because a process failed: {error}")


def _build_recipes(store: Store, recipes: Sequence[Recipe]) -> None:
    for recipe in recipes:
        with suppress(OSError, OpjitError):
            request.fetch_or_build(RecipeRequest(recipe, must_store=True), store)


def _running(
    op: OpState, backend: Backend, kernels: Mapping[str, int], inputs: Arguments
) -> Candidates:
    """Return calls of the variants that run, without the variants that are far slower in a first
    call.
    """
    force = op.loaded[backend.name].registered.opjit_force_variant
    seconds = dict[str, float]()
    candidates = {
        label: partial(_call, force, each, op.overload) for label, each in kernels.items()
    }
    for label, call in candidates.items():
        with suppress(
            RuntimeError
        ):  # for example, the variant needs more shared memory than this device has
            for _ in range(4):  # the quickest counts, because a busy machine may delay any of them
                started = time.perf_counter()
                call(*inputs[0], **inputs[1])
                wait(backend.name)
                seconds[label] = min(time.perf_counter() - started, seconds.get(label, inf))
    limit = max(_SLOW, 4 * min(seconds.values(), default=0.0))
    return {label: candidates[label] for label, each in seconds.items() if each <= limit}


def _call(
    force: Callable[[int], int],
    kernel: int,
    overload: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    force(kernel)
    return overload(*args, **kwargs)


def _best(candidates: Candidates, inputs: Arguments, device: str) -> Choice:
    """Look at all variants in small groups, each next to the first one, and measure the nearest to the best at length."""
    plan = plan_of({}, inputs, device)
    first, *rest = candidates
    ratios = {first: 1.0}
    for start in range(0, len(rest), _FINALISTS):
        labels = [first, *rest[start : start + _FINALISTS]]
        group = {label: candidates[label] for label in labels}
        found = measure(replace(plan, sides=group, rounds=3, seconds=0.002))
        for label in labels:
            ratios[label], *_ = ratio(found[label], found[first])
    limit = _NEAR * min(ratios.values())
    near = [label for label in sorted(ratios, key=ratios.__getitem__) if ratios[label] <= limit]
    finalists = {label: candidates[label] for label in near[:_FINALISTS]}
    found = measure(replace(plan, sides=finalists, seconds=0.01))
    best = min(finalists, key=lambda label: found[label].median)
    return Choice(best, found[best].median)
