"""Requests, each in a child process that has imported opjit and nothing of the request yet."""

import ctypes
import hashlib
import importlib
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

import opjit
from opjit.errors import OpjitError
from tests.stale.case import HERE, State, arrange, changed

SECONDS = 300.0  # for the requests of a child
EXTRA = 1 << 24  # is added to the value where the library exports `extra`
OP_PY = """\
import opjit

@opjit.op("stale::value(Tensor x) -> Tensor", extra_cflags={cflags!r}, extra_ldflags={ldflags!r}, extra_include_paths={include!r})
def value(x):
    return x.new_empty(x.shape)
"""
OP_C = """
#include "opjit.h"
opjit_status value_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    ((double *)out->data)[0] = value();
    return OPJIT_OK;
}
"""
# Variables that a case may set, so that none of the caller's takes part.
VARIABLES = frozenset(
    [
        "CC",
        "CXX",
        "CPATH",
        "C_INCLUDE_PATH",
        "CPLUS_INCLUDE_PATH",
        "LIBRARY_PATH",
        "COMPILER_PATH",
        "GCC_EXEC_PREFIX",
        "SOURCE_DATE_EPOCH",
        "NVCC_PREPEND_FLAGS",
        "NVCC_APPEND_FLAGS",
        "OPJIT_LAYERS",
        "OPJIT_REMOTE",
        "OPJIT_OFFLINE",
        "OPJIT_RECORD",
        "DEPENDENCIES_OUTPUT",
        "SUNPRO_DEPENDENCIES",
        "LD_RUN_PATH",
        "GNUTARGET",
        "LDEMULATION",
    ]
)


@dataclass(frozen=True)
class Outcome:
    """The answer to a request.

    Attributes:
        value: of the function `value`, and whether `extra` is exported; None for an error.
        error: the class of the error, or an empty string.
        ours: whether the error is one of opjit's own, or of opening a library.
        message: the first line of the error.
        digest: the library's SHA-256, if its path is known.
        place: path and inode of the library: equal if two requests are served one file.
    """

    value: int | None = None
    error: str = ""
    ours: bool = True
    message: str = ""
    digest: str = ""
    place: str = ""

    def __str__(self) -> str:
        return str(self.value) if self.value is not None else f"{self.error}: {self.message}"


def _opened(path: str | os.PathLike[str]) -> Outcome:
    content = Path(path).read_bytes()
    place = f"{path} {os.stat(path).st_ino}"
    digest = hashlib.sha256(content).hexdigest()
    try:
        library = ctypes.CDLL(str(path))
        value = library.value() + EXTRA * hasattr(library, "extra")
    except (OSError, AttributeError) as error:
        message = str(error).replace(str(path), "library")
        return Outcome(error="dlopen", message=message, digest=digest, place=place)
    return Outcome(value, digest=digest, place=place)


def _by_build(state: State, sources: Sequence[str]) -> Outcome:
    path = opjit.build(
        "p",
        sources,
        generated=state.generated,
        cflags=state.cflags,
        ldflags=state.ldflags,
        include=state.include,
        launcher=state.launcher,
    )
    return _opened(path)


def _by_load(state: State, sources: Sequence[str]) -> Outcome:
    path = opjit.load(
        "p",
        list(sources),
        extra_cflags=list(state.cflags),
        extra_ldflags=list(state.ldflags),
        extra_include_paths=list(state.include),
        is_python_module=False,
    )
    return _opened(path)


def _by_get(_: State, sources: Sequence[str]) -> Outcome:
    import torch

    opjit.add_path(Path(sources[0]).parent)
    op = opjit.get("stale::value", "cpu")
    return Outcome(int(op(torch.zeros(1, dtype=torch.float64)).item()))


# The function that is asked, and the names of the sources, by the kind of a case.
KINDS: Mapping[str, tuple[Callable[[State, Sequence[str]], Outcome], tuple[str, ...]]] = {
    "build": (_by_build, ("a.c",)),
    "objects": (_by_build, ("a.c", "b.c")),
    "load": (_by_load, ("a.cpp",)),
    "load-objects": (_by_load, ("a.cpp", "b.cpp")),
    "op": (_by_get, ("value.c",)),
}


def _as_kind(kind: str, state: State) -> State:
    """The state with its source in the form that a kind of request needs."""
    files = dict(state.files)
    text = files.pop("a.c", None)
    if kind == "op":
        op_py = OP_PY.format(cflags=state.cflags, ldflags=state.ldflags, include=state.include)
        files |= {"op.py": op_py, "value.c": f"{text}{OP_C}"}
    elif kind.startswith("load"):
        files |= {"a.cpp": f'extern "C" {{\n{text}\n}}\n', "b.cpp": "int other;\n"}
    else:
        if text is not None:
            files["a.c"] = text
        files["b.c"] = "int other;\n"
    return changed(state, files=files)


def _filled(value: object, root: Path) -> object:
    if isinstance(value, str):
        return value.replace(HERE, str(root))
    if isinstance(value, tuple):
        return tuple(_filled(each, root) for each in value)
    if isinstance(value, dict):
        return {name: _filled(each, root) for name, each in value.items()}
    return value


@cache
def _own_environment() -> Mapping[str, str]:
    """This process's environment without the variables that a case may set."""
    return {name: value for name, value in os.environ.items() if name not in VARIABLES}


def _answer(kind: str, state: State, root: Path, store: Path) -> Outcome:
    """Make one request in this process."""
    function, names = KINDS[kind]
    filled = changed(state, **{name: _filled(value, root) for name, value in vars(state).items()})
    own = _own_environment()
    os.environ.clear()
    os.environ.update(own)
    for name, value in filled.environment.items():
        os.environ[name] = value.replace("{PATH}", own["PATH"])
    os.environ["OPJIT_CACHE"] = str(store)
    os.chdir(root / state.folder)
    sources = [str(root / name) for name in names if name not in filled.generated]
    try:
        return function(filled, sources)
    except OpjitError as error:
        return Outcome(error=type(error).__name__, message=str(error).partition("\n")[0])
    except Exception as error:
        message = str(error).partition("\n")[0]
        return Outcome(error=type(error).__name__, ours=False, message=message)


@cache
def _prepared() -> tempfile.TemporaryDirectory[str]:
    """A folder of caches, one for each kind, that know the compilers and another program of the kind, and not the case's."""
    return tempfile.TemporaryDirectory()


def prepare(kinds: Iterable[str]) -> None:
    """Import what the kinds need, so that no child does it, and fill a cache for each kind."""
    if not {*kinds} <= {"build", "objects"}:
        importlib.import_module("torch")
    plain = State(files={"a.c": "int value(void)\n{\n    return 99;\n}\n"})
    for kind in kinds:
        place = Path(_prepared().name, kind)
        if not place.exists():
            with tempfile.TemporaryDirectory() as folder:
                [answer] = ask(kind, [(plain, None)], Path(folder), place)
            assert answer.value == 99, answer


def new_cache(kind: str, place: Path) -> Path:
    """A cache that has never seen the program of a case."""
    shutil.copytree(Path(_prepared().name, kind), place, symlinks=True)
    return place


Step = tuple[State, State | None]  # a state, and the one that the folder is in


def _serve(
    pipe: Connection, kind: str, steps: Sequence[Step], places: tuple[Path, Path], quiet: bool
) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    root, store = places
    for state, previous in steps:
        if previous is not state:
            old = _as_kind(kind, previous) if previous is not None else None
            arrange(root, _as_kind(kind, state), old, quiet)
        pipe.send(_answer(kind, state, root, store))


def ask(
    kind: str, steps: Sequence[Step], root: Path, store: Path, quiet: bool = False
) -> list[Outcome]:
    """The answers of one child process to requests. Each step says in which state the folder has to be, and in which it is."""
    _own_environment()
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_serve, args=(sending, kind, steps, (root, store), quiet))
    child.start()
    started = child.pid
    assert started is not None
    sending.close()
    answers: list[Outcome] = []
    try:
        for _ in steps:
            if not receiving.poll(SECONDS):
                answers.append(Outcome(error="no answer", ours=False))
                break
            answers.append(receiving.recv())
    except EOFError:
        child.join()
        code = child.exitcode or 0
        name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        answers.append(Outcome(error=name, ours=False))
    finally:
        receiving.close()
        child.kill()
        with suppress(ProcessLookupError):  # compilers that it has started
            os.killpg(started, signal.SIGKILL)
        child.join()
    missing = len(steps) - len(answers)
    return answers + [Outcome(error="not asked", ours=False)] * missing
