"""How an op is built for a target: sources, flags and compilers, and the key derived from their content."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from opjit import resources
from opjit.backends import Flags
from opjit.backends.targets import Target
from opjit.recipe import headers
from opjit.recipe.schema import Schema

FORMAT = 1  # increase it when the meaning of a document, or of an entry's files, changes
GLUE_GENERATOR = 1  # increase it when glue.py or split.py generates other code from the same text
_OF_CUDA = ("opjit_cuda.h", "nvrtc/cuda_runtime.h", "nvrtc/absent/crt/host_defines.h")  # read by every op's CUDA code
RUNTIME = ("opjit_runtime.c", "opjit_convert.c", "opjit_elementwise.c")  # linked into every op's library


class Recipe(NamedTuple):
    """Everything that decides the bytes of a binary.

    Attributes:
        source: the author's kernel for the target's backend.
        inputs: SHA-256 of every file to compile, by its portable name.
        toolchain: versions of the compilers; None without a compiler, and then `key` is None, too.
        label: name of an inline source in messages; None means its path.
        others: versions of other compilers here that may have made the binary: nvcc, where NVRTC is preferred.
    """

    schema: Schema
    target: Target
    source: Path
    inputs: Mapping[str, str]
    flags: Flags
    toolchain: Mapping[str, str] | None
    label: str | None = None
    others: tuple[Mapping[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.schema.qualified} for {self.target}"

    @property
    def folder(self) -> Path:
        return self.source.parent

    def document(self) -> dict[str, Any]:
        """The document whose SHA-256 is the key. It holds content only: no path, date, host or environment."""
        flags = self.flags
        return {
            "format": FORMAT,
            "schema": self.schema.text,
            "backend": self.target.backend.name,
            "dispatch_key": self.target.backend.dispatch_key,
            "arch": self.target.arch,
            "runtime": self.target.runtime,
            "kernel": self.source.name,
            "glue": _glue_digest(),
            "inputs": dict(sorted(self.inputs.items())),
            "flags": {"c": list(flags.c), "cuda": list(flags.cuda), "link": list(flags.link), "stubs": list(flags.stubs)},
            "toolchain": None if self.toolchain is None else dict(sorted(self.toolchain.items())),
        }

    @property
    def key(self) -> str | None:
        return None if self.toolchain is None else document_key(self.document())

    @property
    def keys(self) -> list[str]:
        """The keys of all binaries that match: of the preferred compilers, then of the others."""
        ways = [self.toolchain, *self.others] if self.toolchain is not None else []
        return [document_key(self._replace(toolchain=way).document()) for way in ways]

    def takes(self, made_by: Any) -> bool:
        """Whether a binary with another key matches, by the versions of the compilers that made it: those that are here did not."""
        if self.toolchain is None:
            return True
        own = {name: value for name, value in self.toolchain.items() if name.startswith("cc.")}
        here = [way.keys() for way in (self.toolchain, *self.others)]
        return isinstance(made_by, dict) and made_by.keys() not in here and {**made_by, **own} == made_by

    @property
    def base(self) -> str:
        """The key without the compilers; see FORMAT.md."""
        return base_key(self.document())

    def inputs_now(self) -> dict[str, str]:
        """The digests of the inputs as they are now."""
        return read_inputs(self.source, self.target, self.flags.include)

    def lines(self) -> dict[str, int]:
        """The number of lines of each of the op's own files, by portable name, for messages about changes."""
        found = {}
        for name in self.inputs:
            if not name.startswith("<opjit>/"):
                with suppress(OSError):
                    content = Path(headers.path_of(name, str(self.folder), self.flags.include)).read_bytes()
                    found[name] = content.count(b"\n") + (content[-1:] not in (b"", b"\n"))
        return found


def document_key(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a document in canonical JSON: sorted names, no spaces, ASCII."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


def base_key(document: Mapping[str, Any]) -> str:
    """Return the key of a document without its compilers."""
    return document_key({**document, "toolchain": None})


def read_inputs(source: Path, target: Target, added: tuple[str, ...] = (), scan: headers.Scan | None = None) -> dict[str, str]:
    """Scan and hash the kernel, the runtime, and all headers that they include. For `scan`, see `headers.closure`."""
    include, folder = str(resources.folder("kernels_c")), str(source.parent)
    shared = RUNTIME if target.backend.stream is None else (*RUNTIME, *_OF_CUDA)
    found = headers.closure([str(source), *(f"{include}/{name}" for name in shared)], (folder, include, *added), scan)
    return {headers.portable_name(path, folder, include, added): digest for path, digest in found.items()}


@cache
def _glue_digest() -> str:
    """Identify the generated glue without rendering it."""
    text = "\0".join([str(GLUE_GENERATOR), *map(resources.template, ("glue.c.in", "glue.cu.in", "fatbin.c.in"))])
    return hashlib.sha256(text.encode()).hexdigest()
