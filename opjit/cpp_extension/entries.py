"""``opjit why`` for a C++ extension or a shared library: its entries in the cache, the inputs of each, and the changes between them."""

import time
from collections.abc import Mapping
from contextlib import suppress
from glob import escape, glob
from pathlib import Path
from typing import Any, NamedTuple

from opjit import progress, why
from opjit.errors import EntryError
from opjit.recipe.build_inputs import EXTENSION, LIBRARY, folder_name
from opjit.recipe.document import document_key
from opjit.store.entry import verify
from opjit.store.store import Store
from opjit.why import Difference


class ExtensionEntry(NamedTuple):
    """An entry of an extension or a library. str() describes it for people."""

    folder: Path
    built: float  # when, in seconds since 1970
    document: Mapping[str, Any]
    headers: str  # the headers it was built with, and why it could not use light headers
    differences: tuple[Difference, ...]  # the changes since the previous entry; empty for the first

    def fields(self) -> dict[str, Any]:
        """Return the attributes for JSON."""
        return {
            **self._asdict(),
            "differences": [difference._asdict() for difference in self.differences],
        }

    def __str__(self) -> str:
        document = self.document
        inline = [
            f"{len(texts)} {name}"
            for name, texts in document["inline"].items()
            if name.endswith("_sources") and texts
        ]
        flags = [
            f"{kind}: {' '.join(document['flags'][kind])}"
            for kind in ("c", "cuda", "link")
            if document["flags"].get(kind)
        ]
        archs = (
            document["archs"]
            if isinstance(document["archs"], str)
            else " ".join(document["archs"] or ())
        )
        torch = (
            f"torch {document['torch'][0]}, Python {document['python'][1]}"
            if "torch" in document
            else ""
        )
        made_for = torch or (
            f"any Python and torch from {document['stable'][0]} on"
            if "stable" in document
            else f"any program on {document['host']}"
        )
        tools = ", ".join(str(version) for version in (document["toolchain"] or {}).values())
        return "\n".join(
            [
                f"  built {progress.ago(time.time() - self.built)}: {self.folder}",
                f"    from {', '.join([*document['sources'], *inline])}; {'; '.join(flags) or 'no flags'}",
                f"    for {made_for}{f', CUDA archs {archs}' if archs else ''}; by {tools}",
                *([f"    with {self.headers}"] if document["made_by"] == EXTENSION else []),
                *why.shown(self.differences, "changed since the one before: "),
            ]
        )


def entries(name: str, store: Store) -> list[ExtensionEntry]:
    """Return the usable entries of the extensions and the libraries of that name, the newest first. It writes and builds nothing."""
    found = []
    for made_by in (EXTENSION, LIBRARY):
        for folder in (store.base / folder_name(made_by, name)).glob("*/[!.]*"):
            with suppress(EntryError, OSError):  # damaged, being removed, or not an entry
                entry, manifest = verify(folder, None)
                built = entry.library.stat().st_mtime
                if manifest.document.get("name") == name:
                    found.append((built, folder, manifest))
    found.sort(key=lambda each: each[:2])
    shown = []
    older = None
    for built, folder, manifest in found:
        document = manifest.document
        headers = manifest.built_with.get("headers", "torch's own headers")
        differences = _differences(older, document) if older else ()
        shown.append(ExtensionEntry(folder, built, document, headers, differences))
        older = document
    return shown[::-1]


def failed_build(name: str, store: Store) -> Path | None:
    """Return the log of an extension's last build, if that failed and no entry is newer."""
    found = glob(f"{escape(f'{store.base}/logs/{name}')}.[0-9]*.log")
    log = max(map(Path, found), default=None)
    built = max((entry.built for entry in entries(name, store)), default=0.0)
    return log if log is not None and log.stat().st_mtime > built else None


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Return how two documents differ, with all that is read as an input."""
    flat = []
    sources = set[str]()
    for document in (before, now):
        inline = {name: document_key({name: value}) for name, value in document["inline"].items()}
        known = {**document["known"], **document["inputs"], **inline}
        flat.append({**document, "known": known, "inline": {}})
        sources.update(document["sources"], inline)
    return why.document_differences(flat[0], flat[1], sources)
