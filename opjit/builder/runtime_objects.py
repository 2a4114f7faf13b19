"""The parts that every op is linked with: opjit's compiled runtime and stubs of torch's libraries, made once per compiler and flags.

    <root>/v2/parts/<key>/    opjit_runtime.o, opjit_convert.o, opjit_elementwise.o, libtorch_cpu.so, …, reads.json with the files that
                              made them, and parts.json with the SHA-256 of all

A stub is a shared library with the soname of one of torch's and empty versions of the functions in
opjit_shim.h. So the linker reports misspelled and unsupported functions, and a build does not
depend on the installed torch. (Linking against torch is 0.2 s slower.)
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from opjit import files, processes, progress, resources
from opjit.backends import Flags, Shared
from opjit.builder.compile_step import CompilerFailed, run_tool
from opjit.builder.diagnosis import with_advice
from opjit.errors import BuildError, EntryError, UntrustedFolder
from opjit.recipe import reads
from opjit.recipe.compilers import Compiler
from opjit.recipe.reads import Moment, Places, Reads
from opjit.recipe.reports import ReportReader, Search
from opjit.recipe.toolchain import system_folders, versions_of
from opjit.store import layers
from opjit.store.store import PARTS, Store

# Linked into every op's library.
RUNTIME = (
    "opjit_runtime.c",
    "opjit_convert.c",
    "opjit_elementwise.c",
)
OBJECTS = tuple(f"{Path(source).stem}.o" for source in RUNTIME)
LIST = "parts.json"
_READS = "reads.json"
_EVERYWHERE = Places(os.sep)
_MAX_BYTES = 1 << 28  # of a part
_OF_CUDA = re.compile(r"cuda_(stream|caching|mm|addmm)")
# Named by torch's own link flags, needed by no op.
_UNUSED = (
    "c10",
    "torch",
    "c10_cuda",
    "torch_cuda",
)

_FLAGS = ["-O1", "-ftree-vectorize", "-fPIC"]


def folder(base: Path, compiler: Compiler, flags: Flags) -> tuple[Path, Reads]:
    """Return the folder inside the store's folder with the parts for a compiler and a backend's
    flags, and the inputs of the parts.

    Raises OSError if the folder is not writable, UntrustedFolder if other users can write it,
    BuildError if the compiler failed.
    """
    include = resources.include_path()
    tools = versions_of(compiler, "cc")
    content = [include, tools, compiler.includes, flags.c, _FLAGS, flags.stubs]
    moment = Moment()

    def is_good(place: Path) -> bool:
        return is_current(place, OBJECTS, moment)

    def make(staged: Path) -> None:
        _make(staged, include, compiler, flags)

    place = kept(base, content, OBJECTS, make, is_good=is_good)
    return place, kept_reads(place)


def keep_reads(place: Path, read: Reads) -> None:
    """Note in a folder of parts what made them."""
    (place / _READS).write_text(json.dumps(read.document(_EVERYWHERE)))


def kept_reads(place: Path) -> Reads:
    """Return what made the parts in a folder. Raises OSError, EntryError or ValueError."""
    return reads.loaded(json.loads(files.read(place / _READS, _MAX_BYTES)), _EVERYWHERE)


def is_current(place: Path, needed: Collection[str], moment: Moment) -> bool:
    """Return whether parts are whole, and all that made them is unchanged."""
    with suppress(OSError, EntryError, ValueError):
        if is_whole(place, [*needed, _READS]):
            document = json.loads(files.read(place / _READS, _MAX_BYTES))
            return not any(reads.changes(document, _EVERYWHERE, moment))
    return False


def kept(
    base: Path,
    content: object,
    needed: Collection[str],
    make: Callable[[Path], None],
    kind: str = PARTS,
    is_good: Callable[[Path], bool] | None = None,
) -> Path:
    """Return a folder of parts that `make` writes, once for each content, which decides their
    bytes.

    Verifies them, by `is_good` or by the digests of the `needed` files, and replaces damaged ones; a
    layer may have them. One process makes a part, and the other processes wait for it. Raises UntrustedFolder if
    other users can write the store's folder of parts.
    """
    is_good = is_good or partial(is_whole, needed=needed)
    found = find_parts(base, content, is_good, kind)
    if found is not None:
        return found
    with processes.importing:  # only builds import filelock
        from opjit.store import lock

    def on_wait(holder: str) -> None:
        progress.step(f"waiting for a part of the compilers: {holder}")

    with lock.held(f"part-{_key(content)}", on_wait):
        return find_parts(base, content, is_good, kind) or publish_parts(
            base, content, is_good, make, kind
        )


def part_folders(base: Path, *kinds: str) -> list[Path]:
    """Return the directories in which parts can be: the layers' and the store's."""
    bases = (*(Store(root).base for root in layers.named()), base)
    return [each / kind for each in bases for kind in kinds]


def find_parts(
    base: Path, content: object, is_good: Callable[[Path], bool], kind: str = PARTS
) -> Path | None:
    """Return a good folder of parts in a layer or a store's folder; None if `publish_parts` has to make it."""
    for folder in part_folders(base, kind):
        place = folder / _key(content)
        if is_good(place) and files.trust_problem(place.parent) is None:
            with suppress(OSError):
                # `prune` leaves parts alone that a build used lately, because it may be linking with them.
                os.utime(place)
            return place
    return None


def publish_parts(
    base: Path,
    content: object,
    is_good: Callable[[Path], bool],
    make: Callable[[Path], None],
    kind: str = PARTS,
) -> Path:
    """Replace a bad folder of parts.

    Raises UntrustedFolder if other users can write the folder of parts.
    """
    place = base / kind / _key(content)
    files.make_private(place.parent)
    problem = files.trust_problem(place.parent)
    if problem is not None:  # others could exchange the parts between their check and the link
        raise UntrustedFolder(problem)
    staged, aside = (place.parent / f".{files.random_name()}" for _ in range(2))
    staged.mkdir(mode=0o700)
    try:
        make(staged)
        for path in (parts := sorted(staged.iterdir())):
            path.chmod(0o644)
            files.sync(path)
        files.write_synced(
            staged / LIST,
            json.dumps({path.name: files.digest(str(path)) for path in parts}).encode(),
        )
        files.put_in_place(staged, place, aside, is_good)
    finally:
        files.remove_tree(staged)
        files.remove_tree(aside)
    return place


def _key(content: object) -> str:
    return files.sha256(json.dumps(content))


def is_whole(place: Path, needed: Collection[str]) -> bool:
    """Return whether the parts are complete and unchanged, and no other user can have written them."""
    try:
        digests = dict(json.loads(files.read(place / LIST, _MAX_BYTES)))
        return (
            digests.keys() >= set(needed)
            and files.trust_problem(place) is None
            and all(
                files.sha256(files.read(place / name, _MAX_BYTES)) == digest
                for name, digest in digests.items()
            )
        )
    except (OSError, EntryError, ValueError, TypeError, RecursionError):
        return False


def _make(work: Path, include: str, compiler: Compiler, flags: Flags) -> None:
    """Make all parts, and note their inputs.

    -O1 and side by side: 0.45 s for the first get, where -O3 and one by one take 0.9 s (tests/benchmarks/cold.py).
    Only the loops of opjit_convert.c need vectors."""
    started = files.tick(work)

    def compile_one(source: str) -> None:
        paths = {"folder": include, "include": include, "staging": str(work), "unique": source}
        options = [flag.format(**paths) for flag in flags.c]
        options += [*_FLAGS, "-c", f"-I{include}", f"{include}/{source}"]
        compile_part(compiler, options, work)

    processes.in_parallel(compile_one, RUNTIME)
    system = system_folders([compiler])
    reader = ReportReader(str(work), str(work), Moment(), system, (), started)
    lists = [*work.glob("*.deps")]
    order = (include, *filter(None, compiler.includes.split(":")))
    keep_reads(work, reader.compiled([*reads.listed(lists), _shim()], [], Search((), order)))
    for each in lists:
        each.unlink()
    for library in flags.stubs:
        stub_of_torch(library, compiler, work)
    for name in _UNUSED:
        (work / f"lib{name}.a").write_bytes(b"!<arch>\n")


def _shim() -> str:
    """The header of torch's functions, from which the stubs are made."""
    return str(resources.folder("kernels_c") / "opjit_shim.h")


def stub_of_torch(library: str, compiler: Compiler, work: Path) -> None:
    """Make a stub of one of torch's libraries, ``"libtorch_cpu"``, in a folder."""
    header = Path(_shim()).read_text("utf-8")
    declared = sorted(set(re.findall(r"\b((?:aoti_)?torch_\w+)\(", header)))
    of_cuda = library == "libtorch_cuda"
    functions = [name for name in declared if bool(_OF_CUDA.search(name)) == of_cuda]
    stub(compiler, f"{library}.so", functions, work)


def stub(compiler: Compiler, soname: str, functions: Iterable[str], work: Path) -> None:
    (work / f"{soname}.c").write_text(
        "".join(f"void {function}(void) {{}}\n" for function in functions), "ascii"
    )
    compile_part(
        compiler,
        ["-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{soname}", "-o", soname, f"{soname}.c"],
        work,
    )


def stubs_of(libraries: Iterable[Shared], compiler: Compiler, work: Path) -> tuple[Shared, ...]:
    """Make stubs of this machine's shared libraries for a cross compiler's machine, in a new folder."""
    work.mkdir()
    made = []
    for library in libraries:
        rows = [
            line.split()
            for line in run_tool(
                ["readelf", "--dyn-syms", "--wide", library.path], work
            ).splitlines()
        ]
        names = {
            row[7].partition("@")[0]
            for row in rows
            if len(row) == 8 and row[3] == "FUNC" and row[6] != "UND"
        }
        stub(compiler, library.soname, sorted(names), work)
        made.append(Shared(library.soname, str(work / library.soname)))
    return tuple(made)


def compile_part(compiler: Compiler, arguments: Sequence[str], work: Path) -> str:
    """Run a compiler for a part, and return its output. Raises BuildError if it fails."""
    try:
        return run_tool([compiler.path, *arguments], work)
    except CompilerFailed as failed:
        said = str(failed).strip()[:2000]
        raise BuildError(
            f"{compiler.path} failed to compile opjit's runtime: {with_advice(said)}",
            op="opjit's runtime",
            target=compiler.machine,
            command=" ".join([compiler.path, *arguments]),
        ) from None
