"""An op with variants: each a binary of its own, chosen by measurement for a device and sizes, once, and kept in the cache."""

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import opjit
from opjit import processes, request, tune
from opjit.cache import trees
from opjit.errors import CompileWarning, DeclarationError
from opjit.measure.plan import Arguments
from opjit.share import trust
from opjit.store.entry import Entry
from opjit.store.store import Store
from opjit.wanted import OpRequest
from tests.helpers import command, fresh, is_alive, process, until

# Adds its number to each element, and takes the longer, the larger LOOPS is.
SOURCE = """
opjit_status numbered_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "numbered takes contiguous float32");
    OPJIT_CHECK(NUMBER < 30, "no such number");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    for (volatile int i = 0; i < LOOPS; i++)
        continue;
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = ((const float *)x->data)[i] + NUMBER;
    return OPJIT_OK;
}
"""
OP_PY = """
import torch
import opjit
@opjit.op("tunetest::numbered(Tensor x) -> Tensor")
def numbered(x):
    return torch.empty_like(x)
@numbered.variants("cpu", LOOPS=(200000, 2000000, 0), NUMBER=(1, 2))
def fits(LOOPS, NUMBER):
    return LOOPS or NUMBER == 2
@numbered.workloads
def workloads(device):
    yield opjit.Workload("eight", (torch.zeros(8, device=device),), {}, bytes=64)
"""


@pytest.fixture
def numbered(make_op: Callable[..., opjit.Op], here: Path) -> opjit.Op:
    found = make_op("numbered(Tensor x) -> Tensor", SOURCE, fake=torch.empty_like)
    found.variants("cpu", LOOPS=(0,), NUMBER=(1, 2, 3))
    return found


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that were measured: of 100 elements or more the last variant that runs is the best, else the first."""
    sizes = []

    def best(sides: Mapping[str, Any], inputs: Arguments, device: str) -> tune.Choice:
        sizes.append(inputs[0][0].numel())
        return tune.Choice([*sides][-1 if sizes[-1] >= 100 else 0], 1.0)

    monkeypatch.setattr(tune, "_best", best)
    return sizes


def test_each_bucket_of_sizes_runs_the_variant_that_was_chosen_for_it(
    numbered: opjit.Op, measured: list[int]
) -> None:
    for size, number in ((8, 1), (200, 3), (8, 1), (9, 1), (15, 1), (255, 3), (16, 1)):
        assert torch.equal(numbered(torch.zeros(size)), torch.full((size,), float(number)))
    assert measured == [8, 200, 16], "each power of two, and dtypes and numbers of dimensions alike"
    numbered(torch.zeros(8, 1))
    assert measured[3:] == [8]
    other = getattr(torch.ops, numbered.schema.namespace).numbered_variant
    assert [other(place, torch.zeros(1)).item() for place in range(3)] == [1, 2, 3]


def test_a_call_that_no_variant_takes_raises_the_kernel_s_error_and_chooses_nothing(
    numbered: opjit.Op, measured: list[int]
) -> None:
    message = rf"^{numbered.qualified}: numbered takes contiguous float32 \[numbered.c:5\]$"
    for _ in range(2):
        if torch.__version__ >= "2.13":
            with pytest.raises(RuntimeError, match=message):
                numbered(torch.zeros(8, dtype=torch.float64))
        else:  # its text is on stderr there
            with pytest.raises(RuntimeError, match=numbered.qualified):
                numbered(torch.zeros(8, dtype=torch.float64))
    assert measured == []


def test_a_variant_that_cannot_be_built_or_does_not_run_is_left_out(
    numbered: opjit.Op, measured: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    numbered.variants("cpu", LOOPS=(0,), NUMBER=(1, 5, 40, "+ +"))
    assert numbered(torch.zeros(200)).sum() == 1000
    assert "1 of 4 variants of" in caplog.text


def test_measuring_leaves_what_a_call_writes_and_its_random_numbers_alone(
    make_op: Callable[..., opjit.Op], here: Path
) -> None:
    source = """
opjit_status bump_cpu(opjit_tensor *x, const uint64_t *seed)
{
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)x->data)[i] += STEP + (float)(*seed % 1024);
    return OPJIT_OK;
}
"""
    bump = make_op(
        "bump(Tensor(a!) x, Generator? generator=None) -> ()",
        source,
        fake=lambda x, generator=None: None,
    )
    bump.variants(STEP=(1, "1.0f"))
    results = []
    for _ in range(2):  # measured, and not
        x = torch.zeros(4)
        torch.manual_seed(3)
        bump(x)
        results.append((x, torch.rand(1)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_a_reload_chooses_anew_among_variants_of_the_newer_source(
    numbered: opjit.Op, measured: list[int]
) -> None:
    assert numbered(torch.zeros(8)).sum() == 8
    source = numbered.folder / "numbered.c"
    source.write_text(
        source.read_text(encoding="utf-8").replace("+ NUMBER;", "+ 10 * NUMBER;"), encoding="utf-8"
    )
    opjit.reload(numbered.qualified, "cpu")
    assert [numbered(torch.zeros(size))[0].item() for size in (8, 200)] == [10, 30]
    assert measured == [8, 8, 200]


def test_opjit_test_checks_each_variant(
    numbered: opjit.Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPJIT_TUNE", "0")  # another test may have left a choice
    numbered.reference(lambda x: x + 1)
    numbered.samples(lambda device: [torch.zeros(3)])
    check = next(check for check in opjit.testing.CHECKS if check.name == "results")
    with pytest.raises(AssertionError, match=r"expected 1 .*of the variant LOOPS=0 NUMBER=2"):
        check(numbered, "cpu")


def test_bad_declarations_say_what_is_expected(
    numbered: opjit.Op, make_op: Callable[..., opjit.Op]
) -> None:
    for values, message in (
        ({"A": 3}, "A=3"),
        ({"A": ()}, "a list of numbers"),
        ({}, "0 definitions"),
        ({"A": ("x\n",)}, "line break"),
    ):
        with pytest.raises(DeclarationError, match=message):
            numbered.variants(**values)
    with pytest.raises(DeclarationError, match="rejected every combination of values"):
        numbered.variants(a=(1, 2))(lambda a: False)
    with pytest.raises(DeclarationError, match="'xpu'"):
        numbered.variants("xpu", A=(1, 2))
    with pytest.raises(DeclarationError, match="several types"):
        make_op("both(Tensor x) -> (Tensor, int)").variants(A=(1, 2))


@pytest.fixture
def folder(tmp_path: Path, here: Path) -> Path:
    (tmp_path / "numbered").mkdir()
    (tmp_path / "numbered" / "op.py").write_text(OP_PY, encoding="utf-8")
    (tmp_path / "numbered" / "numbered.c").write_text(
        '#include "opjit.h"\n' + SOURCE, encoding="utf-8"
    )
    return tmp_path / "numbered"


@pytest.mark.slow
def test_tune_records_the_fastest_and_a_later_process_builds_and_measures_nothing(
    folder: Path, here: Path, log: Path
) -> None:
    call = f"""
        import torch, opjit
        opjit.add_path({str(folder)!r})
        print(torch.ops.tunetest.numbered(torch.zeros(9)).tolist()[0])
    """
    assert fresh(call, {"OPJIT_TUNE": "0"}).stdout == "1.0\n"
    assert len(log.read_text().split()) == 1
    done = command("tune", folder)
    assert done.returncode == 0
    assert (
        "tunetest::numbered has 5 variants for cpu\n  eight                LOOPS=0 NUMBER=2"
        in done.stdout
    ), done.stderr
    [row] = json.loads(command("tune", folder, "--json").stdout)
    assert row["seconds"] > 0
    assert (row["case"], row["variant"]) == ("eight", "LOOPS=0 NUMBER=2")
    assert len(log.read_text().split()) == 5
    [record] = (here / "v2" / "tuned").iterdir()
    assert json.loads(record.read_text())["variant"] == "LOOPS=0 NUMBER=2"
    before = record.stat().st_mtime_ns
    assert fresh(call, {"OPJIT_OFFLINE": "1"}).stdout == "2.0\n"
    assert record.stat().st_mtime_ns == before
    assert len(log.read_text().split()) == 5
    for damage in (
        "{",
        json.dumps({"variant": "LOOPS=1", "seconds": 1}),
        None,
    ):  # None: anyone may have written it
        record.write_text(damage or json.dumps({"variant": "LOOPS=2000000 NUMBER=1", "seconds": 1}))
        record.chmod(0o600 if damage else 0o666)
        assert fresh(call).stdout == "2.0\n", damage
        record.chmod(0o600)
        assert json.loads(record.read_text())["variant"] == "LOOPS=0 NUMBER=2", damage


@pytest.mark.slow
def test_choices_travel_in_a_signed_tree(folder: Path, here: Path, tmp_path: Path) -> None:
    key, public = trust.keygen("ci", tmp_path / "keys")
    assert command("tune", folder).returncode == 0
    trees.pack_tree(tmp_path / "tree", {"OPJIT_LAYERS": here}, key)
    program = tmp_path / "program.py"
    program.write_text(
        f"import torch, opjit\nopjit.add_path({str(folder)!r})\n"
        "print(torch.ops.tunetest.numbered(torch.zeros(9)).tolist()[0])\n"
    )
    elsewhere = {"OPJIT_CACHE": str(tmp_path / "second"), "OPJIT_TRUST": public}
    ran = command("run", "--tree", tmp_path / "tree", program, **elsewhere, OPJIT_OFFLINE="1")
    assert ran.stdout == "2.0\n", ran.stderr
    assert not (tmp_path / "second" / "v2" / "tuned").exists()


@pytest.fixture
def in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All variants are built in two processes, however few they are."""
    monkeypatch.setattr(tune, "_PROCESSES", 1)
    monkeypatch.setattr(tune, "_BUILDS", 1)
    monkeypatch.setenv("OPJIT_JOBS", "2")


@pytest.mark.slow
def test_processes_build_variants_and_give_their_warnings(
    numbered: opjit.Op,
    measured: list[int],
    in_processes: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = numbered.folder / "numbered.c"
    remark = '#if NUMBER > 1\n#warning "a large number"\n#endif\n'
    source.write_text(source.read_text(encoding="utf-8") + remark, encoding="utf-8")
    numbered.variants("cpu", LOOPS=(0,), NUMBER=(1, 3, 5, "2 + +"))
    opjit.get(numbered.qualified, "cpu")
    fetch_or_build = request.fetch_or_build
    built_here = []

    def build(wanted: OpRequest, store: Store) -> Entry:
        built_here.append(str(wanted.inputs.flags.c[-1]))
        return fetch_or_build(wanted, store)

    monkeypatch.setattr(request, "fetch_or_build", build)
    with pytest.warns(CompileWarning, match="a large number") as warned:
        assert numbered(torch.zeros(200)).sum() == 1000
    assert built_here == ["-DNUMBER=2 + +"], "which says why it does not compile"
    assert {each.lineno for each in warned} == {15}, "the line of the source"
    assert "1 of 4 variants of" in caplog.text
    assert "numbered.c:6:24: error" in caplog.text


@pytest.mark.slow
def test_processes_build_variants_of_inline_code(
    measured: list[int], in_processes: None, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = opjit.inline(
        "tunetest::numbered_text(Tensor x) -> Tensor",
        like="x",
        c=SOURCE.replace("numbered_cpu", "numbered_text_cpu"),
    )
    op.variants("cpu", LOOPS=(0,), NUMBER=(1, 2, 3))
    opjit.get(op.qualified, "cpu")
    monkeypatch.setattr(request, "fetch_or_build", None)
    assert op(torch.zeros(200)).sum() == 600


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["import os; os.kill(os.getpid(), 9)", "import missing"])
def test_threads_build_the_variants_of_a_process_that_was_killed(
    numbered: opjit.Op,
    measured: list[int],
    in_processes: None,
    monkeypatch: pytest.MonkeyPatch,
    worker: str,
) -> None:
    monkeypatch.setattr(processes, "_CHILD", worker)
    assert numbered(torch.zeros(200)).sum() == 600


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_processes_that_build_variants_end_with_their_parent(
    folder: Path, here: Path, on_compile: Callable[[str], None], tmp_path: Path, number: int
) -> None:
    running = tmp_path / "running"
    on_compile(f"if [ -e {running} ]; then touch {running}/$$ {running}/$PPID; sleep 100; fi")
    code = f"""
import opjit, torch
from opjit import tune
tune._PROCESSES = tune._BUILDS = 1
opjit.add_path({str(folder)!r})
opjit.get("tunetest::numbered", "cpu")
print("ready", flush=True)
input()
torch.ops.tunetest.numbered(torch.zeros(9))
"""
    with process(code, {"OPJIT_JOBS": "2"}) as parent:
        assert parent.stdout.readline() == "ready\n"
        running.mkdir()
        parent.send("")
        until(lambda: len([*running.iterdir()]) >= 4, process=parent)  # two compilers, two builders
        os.kill(parent.pid, number)
        started = [int(each.name) for each in running.iterdir()]
        assert parent.pid not in started
        until(lambda: not any(map(is_alive, started)))


@pytest.mark.slow
def test_precompile_builds_every_variant_side_by_side(folder: Path, here: Path) -> None:
    done = command("precompile", folder)
    assert "5 built, 0 already there, 0 skipped, 0 failed" in done.stdout


@pytest.mark.gpu
def test_while_a_graph_is_captured_nothing_is_measured(
    make_op: Callable[..., opjit.Op], here: Path, measured: list[int]
) -> None:
    source = """
static __global__ void kernel(float *out, int64_t n) { OPJIT_KERNEL_LOOP(i, n) out[i] = NUMBER; }
opjit_status fill_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    kernel<<<opjit_blocks(x->numel, 256), 256, 0, stream>>>((float *)out->data, x->numel);
    return OPJIT_LAUNCHED();
}
"""
    fill = make_op("fill(Tensor x) -> Tensor", cuda=source, fake=torch.empty_like)
    fill.variants("cuda", NUMBER=(1, 2))
    opjit.get(fill.qualified, "cuda")
    x = torch.zeros(200, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fill(x)
    assert measured == []
    assert fill(x).sum() == 400
    graph.replay()
    assert captured.sum() == 200
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fill(x)
    graph.replay()
    assert (captured.sum(), measured) == (400, [200])
