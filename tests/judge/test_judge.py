"""No cheat passes and each verdict names it; no honest kernel is accused; and what a candidate does costs nobody else anything."""

import asyncio
import gc
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner

from opjit.cli import main
from opjit.declare.sample import Sample
from opjit.judge import Judge, Verdict, burst, launch, referee, schema, screen, worker
from opjit.judge.bench import Bench
from opjit.judge.command import lint
from opjit.judge.protocol import TensorSpec
from opjit.judge.task import Expected, Task
from opjit.judge.verdict import VerdictReached
from opjit.recipe import toolchain
from opjit.recipe.schema import parse
from tests.helpers import ROOT, elementwise

HERE = Path(__file__).parent
SCALE = str(HERE / "scale")
MODEL = str(HERE / "matmul_relu.py")
CHEATS = sorted((HERE / "cheats").glob("*.*"))
RIGHT = '#include "opjit.h"' + elementwise("scale", "(float)a * from[i]", "double a, ")
MODEL_NEW = """import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)

    def forward(self, x):
        %s
"""
OWN = "return (x[:, :, None] * self.weight).sum(1).clamp_min(0)"
NOT_WRONG = ("correct", "noisy")  # a busy machine leaves a right candidate without a time


def test_a_judge_that_is_closed_while_it_forks_leaves_no_worker() -> None:
    judge = Judge(SCALE, device="cpu", workers=1)
    judge.start()
    forks = judge.pools[0]._forks
    send = forks.send
    closing = threading.Thread(target=judge.close, daemon=True)

    def send_and_close(message: Any, *descriptors: int) -> None:
        send(message, *descriptors)
        if closing.ident is None:
            closing.start()
            closing.join(1)

    with patch.object(forks, "send", send_and_close), suppress(OSError, EOFError):
        judge.judge(RIGHT)
    closing.join(30)
    assert not closing.is_alive()


def judged(task: str, texts: Sequence[tuple[str, str]], device: str = "cpu") -> dict[str, Verdict]:
    """The verdicts on candidates, by their names."""

    async def run() -> list[Verdict]:
        async with Judge(task, device=device, workers=2) as judge:
            return await asyncio.gather(*(judge(text, name) for name, text in texts))

    return {verdict.candidate: verdict for verdict in asyncio.run(run())}


def named(path: Path) -> str | None:
    """The words of the verdict on a cheat, by its first line; None for a harmless one, which gains nothing."""
    first = path.read_text(encoding="utf-8").splitlines()[0]
    if re.search(r"\. harmless(?: \*/)?$", first):
        return None
    found = re.search(r"named: (.*?)(?: \*/)?$", first)
    assert found is not None, path
    return found[1]


def test_there_are_many_cheats_and_each_says_where_its_idea_is_from() -> None:
    assert len(CHEATS) >= 40
    for path in CHEATS:
        assert re.match(r"(/\*|#) \S+", path.read_text(encoding="utf-8")), path
        named(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "suffix"),
    [(SCALE, ".c"), (MODEL, ".py"), pytest.param(SCALE, ".cu", marks=pytest.mark.gpu)],
)
def test_no_cheat_passes_and_each_verdict_names_it(task: str, suffix: str) -> None:
    device = "cuda" if suffix == ".cu" else "cpu"
    files = {path.name: path for path in CHEATS if path.suffix == suffix}
    texts = [(name, path.read_text(encoding="utf-8")) for name, path in files.items()]
    for name, verdict in judged(task, texts, device=device).items():
        expected = named(files[name])
        if expected is None:
            assert verdict.verdict in NOT_WRONG, verdict
        else:
            assert verdict.verdict in ("cheat", "wrong", "crash", "timeout"), verdict
            assert expected in verdict.message, verdict


@pytest.mark.nvcc
@pytest.mark.parametrize(
    "path", [path for path in CHEATS if path.suffix == ".cu"], ids=lambda path: path.stem
)
def test_a_cheat_in_cuda_is_refused_by_its_object_file(path: Path, tmp_path: Path) -> None:
    include = ROOT / "kernels_c"
    made = tmp_path / "opjit_kernel.cuda.o"
    command = ["nvcc", "-Xcompiler", "-fPIC", f"-I{include}", "-c", "-o", str(made), str(path)]
    subprocess.run(command, check=True)
    expected = named(path)
    if expected is None:
        screen.check_objects(tmp_path, on_gpu=True)
        return
    with pytest.raises(VerdictReached, match=re.escape(expected)):
        screen.check_objects(tmp_path, on_gpu=True)


def _conforms(value: object, to: dict[str, Any]) -> None:
    """Hold a value against the part of JSON schema that the judge's uses."""
    kinds: dict[str, Any] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
        "array": list,
        "object": dict,
    }
    if "anyOf" in to:
        assert any(isinstance(value, kinds[each["type"]]) for each in to["anyOf"]), (value, to)
    elif "enum" in to:
        assert value in to["enum"]
    else:
        assert isinstance(value, kinds[to["type"]]), (value, to)
    if "properties" in to:
        assert isinstance(value, dict)
        assert value.keys() == to["properties"].keys() == set(to["required"])
        for name, inner in to["properties"].items():
            _conforms(value[name], inner)


def test_a_right_kernel_is_correct_and_asked_again_known() -> None:
    async def run() -> list[Verdict]:
        async with Judge(SCALE, device="cpu", workers=1, seconds=2) as judge:
            return [
                await judge(RIGHT, "a.c"),
                await judge(RIGHT, "b.c"),
                await judge(RIGHT.replace("(float)a *", "a +"), "wrong.c"),
                await judge("int x", "c.c"),
                await judge(RIGHT.replace("OPJIT_TRY", "for (;;) ; OPJIT_TRY"), "d.c"),
            ]

    first, again, wrong, broken, endless = asyncio.run(run())
    assert first.verdict in NOT_WRONG, first
    assert (first.tier, bool(first.key)) == ("op", True)
    assert first.max_error == pytest.approx(0, abs=1e-6)
    assert min(first.median_us or 0, first.reference_us or 0) > 0
    assert {"landlock", "seccomp", "frozen results"} >= set(first.isolation)
    assert again.cached == (first.verdict == "correct") or again.key == first.key
    assert (wrong.verdict, bool(wrong.sample), bool(wrong.tolerance)) == ("wrong", True, True), (
        wrong
    )
    assert (broken.verdict, broken.line, "error" in broken.message) == ("compile", 1, True), broken
    assert endless.verdict in ("timeout", "compile"), endless
    for verdict in (first, again, wrong, broken, endless):
        _conforms(json.loads(verdict.json()), schema())


def test_the_schema_has_the_fields_of_a_verdict() -> None:
    kinds = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}

    def of(hint: Any) -> dict[str, Any]:
        if hint in kinds:
            return {"type": kinds[hint]}
        if get_origin(hint) is Literal:
            return {"enum": list(get_args(hint))}
        if get_origin(hint) is list:
            return {"type": "array", "items": of(get_args(hint)[0])}
        if get_origin(hint) is dict:
            return {"type": "object", "additionalProperties": of(get_args(hint)[1])}
        return {"anyOf": [of(each) for each in get_args(hint)]}

    properties = {name: of(hint) for name, hint in get_type_hints(Verdict).items()}
    assert schema()["properties"] == properties
    assert schema()["required"] == [*properties]


TASK_YML = """
files:
  - {"name": "submission.py", "source": "@SUBMISSION@"}
  - {"name": "task.py", "source": "task.py"}
  - {"name": "utils.py", "source": "../utils.py"}
  - {"name": "reference.py", "source": "reference.py"}
lang: "py"
tests:
  - {"size": 17, "seed": 1}
  - {"size": 64, "seed": 2}
benchmarks:
  - {"size": 1024, "seed": 3}
ranking_by: "geom"
"""
REFERENCE = """
import torch
from task import input_t, output_t
from utils import match_reference

def generate_input(size: int, seed: int) -> input_t:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, size, generator=generator)
    return x, torch.randn(size, size, generator=generator), torch.empty_like(x)

def ref_kernel(data: input_t) -> output_t:
    x, y, out = data
    out[...] = x + y
    return out

check_implementation = match_reference(ref_kernel)
"""
CUSTOM_KERNEL = """
from task import input_t, output_t

def custom_kernel(data: input_t) -> output_t:
    x, y, out = data
    out.numpy()[...] = x.numpy() + FACTOR * y.numpy()
    return out
"""


def test_a_task_of_gpu_mode_is_judged(tmp_path: Path) -> None:
    folder = tmp_path / "vectoradd"
    folder.mkdir()
    (folder / "task.yml").write_text(TASK_YML)
    (folder / "reference.py").write_text(REFERENCE)
    (folder / "task.py").write_text("input_t = output_t = object\n")
    (tmp_path / "utils.py").write_text("def match_reference(reference):\n    return reference\n")
    texts = {
        "right": CUSTOM_KERNEL.replace("FACTOR", "1"),
        "wrong": CUSTOM_KERNEL.replace("FACTOR", "2"),
        "torch": CUSTOM_KERNEL.replace("x.numpy() + FACTOR * y.numpy()", "(x + y).numpy()"),
        "none": "x = 1",
    }
    verdicts = judged(str(folder / "task.yml"), [*texts.items()])
    assert verdicts["right"].verdict in NOT_WRONG, verdicts
    assert verdicts["right"].task == "vectoradd"
    assert verdicts["wrong"].verdict == "wrong", verdicts
    assert verdicts["torch"].verdict == "cheat", verdicts
    assert "does not define custom_kernel" in verdicts["none"].message, verdicts


def variants() -> dict[str, str]:
    """Variants of a kernel as a search makes them."""
    loop = "for (int64_t i = 0; i < x->numel; i++)"
    texts = {
        f"{unroll}-{level}": RIGHT.replace(
            loop, f'_Pragma("GCC unroll {unroll}")\n    {loop}'
        ).replace("opjit_status scale", f'__attribute__((optimize("O{level}"))) opjit_status scale')
        for unroll in (1, 2, 4, 8, 16)
        for level in (1, 2, 3)
    }
    texts["malloc"] = RIGHT.replace(
        "    for", "    float *own = malloc(16);\n    free(own);\n    for"
    )
    texts["printf"] = RIGHT.replace(
        "    for", '    fprintf(stderr, "%d\\n", (int)x->dim);\n    for'
    )
    texts["math"] = RIGHT.replace("(float)a *", "(float)(sin(0.0) + a + expf(-INFINITY)) *")
    texts["interrupted"] = RIGHT.replace(
        "    return OPJIT_OK", "    (void)opjit_interrupted(x);\n    return OPJIT_OK"
    )
    headers = "#include <math.h>\n#include <stdio.h>\n#include <stdlib.h>\n"
    return {name: headers + text for name, text in texts.items()}


def honest() -> dict[str, dict[str, str]]:
    """Tasks, and right kernels for each by their names: the bundled ops and the course's, as they are and as compilers may change them."""
    course = ROOT / "examples"
    files = {
        name: ROOT / "kernels_c" / name / f"{name}.c"
        for name in ("add_custom", "allreduce", "round_ste", "tensor_negate")
    }
    files[str(course / "04_rms_norm_rope")] = course / "04_rms_norm_rope" / "rms_norm_rope.c"
    ways = (
        "O1",
        "O2",
        "O3",
        "Os",
        "unroll-loops",
        "no-tree-vectorize",
        "peel-loops",
        "no-inline",
        "no-strict-aliasing",
        "tracer",
    )

    def changed(text: str) -> dict[str, str]:
        return {"as it is": text, **{way: f'#pragma GCC optimize("{way}")\n{text}' for way in ways}}

    tune = runpy.run_path(str(course / "12_judge" / "tune.py"))["C"]
    lanes = {
        f"{way}, {lanes} lanes": text
        for lanes in (1, 8, 32)
        for way, text in changed(tune % {"lanes": lanes}).items()
    }
    return {
        SCALE: variants(),
        str(course / "12_judge"): lanes,
        **{task: changed(path.read_text(encoding="utf-8")) for task, path in files.items()},
    }


def test_there_are_a_hundred_honest_kernels() -> None:
    assert sum(map(len, honest().values())) >= 100


@pytest.mark.slow
@pytest.mark.parametrize("task", honest(), ids=lambda task: Path(task).name)
def test_no_honest_kernel_is_accused(task: str) -> None:
    for name, verdict in judged(task, [*honest()[task].items()]).items():
        assert verdict.verdict in NOT_WRONG, (name, verdict)


@pytest.mark.slow
def test_python_is_judged_and_disturbs_nobody() -> None:
    bomb = MODEL_NEW % (
        "import subprocess\n        many = [subprocess.Popen(['sleep', '60']) for _ in range(400)]\n        "
        + OWN
    )
    crash = "return torch.frombuffer(bytearray(8), dtype=torch.float32).as_strided((1 << 30,), (1 << 30,), 0)"
    texts = {
        "right": MODEL_NEW % OWN,
        "bomb": bomb,
        "memory": MODEL_NEW % "return torch.ones(1 << 44)",
        "crash": MODEL_NEW % crash,
        "none": "x = 1",
        "syntax": "x =",
    }
    started = time.monotonic()
    verdicts = judged(MODEL, [*texts.items()])
    assert verdicts["right"].verdict in NOT_WRONG, verdicts["right"]
    assert verdicts["right"].tier == "python"
    assert [verdicts[name].verdict for name in ("memory", "none", "syntax")] == [
        "wrong",
        "compile",
        "compile",
    ]
    assert verdicts["bomb"].verdict in ("crash", "wrong", "timeout"), (
        verdicts["bomb"],
        time.monotonic() - started,
    )


def test_zeros_pass_a_task_with_a_wide_tolerance_and_lint_says_so() -> None:
    task = Task(SCALE, "cpu", 0)
    assert lint(task) == []
    task.samples[:] = [
        Expected.of(call.sample._replace(atol=100.0), call.results) for call in task.samples
    ]
    assert (
        lint(task)[0]
        == f"zeros would pass {len([call for call in task.samples if call.sample.numel])} of "
        f"{len([call for call in task.samples if call.sample.numel])} samples"
    )
    done = CliRunner().invoke(main, ["judge", SCALE, "--lint"])
    assert done.exit_code == 0, done.output


def test_hidden_values_differ_from_seed_to_seed_and_from_the_declared_ones() -> None:
    one, other = (Task(SCALE, "cpu", seed) for seed in (1, 2))
    assert [str(call.sample) for call in one.samples] != [
        str(call.sample) for call in other.samples
    ]
    values = [call.args[0] for number in range(3) for call in one.burst(number)]
    assert len({value[:8].sum().item() for value in values}) == len(values)


def test_hidden_calls_have_the_declared_sizes_where_the_op_waives_others() -> None:
    task = Task(SCALE, "cpu", 0)
    assert task.op is not None
    sizes = {call.numel for call in task.hidden(0)}
    task.op.waive("shapes", "only these are of use")
    assert {call.numel for call in task.hidden(0)} == {0, 1, 15, 17, 1000} < sizes


def test_a_size_that_the_reference_broadcasts_and_the_op_does_not_declare_is_no_hidden_call() -> (
    None
):
    # Draws heads of three elements, whose halves have two and one.
    task = Task(str(ROOT / "examples/04_rms_norm_rope"), "cpu", 33)
    assert all(call.sample.args[0].shape[-1] % 2 == 0 for call in task.samples)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_the_referee_compares_dtypes_for_which_torch_lacks_equal() -> None:
    half = torch.ones(2, dtype=torch.complex32)
    assert referee.max_error([half], [half]) == 0.0


def test_the_referee_says_what_wrong_results_look_like() -> None:
    x = torch.linspace(-1, 2, 100)
    call = Expected(Sample((x,)), [x.exp()])
    for got, text in (
        (torch.zeros(100), "all zeros"),
        (x, "an input"),
        (torch.full((100,), 0.5), "a constant"),
        (x.exp().half().float(), "lower precision"),
        (x.sin(), "the result of another call"),
        (
            torch.full((100,), 0xFE, dtype=torch.uint8).repeat_interleave(4).view(torch.float32),
            "unwritten",
        ),
    ):
        found = referee.compare([got], call, [[x.sin()]])
        assert found is not None
        assert text in found[1], (text, found)
    rounded = (
        [torch.cat((torch.zeros(1), x[1:].sin()))],
        [torch.cat((torch.full((1,), 5e-7), x[1:].sin()))],
    )
    assert "the result of another call" in str(referee.compare(rounded[0], call, rounded[1:])), (
        "one whose sum is rounded otherwise near 0"
    )
    assert referee.compare([x.exp()], call) is None
    assert referee.compare([x.exp().double()], Expected.of(*call[:2])) is not None
    for got, right in (
        (x.exp(), True),
        (x.exp() * (1 + 1e-7), True),
        (x.exp() * (1 + 1e-5), False),
        (x.exp()[:99], False),
    ):
        assert (
            (referee.compare([got], Expected.of(*call[:2])) is None)
            is (referee.compare([got], call) is None)
            is right
        )
    assert referee.compare([torch.full((100,), float("nan"))], call) is not None
    # An argument that the kernel writes can have any bytes before.
    for value in (float("nan"), float("inf")):
        unwritten = Expected(Sample((x, torch.full((100,), value))), [x.exp()])
        found = referee.compare([x.cos()], unwritten, [[torch.full((100,), value)]])
        assert found is not None
        assert "returns" not in found[1], found


KERNEL = """// opjit: launch scale<float>(x, out, a, x.numel) grid=(x.numel + 255) / 256 block=256 shared=0
template <typename T>
__global__ void scale(const T *from, T *to, float a, int64_t n)
{
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n)
        to[i] = a * from[i];
}

void host_function() { not C at all; }
"""


def test_a_rule_has_arithmetic_and_nothing_else() -> None:
    given = {"x": torch.ones(300, 2), "n": 3}
    assert launch.evaluate("(x.numel + 255) / 256 * min(n, 2) + x.size[1] - x.dim, n", given) == [
        6,
        3,
    ]
    for text in ("__import__('os')", "x.data_ptr()", "[1 for _ in n]", "x.__class__", "n] + [n"):
        with pytest.raises(ValueError, match="a launch configuration supports"):
            launch.evaluate(text, given)


def test_kernel_text_becomes_machine_code_without_its_host_code() -> None:
    if toolchain.find_nvrtc("", None) is None:
        pytest.skip("needs NVRTC")
    kernel = launch.compile_text(KERNEL, "judged::scale(Tensor x, float a) -> Tensor", "sm_90")
    assert kernel.code[:4] == b"\x7fELF"
    assert (kernel.types, kernel.rule["grid"], kernel.rule["block"]) == (
        ("*", "*", "float", "int64_t"),
        "(x.numel + 255) / 256",
        "256",
    )
    with pytest.raises(Exception, match="error"):
        launch.compile_text(
            KERNEL.replace("a * from", "b * from"),
            "judged::scale(Tensor x, float a) -> Tensor",
            "sm_90",
        )


def test_results_are_filled_without_their_guards_and_without_the_inputs() -> None:
    """As before a CUDA graph is replayed, which must write all of its results; a result may be an input that the op writes."""
    kernel: Any = Pretended(print)
    calls = launch.PreparedCalls(kernel, [((), {})] * 2, [TensorSpec("float32", (3, 5))], "cpu")
    x = torch.ones(4, 6)
    one, other = (made for [made] in calls.results)
    one.zero_()
    burst.fill_with_sentinel([one, x[1:]], [[x]])
    assert not calls.overrun()
    assert one.isnan().all()
    assert x.eq(1).all()
    burst.fill_with_sentinel([x[1:, 2:4], torch.empty(0, 3)])
    assert x.isnan().sum() == 2 + 2 * 6, "from the first element to the last"
    other.zero_()
    calls.clear()
    assert other.isnan().all()
    for before, after in ((1, 0), (0, 1)):
        memory = torch.as_strided(one, (15 + before + after,), (1,), one.storage_offset() - before)
        kept = memory.clone()
        memory.zero_()
        assert calls.overrun()
        memory.copy_(kept)


DRIVER = """#include <stdint.h>
int cuModuleLoadData(void **module, const void *code) { return 0; }
int cuModuleGetFunction(void **kernel, void *module, const char *name) { return 0; }
int cuLaunchKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **arguments, void **extra)
{
    const float *from = *(const float **)arguments[0], a = *(float *)arguments[2];
    float *to = *(float **)arguments[1];
    for (int64_t i = 0; i < *(int64_t *)arguments[3] && i < gx * bx; i++)
        to[i] = a * from[i];
    return 0;
}
"""


def test_a_launch_keeps_its_arguments_until_the_driver_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a driver whose only kernel runs on the CPU."""
    (tmp_path / "driver.c").write_text(DRIVER, encoding="utf-8")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", tmp_path / "driver.so", tmp_path / "driver.c"], check=True
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    schema = parse("judged::scale(Tensor x, float a) -> Tensor")
    rule = launch.RULE.search("// opjit: launch scale(x, out, a, x.numel) grid=4 block=256")
    assert rule is not None
    kernel = launch.Kernel(b"", "scale", schema, ("*", "*", "float", "int64_t"), rule, 0, 0)
    kernel.load(str(tmp_path / "driver.so"))
    inputs = [torch.rand(1000) for _ in range(20)]
    specs = [TensorSpec("float32", (1000,))]
    calls = launch.PreparedCalls(kernel, [((x, 2.5), {}) for x in inputs], specs, "cpu")
    gc.collect()
    for each in calls.functions:
        each()
    assert all(made.equal(2.5 * x) for x, [made] in zip(inputs, calls.results, strict=True))


class Pretended:
    """A kernel in Python, for a bench without a GPU."""

    def __init__(self, work: Callable[..., object]) -> None:
        self.work = work
        self.written = False

    def bind(
        self, args: Sequence[Any], kwargs: object, results: Sequence[torch.Tensor]
    ) -> Callable[[], object]:
        return lambda: self.work(*args, *results)

    def unload(self) -> None:
        pass


def on_bench(work: Callable[..., object]) -> tuple[float, bool]:
    """The largest error and whether it is nondeterministic, of a kernel on a bench, once all of its stages are passed."""
    bench = Bench("cpu")
    bench.open(task=SCALE, op=None, seed=1)
    bench.kernel = Pretended(work)  # type: ignore[assignment]
    checked = bench.check(seed=5).facts
    bench.measure(seed=5)
    compared = bench.compare(seed=5).facts
    assert len(compared["times"]) == len(compared["references"]) >= 5
    return compared["max_error"], checked["nondeterministic"]


def test_a_bench_compares_every_checked_and_every_timed_call_with_what_it_computes_afterwards() -> (
    None
):
    kept: dict[int, torch.Tensor] = {}

    def keeps(x: torch.Tensor, a: float, out: torch.Tensor) -> None:
        """Computes the checked calls and the first of the timed ones, which are larger."""
        out.copy_(kept.setdefault(x.numel(), x * a) if x.numel() > 1000 else x * a)

    assert on_bench(lambda x, a, out: out.copy_(x * a)) == (0, False)
    assert on_bench(lambda x, a, out: out.copy_(x * a + 1e-7 * torch.rand(x.shape)))[1]
    for work, text, reusable in (
        (lambda x, a, out: None, "unwritten", True),
        (lambda x, a, out: out.zero_(), "all zeros", True),
        (lambda x, a, out: out.copy_(x.mul_(a)), "writes to its inputs", False),
        (lambda x, a, out: (x.zero_(), out.zero_()), "all zeros", False),
        (keeps, "another call", True),
    ):
        with pytest.raises(VerdictReached, match=text) as raised:
            on_bench(work)
        assert raised.value.reusable is reusable, text


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("text", "words"),
    [(KERNEL, NOT_WRONG), (KERNEL.replace("i < n", "i <= n"), ("wrong",))],
    ids=["right", "writes-beside"],
)
def test_a_kernel_without_host_code_is_launched_by_the_judge(
    text: str, words: tuple[str, ...]
) -> None:
    verdict = judged(SCALE, [("scale.cu", text)], device="cuda")["scale.cu"]
    assert verdict.verdict in words, verdict
    assert verdict.tier == "device"


def test_the_process_that_forks_has_one_thread() -> None:
    judge = Judge(SCALE, device="cpu", workers=1)
    try:
        judge.start()
        with closing(judge.pools[0].worker()):
            while (
                len([*Path(f"/proc/{judge.pools[0].zygote.pid}/task").iterdir()]) > 1
            ):  # the others end before it forks
                time.sleep(0.01)
    finally:
        judge.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    path = tmp_path / "socket"
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "opjit", "judge", SCALE, "--device", "cpu", "--serve", str(path)],
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    )
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.05)
    yield process, path
    with suppress(ProcessLookupError):
        process.kill()
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_served_judge_answers_and_leaves_nothing_when_it_ends(
    server: tuple[subprocess.Popen[str], Path], number: int
) -> None:
    process, path = server
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(json.dumps({"candidate": "a.c", "text": RIGHT}).encode() + b"\nnonsense\n")
        file = client.makefile()
        answers = [json.loads(file.readline()) for _ in range(2)]
    assert {"a.c", None} == {answer.get("candidate") for answer in answers}
    process.send_signal(number)
    process.wait(60)
    until = time.monotonic() + 60
    while [*(path.parent / "tmp").glob("opjit-judge-*")] or _children(path.parent):
        assert time.monotonic() < until, "a process or a folder is left"
        time.sleep(0.1)


def _children(folder: Path) -> list[str]:
    """Processes whose environment names a folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if str(folder).encode() in place.read_bytes() and place.parent.name != str(os.getpid()):
                found.append(place.parent.name)
    return found


def test_results_in_lists_are_read_as_the_references_are(tmp_path: Path) -> None:
    one, two, three = torch.ones(3).unbind()
    found = worker.CandidateWorker(tmp_path, "cpu", [])._effects((one, [two, three]), ())
    assert [id(each) for each in found] == [id(one), id(two), id(three)]
