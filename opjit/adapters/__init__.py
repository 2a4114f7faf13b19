"""Other projects with opjit's cache: their builders, replaced when they are imported, and their caches, verified.

`import opjit` imports nothing here.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn


def run_program(words: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Replace this process by ``python WORDS`` with opjit's builders, for `opjit run` (see site/sitecustomize.py).

    `variables` are added to the environment, and its PYTHONPATH is searched before the user's.
    """
    paths = [
        str(Path(__file__).parent / "site"),
        variables.get("PYTHONPATH"),
        os.environ.get("PYTHONPATH"),
    ]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *words], environment)


def replace_builder(module: ModuleType) -> None:
    """Replace the builder in a module of another project, which the process has imported."""
    if module.__name__ == "flashinfer.jit.core":
        from opjit.adapters import flashinfer

        flashinfer.replace_build(module.JitSpecNvcc)
        return
    from opjit import cpp_extension

    names = ("load", "load_inline", "BuildExtension")
    vars(module).update({name: getattr(cpp_extension, name) for name in names})
