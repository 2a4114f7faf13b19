"""Builds a binary from any sources in a private folder and publishes its entry: what shared libraries and C++ extensions have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from opjit import files, progress
from opjit.builder.compile_step import workspace
from opjit.builder.publish import Made, Subject, publish, remember, write_entry
from opjit.errors import EntryError
from opjit.recipe.build_inputs import BuildInputs
from opjit.recipe.reads import Reads
from opjit.recipe.reports import Changed
from opjit.store import elf
from opjit.store.entry import Entry
from opjit.store.store import Store


class Compiled(NamedTuple):
    """The result of the compilers."""

    inputs: BuildInputs  # with the versions of the compilers that made it
    library: Path
    linked_by: str
    read: Reads  # the files that the tools read
    others: Iterable[Path] = ()  # more files for the entry
    remarks: Mapping[str, str] = {}  # for people
    check: Callable[[Path], None] = lambda _: (
        None
    )  # raises an error if the library, at a path, must not be published


def build_and_publish(
    inputs: BuildInputs,
    store: Store,
    must_store: bool,
    compile_in: Callable[[Path, Path, int], Compiled],
) -> Entry:
    """Build and publish an entry; see `publish`. `compile_in` compiles in a folder, with another for parts and logs, from a time on that
    later changes have. Raises BuildError if the tools left no valid library, or a source changed during the build; and what `compile_in`
    raises."""
    subject = Subject(inputs, must_store)
    started = 0

    def make(staged: Path, base: Path) -> Made:
        nonlocal started
        with workspace(staged) as work:
            started = files.tick(work)
            begun = time.perf_counter()
            progress.step("compiling")
            try:
                made = compile_in(work, base, started)
            except Changed as changed:
                raise subject.fault(
                    f"sources changed during compilation: {changed}; build it again"
                ) from None
            seconds = time.perf_counter() - begun
            progress.step("checking")
            if not inputs.doubt and inputs.now().known != inputs.known:
                raise subject.fault("sources changed during compilation; build it again")
            try:
                binary = made.library.read_bytes()
                elf.inspect(binary)
            except (FileNotFoundError, EntryError) as error:
                raise subject.fault(
                    f"{made.linked_by} reported success but left no valid library: {error}",
                    made.linked_by,
                ) from None
            manifest = write_entry(
                staged / "entry",
                inputs.file_name,
                binary,
                made.others,
                subject.document(made.inputs, made.read, made.linked_by),
                {"seconds": f"{seconds:.3f}", **made.remarks},
            )
            made.check(
                staged / "entry" / inputs.file_name
            )  # before publication, because other processes do not check again
            return Made(manifest, inputs.doubt or made.read.doubt, inputs.key)

    entry = publish(subject, store, make)
    remember(entry, store, inputs.places, started)
    return entry
