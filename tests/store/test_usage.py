"""The counts that processes leave when they end, and what opjit.cache.stats makes of them."""

import json
import os
import time
from pathlib import Path

import pytest

from opjit import cache
from opjit.cache import transfer
from opjit.store import usage
from opjit.store.entry import Entry
from tests import helpers
from tests.helpers import GET, cache_command, fresh


@pytest.fixture
def lines(entry: Entry) -> Path:
    """The file of a cache that has an entry, and nothing counted yet."""
    path = Path(os.environ["OPJIT_CACHE"]) / "v2" / usage.NAME
    path.unlink(missing_ok=True)
    return path


def test_builds_and_hits_through_ready_are_counted(op: Path, here: Path) -> None:
    for get in (
        GET,
        "import opjit.distributed; opjit.distributed.ready(['keytest::plus'], 'cpu')\n",
    ):
        fresh(helpers.declare(op) + get)
    found = cache.stats()
    assert found[1:] == (1, 0, 1)
    assert abs(found.since - time.time()) < 600
    assert cache_command("stats").output.startswith("hits 1, fetches 0, builds 1; since 20")
    assert json.loads(cache_command("stats", "--json").output) == {
        "path": str(here),
        **found._asdict(),
    }


def test_fetches_are_counted(
    entry: Entry, op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer.push((tmp_path / "remote").as_uri(), sign=None)
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "other"))
    fresh(
        helpers.declare(op) + GET,
        {"OPJIT_REMOTE": (tmp_path / "remote").as_uri(), "OPJIT_TRUST": "unsigned"},
        flags=("-W", "ignore"),
    )
    assert cache.stats()[1:] == (0, 1, 0)


def test_a_hit_writes_nothing_until_the_process_ends_and_never_makes_a_cache(
    lines: Path, op: Path, tmp_path: Path
) -> None:
    code = helpers.declare(op) + GET + f"print(Path({str(lines)!r}).exists())\n"
    assert fresh(code).stdout.endswith("False\n")
    assert lines.read_text().split()[1:] == ["1", "0", "0"]
    layer = {"OPJIT_LAYERS": os.environ["OPJIT_CACHE"], "OPJIT_CACHE": str(tmp_path / "none")}
    fresh(code, {**helpers.no_compiler(tmp_path), **layer})
    assert len(lines.read_text().splitlines()) == 1
    assert not (tmp_path / "none").exists()


def test_a_forked_child_counts_its_own_and_one_that_is_killed_counts_nothing(
    lines: Path, op: Path
) -> None:
    code = (
        helpers.declare(op)
        + GET
        + (
            "import os, signal, sys\nfrom opjit import request, wanted\n"
            "for end in (lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: sys.exit(0)):\n"
            "    sys.stdout.flush()\n"
            "    if os.fork() == 0:\n"
            "        request.entry(registry.find('keytest::plus'), wanted.target_of('cpu', None))\n"
            "        end()\n"
            "    os.wait()\n"
        )
    )
    fresh(code, flags=("-W", "ignore::DeprecationWarning"))
    assert [text.split()[1] for text in lines.read_text().splitlines()] == ["1", "1"]


def test_damaged_counts_are_left_out_and_a_full_file_starts_anew(lines: Path, op: Path) -> None:
    lines.write_bytes(
        b"1000 1 2 3\n\n5\nx\n-1 1 1 1\n1e3 1 1 1\n900 1 1 1 1\n"
        + b"9" * 5000
        + b"\n\xff\xfe\n900 10 20 30\n1 2"
    )
    assert cache.stats() == (900, 11, 22, 33)
    lines.write_bytes(b"1 1 1 1\n" * (usage.MAX_BYTES // 8 + 1))
    fresh(helpers.declare(op) + GET)
    assert cache.stats()[1:] == (1, 0, 0)


@pytest.mark.parametrize("what", ["link", "folder", "pipe"])
def test_what_took_the_place_of_the_counts_is_no_trouble(
    lines: Path, op: Path, tmp_path: Path, what: str
) -> None:
    (tmp_path / "precious").write_text("precious")
    if what == "link":
        lines.symlink_to(tmp_path / "precious")
    else:
        (os.mkfifo if what == "pipe" else os.mkdir)(lines)
    assert fresh(helpers.declare(op) + GET).stderr == ""
    assert (tmp_path / "precious").read_text() == "precious"
    assert cache.stats() == (0, 0, 0, 0)
