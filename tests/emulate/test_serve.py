"""OPJIT_EMULATE=1: CUDA kernels serve CPU tensors, with a warning, and no cache gets a CUDA binary."""

import os
from pathlib import Path
from typing import Any

import pytest

from opjit.builder import glue
from opjit.catalog import registry
from opjit.emulate import build
from opjit.errors import BuildError
from tests.helpers import command, ended, fresh

CODE = """
    import torch, opjit, warnings
    K = r'''
    static __global__ void roll(const float *x, float *y, int n)
    {
        __shared__ float s[64];
        const int t = threadIdx.x;
        s[t] = t < n ? x[t] : 0;
        __syncthreads();
        if (t < n)
            y[t] = s[(t + 1) % 64];
    }
    opjit_status turn_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
    {
        OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
        roll<<<1, 64, 0, stream>>>((const float *)x->data, (float *)out->data, (int)x->numel);
        return OPJIT_LAUNCHED();
    }'''
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        turn = opjit.inline("turn(Tensor x) -> Tensor", cuda=K, like="x")
        print(turn(torch.arange(64.))[:3].tolist())
        print([str(each.message)[:44] for each in caught])
    try:
        opjit.inline("turn(Tensor x) -> Tensor", cuda=K.replace("__syncthreads();", ""), like="x")
        turn(torch.arange(64.))
    except RuntimeError as error:
        print(error)
"""


def test_a_cuda_kernel_serves_cpu_tensors_and_says_so(no_gpu: None) -> None:
    done = fresh(CODE, {"OPJIT_EMULATE": "1"})
    lines = done.stdout.splitlines()
    assert lines[0] == "[1.0, 2.0, 3.0]", done
    assert lines[1] == "['OPJIT_EMULATE is set, so CUDA kernels run em']"
    assert lines[2].startswith("inline::turn: emulated: "), done
    assert "shared memory `s`" in lines[2]


def test_it_never_happens_by_default(no_gpu: None) -> None:
    done = ended(
        CODE.replace("    try:", "    raise SystemExit\n    try:"), {"OPJIT_EMULATE": None}
    )
    assert "no kernel" in done.stderr or "NoKernel" in done.stderr, done


def test_the_store_gets_no_entry_of_it(tmp_path: Path, no_gpu: None) -> None:
    code = "import torch, opjit; print(opjit.get('add_custom', 'cuda')(torch.ones(2), torch.ones(2)).tolist())"
    done = fresh(code, {"OPJIT_EMULATE": "fast", "OPJIT_CACHE": str(tmp_path)})
    assert done.stdout == "[2.0, 2.0]\n", done
    assert [path for path in tmp_path.glob("v*/*add_custom*") if path.is_dir()] == []
    why = command("why", "add_custom", OPJIT_EMULATE="1")
    assert "emulated on the CPU" in why.stdout


def test_a_change_of_the_glue_is_a_new_binary(
    monkeypatch: pytest.MonkeyPatch, no_gpu: None
) -> None:
    """A binary of an earlier version would lack the functions that the loader calls."""
    op = registry.find("tensor_negate")
    before = build.binary(op, checked=False)
    plain = glue.render

    def changed(*arguments: Any) -> dict[str, str]:
        rendered = plain(*arguments)
        return {name: f"{text}/* another version */\n" for name, text in rendered.items()}

    monkeypatch.setattr(glue, "render", changed)
    assert build.binary(op, checked=False) != before


@pytest.mark.parametrize("name", ["bench", "tune"])
def test_nothing_emulated_is_timed(name: str, no_gpu: None) -> None:
    done = command(name, "add_custom", OPJIT_EMULATE="1")
    assert done.returncode == 2
    assert "an emulated kernel has no time" in done.stderr + done.stdout
    assert os.environ.get("OPJIT_EMULATE") is None


def test_an_atomic_is_one_step_even_if_the_compiler_inlines_nothing(no_gpu: None) -> None:
    code = """
        import torch, opjit
        K = r'''
        static __global__ void clear(int *totals)
        {
            totals[threadIdx.x] = 0;
        }
        static __global__ void count(int *total, int *largest)
        {
            __syncthreads(); /* all threads have begun */
            for (int i = 0; i < 5000; i++) {
                for (volatile unsigned varying = i * 2654435761u >> 27; varying; varying--)
                    ; /* else a thread pauses at the same place each time */
                atomicAdd(total, 1);
                atomicMax(largest, i);
            }
        }
        opjit_status count_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
        {
            OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
            clear<<<1, 2, 0, stream>>>((int *)out->data);
            count<<<1, 64, 0, stream>>>((int *)out->data, (int *)out->data + 1);
            return OPJIT_LAUNCHED();
        }'''
        count = opjit.inline("count(Tensor x) -> Tensor", cuda=K, like="x",
                             extra_cuda_cflags=["-Xcompiler=-fno-inline"])
        print(count(torch.zeros(2, dtype=torch.int32)).tolist())
    """
    done = fresh(code, {"OPJIT_EMULATE": "fast"})
    assert done.stdout == "[320000, 4999]\n", done


def test_the_error_of_a_compiler_that_cannot_build_the_emulation_names_its_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    fails = "echo 'fiber.cc:1:1: error: no C++ compiler' >&2; exit 1"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *fiber.cc*) {fails};; esac\nexec gcc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(BuildError, match=r"runtime: fiber\.cc:1:1: error: no C\+\+ compiler"):
        build.runtime_folder()
    assert not [*tmp_path.glob("cache/v*/cc-*")]  # notes on compilers are in `toolchain`


MEMORY = """
import resource, torch, opjit
op = opjit.get("tensor_negate")
op(torch.ones(4))
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
for call in range(10):
    x = torch.full((1 << 20,), float(call))
    assert op(x)[-1] == -call
print((peak() - before) // x.nbytes)
"""


def test_the_records_of_accesses_are_small_and_do_not_add_up(no_gpu: None) -> None:
    growth = int(fresh(MEMORY, {"OPJIT_EMULATE": "1"}).stdout)
    assert growth < 18, f"{growth} times the tensor"
