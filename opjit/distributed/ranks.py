"""The rank of this process in a job, and the address of the job's store, from a process group or
from the launcher's variables.
"""

import os
import re
import sys
from typing import Any, NamedTuple

from opjit.errors import OpjitError

_PORT = 29500  # torch's default


class Rank(NamedTuple):
    number: int
    size: int  # how many ranks the job has
    leader: bool  # it acts for its node: the node's first rank, or every rank if none is known to be the first
    one_node: bool  # all ranks are known to be on one node
    address: tuple[str, int] | None  # host and port of the job's store, if known
    agent_store: bool  # torchrun hosts the store; otherwise rank 0 does
    restarts: int  # how often torchrun has restarted the ranks
    in_group: bool  # a process group exists

    @property
    def needs_store(self) -> bool:
        """Whether the ranks coordinate through a store; without an address, ranks of one node rely on its locks."""
        return self.size > 1 and (self.in_group or self.address is not None or not self.one_node)


def current() -> Rank | None:
    """Return this process's rank from its process group or, without one, from the launcher's
    variables.

    Returns None if the process is not part of a job, and raises OpjitError if the variables are
    invalid.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    in_group = (
        distributed is not None and distributed.is_available() and distributed.is_initialized()
    )
    # Only srun sets the step's variables: Slurm's batch script has a SLURM_PROCID too, but is not a rank.
    of_step = _pair("SLURM_PROCID", "SLURM_NTASKS") if "SLURM_STEP_ID" in os.environ else None
    pair = (
        (distributed.get_rank(), distributed.get_world_size())
        if in_group
        else _pair("RANK", "WORLD_SIZE")
        or _pair("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
        or _pair("PMI_RANK", "PMI_SIZE")
        or _pair("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
        or of_step
    )
    if pair is None:
        return None
    number, size = pair
    if not 0 <= number < size:
        raise OpjitError(
            f"expected a rank from 0 to {size - 1}, but the launcher's variables contain rank "
            f"{number} of {size} ranks; check how the job is started"
        )
    local = _first("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    local_size = _first("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    one_node = (
        local_size == size if local_size is not None else _number("SLURM_STEP_NUM_NODES") == 1
    )
    return Rank(
        number,
        size,
        local in (0, None),
        one_node or size == 1,
        _address(),
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        _number("TORCHELASTIC_RESTART_COUNT") or 0,
        in_group,
    )


def _pair(rank: str, size: str) -> tuple[int, int] | None:
    number = _number(rank)
    count = _number(size)
    return None if number is None or count is None else (number, count)


def _address() -> tuple[str, int] | None:
    """MASTER_ADDR and MASTER_PORT; under Slurm the step's first node, and a port derived from the job and the step."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or ""
    host = (
        os.environ.get("MASTER_ADDR")
        or first_node(nodes)
        or os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    )
    if not host:
        return None
    port = _number("MASTER_PORT")
    job = _number("SLURM_JOB_ID")
    if port is None:
        # Below 32768, because Linux assigns ports from there.
        port = (
            _PORT if job is None else 10000 + (job * 31 + (_number("SLURM_STEP_ID") or 0)) % 20000
        )
    return host, port


def first_node(nodes: str) -> str:
    """Return the first node of a Slurm node list: ``gpu007`` for ``gpu[007-012,15],login1``."""
    name = re.match(r"[^,\[]*", nodes)
    number = re.match(r"[^,\[]*\[([^\-,\]]+)[^\]]*\]([^,\[]*)", nodes)
    return "" if name is None else name[0] + (number[1] + number[2] if number else "")


def _first(*names: str) -> int | None:
    return next((number for number in map(_number, names) if number is not None), None)


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise OpjitError(
            f"expected a number in {name}, which torchrun, mpirun and srun set, got {text!r}; "
            "unset it if this process is not part of a job"
        )
    return int(text)
