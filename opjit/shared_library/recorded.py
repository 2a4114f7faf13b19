"""Shared libraries and C++ extensions in the list of `opjit record`: a call in JSON, and the request for the same library elsewhere."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from opjit import files
from opjit.declare import oplist
from opjit.declare.oplist import RecordedExtension
from opjit.errors import RecordError
from opjit.progress import logger
from opjit.shared_library import identity
from opjit.shared_library.binary import LibraryRequest
from opjit.shared_library.identity import Library
from opjit.store.store import Store

FUNCTION = "build"
_PATHS = ("sources", "include", "extra_include_paths", "build_directory")


def note(library: Library) -> None:
    """Record a library without its launcher, because a list must not name a program to run."""
    generated = {
        name: text.decode("utf-8", "surrogateescape") for name, text in library.generated.items()
    }
    note_call(
        FUNCTION,
        {
            "name": library.name,
            "sources": library.sources,
            "include": library.include,
            "generated": generated,
            **library.given,
        },
        ";".join(library.archs) or None,
    )


def note_call(function: str, arguments: Mapping[str, Any], archs: str | None) -> None:
    """Append a line about a call, with the inputs of its binary, to the file that OPJIT_RECORD
    names; `opjit record` sets it.

    Paths below the list's folder start there.
    """
    folder = os.path.dirname(os.environ["OPJIT_RECORD"])

    def below(path: str) -> str:
        absolute = os.path.abspath(path)
        return (
            os.path.relpath(absolute, folder) if absolute.startswith(folder + os.sep) else absolute
        )

    try:
        given = {
            name: value
            for name, value in arguments.items()
            if value is not None and name != "verbose"
        }
        written = _with_paths(json.loads(json.dumps(given, default=os.fspath)), below)
        fields = {"function": function, "arguments": written, "archs": archs}
        recorded = oplist.parse_extension(fields)
    except (TypeError, ValueError) as error:
        kind = "shared library" if function == FUNCTION else "C++ extension"
        logger().warning(
            "the %s %s is not recorded: its arguments cannot be written as JSON: %s",
            kind,
            arguments["name"],
            error,
        )
    else:
        oplist.append(recorded.name, fields)


def arguments_of(recorded: RecordedExtension, folder: str) -> dict[str, Any]:
    """Return the arguments of a recorded call with absolute paths; `folder` is the list's."""
    return _with_paths(recorded.arguments, lambda path: os.path.join(folder, path))


def _with_paths(arguments: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    changed = {
        name: change(value) if isinstance(value, str) else [*map(change, value)]
        for name, value in arguments.items()
        if name in _PATHS and value
    }
    return {**arguments, **changed}


def request(recorded: RecordedExtension, folder: str, store: Store) -> LibraryRequest:
    """Return the request that a recorded call makes; `folder` is the list's.

    Raises RecordError if another user can write a file that only the list names, or if
    `opjit.build` does not have one of the arguments. Raises BuildError if an argument is wrong.
    """
    try:
        given = arguments_of(recorded, folder)
        name, sources, generated, include = (
            given.pop(kind) for kind in ("name", "sources", "generated", "include")
        )
        if given.keys() != {"cflags", "cuda_cflags", "ldflags"}:
            raise TypeError("unknown arguments")
        library = identity.describe(
            name,
            sources,
            generated,
            given,
            include,
            recorded.archs and recorded.archs.split(";"),
            (),
            store.notes,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise RecordError(
            f"cannot build the shared library {recorded.name}: opjit.build does not have its "
            "arguments; record it again"
        ) from error
    named = [*library.sources, *library.places.include]
    files.require_closed(f"the shared library {recorded.name}", named)
    return LibraryRequest(replace(library, only_listed=True))
