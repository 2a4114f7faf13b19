"""A changed cache stays out of a program: the caches of Triton, tvm-ffi and Inductor, alone and under opjit.

    python tests/benchmarks/tamper.py [--flips 1000] [--starts 10] [--seed N] [ENGINE]...

Each engine compiles one kernel. Then its cache suffers:

- flipped bits: one bit of a random file, before each use;
- another user: a changed file that belongs to a user of the machine, in a directory that everyone can write;
- a full disk: the cache is on a filesystem of 16 KiB (root only);
- kills: a process that fills the cache is killed at a random moment, and the next process uses it.

Triton runs with opjit's manager of its cache. The other engines start from a signed tree, of which bits flip in the file and in its copy.
A use is "used" if the engine gave the program the changed file, "rebuilt" if it compiled again or got the original file back, "refused"
if it ended with an error that names the file, and "failed" if it ended with another error or a signal. An engine that is not installed is
left out. Triton compiles for sm_90 without a GPU, and Inductor for the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tamper_child
from common import Row, path_with_tools, show

from opjit.cache import trees
from opjit.errors import CacheWarning, RemoteError
from opjit.share import trust

CHILD = str(Path(__file__).with_name("tamper_child.py"))
SOMEBODY = 12345  # a user id that nobody has
MANAGER = {"TRITON_CACHE_MANAGER": "opjit.adapters.triton:Manager"}


class Engine(NamedTuple):
    """A compiler with a cache.

    Attributes:
        module: the module that must be installed.
        variable: the variable that leads to its cache.
        pattern: the files that it reads, in its cache.
    """

    module: str
    variable: str
    pattern: str


ENGINES = {
    "Triton": Engine("triton", "TRITON_CACHE_DIR", "*/add.*"),
    "tvm-ffi": Engine("tvm_ffi", "TVM_FFI_CACHE_DIR", "*/*.so"),
    "Inductor": Engine("torch", "TORCHINDUCTOR_CACHE_DIR", "[!t]*/**/*"),
}


def start(name: str, changes: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, CHILD, name],
        env={**os.environ, "PATH": path_with_tools(), **changes},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def outcome(name: str, changes: dict[str, str], damaged: Path | None = None) -> str:
    """How a process ends that uses a cache in which one file may be damaged."""
    before = damaged.read_bytes() if damaged is not None else b""
    process = start(name, changes)
    out, _ = process.communicate()
    if process.returncode != 0:
        return "failed"
    unchanged = damaged is None or (damaged.exists() and damaged.read_bytes() == before)
    return "used" if json.loads(out.splitlines()[-1]) and unchanged else "rebuilt"


def flip(file: Path, generator: random.Random) -> bytes:
    """Flip one bit, and return the original content."""
    good = file.read_bytes()
    damaged = bytearray(good)
    damaged[generator.randrange(len(good))] ^= 1 << generator.randrange(8)
    file.write_bytes(damaged)
    return good


class Side:
    """A cache of an engine that holds one kernel, and what a program makes of it."""

    def __init__(self, name: str, scratch: Path, changes: dict[str, str], pattern: str) -> None:
        self.name = name
        self.root = scratch
        self.changes = changes
        outcome(name, changes)
        assert outcome(name, changes) == "used"
        found = [place for place in sorted(scratch.glob(pattern)) if place.is_file()]
        self.contents = {place: place.read_bytes() for place in found if place.stat().st_size}

    def restore(self) -> None:
        for place, content in self.contents.items():
            place.write_bytes(content)
            os.chown(place, os.geteuid(), -1)

    def flips(
        self, count: int, generator: random.Random, use: Callable[[Path], str] | None = None
    ) -> Counter[str]:
        """Flip bits, one before each `use`; by default, a use is a new process."""
        found: Counter[str] = Counter()
        for _ in range(count):
            place = generator.choice(sorted(self.contents))
            flip(place, generator)
            found[use(place) if use else outcome(self.name, self.changes, place)] += 1
            self.restore()
        return found

    def other_user(self, generator: random.Random) -> str:
        place = generator.choice(sorted(self.contents))
        place.write_bytes(self.contents[place] + b"\n")
        os.chown(place, SOMEBODY, -1)
        place.parent.chmod(0o777)
        try:
            return outcome(self.name, self.changes, place)
        finally:
            self.restore()
            place.parent.chmod(0o700)


def use_here(name: str, damaged: Path) -> str:
    before = damaged.read_bytes()
    try:
        hit = tamper_child.USES[name]()
    except Exception:
        return "failed"
    return "used" if hit and damaged.read_bytes() == before else "rebuilt"


def flips_in_one_process(
    name: str, scratch: Path, changes: dict[str, str], pattern: str, count: int
) -> Counter[str]:
    """Flip bits, and use the cache after each, in a process with the changed variables: this one forks it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.environ.update(changes)
            warnings.simplefilter("ignore", CacheWarning)
            side = Side(name, scratch, changes, pattern)
            found = side.flips(count, random.Random(count), partial(use_here, name))
            os.write(writer, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as file:
        return Counter(json.load(file))


def opened(tree: Path) -> str:
    """Open a tree in this process."""
    try:
        trees.open_tree(tree)
    except RemoteError:
        return "refused"
    return "rebuilt"


def tree_flips(
    tree: Path, variable: str, count: int, generator: random.Random
) -> tuple[Counter[str], Counter[str]]:
    """Flip bits of a tree before its copy exists, and bits of the copy."""
    in_file: Counter[str] = Counter()
    good = tree.read_bytes()
    for _ in range(count):
        flip(tree, generator)
        in_file[opened(tree)] += 1
        tree.write_bytes(good)
    root = Path(trees.open_tree(tree)[variable])
    originals = {place: place.read_bytes() for place in root.rglob("*") if place.is_file()}
    whole = sorted(place for place, content in originals.items() if content)
    in_copy: Counter[str] = Counter()
    for _ in range(count):
        place = generator.choice(whole)
        flip(place, generator)
        trees.open_tree(tree)
        in_copy["rebuilt" if place.read_bytes() == originals[place] else "used"] += 1
    return in_file, in_copy


@contextmanager
def small_disk(place: Path) -> Iterator[None]:
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k,mode=700", "none", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def kills(
    name: str, changes: Callable[[Path], dict[str, str]], scratch: Path, count: int, seconds: float
) -> Counter[str]:
    """Kill processes that fill an empty cache, and let another process use what is there."""
    generator = random.Random(count)
    found: Counter[str] = Counter()
    for number in range(count):
        settings = changes(scratch / f"killed{number}")
        process = start(name, settings)
        time.sleep(generator.uniform(0.3, 1.0) * seconds)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        found["failed" if outcome(name, settings) == "failed" else "works"] += 1
    return found


def shown(found: Counter[str]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in sorted(found.items()))


def compare(
    name: str, scratch: Path, flips: int, starts: int, generator: random.Random
) -> Iterator[Row]:
    """The rows of one engine."""
    engine = ENGINES[name]

    def stock_at(place: Path) -> dict[str, str]:
        place.mkdir(exist_ok=True)
        return {engine.variable: str(place)}

    def managed_at(place: Path) -> dict[str, str]:
        return {**MANAGER, "OPJIT_CACHE": str(place), engine.variable: f"{place}-unused"}

    def row(what: str, ours: str, stock: str) -> Row:
        bad = {"used", "failed"} & set(ours.replace(",", " ").split())
        return Row(f"{name}: {what}", ours, stock, "", "", "FAIL" if bad else "PASS")

    began = time.monotonic()
    stock = Side(name, scratch / "stock", stock_at(scratch / "stock"), engine.pattern)
    seconds = (time.monotonic() - began) / 2
    if name == "Triton":
        managed = managed_at(scratch / "managed")
        ours = Side(name, scratch / "managed", managed, "v2/parts/*/*")
        sides = (ours, stock)
        both = [
            flips_in_one_process(name, side.root, side.changes, pattern, flips)
            for side, pattern in zip(sides, ("v2/parts/*/*", engine.pattern), strict=True)
        ]
        yield row(f"{flips:,} flipped bits", *map(shown, both))
        yield row("another user's file", ours.other_user(generator), stock.other_user(generator))
        both = [kills(name, at, scratch, starts, seconds) for at in (managed_at, stock_at)]
        yield row(f"{starts} kills", *map(shown, both))
        if os.geteuid() == 0:
            results = []
            for at in (managed_at, stock_at):
                with small_disk(scratch / "small"):
                    results.append(outcome(name, at(scratch / "small")))
                (scratch / "small").rmdir()
            yield row("full disk", *results)
        return
    theirs = shown(stock.flips(starts, generator))
    tree = scratch / "tree"
    trees.pack_tree(tree, {engine.variable: stock.root}, scratch / "keys" / "ci.key")
    in_file, in_copy = tree_flips(tree, engine.variable, flips, generator)
    yield row(f"flipped bits of the file, of {flips}", shown(in_file), theirs)
    yield row(f"flipped bits of the copy, of {flips}", shown(in_copy), theirs)
    copy = trees.open_tree(tree)
    assert outcome(name, copy) == "used"  # the whole copy serves the engine
    os.chown(Path(copy[engine.variable]).parent, SOMEBODY, -1)
    yield row("another user's files", opened(tree), stock.other_user(generator))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engines", nargs="*", default=list(ENGINES), metavar="ENGINE")
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tamper-") as folder:
        for name in chosen.engines:
            if find_spec(ENGINES[name].module) is None:
                print(f"{name} is not installed, so it is left out", file=sys.stderr)
                continue
            scratch = Path(folder, name)
            (scratch / "stock").mkdir(parents=True)
            _, public = trust.keygen("ci", scratch / "keys")
            os.environ.update(OPJIT_CACHE=str(scratch / "cache"), OPJIT_TRUST=public)
            generator = random.Random(chosen.seed)
            rows += compare(name, scratch, chosen.flips, chosen.starts, generator)
            show(f"{name}, seed {chosen.seed}", rows[-4:], ("under opjit", "alone"))
    show(f"All, seed {chosen.seed}", rows, ("under opjit", "alone"))
    sys.exit(int(any(row.verdict == "FAIL" for row in rows)))


if __name__ == "__main__":
    main()
