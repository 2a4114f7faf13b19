"""How the figure of each row of the benchmarks' page is read from the output of the row's command: page.py uses it.

A pattern is a regular expression. Its groups: `ours` and `peer` are times, `times` is opjit's time over the peer's, and `speed` is the
inverse. A pattern without a group has to be there, and the row has no figure to compare."""

from __future__ import annotations

import re
from typing import NamedTuple

_TIME = r"-?[\d.]+ (?:s|ms|us|ns)"
OURS = rf"(?P<ours>{_TIME})"
PEER = rf"(?P<peer>{_TIME})"
FLASHINFER = "FlashInfer and a CUDA Toolkit"
SGLANG = "SGLang and a CUDA Toolkit"
DEEPSPEED = "DeepSpeed"


class Reading(NamedTuple):
    """How one row is read."""

    row: str  # the page's text
    patterns: tuple[str, ...]
    baseline: str = ""  # a part of the baseline's cell, where two rows have the same text
    gpu: bool = False
    every: bool = False  # all matches of a pattern are figures, not only the first
    needs: str = (
        ""  # something that a checkout does not have: the row is not run, and that is reported
    )


def line(what: str) -> str:
    """Return the pattern of a line that common.show prints. Its third column is a peer's time if the fourth is a ratio or a difference."""
    return rf"^{re.escape(what)}[^\n]*?  +{OURS}(?:  +{PEER}  +(?:[\d.]+x|1/|[+-]))?"


def elementwise(device: str, power: int) -> tuple[str, ...]:
    return tuple(
        rf"^{device} +{name} .*2\^{power} .* (?P<times>[\d.]+)x of torch"
        for name in ("add_custom", "round_ste", "tensor_negate")
    )


def lltm(batch: int, where: str, what: str) -> str:
    return rf"LLTM, batch {batch}, [^\n]*on {where}[^L]*?\n{what} +{OURS}  +{PEER}"


def builder(step: str, now: str = "built") -> str:
    """Return the pattern of a line of builders.py, whose peer is the left column."""
    if now == "reused":
        return rf"^{step} .* reused \S+ s, \S+$"
    return rf"^{step} +\w+ \S+ s, (?P<peer>[\d.]+) +{now} \S+ s, (?P<ours>[\d.]+)$"


def bench(workload: str) -> str:
    """Return the pattern of a workload's line of `opjit bench`: the speed stands before the spread."""
    return rf"^{re.escape(workload)} .*? (?P<speed>[\d.]+)x +\d+%"


def collectives(size: str) -> Reading:
    """Return the reading of a size's row, such as "32 MB": the last column is opjit's time over that of the fastest peer."""
    number, unit = size.split()
    kilobytes = int(number) * (1024 if unit == "MB" else 1)
    return Reading(size, (rf"^ *{kilobytes} .* (?P<times>[\d.]+)$",), gpu=True)


_BENCH_CUDA = "opjit bench allreduce --device cuda"
_BENCH_CPU = "opjit bench allreduce --device cpu --only float32"
_GET = "opjit get tensor_negate --arch sm_75,sm_80,sm_86,sm_89,sm_90,sm_100,sm_120"
_FIRST = "first C op"
_WARM_BUILDER = rf"^warm +{PEER} +{OURS}"
_FAILED_REMOTES = (
    "refuses connections",
    "drops connections",
    "is a silent socket",
    "has no address",
    "answers 500",
    "never answers",
    "drips",
    "resets in the middle",
    "sends without end",
    "sends nothing",
    "sends a web page",
)
READINGS: dict[str, tuple[Reading, ...]] = {
    "cold.py": (
        Reading(_FIRST, (line("C op, against C++"),), "C++ over"),
        Reading(_FIRST, (line("C op, against C++"),), "24.1 s"),
        Reading(_FIRST, (line("C op, against tvm-ffi"),), "tvm-ffi"),
        Reading("further C op", (line("the next C op"),), "gcc"),
        Reading("further C op", (line("the next C op"),), "0.27 s"),
    ),
    "cold.py --cuda": (
        Reading(
            "op with one kernel",
            (line("one CUDA kernel"),),
            "bare nvcc",
            gpu=True,
        ),
        Reading("... after an edit", (line("the same kernel, edited"),), gpu=True),
        Reading("`allreduce`", (line("allreduce"),), gpu=True),
    ),
    "cold.py --cuda --slow-rounds 0": (
        Reading(
            "op with one kernel, build only",
            (rf"^one CUDA kernel[^\n]*?  +{OURS}",),
            needs="a CUDA Toolkit",
        ),
    ),
    "notebook.py": (
        Reading(
            "edited notebook cell, until its result",
            (line("... against tvm-ffi's load_inline"),),
        ),
    ),
    "new.py": (Reading("`opjit new`, `get`, `test`, `bench`", (line("all four"),)),),
    "judge.py cpu": (
        Reading(
            "new C op",
            (line("a C op"),),
        ),
    ),
    "judge.py cuda": (
        Reading(
            "new CUDA kernel with a launch configuration",
            (line("a CUDA kernel and its rule"),),
            gpu=True,
        ),
        Reading(
            "CUDA kernel with a launch configuration",
            (line("a CUDA kernel and its rule"),),
            gpu=True,
        ),
        Reading("new CUDA op", (line("a CUDA op"),), gpu=True),
        Reading("new `ModelNew` that calls `load_inline`", (line("a ModelNew"),), gpu=True),
    ),
    "tune.py --device cuda": (
        Reading(
            "288 variants of a CUDA op, built and measured",
            (line("built and measured"),),
            gpu=True,
        ),
    ),
    "warm.py": (
        Reading("`import opjit`", (line("import opjit"),), every=True),
        Reading(
            "`opjit.get` in a fresh process, without imports",
            (line("warm get of a C op"),),
        ),
        Reading("`opjit.get` again", (line("get again"),)),
    ),
    "dropin.py": (
        Reading("`opjit.load`, cold", (line("cold"),)),
        Reading("... warm", (line("warm"),)),
        Reading("... a call with two numbers", (line("call"),)),
    ),
    "dropin.py --cuda": (
        Reading(
            "`opjit.load`, cold",
            (line("cold"),),
            needs="a CUDA Toolkit, and a minute for each build with torch's headers",
        ),
        Reading("... warm", (line("warm"),), needs="a CUDA Toolkit"),
    ),
    "extension_loops.py": (
        Reading(
            "loops over `numel()`, accessors, sizes, copies, `item()`",
            tuple(
                line(what)
                for what in (
                    "i < x.numel()",
                    "accessor",
                    "dim, stride",
                    "10^5 copies",
                    "x[i][0].item",
                )
            ),
        ),
    ),
    "public.py FOLDER": (
        Reading(
            "public extensions with light headers, for sm_90",
            (r"light",),
            needs="a folder of public programs",
        ),
    ),
    "builders.py imports": (
        Reading("`import opjit; opjit.build`", (rf"^import opjit; opjit.build +{OURS}",)),
        Reading("warm request of a small library, again", (rf"^a warm request, again +{OURS}",)),
    ),
    "builders.py flashinfer": (
        Reading("cold", (builder("cold"),), needs=FLASHINFER),
        Reading("a header edited; the edit reverted", (builder("edit"),), needs=FLASHINFER),
        Reading("the checkout at another path", (builder("moved", "reused"),), needs=FLASHINFER),
        Reading(
            "another CUDA Toolkit at the same path (flashinfer#5145)",
            (r"^toolkit .* built \S+ s, \S+$",),
            needs=FLASHINFER,
        ),
        Reading(
            "warm: opjit reads 374 headers, ninja compares dates",
            (_WARM_BUILDER,),
            needs=FLASHINFER,
        ),
    ),
    "builders.py sglang": (
        Reading("cold", (builder("cold"),), needs=SGLANG),
        Reading("edited; reverted; moved; another toolkit", (builder("edit"),), needs=SGLANG),
        Reading("warm", (_WARM_BUILDER,), needs=SGLANG),
    ),
    "builders.py deepspeed": (
        Reading("cold", (builder("cold"),), needs=DEEPSPEED),
        Reading("edited; reverted; moved", (builder("edit"),), needs=DEEPSPEED),
    ),
    "store.py": (
        Reading("look-up with 9,999 other entries", (line("look-up beside 9,999 keys of the op"),)),
        Reading("listing 10,000 entries", (line("cache ls of 10,000 entries"),), every=True),
    ),
    "remote.py": (
        Reading(
            "remote cache that fails in one of 12 ways",
            tuple(line(how) for how in _FAILED_REMOTES),
        ),
    ),
    "call.py": (
        Reading("`allreduce` on the CPU", (line("allreduce, inference mode"),), "1.88"),
        Reading("`allreduce` in inference mode", (line("allreduce, inference mode"),), "2.39"),
        Reading("... under `no_grad`, CPU time", (line("autograd, no_grad"),), "inference mode"),
        Reading(
            "`allreduce` under `no_grad`", (line("allreduce, no_grad"),), "`register_autograd`"
        ),
        Reading(
            "... with autograd recording", (line("allreduce, grad mode, input requires grad"),)
        ),
        Reading(
            "call that records a gradient, if the backward is an op",
            (line("scale, recorded, backward is an op"),),
        ),
        Reading("... and its backward", (line("scale and backward, backward is an op"),)),
        Reading(
            "... recorded, with a backward in Python",
            (line("scale, recorded, backward is Python"),),
        ),
        Reading("op without a backward, under `no_grad`", (line("total, no_grad"),)),
        Reading("... inference mode", (line("total, inference mode"),)),
        Reading(
            "op that writes its argument, on the CPU", (line("scale_inplace, inference mode"),)
        ),
        Reading(
            "`allreduce` on CUDA",
            (line("allreduce, float32, inference mode"),),
            gpu=True,
        ),
        Reading(
            "... under `no_grad`, with the Python autograd kernel",
            (line("allreduce, float32, no_grad"),),
            gpu=True,
        ),
    ),
    _BENCH_CUDA: (
        Reading(
            "float32 sum of 4 to 64 MiB",
            tuple(bench(f"float32 2^{power}") for power in (20, 21, 22, 24)),
            gpu=True,
        ),
        Reading(
            "int32, int8, bool sum of 2^28 elements",
            tuple(bench(f"{dtype} 2^28") for dtype in ("int32", "int8", "bool")),
            gpu=True,
        ),
    ),
    _BENCH_CPU: (
        Reading(
            "float32 sum of 2^16 to 2^20 elements",
            tuple(bench(f"float32 2^{power}") for power in (16, 18, 19, 20)),
        ),
        Reading(
            "float32 sum of 2^10 to 2^14 elements",
            tuple(bench(f"float32 2^{power}") for power in (10, 12, 14)),
        ),
    ),
    _GET: (
        Reading(
            "`tensor_negate` for 7 architectures",
            (rf"^wall time {OURS}",),
            gpu=True,
        ),
    ),
    "package.py": (
        Reading(
            "called directly",
            (line("8 elements, called directly"),),
        ),
        Reading(
            "through the dispatcher, without opjit's package",
            (line("8 elements, through the dispatcher"),),
        ),
    ),
    "bandwidth.py": (
        Reading(
            "float32 sum of 1 GiB",
            (r"^allreduce .* (?P<times>[\d.]+)x of the read",),
            gpu=True,
        ),
    ),
    "elementwise.py": (
        Reading(
            "`add_custom`, `round_ste`, `tensor_negate` of 2^26 float32",
            elementwise("cuda", 26),
            gpu=True,
        ),
        Reading(
            "`add_custom`, `round_ste`, `tensor_negate` of 2^24 float32", elementwise("cpu", 24)
        ),
        Reading("... of 2^12 float32", elementwise("cpu", 12)),
    ),
    "cpu_kernels.py": (
        Reading(
            "sum of scattered elements of 2^20, 12 layouts",
            (rf"^sum of float32, .*?  +{OURS}  +{PEER}  ",),
            every=True,
        ),
        Reading(
            "`add_custom` of 2^16 elements, 55 pairs of dtypes",
            (rf"^\w+ \+ \w+  +{OURS}  +{PEER}  ",),
            every=True,
        ),
        Reading(
            "`add_custom`, `tensor_negate` of 8 and 2^12 float32",
            (rf"^\w+ of 2.*operator  +{OURS}  +{PEER}  ",),
            "torch.ops.aten",
            every=True,
        ),
        Reading(
            "`add_custom`, `tensor_negate` of 8 and 2^12 float32",
            (rf"^\w+ of 2.*function  +{OURS}  +{PEER}  ",),
            "torch.add",
            every=True,
        ),
    ),
    "strides.py": (
        Reading(
            "`OPJIT_FOR_EACH`, transposed or permuted",
            (r"^(?:transposed|permuted).*for_each +\S+ \S+ +(?P<times>[\d.]+)x",),
            every=True,
        ),
    ),
    "matmul.py": (
        Reading(
            "20 shapes of decoding, 1 to 64 rows",
            (r"geometric mean of 20: (?P<speed>[\d.]+)x",),
            gpu=True,
        ),
        Reading(
            "10 shapes of prefill, 2,048 to 8,192 rows",
            (r"geometric mean of 10: (?P<speed>[\d.]+)x",),
            gpu=True,
        ),
        Reading(
            "6 shapes of experts, 24 to 200 rows",
            (r"geometric mean of 6: (?P<speed>[\d.]+)x",),
            gpu=True,
        ),
        Reading("4 ragged shapes", (r"geometric mean of 4: (?P<speed>[\d.]+)x",), gpu=True),
        Reading(
            "27 shapes with silu_multiply or a residual",
            (r"geometric mean of 27: (?P<speed>[\d.]+)x",),
            gpu=True,
        ),
    ),
    "lltm.py": (
        Reading(
            "batch 16, features 32, state 128, forward",
            (lltm(16, "NVIDIA", "forward, py"), lltm(16, "NVIDIA", "forward, compile")),
            gpu=True,
        ),
        Reading(
            "... backward",
            (lltm(16, "NVIDIA", "backward, py"), lltm(16, "NVIDIA", "backward, compile")),
            gpu=True,
        ),
        Reading(
            "... forward in a CUDA graph", (lltm(16, "NVIDIA", "lltm_forward, device"),), gpu=True
        ),
        Reading(
            "batch 64, features 128, state 512, forward in a CUDA graph",
            (lltm(64, "NVIDIA", "lltm_forward, device"),),
            gpu=True,
        ),
        Reading(
            "batch 16",
            (lltm(16, "the CPU", "forward, py"), lltm(16, "the CPU", "forward and backward, py")),
        ),
        Reading(
            "batch 64",
            (lltm(64, "the CPU", "forward, py"), lltm(64, "the CPU", "forward and backward, py")),
        ),
    ),
    "emulated.py": (
        Reading(
            "emulated CUDA kernel of 100,000 floats, accesses unchecked",
            (line("unchecked, over torch"),),
        ),
        Reading("... accesses checked", (line("checked, over torch"),)),
    ),
    "precompile.py": (
        Reading(
            "`opjit precompile` of 16 CUDA entries",
            (line("16 CUDA entries built"),),
            needs="a CUDA Toolkit",
        ),
        Reading("... over 1,002 cached entries, without imports", (line("nothing to do over"),)),
        Reading(
            "... `opjit.check_precompiled` of these entries, busy, CPU time",
            (line("opjit.check_precompiled over"),),
        ),
    ),
    "width.py --files 4 --suffix .cpp --cpus 2 --memory 3 --widths 1,2": (
        Reading(
            "all compilers",
            (rf"^width 2 +{PEER}[\s\S]*^opjit's own +{OURS}",),
            needs="a cgroup that it may create",
        ),
    ),
    "ranks.py": (
        Reading(
            "`opjit.distributed.ready`, cold",
            (line("ready, cold"),),
        ),
        Reading(
            "... warm",
            (rf"^ready, warm[^\n]*?  +{OURS}[\s\S]*?^  \(the same[^\n]*?\)  +{PEER}",),
        ),
    ),
    "storm.py": (
        Reading(
            "64 processes on 8 cold ops, a third killed, 10 rounds",
            (r"^survivors that failed .* PASS[\s\S]*^entries missing or bad .* PASS",),
        ),
    ),
    "reload.py": (
        Reading(
            "1,000 hot reloads with builds, four threads calling", (r"^wrong results .* PASS",)
        ),
    ),
}
