"""From a recipe to a published entry, through torch.utils.cpp_extension.load in a private folder.

torch's loader writes the build file, runs ninja and reports; opjit tells it what to compile and keeps it from four things:
searching torch's libraries at link time (empty ones with the same names do), leaving the machine's paths in the binary,
loading the result, and sharing a folder with any other build.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from opjit import binary, builder, commands, files, forks, glue, headers, loader, progress, resources, stubs, toolchain
from opjit.errors import BuildError, EntryError, OpjitError, ToolMissing
from opjit.manifest import NAME, Manifest
from opjit.publication import Work, publish
from opjit.recipe import RUNTIME, Recipe
from opjit.store import Entry, Store, check_library
from opjit.toolchain import Compiler, Nvcc

_UNIQUE = "@unique@"
_OBJECT = "opjit_runtime.o"
torch_builder = threading.Lock()  # guards cpp_extension's module variables while a build uses them
_runtimes: dict[str, _Runtime] = {}  # what this process has compiled of RUNTIME, by all that decides it
_undo: list[Callable[[], None]] = []  # puts back what a build under way has changed
_FULL = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))
# torch writes a source's path into ninja's file with only its spaces escaped, and nvcc misreads these quotes and a backslash.
_UNWRITABLE = re.compile(r"[$:|\"`\\]")


class _Runtime(NamedTuple):
    """RUNTIME, compiled. It is the same for every op, and takes longer than most.

    Attributes:
        names: of all files and folders in the paths of its sources; an op's folder that holds one of these may change it.
    """

    content: bytes
    names: frozenset[str]


def _after_fork() -> None:
    """The child has neither the thread that builds nor any use for its settings."""
    globals()["torch_builder"] = threading.Lock()
    while _undo:
        _undo.pop()()


os.register_at_fork(after_in_child=_after_fork)


def build(recipe: Recipe, store: Store, kept: bool = False) -> Entry:
    """Build what the recipe describes and publish it; where the store cannot be written, keep it for this process only.

    Args:
        kept: it is built for the store, and of no use without that.

    Raises:
        ToolMissing: a compiler or ninja is not there.
        CompileError: the op's source does not compile or link.
        BuildError: the tools ran and left no good binary; or the store cannot keep one that must be kept.
    """
    compiler = toolchain.require_compiler(store.notes)
    if compiler.machine.partition("-")[0] not in binary.MACHINES:
        raise ToolMissing("cc", f"the C compiler makes code for {compiler.machine}, and opjit builds for {' and '.join(binary.MACHINES)}; "
                                "set CC to another")
    nvcc = toolchain.require_nvcc(store.notes) if recipe.target.backend.uses_nvcc else None
    if nvcc is not None and recipe.target.backend.runtime(nvcc.version) != recipe.target.runtime:
        raise ToolMissing("nvcc", f"{recipe.schema.qualified} is wanted for {recipe.target}, and the nvcc in {nvcc.root} is that of CUDA "
                                  f"{nvcc.version}, whose libraries torch does not have; set CUDA_HOME to a toolkit of torch's own major "
                                  "version")
    recipe = recipe.with_toolchain(toolchain.identity(compiler, nvcc))
    ninja = toolchain.require_ninja()

    def make(staged: Path, base: Path) -> Manifest:
        with workspace(staged) as work:
            described = _make_entry(recipe, compiler, nvcc, ninja, work, staged / "entry", base)
        if not headers.unread(recipe.inputs) and recipe.inputs_now() != recipe.inputs:
            raise _fault(recipe, "its sources changed while they were compiled; ask for it again")
        return described

    folder = store.folder(recipe.schema.qualified, recipe.target)
    return publish(Work(recipe.schema.qualified, recipe.target, make, lambda described: folder / described.key,
                        lambda what: _fault(recipe, what), headers.unread(recipe.inputs), kept), store)


@contextmanager
def workspace(staged: Path) -> Iterator[Path]:
    """Where the compilers work: in the staging folder, unless torch cannot write its path into a build file."""
    if _UNWRITABLE.search(str(staged)):
        with tempfile.TemporaryDirectory(prefix="opjit-") as folder:
            yield Path(folder)
    else:
        work = staged / "build"
        work.mkdir(mode=0o700)
        yield work


def _make_entry(recipe: Recipe, compiler: Compiler, nvcc: Nvcc | None, ninja: str, work: Path, entry: Path, base: Path) -> Manifest:
    entry.mkdir(mode=0o700)
    sources = glue.render(recipe.schema, recipe.target.backend.name, recipe.target.backend.dispatch_key, recipe.source.name,
                          recipe.target.backend.stream)
    runtime = (resources.folder("kernels_c") / RUNTIME).read_text(encoding="utf-8")
    for name, text in {**sources, RUNTIME: runtime}.items():
        (work / name).write_text(text, encoding="utf-8")
    name = f"opjit_{files.unique()}"
    started = time.perf_counter()
    progress.step("compiling")
    compiled = _put_runtime(recipe, work)
    _run_torch_builder(recipe, name, [str(work / source) for source in (*sources, *([] if compiled else [RUNTIME]))],
                       [quote(_OBJECT)] if compiled else [], work, stubs.make(base, compiler.machine, recipe.flags.stubs), compiler, nvcc,
                       ninja, base)
    seconds = time.perf_counter() - started
    progress.step("checking")
    read = [headers.read_dependencies(listing.read_text("utf-8", "surrogateescape")) for listing in work.glob("*.deps")]
    if not compiled:
        _keep_runtime(recipe, work, read)
    _check_dependencies(recipe, work, read, compiler, nvcc)
    try:
        content = (work / name).read_bytes()
        check_library(content, recipe.target, recipe.flags.link)
        missing = [function for function in loader.FUNCTIONS if f"{function}\0".encode() not in content]
        if missing:
            raise EntryError(f"it does not define {', '.join(missing)}")
    except (FileNotFoundError, EntryError) as error:
        raise _fault(recipe, f"{compiler.path} reported success but left no good library: {error}", compiler.path) from None
    library = f"{recipe.schema.namespace}.{recipe.schema.name}.so"
    for source, text in sources.items():
        files.write_synced(entry / source, text.encode())
    files.write_synced(entry / "build.ninja", (work / "build.ninja").read_bytes())
    files.write_synced(entry / library, content)
    key = recipe.key
    assert key is not None  # the toolchain was filled in by build()
    described = Manifest(key, recipe.document(), library, len(content), hashlib.sha256(content).hexdigest(),
                         {"torch": torch.__version__, "seconds": f"{seconds:.3f}", "lines": json.dumps(recipe.lines())})
    files.write_synced(entry / NAME, described.dump())
    return described


def _put_runtime(recipe: Recipe, work: Path) -> bool:
    """Put what this process has compiled of the runtime into the working folder, if it would be compiled to the same again."""
    known = _runtimes.get(_runtime_key(recipe))
    if known is None or any(not known.names.isdisjoint(os.listdir(folder)) for folder in [str(recipe.folder), *recipe.flags.include]):
        return False
    (work / _OBJECT).write_bytes(known.content)
    return True


def _keep_runtime(recipe: Recipe, work: Path, read: list[list[Path]]) -> None:
    """Remember what was compiled of RUNTIME; `read` is what each compiler read."""
    own = next((listing for listing in read if any(path.name == RUNTIME for path in listing)), None)
    if own is not None and (work / _OBJECT).is_file():
        names = frozenset(part for path in own for part in path.parts)
        _runtimes[_runtime_key(recipe)] = _Runtime((work / _OBJECT).read_bytes(), names)


def _runtime_key(recipe: Recipe) -> str:
    """Everything that decides the runtime's object file, but for what the op's folder could add."""
    own = {name: digest for name, digest in recipe.inputs.items() if name.startswith("<opjit>/")}
    own = own if f"<opjit>/{RUNTIME}" in own else dict(recipe.inputs)  # opjit's headers lie in the op's folder, and go by other names
    return json.dumps([own, recipe.flags.c, recipe.toolchain], sort_keys=True)


def _run_torch_builder(recipe: Recipe, name: str, sources: list[str], objects: list[str], work: Path, linked: Path, compiler: Compiler,
                       nvcc: Nvcc | None, ninja: str, base: Path) -> None:
    """Call torch.utils.cpp_extension.load: build, do not load."""
    flags = recipe.flags
    added = {f"added{index}": path for index, path in enumerate(flags.include)}
    places = {"folder": str(recipe.folder), "include": str(resources.folder("kernels_c")), "staging": str(work), "unique": _UNIQUE,
              **added}
    libraries = [f"-l{stub.removeprefix('lib')}" for stub in flags.stubs]
    include = [f"-I{places[name]}" for name in ("folder", "include", *added)]
    cpp_extension = import_builder()
    with torch_builder, _settings(cpp_extension, compiler, nvcc, ninja, work):
        try:
            cpp_extension.load(
                name=name,
                sources=sources,
                extra_cflags=[quote(flag) for flag in (*include, *(flag.format(**places) for flag in flags.c))],
                extra_cuda_cflags=[quote(flag) for flag in _for_nvcc(include, [flag.format(**places) for flag in flags.cuda])],
                extra_ldflags=[*objects, "-shared", quote(f"-L{linked}"), "-Wl,--no-as-needed", *libraries, "-Wl,--as-needed",
                               *flags.link, "-Wl,-z,defs", "-Wl,-s"],
                build_directory=str(work),
                with_cuda=nvcc is not None,
                is_python_module=False,
                is_standalone=True,  # an executable in torch's eyes: not loaded, and -shared above makes it a library
            )
        except (RuntimeError, OSError, subprocess.SubprocessError, UnicodeError) as error:
            if isinstance(error, OpjitError):
                raise
            with forks.importing():
                from opjit.diagnosis import diagnose

            backend = recipe.target.backend
            raise diagnose(output_of(error, work), recipe.schema.qualified, str(recipe.target), base / "logs",
                           (str(recipe.source), glue.prototype(recipe.schema, backend.name, backend.stream))) from None
        finally:
            progress.log_commands(work, ninja)


def output_of(error: Exception, work: Path) -> str:
    """What the tools of a failed build printed.

    Raises:
        OSError: they printed that the disk is full; or torch could not even write the build file.
    """
    if isinstance(error, UnicodeEncodeError):
        raise OSError(errno.EILSEQ, f"a path or a text of the build holds {error.object[error.start:error.end]!a}, which cannot be "
                                    f"written in this process's encoding, {error.encoding}", str(work)) from None
    # torch reads the output as UTF-8; a compiler quotes a source as it is
    told = error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
    if any(reason in told for reason in _FULL):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(work)) from None
    return told


def import_builder(whole: bool = False) -> Any:
    """torch.utils.cpp_extension, or its code for builds alone; see `builder`."""
    with torch_builder, forks.importing():
        return builder.whole() if whole else builder.module()


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep Python's garbage collector from walking over all of torch, 0.1 s, because a build imports a few modules."""
    if not gc.isenabled():
        yield
        return
    _undo.append(gc.enable)
    gc.disable()
    try:
        yield
    finally:
        with suppress(ValueError):  # a child that was forked in the block has done it
            _undo.remove(gc.enable)
        gc.enable()


@contextmanager
def _settings(cpp_extension: Any, compiler: Compiler, nvcc: Nvcc | None, ninja: str, work: Path) -> Iterator[None]:
    """Set torch's builder up for an opjit build; everything is put back afterwards."""
    environment = {
        **toolchain.NEUTRAL,
        "CC": compiler.path,  # nvcc's host compiler
        "CXX": compiler.path,  # the glue is C; a machine without a C++ compiler can build it
        "PATH": f"{ninja}{os.pathsep}{os.environ.get('PATH', '')}",
        "TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES": "1",  # opjit's own flags ask for the complete list
        "TORCH_DONT_CHECK_COMPILER_ABI": "1",  # the C ABI is what it is
        "PYTORCH_NVCC": None,
        "NINJA_STATUS": None,
    }
    # The run path that torch adds becomes a constant: the process has torch's libraries already.
    variables = {"TORCH_LIB_PATH": "'$$ORIGIN'", "CUDA_HOME": nvcc.root if nvcc else None, **unlocked(cpp_extension, work),
                 "verify_ninja_availability": lambda: None}  # it would run it once more; opjit has looked for it
    with changed(cpp_extension, environment, variables):
        yield


def unlocked(cpp_extension: Any, work: Path) -> dict[str, Any]:
    """torch's lock on a build's folder, from 2.15 on, but none on this build's own: nobody shares that, and flock may block."""
    lock = getattr(cpp_extension, "FileLock", None)
    return {} if lock is None else {"FileLock": lambda path: nullcontext() if os.path.dirname(path) == str(work) else lock(path)}


@contextmanager
def changed(cpp_extension: Any, environment: dict[str, str | None], variables: dict[str, Any]) -> Iterator[None]:
    """Environment and module variables of torch's builder, for a build that holds `torch_builder`; also a fork puts the latter back.

    torch flushes Python's outputs: where one is not there, or closed, another takes its place meanwhile.
    """
    own = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    variables = {**variables, "os": commands.System(own), "subprocess": commands.Commands(own)}
    variables_before = {name: getattr(cpp_extension, name) for name in variables}
    closed = {name: getattr(sys, name) for name in ("stdout", "stderr") if not progress.is_open(getattr(sys, name))}

    def put_back() -> None:
        for name, value in variables_before.items():
            setattr(cpp_extension, name, value)
        for name, value in closed.items():
            setattr(sys, name, value)

    _undo.append(put_back)
    try:
        for name, value in variables.items():
            setattr(cpp_extension, name, value)
        for name in closed:
            setattr(sys, name, io.StringIO())
        yield
    finally:
        _undo.remove(put_back)
        put_back()


def _for_nvcc(include: list[str], flags: list[str]) -> list[str]:
    """Folders of headers go to the host compiler: nvcc splits an -I at commas. It splits what is behind -Xcompiler too, but not where a
    backslash stands before the comma, and passes it through a second shell."""
    flags = [*(part for flag in include for part in ("-Xcompiler", flag)), *flags]
    return [re.sub(r'([\\",])', r"\\\1", shlex.quote(flag)) if before == "-Xcompiler" else flag
            for before, flag in zip(["", *flags], flags, strict=False)]


def quote(flag: str) -> str:
    """For the shell, and then for ninja. What stands for a unique name becomes the process id of the command's own shell."""
    return shlex.quote(flag).replace("$", "$$").replace(_UNIQUE, "$$$$")


def _check_dependencies(recipe: Recipe, work: Path, read: list[list[Path]], compiler: Compiler, nvcc: Nvcc | None) -> None:
    """Hold what the compiler read against what the key covers: nothing may decide the binary that the key does not know."""
    include, folder, added = str(resources.folder("kernels_c")), str(recipe.folder), recipe.flags.include
    trusted = files.inside([str(work), *compiler.includes.split(":"), *([nvcc.root] if nvcc else [])])
    forbidden = files.inside([os.path.dirname(torch.__file__), sysconfig.get_path("include"), sysconfig.get_path("platinclude")])
    place = cache(os.path.realpath)  # many files lie in few folders
    for path in dict.fromkeys(path for listing in read for path in listing):
        real = os.path.join(place(os.path.join(work, path.parent)), path.name)
        real = os.path.realpath(real) if os.path.islink(real) else real
        if real.startswith(forbidden):
            raise _fault(recipe, f"it includes {path}: an op is plain C over opjit.h, and torch's and Python's headers would tie its "
                                 "binary to one version of them")
        if real.startswith(trusted):
            continue
        names = {headers.portable_name(headers.plain(os.path.join(work, path)), folder, include, added),
                 headers.portable_name(real, os.path.realpath(folder), os.path.realpath(include), tuple(map(os.path.realpath, added)))}
        if not names & recipe.inputs.keys():
            raise _fault(recipe, f"it includes {path} in a way that a scan of its #include lines does not show, so a change of that "
                                 "file would go unseen; name the file in an #include line")
        if not any(name.startswith("<opjit>/") for name in names) and b".incbin" in Path(real).read_bytes():
            raise _fault(recipe, f"{path} takes in a file by .incbin, of which no compiler tells, so a change of that file would go "
                                 "unseen; put its bytes into a header (xxd -i)")


def _fault(recipe: Recipe, what: str, command: str | None = None) -> BuildError:
    return BuildError(f"{recipe.schema.qualified} for {recipe.target} was not built: {what}", op=recipe.schema.qualified,
                      target=str(recipe.target), command=command)
