"""How an op is built for a target: sources, flags and compilers, and the key derived from their content."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from opjit import files, resources
from opjit.backends import Flags
from opjit.backends.targets import Target
from opjit.recipe import libraries
from opjit.recipe.build_inputs import BuildInputs
from opjit.recipe.document import op_folder
from opjit.recipe.reads import Places
from opjit.recipe.schema import Schema

GLUE_GENERATOR = 8  # increase it when opjit makes a different library from the same text, which tests/builder/test_generated.py detects


@dataclass(frozen=True)
class Recipe(BuildInputs):
    """Everything that decides the bytes of an op's library, before a build; `name` is the op's qualified name."""

    schema: Schema
    target: Target
    flags: Flags
    label: str | None = None  # name of an inline source in messages; None means its path
    # Versions of other compilers here that may have made the binary: nvcc, where NVRTC is preferred.
    others: tuple[Mapping[str, str], ...] = ()
    # From a line of an inline source to the file and line that warnings name.
    place: Callable[[int], tuple[str, int]] | None = field(default=None, compare=False)

    @property
    def purpose(self) -> str:
        return str(self.target)

    @property
    def op_target(self) -> Target:
        return self.target

    @property
    def source(self) -> Path:
        """The author's kernel for the target's backend."""
        return Path(self.sources[0])

    @property
    def folder(self) -> Path:
        return self.source.parent

    @property
    def file_name(self) -> str:
        return f"{self.schema.namespace}.{self.schema.name}.so"

    def place_of(self, document: Mapping[str, Any]) -> str:
        return op_folder(self.name, self.target, document)

    def own_fields(self) -> dict[str, Any]:
        flags = self.flags
        backend = self.target.backend
        of_flags: dict[str, list[str]] = {
            "c": list(flags.c),
            "cuda": list(flags.cuda),
            "link": [
                self.places.name(flag) if os.path.isabs(flag) else flag for flag in flags.link
            ],
            "stubs": list(flags.stubs),
        }
        if flags.include:
            of_flags["include"] = [self.places.name(path) for path in flags.include]
        if flags.sources:
            of_flags["sources"] = [self.places.name(path) for path in flags.sources]
        if flags.device:
            of_flags["device"] = list(flags.device)
        fields = {
            "schema": self.schema.text,
            "backend": backend.name,
            "dispatch_key": backend.dispatch_key,
            "arch": self.target.arch,
            "runtime": self.target.runtime,
            "host": self.target.host,
            "kernel": self.source.name,
            "glue": glue_digest(),
            "flags": of_flags,
        }
        if self.schema.tags:
            fields["tags"] = list(self.schema.tags)
        if backend.stream:
            fields["stream"] = [field or "" for field in backend.stream]
        if flags.debug:  # its binary names the folders
            fields["debug"] = ":".join([str(self.folder), *flags.include])
        return fields

    @property
    def ways(self) -> list[Recipe]:
        """The recipes of the compilers here, the preferred first: the binary of each matches. Without compilers, the recipe itself."""
        first = self.toolchain
        if first is None:
            return [self]
        found = [self]
        for each in self.others:
            rest = (first, *(one for one in self.others if one is not each))
            found.append(replace(self, toolchain=each, others=rest))
        return found

    def matches_tools(self, made_by: Any) -> bool:
        """Return whether a CUDA binary of other device compilers matches, which are not here."""
        tools = self.toolchain
        if tools is None:
            return True
        own = {name: value for name, value in tools.items() if name.startswith("cc.")}
        kinds = [each.keys() for each in (tools, *self.others)]
        others = isinstance(made_by, dict) and made_by.keys() not in kinds
        return others and {**made_by, **own} == made_by

    @property
    def include_path(self) -> list[str]:
        """The folders in which a kernel's compiler searches for headers, in order."""
        return [str(self.folder), resources.include_path(), *self.flags.include]

    def placeholders(self, work: Path) -> dict[str, str]:
        """Return the paths for the placeholders in flags, for a build in a folder."""
        folder, include, *added = self.include_path
        return {
            "folder": folder,
            "include": include,
            "staging": str(work),
            **{f"added{index}": path for index, path in enumerate(added)},
        }


def describe(
    schema: Schema,
    target: Target,
    source: Path,
    flags: Flags,
    compilers: Sequence[Mapping[str, str]],
    text: bytes | None = None,
    label: str | None = None,
) -> Recipe:
    """Describe the current inputs of an op's build for a target.

    Args:
        compilers: their identities, the preferred first (see `toolchain.identities_of`); empty if one is missing.
        text: the source of an inline op, which is no file yet, with its `label` in messages.
    """
    tools = compilers[0] if compilers else None
    linked = dict.fromkeys(os.path.dirname(path) for path in libraries.files(flags))
    system = getattr(tools, "folders", ())
    return Recipe(
        name=schema.qualified,
        sources=(str(source), *flags.sources),
        texts={} if text is None else {str(source): text},
        places=Places(str(source.parent), flags.include, tuple(linked), system),
        known={},  # until `now` reads the files
        toolchain=tools,
        doubt="",
        schema=schema,
        target=target,
        flags=flags,
        label=label,
        others=tuple(compilers[1:]),
    ).now()


@cache
def glue_digest() -> str:
    """Identify the generated glue without rendering it."""
    text = "\0".join(
        [str(GLUE_GENERATOR), *map(resources.template, ("glue.c.in", "kernel.in", "fatbin.c.in"))]
    )
    return files.sha256(text)
