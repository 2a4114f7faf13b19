"""Publication of a build's entry: in the store or, if that fails, in a folder of this process."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from opjit import files, progress
from opjit.errors import (
    BuildError,
    CacheWarning,
    CompileError,
    EntryError,
    RecordError,
    UntrustedFolder,
)
from opjit.recipe import reads
from opjit.recipe.build_inputs import BuildInputs
from opjit.recipe.document import document_key
from opjit.recipe.reads import Places, Reads
from opjit.store import manifest as manifests
from opjit.store import prune, usage
from opjit.store.entry import Entry
from opjit.store.manifest import NAME, Manifest
from opjit.store.store import UNCACHED, Store, default_root

_COVERED = ("<opjit>", "<own ")  # the names of files of opjit, torch and Python


class Made(NamedTuple):
    """An entry in a staging folder."""

    manifest: Manifest
    doubt: str = ""  # why it must not be cached
    request: str = ""  # the key of the request, under which `why` finds the doubt


MakeEntry = Callable[[Path, Path], Made]


class Subject(NamedTuple):
    """A binary to build."""

    inputs: BuildInputs
    must_store: bool = False  # do not fall back to a folder of this process

    def __str__(self) -> str:
        return str(self.inputs)

    def document(self, made: BuildInputs, read: Reads, compiler: str) -> dict[str, Any]:
        """Return the document of its entry, as `made` by tools that read these files.

        Raises RecordError if only a list names the binary, and another user except the owner of the
        compiler can write one of the files.
        """
        found = made.document(read)
        if self.inputs.only_listed:
            self._require_closed(found, Path(compiler))
        return found

    def _require_closed(self, document: Mapping[str, Any], trusted: Path) -> None:
        for name in (*document["known"], *document["inputs"]):
            path = None if name.startswith(_COVERED) else self.inputs.places.path(name)
            problem = files.replacement_risk(Path(path), trusted) if path is not None else None
            if problem is not None:
                raise RecordError(
                    f"refusing to build {self} from files that only the list names: {problem}"
                )

    def fault(self, what: str, command: str | None = None) -> BuildError:
        """Make an error of its build."""
        return BuildError(
            f"{self} was not built: {what}",
            op=self.inputs.name,
            target=self.inputs.purpose,
            command=command,
        )


def publish(subject: Subject, store: Store, make: MakeEntry) -> Entry:
    """Build an entry and publish it: in the store or, if the store fails, in a folder of this process. Raises BuildError if neither can be
    written, or the binary must be in the store. `make` makes the folder ``entry`` in a folder, with another for parts and logs."""
    started = time.perf_counter()
    try:
        entry = _publish_in(store, subject, make)
    except (OSError, EntryError) as reason:
        _refuse_or_warn(subject, store, reason)
        try:
            entry = _publish_in(Store(files.temporary_folder()), subject, make)
        except (OSError, EntryError) as error:
            raise subject.fault(
                f"the cache cannot be used ({reason}), nor a temporary folder ({error}); set OPJIT_CACHE or TMPDIR to a "
                "folder that you can write"
            ) from error
    usage.count(store.base, "builds")
    progress.log(f"built {subject} in {time.perf_counter() - started:.2f} s: {entry.folder}")
    return replace(entry, origin="built")


def _publish_in(store: Store, subject: Subject, make: MakeEntry) -> Entry:
    """Move the entry to its place.

    If another process published it first, use that entry.
    """
    staged = store.stage()
    try:
        made = make(staged, store.base)
        manifest = made.manifest
        progress.step("publishing")
        entry_of = staged / "entry"
        at = store
        if made.doubt:
            at = _private(subject, store, made)
            entry_of = at.stage() / "entry"
            shutil.copytree(staged / "entry", entry_of)
        elif store.notes is not None:
            (store.notes / f"{UNCACHED}{made.request}").unlink(missing_ok=True)
        place = at.base / subject.inputs.place_of(manifest.document) / manifest.key
        entry = at.put(entry_of, place, manifest, subject.inputs.op_target)
    except CompileError as error:
        if os.path.isdir(staged):
            raise
        raise EntryError(
            f"its staging folder {staged} was removed"
        ) from error  # which makes the compilers fail
    finally:
        files.remove_tree(staged)
    if store.root == default_root():  # other stores are never pruned
        prune.after_build(store)
    return entry


def remember(entry: Entry, store: Store, places: Places, started: int) -> None:
    """Note the results of stat for the files that a build read, which began at a time of
    `files.tick`.
    """
    if store.base in entry.folder.parents:
        text = files.read(entry.folder / NAME, manifests.MAX_BYTES)
        document = manifests.parse(text).document
        reads.remember(document, places, store.seen(entry.key), started)


def _private(subject: Subject, store: Store, made: Made) -> Store:
    """Return a store of this process for an entry that must not be cached, and note the reason."""
    if subject.must_store:
        raise subject.fault(f"it cannot be kept in a store, because {made.doubt}")
    if store.notes is not None:
        note = {"name": subject.inputs.name, "reason": made.doubt}
        files.write_checked(store.notes / f"{UNCACHED}{made.request}", note)
    warnings.warn(
        CacheWarning(f"{subject.inputs.name} is built for this process only, because {made.doubt}"),
        stacklevel=4,
    )
    return Store(files.temporary_folder())


def _refuse_or_warn(subject: Subject, store: Store, reason: Exception) -> None:
    if subject.must_store:
        advice = (
            "or name another store"
            if isinstance(reason, UntrustedFolder)
            else "make room there or name another store"
        )
        raise subject.fault(
            f"the store {store.root} cannot hold it: {reason}; {advice}"
        ) from reason
    if isinstance(reason, UntrustedFolder):
        store.warn_unused(str(reason))
        return
    warnings.warn(
        CacheWarning(
            f"the cache cannot be used, so {subject.inputs.name} is built for this process only: {reason}; set OPJIT_CACHE to "
            "a directory that only you can write"
        ),
        stacklevel=3,
    )


def write_entry(
    folder: Path,
    library: str,
    content: bytes,
    others: Iterable[Path],
    document: dict[str, Any],
    built_with: Mapping[str, str],
) -> Manifest:
    """Make the folder of an entry with its files, and return its manifest. The hash of `document` is the key; people read `built_with`."""
    folder.mkdir(mode=0o700)
    for path in others:
        files.write_synced(folder / path.name, path.read_bytes())
    files.write_synced(folder / library, content)
    manifest = Manifest(
        document_key(document),
        document,
        library,
        len(content),
        hashlib.sha256(content).hexdigest(),
        {**built_with},
    )
    files.write_synced(folder / NAME, manifest.dump())
    return manifest
