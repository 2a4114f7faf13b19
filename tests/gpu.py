"""Run all tests that need a GPU, of both tiers, and name those that did not run.

    python -m tests.gpu [--carry FOLDER] [--part NUMBER/COUNT] [options of pytest]
    python -m tests.gpu --carry FOLDER --build sm_90      on a machine without a GPU: build the ops ahead, and run nothing

Tests that measure have the GPU for themselves, before the others share it. Meanwhile the CPUs build the ops and the references of the
corpus. Each process begins with one of the longest tests and goes on with the files that were changed last, and a table at the end shows
which files took how long. FOLDER keeps built binaries and the references of the corpus between runs and machines. Without it a fourth of
the corpus is tried, another one each day, because nvcc takes minutes for the references. The command fails if torch sees no GPU, if a test
fails, or if fewer tests run than tests/floors.json requires."""

import argparse
import importlib.util
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from tests import tiers

Item = TypeVar("Item")
ROOT = Path(__file__).resolve().parents[1]
LONGEST = 20  # files in the table
WORKERS = 12  # at most: each has some gigabytes of the GPU's memory
LONG = 10.0  # seconds of a test that begins early, so that no process waits for it at the end
BLOCK = 8  # neighboring tests that stay in one process, which makes what they share once
_PLUGIN = __name__ if __name__ != "__main__" else "tests.gpu"  # pytest loads the hooks below


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--carry", type=Path, metavar="FOLDER")
    parser.add_argument("--build", metavar="ARCH")
    options, of_pytest = parser.parse_known_args(arguments)
    if options.build is not None:
        if options.carry is None:
            parser.error("--build needs --carry FOLDER")
        return subprocess.call(build_command(options.carry, options.build), cwd=ROOT)

    if not torch.cuda.is_available():
        print(f"No GPU test can run: torch {torch.__version__} sees no CUDA GPU.")
        return 1
    print(
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        flush=True,
    )
    if options.carry is None:
        os.environ.setdefault("OPJIT_TEST_TURN", str(date.today().toordinal()))
    whole = not of_pytest
    folder = options.carry or ROOT / ".pytest_cache"
    meanwhile = [start(command) for command in warm_commands(folder) if whole]
    codes = {subprocess.call(run) for run in commands(options.carry, of_pytest)}
    for process in meanwhile:
        process.wait()
    return max(
        codes - {pytest.ExitCode.NO_TESTS_COLLECTED},
        default=int(pytest.ExitCode.NO_TESTS_COLLECTED),
    )


def cache_of(carried: Path) -> Path:
    """Return the folder of opjit's cache in pytest's cache, as tests/conftest.py makes it."""
    return carried.resolve() / "d" / "opjit"


def build_command(carried: Path, arch: str) -> list[str]:
    """Return the command that builds the bundled ops into a carried folder."""
    words = ["precompile", "--all", "--arch", arch, "--store", str(cache_of(carried))]
    return [sys.executable, "-m", "opjit", *words]


def warm_commands(folder: Path) -> list[list[str]]:
    """Return the commands that build what the tests need into pytest's cache."""
    major, minor = torch.cuda.get_device_capability()
    reference = [sys.executable, "-m", "tests.cpp_extension.corpus.reference"]
    corpus = folder.resolve() / "d" / "corpus" / "cuda"
    return [build_command(folder, f"sm_{major}{minor}"), [*reference, str(corpus), "cuda", "build"]]


def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a command whose failure is not shown: the tests then build by themselves, and show it."""
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, cwd=ROOT, stdout=quiet, stderr=quiet)


def commands(carried: Path | None, of_pytest: Sequence[str]) -> list[list[str]]:
    """Return the commands of both runs: tests that measure, and the others."""
    plain = [sys.executable, "-m", "pytest", "--tier", "all", "--no-fold-skipped", "-p", _PLUGIN]
    if carried is not None:
        plain += ["-o", f"cache_dir={carried.resolve()}"]
    has_workers = importlib.util.find_spec("xdist") is not None
    workers = ["-n", str(min(os.cpu_count() or 1, WORKERS))] if has_workers else []
    return [
        [*plain, "-m", "gpu and alone", *of_pytest],
        [*plain, "-m", "gpu and not alone", *workers, *of_pytest],
    ]


def changed(root: Path) -> dict[str, float]:
    """Return when each file of the tests was committed last, in seconds since 1970. Nothing without git or its history."""
    command = ["git", "log", "--format=%ct", "--name-only", "--relative", "--", "."]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    found: dict[str, float] = {}
    when = 0.0
    for line in done.stdout.splitlines():
        if line.isdigit():
            when = float(line)
        elif line:
            found.setdefault(line, when)
    return found


def table(seconds: Mapping[str, float], counts: Mapping[str, int]) -> list[str]:
    """Return the lines of the files that took longest."""
    longest = sorted(seconds, key=lambda file: seconds[file], reverse=True)
    lines = [f"{seconds[file]:8.1f} s {counts[file]:5} tests  {file}" for file in longest[:LONGEST]]
    others = sum(seconds[file] for file in longest[LONGEST:])
    if len(seconds) > LONGEST:
        lines.append(f"{others:8.1f} s in {len(seconds) - LONGEST} other files")
    return lines


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Put the files first that were changed last, of the tests that were selected. A file that git does not know is new."""
    yield
    when = changed(config.rootpath)
    if when:
        items.sort(key=lambda item: -when.get(item.nodeid.partition("::")[0], float("inf")))
    worker = getattr(config, "workerinput", None)  # of pytest-xdist
    if worker is not None:
        measured = tiers.durations()
        items.sort(key=lambda item: urgency(item, measured))
        items[:] = dealt(items, worker["workercount"])


def urgency(item: pytest.Item, measured: Mapping[str, float]) -> float:
    """Return the place of a test among the others: the longest first, and last the corpus, whose references may still be built."""
    if item.get_closest_marker("corpus"):
        return 1.0
    seconds = next((measured[name] for name in tiers.names_of(item) if name in measured), 0.0)
    return -seconds if seconds >= LONG else 0.0


def dealt(items: Sequence[Item], workers: int) -> list[Item]:
    """Return tests in an order that gives each process of pytest-xdist's worksteal its share of the first ones.

    worksteal cuts the list into as many pieces as there are processes. The shorter pieces come first."""
    pieces: list[list[Item]] = [[] for _ in range(workers)]
    sizes = [(len(items) + number) // workers for number in range(workers)]
    begin = 0
    block = 1
    while begin < len(items):
        for piece, size in zip(pieces, sizes, strict=True):
            end = begin + min(block, size - len(piece))
            piece += items[begin:end]
            begin = end
        block = BLOCK
    return [item for piece in pieces for item in piece]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seconds = dict[str, float]()
    counts = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                file = report.nodeid.partition("::")[0]
                seconds[file] = seconds.get(file, 0.0) + report.duration
                counts[file] += report.when == "call"
    terminalreporter.section("seconds of all workers by file")
    for line in table(seconds, counts):
        terminalreporter.write_line(line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
