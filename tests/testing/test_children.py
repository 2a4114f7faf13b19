"""`opjit test` and its op's process: interrupts, errors outside kernels, what is skipped and waived, and the verdict."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import command, environment
from tests.testing.mistakes import BODY, MISTAKES, Mistake

LOOP = """
    FILE *mark = fopen(getenv("MARK"), "w");
    fclose(mark);
    for (volatile int i = 0; i == 0;) {
    }
"""


@pytest.mark.parametrize("words", [("test", "--device", "cpu", "--sanitize", "none", "--time-limit", "9999"), ("bench", "--device", "cpu")],
                         ids=["test", "bench"])
def test_ctrl_c_ends_a_kernel_that_never_returns(tmp_path: Path, words: tuple[str, ...]) -> None:
    mark = tmp_path / "mark"
    folder = Mistake(f"never_{words[0]}", "", before="#include <stdio.h>", check=LOOP, more="""
{name}.workloads(lambda device: [opjit.Workload("small", (torch.ones(3),), {{}}, 0)])
""").write(tmp_path / "never")
    with subprocess.Popen([sys.executable, "-m", "opjit", words[0], str(folder), *words[1:]], env=environment({"MARK": str(mark)}),
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True) as running:
        while not mark.exists():
            assert running.poll() is None
            time.sleep(0.05)
        os.killpg(running.pid, signal.SIGINT)
        printed = running.communicate()[0]
    assert running.returncode in (130, -signal.SIGINT), printed
    assert "Traceback" not in printed
    assert not _is_alive("opjit", str(folder))


def _is_alive(*words: str) -> bool:
    """Whether a process runs with these words in its command line, besides this one."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if all(word in line for word in words):
            return True
    return False


def test_an_op_that_does_not_compile_or_has_no_samples_fails_and_the_others_are_tested(tmp_path: Path) -> None:
    Mistake("a_broken", "", body="no_such_name;").write(tmp_path / "a")
    Mistake("b_raises", "", more='@{name}.samples\ndef samples(device):\n    raise KeyError("weights")\n').write(tmp_path / "b")
    Mistake("c_good", "").write(tmp_path / "c")
    done = command("test", tmp_path, "--device", "cpu", "--sanitize", "none", "--only", "results")
    assert done.returncode == 1
    assert re.search(r"a_broken on cpu\n  failed   build +.*no_such_name", done.stdout), done.stdout
    assert re.search(r"b_raises on cpu\n  failed   build +op\.py:\d+: KeyError: 'weights'", done.stdout), done.stdout
    assert re.search(r"c_good on cpu\n  ok       results +6 samples\n", done.stdout), done.stdout
    assert done.stdout.splitlines()[-1] == "2 failed, 1 ok"


def test_a_waived_check_is_shown_with_its_reason_and_another_name_is_refused(tmp_path: Path) -> None:
    nan = Mistake("waiver", "", body=BODY, more='{name}.waive("nan and inf", "the reference adds first")\n').write(tmp_path / "a")
    wrong = Mistake("no_waiver", "", more='{name}.waive("nans", "why")\n').write(tmp_path / "b")
    done = command("test", nan, wrong, "--device", "cpu", "--sanitize", "none", "--only", "nan and inf")
    assert "  waived   nan and inf        the reference adds first\n" in done.stdout
    assert "waives 'nans', which is no check; there are inputs kept, results" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 failed, 1 waived"


def test_samples_may_be_plain_and_have_a_tolerance(tmp_path: Path) -> None:
    """A correct sum of 1e5 elements, and one that its author allows to be wrong."""
    folder = Mistake("total", "", kernel="""\
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
""", more="""
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
""").write(tmp_path / "total")
    done = command("test", folder, "--device", "cpu", "--sanitize", "none", "--only", "results")
    assert re.search(r"failed   results +got 50\d+.*, expected 50\d+.* on \(float32 \(100000,\), 0\.001\)", done.stdout), done.stdout
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
    assert re.search(r"mistakes::both on cuda\n  failed   build +.*no_such_function", done.stdout), done.stdout
    assert done.stdout.splitlines()[-1] == "1 failed, 1 ok"
    (folder / "both.cu").write_text((folder / "both.cu").read_text().replace("no_such_function(x, out, stream)", "OPJIT_LAUNCHED()"))
    done = command("test", folder, "--sanitize", "none", "--only", "results")
    assert "  ok       build              compiled for sm_90 and not run, as no GPU is here\n" in done.stdout
    assert done.stdout.splitlines()[-1] == "2 ok, CUDA compiled and not run"


@pytest.mark.parametrize(("words", "told"), [
    (("--only", "resluts"), "there is no check 'resluts'; use inputs kept, results"),
    (("--sample", "1"), "--sample counts the calls of one check; name it with --only"),
])
def test_a_choice_that_means_nothing_is_refused(words: tuple[str, ...], told: str) -> None:
    done = command("test", "allreduce", *words)
    assert done.returncode == 1
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_sample_that_there_is_not_is_a_failure() -> None:
    done = command("test", "allreduce", "--device", "cpu", "--only", "inputs kept", "--sample", "100000", "--sanitize", "none")
    assert "there is no sample 100000: this check calls the op" in done.stdout
    assert done.returncode == 1


@pytest.mark.slow
def test_the_leak_and_thread_sanitizers_name_the_line(tmp_path: Path) -> None:
    leak = next(mistake for mistake in MISTAKES if mistake.name == "leak")
    race = next(mistake for mistake in MISTAKES if mistake.name == "static_temporary")
    folders = [leak.write(tmp_path / "leak"), race.write(tmp_path / "static_temporary")]
    printed = command("test", *folders, "--device", "cpu", "--sanitize", "leak,thread", "--only", "memory").stdout
    if "no library for -fsanitize" in printed:
        pytest.skip(printed)
    assert re.search(r"  failed   leak +leak\.c:\d+: direct leak of \d+ byte", printed), printed
    assert re.search(r"static_temporary on cpu\n(  .*\n)*  ok       leak +", printed), printed
    printed = command("test", *folders, "--device", "cpu", "--sanitize", "leak,thread", "--only", "threads").stdout
    assert re.search(r"leak on cpu\n(  .*\n)*  ok       thread +", printed), printed
    assert re.search(r"  failed   thread +static_temporary\.c:\d+: data race, (read|write) of size \d, with static_temporary\.c:", printed)
