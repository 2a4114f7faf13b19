"""How an op is built for a target: its sources, flags and compilers, and the key that follows from their content."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from opjit import headers, resources
from opjit.backends import Flags
from opjit.schema import Schema
from opjit.targets import Target

# Counted up when the meaning of a document, or of an entry's files, changes.
FORMAT = 1
# Compiled into every library, beside its glue.
RUNTIME = "opjit_runtime.c"
# Counted up when glue.py writes something else over one and the same template.
GLUE_GENERATOR = 1


class Recipe(NamedTuple):
    """Everything that decides the bytes of a binary.

    Attributes:
        source: the author's kernel for the target's backend.
        inputs: SHA-256 of every file compiled, by its portable name.
        toolchain: who compiles; None where there is no compiler, and then `key` is None too.
    """

    schema: Schema
    target: Target
    source: Path
    inputs: Mapping[str, str]
    flags: Flags
    toolchain: Mapping[str, str] | None

    @property
    def folder(self) -> Path:
        return self.source.parent

    def document(self) -> dict[str, Any]:
        """What the key is the hash of. Content only: no path, date, host or environment."""
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
    def base(self) -> str:
        """Identity of what is built, whoever compiles it."""
        return base_key(self.document())

    def inputs_now(self) -> dict[str, str]:
        """The inputs' digests as the files are at this moment."""
        return read_inputs(self.source, self.target, self.flags.include)

    def lines(self) -> dict[str, int]:
        """How many lines each file of the op's own has now, by its portable name: for people, who then see what changed."""
        found = {}
        for name in self.inputs:
            if not name.startswith("<opjit>/"):
                with suppress(OSError):
                    content = Path(headers.place(name, str(self.folder), self.flags.include)).read_bytes()
                    found[name] = content.count(b"\n") + (content[-1:] not in (b"", b"\n"))
        return found

    def with_toolchain(self, toolchain: Mapping[str, str]) -> "Recipe":
        return self._replace(toolchain=toolchain)


def document_key(document: Mapping[str, Any]) -> str:
    """SHA-256 of the document in canonical JSON: sorted names, no spaces, ASCII."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


def base_key(document: Mapping[str, Any]) -> str:
    """The key of all but the compilers."""
    return document_key({**document, "toolchain": None})


def read_inputs(source: Path, target: Target, added: tuple[str, ...] = (), scan: headers.Scan | None = None) -> dict[str, str]:
    """Scan and hash the kernel, the glue's headers and all that they include; `scan` as `headers.closure` takes it."""
    include, folder = str(resources.folder("kernels_c")), str(source.parent)
    shared = [RUNTIME] if target.backend.stream is None else [RUNTIME, "opjit_cuda.h"]
    found = headers.closure([str(source), *(f"{include}/{name}" for name in shared)], (folder, include, *added), scan)
    return {headers.portable_name(path, folder, include, added): digest for path, digest in found.items()}


@cache
def _glue_digest() -> str:
    """Identifies the generated glue without rendering it."""
    text = "\0".join([str(GLUE_GENERATOR), resources.template("glue.c.in"), resources.template("glue.cu.in")])
    return hashlib.sha256(text.encode()).hexdigest()
