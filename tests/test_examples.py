"""The examples run as their READMEs say, each in a process of its own."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import opjit
from opjit import backends
from opjit.backends.cpu import Cpu
from opjit.catalog import registry
from opjit.errors import NoKernel
from opjit.recipe import toolchain
from tests import helpers
from tests.helpers import ROOT, example
from tests.tensors import DEVICES


@pytest.mark.slow
def test_the_tutorials_op_in_c_and_in_cpp() -> None:
    """compare.py itself stops unless both sides' sums are torch's."""
    printed = example("07_from_cpp/compare.py")
    gains = {
        row[:22].strip(): float(row.split()[-1].rstrip("x")) for row in printed.splitlines()[2:]
    }
    assert list(gains) == ["build", "library", "call, 2^3 elements", "call, 2^24 elements"]
    assert gains["build"] > 10
    assert gains["library"] > 2


@pytest.mark.slow
def test_the_tutorials_op_in_a_package(tmp_path: Path) -> None:
    """examples/07_from_cpp/run.cpp is compiled in tests/library/test_without_python.py."""
    # torch warns.
    printed = example("07_from_cpp/package.py", str(tmp_path / "all_reduce.pt2"), flags=())
    assert printed == f"{tmp_path / 'all_reduce.pt2'} tensor([3.])\n"


class Toy(Cpu):
    """A backend like the example's, without its device."""

    name = "toy"
    suffix = ".toy.c"


@pytest.mark.slow
def test_a_device_of_ones_own_runs_add_custom_with_autograd() -> None:
    printed = example("09_own_device/example.py")
    assert "device='toy:0'" in printed
    assert "kernels launched on the stream: 1\nthe same as torch.add on the CPU" in printed
    assert "a product under autocast: torch.bfloat16" in printed


@pytest.mark.slow
def test_a_network_trains_with_the_layer_from_caffe() -> None:
    errors = [
        float(line.split()[-1])
        for line in example("06_from_caffe/train.py").splitlines()
        if line.startswith("step")
    ]
    assert errors[-1] < 0.1 * errors[0]


@pytest.mark.slow
def test_the_device_has_what_its_readme_says() -> None:
    """Also what torch takes from C++ only."""
    done = helpers.fresh(f"""
        import sys, torch
        sys.path.insert(0, {str(ROOT / "examples/09_own_device")!r})
        import toy_device
        installed = toy_device.install()
        model, scaler = torch.nn.Linear(4, 4).toy(), torch.amp.GradScaler("toy")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.autocast("toy", dtype=torch.float16):
            loss = model(torch.randn(2, 4, device="toy")).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        state = torch.toy.get_rng_state()
        numbers = torch.rand(2, device="toy").tolist()
        torch.toy.set_rng_state(state)
        again = torch.rand(2, device="toy").tolist()
        print(loss.is_toy, torch.toy.device_count(), torch.accelerator.current_accelerator(), again == numbers)
        try:
            torch.Generator(device="toy")
        except NotImplementedError as error:
            print("getNewGenerator" in str(error))
    """)
    assert done.stdout == "True 1 toy True\nTrue\n"


def test_a_backend_brings_kernels_for_ops_that_do_not_know_of_it(tmp_path: Path) -> None:
    """The op's own folder is looked into first: its author knows best. Such a kernel is of one op, not of all ops of its folder."""
    backend = Toy()
    op = registry.find("allreduce")
    with pytest.raises(
        NoKernel, match=rf"no kernel for toy: expected allreduce\.toy\.c in {op.folder}$"
    ):
        op.declaration.source(backend)
    backend.kernels = tmp_path
    with pytest.raises(
        NoKernel,
        match=rf"expected allreduce\.toy\.c in {op.folder}, or {tmp_path}/opjit/allreduce\.toy\.c$",
    ):
        op.declaration.source(backend)
    own = tmp_path / "opjit" / "allreduce.toy.c"
    own.parent.mkdir()
    own.touch()
    assert op.declaration.source(backend) == own
    own.rename(own.with_name("add_custom.toy.c"))
    assert registry.find("add_custom").declaration.source(backend).parent == own.parent
    with pytest.raises(NoKernel):
        registry.find("add_custom_backward").declaration.source(backend)
    backend.suffix = ".c"
    own.with_name("allreduce.c").touch()
    assert op.declaration.source(backend) == op.folder / "allreduce.c"
    assert op.declaration.source(backends.for_device("cpu")) == op.folder / "allreduce.c"


@pytest.mark.slow
def test_a_training_script_runs_under_torchrun_with_two_ranks(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(ROOT / "examples/11_cluster/train.py"),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OPJIT_CACHE": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    # Both write to one pipe: their lines may run into each other.
    assert sorted(re.findall(r"rank \d of 2: the sum of all is 3000", done.stdout)) == [
        f"rank {rank} of 2: the sum of all is 3000" for rank in range(2)
    ]
    assert "Warning" not in done.stderr


def test_a_library_serves_a_process_without_opjit(tmp_path: Path) -> None:
    """As for a C++ program: it has the schema, opens the library, and calls opjit_register()."""
    library = helpers.command(
        "get", "tensor_negate", "--device", "cpu", "--build-directory", tmp_path
    ).stdout.strip()
    program = (
        f"import ctypes, sys, torch; torch.library.define('opjit::tensor_negate', '(Tensor x) -> Tensor')\n"
        f"assert ctypes.CDLL({library!r}).opjit_register() == 0\n"
        "print(torch.ops.opjit.tensor_negate(torch.arange(3.0)), 'opjit' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "tensor([-0., -1., -2.]) False\n", done.stderr


def test_the_fused_kernel_is_right(device: str) -> None:
    [op] = opjit.add_path(ROOT / "examples/04_rms_norm_rope")
    for sample in op.samples_on(device):
        torch.testing.assert_close(
            op(*sample.args), op.reference_function(*sample.args), rtol=1e-5, atol=1e-5
        )


def test_the_first_cuda_kernels_of_the_course_are_right(cuda_device: str) -> None:
    source = (ROOT / "examples/02_first_cuda_op/scale.cu").read_text(encoding="utf-8")
    scale = opjit.inline("course::scale(Tensor x, float a) -> Tensor", cuda=source, like="x")
    x = torch.arange(35.0, device=cuda_device).reshape(5, 7)
    for view in (x, x.t(), x[:, ::2], x[0, 0], x[:0]):
        assert torch.equal(scale(view, 2.5), 2.5 * view)
    [all_reduce] = opjit.add_path(ROOT / "examples/07_from_cpp/c")
    for n in (0, 1, 33, 5000):
        numbers = torch.arange(n, dtype=torch.int32, device=cuda_device)
        assert all_reduce(numbers).tolist() == [n * (n - 1) // 2]


def test_the_first_step_of_the_matrix_kernel_is_right_and_refuses_other_sizes(
    cuda_device: str,
) -> None:
    opjit.add_path(ROOT / "examples/19_matrix_kernel/steps")
    step = torch.ops.demo.step1
    x = torch.arange(8.0 * 5, device=cuda_device).remainder(7).reshape(8, 5).bfloat16()
    weight = torch.arange(32.0 * 5, device=cuda_device).remainder(5).reshape(32, 5).bfloat16()
    assert torch.equal(step(x, weight.t()).float(), x.float() @ weight.t().float())
    with pytest.raises(
        RuntimeError, match="expected multiples of M 8, N 32 and K 1, got M 7, N 32 and K 5"
    ):
        step(x[:7], weight.t())
    with pytest.raises(RuntimeError, match=r"transpose of a contiguous tensor.*weight\.t\(\)"):
        step(x, weight.t().contiguous())


@pytest.mark.slow
def test_the_steps_of_the_matrix_kernel_are_emulated_or_need_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU runs the steps")
    printed = example("19_matrix_kernel/use.py", changes={"OPJIT_EMULATE": "1"}, flags=())
    ways = [line.partition(": ")[2] for line in printed.splitlines()]
    assert len(ways) == 7
    assert ways[:2] == ["the same results as torch"] * 2
    assert {way.partition(",")[0] for way in ways[2:]} <= {ways[0], "needs a GPU"}


@pytest.mark.gpu
def test_the_steps_of_the_matrix_kernel_are_right_on_a_gpu() -> None:
    ways = [line.partition(": ")[2] for line in example("19_matrix_kernel/use.py").splitlines()]
    of_hopper = (
        ways[0]
        if torch.cuda.get_device_capability()[0] == 9
        else "needs a GPU of compute capability 9.0"
    )
    assert ways == [ways[0]] * 4 + [of_hopper] * 2 + [ways[0]]
    assert ways[0] == "the same results as torch"


@pytest.mark.slow
@pytest.mark.skipif(
    toolchain.find_nvcc(None) is None and toolchain.find_nvrtc("", None) is None,
    reason="no compiler for CUDA",
)
def test_the_steps_of_the_matrix_kernel_are_built_without_a_gpu() -> None:
    folder = ROOT / "examples/19_matrix_kernel/steps"
    done = helpers.command("get", folder, "--arch", "sm_80,sm_90", "--device", "cuda")
    built = re.findall(r"demo\.(step\d)/(sm_\w+)\.", done.stdout)
    assert sorted(built) == sorted(
        (f"step{step}", arch)
        for step in range(1, 7)
        for arch in ("sm_80", "sm_90a" if step >= 5 else "sm_90")
    )


def drawing(device: str) -> tuple[torch.Tensor, dict[str, Callable[[torch.Tensor], torch.Tensor]]]:
    """Logits, and calls of the course's two random ops."""
    for folder in ("14_dropout/dropout", "15_top_k/sample_top_k"):
        opjit.add_path(ROOT / "examples" / folder)
    rows = 4 if helpers.is_emulated() else 64
    x = torch.randn(rows, 100, generator=torch.Generator().manual_seed(1)).to(device)
    return x, {
        "dropout": lambda x: torch.ops.demo.dropout(x, 0.5)[0],
        "sample_top_k": lambda x: torch.ops.demo.sample_top_k(x, 20),
    }


@pytest.mark.parametrize("name", ["dropout", "sample_top_k"])
def test_a_random_op_of_the_course_follows_torch_s_seeds(device: str, name: str) -> None:
    x, calls = drawing(device)
    draw = calls[name]

    def step(x: torch.Tensor) -> torch.Tensor:
        drawn = draw(x)
        return drawn if drawn.is_floating_point() else x.gather(-1, drawn[:, None])

    torch.manual_seed(1)
    first = draw(x)
    with torch.random.fork_rng():
        inside = draw(x)
    second = draw(x)
    assert torch.equal(inside, second)
    assert not torch.equal(first, second)
    gradients: list[torch.Tensor] = []
    for run in (step, functools.partial(checkpoint, step, use_reentrant=False)):
        torch.manual_seed(1)
        gradients += torch.autograd.grad(run(leaf := x.clone().requires_grad_()).sum(), leaf)
        assert torch.equal(draw(x), second)
    assert torch.equal(*gradients)
    assert gradients[0].count_nonzero() == (
        first.count_nonzero() if first.is_floating_point() else len(x)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dropout", "sample_top_k"])
def test_a_random_op_of_the_course_draws_anew_in_each_replay_of_a_graph_as_eager_calls_do(
    name: str,
) -> None:
    x, calls = drawing("cuda")
    calls[name](x)  # loaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = calls[name](x)
    for _ in range(2):
        torch.manual_seed(1)
        eager = [calls[name](x), calls[name](x)]
        assert not torch.equal(*eager)
        torch.manual_seed(1)
        for expected in eager:
            graph.replay()
            assert torch.equal(drawn, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_come_as_often_as_softmax_says_and_only_from_the_largest(device: str) -> None:
    x, _ = drawing(device)
    sample = torch.ops.demo.sample_top_k
    torch.manual_seed(1)
    got = torch.bincount(sample(x[0].expand(100_000, 100), 5, 0.5), minlength=100) / 100_000
    largest = x[0].topk(5)
    expected = torch.zeros_like(got).scatter(0, largest.indices, (largest.values / 0.5).softmax(0))
    torch.testing.assert_close(got, expected, rtol=0, atol=0.01)  # six standard deviations
    assert not got[expected == 0].any()
    assert torch.equal(sample(x.T, 1), x.T.argmax(-1))
    assert set(sample(x.new_tensor([1.0, 5.0, 5.0, 0.0]).expand(100, 4), 1).tolist()) == {1, 2}
    with pytest.raises(RuntimeError, match="k is from 1 to the 100 logits of a row, not 101"):
        sample(x, 101)


@pytest.mark.slow
def test_the_fused_kernel_is_compared_with_torch_compile() -> None:
    # torch.compile warns of torch's own code.
    printed = example("04_rms_norm_rope/compare.py", flags=())
    assert [len(line.split()) for line in printed.splitlines()[2:]] == [7, 7, 7]


def test_a_library_for_any_program_is_called_without_torch() -> None:
    example = ROOT / "examples/13_any_library/build_and_call.py"
    code = example.read_text(encoding="utf-8").replace("__file__", repr(str(example)))
    ctypes, torch_imported, tvm_ffi = helpers.fresh(code, cold=True).stdout.splitlines()
    assert (ctypes, torch_imported) == ("ctypes: 42", "torch imported: False")
    assert tvm_ffi == "tvm-ffi: 42" or "skipped" in tvm_ffi


@pytest.mark.parametrize(
    "script", ["flashinfer_modules.py", "sglang_modules.py", "deepspeed_op.py"]
)
def test_another_project_s_builder_is_replaced_only_where_it_is_installed(script: str) -> None:
    if any(map(importlib.util.find_spec, ("flashinfer", "sglang", "deepspeed"))):
        pytest.skip("one of the projects is installed, and its modules take minutes to build")
    assert example(f"13_any_library/{script}").startswith("skipped, because ")


@pytest.mark.slow
def test_judges_on_a_ray_cluster_agree_with_a_local_judge_and_outlive_a_node(
    tmp_path: Path,
) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install ray")
    helpers.fresh(
        f"""
        import asyncio, sys
        from pathlib import Path

        sys.path.insert(0, {str(ROOT / "examples/12_judge")!r})
        import ray
        from ray.cluster_utils import Cluster
        from ray_pool import judge_all
        from tune import C

        import opjit

        task = {str(ROOT / "examples/12_judge")!r}
        kernels = {{f"{{n}} lanes": C % {{"lanes": n}} for n in range(1, 9)}}
        kernels["wrong"] = kernels["8 lanes"].replace("sums[0] += from[i]", "sums[0] += 0")
        kernels["broken"] = kernels["8 lanes"].replace("float sum = 0;", "")

        async def local():
            async with opjit.judge.Judge(task, seed=7) as judge:
                found = [await judge(text, name) for name, text in kernels.items()]
            return dict(zip(kernels, found))

        async def on_cluster(cluster, lost):
            judging = asyncio.create_task(judge_all(kernels, task, 7))
            staging = Path(opjit.cache.path(), "v2/staging")
            while not (staging.is_dir() and list(staging.iterdir())):  # until nodes compile kernels
                await asyncio.sleep(0.05)
            await asyncio.get_running_loop().run_in_executor(None, cluster.remove_node, lost)
            return await judging

        def words(verdicts):  # two nodes on one machine disturb each other's clocks
            return {{name: each.verdict.replace("noisy", "correct") for name, each in verdicts.items()}}

        cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 1}})
        lost = cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address)
        assert len(ray.nodes()) == 2
        found = words(asyncio.run(on_cluster(cluster, lost)))
        assert sum(node["Alive"] for node in ray.nodes()) == 1
        ray.shutdown()
        cluster.shutdown()
        assert found == words(asyncio.run(local())), found
        assert {{*found.values()}} == {{"correct", "wrong", "compile"}}, found
        """,
        {"OPJIT_CACHE": str(tmp_path / "cache")},
    )
