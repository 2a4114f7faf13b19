"""Stores that are only read: beside a kernel's source, where a wheel has put it, and those that OPJIT_LAYERS names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from opjit.recipe import Recipe
from opjit.store import Entry, Store, first

_ADVICE = "close it to others, or take it out of OPJIT_LAYERS"
FOLDER = "prebuilt"  # beside a kernel's source


def find(recipe: Recipe) -> Entry | None:
    """The entry of a recipe in a layer. Nothing is written there and no lock is taken.

    What lies beside its own source is used whoever compiled it, over whichever version of opjit's glue: its author chose it, and the
    source, the schema, the flags, the arch and the format of the entry are the ones asked for.
    """
    beside = os.path.join(os.path.dirname(recipe.source), FOLDER)
    if os.path.isdir(beside):
        folder, wanted = Store(Path(beside)).folder(recipe.schema.qualified, recipe.target), _as_shipped(recipe.document())
        entry = first(folder, recipe.target, lambda known: _as_shipped(known) == wanted, like=recipe.source)
        if entry is not None:
            return entry
    for root in named():
        layer = Store(root)
        folder = layer.folder(recipe.schema.qualified, recipe.target)
        entry = layer.look(recipe) if layer.trusted(folder.parent, folder, advice=_ADVICE) else None
        if entry is not None:
            return entry
    return None


def named() -> list[Path]:
    """The layers that OPJIT_LAYERS names, in its order."""
    return [Path(os.path.abspath(os.path.expanduser(root))) for root in os.environ.get("OPJIT_LAYERS", "").split(os.pathsep) if root]


def _as_shipped(document: dict[str, Any]) -> dict[str, Any]:
    """A recipe's document without what is opjit's or the build machine's."""
    inputs = document.get("inputs")
    own = {name: digest for name, digest in inputs.items() if not name.startswith("<opjit>/")} if isinstance(inputs, dict) else None
    return {**document, "inputs": own, "toolchain": None, "glue": None}
