"""The counts that processes leave when they end, and what opjit.cache.stats makes of them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from opjit import cache
from opjit.store import usage
from opjit.store.entry import Entry
from tests import helpers
from tests.helpers import GET, cache_command, fresh


def test_stats_adds_up_what_processes_asked_for(op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cache"
    monkeypatch.setenv("OPJIT_CACHE", str(root))
    ready = "import opjit.distributed; opjit.distributed.ready(['keytest::plus'], 'cpu')\n"
    for get in (GET, GET, ready):
        fresh(helpers.declare(op) + get)
    found = cache.stats()
    assert (found.entries, found.hits, found.misses, found.builds) == (1, 2, 1, 1)
    assert found.by_place == {"layer": 0, "store": 2, "remote": 0}
    assert found.built == next(root.rglob("*plus.so")).stat().st_size
    assert 0 < found.saved < 60
    assert found.since is not None
    assert abs(time.time() - found.since) < 600
    assert "hits        2 of 3 requests (2 in the store)" in cache_command("stats").output
    monkeypatch.setenv("OPJIT_LAYERS", str(root))
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "other"))
    fresh(helpers.declare(op) + GET, helpers.no_compiler(tmp_path))
    assert not (tmp_path / "other").exists(), "a cache is not made for the sake of a count"
    fresh(helpers.declare(op) + GET)
    assert cache.stats().by_place == {"layer": 1, "store": 0, "remote": 0}


def test_a_hit_writes_nothing_until_the_process_ends(entry: Entry, op: Path) -> None:
    line = Path(os.environ["OPJIT_CACHE"]) / "v1" / usage.NAME
    line.unlink(missing_ok=True)
    code = helpers.declare(op) + GET + f"print(Path({str(line)!r}).exists())\n"
    assert fresh(code).stdout.endswith("False\n")
    assert json.loads(line.read_text())["store"] == 1


def test_a_forked_child_counts_its_own_and_one_that_is_killed_counts_nothing(entry: Entry, op: Path) -> None:
    line = Path(os.environ["OPJIT_CACHE"]) / "v1" / usage.NAME
    line.unlink(missing_ok=True)
    code = helpers.declare(op) + GET + (
        "import os, signal, sys\nfrom opjit import request, wanted\n"
        "for end in (lambda: os._exit(0), lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: sys.exit(0)):\n"
        "    sys.stdout.flush()\n"
        "    if os.fork() == 0:\n"
        "        request.entry(registry.find('keytest::plus'), wanted.target_of('cpu', None))\n"
        "        end()\n"
        "    os.wait()\n"
    )
    fresh(code, flags=("-W", "ignore::DeprecationWarning"))
    assert [json.loads(text)["store"] for text in line.read_text().splitlines()] == [1, 1]


def test_damaged_counts_are_left_out(entry: Entry) -> None:
    line = Path(os.environ["OPJIT_CACHE"]) / "v1" / usage.NAME
    good = {"at": 1000, **dict.fromkeys(usage.FIELDS, 1)}
    damaged = [b"", b"{", b"[]", b"\xff\xfe", b"nul", b'{"at": 5}', json.dumps({**good, "hits": 1, "store": -1}).encode(),
               json.dumps({**good, "saved": float("nan")}).encode(), json.dumps({**good, "builds": "1"}).encode(), b"[" * 5000,
               json.dumps({**good, "builds": True}).encode(), json.dumps({**good, "builds": 10**400}).encode()]
    line.write_bytes(b"\n".join([json.dumps(good).encode(), *damaged, json.dumps({**good, "at": 900}).encode(), b'{"at": 1, "la']))
    assert (cache.stats().hits, cache.stats().builds, cache.stats().since) == (6, 2, 900)


@pytest.mark.parametrize("what", ["link", "folder", "pipe"])
def test_counts_that_cannot_be_kept_are_no_trouble(entry: Entry, tmp_path: Path, what: str) -> None:
    line = Path(os.environ["OPJIT_CACHE"]) / "v1" / usage.NAME
    line.unlink(missing_ok=True)
    (tmp_path / "precious").write_text("precious")
    if what == "link":
        line.symlink_to(tmp_path / "precious")
    elif what == "folder":
        line.mkdir()
    else:
        os.mkfifo(line)
    usage.append(line.parent, dict.fromkeys(usage.FIELDS, 1))
    assert (tmp_path / "precious").read_text() == "precious"
    assert cache.stats().hits == 0


def test_a_full_file_of_counts_starts_anew(entry: Entry) -> None:
    line = Path(os.environ["OPJIT_CACHE"]) / "v1" / usage.NAME
    line.write_bytes(b"\n" * usage.MAX_BYTES)
    usage.append(line.parent, dict.fromkeys(usage.FIELDS, 1))
    assert len(line.read_text().splitlines()) == 1
    assert cache.stats().hits == 3
