"""Coverage-guided fuzzing of what reads bytes from elsewhere: entries, manifests, packs.

    pip install atheris
    python tests/fuzz.py -max_total_time=60

Whatever the bytes are, each parser returns or raises an error of opjit's own. Arguments are libFuzzer's.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["opjit.store.bundle", "opjit.store.manifest", "opjit.cache.transfer"]):
    from opjit.cache import transfer
    from opjit.store import bundle, manifest
from opjit.errors import EntryError
from tests.attacks import make


def entry(content: bytes) -> None:
    with suppress(EntryError):
        parsed = bundle.parse(content)
        assert parsed.dump() == content
        with suppress(EntryError):
            described = manifest.parse(parsed.manifest)
            assert Path("/x", described.library).parent == Path("/x")
    with suppress(EntryError):
        manifest.parse(content)


def pack(content: bytes) -> None:
    problems: list[str] = []
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        for name, read in transfer._members(file, problems):
            assert ".." not in name.split("/")
            assert len(read()) <= len(content)


def one(content: bytes) -> None:
    entry(content)
    pack(content)


def main() -> None:
    with tempfile.TemporaryDirectory() as corpus:
        for name, content in make.FILES.items():
            (Path(corpus) / name).write_bytes(content)
        atheris.Setup([sys.argv[0], corpus, *sys.argv[1:]], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
