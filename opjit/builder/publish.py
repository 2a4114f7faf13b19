"""From the result of the compilers to a published entry: in the store or, if that fails, in a folder of this process."""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from opjit import files, progress
from opjit.builder.compile_step import workspace
from opjit.errors import CompileError, EntryError, UntrustedFolder, warn_of_cache
from opjit.recipe import reads, recorder
from opjit.recipe.build_inputs import B, BuildInputs
from opjit.recipe.document import document_key
from opjit.recipe.reads import Reads
from opjit.recipe.record_reader import Changed
from opjit.store import elf, prune, usage
from opjit.store.entry import Entry
from opjit.store.manifest import NAME, Manifest
from opjit.store.store import UNCACHED, Store, default_root

_COVERED = ("<opjit>", "<own ")  # the names of files of opjit, torch and Python


class Compiled(NamedTuple):
    """The result of the compilers."""

    inputs: BuildInputs  # with the versions of the compilers that made it
    library: Path
    linked_by: str
    read: Reads  # the files that the tools read
    others: Iterable[Path] = ()  # more files for the entry
    remarks: Mapping[str, str] = {}  # for people
    # Returns the library to publish. Raises EntryError if it is not valid.
    finish: Callable[[bytes], bytes] = lambda content: content
    # Raises an error if the library, at a path, must not be published.
    check: Callable[[Path], None] = lambda _: None


CompileIn = Callable[[B, Path, Path, int], Compiled]


def build_and_publish(inputs: B, store: Store, must_store: bool, compile_in: CompileIn[B]) -> Entry:
    """Build an entry and publish it: in the store or, if the store fails and it need not be in the
    store, in a folder of this process.

    `compile_in` compiles inputs in a folder, with another for parts and logs, from a time on that
    later changes have. If a file changes meanwhile, the binary is dropped and the build begins
    again, once. Raises BuildError if the tools left no valid library, a file changed during both
    builds, or no folder can be written; RecordError as `_document` does; and what `compile_in`
    raises.
    """
    started = time.perf_counter()
    recorder.start(store.notes)
    try:
        return _build_once(inputs, store, must_store, compile_in, started)
    except Changed as changed:
        progress.log(f"{changed} changed during the build of {inputs}, which begins again")
        inputs = inputs.now()
    try:
        return _build_once(inputs, store, must_store, compile_in, started)
    except Changed as changed:
        raise inputs.fault(
            f"sources changed during compilation; build it again ({changed})"
        ) from None


def _build_once(
    inputs: B, store: Store, must_store: bool, compile_in: CompileIn[B], started: float
) -> Entry:
    try:
        entry = _publish_in(store, inputs, must_store, compile_in)
    except (OSError, EntryError) as reason:
        _refuse_or_warn(inputs, store, must_store, reason)
        try:
            entry = _publish_in(Store(files.temporary_folder()), inputs, must_store, compile_in)
        except (OSError, EntryError) as error:
            raise inputs.fault(
                f"the cache cannot be used ({reason}), nor a temporary directory ({error}); set OPJIT_CACHE or TMPDIR to a "
                "directory that you can write"
            ) from error
    usage.count(store.base, "builds")
    progress.log(f"built {inputs} in {time.perf_counter() - started:.2f} s: {entry.folder}")
    return replace(entry, origin="built")


def _publish_in(store: Store, inputs: B, must_store: bool, compile_in: CompileIn[B]) -> Entry:
    """Move the entry to its place.

    If another process published it first, use that entry.
    """
    staged = store.stage()
    try:
        started = files.tick(staged)
        manifest, read = _make_entry(staged, store.base, inputs, compile_in, started)
        doubt = inputs.doubt or read.doubt
        progress.step("publishing")
        entry_of = staged / "entry"
        at = store
        if doubt:
            at = _private(inputs, store, must_store, doubt)
            entry_of = at.stage() / "entry"
            shutil.copytree(staged / "entry", entry_of)
        elif store.notes is not None:
            (store.notes / f"{UNCACHED}{inputs.key}").unlink(missing_ok=True)
        place = at.base / inputs.place_of(manifest.document) / manifest.key
        entry = at.publish(entry_of, place, inputs.op_target)
        reads.remember(read, inputs.places, at.seen(entry.key), started)
    except CompileError as error:
        if os.path.isdir(staged):
            raise
        raise EntryError(
            f"its staging directory {staged} was removed"
        ) from error  # which makes the compilers fail
    finally:
        files.remove_tree(staged)
    if store.root == default_root():  # other stores are never pruned
        prune.after_build(store)
    return entry


def _make_entry(
    staged: Path, base: Path, inputs: B, compile_in: CompileIn[B], started: int
) -> tuple[Manifest, Reads]:
    """Make the folder ``entry``. Returns its manifest, and the reads of the tools."""
    with workspace(staged) as work:
        begun = time.perf_counter()
        progress.step("compiling")
        made = compile_in(inputs, work, base, started)
        seconds = time.perf_counter() - begun
        progress.step("checking")
        now = inputs.now().known
        if not inputs.doubt and now != inputs.known:
            raise Changed(next(name for name in now if now[name] != inputs.known.get(name)))
        try:
            binary = made.finish(made.library.read_bytes())
            elf.inspect(binary)
        except (FileNotFoundError, EntryError) as error:
            raise inputs.fault(
                f"{made.linked_by} reported success but left no valid library: {error}",
                made.linked_by,
            ) from None
        folder = staged / "entry"
        folder.mkdir(mode=0o700)
        for path in made.others:
            files.write_synced(folder / path.name, path.read_bytes())
        files.write_synced(folder / inputs.file_name, binary)
        document = _document(made)
        built_with = {"seconds": f"{seconds:.3f}", **made.remarks}
        manifest = Manifest(
            document_key(document),
            document,
            inputs.file_name,
            len(binary),
            files.sha256(binary),
            built_with,
        )
        files.write_synced(folder / NAME, manifest.dump())
        # This comes before publication, because other processes do not check again.
        made.check(folder / inputs.file_name)
        return manifest, made.read


def _document(made: Compiled) -> dict[str, Any]:
    """Return the document of an entry.

    Raises RecordError if only a list names the binary, and another user except the owner of the
    compiler can write one of the files that its tools read.
    """
    found = made.inputs.document(made.read)
    if made.inputs.only_listed:
        names = (*found["known"], *found["inputs"])
        path = made.inputs.places.path
        named = [path(name) for name in names if not name.startswith(_COVERED)]
        files.require_closed(str(made.inputs), filter(None, named), Path(made.linked_by))
    return found


def _private(inputs: BuildInputs, store: Store, must_store: bool, doubt: str) -> Store:
    """Return a store of this process for an entry that must not be cached, and note the reason."""
    if must_store:
        raise inputs.fault(f"it cannot be kept in a store, because {doubt}")
    notes = store.notes
    note = {"name": inputs.name, "reason": doubt}
    files.write_checked(notes and notes / f"{UNCACHED}{inputs.key}", note)
    warn_of_cache(f"{inputs.name} is built for this process only, because {doubt}")
    return Store(files.temporary_folder())


def _refuse_or_warn(inputs: BuildInputs, store: Store, must_store: bool, reason: Exception) -> None:
    if must_store:
        advice = (
            "or name another store"
            if isinstance(reason, UntrustedFolder)
            else "make room there or name another store"
        )
        raise inputs.fault(f"the store {store.root} cannot hold it: {reason}; {advice}") from reason
    if isinstance(reason, UntrustedFolder):
        store.warn_unused(str(reason))
        return
    warn_of_cache(
        f"the cache cannot be used, so {inputs.name} is built for this process only: {reason}; set OPJIT_CACHE to "
        "a directory that only you can write"
    )
