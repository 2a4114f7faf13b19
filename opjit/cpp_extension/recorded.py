"""Extensions in the list of `opjit record`; see opjit/shared_library/recorded.py."""

from __future__ import annotations

from opjit.cpp_extension import binary
from opjit.cpp_extension.arguments import CALLS
from opjit.cpp_extension.binary import ExtensionBinary
from opjit.cpp_extension.identity import Unsupported
from opjit.declare.oplist import RecordedExtension
from opjit.errors import RecordError
from opjit.shared_library.recorded import arguments_of
from opjit.store.store import Store


def request(recorded: RecordedExtension, folder: str, store: Store) -> ExtensionBinary:
    """Return the request that a recorded call makes, for the archs that it was recorded for; `folder` is the list's. Raises RecordError if
    a source is missing or only torch can build the extension, BuildError if an argument is wrong."""
    try:
        return binary.of_call(CALLS[recorded.function].of(arguments_of(recorded, folder)), store.notes, recorded.archs)
    except FileNotFoundError as error:
        raise RecordError(f"the C++ extension {recorded.name} is not built: there is no {error.filename}; a list finds sources in its own "
                          "folder, and others by their absolute paths") from error
    except (Unsupported, TypeError) as error:
        raise RecordError(f"the C++ extension {recorded.name} is not built: its arguments are not those of "
                          f"{recorded.function}, or only torch can build it") from error
