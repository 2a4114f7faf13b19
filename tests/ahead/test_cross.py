"""Cross builds: a login node of one processor builds for nodes of the other, which need no compiler."""

import os
import platform
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

import opjit
from opjit import cli, why
from opjit.backends import cpu, targets
from opjit.catalog import registry
from opjit.errors import BadSetting, PrecompileError, UnknownArch
from opjit.recipe import toolchain
from opjit.store import elf
from opjit.store.store import Store
from opjit.wanted import describe, of_op
from tests import helpers
from tests.helpers import entries, fresh, no_compiler

pytestmark = pytest.mark.usefixtures("here", "no_gpu")
HERE = platform.machine()
OTHER = next(machine for machine in elf.MACHINES if machine != HERE)
LEVELS = {
    machine: [arch for arch in cpu.Cpu().archs() if cpu.machine_of(arch) == machine][-1]
    for machine in elf.MACHINES
}
cross = pytest.mark.skipif(
    not shutil.which(f"{OTHER}-linux-gnu-g++"), reason=f"no {OTHER}-linux-gnu-g++, a cross compiler"
)
NODE = os.environ.get("OPJIT_TEST_AARCH64")  # the folder of .ci/aarch64
COMPILERS = {"x86_64": "gcc", "aarch64": "aarch64-linux-gnu-gcc"}
FIRST = "import warnings, torch, opjit; warnings.simplefilter('error', opjit.errors.CacheWarning)\n"
CALL = "print(*(opjit.get(op, 'cpu')(torch.ones(3)).view(-1)[0].item() for op in ('allreduce', 'tensor_negate')))"


def kinds(store: Path) -> dict[str, str]:
    """The processor of each library in a store, by its target's folder."""
    return {
        folder.parts[-2]: elf.machine(next(folder.glob("*.so")).read_bytes())
        for folder in entries(store)
    }


@cross
@pytest.mark.slow
def test_a_login_node_fills_a_store_for_nodes_of_both_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc = toolchain.find_nvrtc("cuda13", None) is not None
    archs = [*LEVELS.values(), *(["sm_90"] if nvrtc else [])]
    store = tmp_path / "layer"
    options = ("--arch", ",".join(archs), "--host", f"{HERE},{OTHER}", "--store", str(store))
    done = CliRunner().invoke(cli.main, ["precompile", "allreduce", *options])
    assert f"{4 if nvrtc else 2} built, 0 already there, 0 skipped, 0 failed" in done.output
    assert kinds(store) == {
        **{level: machine for machine, level in LEVELS.items()},
        **{f"sm_90.cuda13.{machine}": machine for machine in elf.MACHINES if nvrtc},
    }
    monkeypatch.setattr(platform, "machine", lambda: OTHER)
    monkeypatch.setenv("CC", "/nonexistent")
    op = registry.find("allreduce")
    node = Store(store)
    for target in (
        targets.named(arch, cuda_version="13.0") for arch in archs if cpu.machine_of(arch) != HERE
    ):
        assert of_op(op, target, node).find(node) is not None, why.compare(
            describe(op, target, node), node
        )


@cross
@pytest.mark.no_qemu(
    "this machine's own compiler takes the assembler from PATH, which is ARM's there"
)
def test_a_wheel_for_both_processors_has_the_tags_of_both(tmp_path: Path) -> None:
    folder = helpers.write_op(tmp_path / "plus")
    done = helpers.command("wheel", folder, "--arch", ",".join(LEVELS.values()), "-o", tmp_path)
    wheel = Path(done.stdout.strip())
    assert all(wheel.stem.count(f"_{machine}") == 1 for machine in elf.MACHINES)
    with zipfile.ZipFile(wheel) as archive:
        assert sum(name.endswith(".so") for name in archive.namelist()) == 2


def test_what_is_missing_for_a_cross_build_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    package = f"gcc-{OTHER.replace('_', '-')}-linux-gnu"
    with pytest.raises(
        PrecompileError,
        match=f"no C compiler for {OTHER} on this {HERE} machine: .*apt install {package}",
    ):
        opjit.precompile(["allreduce"], [LEVELS[OTHER]])
    with pytest.raises(UnknownArch, match="unknown host 'arm64'; known: x86_64, aarch64"):
        opjit.precompile(["allreduce"], ["sm_90"], hosts=["arm64"])
    with pytest.raises(BadSetting, match=f"hosts are {OTHER}, without architectures to build for"):
        opjit.precompile(["allreduce"], hosts=[OTHER])


@pytest.mark.slow
@pytest.mark.skipif(not NODE, reason="OPJIT_TEST_AARCH64 names no folder of .ci/aarch64")
def test_nodes_of_both_processors_run_what_both_put_into_one_store(tmp_path: Path) -> None:
    def on(machine: str, code: str, changes: Mapping[str, str | None]) -> str:
        python, site = (
            (f"{NODE}/system/usr/bin/python3", f"{NODE}/site")
            if machine == "aarch64"
            else (sys.executable, "")
        )
        done = fresh(
            FIRST + code,
            {
                "PYTHONPATH": os.pathsep.join([str(helpers.ROOT), site]),
                "QEMU_LD_PREFIX": f"{NODE}/system",
                "OPJIT_CACHE": str(tmp_path / "cache"),
                "OPJIT_ARCH": LEVELS[machine],
                **changes,
            },
            python=python,
        )
        return done.stdout

    for machine, op in zip(elf.MACHINES, ("allreduce", "tensor_negate"), strict=True):
        code = f"print(opjit.precompile([{op!r}], {[*LEVELS.values()]}))"
        assert on(machine, code, {"CC": COMPILERS[machine]}).startswith("2 built")
    for machine in elf.MACHINES:
        assert on(machine, CALL, {**no_compiler(tmp_path), "OPJIT_OFFLINE": "1"}) == "3.0 -1.0\n"
