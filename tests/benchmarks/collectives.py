"""Collectives of one .cu file over opjit_peers.h beside NCCL's and torch's, on the GPUs of one machine.

Claims: the same bits on all ranks for every shape, dtype and way; from 1 KB to 32 MB no slower than the best of NCCL and torch.

    python -m tests.benchmarks.collectives --ranks 2                  # validates, then prints every table
    python -m tests.benchmarks.collectives --ranks 2 --shapes 10000   # more random shapes first
    python -m tests.benchmarks.collectives --ranks 2 --cpu            # CPU ranks, beside gloo

NVLink multicast stays off. A time is the median of 9 rounds, each of two replays of a CUDA graph with 50 calls, on the slowest rank.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import opjit
import opjit.distributed
from opjit import resources
from opjit.catalog import registry
from opjit.cpp_extension import autograd_part
from opjit.distributed import peer_groups, peer_memory
from opjit.testing.compare import assert_same
from opjit.testing.samples import effects

CALLS = 50
ROUNDS = 9
KILOBYTES = (1, 4, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 32768, 131072, 262144)
WAYS = ("WORDS", "ONE_SHOT", "TWO_SHOTS")
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.float64,
    torch.int64,
)
Call = Callable[[], Any]


def source(way: str) -> str:
    """The bundled op's .cu file with a fixed way."""
    file = resources.folder("kernels_c") / "all_reduce_ranks" / "all_reduce_ranks.cu"
    return f"#define ALL_REDUCE_WAY {way}\n{file.read_text()}"


PING = r"""
#include "opjit_peers.h"
static __global__ void ping_kernel(const opjit_peers p, int rounds)
{
    for (int i = 0; i < rounds; i++)
        OPJIT_BARRIER(&p);
}
static __global__ void nothing(int) { }
opjit_status ping_cuda(const opjit_tensor *x, const char *group, int64_t rounds, opjit_tensor *out, cudaStream_t stream)
{
    opjit_peers p;
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    OPJIT_TRY(opjit_peers_of(&p, group, 0));
    OPJIT_TRY(opjit_peers_launch(&p, (const void *)ping_kernel, 1, 32, 0, stream));
    if (rounds)
        ping_kernel<<<1, 32, 0, stream>>>(p, (int)rounds);
    else
        nothing<<<1, 32, 0, stream>>>(0);
    return OPJIT_LAUNCHED();
}
"""


def build() -> dict[str, Any]:
    """Build all ops, at once; returns them by name."""
    schema = "all_reduce_ranks(Tensor x, str group, bool sum_gradients=True) -> Tensor"
    made = {
        way: opjit.inline(f"{way.lower()}::{schema}", cuda=source(way), like="x") for way in WAYS
    }
    made["PING"] = opjit.inline(
        "bench::ping(Tensor x, str group, int rounds) -> Tensor", cuda=PING, like="x"
    )
    names = ["opjit::all_reduce_ranks", "opjit::all_reduce_ranks_"]
    names += [f"{way.lower()}::all_reduce_ranks" for way in WAYS] + ["bench::ping"]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: opjit.get(name, "cuda"), names))
    return made


def graph_us(call: Call) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return worst(statistics.median(times))


def eager_us(call: Call, calls: int = 200) -> float:
    times = []
    for _ in range(5):
        for _ in range(10):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6 / calls)
    return worst(statistics.median(times))


def worst(value: float) -> float:
    values: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return max(values)


def wanted(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum in the order of the ranks, float16 and bfloat16 in float32."""
    wide = torch.float32 if parts[0].dtype in (torch.float16, torch.bfloat16) else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def drawn(number: int, device: str) -> tuple[torch.Tensor, str]:
    """A tensor of a random size, dtype and layout; the same on all ranks that use the same seed."""
    generator = torch.Generator().manual_seed(number)
    limit = 1 << int(torch.randint(1, 22, (1,), generator=generator))
    size = int(torch.randint(1, limit + 1, (1,), generator=generator))
    dtype = DTYPES[number % len(DTYPES)]
    layout = ("dense", "offset", "gaps", "transposed")[number // len(DTYPES) % 4]
    x = (torch.randn(size, device=device) * 100).to(dtype)
    if layout == "offset":
        x = torch.cat((x, x[:1]))[1:]
    elif layout == "gaps":
        x = torch.stack((x, x), -1)[..., 0]
    elif layout == "transposed" and size >= 4:
        x = x[: size // 2 * 2].view(2, -1).t()
    return x, layout


def validate(ops: dict[str, Any], group: Any, shapes: int, device: str) -> int:
    """Compare every way's bits with the sum on this rank; returns the number of calls that differed."""
    wrong = 0
    reached = group.empty((1 << 21,), torch.float64)
    for number in range(shapes):
        parts = []
        for rank in range(group.world):
            torch.manual_seed(number * group.world + rank)
            parts.append(drawn(number, device)[0])
        want = wanted(parts)
        names = list(ops) if number < 300 else [list(ops)[number % len(ops)]]
        for name in names:
            got = ops[name](parts[group.rank], group.name)
            if not torch.equal(got, want):
                wrong += 1
                if wrong < 4:
                    print(
                        f"rank {group.rank}: {name} wrong at {parts[0].dtype} {tuple(want.shape)}",
                        flush=True,
                    )
        if device == "cuda" and number in (100, 200):
            set_counts((1 << 24) - 3 if number == 100 else (1 << 32) - 3, group)
        if number % 7 == 0:
            mine = parts[group.rank]
            torch.ops.opjit.all_reduce_ranks_(mine, group.name)
            wrong += not torch.equal(mine, want)
        if number % 7 == 1:  # in memory that all ranks reach, from another place on
            first = 16 * (number % 3)
            mine = reached.view(want.dtype)[first : first + want.numel()]
            mine.copy_(parts[group.rank].reshape(-1))
            torch.ops.opjit.all_reduce_ranks_(mine, group.name)
            wrong += not torch.equal(mine, want.reshape(-1))
        group.check()
    return wrong


def set_counts(count: int, group: Any) -> None:
    """Go on from a count, as after that many calls: where words are forgotten, and where counts wrap around."""
    newest = peer_groups._groups[group.name, group.device]
    memory = newest.memory
    signals = peer_memory.tensor_at(
        memory.starts[group.rank], peer_memory.SIGNAL_BYTES, group.device
    )
    torch.cuda.synchronize()
    dist.barrier()
    signals.view(torch.int64).fill_(count)
    memory.kept[1].view(torch.int32).fill_(count - (1 << 32) * (count >= 1 << 31))
    torch.cuda.synchronize()
    dist.barrier()


def nccl_groups() -> Iterator[tuple[str, Any]]:
    yield "NCCL", dist.group.WORLD
    for protocol in ("LL", "LL128"):
        os.environ["NCCL_PROTO"] = protocol
        made: Any = dist.new_group(backend="nccl")
        dist.all_reduce(torch.ones(1, device="cuda"), group=made)
        torch.cuda.synchronize()
        yield protocol, made
    del os.environ["NCCL_PROTO"]


def compare_samples(name: str, group: Any) -> int:
    """Compare an op's samples with its reference, and between the ranks; returns how many differ."""
    op = registry.find(f"opjit::{name}")
    wrong = 0
    for sample in op.samples_on("cuda"):
        got = effects(op.overload, op, sample)
        try:
            assert_same(got, effects(op.reference_function, op, sample), sample)
        except AssertionError as error:
            wrong += 1
            print(f"rank {group.rank}: {error}", flush=True)
        if name == "all_reduce_rms_norm" and got[0].numel():
            same = [torch.empty_like(got[0]) for _ in range(group.world)]
            dist.all_gather(same, got[0])
            wrong += not all(torch.equal(same[0], each) for each in same)
    group.check()
    return wrong


def others(group: Any) -> None:
    """The other collectives, validated and beside NCCL's."""
    names = ("all_gather_ranks", "all_to_all_ranks", "reduce_scatter_ranks", "all_reduce_rms_norm")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: opjit.get(name, "cuda"), names))
    wrong = [int(worst(compare_samples(name, group))) for name in names]
    if group.rank == 0:
        print(f"\nsamples that differ: {dict(zip(names, wrong, strict=True))}", flush=True)
    for kilobytes in (1, 32, 512, 8192, 32768):
        x = torch.randn(group.world, kilobytes * 256 // group.world, device="cuda")
        large = torch.empty(group.world * group.world, x.shape[1], device="cuda")
        small = torch.empty(1, x.shape[1], device="cuda")
        same = torch.empty_like(x)
        theirs: dict[str, Call] = {
            names[0]: partial(dist.all_gather_into_tensor, large, x),
            names[1]: partial(dist.all_to_all_single, same, x),
            names[2]: partial(dist.reduce_scatter_tensor, small, x),
        }
        cells = []
        for name, call in theirs.items():
            ours = graph_us(partial(getattr(torch.ops.opjit, name), x, group.name))
            cells.append(f"{name} {ours:.2f} (NCCL {graph_us(call):.2f})")
        if group.rank == 0:
            print(f"{kilobytes:6} KB: " + ", ".join(cells), flush=True)
    for rows in (1, 6, 32, 138):
        x = torch.randn(rows, 6144, device="cuda").to(torch.bfloat16)
        residual = torch.zeros_like(x)
        weight = torch.ones(6144, device="cuda", dtype=torch.bfloat16)

        def apart(x: torch.Tensor = x, residual: torch.Tensor = residual) -> None:
            dist.all_reduce(x)
            residual.add_(x)
            torch.nn.functional.rms_norm(residual, (6144,), weight)  # noqa: B023 - called at once

        def summed(x: torch.Tensor = x, residual: torch.Tensor = residual) -> None:
            torch.ops.opjit.all_reduce_ranks_(x, group.name)
            residual.add_(x)
            torch.nn.functional.rms_norm(residual, (6144,), weight)  # noqa: B023 - called at once

        fused = torch.ops.opjit.all_reduce_rms_norm
        ours = graph_us(partial(fused, x, residual, weight, group.name))
        x.zero_()
        nccl = graph_us(apart)
        separate = graph_us(summed)
        if group.rank == 0:
            print(
                f"all_reduce_rms_norm {rows} x 6144 bfloat16: {ours:.2f} us, "
                f"all_reduce_ranks_ and torch {separate:.2f}, NCCL and torch {nccl:.2f}"
            )


def overlap(group: Any) -> None:
    """The all-gather in a matrix product's launch, validated and beside the two one after the other."""
    opjit.add_path(
        resources.folder("kernels_c").parent / "examples" / "17_across_gpus" / "gather_multiply"
    )
    op = opjit.get("demo::gather_multiply", "cuda")
    for m, n, k in (
        (4096, 4096, 4096),
        (8192, 4096, 8192),
        (8192, 14336, 4096),
        (16384, 8192, 8192),
    ):
        x = torch.randint(-2, 3, (m // group.world, k), device="cuda").to(torch.bfloat16)
        weight = torch.randint(-2, 3, (n, k), device="cuda").to(torch.bfloat16)
        dist.broadcast(weight, 0)
        weight = weight.t()
        members = opjit.distributed.peers(bytes=2 * m * k, timeout=20)
        rows = torch.empty(m, k, device="cuda", dtype=torch.bfloat16)
        dist.all_gather_into_tensor(rows, x)
        for _ in range(20):
            same = torch.equal(op(x, weight, members.name), rows @ weight)
            assert worst(float(not same)) == 0, (m, n, k)

        def apart(x: torch.Tensor = x, rows: torch.Tensor = rows, weight: Any = weight) -> Any:
            dist.all_gather_into_tensor(rows, x)
            return rows @ weight

        def gathered(x: torch.Tensor = x, weight: Any = weight) -> Any:
            return torch.ops.opjit.all_gather_ranks(x, group.name) @ weight

        x.normal_()
        weight.normal_()
        times = [
            graph_us(call)
            for call in (
                partial(op, x, weight, members.name),
                apart,
                gathered,
                partial(torch.mm, rows, weight),
            )
        ]
        if group.rank == 0:
            print(
                f"gather_multiply {m} x {n} x {k} bfloat16: {times[0]:.0f} us, {times[1] / times[0]:.2f}x of NCCL and cuBLAS "
                f"({times[1]:.0f}), {times[2] / times[0]:.2f}x of all_gather_ranks and cuBLAS ({times[2]:.0f}); "
                f"cuBLAS alone {times[3]:.0f}",
                flush=True,
            )


def eager(kilobytes: int, group: Any, symmetric: Any) -> None:
    """Calls without a graph."""
    x = torch.randn(kilobytes * 256, device="cuda")
    zeros = torch.zeros_like(x)
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    shared = symmetric.empty(x.numel(), dtype=torch.float32, device=x.device)
    symmetric.rendezvous(shared, name)
    shared.zero_()
    symm_mem = torch.ops.symm_mem
    calls: dict[str, Call] = {
        "opjit": partial(torch.ops.opjit.all_reduce_ranks, x, group.name),
        "opjit, in place": partial(torch.ops.opjit.all_reduce_ranks_, zeros, group.name),
        "NCCL": partial(dist.all_reduce, zeros),
        "torch 1": partial(symm_mem.one_shot_all_reduce, shared, "sum", name),
        "torch 2": partial(symm_mem.two_shot_all_reduce_, shared, "sum", name),
    }
    times = {label: eager_us(call) for label, call in calls.items()}
    if group.rank == 0:
        print(f"eager, {kilobytes} KB: " + ", ".join(f"{k} {v:.1f} us" for k, v in times.items()))


def on_gpus(rank: int, world: int, port: int, shapes: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device)
    import torch.distributed._symmetric_memory as symmetric

    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    start = time.perf_counter()
    group = opjit.distributed.peers(timeout=20)
    rendezvous = time.perf_counter() - start
    ops = build()
    ping = ops.pop("PING")
    ops["opjit"] = torch.ops.opjit.all_reduce_ranks
    with torch.no_grad():
        start = time.perf_counter()
        wrong = validate(ops, group, shapes, "cuda")
        totals: list[Any] = [None] * world
        dist.all_gather_object(totals, wrong)
        if rank == 0:
            print(
                f"{world} x {torch.cuda.get_device_name()}, torch {torch.__version__}; rendezvous {rendezvous:.2f} s; "
                f"{shapes} shapes in {time.perf_counter() - start:.0f} s, calls with wrong bits on each rank: {totals}",
                flush=True,
            )
        x = torch.zeros(1, device="cuda")
        launch = graph_us(lambda: ping(x, group.name, 0))
        barriers = graph_us(lambda: ping(x, group.name, 101)) - graph_us(
            lambda: ping(x, group.name, 1)
        )
        if rank == 0:
            print(
                f"an empty launch {launch:.2f} us; a barrier between GPUs {barriers / 100:.2f} us"
            )
        groups = dict(nccl_groups())
        for dtype in (torch.float32, torch.bfloat16):
            header = ["KB", *ops, "in place", *groups, "torch 1", "torch 2", "ratio"]
            if rank == 0:
                print(f"\n{dtype}, graph\n" + " ".join(f"{word:>9}" for word in header), flush=True)
            for kilobytes in KILOBYTES:
                x = torch.randn(kilobytes * 1024 // dtype.itemsize, device="cuda").to(dtype)
                row: dict[str, float] = {}
                for way, op in ops.items():
                    if way == "WORDS" and kilobytes > 2048:
                        continue
                    row[way] = graph_us(partial(op, x, group.name))
                zeros = group.empty(x.shape, dtype)
                row["in place"] = graph_us(
                    partial(torch.ops.opjit.all_reduce_ranks_, zeros, group.name)
                )
                zeros = torch.zeros_like(x)
                for protocol, members in groups.items():
                    row[protocol] = graph_us(partial(dist.all_reduce, zeros, group=members))
                shared = symmetric.empty(x.numel(), dtype=dtype, device=device)
                symmetric.rendezvous(shared, name)
                shared.zero_()
                one = partial(torch.ops.symm_mem.one_shot_all_reduce, shared, "sum", name)
                two = partial(torch.ops.symm_mem.two_shot_all_reduce_, shared, "sum", name)
                for label, call in (("torch 1", one), ("torch 2", two)):
                    with suppress(RuntimeError):
                        row[label] = graph_us(call)
                theirs = min(row[key] for key in (*groups, "torch 1", "torch 2") if key in row)
                row["ratio"] = row["opjit"] / theirs
                if rank == 0:
                    words = [f"{row[key]:9.2f}" if key in row else f"{'':9}" for key in header[1:]]
                    print(f"{kilobytes:9} " + " ".join(words), flush=True)
        others(group)
        if torch.cuda.get_device_capability()[0] == 9:
            overlap(group)
        for kilobytes in (1, 64, 1024, 8192, 32768):
            eager(kilobytes, group, symmetric)
    group.check()
    dist.barrier()
    os._exit(0)


def on_cpus(rank: int, world: int, port: int, shapes: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    group = opjit.distributed.peers(device="cpu", bytes=4 << 20, timeout=60)
    ops = {"opjit": opjit.get("all_reduce_ranks", "cpu")}
    wrong = int(worst(validate(ops, group, shapes, "cpu")))
    if rank == 0:
        print(f"{world} CPU ranks; {shapes} shapes, calls with wrong bits: {wrong}", flush=True)
    for kilobytes in (1, 32, 1024):
        x = torch.randn(kilobytes * 256)
        mine = eager_us(partial(ops["opjit"], x, group.name), 50)
        gloo = eager_us(partial(dist.all_reduce, x.clone()), 50)
        if rank == 0:
            print(
                f"{kilobytes:6} KB: opjit {mine:8.1f} us, gloo {gloo:8.1f} us, ratio {mine / gloo:.3f}",
                flush=True,
            )
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shapes", type=int, default=600)
    parser.add_argument("--cpu", action="store_true")
    chosen = parser.parse_args()
    ranks = on_cpus if chosen.cpu else on_gpus
    autograd_part.make()  # as `opjit precompile` does
    port = 29500 + os.getpid() % 1000
    mp.spawn(  # type: ignore[attr-defined, no-untyped-call]
        ranks, (chosen.ranks, port, chosen.shapes), nprocs=chosen.ranks
    )


if __name__ == "__main__":
    main()
