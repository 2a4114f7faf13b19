"""The variables of the environment that opjit reads."""

from __future__ import annotations

import os

# Every OPJIT_* variable that there is; a test holds this against the code and the README. `opjit doctor` names what is not here.
VARIABLES = {
    "OPJIT_ARCH": "build for this arch instead of the machine's own",
    "OPJIT_CACHE": "the cache's folder",
    "OPJIT_CACHE_SIZE": "what `opjit cache prune` leaves, such as 5GiB",
    "OPJIT_JOBS": "how many builds at once in `opjit precompile`",
    "OPJIT_LAYERS": "more caches, which are only read",
    "OPJIT_OFFLINE": "neither build nor ask a remote",
    "OPJIT_PATH": "folders of your own ops",
    "OPJIT_RECORD": "set by `opjit record` for the command that it runs: the file that it lists ops in",
    "OPJIT_REMOTE": "where entries are fetched from that others have built",
    "OPJIT_TRUST": "whose entries from there are believed",
    "OPJIT_VERBOSE": "say on stderr what is found, built and waited for",
}
SWITCHES = frozenset({"OPJIT_OFFLINE", "OPJIT_VERBOSE"})


def is_on(switch: str) -> bool:
    """Whether a switch is set to anything but 0 or nothing.

    Example:
        >>> is_on("OPJIT_OFFLINE")
        False
    """
    return os.environ.get(switch, "0") not in ("", "0")
