"""Layers: stores that opjit only reads. One may lie beside a kernel's source, as in a wheel; OPJIT_LAYERS names others."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opjit.recipe import reads
from opjit.recipe.reads import Moment
from opjit.store.entry import Entry
from opjit.store.store import VERSION, Store, default_root, first

if TYPE_CHECKING:
    from opjit.recipe.recipe import Recipe

FOLDER = "prebuilt"  # beside a kernel's source


def find(recipe: Recipe, hashed: bool = True) -> Entry | None:
    """Return the entry of a recipe in the first layer that has it, or None. Takes no lock, writes nothing. A binary beside its source may
    come from any compiler and any version of opjit's glue; its source, schema, flags, arch and format must match."""
    return next(
        (replace(entry, origin="layer") for entry in _entries(recipe, hashed) if entry is not None),
        None,
    )


def holds(library: Path) -> bool:
    """Whether a file lies where a binary beside an op's source does, ``prebuilt/v2/<namespace>.<op>/<arch>/<key>/<namespace>.<op>.so``."""
    return library.parts[-6:-4] == (FOLDER, VERSION) and library.name == f"{library.parts[-4]}.so"


def _entries(recipe: Recipe, hashed: bool) -> Iterator[Entry | None]:
    beside = recipe.folder / FOLDER
    if os.path.isdir(beside):
        store = Store(beside)
        for folder in folders(store, recipe):
            if store.trusted(folder.parent, folder, trusted_as=recipe.source):
                yield first(
                    folder,
                    recipe.target,
                    functools.partial(_fits_as_shipped, recipe),
                    trusted_as=recipe.source,
                    hashed=hashed,
                )
    for root in named():
        yield Store(root).find(recipe, hashed=hashed, notes=Store(default_root()))


def folders(store: Store, recipe: Recipe) -> list[Path]:
    """Return the folders of all entries of an op and target in a store."""
    place = store.folder(recipe.schema.qualified, recipe.target, recipe.document())
    start = f"{recipe.target.folder}-"
    return sorted(
        each for each in place.parent.glob(f"{start}*") if len(each.name) == len(place.name)
    )


def named() -> list[Path]:
    return [
        Path(os.path.abspath(os.path.expanduser(root)))
        for root in os.environ.get("OPJIT_LAYERS", "").split(os.pathsep)
        if root
    ]


def _fits_as_shipped(recipe: Recipe, document: dict[str, Any]) -> bool:
    """Return whether a binary beside its source is wanted: all but opjit's files, the glue, the compilers and their folders is equal."""
    if _as_shipped(document) != _as_shipped(recipe.document()):
        return False
    inputs = {
        name: digest
        for name, digest in document["inputs"].items()
        if not name.startswith("<opjit>/")
    }
    anywhere = recipe.naming._replace(system=())
    return not any(reads.changes({**document, "inputs": inputs}, anywhere, Moment()))


def _as_shipped(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document without opjit's own files, the glue, the compilers and what these read."""
    known = document.get("known")
    own = (
        {name: digest for name, digest in known.items() if not name.startswith("<opjit>/")}
        if isinstance(known, dict)
        else None
    )
    others = dict.fromkeys(("toolchain", "glue", "search", "inputs", "absent"))
    return {**document, **others, "known": own}
