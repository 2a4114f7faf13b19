"""`opjit wheel`: one wheel for several archs and every torch, which needs no compiler, and is verified like any entry."""

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from opjit.author.new import new_op
from opjit.backends.cpu import Cpu
from opjit.recipe import toolchain
from tests import helpers
from tests.helpers import LEVELS, fresh, no_compiler, refused

OTHER = os.environ.get("OPJIT_TEST_OTHER_PYTHON")
LEVEL = LEVELS[1]
ARCHS = [*LEVELS, *(["sm_80", "sm_90"] if toolchain.find_nvcc(None) else [])]
CALL = """
import sys
import torch
import opjit
for name in ("one", "two"):
    op = opjit.get(f"wheeltest::{name}", "cpu")
    assert op(torch.ones(3), torch.full((3,), 2.0), 3.0).tolist() == [5.0] * 3
maps = open("/proc/self/maps").read()
print(torch.__version__, *sorted({line.split()[-1] for line in maps.splitlines() if "wheeltest" in line}), sep="\\n")
"""


def make(*arguments: str, **changes: str) -> Path:
    """The wheel that the command makes in a process of its own."""
    done = helpers.command("wheel", *arguments, **changes)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ops for every arch."""
    folder = tmp_path_factory.mktemp("wheel")
    ops = [str(new_op(f"wheeltest::{name}", folder, cuda=True)) for name in ("one", "two")]
    return make(*ops, "--arch", ", ".join(ARCHS), "--version", "1.2", "-o", str(folder / "dist"))


def install(wheel: Path, to: Path, umask: int = 0o022) -> Path:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--target",
            str(to),
            str(wheel),
        ],
        check=True,
        umask=umask,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return to


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    return install(wheel, tmp_path / "site")


def called(
    site: Path, cache: Path, changes: Mapping[str, str | None], python: str = sys.executable
) -> list[str]:
    """Both ops in a fresh process: torch's version, then the libraries that were loaded. A CacheWarning is an error."""
    path = os.pathsep.join([str(site), str(helpers.ROOT), os.environ.get("PYTHONPATH", "")])
    code = (
        "import warnings, opjit; warnings.simplefilter('error', opjit.errors.CacheWarning)\n" + CALL
    )
    return fresh(
        code, {"OPJIT_CACHE": str(cache), **changes, "PYTHONPATH": path}, python=python
    ).stdout.split()


def library(site: Path, name: str, arch: str) -> Path:
    binaries = site / "wheeltest_ops" / name / "prebuilt" / "v2" / f"wheeltest.{name}"
    [found] = binaries.glob(f"{arch}-*/*/*.so")
    return found


def test_a_wheel_is_small_and_says_what_it_is(wheel: Path) -> None:
    assert wheel.stat().st_size < 1 << 20
    assert wheel.name.startswith("wheeltest_ops-1.2-py3-none-manylinux_2_")
    assert wheel.name.endswith(f"_{platform.machine()}.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for name in names:
            assert b"/tmp/" not in archive.read(name)
            assert archive.getinfo(name).external_attr >> 16 & 0o777 == 0o644
        assert (
            archive.read("wheeltest_ops-1.2.dist-info/entry_points.txt")
            == b"[opjit.ops]\nwheeltest = wheeltest_ops\n"
        )
    libraries = [name for name in names if name.endswith(".so")]
    assert len(libraries) == 2 * len(ARCHS)
    assert {
        "wheeltest_ops/one/one.c",
        "wheeltest_ops/one/one.cu",
        "wheeltest_ops/one/op.py",
    } <= names
    assert not any("/test_" in name for name in names)


def test_the_same_sources_make_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    op = str(wheel.parents[1] / "one")
    one, other = (
        make(
            op,
            "--arch",
            LEVEL,
            "-o",
            str(tmp_path / name),
            OPJIT_CACHE=str(tmp_path / f"{name}.cache"),
        )
        for name in "ab"
    )
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.torch
@pytest.mark.parametrize(
    "python",
    [
        sys.executable,
        pytest.param(
            OTHER,
            marks=pytest.mark.skipif(
                OTHER is None, reason="OPJIT_TEST_OTHER_PYTHON names no second Python"
            ),
        ),
    ],
    ids=["this torch", "another torch"],
)
def test_an_installed_wheel_serves_without_a_compiler(
    installed: Path, tmp_path: Path, python: str
) -> None:
    before = helpers.snapshot(installed)
    cache = tmp_path / "cache"
    _, *libraries = called(
        installed, cache, {**no_compiler(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}, python
    )
    arch = Cpu().host_arch()
    assert libraries == sorted(str(library(installed, name, arch)) for name in ("one", "two"))
    assert helpers.snapshot(installed) == before
    assert not cache.exists()


def test_another_arch_and_a_changed_source_are_built_and_never_served_by_a_neighbour(
    installed: Path, tmp_path: Path
) -> None:
    wanted = library(installed, "one", LEVELS[0]).parents[1]
    shutil.rmtree(wanted)
    changes: dict[str, str | None] = {"OPJIT_ARCH": LEVELS[0]}
    _, *libraries = called(installed, tmp_path / "cache", changes)
    assert [path.startswith(str(installed)) for path in libraries] == [False, True]
    folders = [Path(path).parts[-3] for path in libraries]
    assert [folder.rpartition("-")[0] for folder in folders] == [LEVELS[0]] * 2
    # the neighbour's files under the wanted name are not what their manifest says
    found = library(installed, "one", LEVELS[1]).parents[1]
    shutil.copytree(found, wanted)
    source = installed / "wheeltest_ops" / "two" / "two.c"
    source.write_text(source.read_text().replace("factor *", "1 * factor *"))
    _, *libraries = called(installed, tmp_path / "cache", changes)
    assert [path.startswith(str(installed)) for path in libraries] == [False, False]


def test_a_wheel_installed_with_an_open_umask_is_trusted_as_its_sources_are(
    wheel: Path, tmp_path: Path
) -> None:
    """pip leaves files as the umask says: where a group may write the sources, a binary of that group's is no worse."""
    site = install(wheel, tmp_path / "site", umask=0o002)
    arch = Cpu().host_arch()
    assert library(site, "one", arch).stat().st_mode & 0o020
    assert called(site, tmp_path / "cache", no_compiler(tmp_path))[1:] == sorted(
        str(library(site, name, arch)) for name in ("one", "two")
    )


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda path: path.chmod(0o666), "can be written by other users"),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b"opjit", b"opjiT", 1)),
            "does not have the SHA-256 in its manifest",
        ),
    ],
)
def test_a_binary_that_may_not_be_trusted_is_built_anew_with_a_warning(
    installed: Path, tmp_path: Path, harm: Callable[[Path], object], told: str
) -> None:
    harm(library(installed, "one", Cpu().host_arch()))
    path = os.pathsep.join([str(installed), str(helpers.ROOT), os.environ.get("PYTHONPATH", "")])
    done = fresh(CALL, {"PYTHONPATH": path, "OPJIT_CACHE": str(tmp_path / "cache")})
    assert told in done.stderr
    assert [line.startswith(str(installed)) for line in done.stdout.split()[1:]] == [False, True]


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An op without a CUDA kernel."""
    return new_op("wheeltest::plain", tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--arch", "sm_1"], "unknown arch 'sm_1'; known: "),
        (
            ["--arch", "sm_90"],
            "no kernel for cuda in wheeltest::plain, so there is nothing to build for sm_90",
        ),
        (["--arch", ","], "unknown arch ''"),
        (["--arch", LEVEL, "--name", "no name"], "'no name' cannot be a wheel's name"),
        (
            ["--arch", LEVEL, "--version", "one"],
            "Invalid version `one` from field `project.version`",
        ),
        (["--arch", LEVEL, "-o", "/proc/dist"], "the wheel cannot be written to /proc/dist"),
    ],
)
def test_what_cannot_be_a_wheel_is_refused_in_a_sentence(
    arguments: list[str], told: str, plain: Path, tmp_path: Path
) -> None:
    words = ("wheel", str(plain), "-o", str(tmp_path / "dist"), *arguments)
    assert told in refused(*words, code=1 if "/proc/dist" in arguments else 2)
    assert list(tmp_path.iterdir()) == []


def test_a_header_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = new_op("wheeltest::includes", tmp_path)
    (tmp_path / "outside.h").touch()
    source = folder / "includes.c"
    source.write_text(
        source.read_text().replace(
            '#include "opjit.h"', '#include "opjit.h"\n#include "../outside.h"'
        )
    )
    assert "wheeltest::includes includes ../outside.h, which is outside" in refused(
        "wheel", str(folder), "--arch", LEVEL, code=2
    )


def test_folders_that_hold_no_op_or_share_a_name_are_refused_before_anything_in_them_is_run(
    plain: Path, tmp_path: Path
) -> None:
    assert "there is no directory" in refused(
        "wheel", str(tmp_path / "gone"), "--arch", LEVEL, code=2
    )
    other = str(new_op("othertest::plain", tmp_path))
    assert "two directories are named plain" in refused(
        "wheel", str(plain), other, "--arch", LEVEL, "--name", "both", code=2
    )
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "op.py").write_text("raise SystemExit('it was run')\n")
    assert f"expected an op.py in {tmp_path}; name the directory of each op" in refused(
        "wheel", str(tmp_path), "--arch", LEVEL, "-o", str(tmp_path), code=2
    )


def test_ops_of_two_namespaces_make_a_wheel_of_the_name_that_the_user_gives(
    plain: Path, tmp_path: Path
) -> None:
    folders = [str(plain), str(new_op("secondtest::second", tmp_path))]
    told = refused("wheel", *folders, "--arch", LEVEL, "-o", str(tmp_path / "dist"), code=2)
    assert (
        "the ops have 2 namespaces, secondtest and wheeltest; name the wheel with --name NAME\n"
        in told
    )
    assert not (tmp_path / "dist").exists()
    assert make(
        *folders, "--arch", LEVEL, "-o", str(tmp_path / "dist"), "--name", "both"
    ).name.startswith("both-0.1.0-")
