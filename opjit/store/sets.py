"""Complete sets: which entries a list of `opjit record` had when `opjit precompile --from` ended. An error under OPJIT_OFFLINE names the
list that has the op, for another target or from another source.

    <root>/v2/sets/<SHA-256 of the list>        a digest, and JSON: the list's path, and the names of its entries"""

from collections.abc import Iterable
from pathlib import Path

from opjit import files
from opjit.store.store import SETS, Store


def mark_complete(store: Store, path: Path, names: list[str], shared: bool) -> None:
    """Note that all entries of the list at `path` are there; everyone may read that in a shared store."""
    marker = store.base / SETS / files.digest(str(path))
    files.write_checked(marker, {"list": str(path.absolute()), "entries": names})
    if shared and marker.exists():
        files.let_read(marker.parent, store.base)


def lists_with(op: str, stores: Iterable[Store]) -> str:
    """Return the end of a sentence that names the complete set with an op; empty if none has it."""
    folders = [store.base / SETS for store in stores if store.trusted(store.base / SETS)]
    notes = [files.read_checked(marker) for each in folders for marker in sorted(each.glob("*"))]
    for note in notes:
        if isinstance(note, dict):
            names = [name for name in note["entries"] if name.startswith(f"{op} for ")]
            if names:
                return f". The complete set of {note['list']} has {', '.join(names)}: see `opjit precompile --check {note['list']}`"
    return ""
