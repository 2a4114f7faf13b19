"""Layers: stores that opjit only reads. One may lie beside a kernel's source, as in a wheel; OPJIT_LAYERS names others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opjit.store.entry import Entry
from opjit.store.store import VERSION, Store, first

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
        store, wanted = Store(beside), _as_shipped(recipe.document())
        folder = store.folder(recipe.schema.qualified, recipe.target)
        if store.trusted(folder.parent, folder, trusted_as=recipe.source):
            yield first(
                folder,
                recipe.target,
                lambda document: _as_shipped(document) == wanted,
                trusted_as=recipe.source,
                hashed=hashed,
            )
    for root in named():
        yield Store(root).find(recipe, hashed=hashed)


def named() -> list[Path]:
    return [
        Path(os.path.abspath(os.path.expanduser(root)))
        for root in os.environ.get("OPJIT_LAYERS", "").split(os.pathsep)
        if root
    ]


def _as_shipped(document: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's document without opjit's own files, the glue and the compilers."""
    inputs = document.get("inputs")
    own = (
        {name: digest for name, digest in inputs.items() if not name.startswith("<opjit>/")}
        if isinstance(inputs, dict)
        else None
    )
    return {**document, "inputs": own, "toolchain": None, "glue": None}
