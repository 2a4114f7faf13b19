"""``opjit precompile``: build binaries ahead of requests, even for archs that this machine does not
have.

Each build is an ordinary build, with a lock for the key and one rename. If the command dies,
finished builds are kept, and two commands share the work.
"""

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import as_completed
from typing import NamedTuple, TextIO

from opjit import distributed, files, processes, progress, request, why
from opjit.ahead.plan import Plan, plan_ops, plan_recorded
from opjit.cpp_extension.autograd_part import make as make_autograd_part
from opjit.distributed import ranks
from opjit.environment import is_on
from opjit.errors import (
    BadSetting,
    CacheWarning,
    CompileWarning,
    Failures,
    OpjitError,
    PrecompileError,
    one_string,
    warn_of_cache,
)
from opjit.files import StrPath
from opjit.progress import Display, logger
from opjit.store import inventory
from opjit.store.store import Store
from opjit.wanted import BinaryRequest, OpRequest


class Report(NamedTuple):
    """The results of precompile.

    Attributes:
        built: the binaries of ops and of C++ extensions that it built. An op's has the attributes `op` and `target`.
        there: the binaries that a cache already had.
        skipped: the number of pairs of an op and a target without a kernel.
        failed: the name and the error of each binary that could not be built.
        seconds: the duration.
    """

    built: list[BinaryRequest]
    there: list[BinaryRequest]
    skipped: int
    failed: Failures
    seconds: float

    def __str__(self) -> str:
        return (
            f"{len(self.built)} built, {len(self.there)} already there, {self.skipped} skipped, {len(self.failed)} failed, "
            f"{self.seconds:.2f} s"
        )


def precompile(
    ops: Iterable[StrPath] | None = None,
    archs: Sequence[str] = (),
    *,
    jobs: int | None = None,
    store: StrPath | None = None,
    recorded: StrPath | None = None,
    extensions: bool = False,
    hosts: Sequence[str] = (),
    warm_compilers: bool = False,
) -> Report:
    """Build ops in advance, in parallel, for any architecture. You don't need a GPU.

    Entries that exist are not built again, so you can repeat an interrupted call.

    Args:
        ops: names or directories of ops. None means every op that is declared or can be found.
        archs: architectures, for example ``["x86-64-v3", "sm_90"]``. An empty list means this machine's. Each op is built for the
            architectures that it has a kernel for.
        jobs: the largest number of parallel builds. None means OPJIT_JOBS or, if it is not set, the number that CPUs and free memory
            allow. In any case, the compilers of all builds of this user share the machine.
        store: a directory to fill instead of the cache, for example a directory in an image for OPJIT_LAYERS. All users can read its
            entries.
        recorded: an op list from ``opjit record``, instead of `ops`. Nothing that only the list names is run.
        extensions: also build the C++ extensions of the list, for the architectures that they were recorded for. Use this only if you
            trust the list, because flags and static initializers can run any code.
        hosts: the host CPUs for binaries with GPU kernels, for example ``["x86_64", "aarch64"]``. An empty list means this machine's. A
            CPU architecture implies its host CPU. To build for a different host CPU, you need a cross compiler and, for CUDA, NVRTC.
        warm_compilers: also precompile the parts that all builds on this machine share, for example torch's headers. With ``ops=[]``,
            nothing else is built.

    Returns:
        The binaries that were built, the binaries that existed, and the number of pairs of an op and a target without a kernel.

    Raises:
        UnknownOp, DeclarationError, UnknownArch, NoKernel, RecordError: see `opjit.errors`. In this case, nothing is built.
        PrecompileError: some builds failed. The remaining builds are done.

    Example:
        >>> print(opjit.precompile(["allreduce"], ["x86-64-v3", "x86-64-v4"]))  # also sm_90, if a CUDA compiler is installed
        2 built, 0 already there, 0 skipped, 0 failed, … s
    """
    if ops is not None and recorded is not None:
        raise OpjitError("opjit.precompile: expected ops= or recorded=, got both; pass one")
    for parameter, value in (("ops", ops), ("archs", archs), ("hosts", hosts)):
        if isinstance(value, str):
            raise BadSetting(one_string("opjit.precompile", parameter, value))
    plan = (
        plan_ops(ops, archs, store, hosts)
        if recorded is None
        else plan_recorded(recorded, archs, store, extensions, hosts)
    )
    for remark in plan.remarks:
        logger().warning(remark)
    if warm_compilers:
        from opjit.ahead.compiler_parts import make_parts

        make_parts(plan.store, logger().info)
    report = build_plan(plan, jobs, sys.stderr)
    if report.failed:
        raise PrecompileError(f"{report}\n" + "\n".join(error_texts(report.failed)), report.failed)
    return report


def check_precompiled(
    recorded: StrPath,
    archs: Sequence[str] = (),
    *,
    store: StrPath | None = None,
    extensions: bool = False,
    hosts: Sequence[str] = (),
) -> int:
    """Check that a program will not build anything, because every entry of an op list exists.

    The check verifies each entry as a request does, and builds and loads nothing.

    Args:
        recorded: the op list from ``opjit record`` with which ``opjit precompile --from`` has filled a cache or a read-only cache.
        archs: as in the call of `opjit.precompile`.
        store: as in the call of `opjit.precompile`. If it is None, the cache and OPJIT_LAYERS are searched.
        extensions: as in the call of `opjit.precompile`.
        hosts: as in the call of `opjit.precompile`.

    Returns:
        The number of entries.

    Raises:
        PrecompileError: entries are missing. The message names them, and the inputs that changed since they were built.
        RecordError: the list cannot be read.

    Example:
        >>> print(opjit.precompile(recorded="ops.json"))
        1 built, 0 already there, 0 skipped, 0 failed, … s
        >>> opjit.check_precompiled("ops.json")
        1
    """
    plan = plan_recorded(recorded, archs, store, extensions, hosts)
    failed = list(plan.failed)
    for wanted in plan.wanted:
        if wanted.find(plan.store) is None:
            failed.append((str(wanted), OpjitError(why.compare(wanted.inputs, plan.store).reason)))
    if failed:
        raise PrecompileError(
            f"{os.fspath(recorded)} is not ready; run `opjit precompile --from {os.fspath(recorded)}` with the same "
            "options, and see:\n" + "\n".join(error_texts(failed)),
            failed,
        )
    return len(plan.wanted) + plan.kernels


def build_plan(
    plan: Plan,
    jobs: int | None = None,
    stream: TextIO | None = None,
    write: Callable[[str], object] = lambda line: logger().info(line),
) -> Report:
    """Carry out a plan; a job's ranks share it, see `distributed.share`. A line is written for each build if `stream` is no terminal."""
    started = time.perf_counter()
    rank = ranks.current()
    report = Report([], [], plan.skipped, list(plan.failed), 0.0)
    try:
        if rank is not None and rank.needs_store:
            # One build at a time in this process.
            tasks = distributed.share(plan.wanted, plan.store, ahead=True)
            for wanted, task in zip(plan.wanted, tasks, strict=True):
                _add(wanted, task.built, task.error, report)
        else:
            _build_missing(plan, jobs, report, stream, write)
        of_ops = [wanted for wanted in plan.wanted if isinstance(wanted, OpRequest)]
        if of_ops and is_on("OPJIT_CPP_AUTOGRAD", unset=True):
            make_autograd_part(plan.store, on_build=write)
    finally:
        # opjit makes folders that only their owner can read
        kept = [*inventory.scan(plan.store), *inventory.parts(plan.store)]
        for item in kept if plan.shared else ():
            try:
                files.let_read(item.folder, plan.store.base)
            except OSError as error:
                warn_of_cache(f"other users may not be able to read {item.folder}: {error}")
    return report._replace(seconds=time.perf_counter() - started)


def _build_missing(
    plan: Plan,
    jobs: int | None,
    report: Report,
    stream: TextIO | None,
    write: Callable[[str], object],
) -> None:
    """Build the missing binaries side by side, and add the results to the report."""
    missing = []
    for wanted in plan.wanted:
        if wanted.find(plan.store) is None:
            missing.append(wanted)
        else:
            report.there.append(wanted)
    if not missing:
        return
    from opjit.builder import budget

    size = min(len(missing), budget.jobs(budget.C_JOB, jobs))
    # The long ones first, to finish together.
    missing.sort(key=lambda each: isinstance(each, OpRequest) and not each.target.backend.uses_nvcc)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with progress.display(stream, write, len(missing)) as display, processes.pool(size) as pool:
            running = {
                pool.submit(_build_one, number, wanted, plan.store, display): wanted
                for number, wanted in enumerate(missing)
            }
            for done in as_completed(running):
                _add(running[done], *done.result(), report)
    # A build for another arch has the same ones, with the same texts.
    for each in {str(each): each for each in seen}.values():
        if issubclass(each.category, (CacheWarning, CompileWarning)):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def _build_one(
    number: int, wanted: BinaryRequest, store: Store, display: Display
) -> tuple[bool, OpjitError | None]:
    """Fetch or build a binary. Returns whether it was built, and the error if it failed."""
    built = False
    error: OpjitError | None = None
    display.changed(number, f"building {wanted}")
    try:
        with progress.on(progress.STATUS, lambda text: display.changed(number, text)):
            built = request.fetch_or_build(wanted.in_store(), store).origin == "built"
    except OpjitError as caught:
        error = caught
    except Exception as caught:
        error = wanted.inputs.fault(f"{type(caught).__name__}: {caught}")
    ending = "built" if built else "already there"
    display.ended(number, str(wanted), "failed" if error else ending)
    return built, error


def _add(wanted: BinaryRequest, built: bool, error: OpjitError | None, report: Report) -> None:
    if error:
        report.failed.append((str(wanted), error))
    else:
        (report.built if built else report.there).append(wanted)


def error_texts(failed: Failures) -> list[str]:
    """Each error's text once, with all the builds that it stopped: a tool that is missing stops every build."""
    names = dict[str, list[str]]()
    for name, error in failed:
        names.setdefault(str(error), []).append(name)
    return [
        text if len(each) == 1 else f"{text}\n  (for {len(each)} builds: {', '.join(each)})"
        for text, each in names.items()
    ]
