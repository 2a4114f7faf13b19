"""Kernels across CPU ranks: right sums, the same bits on all ranks, and an error that names the rank instead of a hang."""

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import opjit
import opjit.distributed
from opjit.errors import BadSetting
from tests import helpers

# Forks ranks that have imported torch and built the ops. `body` runs in each, and its output is the rank's last word.
PROGRAM = """
import ctypes, os, signal, sys, time, traceback
import torch
import torch.distributed as dist
import opjit, opjit.distributed
from opjit.catalog import registry
from opjit.distributed import peer_groups
from opjit.errors import OpjitError, PeerLost
torch.set_num_threads(1)
op, op_ = opjit.get("all_reduce_ranks", "cpu"), opjit.get("all_reduce_ranks_", "cpu")
opjit.get("copy_to_ranks", "cpu")
reference = registry.find("opjit::all_reduce_ranks").reference_function
def say(*words):  # in one write, so that lines of ranks do not mix
    os.write(1, (" ".join(map(str, words)) + os.linesep).encode())
{before}
children = []
for rank in range({world}):
    children.append(os.fork())
    if children[-1] == 0:
        code = 1
        try:
            dist.init_process_group("gloo", init_method="file://{store}", rank=rank, world_size={world})
            group = opjit.distributed.peers(device="cpu", bytes={bytes}, timeout={timeout})
            exec({body!r})
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
assert codes == {codes}, codes
"""
KILL = "time.sleep(0.1); os.kill(os.getpid(), signal.SIGKILL)"


def run(
    tmp_path: Path,
    body: str,
    world: int = 2,
    timeout: float = 60.0,
    bytes: int = 1 << 20,  # noqa: A002 - the parameter's name in peers()
    before: str = "",
    killed: int | None = None,
) -> str:
    """Run a text on each rank of a job; returns what the ranks printed."""
    codes = [-9 if rank == killed else 0 for rank in range(world)]
    return helpers.fresh(
        PROGRAM.format(
            body=textwrap.dedent(body),
            world=world,
            timeout=timeout,
            bytes=bytes,
            before=before,
            store=tmp_path / "store",
            codes=codes,
        )
    ).stdout


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_get_the_bits_of_the_sum_in_rank_order(tmp_path: Path, world: int) -> None:
    body = """
        torch.manual_seed(rank)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64):
            for size in (0, 1, 7, 513, 30_000, 200_001):
                x = (torch.randn(2, size) * 100).to(dtype)
                for given in (x, x[:, ::2], x.t()):
                    wanted = reference(given, group.name)
                    assert torch.equal(op(given, group.name), wanted), (dtype, size)
                    written = given.clone(memory_format=torch.preserve_format)
                    op_(written, group.name)
                    assert torch.equal(written, wanted), (dtype, size)
    """
    assert run(tmp_path, body, world, bytes=100_000) == ""


@pytest.mark.parametrize("world", [1, 3])
def test_a_tensor_of_the_group_is_added_in_place(tmp_path: Path, world: int) -> None:
    body = """
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for shape in ((), (0,), (5,), (3, 40_001)):
                x = group.empty(shape, dtype)
                assert x.shape == shape and x.dtype == dtype and not x.any()
                x.copy_((torch.randn(shape) * 100).to(dtype))
                for part in (x, x[1:] if x.dim() else x):
                    wanted = reference(part, group.name)
                    op_(part, group.name)
                    assert torch.equal(part, wanted), (dtype, shape)
                assert torch.equal(op(x, group.name), reference(x, group.name))
    """
    assert run(tmp_path, body, world) == ""


def test_ranks_that_make_other_tensors_of_the_group_are_told_so(tmp_path: Path) -> None:
    body = """
        try:
            group.empty((2 + rank,))
        except opjit.errors.BadSetting as error:
            assert "with the same arguments; shape and dtype are [((2,), torch.float32), ((3,)" in str(error), error
        x = group.empty((2,)).fill_(1)
        op_(x, group.name)
        assert x.tolist() == [2, 2]
        if rank == 0:
            os._exit(0)
        try:
            while True:
                op_(x, group.name)
        except RuntimeError as error:
            assert "PeerLost: rank 0 of group" in str(error), error
        assert x.shape == (2,)
        try:
            group.empty((2,))
        except PeerLost as error:
            assert error.ranks == (0,)
    """
    assert run(tmp_path, body) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["all_gather_ranks", "all_to_all_ranks", "reduce_scatter_ranks", "all_reduce_rms_norm"]
)
def test_collectives_equal_their_references_on_three_ranks(tmp_path: Path, name: str) -> None:
    body = """
        from opjit.testing.compare import assert_same
        from opjit.testing.samples import effects
        for sample in one.samples_on("cpu"):
            got = effects(one.overload, one, sample)
            assert_same(got, effects(one.reference_function, one, sample), sample)
            everywhere = [None] * group.world
            dist.all_gather_object(everywhere, got)
            if one.schema.name == "all_reduce_rms_norm":
                assert all(torch.equal(mine, theirs) for other in everywhere for mine, theirs in zip(got[:1], other))
    """
    before = f'opjit.get("{name}", "cpu")\none = registry.find("opjit::{name}")'
    assert run(tmp_path, body, world=3, before=before, bytes=100_000) == ""


def test_a_killed_rank_is_named_and_the_others_go_on_without_it(tmp_path: Path) -> None:
    body = f"""
        if rank == 1:
            {KILL}
        start = time.monotonic()
        try:
            while True:
                op(torch.ones(3), group.name)
        except RuntimeError as error:
            assert "PeerLost: rank 1 of group" in str(error), error
        try:
            opjit.distributed.check()
        except PeerLost as error:
            assert error.ranks == (1,), error
        assert time.monotonic() - start < 30
        left = dist.new_group([0, 2], use_local_synchronization=True)
        smaller = opjit.distributed.peers(left, device="cpu")
        assert op(torch.ones(3), smaller.name).tolist() == [2, 2, 2]
        smaller.check()
    """
    assert run(tmp_path, body, world=3, killed=1) == ""


def test_a_rank_that_does_not_come_in_time_is_named_with_the_op(tmp_path: Path) -> None:
    body = """
        if rank == 0:
            try:
                op(torch.ones(3), group.name)
            except RuntimeError as error:
                assert "did not come in time in opjit::all_reduce_ranks" in str(error), error
        dist.barrier()
        try:
            opjit.distributed.check(group.name)
        except PeerLost as error:
            say(error.group == group.name, error.ranks, error.op)
    """
    assert run(tmp_path, body, timeout=0.2) == "True (1,) opjit::all_reduce_ranks\n" * 2


@pytest.mark.parametrize(
    "call",
    ["op(torch.ones(3 + rank), group.name)", "(op, op_)[rank](torch.ones(3), group.name)"],
    ids=["sizes", "ops"],
)
def test_ranks_that_do_not_make_the_same_call_all_get_an_error(tmp_path: Path, call: str) -> None:
    body = f"""
        try:
            {call}
        except RuntimeError as error:
            assert "another op, other sizes" in str(error), error
            say("error")
        dist.barrier()
    """
    assert run(tmp_path, body) == "error\nerror\n"


def test_counts_wrap_around(tmp_path: Path) -> None:
    body = """
        memory = [*peer_groups._groups.values()][-1].memory
        ctypes.c_uint32.from_address(memory.count).value = 2**32 - 3
        for other in range(2):
            ctypes.c_uint64.from_address(memory.starts[rank] + 8 * other).value = 2**32 - 3
        dist.barrier()
        for call in range(10):
            assert op(torch.full((3,), float(call)), group.name).tolist() == [2.0 * call] * 3
        assert ctypes.c_uint32.from_address(memory.count).value == 7
    """
    assert run(tmp_path, body) == ""


def test_signals_and_waits_count_for_each_slot(tmp_path: Path) -> None:
    """A token goes around the ranks three times, each adds its own number."""
    source = """
        #include "opjit_peers.h"
        opjit_status turn_cpu(const opjit_tensor *x, const char *group, opjit_tensor *out)
        {
            opjit_peers p;
            OPJIT_TRY(opjit_peers_of(&p, group, 8));
            OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
            const int next = (p.rank + 1) % p.world, last = (p.rank + p.world - 1) % p.world;
            for (int round = 0; round < 3; round++) {
                if (p.rank > 0 || round > 0)
                    OPJIT_TRY(opjit_wait(&p, 5, last));
                float *token = (float *)p.buffer[p.rank];
                *(float *)p.buffer[next] = *token + *(const float *)x->data;
                opjit_signal(&p, 5, next);
            }
            if (p.rank == 0)
                OPJIT_TRY(opjit_wait(&p, 5, last));
            *(float *)out->data = *(float *)p.buffer[p.rank];
            OPJIT_BARRIER(&p);
            return OPJIT_OK;
        }
    """
    before = f'turn = opjit.inline("peertest::turn(Tensor x, str group) -> Tensor", c={textwrap.dedent(source)!r}, like="x")'
    before += '\nturn(torch.ones(1), opjit.distributed.peers(device="cpu").name)'
    body = """
        got = turn(torch.full((1,), float(rank + 1)), group.name)
        if rank == 0:
            assert got.item() == 3 * 6, got
    """
    assert run(tmp_path, body, world=3, before=before) == ""


def test_threads_of_a_rank_call_one_after_the_other(tmp_path: Path) -> None:
    body = """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(4) as pool:
            for got in pool.map(lambda _: op(torch.ones(5), group.name), range(100)):
                assert got.tolist() == [2] * 5
    """
    assert run(tmp_path, body) == ""


def test_ctrl_c_ends_a_call_behind_another_threads_call_that_waits_for_a_rank(
    tmp_path: Path,
) -> None:
    body = """
        import threading
        if rank == 0:
            got = []
            first = threading.Thread(target=lambda: got.append(op(torch.ones(3), group.name)))
            first.start()
            while not op_is_waiting(group):
                time.sleep(0.01)
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                try:
                    op(torch.ones(5), group.name)
                except RuntimeError as error:
                    assert "interrupted by Ctrl-C" in str(error), error
                    time.sleep(60)
            except KeyboardInterrupt:
                say("ended")
            dist.barrier()
            first.join()
            assert got[0].tolist() == [2] * 3
            assert op(torch.ones(5), group.name).tolist() == [2] * 5
        else:
            dist.barrier()
            op(torch.ones(3), group.name)
            op(torch.ones(5), group.name)
    """
    before = """
def op_is_waiting(group):
    memory = [*peer_groups._groups.values()][-1].memory
    return ctypes.c_uint32.from_address(memory.count).value > 0
"""
    assert run(tmp_path, body, before=before) == "ended\n"


def test_the_gradient_is_the_sum_of_the_ranks_gradients(tmp_path: Path) -> None:
    body = """
        x = torch.ones(3, requires_grad=True)
        (op(x, group.name) * (rank + 1)).sum().backward()
        assert x.grad.tolist() == [3, 3, 3], x.grad
    """
    assert run(tmp_path, body) == ""


# A tensor-parallel layer, with the same loss on all ranks.
TRAIN = """
    def layer(x, first, second):
        hidden = torch.relu(torch.ops.opjit.copy_to_ranks(x, group.name) @ first)
        return torch.ops.opjit.all_reduce_ranks(hidden @ second, group.name, sum_gradients=False)

    torch.manual_seed(0)
    x, first, second = torch.randn(4, 6), torch.randn(6, 8), torch.randn(8, 5)
    whole = [each.clone().requires_grad_() for each in (x, first, second)]
    (torch.relu(whole[0] @ whole[1]) @ whole[2]).square().sum().backward()
    columns = slice(rank * 4, rank * 4 + 4)
    for call in {calls}:
        parts = [each.clone().requires_grad_() for each in (x, first[:, columns], second[columns])]
        call(*parts).square().sum().backward()
        for part, expected in zip(parts, (whole[0].grad, whole[1].grad[:, columns], whole[2].grad[columns])):
            torch.testing.assert_close(part.grad, expected)
"""


def test_a_tensor_parallel_layer_has_the_gradients_of_one_process(tmp_path: Path) -> None:
    assert run(tmp_path, TRAIN.format(calls="[layer]")) == ""


@pytest.mark.slow
def test_a_compiled_tensor_parallel_layer_has_the_gradients_of_one_process(tmp_path: Path) -> None:
    assert run(tmp_path, TRAIN.format(calls="[torch.compile(layer, fullgraph=True)]")) == ""


def test_ranks_with_other_arguments_are_told_so(tmp_path: Path) -> None:
    body = """
        try:
            opjit.distributed.peers(device="cpu", bytes=(2 << 20) + rank)
        except OpjitError as error:
            say(type(error).__name__, "same arguments" in str(error))
    """
    assert run(tmp_path, body) == "BadSetting True\n" * 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("bytes=(1 << 19) << rank", "bytes"),
        ("bytes=(1 << 20) << rank", "bytes"),
        ("timeout=30 + rank", "timeout"),
        ("bytes=(-1, 1)[rank]", "bytes"),
    ],
)
def test_ranks_with_other_arguments_are_told_so_where_a_known_group_suffices(
    arguments: str, named: str, tmp_path: Path
) -> None:
    body = f"""
        try:
            opjit.distributed.peers(device="cpu", {arguments})
        except OpjitError as error:
            say(type(error).__name__, "same arguments" in str(error), "{named}" in str(error))
        dist.barrier()
    """
    assert run(tmp_path, body) == "BadSetting True True\n" * 2


def test_a_known_group_takes_the_time_limit_of_a_later_call(tmp_path: Path) -> None:
    body = """
        assert opjit.distributed.peers(device="cpu", timeout=0.2).timeout == 0.2
        again = opjit.distributed.peers(device="cpu")
        assert again == opjit.distributed.peers(device="cpu", timeout=0.2), again
        if rank == 0:
            try:
                op(torch.ones(3), group.name)
            except RuntimeError as error:
                assert "did not come in time" in str(error), error
                say("late")
        dist.barrier()
    """
    assert run(tmp_path, body) == "late\n"


@pytest.mark.parametrize("size", [-5, 0.5, "1", True])
def test_the_size_of_a_buffer_is_a_whole_number(size: Any) -> None:
    with pytest.raises(BadSetting, match="expected a number of bytes, 0 or more"):
        opjit.distributed.peers(device="cpu", bytes=size)


def test_a_larger_group_takes_the_place_of_a_smaller_one() -> None:
    one = opjit.distributed.peers(device="cpu")
    assert opjit.distributed.peers(device="cpu", bytes=1) is one
    larger = opjit.distributed.peers(device="cpu", bytes=one.bytes + 1)
    assert (larger.name, larger.bytes) == (one.name, one.bytes + 1)
    assert torch.equal(
        opjit.get("all_reduce_ranks", "cpu")(torch.ones(3), larger.name), torch.ones(3)
    )


def test_an_unknown_group_is_answered_with_the_call_that_makes_it() -> None:
    with pytest.raises(
        RuntimeError, match=r"no group nobody of CPU ranks; call opjit\.distributed\.peers"
    ):
        opjit.get("all_reduce_ranks", "cpu")(torch.ones(3), "nobody")


@pytest.mark.parametrize("timeout", ["0", "-1", "soon", "nan"])
def test_a_time_limit_is_seconds_above_0(timeout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPJIT_PEER_TIMEOUT", timeout)
    with pytest.raises(BadSetting, match="expected seconds above 0"):
        opjit.distributed.peers(device="cpu")


@pytest.mark.slow
def test_the_command_tests_an_op_on_several_ranks() -> None:
    done = helpers.command("test", "reduce_scatter_ranks", "--ranks", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    # Twelve more are empty, and test nothing.
    assert "opjit::reduce_scatter_ranks on 2 ranks (cpu): ok, 48 samples" in done.stdout


@pytest.mark.slow
def test_the_command_names_the_rank_with_a_wrong_result(tmp_path: Path) -> None:
    """An op that forgets the other ranks is wrong on each of them, in one line."""
    folder = tmp_path / "forgets"
    folder.mkdir()
    (folder / "op.py").write_text(
        textwrap.dedent(
            """
            import torch
            import opjit, opjit.distributed

            @opjit.op("peertest::forgets(Tensor x, str group) -> Tensor")
            def forgets(x, group):
                return x.new_empty(x.shape)

            @forgets.reference
            def reference(x, group):
                return sum(opjit.distributed.gathered(x, group))

            @forgets.samples
            def samples(device):
                group = opjit.distributed.peers(device=device)
                yield (torch.ones(3, device=device), group.name), {}
            """
        )
    )
    (folder / "forgets.c").write_text(
        textwrap.dedent(
            """
            #include "opjit_peers.h"
            opjit_status forgets_cpu(const opjit_tensor *x, const char *group, opjit_tensor *out)
            {
                opjit_peers p;
                OPJIT_TRY(opjit_peers_of(&p, group, 0));
                OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
                memcpy(out->data, x->data, (size_t)x->numel * 4);
                return OPJIT_OK;
            }
            """
        )
    )
    done = helpers.command("test", folder, "--ranks", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED" in done.stdout
    assert "rank 0, 1: got 1, expected 2 " in done.stdout
