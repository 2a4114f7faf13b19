"""The semantics of NFS, without a server: two nodes with one store get a working op each, whatever the filesystem answers."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import helpers
from tests.helpers import entries, good

pytestmark = pytest.mark.slow
NODE = """
import os, sys
from opjit.store import prune
from opjit.store.store import Store, default_root
op = opjit.get("keytest::plus", "cpu")
print(op(torch.ones(2)).tolist(), flush=True)
if sys.argv[1] == "prune":
    prune._FRESH = 0.0
    prune.prune(Store(default_root()), 1)
"""


@pytest.fixture(scope="module")
def preload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("nfs") / "nfs.so"
    subprocess.run(
        [
            "gcc",
            "-shared",
            "-fPIC",
            "-O1",
            "-o",
            library,
            Path(__file__).with_name("nfs.c"),
            "-ldl",
        ],
        check=True,
    )
    return library


def node(
    name: str, op: Path, here: Path, task: str, changes: dict[str, str]
) -> subprocess.Popen[str]:
    """Start a node: a process with locks, and where the machine allows a host name, of its own."""
    locks = here.parent / name
    locks.mkdir(exist_ok=True)
    command = [sys.executable, "-c", helpers.declare(op) + NODE, task]
    if (
        os.geteuid() == 0
        and shutil.which("unshare")
        and subprocess.run(["unshare", "--uts", "true"], check=False).returncode == 0
    ):
        command = ["unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', name, *command]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OPJIT_CACHE": str(here), "TMPDIR": str(locks), **changes},
    )


def ended(process: subprocess.Popen[str]) -> str:
    """Return what a node printed. It must end well, with warnings of the cache at most."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    return out


@pytest.mark.parametrize("fault", ["estale", "eio", "enolck", "late"])
def test_two_nodes_work_whatever_the_filesystem_answers_and_the_store_has_no_half_entry(
    fault: str, op: Path, here: Path, preload: Path
) -> None:
    faulty = {"LD_PRELOAD": str(preload), "NFS_ROOT": str(here), "NFS_FAULT": fault}
    for first, second in (({}, faulty), (faulty, faulty)):  # beside a sound node, then both at once
        shutil.rmtree(here, ignore_errors=True)
        nodes = [node("one", op, here, "get", first)]
        if not first:
            # The second begins as the entry appears.
            helpers.until(lambda: bool(entries(here)), process=nodes[0])
        nodes.append(node("two", op, here, "get", second))
        assert [ended(each) for each in nodes] == ["[2.0, 2.0]\n"] * 2
        good(here)


@pytest.mark.parametrize("fault", ["estale", "eio", "late"])
def test_a_node_that_prunes_takes_nothing_from_one_that_works(
    fault: str, op: Path, here: Path, preload: Path
) -> None:
    faulty = {"LD_PRELOAD": str(preload), "NFS_ROOT": str(here), "NFS_FAULT": fault}
    started = time.monotonic()
    nodes = [node("one", op, here, "prune", faulty), node("two", op, here, "get", faulty)]
    assert [ended(each) for each in nodes] == ["[2.0, 2.0]\n"] * 2
    assert time.monotonic() - started < 300
    good(here)
