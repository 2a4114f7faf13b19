"""The core: GCC's precompiled header of the headers that every program gets, which saves two thirds of the compile time of a small program.

It does not depend on a program, so opjit makes it once for each compiler, torch and set of flags, and keeps it among the object files of
the store, which are pruned first. A source compiles without it, because the compiler then reads the header.

A source uses it only if that makes no difference. With torch's headers, the source reads all files of the core. Before its first header
of torch, it may have only directives, headers of C++, and headers that the core also includes. A macro that is defined there must not be a
word of the core's files, unless the core gives it the same definition. Clang is excluded, because its precompiled headers name their
sources by path and date.

The host's part of a .cu file reads the core before cuda_runtime.h. Neither changes what the other declares: a test compares their texts in
both orders.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from opjit import files, processes
from opjit.builder import budget, parts
from opjit.builder.compile_step import run_tool
from opjit.cpp_extension.identity import trusted_folders
from opjit.cpp_extension.light import headers, macros, table, vocabulary
from opjit.recipe.compilers import Compiler

FIRST = "opjit_first.h"  # the header that a source reads first: the core, or an empty one
COMPILED = f"{FIRST}.gch"
TEXT = headers.included(table.CORE)
_AGAIN = 600.0  # seconds until a core is begun again that nobody finished
in_background = True  # except for `opjit precompile --warm-compilers`
# Flags that put the core's path or date into the binary, or that make a file other than an object file.
_REFUSED = re.compile(r"-(?:g|fprofile|fplugin|save-temps|imacros|specs)")


class Core(NamedTuple):
    """The files and words that the compiler reads for the core with some flags."""

    words: frozenset[str]  # of all files
    read: frozenset[str]  # their paths
    after: Mapping[str, str]  # the macros that it leaves behind, by name
    flags: tuple[str, ...]  # the flags that can change it


def core_of(flags: Sequence[str], base: Path, cxx: Compiler) -> Core | None:
    """Return the core for a compile command's flags, or None if this compiler or a flag excludes it.

    `base` is the store's directory, which keeps the result. Raises BuildError if the compiler fails, and OSError.
    """
    if "clang" in cxx.version.lower() or any(map(_REFUSED.match, flags)):
        return None
    of_commands = macros.heeded(flags, macros.OF_COMMANDS)
    general = macros.after(table.CORE, of_commands, macros.Surroundings(), base, cxx)

    content = ["words", *vocabulary.versions(cxx), sorted(general.read)]
    printed = partial(run_tool, ["cat", *general.read])  # by a tool, so that the files are noted
    words = frozenset(
        parts.kept_json(
            base, content, trusted_folders(), lambda at: macros.words_of(printed(at).encode())
        )
    )
    if any(map(headers.is_rewritten, general.read)):
        return None
    heeded = macros.heeded(flags, words)
    heeded.sort(key=lambda flag: not flag.startswith(("-D", "-U")))  # a .cu file has another order
    return Core(words, general.read, general.texts, tuple(heeded))


def precompiled_core(core: Core, base: Path, cxx: Compiler) -> Path | None:
    """Return the compiled core, or None if neither the store nor a layer has it.

    The second build that could use it then begins to make it in the background, unless only one compiler may run, and so does a
    build after ten minutes without a core. The digest is not verified again while the file is the same. Raises OSError if a
    directory is not writable.
    """
    text = [word for name in table.CORE for word in ("-include", name)]
    command = ["-x", "c++-header", "-w", *core.flags, *macros.OWN_FLAGS, *text]
    command += [os.devnull, "-o", COMPILED]
    make = partial(parts.compile_part, cxx, command)
    content = ["core", *vocabulary.versions(cxx), *command]
    name = parts.name_of(content, shared=True)
    note = base / "toolchain" / f"core-{os.path.basename(name)[:32]}"
    is_good = partial(parts.is_known, note, COMPILED)
    wanted = (base, name, (COMPILED,), trusted_folders(), make, is_good)
    if not in_background:
        return parts.kept(*wanted) / COMPILED
    place = parts.find_parts(base, name, is_good) or parts.fetched(base, name, is_good)
    if place is None and budget.width(budget.CXX_JOB) > 1:
        begun = files.read_checked(note)
        if not isinstance(begun, float):
            files.write_checked(note, 0.0)
        elif time.time() - begun > _AGAIN:
            files.write_checked(note, time.time())
            processes.call_in_background(parts.kept, *wanted)
    return place and place / COMPILED
