"""``opjit precompile``: build binaries ahead of requests, also for archs that this machine does not have.

One process plans, and finds a thousand existing entries in a few hundred milliseconds; several processes build. Each build is an
ordinary one: its own folder, the key's lock, one rename. If the command dies, finished builds are kept; two commands share the work.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple, TextIO

from opjit import distributed, files, progress, request
from opjit.ahead.plan import Plan, plan_ops, plan_recorded
from opjit.distributed import ranks
from opjit.errors import BadSetting, BuildError, CacheWarning, CompileWarning, OpjitError, PrecompileError, one_string
from opjit.progress import Display, logger
from opjit.store import inventory
from opjit.store.store import Store
from opjit.wanted import Wanted

if TYPE_CHECKING:
    from opjit.builder.workers import Event


class Report(NamedTuple):
    """What precompile did.

    Attributes:
        built: the binaries of ops and of C++ extensions that it built. An op's has the attributes `op` and `target`.
        there: those that a cache already had.
        skipped: the number of pairs of an op and a target without a kernel.
        failed: the name of each that could not be built, with the error.
        seconds: how long it took.
    """

    built: list[Wanted]
    there: list[Wanted]
    skipped: int
    failed: list[tuple[str, OpjitError]]
    seconds: float

    def __str__(self) -> str:
        return (f"{len(self.built)} built, {len(self.there)} already there, {self.skipped} skipped, {len(self.failed)} failed, "
                f"{self.seconds:.2f} s")


class _Built(NamedTuple):
    """A worker's report: whether it built the binary, the error if it failed, and the warnings."""

    built: bool
    error: OpjitError | None
    warnings: Sequence[tuple[Warning, str, int]] = ()  # with their places


def precompile(ops: Iterable[str | os.PathLike[str]] | None = None, archs: Sequence[str] = (), *, jobs: int | None = None,
               store: str | os.PathLike[str] | None = None, recorded: str | os.PathLike[str] | None = None,
               extensions: bool = False) -> Report:
    """Build ops ahead of requests, several at once. This needs no GPU, and entries that exist cost almost nothing.

    Args:
        ops: names or folders of ops; None is every op that is declared or can be found.
        archs: such as ``["x86-64-v3", "sm_90"]``; empty is this machine's. Each op is built for the archs that it has a kernel for.
        jobs: builds at once; None is OPJIT_JOBS, else what the free CPUs and memory allow.
        store: the root of a store to fill instead of the cache, such as a folder in an image that OPJIT_LAYERS will name. Everyone may
            read its entries.
        recorded: a list from ``opjit record``, instead of `ops`. Nothing that only the list names is run.
        extensions: also build the list's C++ extensions, for the archs that they were recorded for. The list must be trusted then: flags
            and static initialisers can run any code.

    Returns:
        The binaries that were built, those that existed, and the number of pairs of an op and a target without a kernel.

    Raises:
        UnknownOp, DeclarationError, UnknownArch, NoKernel, RecordError: nothing was built.
        PrecompileError: some builds failed; all others are done.

    Example:
        >>> print(opjit.precompile(["allreduce"], ["x86-64-v3", "x86-64-v4"]))  # sm_90, too, where a compiler for CUDA is
        2 built, 0 already there, 0 skipped, 0 failed, … s
    """
    if ops is not None and recorded is not None:
        raise OpjitError("opjit.precompile takes ops or recorded, not both")
    for parameter, value in (("ops", ops), ("archs", archs)):
        if isinstance(value, str):
            raise BadSetting(one_string("opjit.precompile", parameter, value))
    plan = plan_ops(ops, archs, store) if recorded is None else plan_recorded(recorded, archs, store, extensions)
    for remark in plan.remarks:
        logger.warning(remark)
    report = build_plan(plan, jobs, sys.stderr)
    if report.failed:
        raise PrecompileError(f"{report}\n" + "\n".join(error_texts(report.failed)), report.failed)
    return report


def ready(recorded: str | os.PathLike[str], archs: Sequence[str] = (), *, store: str | os.PathLike[str] | None = None,
          extensions: bool = False) -> int:
    """Prove, before a program serves, that it will build nothing: every entry of a list is there.

    Args:
        recorded: the list from ``opjit record`` with which ``opjit precompile --from`` has filled a cache or a layer.
        archs, store, extensions: as `opjit.precompile` had them. Without `store`, the cache and OPJIT_LAYERS are searched.

    Returns:
        The number of entries.

    Raises:
        PrecompileError: the message names what is missing, and what has changed since it was built.
        RecordError: the list cannot be read.

    Example:
        >>> print(opjit.precompile(recorded="ops.json"))
        1 built, 0 already there, 0 skipped, 0 failed, … s
        >>> opjit.ready("ops.json")
        1
    """
    plan = plan_recorded(recorded, archs, store, extensions)
    missing = [(str(wanted), OpjitError(wanted.miss(plan.store))) for wanted in plan.wanted if wanted.find(plan.store) is None]
    failed = [*plan.failed, *missing]
    if failed:
        raise PrecompileError(f"{os.fspath(recorded)} is not ready; run `opjit precompile --from {os.fspath(recorded)}` with the same "
                              "options, and see:\n" + "\n".join(error_texts(failed)), failed)
    return len(plan.wanted)


def build_plan(plan: Plan, jobs: int | None = None, stream: TextIO | None = None, write: Callable[[str], object] = logger.info) -> Report:
    """Carry out a plan. A rank of a job (srun, mpirun, torchrun) shares the work with the other ranks; see `distributed.share`.

    Args:
        stream, write: show builds in place on this stream if it is a terminal, else write a line for each.
    """
    started = time.perf_counter()
    rank = ranks.current()
    report = Report([], [], plan.skipped, list(plan.failed), 0.0)
    try:
        if rank is not None and rank.needs_store:
            _share(plan, jobs, report)
        else:
            _build_missing(plan, jobs, report, stream, write)
    finally:
        if plan.shared:
            _make_readable(plan.store)
    return report._replace(seconds=time.perf_counter() - started)


def _share(plan: Plan, jobs: int | None, report: Report) -> None:
    """Build together with the job's other ranks, one build at a time in this process."""
    tasks = distributed.share(plan.wanted, plan.store, offer=False, jobs=jobs, build_into_store=True)
    for wanted, task in zip(plan.wanted, tasks, strict=True):
        _add(wanted, _Built(task.origin == "built", task.error), report, set())


def _make_readable(store: Store) -> None:
    """Open the store to all users of the image or the shared folder: opjit makes folders that only their owner can read."""
    for item in inventory.scan(store):
        try:
            files.let_read(item.folder, store.base)
        except OSError as error:
            warnings.warn(CacheWarning(f"others may not be able to read {item.folder}: {error}"), stacklevel=4)


def _build_missing(plan: Plan, jobs: int | None, report: Report, stream: TextIO | None, write: Callable[[str], object]) -> None:
    """Build the missing binaries in worker processes, and add the results to the report."""
    missing = list[Wanted]()
    for wanted in plan.wanted:
        (missing if wanted.find(plan.store) is None else report.there).append(wanted)
    if not missing:
        return
    from opjit.builder import budget, workers

    size = min(len(missing), budget.jobs(budget.NVCC_JOB if any(wanted.large for wanted in missing) else budget.C_JOB, jobs))
    if any(wanted.by_torch for wanted in missing):
        request.import_builder()  # once, before the workers are forked
    shown: set[tuple[str, str, int]] = set()
    order = sorted(range(len(missing)), key=lambda number: not missing[number].large)  # the long ones first, to finish together
    with (progress.display(stream, write, len(missing)) as display,
          closing(workers.run(order, lambda number, say: _build_one(missing[number], plan.store, say), size)) as events):
        for event in events:
            if event is not None:
                _take(event, missing[event.number], report, shown, display)
            display.tick()


def _take(event: Event, wanted: Wanted, report: Report, shown: set[tuple[str, str, int]], display: Display) -> None:
    """Add an event to the report and the display."""
    if event.state == "started":
        display.changed(event.number, f"building {wanted}")
    elif event.state == "reports":
        display.changed(event.number, str(event.detail))
    else:
        done: _Built = event.detail if event.state == "done" else _Built(False, _death(wanted, event.detail))
        _add(wanted, done, report, shown)
        display.ended(event.number, str(wanted), "failed" if done.error else "built" if done.built else "already there")


def _add(wanted: Wanted, done: _Built, report: Report, shown: set[tuple[str, str, int]]) -> None:
    """Add a worker's report. `shown` has the compilers' warnings so far: a build for another arch has the same ones."""
    for warning, file, line in done.warnings:
        if isinstance(warning, CacheWarning):
            warnings.warn(warning, stacklevel=5)
        elif (str(warning), file, line) not in shown:
            shown.add((str(warning), file, line))
            warnings.warn_explicit(warning, type(warning), file, line)
    if done.error:
        report.failed.append((str(wanted), done.error))
    else:
        (report.built if done.built else report.there).append(wanted)


def _build_one(wanted: Wanted, store: Store, say: Callable[[str], None]) -> _Built:
    """Fetch or build a binary; runs in a worker."""
    built, error = False, None
    with warnings.catch_warnings(record=True) as seen, progress.on_status(say):
        warnings.simplefilter("always")
        try:
            built = request.obtain(wanted.in_store(), store).origin == "built"
        except OpjitError as caught:
            error = caught
        except Exception as caught:
            error = wanted.fault(f"{wanted} was not built: {type(caught).__name__}: {caught}")
    return _Built(built, error, [(warning.message, warning.filename, warning.lineno) for warning in seen
                                 if isinstance(warning.message, (CacheWarning, CompileWarning))])


def _death(wanted: Wanted, code: int) -> BuildError:
    how = f"exited with code {code}"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"
    return wanted.fault(f"{wanted} was not built: its process {how}; if the machine ran out of memory, allow fewer builds at once with "
                        "--jobs or OPJIT_JOBS")


def error_texts(failed: Iterable[tuple[str, OpjitError]]) -> list[str]:
    """Each error's text once, with all the builds that it stopped: a tool that is missing stops every build."""
    names: dict[str, list[str]] = {}
    for name, error in failed:
        names.setdefault(str(error), []).append(name)
    return [text if len(each) == 1 else f"{text}\n  (for {len(each)} builds: {', '.join(each)})" for text, each in names.items()]
