"""``opjit run``: a Python program in which torch's load, load_inline and BuildExtension are opjit's."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


def run(words: Sequence[str]) -> NoReturn:
    """Become ``python WORDS``, so arguments, tracebacks and the exit code are Python's. Children inherit the environment."""
    path = [str(Path(__file__).parent / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *words], {**os.environ, "PYTHONPATH": os.pathsep.join(path)})
