"""The environment variables that opjit reads."""

from __future__ import annotations

import os

# Every OPJIT_* variable; a test compares this with the code and the README. `opjit doctor` reports unknown ones.
VARIABLES = {
    "OPJIT_ARCH": "build for this arch instead of the machine's own",
    "OPJIT_CACHE": "the cache's folder",
    "OPJIT_CACHE_SIZE": "the size that pruning leaves, such as 5GiB",
    "OPJIT_FAST": "0: compile C++ extensions with torch's own headers only",
    "OPJIT_JOBS": "builds at once in `opjit precompile`",
    "OPJIT_LAYERS": "more caches, read-only",
    "OPJIT_OFFLINE": "never build, and ask no remote",
    "OPJIT_PATH": "folders of your own ops",
    "OPJIT_RECORD": "set by `opjit record` for its command: the file that lists the ops",
    "OPJIT_REMOTE": "URL of a remote cache to fetch entries from",
    "OPJIT_TRUST": "public keys whose entries in the remote are trusted",
    "OPJIT_VERBOSE": "print hits, builds and waits to stderr",
    "OPJIT_WHEEL_ARCHS": "the archs of a project's wheel, instead of those in its pyproject.toml",
}
SWITCHES = frozenset({"OPJIT_OFFLINE", "OPJIT_VERBOSE"})


def is_on(switch: str) -> bool:
    """Whether a switch is set to anything but 0 or the empty string.

    Example:
        >>> is_on("OPJIT_OFFLINE")
        False
    """
    return os.environ.get(switch, "0") not in ("", "0")
