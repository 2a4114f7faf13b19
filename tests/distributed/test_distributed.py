"""Ranks of a job: each missing op is built once in the whole job, also if a rank dies, comes late or has no compiler.

A job is one process that imports torch once and forks its ranks; a «node» is a cache and a place for locks of its own."""

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

import opjit
import opjit.distributed
from opjit import errors, request
from opjit.backends import targets
from opjit.catalog import registry
from opjit.distributed import job, ranks, rendezvous
from opjit.distributed.ranks import Rank
from opjit.errors import CacheWarning, CompileError, OpjitError
from opjit.store import bundle
from opjit.store.store import Store, default_root
from opjit.wanted import of_op
from tests import helpers, zygote
from tests.helpers import COMPILES, LEVELS, entries, fake_compiler, free_port, real_compiler

OP_PY = """
import torch
import opjit
for n in range(1, {count} + 1):
    @opjit.op(f"jobtest::add{{n}}(Tensor x) -> Tensor")
    def add(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)
"""
# One process that has imported torch. For each line that it reads it forks a job, and that a rank for each environment; each rank
# leaves its result in a file.
JOBS = """
import atexit, json, os, signal, sys, time, warnings
import torch, opjit, opjit.distributed
import torch.distributed as dist
from pathlib import Path
from opjit.ahead import precompile
from opjit.distributed import job, rendezvous
from opjit.catalog import registry
from torch.utils import cpp_extension  # before the fork, to stay light
torch.set_num_threads(1)
def rank(started, before, after):
    result = {}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            while not (folder / os.environ.get("AFTER", ".")).exists():
                time.sleep(0.01)
            time.sleep(float(os.environ.get("DELAY", "0")))
            names = os.environ["NAMES"].split(",")
            exec(before, globals())
            got = opjit.distributed.ready(names, "cpu")
            result["seconds"] = time.monotonic() - started
            result["values"] = [op(torch.zeros(1)).item() for op in got]
            result["same"] = [opjit.get(name, "cpu") for name in names] == got
            exec(after, {**globals(), "result": result})
        except opjit.errors.OpjitError as error:
            result["seconds"] = time.monotonic() - started
            result["error"] = [type(error).__name__, str(error)]
        except BaseException as error:
            import traceback
            result["crash"] = traceback.format_exc()
    result["warnings"] = [str(one.message) for one in seen]
    return result
for line in sys.stdin:
    request = json.loads(line)
    folder = Path(request["folder"])
    if os.fork() == 0:
        os.environ.clear()
        os.environ.update(request["environment"])
        registry.declare_folder(Path(request["ops"]))
        started, children = time.monotonic(), []
        for number, changes in enumerate(request["ranks"]):
            child = os.fork()
            if child == 0:
                log = os.open(folder / f"{number}.log", os.O_WRONLY | os.O_CREAT)
                os.dup2(log, 1), os.dup2(log, 2)
                os.environ["OPJIT_TEST_RANK_PID"] = str(os.getpid())
                for name, value in changes.items():
                    os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
                os.environ["OPJIT_TEST_RANK"] = os.environ.get("RANK", "")
                (folder / f"{number}.json").write_text(json.dumps(rank(started, request["before"], request["after"])))
                atexit._run_exitfuncs()  # rank 0 stays for who needs its store; taking torch apart would take a second
                os._exit(0)
            children.append(child)
        frozen = [child for child in children if os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])]
        for child in frozen:  # for as long as the others need
            os.kill(child, signal.SIGKILL)
        os._exit(0)
    os.wait()
    print("done", flush=True)
"""


def source(n: int) -> str:
    return '#include "opjit.h"\n' + helpers.elementwise(f"add{n}", f"from[i] + {n}")


@pytest.fixture(scope="module")
def jobs() -> Iterator[zygote.Process]:
    """The process that forks jobs."""
    process = helpers.started(JOBS)
    yield process
    assert process.communicate()[0] == ""


@dataclass
class Node:
    """What ranks of one machine share."""

    folder: Path
    environment: dict[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.folder / "tmp").mkdir(parents=True)

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def rank(self, **changes: str | None) -> dict[str, str | None]:
        return {
            "OPJIT_CACHE": str(self.cache),
            "TMPDIR": str(self.folder / "tmp"),
            **self.environment,
            **changes,
        }


@dataclass
class Cluster:
    """The test's folder, the one of the ops that ranks ask for, the compiler's log, two nodes, and the process that forks jobs."""

    folder: Path
    ops: Path
    log: Path
    nodes: list[Node]
    process: zygote.Process

    def run(
        self,
        ranks: Sequence[Mapping[str, str | None]],
        names: str = "jobtest::add1",
        before: str = "",
        after: str = "",
        number: bool = True,
    ) -> list[dict[str, Any]]:
        """What each rank of a job reports; an empty result for one that was killed."""
        folder = self.folder / f"job-{time.monotonic_ns()}"
        folder.mkdir()
        request = {
            "folder": str(folder),
            "ops": str(self.ops),
            "before": before,
            "after": after,
            "environment": helpers.environment(),
            "ranks": numbered(ranks, names, free_port()) if number else [*ranks],
        }
        self.process.send(json.dumps(request))
        assert self.process.stdout.readline() == "done\n"
        logs = "".join(path.read_text() for path in folder.glob("*.log"))
        assert "Traceback" not in logs, logs
        results = [
            json.loads(path.read_text()) if (path := folder / f"{number}.json").exists() else {}
            for number in range(len(ranks))
        ]
        assert not any("crash" in result for result in results), results
        return results

    def compiled(self) -> int:
        return len(self.log.read_text().split())


@pytest.fixture
def ops(tmp_path: Path) -> Path:
    folder = tmp_path / "ops"
    folder.mkdir()
    (folder / "op.py").write_text(OP_PY.format(count=4))
    for n in range(1, 5):
        (folder / f"add{n}.c").write_text(source(n))
    return folder


@pytest.fixture
def cluster(tmp_path: Path, ops: Path, log: Path, jobs: zygote.Process) -> Cluster:
    return Cluster(tmp_path, ops, log, [Node(tmp_path / name) for name in ("a", "b")], jobs)


def numbered(
    ranks: Sequence[Mapping[str, str | None]], names: str, port: str
) -> list[dict[str, str | None]]:
    """torchrun's variables, without its own store."""
    places = [each["OPJIT_CACHE"] for each in ranks]
    return [
        {
            "RANK": str(number),
            "WORLD_SIZE": str(len(ranks)),
            "LOCAL_RANK": str(places[:number].count(each["OPJIT_CACHE"])),
            "LOCAL_WORLD_SIZE": str(places.count(each["OPJIT_CACHE"])),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "NAMES": names,
            **each,
        }
        for number, each in enumerate(ranks)
    ]


ALL = "jobtest::add1,jobtest::add2,jobtest::add3,jobtest::add4"
# All ranks have arrived, and rank 0 has claimed a build, before the others look.
FROZEN = "from opjit import lock\nlock.HEARTBEAT_TIMEOUT = 1.0"  # a holder that gives no sign for so long is replaced
TOGETHER = """
real = job.Job._claim
def late(self, task):
    while self.jobstore.add("arrived", 0) < {}:
        time.sleep(0.01)
    while os.environ["RANK"] != "0" and not self.jobstore.get(f"claim/{{task.name}}"):
        time.sleep(0.01)
    return real(self, task)
job.Job._claim = late
"""


@pytest.mark.torch
def test_eight_ranks_on_two_nodes_build_each_missing_entry_once_and_all_have_all(
    cluster: Cluster,
) -> None:
    job = [each.rank() for each in cluster.nodes for _ in range(4)]
    results = cluster.run(job, ALL)
    assert [(each["values"], each["same"], each["warnings"]) for each in results] == [
        ([1, 2, 3, 4], True, [])
    ] * 8
    assert cluster.compiled() == 4
    assert [len(entries(each.cache)) for each in cluster.nodes] == [4, 4]
    assert [list((each.cache / "v2" / "staging").iterdir()) for each in cluster.nodes] == [[], []]
    again = cluster.run(job, ALL)  # and the next job finds it all
    assert [(each["values"], each["warnings"]) for each in again] == [([1, 2, 3, 4], [])] * 8
    assert cluster.compiled() == 4


def test_a_rank_reads_no_bytes_of_what_its_cache_shows(cluster: Cluster) -> None:
    """Two nodes, by what they say of themselves, and one filesystem."""
    both = [cluster.nodes[0].rank(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0") for _ in range(3)]
    before = (
        TOGETHER.format(3)
        + """
read = []
real_get = rendezvous.JobStore.get
rendezvous.JobStore.get = lambda self, key: (read.append(key), real_get(self, key))[1]
"""
    )
    results = cluster.run(
        both, ALL, before=before, after="result['bytes'] = [key for key in read if 'bytes' in key]"
    )
    assert [each["values"] for each in results] == [[1, 2, 3, 4]] * 3
    assert [each["bytes"] for each in results] == [[]] * 3
    assert cluster.compiled() == 4


def test_ranks_may_want_different_ops(cluster: Cluster) -> None:
    job = [
        cluster.nodes[0].rank(NAMES="jobtest::add1,jobtest::add2"),
        cluster.nodes[1].rank(NAMES="jobtest::add2,jobtest::add3"),
        cluster.nodes[1].rank(NAMES="jobtest::add4"),
    ]
    assert [each["values"] for each in cluster.run(job)] == [[1, 2], [2, 3], [4]]
    assert cluster.compiled() == 4


def test_ranks_of_different_archs_have_entries_of_their_own(cluster: Cluster) -> None:
    """All on levels that every machine of the tests has."""
    job = [each.rank(OPJIT_ARCH=arch) for each in cluster.nodes for arch in LEVELS[:2]]
    results = cluster.run(job)
    assert [(each["values"], each["warnings"]) for each in results] == [([1], [])] * 4
    assert cluster.compiled() == 2
    assert [len(entries(each.cache)) for each in cluster.nodes] == [2, 2]


def test_a_process_that_is_no_rank_gets_each_op(cluster: Cluster) -> None:
    alone = cluster.nodes[0].rank(NAMES="jobtest::add1,jobtest::add2", RANK=None, WORLD_SIZE=None)
    assert [each["values"] for each in cluster.run([alone], number=False)] == [[1, 2]]
    assert cluster.compiled() == 2


@pytest.mark.slow
def test_a_node_that_starts_late_keeps_nobody_waiting_and_takes_what_the_others_have(
    cluster: Cluster,
) -> None:
    cluster.run([cluster.nodes[0].rank()], ALL)
    assert cluster.compiled() == 4
    early, late = cluster.run([cluster.nodes[0].rank(), cluster.nodes[1].rank(AFTER="0.json")], ALL)
    assert early["values"] == [1, 2, 3, 4]
    assert (late["values"], late["warnings"]) == ([1, 2, 3, 4], [])
    assert cluster.compiled() == 4


def test_a_rank_that_never_comes_costs_the_others_nothing_but_rank_0_s_stay(
    cluster: Cluster,
) -> None:
    job = numbered([each.rank() for each in cluster.nodes for _ in range(2)], ALL, free_port())[:3]
    results = cluster.run(job, number=False, before="job.ARRIVAL_TIMEOUT = 1.0")
    assert [each["values"] for each in results] == [[1, 2, 3, 4]] * 3
    assert cluster.compiled() == 4


def killing(tmp: Path, log: Path, signal: str) -> str:
    """A compiler that sends a signal to the first rank, but rank 0, that calls it, and to no other."""
    once = f"[ $OPJIT_TEST_RANK != 0 ] && mkdir '{tmp}/killed' 2>/dev/null"
    stop = f"if {once}; then kill -{signal} $OPJIT_TEST_RANK_PID; exit 1; fi"
    return str(
        fake_compiler(
            tmp / "killing-cc", before=f"if {COMPILES}; then echo $$ >> '{log}'; {stop}; fi"
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["KILL", "STOP"])
def test_a_builder_that_dies_or_freezes_is_replaced_in_bounded_time(
    cluster: Cluster, tmp_path: Path, log: Path, signal: str
) -> None:
    compiler = killing(tmp_path, log, signal)
    # Rank 0 lacks nothing of add1, so that another one builds it.
    cluster.run([cluster.nodes[0].rank()], "jobtest::add2")
    job = [
        cluster.nodes[0].rank(NAMES="jobtest::add2"),
        *[each.rank(CC=compiler) for each in cluster.nodes for _ in range(2)],
    ]
    results = cluster.run(job, before=f"job.CLAIM_TIMEOUT, job.HOST_TIMEOUT = 3.0, 6.0\n{FROZEN}")
    assert (tmp_path / "killed").is_dir()
    others = [each for each in results[1:] if each]
    assert len(others) == 3
    assert [each["values"] for each in others] == [[1]] * 3
    warned = [text for each in others for text in each["warnings"]]
    # A frozen builder has its node's lock.
    assert all(signal == "STOP" and "it has not shown any progress" in text for text in warned)
    assert [len(entries(each.cache)) for each in cluster.nodes] == [2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["KILL", "STOP"])
def test_without_rank_0_each_rank_builds_for_itself_and_says_so_once(
    cluster: Cluster, tmp_path: Path, signal: str
) -> None:
    """Rank 0 goes while it builds, and the others wait for it."""
    compiler = fake_compiler(
        tmp_path / "killing-cc",
        before=f"if {COMPILES} && [ $OPJIT_TEST_RANK = 0 ]; then kill -{signal} $OPJIT_TEST_RANK_PID; exit 1; fi",
    )
    # The lock of a frozen builder is not freed, and ranks of its node wait for it, as everywhere else.
    job = [
        cluster.nodes[0].rank(),
        cluster.nodes[0 if signal == "KILL" else 1].rank(),
        cluster.nodes[1].rank(),
    ]
    before = "rendezvous.ANSWER_TIMEOUT = 2.0\n" + TOGETHER.format(3)
    results = cluster.run([{**each, "CC": str(compiler)} for each in job], before=before)
    assert results[0] == {}
    assert [each["values"] for each in results[1:]] == [[1], [1]]
    for each in results[1:]:
        (warning,) = each["warnings"]
        assert "alone, because the job's store is unreachable" in warning


def test_a_job_whose_rank_0_is_nowhere_goes_on_without_it(cluster: Cluster) -> None:
    job = numbered([each.rank() for each in cluster.nodes], "jobtest::add1", free_port())[1:]
    (result,) = cluster.run(job, before="opjit.distributed._CONNECT_TIMEOUT = 1.0", number=False)
    assert result["values"] == [1]
    (warning,) = result["warnings"]
    assert "rank 1 builds its missing ops alone" in warning


def test_a_port_that_somebody_else_has_costs_a_warning(cluster: Cluster) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        job = numbered(
            [each.rank() for each in cluster.nodes], "jobtest::add1", str(other.getsockname()[1])
        )
        results = cluster.run(job, before="rendezvous.ANSWER_TIMEOUT = 2.0", number=False)
    assert [each["values"] for each in results] == [[1], [1]]
    assert [len(each["warnings"]) for each in results] == [1, 1]


def test_a_compile_error_is_found_once_and_raised_on_every_rank(cluster: Cluster) -> None:
    (cluster.ops / "add2.c").write_text(source(2).replace("return OPJIT_OK;", "retrun OPJIT_OK;"))
    results = cluster.run([each.rank() for each in cluster.nodes for _ in range(2)], ALL)
    assert [each["error"][0] for each in results] == ["CompileError"] * 4
    assert all("retrun" in each["error"][1].splitlines()[0] for each in results)
    # The rank that found it raises it as usual.
    assert sum("rank-" in each["error"][1] for each in results) == 3
    assert cluster.compiled() == 4


def test_a_build_that_fails_on_one_node_is_done_by_another(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Its compiler exits with 0 and leaves nonsense."""
    nonsense = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo nonsense > "$2"; shift; done'
    both = helpers.program(
        tmp_path / "cc",
        f"#!/bin/sh\n'{real_compiler()}' \"$@\" || exit\n"
        f'{helpers.LINKS} || exit 0\n[ "$OPJIT_TEST_BROKEN" ] || {{ sleep 1.5; exit 0; }}\n{nonsense}\n',
    )
    results = cluster.run(
        [
            cluster.nodes[0].rank(CC=str(both), OPJIT_TEST_BROKEN="1"),
            cluster.nodes[1].rank(CC=str(both)),
        ]
    )
    assert [(each.get("values"), each["warnings"]) for each in results] == [([1], [])] * 2, results


def test_a_rank_without_a_compiler_takes_what_a_rank_with_one_has_built(
    cluster: Cluster, tmp_path: Path
) -> None:
    without = Node(tmp_path / "c", helpers.no_compiler(tmp_path))
    results = cluster.run(
        [cluster.nodes[0].rank(DELAY="1"), without.rank(DELAY="1"), without.rank(DELAY="1")]
    )
    assert [(each.get("values"), each["warnings"]) for each in results] == [([1], [])] * 3, results
    assert cluster.compiled() == 1


@pytest.mark.slow
def test_where_no_rank_has_a_compiler_all_say_so_in_bounded_time(
    cluster: Cluster, tmp_path: Path
) -> None:
    missing = helpers.no_compiler(tmp_path)
    results = cluster.run([Node(tmp_path / name, missing).rank() for name in "cd"])
    assert [each["error"][0] for each in results] == ["ToolMissing"] * 2
    results = cluster.run([Node(tmp_path / name, {"OPJIT_OFFLINE": "1"}).rank() for name in "ef"])
    assert [each["error"][0] for each in results] == ["NotCached"] * 2


def test_a_node_whose_cache_cannot_be_written_works_from_what_it_is_sent(cluster: Cluster) -> None:
    bad = cluster.nodes[1]
    (bad.folder / "cache").write_text("no folder")
    results = cluster.run([cluster.nodes[0].rank(), bad.rank(DELAY="1.5"), bad.rank(DELAY="1.5")])
    assert [each["values"] for each in results] == [[1]] * 3
    assert [len(each["warnings"]) for each in results] == [0, 1, 1]
    assert "for this process only" in results[1]["warnings"][0]
    assert cluster.compiled() == 1


@pytest.fixture
def shared(ops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``shared(fill)``: rank 1 of 2 readies an op with a store that `fill(store, name, good)` has written to; its outcome."""
    for declared in [op for op in registry.all_ops() if op.qualified.startswith("jobtest::")]:
        registry.remove(declared)
    registry.declare_folder(ops)

    def ask(fill: Any) -> job.RankTask:
        op = registry.find("jobtest::add1")
        target = targets.here(helpers.cpu())
        monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "other"))
        good = request.entry(op, target)
        inner = HashStore()
        fill(inner, good)
        for name, value in {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "OPJIT_CACHE": str(tmp_path / "own"),
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(
            opjit.distributed, "connect", lambda *_: rendezvous.JobStore(lambda: inner)
        )
        monkeypatch.setattr(job, "CLAIM_TIMEOUT", 0.5)
        local = Store(default_root())
        [task] = opjit.distributed.share([of_op(op, target, local)], local)
        return task

    return ask


def asked() -> str:
    """What ranks call the request of `shared`."""
    op = registry.find("jobtest::add1")
    target = targets.here(helpers.cpu())
    return of_op(op, target, Store(default_root())).name


def told(store: Any, key: str, content: bytes) -> None:
    store.set(f"result/{asked()}", json.dumps({"key": key, "parts": 1}))
    store.set(f"bytes/{key}/0", content)


@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "other-entry", "no-bytes"])
def test_bytes_that_are_not_the_entry_are_refused_and_it_is_built(shared: Any, damage: str) -> None:
    def fill(store: Any, good: Any) -> None:
        content = bundle.of(good.folder).dump()
        if damage == "other-entry":
            op = registry.find("jobtest::add2")
            content = bundle.of(request.entry(op, targets.here(helpers.cpu())).folder).dump()
        bad = {
            "empty": b"",
            "cut": content[:-7],
            "changed": content[:-200] + b"\0" * 200,
            "other-entry": content,
        }
        if damage == "no-bytes":
            store.set(f"result/{asked()}", json.dumps({"key": good.key, "parts": 3}))
        else:
            told(store, good.key, bad[damage])

    with pytest.warns(
        CacheWarning,
        match="add1 for cpu .* is built here, because the bytes that another rank sent cannot be used",
    ):
        outcome = shared(fill)
    assert (outcome.built, outcome.error) == (True, None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"key": "../../etc", "parts": 1}',
        '{"error": 3}',
        '{"key": "%s", "parts": 1e99}' % ("a" * 64),
        '{"error": "x", "kind": "SystemExit"}',
    ],
)
def test_an_invalid_result_is_a_one_line_error(shared: Any, text: str) -> None:
    outcome = shared(lambda store, good: store.set(f"result/{asked()}", text))
    assert isinstance(outcome.error, errors.BuildError)
    assert "do all ranks have the same opjit?" in str(outcome.error)


@pytest.mark.parametrize("in_source", [True, False])
def test_another_rank_s_error_is_raised_here(shared: Any, in_source: bool) -> None:
    record = {"error": "x.c:1: error", "in_source": in_source}
    outcome = shared(lambda store, good: store.set(f"result/{asked()}", json.dumps(record)))
    assert type(outcome.error) is (CompileError if in_source else errors.BuildError)
    assert (str(outcome.error), outcome.error.op) == ("x.c:1: error", "jobtest::add1")


def test_a_rank_that_cannot_build_gives_up_when_the_builder_has_died(
    shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(store: Any, good: Any) -> None:
        monkeypatch.setenv("OPJIT_OFFLINE", "1")
        store.set(f"claim/{asked()}", "rank-7-on-x")

    monkeypatch.setattr(job, "GIVE_UP_TIMEOUT", 0.5)
    assert isinstance(shared(fill).error, errors.NotCached)


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("claim", "rank-7-on-x"),
        ("claim", b"1 rank-\xff-on-x-abc 3"),
        ("claim", b"\xff\x1b[31m" + b"x" * 5000),
        ("result", '{"key": "%s", "parts": 0}'),
    ],
)
def test_a_claim_without_a_result_and_a_result_without_bytes_or_an_entry_are_built(
    shared: Any, kind: str, content: Any
) -> None:
    outcome = shared(
        lambda store, good: store.set(
            f"{kind}/{asked()}", content % good.key if kind == "result" else content
        )
    )
    assert (outcome.built, outcome.error) == (True, None)


MADE = "dist.init_process_group('gloo')\n"
SUM = (
    "x = torch.full((2,), float(dist.get_rank() + 1))\ndist.all_reduce(x)\nresult['sum'] = x.tolist()\ndist.barrier()\n"
    "dist.destroy_process_group()"
)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", MADE + SUM),
        (MADE + "for name in ('RANK', 'WORLD_SIZE', 'MASTER_PORT'): del os.environ[name]", SUM),
    ],
)
def test_a_process_group_is_made_afterwards_on_the_same_port_and_one_that_exists_lends_its_store(
    cluster: Cluster, before: str, after: str
) -> None:
    results = cluster.run(
        [each.rank(GLOO_SOCKET_IFNAME="lo") for each in cluster.nodes], before=before, after=after
    )
    assert [(each["values"], each["sum"], each["warnings"]) for each in results] == [
        ([1], [3, 3], [])
    ] * 2
    assert cluster.compiled() == 1


SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
}
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def no_rank(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in os.environ:
        if name in NAMES or name.startswith(("SLURM_", "OMPI_", "PMI_", "MPI_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (
            {
                "RANK": "1",
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "1",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "h",
                "MASTER_PORT": "5",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "2",
            },
            Rank(1, 2, False, True, ("h", 5), True, 2, False),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "2",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "MASTER_ADDR": "h",
                "MASTER_PORT": "5",
            },
            Rank(2, 4, True, False, ("h", 5), False, 0, False),
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "h"},
            Rank(1, 2, True, False, ("h", 29500), False, 0, False),
        ),
        (SLURM, Rank(3, 8, False, False, ("gpu007", 10000 + 4711 * 31 % 20000), False, 0, False)),
        (
            {**SLURM, "SLURM_STEP_NODELIST": ""},
            Rank(3, 8, False, False, ("10.0.0.7", 10000 + 4711 * 31 % 20000), False, 0, False),
        ),
        (
            {
                **SLURM,
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_STEP_NUM_NODES": "1",
                "MASTER_ADDR": "h",
                "MASTER_PORT": "5",
            },
            Rank(3, 4, False, True, ("h", 5), False, 0, False),
        ),
        (
            {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"},
            None,
        ),  # the batch script
        ({"RANK": "", "WORLD_SIZE": "2"}, None),
    ],
)
def test_a_rank_is_known_by_what_its_launcher_sets(
    no_rank: pytest.MonkeyPatch, environment: dict[str, str], expected: Rank | None
) -> None:
    for name, value in environment.items():
        no_rank.setenv(name, value)
    assert ranks.current() == expected


@pytest.mark.parametrize(
    ("rank", "size", "told"),
    [
        ("x", "2", "expected a number in RANK, .*got 'x'"),
        ("2", "2", "rank 2 of 2 ranks"),
        ("1", "-2", "expected a number in WORLD_SIZE, .*got '-2'"),
    ],
)
def test_an_invalid_rank_is_a_one_line_error(
    no_rank: pytest.MonkeyPatch, rank: str, size: str, told: str
) -> None:
    no_rank.setenv("RANK", rank)
    no_rank.setenv("WORLD_SIZE", size)
    with pytest.raises(OpjitError, match=told):
        ranks.current()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("", ""),
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[007-012,15],x", "gpu007"),
        ("a[3,5]-ib", "a3-ib"),
        ("r1n[1-2],r2n[1-2]", "r1n1"),
    ],
)
def test_slurm_s_first_node(nodes: str, first: str) -> None:
    assert ranks.first_node(nodes) == first


def test_a_job_of_slurm_builds_once(cluster: Cluster) -> None:
    variables = {
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_JOB_ID": free_port(),
        "SLURM_STEP_ID": "0",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    }
    job = [
        each.rank(NAMES="jobtest::add1", SLURM_PROCID=str(n), **variables)
        for n, each in enumerate(cluster.nodes)
    ]
    results = cluster.run(job, number=False)
    assert [(each["values"], each["warnings"]) for each in results] == [([1], [])] * 2
    assert cluster.compiled() == 1


def test_ranks_of_one_node_that_nothing_tells_where_to_meet_have_its_locks(
    cluster: Cluster,
) -> None:
    job = [
        cluster.nodes[0].rank(
            NAMES="jobtest::add1",
            OMPI_COMM_WORLD_RANK=str(n),
            OMPI_COMM_WORLD_SIZE="3",
            OMPI_COMM_WORLD_LOCAL_RANK=str(n),
            OMPI_COMM_WORLD_LOCAL_SIZE="3",
        )
        for n in range(3)
    ]
    results = cluster.run(job, number=False)
    assert [(each["values"], each["warnings"]) for each in results] == [([1], [])] * 3
    assert cluster.compiled() == 1


def precompile(
    ops: Path, ranks: Sequence[Mapping[str, str | None]]
) -> list[tuple[int | None, str, str]]:
    """Exit code, output and errors of the command on each rank."""
    running = [
        helpers.started_command("precompile", ops, "--arch", ",".join(LEVELS[:2]), changes=each)
        for each in numbered(ranks, "", free_port())
    ]
    said = [each.communicate() for each in running]
    return [(each.returncode, *texts) for each, texts in zip(running, said, strict=True)]


def test_the_ranks_of_precompile_share_the_work(cluster: Cluster) -> None:
    ended = precompile(
        cluster.ops, [cluster.nodes[0].rank(), cluster.nodes[0].rank(), cluster.nodes[1].rank()]
    )
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    reports = [
        [int(part.split()[0]) for part in out.splitlines()[-1].split(", ")[:4]]
        for _, out, _ in ended
    ]
    assert sum(built for built, *_ in reports) == 8
    assert [(built + there, skipped, failed) for built, there, skipped, failed in reports] == [
        (8, 0, 0)
    ] * 3
    assert cluster.compiled() == 8
    assert [len(entries(each.cache)) for each in cluster.nodes] == [8, 8]


def test_an_op_that_does_not_compile_fails_on_every_rank_of_precompile(cluster: Cluster) -> None:
    (cluster.ops / "add2.c").write_text(source(2).replace("return OPJIT_OK;", "retrun OPJIT_OK;"))
    for code, out, err in precompile(cluster.ops, [each.rank() for each in cluster.nodes]):
        assert code == 1
        assert "2 failed" in out
        assert "retrun" in err
        assert "Traceback" not in err
    assert cluster.compiled() == 8
