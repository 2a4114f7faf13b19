"""Whether somebody holds a lock, asked of the kernel and not of opjit; a module that imports next to nothing, for benchmarks that fork."""

import fcntl
import os
from pathlib import Path


def is_held(path: Path) -> bool:
    """Whether anybody has the file's lock of flock(2)."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
