"""The first lines of a training script on a cluster: every rank gets its ops before the first step, and each op is built at most once.

    torchrun --nproc-per-node 2 examples/11_cluster/train.py
    sbatch examples/11_cluster/train.sbatch    # srun alone doesn't set RANK, which init_process_group needs
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import opjit.distributed


def main() -> None:
    # begin: ready
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    allreduce, = opjit.distributed.ready(["allreduce"], device)  # before the process group or after it, as you like

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    if device is not None and device.type != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    part = torch.full((1000,), float(rank + 1), device=device)
    total = allreduce(part)  # opjit's op sums a tensor on this rank ...
    dist.all_reduce(total)  # ... and torch sums over the ranks
    assert total.item() == 1000 * size * (size + 1) / 2
    # end: ready
    print(f"rank {rank} of {size}: the sum of all is {total.item():.0f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
