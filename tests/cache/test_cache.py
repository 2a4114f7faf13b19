"""The entries of the cache, as opjit.cache and the command list, remove and verify them."""

import json
import math
import os
import shutil
import time
from pathlib import Path

import pytest

import opjit
from opjit import cache
from opjit.backends import targets
from opjit.cache import verification
from opjit.errors import BadSetting
from opjit.store import manifest
from opjit.store.entry import Entry
from opjit.store.store import Store
from tests import helpers
from tests.helpers import DAY, cache_command, date, keys, planted


def test_clear_takes_names_as_ls_shows_them_and_removes_nothing_where_one_is_unknown(
    entry: Entry,
) -> None:
    other = entry.folder.parents[2] / "opjit.other" / "x86-64-v3" / entry.key
    shutil.copytree(entry.folder, other)
    result = cache_command("clear", "other", "keytest::nothing")
    assert result.exit_code == 2
    assert (
        helpers.without_pointer(result.output)
        == "Error: the cache does not contain an entry of keytest::nothing; `opjit cache ls` lists its entries\n"
    )
    assert len(keys()) == 1
    assert other.exists()
    assert cache_command("clear", "other").exit_code == 0
    assert not other.exists()
    assert keys() == {entry.key}
    assert cache_command("clear").exit_code == 0
    assert cache.entries() == []
    assert "keytest" not in cache_command("ls").output


def test_a_cache_that_is_not_there_has_nothing_and_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "none"))
    for arguments in (["ls"], ["stats"], ["verify"], ["prune"], ["clear"], ["path"]):
        result = cache_command(*arguments)
        assert (result.exit_code, result.exception) == (0, None), result.output
    assert not (tmp_path / "none").exists()


def test_ls_shows_op_arch_size_last_use_and_key_without_reading_a_file(entry: Entry) -> None:
    date(entry.folder, time.time() - 3 * DAY - 60)
    size = sum(path.stat().st_size for path in entry.folder.iterdir())
    listed = cache_command("ls").output.partition("parts of builds")[0]
    assert (
        listed
        == f"keytest::plus  {targets.here(helpers.cpu()).folder}  {size / 1024:.1f} KiB  3 d ago  {entry.key[:12]}\n"
        f"1 entry, {size / 1024:.1f} KiB\n"
    )
    (entry.folder / manifest.NAME).write_text("damaged")
    assert entry.key[:12] in cache_command("ls").output
    assert time.time() - entry.library.stat().st_atime > DAY


def test_ls_as_json_is_what_python_gets(entry: Entry) -> None:
    done = cache_command("ls", "--json")
    [found] = json.loads(done.stdout)
    [item] = cache.entries()
    assert found == {
        "folder": str(entry.folder),
        "op": "keytest::plus",
        "arch": targets.here(helpers.cpu()).folder,
        "key": entry.key,
        "size": item.size,
        "read": item.read,
        "written": item.written,
        "published": item.published,
        "used": item.used,
    }
    assert cache_command("clear").exit_code == done.exit_code == 0
    assert json.loads(cache_command("ls", "--json").stdout) == []


def test_verify_names_what_is_bad_and_why_changes_nothing_and_exits_with_1(
    entry: Entry, op: Path
) -> None:
    good, flipped, foreign, misplaced = [entry.folder, *planted(entry, 3)]
    [senseless] = planted(entry, 1, schema="garbage(")
    content = bytearray((flipped / "keytest.plus.so").read_bytes())
    content[0x1200] ^= 1
    (flipped / "keytest.plus.so").write_bytes(content)
    (foreign / "keytest.plus.so").chmod(0o666)
    away = misplaced.parents[1] / "x86-64-v2" / misplaced.name
    away.parent.mkdir(mode=0o700, exist_ok=True)
    misplaced.rename(away)
    before = helpers.snapshot(Path(os.environ["OPJIT_CACHE"]))
    result = cache_command("verify")
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert sum(line.startswith("bad: ") for line in lines) == 4
    reasons = {
        senseless: "garbage(",
        flipped: "does not have the SHA-256 in its manifest",
        foreign: "can be written by other users",
        away: "in the directory of another op",
    }
    for folder, reason in reasons.items():
        assert any(
            line.startswith("bad: keytest::plus") and folder.name in line and reason in line
            for line in lines
        )
    assert lines[-1] == "5 entries: 1 good, 4 bad"
    assert helpers.snapshot(Path(os.environ["OPJIT_CACHE"])) == before
    assert good.exists()


def test_an_entry_that_is_removed_while_the_others_are_verified_is_not_bad(entry: Entry) -> None:
    first, second = sorted([entry.folder, *planted(entry, 1)])
    findings = verification.verify_store(Store(Path(os.environ["OPJIT_CACHE"])))
    assert next(findings).item.folder == first
    shutil.rmtree(second)
    assert list(findings) == []


def test_a_bound_below_zero_is_refused_and_nothing_goes(entry: Entry) -> None:
    for bounds in ({"size": -1}, {"age": -1.0}, {"size": math.nan}):
        with pytest.raises(BadSetting, match=r"expected an? (size|age) such as"):
            cache.prune(**bounds)
    assert entry.folder.exists()


def test_an_entry_of_a_device_that_this_process_does_not_know_is_good_if_its_bytes_are(
    entry: Entry,
) -> None:
    (elsewhere,) = planted(entry, 1, backend="npu", dispatch_key="PrivateUse1")
    found = {finding.item.key: finding for finding in cache.verify()}
    assert "register_backend" in found[elsewhere.name].reason
    result = cache_command("verify")
    assert result.exit_code == 0
    assert any(
        line.startswith("good: ") and elsewhere.name in line and "no backend 'npu'" in line
        for line in result.output.splitlines()
    )
    assert result.output.splitlines()[-1] == "2 entries: 2 good"
    os.truncate(elsewhere / "keytest.plus.so", 100)
    assert cache_command("verify").output.splitlines()[-1] == "2 entries: 1 good, 1 bad"


def test_extensions_are_verified_too(here: Path) -> None:
    source = helpers.write_cxx(here.with_name("source"), 'extern "C" int value() { return 7; }\n')
    opjit.load(f"plain{os.urandom(4).hex()}", [source], is_python_module=False)
    assert [finding.verdict for finding in cache.verify()] == ["good"]
    assert cache_command("verify").exit_code == 0
    library = next(here.rglob("plain*.so"))
    content = library.read_bytes()
    library.unlink()
    library.write_bytes(content[:-1])
    assert [finding.verdict for finding in cache.verify()] == ["bad"]
