"""Requests for many ops and targets at once, and their builds in several processes.

Python's part of a build holds Python's lock, so threads keep only a few CPUs busy.
"""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from opjit import backends, processes, progress, request
from opjit.backends.targets import Target
from opjit.declare.op_state import OpState
from opjit.environment import is_on
from opjit.errors import (
    BadSetting,
    BuildError,
    CacheWarning,
    CompileError,
    CompileWarning,
    Failures,
    OpjitError,
)
from opjit.recipe import gpu_archs, toolchain
from opjit.store.store import Store
from opjit.wanted import LibraryRequest, OpRequest, here

_WORKER = "import sys; sys.path[:] = sys.argv[3:]; from opjit import batch; batch.work()"
_Answer = tuple[dict[str, CompileError], list[warnings.WarningMessage]]
_RECIPES = "recipes"  # a file for all workers
_LOOK = 0.5  # seconds between a worker's looks at its parent


def targets_of(archs: Sequence[str], store: Store, hosts: Sequence[str] = ()) -> list[Target]:
    """Return the targets of archs for each host CPU in `hosts`, without duplicates.

    Without archs, return this machine's targets, one for each kind of device.
    """
    if archs:
        return list(
            dict.fromkeys(
                gpu_archs.served(toolchain.target_of(arch, store.notes, None, host), store.notes)
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
        kernels = op.declaration.backends()
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
    compilers: dict[tuple[str, str], list[toolchain.ToolVersions]] = {}
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


def build_in_processes(
    wanted: Sequence[OpRequest], store: Store, size: int
) -> dict[str, CompileError]:
    """Build requests into the store in `size` processes.

    Returns the errors of the compilers, by the request's name. Requests that a process cannot
    recreate or store, and the requests of a process that was killed, are left to the caller.
    """
    with tempfile.TemporaryDirectory(prefix="opjit-") as folder:
        recipes = [each.inputs for each in wanted]
        Path(folder, _RECIPES).write_bytes(pickle.dumps((recipes, store)))
        with processes.pool(size) as pool:
            answers = list(pool.map(_run_worker, [folder] * size))
    errors = {name: error for refused, _ in answers for name, error in refused.items()}
    warn_once(each for _, seen in answers for each in seen)
    return errors


def warn_once(seen: Iterable[warnings.WarningMessage]) -> None:
    """Give the recorded warnings of builds, each once, because a build for another arch has the same."""
    found = {
        (each.category, str(each.message), each.filename, each.lineno): each
        for each in seen
        if issubclass(each.category, (CacheWarning, CompileWarning))
    }
    for each in found.values():
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def _run_worker(folder: str) -> _Answer:
    """Let a process build, and return its answer, which is empty if it was killed.

    It is silent, because it would repeat the warnings of an import of torch.
    """
    path = map(os.path.abspath, sys.path)
    done = processes.run(
        [sys.executable, "-c", _WORKER, folder, str(os.getpid()), *path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if is_on("OPJIT_VERBOSE") else subprocess.DEVNULL,
        start_new_session=True,
    )
    if done.returncode == 0:
        answer: _Answer = pickle.loads(done.stdout)
        return answer
    progress.log(f"threads do the builds of a process that ended with {done.returncode}")
    return {}, []


def work() -> None:
    """Build, in a process, the recipes that no other process has claimed."""
    _, folder, parent, *_ = sys.argv
    signal.signal(signal.SIGTERM, _end)
    threading.Thread(target=_watch, args=[int(parent)], daemon=True).start()
    recipes, store = pickle.loads(Path(folder, _RECIPES).read_bytes())
    errors = {}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for number, recipe in enumerate(recipes):
            try:
                with open(Path(folder, str(number)), "xb"):
                    request.fetch_or_build(LibraryRequest(recipe, must_store=True), store)
            except FileExistsError:
                continue
            except CompileError as error:
                errors[recipe.key] = error
            except (OSError, OpjitError) as error:
                progress.log(f"a thread of the other process builds {recipe}: {error}")
    sys.stdout.buffer.write(pickle.dumps((errors, seen)))


def _end(number: int, frame: object) -> None:
    """End this process and its compilers. Another signal does not disturb that."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(1)


def _watch(parent: int) -> None:
    """End this process when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os.kill(os.getpid(), signal.SIGTERM)
