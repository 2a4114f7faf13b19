"""The stand-ins for torch's libraries, as the machine's own tools and linkers see them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from opjit import binary, stubs

CALLS = "void aoti_torch_check(void); void opjit_test_absent(void);\nvoid call(void) { aoti_torch_check(); }\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return stubs.make(tmp_path, "x86_64-linux-gnu", ["libtorch_cpu", "libtorch_cuda"])


def link(folder: Path, source: str, linker: str) -> subprocess.CompletedProcess[str]:
    (folder / "call.c").write_text(source)
    return subprocess.run(["gcc", f"-fuse-ld={linker}", "-shared", "-fPIC", "call.c", "-L.", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10",
                           "-Wl,-z,defs", "-o", "call.so"], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("linker", ["bfd", "gold", "lld", "mold"])
def test_a_linker_takes_their_names_and_knows_what_they_lack(folder: Path, linker: str) -> None:
    if shutil.which(f"ld.{linker}") is None:
        pytest.skip(f"no ld.{linker}")
    done = link(folder, CALLS, linker)
    assert done.returncode == 0, done.stderr
    assert binary.inspect((folder / "call.so").read_bytes()).needed >= {"libtorch_cpu.so"}
    refused = link(folder, CALLS.replace("{ aoti_torch_check", "{ opjit_test_absent"), linker)
    assert refused.returncode != 0
    assert "opjit_test_absent" in refused.stderr


def test_the_functions_of_a_header_are_in_the_library_that_has_them(folder: Path) -> None:
    defined = {name: {line.split()[-1] for line in subprocess.run(["nm", "-D", folder / f"{name}.so"], stdout=subprocess.PIPE, text=True,
                                                                  check=True).stdout.splitlines()}
               for name in ("libtorch_cpu", "libtorch_cuda")}
    assert {"aoti_torch_check", "torch_parallel_for"} <= defined["libtorch_cpu"]
    assert "aoti_torch_get_current_cuda_stream" in defined["libtorch_cuda"]
    assert not defined["libtorch_cpu"] & defined["libtorch_cuda"]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_readelf_finds_nothing_wrong_with_them(tmp_path: Path, machine: str) -> None:
    path = tmp_path / "some.so"
    path.write_bytes(stubs.library("some.so", ["one", "another"], machine))
    done = subprocess.run(["readelf", "-a", "-W", path], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "Warning" not in done.stdout
    assert "Library soname: [some.so]" in done.stdout
    assert binary.inspect(path.read_bytes()) == binary.Binary(machine, frozenset(), None, frozenset())
