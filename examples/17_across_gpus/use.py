"""A kernel across ranks: `python examples/17_across_gpus/use.py` starts two CPU ranks, or `torchrun --nproc-per-node=2` two GPUs."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import opjit
import opjit.distributed

opjit.add_path(Path(__file__).parent / "largest")


# begin: train
def layer(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, group: str) -> torch.Tensor:
    """Each rank has some columns of the first weight, and the rows of the second that belong to them."""
    hidden = torch.relu(torch.ops.opjit.copy_to_ranks(x, group) @ first)
    return torch.ops.opjit.all_reduce_ranks(hidden @ second, group, sum_gradients=False)


def train(group: opjit.distributed.Peers) -> None:
    torch.manual_seed(0)
    x, first, second = (torch.randn(size, device=group.device) for size in ((4, 6), (6, 8), (8, 5)))
    whole = [each.clone().requires_grad_() for each in (x, first, second)]
    (torch.relu(whole[0] @ whole[1]) @ whole[2]).square().sum().backward()

    own = slice(group.rank * 8 // group.world, (group.rank + 1) * 8 // group.world)
    parts = [each.clone().requires_grad_() for each in (x, first[:, own], second[own])]
    layer(*parts, group.name).square().sum().backward()
    expected = whole[0].grad, whole[1].grad[:, own], whole[2].grad[own]
    for part, gradient in zip(parts, expected, strict=True):
        torch.testing.assert_close(part.grad, gradient)
# end: train


def on_a_rank(device: str) -> None:
    # begin: use
    group = opjit.distributed.peers(device=device, bytes=1 << 20, timeout=30)
    x = torch.arange(4.0, device=device) * (1 if group.rank else -1)
    assert torch.ops.demo.largest(x, group.name).tolist() == [0, 1, 2, 3]

    total = torch.ops.opjit.all_reduce_ranks(x, group.name)
    assert torch.equal(total, torch.zeros(4, device=device))
    group.check()  # raises PeerLost if a rank was lost
    # end: use
    # begin: empty
    x = group.empty((4, 1024), torch.bfloat16)  # on every rank
    x.fill_(group.rank + 1)
    torch.ops.opjit.all_reduce_ranks_(x, group.name)
    assert (x == 3).all()
    # end: empty
    train(group)


def cpu_rank(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    on_a_rank("cpu")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    if "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        on_a_rank("cuda")
        dist.destroy_process_group()
        return
    opjit.get("demo::largest", "cpu")
    opjit.get("all_reduce_ranks", "cpu")
    opjit.get("all_reduce_ranks_", "cpu")
    opjit.get("copy_to_ranks", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(cpu_rank, (f"{folder}/store",), nprocs=2)
    print("both ranks have the largest elements, the sum, and the gradients of one process")


if __name__ == "__main__":
    main()
