"""Faults at every step: each file operation of a scenario fails, or ends the process, once. The result is right, or an error of opjit's
own; and the next process finds a cache that works.

    pytest -m stress tests/attacks"""

import errno
import itertools
import shutil
import signal
from pathlib import Path

import pytest

from opjit.cache import transfer
from opjit.errors import EntryError
from opjit.store import manifest
from opjit.store.entry import Entry, verify
from tests import helpers

pytestmark = [pytest.mark.stress, pytest.mark.timeout(3600)]

# Python reports each file operation before it begins. Faults are those of the cache and the remote, not of sources or opjit's own files.
HOOK = """
import os, sys, threading
from opjit.cache import transfer
from opjit.errors import OpjitError
EVENTS = {{"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.listdir", "os.scandir", "os.utime", "os.link",
          "os.truncate", "shutil.rmtree"}}
seen, threads = [], []
threading.excepthook = lambda failed: threads.append(repr(failed.exc_value))
def hook(event, arguments):
    if event not in EVENTS or not seen or not any(str(each).startswith({places}) for each in arguments):
        return
    seen.append(event)
    if len(seen) - 1 == {step}:
        if {fault} == "kill":
            os.kill(os.getpid(), 9)
        raise OSError({fault}, os.strerror({fault}), "the fault")
sys.addaudithook(hook)
warnings.simplefilter("ignore")
def run():
{scenario}
seen.append("begin")
try:
    print("result", run())
except OpjitError as error:
    print("error", type(error).__name__)
finally:
    count = len(seen) - 1
    seen.clear()
    print("steps", count)
print("threads", threads)
"""
PLUS = "    return opjit.get('keytest::plus', 'cpu')(torch.ones(1)).tolist()"
SCENARIOS = {
    "cold": PLUS,
    "warm": PLUS,
    "reload": "    opjit.get('keytest::plus', 'cpu')\n    Path({op!r}, 'plus.c').touch()\n"
    "    return opjit.reload('keytest::plus', 'cpu')(torch.ones(1)).tolist()",
    "push": "    transfer.push({remote!r}, sign=None)\n    return [2.0]",
    "pull": "    transfer.pull({remote!r})\n    return [2.0]",
    "prune": "    opjit.cache.prune(0)\n    return [2.0]",
}
_CACHED = {"warm", "reload", "push", "prune"}  # they begin with a built op


@pytest.mark.parametrize(
    "fault",
    [errno.EIO, errno.ENOSPC, errno.EACCES, "kill"],
    ids=["EIO", "ENOSPC", "EACCES", "kill"],
)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_fault_at_any_step_gives_the_right_result_or_an_error_of_opjit(
    entry: Entry, op: Path, tmp_path: Path, name: str, fault: int | str
) -> None:
    full = tmp_path / "full"
    root = tmp_path / "cache"
    remote = tmp_path / "remote"
    root.rename(full)
    shutil.copytree(full, root)
    transfer.push(remote.as_uri(), sign=None)
    remote.rename(tmp_path / "kept")
    scenario = SCENARIOS[name].format(op=str(op), remote=remote.as_uri())
    places = (str(root), str(remote))
    changes: dict[str, str | None] = {"OPJIT_CACHE": str(root), "OPJIT_TRUST": "unsigned"}
    for step in itertools.count(1):
        shutil.rmtree(root)
        if name in _CACHED:
            shutil.copytree(full, root)
        shutil.rmtree(remote, ignore_errors=True)
        if name == "pull":
            shutil.copytree(tmp_path / "kept", remote)
        done = helpers.ended(
            helpers.declare(op)
            + HOOK.format(step=step, fault=repr(fault), scenario=scenario, places=places),
            changes,
        )
        told = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
        where = f"{name}, step {step}: {done.stdout}{done.stderr}"
        if done.returncode != -signal.SIGKILL or fault != "kill":
            assert told.get("result", "[2.0]") == "[2.0]", where
            assert "result" in told or "error" in told, where
            assert told["threads"] == "[]", where
        again = helpers.ended(
            helpers.declare(op)
            + "print(opjit.get('keytest::plus', 'cpu')(torch.ones(1)).tolist())",
            changes,
        )
        assert again.stdout == "[2.0]\n", f"{where}, and then {again.stderr}"
        if "steps" in told and int(told["steps"]) < step:
            break


def test_no_flipped_bit_of_an_entry_is_loaded(entry: Entry) -> None:
    for path in (entry.folder / manifest.NAME, entry.library):
        content = bytearray(path.read_bytes())
        for at in range(0, len(content), 1 if path.name == manifest.NAME else 97):
            content[at] ^= 1 << at % 8
            path.write_bytes(content)
            try:
                _, described = verify(entry.folder, None)
            except (EntryError, OSError):
                pass
            else:  # what people read may change
                assert path.name == manifest.NAME
                assert described.key == entry.key
            content[at] ^= 1 << at % 8
        path.write_bytes(content)
    assert verify(entry.folder, None)[0] == entry
