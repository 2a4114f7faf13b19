"""Tiers: conftest registers this plugin, which leaves out what is slow, says so, and finds runs that lie.

A test is slow when it has the marker `slow` or `corpus`, when tests/durations.txt lists it, or when it is one of three in four emulated
cases of a function, which emulate a GPU for many dtypes or shapes. A whole run fails when it executes fewer tests than tests/floors.json
says, when it skips a file whole, or skips the GPU tests on a machine with a GPU."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
DURATIONS, FLOORS = (HERE / name for name in ("durations.txt", "floors.json"))
UNMEASURED = {"fast": 0.25, "slow": 2.0, "stress": 60.0}  # guesses, in seconds
NEEDS = ("gpu", "nvcc")
EMULATED = 4  # of so many emulated cases of a function, the fast tier has one


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption(
        "--tier",
        choices=("fast", "slow", "all"),
        default="fast",
        help="fast: what takes 2 s at most (the default); slow: the rest; all: both. A test named with :: runs in any case.",
    )
    group.addoption(
        "--part",
        metavar="NUMBER/COUNT",
        default="0/1",
        help="of the chosen tests, one of COUNT parts that take as long; NUMBER may be any, as a date or a seed",
    )


def durations() -> dict[str, float]:
    """Seconds of the slow tests by their name. A name has no path: a test that moves to another file keeps its tier."""
    lines = DURATIONS.read_text(encoding="utf-8").splitlines()
    return {
        name: float(seconds)
        for seconds, _, name in (line.partition(" ") for line in lines if not line.startswith("#"))
    }


def tier_of(marked: pytest.Item | pytest.TestReport) -> str:
    """The tier of a test, by its markers."""
    return next((name for name in ("stress", "slow") if name in marked.keywords), "fast")


def part_of(items: list[pytest.Item], part: str, measured: Mapping[str, float]) -> set[str]:
    """One part of tests. The parts take as long; the corpus, which shares a build of minutes, is in one of them."""
    number, count = (int(text) for text in part.split("/"))
    together: dict[str, list[str]] = defaultdict(list)
    costs: dict[str, float] = defaultdict(float)
    for item in items:
        name = "corpus" if item.get_closest_marker("corpus") else item.nodeid
        together[name].append(item.nodeid)
        costs[name] += next(
            (measured[known] for known in names_of(item) if known in measured),
            UNMEASURED[tier_of(item)],
        )
    parts: list[set[str]] = [set() for _ in range(count)]
    totals = [0.0] * count
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        lightest = totals.index(min(totals))
        totals[lightest] += costs[name]
        parts[lightest] |= {*together[name]}
    return parts[number % count]


def names_of(item: pytest.Item) -> tuple[str, str]:
    """The names under which durations.txt may have a test: its own, and its function's."""
    name = item.nodeid.partition("::")[2]
    return name, name.partition("[")[0]


def is_emulated(item: pytest.Item) -> bool:
    """Return whether a test runs a CUDA kernel on the CPU, as the case of a fixture that also has a GPU."""
    case = getattr(item, "callspec", None)
    return case is not None and "emulated" in (
        case.params.get(name) for name in ("device", "cuda_device")
    )


class Tiers:
    """Selects tests; in the process that a person sees, it counts what ran and tells of what did not."""

    def __init__(self, config: pytest.Config, has: Mapping[str, bool], hidden_gpu: bool) -> None:
        """`has` says of each need of a test whether this machine meets it, `hidden_gpu` whether a torch for CUDA does not see its GPU."""
        self.config = config
        self.has = has
        self.hidden_gpu = hidden_gpu
        self.measured = durations()
        self.left: Counter[str] = Counter()
        self.kinds: dict[
            str, tuple[str, str]
        ] = {}  # the tier and the need of each test that reported
        self.executed: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Mark what is slow before pytest selects by -m."""
        emulated = Counter[str]()  # cases so far, by function
        for item in items:
            function = item.nodeid.partition("[")[0]
            if is_emulated(item):
                emulated[function] += 1
            beyond_sample = is_emulated(item) and emulated[function] % EMULATED != 1
            listed = not self.measured.keys().isdisjoint(names_of(item))
            if item.get_closest_marker("corpus") or listed or beyond_sample:
                item.add_marker("slow")

    def select(self, items: list[pytest.Item]) -> None:
        """Leave out the tiers that are not asked for; this comes after the selection by -k and -m."""
        option = self.config.option
        if any("::" in argument for argument in self.config.args):
            return
        named = set(re.findall(r"\w+", option.markexpr or ""))
        asked = {
            "fast": option.tier != "slow",
            "slow": option.tier != "fast" or bool(named & {"slow", "corpus"}),
            "stress": "stress" in named,
        }
        part = part_of([item for item in items if asked[tier_of(item)]], option.part, self.measured)
        dropped = [item for item in items if item.nodeid not in part]
        self.left.update(map(tier_of, dropped))
        self.config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item.nodeid in part]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.kinds[report.nodeid] = (
            tier_of(report),
            next((need for need in NEEDS if need in report.keywords), ""),
        )
        if report.when == "call" and (report.outcome != "skipped" or hasattr(report, "wasxfail")):
            self.executed.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take from a worker of pytest-xdist what it left out; each has collected everything."""
        self.left = Counter(getattr(node, "workeroutput", {}).get("left", self.left))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if hasattr(self.config, "workeroutput"):
            vars(self.config)["workeroutput"]["left"] = dict(self.left)
            return
        for problem in self.problems() if exitstatus in (0, 1) and self.is_whole() else ():
            report = pytest.TestReport(
                "tests/tiers.py",
                ("tests/tiers.py", 0, "a whole run"),
                {},
                "failed",
                problem,
                "call",
            )
            # So that pytest's last line counts it.
            self.config.hook.pytest_runtest_logreport(report=report)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def is_whole(self) -> bool:
        """Whether the run is of all tests of a tier or of a marker."""
        option = self.config.option
        fewer = [
            option.keyword,
            option.maxfail,
            option.collectonly,
            *(getattr(option, name, None) for name in ("deselect", "ignore", "ignore_glob", "lf")),
        ]
        return not any(fewer) and self.config.args_source != pytest.Config.ArgsSource.ARGS

    def problems(self) -> list[str]:
        """What would be a lie if the run counted as passed."""
        marker = self.config.option.markexpr
        parts = int(self.config.option.part.split("/")[1])
        names = (
            [marker]
            if marker
            else [tier for tier in ("fast", "slow") if self.config.option.tier in (tier, "all")]
        )
        counts = Counter(marker or " ".join(self.kinds[node]).strip() for node in self.executed)
        found = []
        for name, floor in json.loads(FLOORS.read_text(encoding="utf-8")).items():
            tier, _, need = name.partition(" ")
            if parts > 1:
                floor //= 2 * parts  # they take as long, and may hold fewer tests
            if (
                (name if marker else tier) in names
                and self.has.get(need, True)
                and counts[name] < floor
            ):
                found.append(
                    f"{counts[name]} tests of {name!r} were executed, and the floor in tests/floors.json is {floor}"
                )
        if "fast" in names and parts == 1:
            met = [node for node, (_, need) in self.kinds.items() if self.has.get(need, True)]
            skipped = {node.partition("::")[0] for node in met} - {
                node.partition("::")[0] for node in self.executed
            }
            found += [f"{file} was skipped whole" for file in sorted(skipped)]
        if self.hidden_gpu:
            found.append(
                "this machine has a GPU (/dev/nvidia0), and torch sees none: the GPU tests were skipped"
            )
        return found

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
        """Say last, before pytest's own last line, what was left out."""
        yield
        for report in terminalreporter.stats.get("skipped", []):
            if "no_qemu" in getattr(report, "keywords", ()):  # that of a whole module has none
                terminalreporter.write_line(
                    f"Not under qemu: {report.nodeid}: {report.longrepr[2]}"
                )
        unmet = Counter(
            need
            for node, (_, need) in self.kinds.items()
            if node not in self.executed and not self.has.get(need, True)
        )
        for need, count in unmet.items():
            gpu = "a GPU; python -m tests.gpu"
            terminalreporter.write_line(
                f"Not run: {count} tests that need {gpu if need == 'gpu' else need}"
            )
        how = {
            "fast": "--tier fast or --tier all",
            "slow": "--tier slow or --tier all",
            "stress": "-m stress",
        }
        for tier, count in sorted(self.left.items()):
            terminalreporter.write_line(
                f"Left out: {count} tests of the tier {tier}; run them with {how[tier]}"
            )
