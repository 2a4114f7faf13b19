"""Outputs of compilers that builds keep for later builds: opjit's runtime, object files, the macros of torch's headers, emulated binaries.

    <root>/v2/parts/<key>/    the files, parts.json with the SHA-256 of each and, if their making was watched, reads.json

A part is verified like an entry, appears by one rename, and is pruned by the same rule.
"""

import json
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from opjit import files, processes, progress
from opjit.builder.compile_step import CompilerFailed, run_tool
from opjit.errors import BuildError, EntryError, UntrustedFolder
from opjit.recipe import reads
from opjit.recipe.compilers import Compiler
from opjit.recipe.document import FORMAT
from opjit.recipe.reads import Moment, Reads
from opjit.store import layers
from opjit.store.store import PARTS, Store

_LIST = "parts.json"
_READS = "reads.json"
_VALUE = "value.json"
_MAX_BYTES = 1 << 28  # of a part


def keep_reads(place: Path, read: Reads) -> None:
    """Note in a folder of parts what made them."""
    (place / _READS).write_text(json.dumps(read._asdict(), sort_keys=True))


def kept_reads(place: Path) -> Reads:
    """Return what made the parts in a folder. Raises OSError, EntryError, ValueError or TypeError."""
    return Reads(**json.loads(files.read(place / _READS, _MAX_BYTES)))


def is_current(place: Path, needed: Collection[str], moment: Moment) -> bool:
    """Return whether parts are whole, and all that made them is unchanged."""
    with suppress(OSError, EntryError, ValueError, TypeError):
        if is_whole(place, [*needed, _READS]):
            return not any(reads.differences(kept_reads(place), moment))
    return False


def kept(
    base: Path,
    content: object,
    needed: Collection[str],
    make: Callable[[Path], object],
    is_good: Callable[[Path], bool] | None = None,
) -> Path:
    """Return a folder of parts that `make` writes, once for each content, which decides their
    bytes.

    Verifies them, by `is_good` or by the digests of the `needed` files, and replaces damaged ones; a
    layer may have them. One process makes a part, and the other processes wait for it. Raises UntrustedFolder if
    other users can write the store's folder of parts.
    """
    is_good = is_good or partial(is_whole, needed=needed)
    found = find_parts(base, content, is_good)
    if found is not None:
        return found
    with processes.importing:  # only builds import filelock
        from opjit.store import lock

    def on_wait(holder: str) -> None:
        progress.step(f"waiting for a part of the compilers: {holder}")

    with lock.held(f"part-{_key(content)}", on_wait):
        place = find_parts(base, content, is_good)
        if place is None:
            place = publish_parts(base, content, is_good, make)
            is_good(place)  # takes note of it
        return place


def kept_json(base: Path, content: object, compute: Callable[[], object]) -> Any:
    """Return a value in JSON that is computed once for each content."""

    def make(staged: Path) -> None:
        (staged / _VALUE).write_text(json.dumps(compute()))

    return json.loads((kept(base, content, [_VALUE], make) / _VALUE).read_text())


def part_folders(base: Path) -> list[Path]:
    """Return the directories in which parts can be: the layers' and the store's."""
    return [each / PARTS for each in (*(Store(root).base for root in layers.named()), base)]


def find_parts(base: Path, content: object, is_good: Callable[[Path], bool]) -> Path | None:
    """Return a good folder of parts in a layer or a store's folder; None if `publish_parts` has to make it."""
    for folder in part_folders(base):
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
    make: Callable[[Path], object],
) -> Path:
    """Replace a bad folder of parts.

    Raises UntrustedFolder if other users can write the folder of parts.
    """
    place = base / PARTS / _key(content)
    files.make_private(place.parent)
    problem = files.trust_problem(place.parent)
    if problem is not None:  # other users could exchange the parts between their check and the link
        raise UntrustedFolder(problem)
    staged, aside = (place.parent / f".{files.random_name()}" for _ in range(2))
    staged.mkdir(mode=0o700)
    try:
        make(staged)
        for path in (parts := sorted(staged.iterdir())):
            path.chmod(0o644)
            files.sync(path)
        files.write_synced(
            staged / _LIST,
            json.dumps({path.name: files.digest(str(path)) for path in parts}).encode(),
        )
        files.put_in_place(staged, place, aside, is_good)
    finally:
        files.remove_tree(staged)
        files.remove_tree(aside)
    return place


def _key(content: object) -> str:
    return files.sha256(json.dumps([FORMAT, content]))


def is_whole(place: Path, needed: Collection[str]) -> bool:
    """Return whether the parts are complete and unchanged, and no other user can have written them."""
    try:
        digests = dict(json.loads(files.read(place / _LIST, _MAX_BYTES)))
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


def is_known(note: Path, name: str, place: Path) -> bool:
    """Return whether a large part is whole. A note saves verifying its digest again while the file is the same."""
    seen = [str(place), reads.signature(str(place / name))]
    if files.read_checked(note) != seen:
        if not is_whole(place, [name]):
            return False
        files.write_checked(note, seen)
    return files.trust_problem(place) is None


def compile_part(compiler: Compiler, arguments: Sequence[str], work: Path) -> str:
    """Run a compiler for a part, and return its output. Raises BuildError if it fails."""
    try:
        return run_tool([compiler.path, *arguments], work)
    except CompilerFailed as failed:
        from opjit.builder.diagnosis import with_advice  # late: only a build that fails needs it

        said = str(failed).strip()[:2000]
        raise BuildError(
            f"{compiler.path} failed to compile opjit's runtime: {with_advice(said)}",
            op="opjit's runtime",
            target=compiler.machine,
            command=" ".join([compiler.path, *arguments]),
        ) from None
