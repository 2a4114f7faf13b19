"""Extensions in the list of `opjit record`: a call in JSON, and the request for the same binary on another machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from opjit.cpp_extension import binary
from opjit.cpp_extension.arguments import CALLS, LoaderCall
from opjit.cpp_extension.binary import ExtensionBinary
from opjit.cpp_extension.identity import Unsupported
from opjit.declare import oplist
from opjit.declare.oplist import RecordedExtension
from opjit.errors import RecordError
from opjit.progress import logger
from opjit.store.store import Store

_PATHS = ("sources", "extra_include_paths", "build_directory")


def note(call: LoaderCall, archs: str | None) -> None:
    """Append a line about a call to the file that OPJIT_RECORD names; `opjit record` sets it.

    Args:
        archs: the extension's.
    """
    if not os.environ.get("OPJIT_RECORD"):
        return
    folder = os.path.dirname(os.environ["OPJIT_RECORD"])  # the list's, too
    try:
        given = {name: value for name, value in call.for_torch().items() if value is not None and name != "verbose"}
        written = json.loads(json.dumps(given, default=os.fspath))
        written |= {name: _each(written[name], lambda path: _from(folder, path)) for name in _PATHS if written.get(name)}
        fields = oplist.parse_extension(RecordedExtension(call.function, written, archs)._asdict())._asdict()
    except (TypeError, ValueError) as error:
        refuse(call, f"its arguments cannot be written as JSON: {error}")
    else:
        oplist.append(call.name, fields)


def refuse(call: LoaderCall, reason: str) -> None:
    """Log why a call is not in the list."""
    if os.environ.get("OPJIT_RECORD"):
        logger.warning("the C++ extension %s is not recorded: %s", call.name, reason)


def request(recorded: RecordedExtension, folder: str, store: Store) -> ExtensionBinary:
    """Return the request that a recorded call makes, for the archs that it was recorded for.

    Args:
        folder: the list's.

    Raises:
        RecordError: a source is missing, or only torch can build the extension.
        BuildError: an argument is wrong.
    """
    try:
        named = {name: _each(value, lambda path: os.path.join(folder, path)) if name in _PATHS else value
                 for name, value in recorded.arguments.items()}
        return binary.of_call(CALLS[recorded.function].of(named), store.notes, recorded.archs)
    except FileNotFoundError as error:
        raise RecordError(f"the C++ extension {recorded.name} is not built: there is no {error.filename}; a list finds sources in its own "
                          "folder, and others by their absolute paths") from error
    except (Unsupported, TypeError) as error:
        raise RecordError(f"the C++ extension {recorded.name} is not built: its arguments are not those of "
                          f"{recorded.function}, or only torch can build it") from error


def _each(value: Any, change: Callable[[str], str]) -> Any:
    return change(value) if isinstance(value, str) else [change(each) for each in value]


def _from(folder: str, path: str) -> str:
    """Return a path relative to a folder that it lies in; else the absolute path."""
    absolute = os.path.abspath(path)
    return os.path.relpath(absolute, folder) if absolute.startswith(folder + os.sep) else absolute
