"""`opjit test` and its op's process: interrupts, errors outside kernels, what is skipped, and the verdict."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import opjit
from opjit import testing
from opjit.errors import DeclarationError
from opjit.judge.task import Task
from opjit.operators.op import Op
from opjit.testing.checks import Check
from opjit.testing.isolation import Child, _is_late, supervise
from tests.helpers import command, environment, is_alive, until
from tests.testing.mistakes import BODY, MISTAKES, Mistake

LOOP = """
    FILE *mark = fopen(getenv("MARK"), "w");
    fprintf(mark, "%d\\n", (int)getpid());
    fclose(mark);
    for (volatile int i = 0; i == 0;) {
    }
"""

NOTHING = """
opjit_status lost_device_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    return opjit_empty_like(out, x, x->dtype);
}
"""


@pytest.mark.parametrize(
    "words",
    [
        ("test", "--device", "cpu", "--sanitize", "none", "--time-limit", "9999"),
        ("bench", "--device", "cpu"),
    ],
    ids=["test", "bench"],
)
def test_ctrl_c_ends_a_kernel_that_never_returns(tmp_path: Path, words: tuple[str, ...]) -> None:
    mark = tmp_path / "mark"
    folder = Mistake(
        f"never_{words[0]}",
        "",
        before="#include <stdio.h>\n#include <unistd.h>",
        check=LOOP,
        more="""
{name}.workloads(lambda device: [opjit.Workload("small", (torch.ones(3),), {{}}, 0)])
""",
    ).write(tmp_path / "never")
    with subprocess.Popen(
        [sys.executable, "-m", "opjit", words[0], str(folder), *words[1:]],
        env=environment({"MARK": str(mark)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as running:
        until(lambda: mark.exists() and mark.read_text().endswith("\n"), process=running)
        os.killpg(running.pid, signal.SIGINT)
        printed = running.communicate()[0]
    assert running.returncode in (130, -signal.SIGINT), printed
    assert "Traceback" not in printed
    assert not is_alive(int(mark.read_text()))


def test_an_op_that_cannot_be_declared_or_compiled_or_has_no_samples_fails_and_the_others_are_tested(
    tmp_path: Path,
) -> None:
    Mistake("a_broken", "", body="no_such_name;").write(tmp_path / "a")
    Mistake(
        "b_raises",
        "",
        more='@{name}.samples\ndef samples(device):\n    raise KeyError("weights")\n',
    ).write(tmp_path / "b")
    Mistake("c_good", "").write(tmp_path / "c")
    bad = Mistake("bad_schema", "").write(tmp_path / "bad") / "op.py"
    bad.write_text(bad.read_text().replace("Tensor x", "Tenso x"))
    folders = [tmp_path / name for name in ("a", "b", "bad", "c")]
    done = command("test", *folders, "--device", "cpu", "--sanitize", "none", "--only", "results")
    assert done.returncode == 1
    assert re.search(r"bad\n  failed   declaration +torch cannot parse the schema", done.stdout), (
        done.stdout
    )
    assert re.search(r"a_broken on cpu\n  failed   build +.*no_such_name", done.stdout), done.stdout
    assert re.search(
        r"b_raises on cpu\n  failed   build +op\.py:\d+: KeyError: 'weights'", done.stdout
    ), done.stdout
    assert re.search(
        r"c_good on cpu\n  ok       results +every sample; 6 calls of up to 24 elements( \(.*\))?\n",
        done.stdout,
    ), done.stdout
    assert done.stdout.splitlines()[-1] == "3 failed, 1 ok"


def test_a_waived_check_is_skipped_with_its_reason_and_another_name_is_refused(
    tmp_path: Path,
) -> None:
    folder = Mistake(
        "waiver", "", body=BODY, more='{name}.waive("nan and inf", "the reference adds first")\n'
    ).write(tmp_path / "a")
    wrong = Mistake("no_waiver", "", more='{name}.waive("nans", "why")\n').write(tmp_path / "b")
    done = command(
        "test",
        folder,
        wrong,
        "--device",
        "cpu",
        "--sanitize",
        "none",
        "--only",
        "nan and inf",
        "--only",
        "results",
    )
    told = "mistakes::no_waiver waives 'nans', which is no check; the checks are results, numbers, "
    assert "  skipped  nan and inf        waived: the reference adds first\n" in done.stdout
    assert f"  failed   build              {told}" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 failed, 1 ok, 1 skipped"
    for use in (testing.load, lambda where: Task(str(where), "cpu", 0)):
        with pytest.raises(DeclarationError, match=told):
            use(wrong)


def test_samples_may_be_plain_and_have_a_tolerance(tmp_path: Path) -> None:
    """A correct sum of 1e5 elements, and one that its author allows to be wrong."""
    folder = Mistake(
        "total",
        "",
        kernel="""\
#include "opjit.h"
opjit_status total_cpu(const opjit_tensor *x, double error, opjit_tensor *out)
{
    OPJIT_CHECK(x->contiguous && x->dtype == OPJIT_FLOAT32, "expected a contiguous float32 tensor");
    OPJIT_TRY(opjit_empty(out, 0, NULL, x->dtype, x));
    volatile float sum = 0;
    for (int64_t i = 0; i < x->numel; i++)
        sum += ((float *)x->data)[i];
    *(float *)out->data = sum * (float)(1 + error);
    return OPJIT_OK;
}
""",
        more="""
{name} = opjit.op("mistakes::{name}(Tensor x, float error=0) -> Tensor")(lambda x, error=0: x.new_empty(()))
{name}.reference(lambda x, error=0: x.sum())
@{name}.samples
def samples(device):
    x = torch.rand(100_000, generator=torch.Generator().manual_seed(1))
    yield x
    yield (x - 0.5,)
    yield x, 0.0
    yield (x,), dict(error=0.0)
    yield opjit.Sample((x, 0.01), rtol=0.02)
    yield x, 0.001
""",
    ).write(tmp_path / "total")
    done = command("test", folder, "--device", "cpu", "--sanitize", "none", "--only", "results")
    assert re.search(
        r"failed   results +got 50\d+.*, expected 50\d+.* on \(float32 \(100000,\), 0\.001\)",
        done.stdout,
    ), done.stdout
    assert "--only results --sample 5\n" in done.stdout


def test_cuda_code_is_compiled_where_no_gpu_is(tmp_path: Path, no_gpu: None) -> None:
    folder = Mistake("both", "").write(tmp_path / "both")
    (folder / "both.cu").write_text("""\
#include "opjit_cuda.h"
opjit_status both_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    return no_such_function(x, out, stream);
}
""")
    done = command("test", folder, "--sanitize", "none", "--only", "results")
    if "  skipped  build " in done.stdout:
        pytest.skip(done.stdout)
    assert re.search(
        r"mistakes::both on cuda\n  failed   build +.*no_such_function", done.stdout
    ), done.stdout
    assert done.stdout.splitlines()[-1] == "1 failed, 1 ok"
    (folder / "both.cu").write_text(
        (folder / "both.cu")
        .read_text()
        .replace("no_such_function(x, out, stream)", "OPJIT_LAUNCHED()")
    )
    done = command("test", folder, "--sanitize", "none", "--only", "results")
    assert (
        "  ok       build              compiled for sm_90, but not run without a GPU; use --emulate to run it on the CPU\n"
        in done.stdout
    )
    assert done.stdout.splitlines()[-1] == "2 ok, CUDA compiled and not run"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--only", "resluts"),
            "there is no check 'resluts'; use results, numbers, rejects, nan and inf",
        ),
        (("--sample", "1"), "--sample N needs --only CHECK"),
        (
            ("--sanitize", "threads"),
            "there is no sanitizer 'threads'; use address, undefined, leak, thread for C, and memcheck",
        ),
    ],
)
def test_a_choice_that_means_nothing_is_refused(words: tuple[str, ...], told: str) -> None:
    done = command("test", "allreduce", *words)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_sample_that_there_is_not_is_a_failure() -> None:
    done = command(
        "test",
        "allreduce",
        "--device",
        "cpu",
        "--only",
        "results",
        "--sample",
        "100000",
        "--sanitize",
        "none",
    )
    assert "there is no sample 100000: this check calls the op" in done.stdout
    assert done.returncode == 1


@pytest.mark.slow
def test_the_leak_and_thread_sanitizers_name_the_line(tmp_path: Path) -> None:
    leak = next(mistake for mistake in MISTAKES if mistake.name == "leak")
    race = next(mistake for mistake in MISTAKES if mistake.name == "static_temporary")
    folders = [leak.write(tmp_path / "leak"), race.write(tmp_path / "static_temporary")]
    printed = command(
        "test", *folders, "--device", "cpu", "--sanitize", "leak,thread", "--only", "memory"
    ).stdout
    if "lacks a library for -fsanitize" in printed:
        pytest.skip(printed)
    assert re.search(r"  failed   leak +leak\.c:\d+: direct leak of \d+ byte", printed), printed
    assert re.search(r"static_temporary on cpu\n(  .*\n)*  ok       leak +", printed), printed
    printed = command(
        "test", *folders, "--device", "cpu", "--sanitize", "leak,thread", "--only", "threads"
    ).stdout
    assert re.search(r"leak on cpu\n(  .*\n)*  ok       thread +", printed), printed
    assert re.search(
        r"  failed   thread +static_temporary\.c:\d+: data race, (read|write) of size \d, with static_temporary\.c:",
        printed,
    )


def _burn(pipe: Connection) -> None:
    for _ in iter(lambda: time.process_time() < 60, False):
        pass


def _naps(pipe: Connection) -> None:
    for _ in range(60_000):
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("work", "late"),
    [
        (_burn, True),
        (_naps, True),
        (lambda pipe: time.sleep(60), True),
        (lambda pipe: pipe.send("done"), False),
    ],
    ids=["runs", "naps", "sleeps", "returns"],
)
def test_the_time_of_a_call_is_what_it_runs_or_sleeps(
    work: Callable[[Connection], object], late: bool
) -> None:
    with Child(work) as child:
        assert _is_late(child, 0.2) is late


def test_a_call_that_gets_no_processor_is_not_late() -> None:
    def work(pipe: Connection) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)  # as on a busy machine
        pipe.send("done")

    with Child(work) as child:
        waking = threading.Timer(1, os.kill, (child.pid, signal.SIGCONT))
        waking.start()
        assert not _is_late(child, 0.2)


def test_a_check_that_loses_the_device_is_not_repeated() -> None:
    def loses(op: Op, device: str) -> str:
        raise AssertionError("CUDA error: an illegal memory access was encountered")

    checks = [Check("first", "a promise", loses), Check("second", "a promise", lambda *_: "fine")]
    op = opjit.inline("lost_device(Tensor x) -> Tensor", like="x", c=NOTHING)
    lines = list(islice(supervise(op, "cpu", checks, 5.0, lambda: None), 3))
    assert [line.name for line in lines] == ["first", "second"]


def test_a_slow_reference_is_not_the_kernels_time_and_imports_are_nobodys(tmp_path: Path) -> None:
    slow = "(lambda until: [None for _ in iter(lambda: __import__('time').process_time() < until, False)] and 2 * x)"
    folder = Mistake(
        "slow_reference", "", reference=f"{slow}(__import__('time').process_time() + 1.2)"
    ).write(tmp_path / "slow")
    done = command(
        "test",
        folder,
        "--device",
        "cpu",
        "--sanitize",
        "none",
        "--only",
        "results",
        "--sample",
        "0",
        "--time-limit",
        "0.5",
    )
    assert re.search(
        r"failed   results +the reference did not return within 0\.5 s on \(float32 \(4, 6\)\)",
        done.stdout,
    ), done.stdout
    folder = Mistake("quick", "").write(tmp_path / "quick")
    done = command(
        "test",
        folder,
        "--device",
        "cpu",
        "--sanitize",
        "none",
        "--only",
        "results",
        "--time-limit",
        "0.3",
    )
    assert "ok       results" in done.stdout, done.stdout


def test_after_two_failures_of_one_cause_the_other_checks_are_only_named(tmp_path: Path) -> None:
    folder = Mistake("early_exit", "", check="if (x->dim == 1) exit(3);").write(
        tmp_path / "early_exit"
    )
    some = [
        word
        for name in ("results", "nan and inf", "strides", "shapes", "inputs kept")
        for word in ("--only", name)
    ]
    done = command("test", folder, "--device", "cpu", "--sanitize", "none", *some)
    assert done.stdout.count("the kernel ended the process with exit(3)") == 2, done.stdout
    last = r"\n  failed   3 more +the same in 3 other checks as in results\n {30}strides, shapes, inputs kept\n5 failed$"
    assert re.search(last, done.stdout), done.stdout


NO_REFERENCE = """import dataclasses

{name}.declaration = dataclasses.replace({name}.declaration, reference=None)"""


@pytest.mark.slow
def test_under_sanitizers_an_exit_has_its_place_and_an_op_that_cannot_be_tested_makes_no_calls(
    tmp_path: Path,
) -> None:
    early = Mistake("early_exit", "", check="if (x->dim == 1) exit(3); /* here */").write(
        tmp_path / "early_exit"
    )
    done = command("test", early, "--device", "cpu", "--only", "results")
    if "lacks a library for -fsanitize" in done.stdout:
        pytest.skip(done.stdout)
    assert re.search(
        r"exit\(3\) on .*\n +early_exit\.c:\d+: the process ends here\n", done.stdout
    ), done.stdout
    assert "still there at the time limit" not in done.stdout
    for mistake in (
        Mistake("no_reference", "", more=NO_REFERENCE),
        Mistake("no_return", "", after="return 1;"),
    ):
        done = command(
            "test", mistake.write(tmp_path / mistake.name), "--device", "cpu", "--only", "results"
        )
        assert re.search(r"  failed   build .*\n( {30}.*\n)*1 failed\n$", done.stdout), done.stdout


@pytest.mark.parametrize(
    "words", [("address", "--only", "vmap"), ("memcheck",), ("thread", "--device", "cuda")], ids=str
)
def test_a_sanitizer_that_was_asked_for_and_has_not_run_is_a_failure(
    words: tuple[str, ...], no_gpu: None
) -> None:
    done = command(
        "test",
        "add_custom",
        "--sanitize",
        *words,
        *(() if "--only" in words else ("--only", "vmap")),
    )
    assert re.search(
        rf"^  failed   {words[0]} +this sanitizer was asked for and has not run; it is for C",
        done.stdout,
        re.MULTILINE,
    ), done
    assert done.returncode == 1


RACE = Mistake(
    "shared_sum",
    "",
    before="""
typedef struct { const float *x; float sum; } sum;
static opjit_status add(int64_t begin, int64_t end, void *context)
{
    sum *s = context;
    for (int64_t i = begin; i < end; i++)
        s->sum += s->x[i]; /* here */
    return OPJIT_OK;
}
""",
    check="""
    OPJIT_CHECK(x->contiguous && x->dtype == OPJIT_FLOAT32, "expected contiguous float32");
    sum s = {x->data, 0};
    OPJIT_TRY(opjit_parallel_for(0, n, 1000, add, &s));
""",
)


@pytest.mark.slow
def test_a_race_between_the_parts_of_opjit_parallel_for_is_found_whatever_checks_are_chosen(
    tmp_path: Path,
) -> None:
    folder = RACE.write(tmp_path / RACE.name)
    done = command("test", folder, "--device", "cpu", "--sanitize", "thread", "--only", "results")
    if "lacks a library for -fsanitize" in done.stdout:
        pytest.skip(done.stdout)
    place = next(
        number
        for number, line in enumerate((folder / "shared_sum.c").read_text().splitlines(), 1)
        if "/* here */" in line
    )
    assert re.search(
        rf"  failed   thread +shared_sum\.c:{place}: data race, .* with shared_sum\.c:{place} in another thread",
        done.stdout,
    )
    assert done.returncode == 1
