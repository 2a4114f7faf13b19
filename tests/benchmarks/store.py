"""What a cache of 10,000 entries costs.

    python tests/benchmarks/store.py

    cache ls            opjit.cache.entries() of 10,000 entries, which is what the command prints
    look-up             Store.find of one op's entry, verification included, beside 9,999 other keys of the same op and arch, and
                        beside 9,999 other ops; against the same look-up in a cache that holds nothing else

The entries are a real one's library and glue under other keys. That every look-up finds the right entry, and the list all of them, is
checked before a clock starts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from common import Row, alone, ratio, show

from opjit import cache, request
from opjit.backends import for_device
from opjit.backends.targets import here
from opjit.catalog import registry
from opjit.recipe.document import document_key
from opjit.recipe.recipe import Recipe
from opjit.store import layers, manifest
from opjit.store.entry import Entry
from opjit.store.manifest import Manifest
from opjit.store.store import Store
from opjit.wanted import describe


def plant(entry: Entry, described: Manifest, folder: Path, number: int) -> None:
    """Another entry: hard links of one's files, and a manifest of its own."""
    document = {**described.document, "planted": number}
    other = described._replace(document=document, key=document_key(document))
    place = folder / other.key
    place.mkdir(mode=0o700, parents=True)
    for file in os.listdir(entry.folder):
        if file == manifest.NAME:
            (place / file).write_bytes(other.dump())
        else:
            os.link(entry.folder / file, place / file)


def filled(root: Path, entry: Entry, count: int, spread: bool) -> Store:
    """A cache with an entry and others: keys of the same op and arch, or ops of their own."""
    store = Store(root)
    described = manifest.parse((entry.folder / manifest.NAME).read_bytes())
    relative = entry.folder.relative_to(entry.folder.parents[3])
    (root / relative).parent.mkdir(parents=True, mode=0o700)
    shutil.copytree(entry.folder, root / relative)
    for number in range(count - 1):
        name = f"planted.op{number}" if spread else relative.parts[1]
        plant(entry, described, store.base / name / relative.parts[2], number)
    return store


def timed(call: Callable[[], object], rounds: int) -> list[float]:
    spent = []
    for _ in range(rounds):
        start = perf_counter()
        call()
        spent.append(perf_counter() - start)
    return spent


def measure(folder: Path, count: int, rounds: int) -> list[Row]:
    os.environ["OPJIT_CACHE"] = str(folder / "made")
    op = registry.find("allreduce")
    target = here(for_device("cpu"))
    entry = request.entry(op, target)
    recipe: Recipe = describe(op, target, Store(folder / "made"))
    stores = [
        filled(folder / "alone", entry, 1, False),
        filled(folder / "keys", entry, count, False),
        filled(folder / "ops", entry, count, True),
    ]
    for store in stores:
        found = layers.find(recipe.ways, store, False)
        assert found is not None
        assert (found.key, found.folder.is_relative_to(store.root)) == (entry.key, True)
    looked: list[list[float]] = [[], [], []]
    for _ in range(rounds):  # in turn: whatever else the machine does, it does to all
        for store, spent in zip(stores, looked, strict=True):
            spent += timed(lambda store=store: layers.find(recipe.ways, store, False), 20)  # type: ignore[misc]
    rows = [
        ratio(f"look-up beside {count - 1:,} keys of the op", looked[1], looked[0], 1.2),
        ratio(f"look-up beside {count - 1:,} other ops", looked[2], looked[0], 1.2),
    ]
    for store, name in ((stores[1], "one op"), (stores[2], "as many ops")):
        os.environ["OPJIT_CACHE"] = str(store.root)
        assert len(cache.entries()) == count
        rows.append(
            alone(
                f"cache ls of {count:,} entries of {name}",
                timed(cache.entries, max(3, rounds // 7)),
                1.0,
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), arguments.entries, arguments.rounds)
    show("A large cache (medians; look-ups verify the entry)", rows)


if __name__ == "__main__":
    main()
