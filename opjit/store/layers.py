"""The look-up of a request in layers and in a store.

A layer is a store that opjit only reads. There may be one next to a kernel's source, for example in
a wheel, and OPJIT_LAYERS names further layers.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from opjit.recipe import reads
from opjit.recipe.build_inputs import BuildInputs
from opjit.recipe.reads import Moment
from opjit.store.entry import Entry
from opjit.store.manifest import Manifest
from opjit.store.store import VERSION, Store, first

FOLDER = "prebuilt"  # next to a kernel's source


class Location(NamedTuple):
    """A store that a request searches.

    Binaries that came with a kernel's `source` are next to it, and may have its owner.
    """

    name: str
    store: Store
    source: Path | None = None


def locations(inputs: BuildInputs, store: Store) -> Iterator[Location]:
    """Yield the stores that a request searches, in order."""
    if inputs.op_target is not None:
        source = Path(inputs.sources[0])
        beside = source.parent / FOLDER
        if os.path.isdir(beside):
            yield Location("the binaries next to its source", Store(beside), source)
    for layer in named():
        yield Location(f"the layer {layer}", Store(layer))
    yield Location("the cache", store)


def find(
    ways: Sequence[BuildInputs],
    store: Store,
    above: bool = True,
    warn: bool = True,
) -> Entry | None:
    """Return the verified entry of a request, or None.

    It comes from the first place that has one, and there belongs to the first of its `ways`.

    It does not lock anything. A binary next to its source may come from any compiler and any
    version of opjit's glue, but its source, schema, flags, arch and format must match.

    Args:
        above: whether layers count.
        warn: whether to warn of an entry in the store that cannot be used.
    """
    every = [*locations(ways[0], store)]
    for place in every if above else every[-1:]:
        tried = set[Path]()
        for way in ways if place.source is None else ways[:1]:
            folder = place.store.base / way.place_of_entries

            def fits(manifest: Manifest, place: Location = place, way: BuildInputs = way) -> bool:
                if place.source is None:
                    return way.fits(manifest.document, store.seen(manifest.key))
                return _fits_as_shipped(way, manifest.document)

            # Any version of opjit may have made the binaries next to a source.
            for each in [folder] if place.source is None else others_like(folder):
                if not place.store.trusted(each.parent, each, trusted_as=place.source):
                    continue
                warns = each not in tried and (warn or place.store is not store)
                found = first(each, way.op_target, fits, warns, place.source)
                if found is not None:
                    return found if place.store is store else replace(found, origin="layer")
                tried.add(each)
    return None


def holds(library: Path) -> bool:
    """Return whether a path leads to a binary next to an op's source,
    ``prebuilt/v2/<namespace>.<op>/<arch>/<key>/<namespace>.<op>.so``.
    """
    return library.parts[-6:-4] == (FOLDER, VERSION) and library.name == f"{library.parts[-4]}.so"


def others_like(folder: Path) -> list[Path]:
    """Return the folders of all entries of the same name and target, whatever they are made from."""
    found = folder.parent.glob(f"{folder.name[:-20]}*")
    return sorted(each for each in found if len(each.name) == len(folder.name))


def named() -> list[Path]:
    return [
        Path(os.path.abspath(os.path.expanduser(root)))
        for root in os.environ.get("OPJIT_LAYERS", "").split(os.pathsep)
        if root
    ]


def _fits_as_shipped(inputs: BuildInputs, document: dict[str, Any]) -> bool:
    """Return whether a binary next to its source matches: all inputs are equal, except opjit's
    files, the glue, the compilers and their folders.
    """
    if _as_shipped(document) != _as_shipped(dict(inputs.request)):
        return False
    given = document["inputs"]
    of_author = {name: given[name] for name in given if not name.startswith("<opjit>/")}
    anywhere = inputs.places._replace(system=())
    return not any(reads.changes({**document, "inputs": of_author}, anywhere, Moment()))


def _as_shipped(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document without the glue, the compilers and what these read."""
    return {**document, **dict.fromkeys(("toolchain", "glue", "inputs", "absent"))}
