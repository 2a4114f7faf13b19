"""Tiers by measurement: conftest registers this plugin, which decides what a run leaves out, says so, and finds runs that lie.

A test is slow when it has one of the markers `slow`, `corpus` and `matrix`, or when tests/durations.txt lists it: it takes over 2 s, or its
room's tests take more than 40 s without it.
``--measure`` writes that file, and tests/floors.json, from a run; a test that neither knows is fast. A whole run fails when it executes
fewer tests than the floors say, when it skips a file whole, or skips the GPU tests on a machine with a GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import resource
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import zygote

HERE = Path(__file__).parent
DURATIONS, FLOORS = (HERE / name for name in ("durations.txt", "floors.json"))
SLOW = 2.0  # seconds of the reference machine
ROOM = 40.0  # of them for the fast tests of one room: 20 s on two cores
UNIT = 0.035  # CPU seconds that `speed` takes on the reference machine
OF_SLOW = ("slow", "corpus", "matrix")
NEEDS = ("gpu", "nvcc")
SLACK = 0.95  # of what a measured run executed is the floor: some tests need root, a sanitizer or a second compiler
HEADER = """\
# Seconds of each slow test, on the machine of the unit in tiers.py. One command writes this file:
# python -m pytest -n auto --tier all --measure"""
_TICK = os.sysconf("SC_CLK_TCK")


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--tier", choices=("fast", "slow", "all"), default="fast",
                    help="fast: what takes 2 s at most (the default); slow: the rest; all: both. A test named with :: runs in any case.")
    group.addoption("--part", metavar="NUMBER/COUNT", default="0/1",
                    help="of the chosen tests, one of COUNT parts that take as long; NUMBER may be any, as a date or a seed")
    group.addoption("--measure", action="store_true", help="write tests/durations.txt and tests/floors.json from this run")


def durations() -> dict[str, float]:
    """Seconds of the slow tests by their name. A name has no path: a test that moves to another file keeps its tier."""
    lines = DURATIONS.read_text(encoding="utf-8").splitlines() if DURATIONS.exists() else []
    return {name: float(seconds) for seconds, _, name in (line.partition(" ") for line in lines if not line.startswith("#"))}


def name_of(node: str) -> str:
    return node.partition("::")[2]


def tier_of(item: pytest.Item, measured: Mapping[str, float]) -> str:
    """The tier of a test. Of a function marked `matrix`, every eighth case is fast, or as many as the marker says."""
    if item.get_closest_marker("stress"):
        return "stress"
    name = name_of(item.nodeid)
    if item.get_closest_marker("slow") or item.get_closest_marker("corpus"):
        return "slow"
    if {name, name.partition("[")[0]} & measured.keys() and not item.get_closest_marker("fast"):
        return "slow"
    matrix = item.get_closest_marker("matrix")
    if matrix and int(hashlib.sha256(item.name.encode()).hexdigest(), 16) % (matrix.args or (8,))[0]:
        return "slow"
    return "fast"


def slow_of(seconds: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """The names of tests over SLOW, and of as many others as a room has beyond its budget, with their seconds.

    Of these, cases of a function that keeps a cheaper one go first, then what takes longest.
    """
    found = {node: cost for node, cost in seconds.items() if cost > (0.75 if name_of(node) in measured else 1) * SLOW}
    rooms: dict[str, list[str]] = defaultdict(list)
    for node in sorted(seconds.keys() - found.keys(), key=lambda node: seconds[node]):
        if node.count("/") > 1:
            rooms[node.split("/")[1]].append(node)
    for nodes in rooms.values():
        cheapest = {node.partition("[")[0]: node for node in reversed(nodes)}.values()
        dropped = sorted((node for node in nodes if seconds[node] > SLOW / 8), key=lambda node: (node not in cheapest, seconds[node]))
        excess = sum(seconds[node] for node in nodes) - ROOM
        while excess > 0 and dropped:
            node = dropped.pop()
            found[node] = seconds[node]
            excess -= seconds[node]
    return {name_of(node): cost for node, cost in found.items()}


def part_of(items: list[pytest.Item], part: str, measured: Mapping[str, float]) -> set[str]:
    """One part of tests. The parts take as long; the corpus, which shares a build of minutes, is in one of them."""
    number, count = (int(text) for text in part.split("/"))
    together: dict[str, list[str]] = defaultdict(list)
    costs: dict[str, float] = defaultdict(float)
    for item in items:
        name = "corpus" if item.get_closest_marker("corpus") else item.nodeid
        together[name].append(item.nodeid)
        costs[name] += cost_of(item, measured)
    parts: list[set[str]] = [set() for _ in range(count)]
    totals = [0.0] * count
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        lightest = totals.index(min(totals))
        totals[lightest] += costs[name]
        parts[lightest] |= {*together[name]}
    return parts[number % count]


def cost_of(item: pytest.Item, measured: Mapping[str, float]) -> float:
    """Its seconds, or a guess for a test that was not measured."""
    name = name_of(item.nodeid)
    known = measured.get(name, measured.get(name.partition("[")[0]))
    return known if known is not None else SLOW if item.get_closest_marker("slow") else SLOW / 8


def cpu() -> float:
    """CPU seconds of this process, of its children that ended, and of the zygotes with theirs."""
    total = sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
    for pid in zygote.pids():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / _TICK
    return total


def speed() -> float:
    """CPU seconds that a fixed piece of work takes."""
    begin, total = time.process_time(), 0
    for number in range(1_500_000):
        total += number & 7
    return time.process_time() - begin


class Clock:
    """What each test costs, in the process that runs it: CPU and wall seconds, without fixtures that it shares with others."""

    def __init__(self) -> None:
        self.costs: dict[str, tuple[float, float]] = {}
        self.fixtures: dict[str, float] = {}
        self.users: dict[str, list[str]] = defaultdict(list)
        self.units = [speed()]
        self._shared = [0.0, 0.0]

    @staticmethod
    def now() -> tuple[float, float]:
        return cpu(), time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        begin = self.now()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                spent = [after - before for after, before in zip(self.now(), begin, strict=True)]
                self._shared = [before + more for before, more in zip(self._shared, spent, strict=True)]
                name = f"{fixturedef.baseid}::{fixturedef.argname}"
                self.fixtures[name] = max(self.fixtures.get(name, 0.0), spent[0])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        begin, self._shared = self.now(), [0.0, 0.0]
        result = yield
        spent, wall = (after - before - shared for after, before, shared in zip(self.now(), begin, self._shared, strict=True))
        self.costs[item.nodeid] = (spent, wall)
        info = getattr(item, "_fixtureinfo", None)
        for name, definitions in info.name2fixturedefs.items() if info else ():
            if definitions[-1].scope in ("module", "class", "package"):
                self.users[f"{definitions[-1].baseid}::{name}"].append(item.nodeid)
        if len(self.costs) % 200 == 0:
            self.units.append(speed())
        return result

    def seconds(self) -> dict[str, float]:
        """Seconds on the reference machine: of CPU, or of waiting, where a test mostly waits; with its part of shared fixtures."""
        load = statistics.median([max(1.0, wall / spent) for spent, wall in self.costs.values() if spent > 0.3] or [1.0])
        found = {node: max(spent, wall / load - 1) for node, (spent, wall) in self.costs.items()}
        for name, users in self.users.items():
            for node in users:
                found[node] += self.fixtures.get(name, 0.0) / len(users)
        scale = UNIT / statistics.median([*self.units, speed()])
        return {node: round(seconds * scale, 2) for node, seconds in found.items()}


class Tiers:
    """Selects tests; in the process that a person sees, it counts what ran and tells of what did not."""

    def __init__(self, config: pytest.Config, has: Mapping[str, bool], hidden_gpu: bool) -> None:
        """`has` says of each need of a test whether this machine meets it, `hidden_gpu` whether a torch for CUDA does not see its GPU."""
        self.config, self.has, self.hidden_gpu = config, has, hidden_gpu
        self.measured = durations()
        self.left: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self.collected: set[str] = set()
        self.kinds: dict[str, tuple[str, str]] = {}  # the tier and the need of each test that reported
        self.executed: set[str] = set()
        self.clock = Clock()
        if not self.is_head():
            config.pluginmanager.register(self.clock, "clock")

    def is_head(self) -> bool:
        """Whether this process runs no test itself, but has workers that do."""
        return getattr(self.config.option, "dist", "no") != "no" and not self.is_worker()

    def is_worker(self) -> bool:
        return hasattr(self.config, "workerinput")

    def is_whole(self) -> bool:
        """Whether the run is of all tests of a tier or of a marker."""
        option = self.config.option
        fewer = [option.keyword, option.maxfail, option.collectonly,
                 *(getattr(option, name, None) for name in ("deselect", "ignore", "ignore_glob", "lf"))]
        return not any(fewer) and self.config.args_source != pytest.Config.ArgsSource.ARGS

    def parts(self) -> int:
        """Into how many the chosen tests are divided, of which this run has one."""
        return int(self.config.option.part.split("/")[1])

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Mark what is slow before pytest selects by -m."""
        self.collected = {name_of(item.nodeid) for item in items}
        measured = {} if self.config.option.measure else self.measured
        for item in items:
            if tier_of(item, measured) == "slow":
                item.add_marker("slow")

    def select(self, items: list[pytest.Item]) -> None:
        """Leave out the tiers that are not asked for; this comes after the selection by -k and -m."""
        option = self.config.option
        if any("::" in argument for argument in self.config.args):
            return
        named = set(re.findall(r"\w+", option.markexpr or ""))
        tiers = {item.nodeid: tier_of(item, {}) for item in items}
        asked = {"fast": option.tier != "slow", "slow": option.tier != "fast" or bool(named & {*OF_SLOW}), "stress": "stress" in named}
        part = part_of([item for item in items if asked[tiers[item.nodeid]]], option.part, self.measured)
        dropped = [item for item in items if item.nodeid not in part]
        self.left.update(tiers[item.nodeid] for item in dropped)
        self.config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item.nodeid in part]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        tier = next((name for name in ("stress", "slow") if name in report.keywords), "fast")
        self.kinds[report.nodeid] = (tier, next((need for need in NEEDS if need in report.keywords), ""))
        if report.when == "call" and (report.outcome != "skipped" or hasattr(report, "wasxfail")):
            self.executed.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a worker of pytest-xdist found; each has collected everything, and run a part."""
        output = getattr(node, "workeroutput", {}).get("tiers", {})
        self.left = Counter(output.get("left", self.left))
        self.collected |= {*output.get("collected", [])}
        self.seconds |= output.get("seconds", {})

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if not self.is_head():
            self.seconds = self.clock.seconds()
        if self.is_worker():
            collected = [*self.collected] if self.config.option.measure else []
            vars(self.config)["workeroutput"]["tiers"] = {"left": dict(self.left), "collected": collected, "seconds": self.seconds}
            return
        if self.config.option.measure and self.is_whole() and self.parts() == 1:
            self.write()
        for problem in self.problems() if exitstatus in (0, 1) and self.is_whole() else ():
            report = pytest.TestReport("tests/tiers.py", ("tests/tiers.py", 0, "a whole run"), {}, "failed", problem, "call")
            self.config.hook.pytest_runtest_logreport(report=report)  # so that pytest's last line counts it
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def counts(self) -> Counter[str]:
        """Of tests that were executed, by tier and need, or in all where a marker chose them."""
        marker = self.config.option.markexpr
        return Counter(marker or " ".join(self.kinds[node]).strip() for node in self.executed)

    def problems(self) -> list[str]:
        """What would be a lie if the run counted as passed."""
        found, counts = [], self.counts()
        floors: dict[str, int] = json.loads(FLOORS.read_text(encoding="utf-8"))
        tiers = {"fast": ["fast"], "slow": ["slow"], "all": ["fast", "slow"]}[self.config.option.tier]
        marker = self.config.option.markexpr
        names = [marker] if marker else tiers
        for name, floor in floors.items():
            tier, _, need = name.partition(" ")
            if self.parts() > 1:
                floor //= 2 * self.parts()  # they take as long, and may hold fewer tests
            if (name == marker if marker else tier in tiers) and self.has.get(need, True) and counts[name] < floor:
                found.append(f"{counts[name]} tests of {name!r} were executed, and the floor in tests/floors.json is {floor}")
        if "fast" in names and self.parts() == 1:
            met = [node for node, (_, need) in self.kinds.items() if self.has.get(need, True)]
            skipped = {node.partition("::")[0] for node in met} - {node.partition("::")[0] for node in self.executed}
            found += [f"{file} was skipped whole" for file in sorted(skipped)]
        if self.hidden_gpu:
            found.append("this machine has a GPU (/dev/nvidia0), and torch sees none: the GPU tests were skipped")
        return found

    def write(self) -> None:
        """Write durations.txt and floors.json from this run: names that it did not execute keep their line while there are such tests."""
        ran = {node: seconds for node, seconds in self.seconds.items() if node in self.executed}
        names = {name_of(node) for node in ran}
        kept = {name: seconds for name, seconds in self.measured.items() if name in self.collected and name not in names}
        found = kept | slow_of(ran, self.measured)
        cases = Counter(name.partition("[")[0] for name in self.collected)
        for function, count in Counter(name.partition("[")[0] for name in found).items():
            if count == cases[function] > 1:
                dropped = [found.pop(name) for name in [*found] if name.partition("[")[0] == function]
                found[function] = statistics.median(dropped)
        lines = [f"{seconds:.1f} {name}" for name, seconds in sorted(found.items(), key=lambda one: one[0])]
        DURATIONS.write_text("\n".join([HEADER, *lines]) + "\n", encoding="utf-8")
        floors: dict[str, int] = json.loads(FLOORS.read_text(encoding="utf-8")) if FLOORS.exists() else {}
        for node in self.executed:
            if {name_of(node), name_of(node).partition("[")[0]} & found.keys():
                self.kinds[node] = ("slow", self.kinds[node][1])
        floors |= {name: int(SLACK * count) for name, count in sorted(self.counts().items())}
        FLOORS.write_text(json.dumps(floors, indent=4) + "\n", encoding="utf-8")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
        """Say last, before pytest's own last line, what was left out."""
        yield
        line = terminalreporter.write_line
        unasked = sorted(node for node, (_, need) in self.kinds.items() if need == "gpu" and node not in self.executed)
        if unasked and self.has["gpu"]:
            line(f"Not run although there is a GPU, for the reasons above: {len(unasked)} tests")
            for node in unasked:
                line(f"  {node}")
        late = sorted(((seconds, node) for node, seconds in self.seconds.items()
                       if seconds > 2 * SLOW and self.kinds.get(node, ("",))[0] == "fast"), reverse=True)
        if late:
            line(f"{len(late)} tests of the fast tier took over {2 * SLOW:g} s; --tier all --measure would make them slow:")
        for seconds, node in late[:10]:
            line(f"  {seconds:.1f} s {node}")
        need = Counter(need for node, (_, need) in self.kinds.items() if node not in self.executed and not self.has.get(need, True))
        for name, count in need.items():
            line(f"Not run: {count} tests that need {'a GPU' if name == 'gpu' else name}" + ("; python -m tests.gpu" * (name == "gpu")))
        how = {"fast": "--tier fast", "slow": "--tier slow", "stress": "-m stress"}
        for tier, count in sorted(self.left.items()):
            line(f"Left out: {count} tests of the tier {tier}; run them with {how[tier]}" + " or --tier all" * (tier != "stress"))
