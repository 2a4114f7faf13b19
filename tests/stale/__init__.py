"""Proof that nothing stale is served: programs, listed and drawn, are edited once and requested again with the same cache.

    python -m tests.stale --seconds 3600               # drawn programs
    python -m tests.stale --kind load --seed 7 --draw 12
    python -m tests.stale --listed                     # the table of known cases

The answer with the cache must be the answer with an empty cache."""
