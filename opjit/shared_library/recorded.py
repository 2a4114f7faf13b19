"""Shared libraries in the list of `opjit record`: a call of `opjit.build` in JSON, and the request for the same library elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

from opjit import files
from opjit.declare import oplist
from opjit.declare.oplist import RecordedExtension
from opjit.errors import RecordError
from opjit.progress import logger
from opjit.shared_library import identity
from opjit.shared_library.binary import LibraryBinary
from opjit.shared_library.identity import Library
from opjit.store.store import Store

FUNCTION = "build"


def note(library: Library) -> None:
    """Append a line about a library to the file that OPJIT_RECORD names. It has no launcher: a list names no program to run."""
    folder = os.path.dirname(os.environ["OPJIT_RECORD"])  # the list's, too

    def below(path: str) -> str:
        return os.path.relpath(path, folder) if path.startswith(folder + os.sep) else path

    arguments = {"name": library.name, "sources": [*map(below, library.sources)], "include": [*map(below, library.include)],
                 "generated": {name: text.decode("utf-8", "surrogateescape") for name, text in library.generated.items()},
                 **{kind: list(words) for kind, words in library.given.items()}}
    try:
        recorded = oplist.parse_extension(RecordedExtension(FUNCTION, arguments, ";".join(library.archs) or None)._asdict())
    except ValueError as error:
        logger.warning("the shared library %s is not recorded: its arguments cannot be written as JSON: %s", library.name, error)
    else:
        oplist.append(library.name, recorded._asdict())


def request(recorded: RecordedExtension, folder: str, store: Store) -> LibraryBinary:
    """Return the request that a recorded call makes.

    Args:
        folder: the list's.

    Raises:
        RecordError: another user can write a file that only the list names, or the arguments are not those of `opjit.build`.
        BuildError: an argument is wrong.
    """
    given = dict(recorded.arguments)
    try:
        name, generated = given.pop("name"), given.pop("generated")
        sources, include = ([os.path.join(folder, path) for path in given.pop(kind)] for kind in ("sources", "include"))
        if given.keys() != {"cflags", "cuda_cflags", "ldflags"}:
            raise TypeError("unknown arguments")
        library = identity.describe(name, sources, generated, given, include, recorded.archs and recorded.archs.split(";"), (), store.notes)
        read = [library.place(each) for each in library.inputs if not each.startswith("<generated>/")]
        problem = next(filter(None, (files.swappable(Path(path)) for path in read)), None)
    except (KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"the shared library {recorded.name} is not built: its arguments are not those of opjit.build") from error
    if problem is not None:
        raise RecordError(f"the shared library {recorded.name} is not built from files that only the list names: {problem}")
    return LibraryBinary(library)
