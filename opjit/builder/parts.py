"""Outputs of compilers that builds keep for later builds: opjit's runtime, object files, the macros of torch's headers, emulated binaries.

    <root>/v2/parts/<key>/           the files, parts.json with the SHA-256 of each and, if their making was watched, reads.json
    <root>/v2/parts/shared/<key>/    the same of a file that depends only on torch and the compilers

A part is verified like an entry, appears by one rename, and is pruned by the same rule. A shared one travels like an entry: `packed` makes
a bundle of it, and `receive` publishes it on another machine, which uses it if its compilers, torch and headers of the system are the same.
"""

import json
import os
import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from opjit import files, processes, progress
from opjit.builder.compile_step import CompilerFailed, run_tool
from opjit.errors import BuildError, EntryError, UntrustedFolder
from opjit.recipe import reads, recorder
from opjit.recipe.compilers import Compiler
from opjit.recipe.document import FORMAT, document_key
from opjit.recipe.reads import EVERYWHERE, Moment, Reads
from opjit.recipe.record_reader import RecordReader
from opjit.share import remote
from opjit.store import layers
from opjit.store import manifest as manifests
from opjit.store.bundle import Bundle
from opjit.store.manifest import Manifest
from opjit.store.store import PARTS, SHARED, Store

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


def is_current(
    place: Path, needed: Collection[str], moment: Moment, note: Path | None = None
) -> bool:
    """Return whether parts are whole, and all that made them is unchanged. `note` keeps signatures of files, see `reads.changes`."""
    return is_whole(place, [*needed, _READS]) and _is_unchanged(place, moment, note)


def _is_unchanged(place: Path, moment: Moment, note: Path | None = None) -> bool:
    with suppress(OSError, EntryError, ValueError, TypeError):
        return not any(reads.differences(kept_reads(place), moment, note))
    return False


def name_of(content: object, shared: bool = False) -> str:
    """Return the name of the parts with a content, which decides their bytes."""
    key = files.sha256(json.dumps([FORMAT, content]))
    return f"{SHARED}/{key}" if shared else key


def kept(
    base: Path,
    name: str,
    needed: Collection[str],
    covered: tuple[str, ...],
    make: Callable[[Path], object],
    is_good: Callable[[Path], bool] | None = None,
) -> Path:
    """Return a folder of parts that `make` writes, once for each name and each state of the files that its tools read.

    The name covers the programs, and the files below the prefixes `covered`. Tools run in the folder that `make` gets, or below it.

    Verifies the parts, by `is_good` or by the digests of all files, and replaces damaged ones. A layer may have them and, if they are
    shared, the remote. One process makes a part, and the other processes wait for it. Raises UntrustedFolder if other users can write the
    store's folder of parts.
    """
    note = Store(base.parent).seen(os.path.basename(name))
    # Each time as the files are then: they may change while another process makes the part.
    is_good = is_good or (lambda place: is_current(place, needed, Moment(), note))
    found = find_parts(base, name, is_good)
    if found is not None:
        return found
    with processes.importing:  # only builds import filelock
        from opjit import lock

    def make_watched(staged: Path) -> None:
        started = files.tick(staged)
        make(staged)
        reader = RecordReader(str(staged), Moment(), covered, started)
        read = reader.reads(staged.rglob(recorder.LOG))
        doubt = read.doubt or ("" if read.digests else "its compiler cannot be watched")
        keep_reads(staged, Reads(read.digests, read.absent, doubt))

    def on_wait(holder: str) -> None:
        progress.step(f"waiting for a part of the compilers: {holder}")

    with lock.held(f"part-{os.path.basename(name)}", on_wait):
        place = find_parts(base, name, is_good) or fetched(base, name, is_good)
        if place is None:
            place = publish_parts(base, name, is_good, make_watched)
            is_good(place)  # takes note of it
        return place


def kept_json(
    base: Path, content: object, covered: tuple[str, ...], compute: Callable[[Path], object]
) -> Any:
    """Return a shared value in JSON that is computed once, as `kept` does. `compute` gets the folder for its tools."""

    def make(staged: Path) -> None:
        (staged / _VALUE).write_text(json.dumps(compute(staged)))

    place = kept(base, name_of(content, shared=True), [_VALUE], covered, make)
    return json.loads((place / _VALUE).read_text())


def part_folders(base: Path) -> list[Path]:
    """Return the directories in which parts can be: the layers' and the store's."""
    return [each / PARTS for each in (*(Store(root).base for root in layers.named()), base)]


def find_parts(base: Path, name: str, is_good: Callable[[Path], bool]) -> Path | None:
    """Return a good folder of parts in a layer or a store's folder; None if `publish_parts` has to make it."""
    for folder in part_folders(base):
        place = folder / name
        if is_good(place) and files.trust_problem(place.parent) is None:
            with suppress(OSError):
                # `prune` leaves parts alone that a build used lately, because it may be linking with them.
                os.utime(place)
            return place
    return None


def fetched(base: Path, name: str, is_good: Callable[[Path], bool]) -> Path | None:
    """Fetch shared parts from the remote. None if it is not set or lacks them, or if they were made from other files."""
    if name.startswith(SHARED) and os.environ.get("OPJIT_REMOTE"):
        received = remote.fetch_parts(name)
        with suppress(OSError, EntryError):
            if received is not None and is_good(receive(base, name, received, is_good)):
                return base / PARTS / name
    return None


def publish_parts(
    base: Path,
    name: str,
    is_good: Callable[[Path], bool],
    make: Callable[[Path], object],
) -> Path:
    """Replace a bad folder of parts.

    Raises UntrustedFolder if other users can write the folder of parts.
    """
    place = base / PARTS / name
    files.make_private(place.parent)
    problem = files.trust_problem(place.parent)
    if problem is not None:  # other users could exchange the parts between their check and the link
        raise UntrustedFolder(problem)
    staged, aside = (place.parent / f".{files.random_name()}" for _ in range(2))
    staged.mkdir(mode=0o700)
    try:
        make(staged)
        (staged / recorder.LOG).unlink(missing_ok=True)
        for path in filter(Path.is_dir, [*staged.iterdir()]):
            files.remove_tree(path)
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


def packed(place: Path) -> Bundle:
    """Return a shared part as a bundle, unsigned and compressed: GCC's 150 MB are 27 MB in 1.2 s, and zstd would save 4 MB and 1 s.

    Raises EntryError if it is damaged, or if its compiler could not be watched, and OSError.
    """
    read = kept_reads(place)
    (name,) = {*os.listdir(place)} - {_LIST, _READS}
    if read.doubt or not is_whole(place, [name, _READS]):
        raise EntryError(read.doubt or "it is damaged; the next build that needs it replaces it")
    document = {"made_by": PARTS, "name": f"{SHARED}/{place.name}", **read.document(EVERYWHERE)}
    content = zlib.compress(files.read(place / name, _MAX_BYTES), 1)
    digest = files.sha256(content)
    manifest = Manifest(document_key(document), document, name, len(content), digest, {})
    return Bundle(manifest.dump(), content)


def receive(base: Path, name: str, received: Bundle, is_good: Callable[[Path], bool]) -> Path:
    """Publish the shared parts in a bundle. Its signature, name and digests were checked. Raises EntryError if the file is damaged."""
    manifest = manifests.parse(received.manifest)

    def make(staged: Path) -> None:
        stream = zlib.decompressobj()
        with suppress(zlib.error):
            content = stream.decompress(received.library, _MAX_BYTES)
            (staged / manifest.library).write_bytes(content)
        if not stream.eof:
            raise EntryError(f"its file is damaged, or larger than {_MAX_BYTES} bytes")
        keep_reads(staged, reads.loaded(manifest.document, EVERYWHERE))

    return publish_parts(base, name, is_good, make)


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
    """Return whether a large part is whole and current. A note saves verifying its digest again while the file is the same."""
    seen = [str(place), reads.signature(str(place / name))]
    if files.read_checked(note) != seen:
        if not is_whole(place, [name]):
            return False
        files.write_checked(note, seen)
    return files.trust_problem(place) is None and _is_unchanged(place, Moment())


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
