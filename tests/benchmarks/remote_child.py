"""One request for allreduce in a fresh process; prints what it took as JSON. Arguments: `fetch`, the remote alone, with the imports
that it needs; or `entry`, all of it, from the caches to a binary that is verified."""

from __future__ import annotations

import json
import sys
import time
import warnings

import torch  # noqa: F401

from opjit import request
from opjit.backends import for_device, targets
from opjit.catalog import registry
from opjit.errors import CacheWarning
from opjit.share import remote
from opjit.store.store import Store, default_root
from opjit.wanted import describe


def main() -> None:
    op = registry.find("allreduce")
    target = targets.here(for_device("cpu"))
    store = Store(default_root())
    recipe = describe(op, target, store)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        started = time.perf_counter()
        entry = (
            remote.fetch(recipe.ways, store)
            if sys.argv[1] == "fetch"
            else request.entry(op, target)
        )
        seconds = time.perf_counter() - started
    assert all(one.category is CacheWarning for one in seen), [str(one.message) for one in seen]
    built = entry is not None and (entry.folder / "build.ninja").is_file()
    print(
        json.dumps(
            {
                "seconds": seconds,
                "fetched": entry is not None and not built,
                "warnings": [str(one.message) for one in seen],
            }
        )
    )


if __name__ == "__main__":
    main()
