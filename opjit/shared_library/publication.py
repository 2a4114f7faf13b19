"""Builds a binary from any sources in a private folder and publishes its entry: what shared libraries and C++ extensions have in common."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from opjit import files, progress
from opjit.builder.compile_step import workspace
from opjit.builder.publish import Subject, publish, write_entry
from opjit.errors import EntryError
from opjit.recipe import headers
from opjit.shared_library.content import Content, entries_folder
from opjit.store import elf
from opjit.store.entry import Entry
from opjit.store.manifest import Manifest
from opjit.store.store import Store


class Compiled(NamedTuple):
    """What the compilers made of a content."""

    content: Content  # with the versions of the compilers that made it
    library: Path
    linked_by: str
    read: Iterable[str]  # the paths of all files that the compilers read
    trusted: tuple[str, ...]  # the prefixes of real paths that a version in the key covers
    others: Iterable[Path] = ()  # files that the entry gets, too
    remarks: Mapping[str, str] = {}  # for people
    check: Callable[[Path], None] = lambda _: (
        None
    )  # raises an error if the library, at a path, must not be published


def build_and_publish(
    content: Content, store: Store, must_store: bool, compile_in: Callable[[Path, Path], Compiled]
) -> Entry:
    """Build and publish an entry; see `publish`. `compile_in` compiles in a folder, with another for parts and logs. Raises BuildError if
    the tools left no valid library, or a source changed during the build; and what `compile_in` raises."""
    subject = Subject(
        content.name,
        content.purpose,
        None,
        lambda store, manifest: store.base / entries_folder(manifest.document),
        headers.unreadable(content.inputs),
        must_store,
    )

    def make(staged: Path, base: Path) -> Manifest:
        with workspace(staged) as work:
            started = time.time_ns()
            progress.step("compiling")
            made = compile_in(work, base)
            seconds = (time.time_ns() - started) / 1e9
            progress.step("checking")
            document = {**made.content.document(), "found": _headers_found(made, subject, started)}
            if not subject.unread and content.scanned().inputs != content.inputs:
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
                content.file_name,
                binary,
                made.others,
                document,
                {"seconds": f"{seconds:.3f}", **made.remarks},
            )
            made.check(
                staged / "entry" / content.file_name
            )  # before publication, as other processes do not check again
            return manifest

    return publish(subject, store, make)


def _headers_found(made: Compiled, subject: Subject, started: int) -> dict[str, str]:
    """Return the SHA-256 of the headers that a compiler read, but that neither the scan nor a version in the key covers."""
    found = {}
    for path in headers.unscanned(
        made.read, map(made.content.place, made.content.inputs), made.trusted
    ):
        if os.stat(path).st_ctime_ns >= started:  # the time of modification may lie in the future
            raise subject.fault(f"{path} changed during compilation; build it again")
        found[made.content.portable(headers.normalized(path))] = files.digest(path)
    return found
