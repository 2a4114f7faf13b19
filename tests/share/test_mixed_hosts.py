"""A cluster of x86-64 and ARM nodes: one store and one remote serve both, also nodes without compilers, whoever filled them when."""

import hashlib
import itertools
import platform
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from opjit import backends, why
from opjit.backends import cpu, targets
from opjit.backends.targets import Target
from opjit.cache import transfer
from opjit.errors import EntryError
from opjit.recipe.recipe import Recipe
from opjit.share import remote
from opjit.store import elf, manifest
from opjit.store.entry import Entry, verify
from opjit.store.store import Store
from tests import helpers, remotes
from tests.helpers import built, cache_command, cache_warnings, describe, write_op

HOSTS = tuple(elf.MACHINES)
ORDERS = [*itertools.permutations(HOSTS), (*HOSTS, HOSTS[0]), (*reversed(HOSTS), HOSTS[1])]
# A fat binary with machine code for sm_90, as far as elf.py reads it.
FATBIN = (
    struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 64)
    + struct.pack("<HHIQ12xI", 2, 257, 64, 0, 90)
    + bytes(128)
)
LEVELS = {"x86_64": "x86-64-v3", "aarch64": "neoverse-v2"}


@pytest.fixture(scope="module")
def op(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """An op, and a library of it."""
    folder = write_op(tmp_path_factory.mktemp("mixed") / "plus")
    return folder, built(folder, folder.parent / "cache").library.read_bytes()


def target_of(device: str, host: str) -> Target:
    return Target(
        backends.for_device(device),
        *(("sm_90", "cuda13") if device == "cuda" else (LEVELS[host], "")),
        host,
    )


def recipe(op: tuple[Path, bytes], target: Target, compiler: bool) -> Recipe:
    known = {
        "cc.machine": f"{target.host}-linux-gnu",
        "cc.version": "gcc version 12.2.0",
        "nvrtc.version": "13.0",
    }
    found = describe(op[0], target, compiler=known)
    return found if compiler else replace(found, toolchain=None)


def plant(op: tuple[Path, bytes], target: Target, cache: Path) -> Entry:
    """Put an entry into a cache as a build on its host would."""
    made = recipe(op, target, True)
    machine = struct.pack("<H", elf.MACHINES[target.host])
    content = op[1][:18] + machine + op[1][20:] + (FATBIN if target.backend.uses_nvcc else b"")
    assert made.key is not None
    described = manifest.Manifest(
        made.key,
        made.document(),
        "keytest.plus.so",
        len(content),
        hashlib.sha256(content).hexdigest(),
        {},
    )
    folder = Store(cache).base / made.place_of_entries / made.key
    folder.mkdir(parents=True, mode=0o700)
    (folder / described.library).write_bytes(content)
    (folder / manifest.NAME).write_bytes(described.dump())
    return verify(folder, target)[0]


def machine_of(entry: Entry | None) -> str:
    assert entry is not None
    return elf.machine(entry.library.read_bytes())


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_one_store_serves_nodes_of_both_processors_with_and_without_compilers(
    tmp_path: Path, op: tuple[Path, bytes], order: Sequence[str], device: str
) -> None:
    for host in dict.fromkeys(order):
        plant(op, target_of(device, host), tmp_path)
    with cache_warnings() as texts:
        for host, compiler in itertools.product(HOSTS, (True, False)):
            assert (
                machine_of(
                    helpers.found(Store(tmp_path), recipe(op, target_of(device, host), compiler))
                )
                == host
            )
    assert texts == []


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_one_remote_serves_nodes_of_both_processors_without_compilers_in_every_order_of_pushes(
    tmp_path: Path,
    op: tuple[Path, bytes],
    order: Sequence[str],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for host in HOSTS:
        plant(op, target_of(device, host), tmp_path / host)
    url = (tmp_path / "remote").as_uri()
    for number, host in enumerate(order):
        monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / host))
        done = transfer.push(url, sign=None)
        assert (len(done.moved), done.problems) == (0 if host in order[:number] else 1, [])
    monkeypatch.setenv("OPJIT_REMOTE", url)
    monkeypatch.setenv("OPJIT_TRUST", "unsigned")
    remotes.forget(monkeypatch)
    monkeypatch.setattr("opjit.share.trust._warned", {"unsigned"})
    with cache_warnings() as texts:
        for host in HOSTS:
            ways = recipe(op, target_of(device, host), False).ways
            assert machine_of(remote.fetch(ways, Store(tmp_path / "node" / host))) == host
    assert texts == []


def test_one_command_fills_a_pack_a_remote_and_a_layer_for_all_hosts_and_archs(
    tmp_path: Path, op: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [target_of(device, host) for device in ("cuda", "cpu") for host in HOSTS]
    for target in wanted:
        plant(op, target, tmp_path / "cache")
    url = (tmp_path / "remote").as_uri()
    for words in (["pack", str(tmp_path / "ops.pack")], ["push", url, "--unsigned"]):
        monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
        assert cache_command(*words).output.endswith(" 4, 0 already there, 0 left out\n")
    monkeypatch.setenv("OPJIT_TRUST", "unsigned")
    monkeypatch.setattr("opjit.share.trust._warned", {"unsigned"})
    for words in (["unpack", str(tmp_path / "ops.pack")], ["pull", url]):
        layer = tmp_path / words[0]
        monkeypatch.setenv("OPJIT_CACHE", str(layer))
        assert cache_command(*words).output.endswith(" 4, 0 already there, 0 left out\n")
        for target in wanted:
            assert machine_of(helpers.found(Store(layer), recipe(op, target, False))) == target.host


def test_the_list_of_entries_and_why_show_the_host(
    tmp_path: Path, op: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path))
    own = platform.machine()
    other = next(host for host in HOSTS if host != own)
    here = recipe(op, target_of("cuda", own), True)
    there = recipe(op, target_of("cuda", other), True)
    entry = plant(op, there.target, tmp_path)
    miss = why.compare(here, Store(tmp_path))
    assert "for cuda sm_90.cuda13: a miss; " in str(miss)
    assert f"not used: {entry.folder.parent}: it is for {other}, not {own}" in str(miss)
    assert miss.reason.endswith(f"is in no usable cache: it is for {other}, not {own}")
    found = plant(op, here.target, tmp_path)
    assert f"/sm_90.cuda13.{own}-" in str(why.compare(here, Store(tmp_path), found.folder))
    assert f"for cuda sm_90.cuda13 on {other}: a hit" in str(
        why.compare(there, Store(tmp_path), entry.folder)
    )
    assert all(f"  sm_90.cuda13.{host}" in cache_command("ls").output for host in HOSTS)


def test_a_library_of_another_processor_is_not_loaded_whatever_its_folder_says(
    tmp_path: Path, op: tuple[Path, bytes]
) -> None:
    entry = plant(op, target_of("cuda", "aarch64"), tmp_path)
    with pytest.raises(EntryError, match="is for aarch64, not x86_64"):
        verify(entry.folder, target_of("cuda", "x86_64"))


@pytest.mark.parametrize(
    ("machine", "features", "level"),
    [
        ("x86_64", "", "x86-64-v2"),
        ("aarch64", "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid", "armv8-a"),
        (
            "aarch64",
            "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs",
            "armv8.2-a+fp16+dotprod",
        ),  # Neoverse N1
        (
            "aarch64",
            "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3 sm4 "
            "asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg dcpodp sve2 sveaes svepmull svebitperm svesha3 svesm4 "
            "flagm2 frint svei8mm svebf16 i8mm bf16 dgh bti",
            "neoverse-v2",
        ),  # Grace
    ],
)
def test_a_cpu_s_level_follows_from_its_features(
    machine: str, features: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(cpu, "_cpu_flags", lambda: set(features.split()))
    cpu._host_arch.cache_clear()
    try:
        here = targets.here(helpers.cpu())
        assert (here.arch, here.host, here.folder) == (level, machine, level)
        assert targets.named("sm_90").host == machine
        own = [arch for arch in helpers.cpu().archs() if cpu.machine_of(arch) == machine]
        assert [arch for arch in helpers.cpu().archs() if helpers.cpu().runs(arch)] == own[
            own.index(level) :
        ]
    finally:
        cpu._host_arch.cache_clear()
