"""How an op is built for a target: sources, flags and compilers, and the key derived from their content."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from opjit import files, resources
from opjit.backends import Flags
from opjit.backends.targets import Target
from opjit.recipe import headers, libraries, reads
from opjit.recipe.document import FORMAT, base_key, request_key
from opjit.recipe.reads import Moment, Places, Reads
from opjit.recipe.schema import Schema

GLUE_GENERATOR = 8  # increase it when opjit makes another library of the same text; tests/builder/test_generated.py says when
_OF_NVRTC = (
    "nvrtc/cuda_runtime.h",
    "nvrtc/preprocess.h",
    "nvrtc/absent/crt/host_defines.h",
)  # read by every op's CUDA code
RUNTIME = (
    "opjit_runtime.c",
    "opjit_convert.c",
    "opjit_elementwise.c",
)  # linked into every op's library


class Recipe(NamedTuple):
    """Everything that decides the bytes of a binary."""

    schema: Schema
    target: Target
    source: Path  # the author's kernel for the target's backend
    inputs: Mapping[str, str]  # SHA-256 of every file to compile, by its portable name
    flags: Flags
    toolchain: (
        Mapping[str, str] | None
    )  # versions of the compilers; None without a compiler, and then `key` is None, too
    label: str | None = None  # name of an inline source in messages; None means its path
    # Versions of other compilers here that may have made the binary: nvcc, where NVRTC is preferred.
    others: tuple[Mapping[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.schema.qualified} for {self.target}"

    @property
    def folder(self) -> Path:
        return self.source.parent

    @property
    def naming(self) -> Places:
        """The folders that give files portable names."""
        system = getattr(self.toolchain, "folders", ())
        return Places(str(self.folder), self.flags.include, (), system)

    @property
    def searched(self) -> tuple[str, ...]:
        """The folders that the C compiler searches for headers. It drops one that is missing, or that is there again as its own."""
        kept = dict[tuple[int, int], str]()
        system: tuple[str, ...] = getattr(self.toolchain, "headers", ())
        for folder in (*system, *self.include_path):
            with suppress(OSError):
                status = os.stat(folder)
                kept.setdefault((status.st_dev, status.st_ino), folder)
        return (*(folder for folder in kept.values() if folder not in system), *system)

    def document(self, read: Reads = reads.NOTHING) -> dict[str, Any]:
        """Return the document whose SHA-256 is the key: content only, no path, date or host, but for a debug build's folders."""
        found = read.document(self.naming)
        for name in self.inputs.keys() & found["inputs"].keys():
            del found["inputs"][name]
        flags, linked = self.flags, _linked(self.flags, str(self.folder))
        include = str(resources.folder("kernels_c"))
        sources = [
            headers.portable_name(path, str(self.folder), include, flags.include)
            for path in flags.sources
        ]
        debug = {"debug": ":".join([str(self.folder), *flags.include])} if flags.debug else {}
        stream = self.target.backend.stream
        return {
            "format": FORMAT,
            "schema": self.schema.text,
            **({"tags": list(self.schema.tags)} if self.schema.tags else {}),
            "backend": self.target.backend.name,
            "dispatch_key": self.target.backend.dispatch_key,
            "arch": self.target.arch,
            "runtime": self.target.runtime,
            "host": self.target.host,
            "kernel": self.source.name,
            "glue": glue_digest(),
            "known": dict(sorted(self.inputs.items())),
            "flags": {
                "c": list(flags.c),
                "cuda": list(flags.cuda),
                "link": [linked.get(flag, flag) for flag in flags.link],
                "stubs": list(flags.stubs),
                **({"sources": sources} if sources else {}),
                **({"device": list(flags.device)} if flags.device else {}),
            },
            **({"stream": [field or "" for field in stream]} if stream else {}),
            "toolchain": None if self.toolchain is None else dict(sorted(self.toolchain.items())),
            "search": None
            if self.toolchain is None
            else [self.naming.name(each) for each in self.searched],
            **found,
            **debug,
        }

    @property
    def key(self) -> str | None:
        """The key of all that is known before a build; None without compilers."""
        return None if self.toolchain is None else request_key(self.document())

    @property
    def keys(self) -> list[str]:
        """The keys of all requests that match: of the preferred compilers, then of the others."""
        return [request_key(self._replace(toolchain=way).document()) for way in self.ways]

    @property
    def ways(self) -> list[Mapping[str, str]]:
        """The versions of the compilers whose binaries match, the preferred first; empty without compilers."""
        return [self.toolchain, *self.others] if self.toolchain is not None else []

    def fits(self, document: Mapping[str, Any], note: Path | None = None) -> bool:
        """Return whether an entry with a document is wanted: all that is known is equal, and so are the files that its build read.
        Without a compiler here, the binary of any compiler is; `note` keeps signatures of the files."""
        made_by = document.get("toolchain")
        of_build = {name: document.get(name) for name in ("inputs", "absent")}
        wanted = {**self.document(), **of_build, "toolchain": made_by}
        if made_by not in self.ways:
            wanted["search"] = document.get("search")
        if document != wanted or not (made_by in self.ways or self.takes(made_by)):
            return False
        return not any(self.changes(document, note))

    def changes(self, document: Mapping[str, Any], note: Path | None = None) -> Iterator[str]:
        """Yield how the files differ from those that the build of an entry read."""
        return reads.changes(document, self.naming, Moment(), note)

    def takes(self, made_by: Any) -> bool:
        """Return whether a binary with another key matches, by the versions of the compilers that made it: those that are here did not."""
        return self.toolchain is None or takes((self.toolchain, *self.others), made_by)

    @property
    def base(self) -> str:
        """The key without the compilers; see FORMAT.md."""
        return base_key(self.document())

    @property
    def include_path(self) -> list[str]:
        """The folders in which a kernel's compiler searches for headers, in order."""
        return [str(self.folder), str(resources.folder("kernels_c")), *self.flags.include]

    def places(self, work: Path) -> dict[str, str]:
        """Return the paths for the placeholders in flags, for a build in a folder."""
        folder, include, *added = self.include_path
        return {
            "folder": folder,
            "include": include,
            "staging": str(work),
            **{f"added{index}": path for index, path in enumerate(added)},
        }

    def inputs_now(self) -> dict[str, str]:
        return read_inputs(self.source, self.target, self.flags)


def takes(ways: Sequence[Mapping[str, str]], made_by: Any) -> bool:
    """Return whether a CUDA binary of other device compilers matches where those of `ways` are; see `Recipe.takes`."""
    own = {name: value for name, value in ways[0].items() if name.startswith("cc.")}
    return (
        isinstance(made_by, dict)
        and made_by.keys() not in [way.keys() for way in ways]
        and {**made_by, **own} == made_by
    )


def read_inputs(
    source: Path, target: Target, flags: Flags, scan: headers.Scan | None = None
) -> dict[str, str]:
    """Return the SHA-256 of the files of `read_files`, by their portable names."""
    include = str(resources.folder("kernels_c"))
    folder = str(source.parent)
    linked = _linked(flags, folder)
    return {
        linked.get(path) or headers.portable_name(path, folder, include, flags.include): digest
        for path, digest in read_files(source, target, flags, scan).items()
    }


def read_files(
    source: Path, target: Target, flags: Flags, scan: headers.Scan | None = None
) -> dict[str, str]:
    """Return the SHA-256, by path, of all files that are compiled, included or linked with. For `scan`, see `headers.closure`."""
    include = str(resources.folder("kernels_c"))
    folder = str(source.parent)
    shared = (*RUNTIME, *_OF_NVRTC) if target.backend.uses_nvcc else RUNTIME
    roots = [str(source), *flags.sources, *(f"{include}/{name}" for name in shared)]
    path = (folder, include, *flags.include)
    if target.backend.stream:  # the glue includes its header
        scan = scan or headers.Scan()
        roots += filter(
            None, [scan.find(b"<", os.fsencode(target.backend.stream.header), folder, path)]
        )
    words = [
        word for word in (*flags.c, *flags.cuda) if "-D" in word
    ]  # the same for most of an op's archs
    return {
        **headers.closure(roots, path, scan, words),
        **{path: files.digest(path) for path in libraries.files(flags)},
    }


def _linked(flags: Flags, folder: str) -> dict[str, str]:
    """Return the portable names of the files that flags link with, by path."""
    return {
        path: path[len(folder) + 1 :]
        if path.startswith(folder + os.sep)
        else f"<link {index}>/{os.path.basename(path)}"
        for index, path in enumerate(libraries.files(flags))
    }


@cache
def glue_digest() -> str:
    """Identify the generated glue without rendering it."""
    text = "\0".join(
        [str(GLUE_GENERATOR), *map(resources.template, ("glue.c.in", "kernel.in", "fatbin.c.in"))]
    )
    return hashlib.sha256(text.encode()).hexdigest()
