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
from contextlib import AbstractContextManager, closing
from typing import NamedTuple

from opjit import distributed, files, progress, request
from opjit.ahead.plan import Plan, plan_ops, plan_recorded
from opjit.cpp_extension.binary import ExtensionBinary
from opjit.distributed import ranks
from opjit.errors import BadSetting, BuildError, CacheWarning, CompileWarning, NoKernel, OpjitError, PrecompileError, one_string
from opjit.progress import Display, live, logger, plain
from opjit.store import inventory
from opjit.store.store import Store
from opjit.survey import Pair, Survey
from opjit.wanted import OpBinary, describe

MakeDisplay = Callable[[list[str]], AbstractContextManager[Display]]
Item = Pair | ExtensionBinary  # what a plan wants


class Report(NamedTuple):
    """What precompile did.

    Attributes:
        built: the pairs of an op and a target, and the C++ extensions, that it built.
        there: those that a cache already had.
        skipped: the number of pairs without a kernel.
        failed: the name of each that could not be built, with the error.
        seconds: how long it took.
    """

    built: list[Item]
    there: list[Item]
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
        The pairs that were built, the pairs that existed, and the number of pairs without a kernel.

    Raises:
        UnknownOp, DeclarationError, UnknownArch, NoKernel, RecordError: nothing was built.
        PrecompileError: some builds failed; all others are done.

    Example:
        >>> print(opjit.precompile(["allreduce"], ["x86-64-v3", "x86-64-v4"]))  # sm_90, too, where a compiler for CUDA is
        2 built, 0 already there, 0 skipped, 0 failed, … s
    """
    if ops is not None and recorded is not None:
        raise OpjitError("opjit.precompile takes ops or recorded, not both")
    for parameter, given in (("ops", ops), ("archs", archs)):
        if isinstance(given, str):
            raise BadSetting(one_string("opjit.precompile", parameter, given))
    plan = plan_ops(ops, archs, store) if recorded is None else plan_recorded(recorded, archs, store, extensions)
    for remark in plan.remarks:
        logger.warning(remark)
    report = build_plan(plan, jobs)
    if report.failed:
        raise PrecompileError(f"{report}\n" + "\n".join(error_texts(report.failed)), report.failed)
    return report


def build_plan(plan: Plan, jobs: int | None = None, make_display: MakeDisplay | None = None) -> Report:
    """Carry out a plan. A rank of a job (srun, mpirun, torchrun) shares the work with the other ranks; see `distributed.share`.

    Args:
        jobs: as for `precompile`.
        make_display: makes the display for builds of these names; None is a display on stderr if that is a terminal, else the log.

    Raises:
        OpjitError: `jobs` or OPJIT_JOBS is not a number, or no process can be started.
    """
    started = time.perf_counter()
    rank = ranks.current()
    report = Report([], [], plan.skipped, list(plan.failed), 0.0)
    try:
        if rank is not None and rank.needs_store:
            _share(plan, jobs, report)
        else:
            _build_missing(plan, jobs, report, make_display or _default_display)
    finally:
        if plan.shared:
            _make_readable(plan.store)
    return report._replace(seconds=time.perf_counter() - started)


def _share(plan: Plan, jobs: int | None, report: Report) -> None:
    """Build together with the job's other ranks, one build at a time in this process."""
    wanted = []
    for pair in plan.wanted:
        try:
            pair.op.source(pair.target.backend)
            wanted.append(pair)
        except NoKernel as error:
            report.failed.append((str(pair), error))
    for outcome in distributed.share(wanted, plan.store, layers=not plan.shared, offer=False, must_store=True, jobs=jobs):
        pair = Pair(outcome.op, outcome.target)
        if outcome.error is not None:
            report.failed.append((str(pair), outcome.error))
        else:
            (report.built if outcome.origin == "built" else report.there).append(pair)
    settled = distributed.share_extensions(plan.extensions, plan.store, offer=False, must_store=True, jobs=jobs)
    for extension, entry in zip(plan.extensions, settled, strict=True):
        _add(extension, _Built(entry.origin == "built", entry.error), report, set())


def _make_readable(store: Store) -> None:
    """Open the store to all users of the image or the shared folder: opjit makes folders that only their owner can read."""
    for item in inventory.scan(store):
        try:
            files.let_read(item.folder, store.base)
        except OSError as error:
            warnings.warn(CacheWarning(f"others may not be able to read {item.folder}: {error}"), stacklevel=4)


def _default_display(names: list[str]) -> AbstractContextManager[Display]:
    terminal = sys.stderr is not None and sys.stderr.isatty()
    return live(sys.stderr, names) if terminal else plain(logger.info)


def _build_missing(plan: Plan, jobs: int | None, report: Report, make_display: MakeDisplay) -> None:
    """Build the missing binaries in worker processes, and add the results to the report."""
    survey, missing = Survey(plan.store, layers=not plan.shared), list[Item]()
    items: list[Item] = [*plan.wanted, *plan.extensions]
    for item in items:
        found = survey.find(item) if isinstance(item, Pair) else item.find(plan.store)
        (missing if found is None else report.there).append(item)
    if not missing:
        return
    from opjit.builder import budget, workers

    large = [item.target.backend.uses_nvcc if isinstance(item, Pair) else True for item in missing]
    size = min(len(missing), budget.jobs(budget.NVCC_JOB if any(large) else budget.C_JOB, jobs))
    request.import_builder()  # once, before the workers are forked
    begun: dict[int, float] = {}
    shown: set[tuple[str, str, int]] = set()
    order = sorted(range(len(missing)), key=lambda number: not large[number])  # the long ones first, to finish together
    with (make_display([str(item) for item in missing]) as display,
          closing(workers.run(order, lambda number, say: _build_one(missing[number], plan.store, say), size)) as events):
        for event in events:
            if event is None:
                display.tick()
                continue
            item = missing[event.number]
            if event.state == "started":
                begun[event.number] = time.perf_counter()
                display.started(event.number, str(item))
            elif event.state == "reports":
                display.changed(event.number, str(event.detail))
            else:
                done: _Built = event.detail if event.state == "done" else _Built(False, _death(item, event.detail))
                _add(item, done, report, shown)
                state = "failed" if done.error else "built" if done.built else "there"
                display.ended(event.number, str(item), state, time.perf_counter() - begun[event.number])


def _add(item: Item, done: _Built, report: Report, shown: set[tuple[str, str, int]]) -> None:
    """Add a worker's report. `shown` has the compilers' warnings so far: a build for another arch has the same ones."""
    for warning, file, line in done.warnings:
        if isinstance(warning, CacheWarning):
            warnings.warn(warning, stacklevel=5)
        elif (str(warning), file, line) not in shown:
            shown.add((str(warning), file, line))
            warnings.warn_explicit(warning, type(warning), file, line)
    if done.error:
        report.failed.append((str(item), done.error))
    else:
        (report.built if done.built else report.there).append(item)


def _build_one(item: Item, store: Store, say: Callable[[str], None]) -> _Built:
    """Fetch or build a binary; runs in a worker."""
    built, error = False, None
    with warnings.catch_warnings(record=True) as seen, progress.on_status(say):
        warnings.simplefilter("always")
        try:
            wanted = OpBinary(*item, describe(*item, store), must_store=True) if isinstance(item, Pair) else item._replace(must_store=True)
            built = request.obtain(wanted, store).origin == "built"
        except OpjitError as caught:
            error = caught
        except Exception as caught:
            error = _fault(item, f"{type(caught).__name__}: {caught}")
    return _Built(built, error, [(warning.message, warning.filename, warning.lineno) for warning in seen
                                 if isinstance(warning.message, (CacheWarning, CompileWarning))])


def _death(item: Item, code: int) -> BuildError:
    how = f"exited with code {code}"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"
    return _fault(item, f"its process {how}; if the machine ran out of memory, allow fewer builds at once with --jobs or OPJIT_JOBS")


def _fault(item: Item, reason: str) -> BuildError:
    text = f"{item} was not built: {reason}"
    return BuildError(text, op=item.op.qualified, target=str(item.target)) if isinstance(item, Pair) else item.refusal(text)


def error_texts(failed: Iterable[tuple[str, OpjitError]]) -> list[str]:
    """Each error's text once, with all the builds that it stopped: a tool that is missing stops every build."""
    names: dict[str, list[str]] = {}
    for name, error in failed:
        names.setdefault(str(error), []).append(name)
    return [text if len(each) == 1 else f"{text}\n  (for {len(each)} builds: {', '.join(each)})" for text, each in names.items()]
