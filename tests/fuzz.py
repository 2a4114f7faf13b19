"""Coverage-guided fuzzing of what reads bytes from elsewhere: entries and manifests.

    pip install atheris
    python tests/fuzz.py -max_total_time=60

Whatever the bytes are, each parser returns or raises an error of opjit's own. Arguments are libFuzzer's."""

import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["opjit.store.bundle", "opjit.store.manifest"]):
    from opjit.store import bundle, manifest
from opjit.errors import EntryError
from tests.attacks import make


def one(content: bytes) -> None:
    with suppress(EntryError):
        parsed = bundle.parse_bundle(content)
        assert parsed.dump() == content
        with suppress(EntryError):
            described = manifest.parse(parsed.manifest)
            assert Path("/x", described.library).parent == Path("/x")
    with suppress(EntryError):
        manifest.parse(content)


def main() -> None:
    with tempfile.TemporaryDirectory() as corpus:
        for name, content in make.FILES.items():
            (Path(corpus) / name).write_bytes(content)
        atheris.Setup([sys.argv[0], corpus, *sys.argv[1:]], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
