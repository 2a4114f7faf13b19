"""CUDA candidates without a GPU: a wrong one, a race and a bad address are rejected, and no verdict is "correct" or has a time."""

import asyncio
import json
from pathlib import Path

import pytest

from opjit.errors import DeviceUnavailable, ToolMissing
from opjit.judge import Judge, Verdict, keeper
from tests.helpers import command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
SCALE = str(HERE / "scale")
CANDIDATE = """\
#include "opjit_cuda.h"
static __global__ void scale_kernel(const float *x, float *out, float a, int n)
{
    __shared__ float part[64];
    const int t = threadIdx.x;
    const int i = blockIdx.x * 64 + t;
    part[63 - t] = i < n ? a * x[i] : 0;
    __syncthreads();
    if (i < n)
        out[i] = part[63 - t];
}

opjit_status scale_cuda(const opjit_tensor *x, double a, opjit_tensor *out, cudaStream_t stream)
{
    const int n = (int)x->numel;
    opjit_tensor from;
    OPJIT_TRY(opjit_contiguous(&from, x));
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    if (n > 0)
        scale_kernel<<<(n + 63) / 64, 64, 0, stream>>>((const float *)from.data, (float *)out->data, (float)a, n);
    return OPJIT_LAUNCHED();
}
"""
CANDIDATES = {
    "right": CANDIDATE,
    "race": CANDIDATE.replace("    __syncthreads();\n", "").replace(
        "out[i] = part[63 - t]", "out[i] = part[t]"
    ),
    "wrong": CANDIDATE.replace("a * x[i]", "a + x[i]"),
    "bounds": CANDIDATE.replace("i < n ? a * x[i] : 0", "a * x[i]"),
    "text": CANDIDATE.replace("out[i] =", "out[i] ="[:-1]),
    "rule": "// opjit: launch scale(x, out, a, x.numel) grid=1 block=64 shared=0\n",
}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr("opjit.backends.cuda.Cuda.available", lambda self: "this test has no GPU")

        async def run() -> list[Verdict]:
            async with Judge(SCALE, device="cuda", workers=2) as judge:
                return await asyncio.gather(
                    *(judge(text, name) for name, text in CANDIDATES.items())
                )

        return {verdict.candidate: verdict for verdict in asyncio.run(run())}


def test_a_right_candidate_is_emulated_and_not_correct(verdicts: dict[str, Verdict]) -> None:
    right = verdicts["right"]
    assert (right.verdict, right.tier) == ("emulated", "emulated"), right
    assert "did not run on a GPU" in right.message
    assert right.median_us is None


def test_a_race_is_rejected_at_its_line(verdicts: dict[str, Verdict]) -> None:
    race = verdicts["race"]
    assert race.verdict == "wrong", race
    assert "race on shared memory `part`" in race.message
    assert race.line in (7, 9)
    assert race.sample is not None


def test_a_bad_address_is_rejected_at_its_line(verdicts: dict[str, Verdict]) -> None:
    bounds = verdicts["bounds"]
    assert (bounds.verdict, bounds.line) == ("wrong", 7), bounds
    assert "out of bounds" in bounds.message


def test_a_wrong_result_and_a_wrong_text_are_rejected(verdicts: dict[str, Verdict]) -> None:
    assert verdicts["wrong"].verdict == "wrong", verdicts["wrong"]
    text = verdicts["text"]
    assert (text.verdict, text.line) == ("compile", 10), text


def test_a_kernel_with_a_launch_rule_is_refused_with_the_reason(
    verdicts: dict[str, Verdict],
) -> None:
    assert verdicts["rule"].verdict == "unavailable"
    assert "needs a GPU" in verdicts["rule"].message


def test_a_kernel_with_a_launch_rule_is_not_blamed_for_a_machine_without_a_gpu(
    tmp_path: Path, no_gpu: None
) -> None:
    candidate = tmp_path / "scale.cu"
    candidate.write_text(CANDIDATES["rule"])
    done = command("judge", SCALE, candidate, "--device", "cpu", "--workers", "1", "--json")
    verdict = json.loads(done.stdout)
    assert (done.returncode, verdict["verdict"]) == (0, "unavailable"), verdict
    assert "judge it with --device cuda on a machine with a GPU" in verdict["message"]


@pytest.mark.parametrize("error", [ToolMissing("nvrtc", "install it"), DeviceUnavailable("no GPU")])
def test_an_error_of_the_machine_is_not_the_candidates(error: Exception) -> None:
    assert keeper._failure(error).word == "unavailable"


def test_the_command_shows_the_word(tmp_path: Path, no_gpu: None) -> None:
    candidate = tmp_path / "scale.cu"
    candidate.write_text(CANDIDATE)
    done = command("judge", SCALE, candidate, "--device", "cuda", "--workers", "1")
    assert "emulated" in done.stdout
    assert "it did not run on a GPU" in done.stdout, done
    assert "\x1b" not in done.stdout


def test_a_kernelbench_file_is_not_emulated(no_gpu: None) -> None:
    judge = Judge(str(HERE / "matmul_relu.py"), device="cuda", workers=1)
    with pytest.raises(DeviceUnavailable, match="only CUDA code of an op is emulated"):
        judge.start()
