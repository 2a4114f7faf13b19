"""``opjit precompile``: binaries made before anybody asks for them, for archs that this machine need not have.

The command plans in one process, where what is there is known in a few hundred milliseconds for a thousand entries, and builds in
several. Each build is an ordinary one: its own folder, the key's lock, one rename. So nothing is lost when the command dies, and two of
them beside each other share the work.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing, suppress
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from opjit import api, catalog, files, plan, ranks
from opjit.display import Display, live, plain
from opjit.errors import BadSetting, BuildError, CacheWarning, NoKernel, OpjitError, PrecompileError, one_string
from opjit.plan import Wanted
from opjit.progress import logger
from opjit.recipe import Recipe
from opjit.store import Entry, Store, default_root


class Work(NamedTuple):
    """What a precompile is to do.

    Attributes:
        wanted: each op with each target.
        skipped: how many pairs there would be besides, had the ops kernels for them.
        store: that shall have the binaries.
        own: the store is one that the user named: it is to be complete by itself, and for everybody to read.
        remarks: what a user should know before it starts.
        failed: what cannot even be tried, with the reason.
    """

    wanted: list[Wanted]
    skipped: int
    store: Store
    own: bool
    remarks: Sequence[str] = ()
    failed: Sequence[tuple[str, OpjitError]] = ()


class Report(NamedTuple):
    """What a precompile did.

    Attributes:
        built: what was missing, and was built.
        there: what a cache had already.
        skipped: how many pairs of an op and a target have no kernel.
        failed: each error, with the name of its op and target.
        seconds: it took.
    """

    built: list[Wanted]
    there: list[Wanted]
    skipped: int
    failed: list[tuple[str, OpjitError]]
    seconds: float

    def __str__(self) -> str:
        return (f"{len(self.built)} built, {len(self.there)} already there, {self.skipped} skipped, {len(self.failed)} failed, "
                f"{self.seconds:.2f} s")


class _Outcome(NamedTuple):
    """What a worker sends of a build."""

    built: bool
    error: OpjitError | None
    warnings: list[str]
    seconds: float


def precompile(ops: Iterable[str | os.PathLike[str]] | None = None, archs: Sequence[str] = (), *, jobs: int | None = None,
               store: str | os.PathLike[str] | None = None, recorded: str | os.PathLike[str] | None = None) -> Report:
    """Build ops before they are asked for, several at once. No GPU is needed; what is there already costs almost nothing.

    Args:
        ops: their names, or folders of ops; None is every op that is declared or found.
        archs: such as ``["x86-64-v3", "sm_90"]``; none are this machine's. An op is built for those that it has a kernel for.
        jobs: builds at once; None is OPJIT_JOBS, else what the CPUs and the memory that are free allow.
        store: the root of a store to fill in place of the cache, such as a folder of an image, for OPJIT_LAYERS to name; everybody
            may read what is put there.
        recorded: a list that ``opjit record`` wrote, in place of `ops`. Nothing that it names is run.

    Returns:
        What was built, what was there, and how many pairs have no kernel.

    Raises:
        UnknownOp, DeclarationError, UnknownArch, NoKernel, RecordError: nothing was built.
        PrecompileError: all was tried, and some could not be built.

    Example:
        >>> print(opjit.precompile(["allreduce"], ["x86-64-v3", "x86-64-v4", "sm_90"]))
        3 built, 0 already there, 0 skipped, 0 failed, 2.41 s
    """
    if ops is not None and recorded is not None:
        raise OpjitError("opjit.precompile takes ops or recorded, not both")
    for parameter, given in (("ops", ops), ("archs", archs)):
        if isinstance(given, str):
            raise BadSetting(one_string("opjit.precompile", parameter, given))
    work = ordered(ops, archs, store) if recorded is None else listed(recorded, archs, store)
    for remark in work.remarks:
        logger.warning(remark)
    report = run(work, jobs)
    if report.failed:
        raise PrecompileError(f"{report}\n" + "\n".join(complaints(report.failed)), report.failed)
    return report


def ordered(names: Iterable[str | os.PathLike[str]] | None, archs: Sequence[str], store: str | os.PathLike[str] | None) -> Work:
    """The work of building ops by name, or all of them.

    Raises:
        UnknownOp, DeclarationError, UnknownArch: one is not known.
        NoKernel: an op was named that has no kernel for any of the archs.
    """
    where, own = _store(store)
    targets = plan.targets_of(archs, where)
    if names is None:
        catalog.search()
        ops = catalog.all_ops()
    else:
        ops = []
        for name in names:
            found = catalog.named(os.fspath(name))
            if not plan.pairs(found, targets):
                has = sorted({backend for op in found for backend in op.backends()})
                raise NoKernel(f"{os.fspath(name)} has no kernel for {' or '.join(map(str, targets)) or 'any device of this machine'}, so "
                               f"there is nothing to build; it has kernels for {' and '.join(has) or 'nothing'}: name an arch of those")
            ops += found
    ops = list(dict.fromkeys(ops))
    wanted = plan.pairs(ops, targets)
    return Work(wanted, len(ops) * len(targets) - len(wanted), where, own)


def listed(path: str | os.PathLike[str], archs: Sequence[str], store: str | os.PathLike[str] | None) -> Work:
    """The work of building what a list names.

    Raises:
        RecordError: it is no list of `opjit record`.
        UnknownArch, DeclarationError: an arch is not known, or a folder of OPJIT_PATH is not to be run.
    """
    from opjit import replay

    where, own = _store(store)
    found = replay.find(Path(path), plan.targets_of(archs, where) if archs else None, where)
    return Work(found.wanted, found.skipped, where, own, found.remarks, found.failed)


def _store(root: str | os.PathLike[str] | None) -> tuple[Store, bool]:
    if root is None:
        return Store(default_root()), False
    folder = Path(os.path.abspath(os.path.expanduser(root)))
    if not folder.exists():
        with suppress(OSError):  # then the builds say why they cannot be kept
            folder.mkdir(parents=True)
            folder.chmod(0o755)
    return Store(folder), True


def run(work: Work, jobs: int | None = None, shown: Callable[[list[str]], AbstractContextManager[Display]] | None = None) -> Report:
    """Do it.

    Args:
        jobs: as `precompile` takes it.
        shown: makes the display for builds of these names; None is one on stderr if that is a terminal, else lines for the logger.

    Raises:
        OpjitError: `jobs` or OPJIT_JOBS is no number, or no process can be started.

    As one of a job's ranks (srun, mpirun, torchrun) it shares the work with the others; see `distributed.share`.
    """
    started = time.perf_counter()
    place = ranks.found()
    if place is not None and place.meets:
        return _share(work, jobs)._replace(seconds=time.perf_counter() - started)
    there, missing = [], []
    survey = plan.Survey(work.store, layers=not work.own)
    for pair in work.wanted:
        entry = survey.find(pair)
        if entry is None:
            missing.append(pair)
            continue
        there.append(pair)
        if work.own:
            _let_read(entry, work.store)
    report = Report([], there, work.skipped, list(work.failed), 0.0)
    if missing:
        with (shown or _shown)([str(pair) for pair in missing]) as display:
            _build(work, missing, jobs, report, display)
    return report._replace(seconds=time.perf_counter() - started)


def _share(work: Work, jobs: int | None) -> Report:
    """As one of a job's ranks (srun, mpirun, torchrun): together with the others, one build at a time in this process."""
    from opjit import build, distributed

    def make(recipe: Recipe, store: Store) -> Entry:
        return build.build(recipe, store, kept=True)

    report, wanted = Report([], [], work.skipped, list(work.failed), 0.0), []
    for pair in work.wanted:
        try:
            pair.op.source(pair.target.backend)
            wanted.append(pair)
        except NoKernel as error:
            report.failed.append((str(pair), error))
    for outcome in distributed.share(wanted, work.store, layers=not work.own, offer=False, make=make, jobs=jobs):
        pair = Wanted(outcome.op, outcome.target)
        if outcome.entry is None:
            assert outcome.error is not None
            report.failed.append((str(pair), outcome.error))
            continue
        (report.built if outcome.origin == "built" else report.there).append(pair)
        if work.own:
            _let_read(outcome.entry, work.store)
    return report


def _shown(names: list[str]) -> AbstractContextManager[Display]:
    terminal = sys.stderr is not None and sys.stderr.isatty()
    return live(sys.stderr, names) if terminal else plain(logger.info)


def _build(work: Work, missing: list[Wanted], jobs: int | None, report: Report, display: Display) -> None:
    """Build what is missing in processes of their own, and enter into the report what comes of it."""
    from opjit import budget, build, pool

    import_module("opjit.lock")  # here, or each child would
    nvcc = [pair.target.backend.uses_nvcc for pair in missing]
    size = min(len(missing), budget.jobs(budget.NVCC_JOB if any(nvcc) else budget.C_JOB, jobs))
    build.import_builder()
    begun: dict[int, float] = {}
    order = sorted(range(len(missing)), key=lambda number: not nvcc[number])  # what takes long first: nobody waits for it at the end
    with closing(pool.run(order, lambda number, say: _put(missing[number], work, say), size)) as events:
        for event in events:
            if event is None:
                display.tick()
                continue
            pair = missing[event.number]
            if event.state == "started":
                begun[event.number] = time.perf_counter()
                display.started(event.number, str(pair))
            elif event.state == "says":
                display.says(event.number, str(event.detail))
            else:
                outcome = event.detail if event.state == "done" else _Outcome(False, _died(pair, event.detail), [], 0.0)
                for text in outcome.warnings:
                    warnings.warn(CacheWarning(text), stacklevel=4)
                state = "failed" if outcome.error else "built" if outcome.built else "there"
                if outcome.error:
                    report.failed.append((str(pair), outcome.error))
                else:
                    (report.built if outcome.built else report.there).append(pair)
                display.ended(event.number, str(pair), state, time.perf_counter() - begun[event.number])


def _put(pair: Wanted, work: Work, say: Callable[[str], None]) -> _Outcome:
    """In a worker: see to it that the store has a binary."""
    from opjit import build, progress

    built, error = [], None
    started = time.perf_counter()

    def make(recipe: Recipe, store: Store) -> Entry:
        built.append(True)
        return build.build(recipe, store, kept=True)

    with warnings.catch_warnings(record=True) as seen, progress.told(say):
        warnings.simplefilter("always")
        try:
            entry = api.build_once(pair.op, api.describe(pair.op, pair.target, work.store), work.store, make)
            if work.own:
                _let_read(entry, work.store)
        except OpjitError as caught:
            error = caught
        except Exception as caught:
            error = BuildError(f"{pair} was not built: {type(caught).__name__}: {caught}", op=pair.op.qualified, target=str(pair.target))
    told = [str(warning.message) for warning in seen if issubclass(warning.category, CacheWarning)]
    return _Outcome(bool(built), error, told, time.perf_counter() - started)


def _let_read(entry: Entry, store: Store) -> None:
    """What an image or a shared folder holds is for every user of it; opjit makes its folders for one user alone."""
    try:
        files.let_read(entry.folder, store.base)
    except OSError as error:
        warnings.warn(CacheWarning(f"others may not be able to read {entry.folder}: {error}"), stacklevel=2)


def _died(pair: Wanted, code: int) -> BuildError:
    how = f"exit code {code}"
    if code < 0:
        how = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return BuildError(f"{pair} was not built: the process that built it ended by itself ({how}); if the machine ran out of memory, allow "
                      "fewer builds at once with --jobs or OPJIT_JOBS", op=pair.op.qualified, target=str(pair.target))


def complaints(failed: Iterable[tuple[str, OpjitError]]) -> list[str]:
    """The errors as text, each once with all that it stopped: what is missing on a machine is missing for every op."""
    names: dict[str, list[str]] = {}
    for name, error in failed:
        names.setdefault(str(error), []).append(name)
    return [text if len(each) == 1 else f"{text}\n  (and so for {len(each)} in all: {', '.join(each)})" for text, each in names.items()]
