"""A project made by `opjit new --project`, and any other that hatchling builds with opjit's hook: its wheel, its sdist, its errors."""

import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from opjit.author.new import new_project
from opjit.backends.cpu import Cpu
from opjit.cli import main
from opjit.errors import OpjitError
from tests import helpers
from tests.helpers import environment, fresh, no_compiler

build = pytest.importorskip("hatchling.build")
project = pytest.importorskip("opjit.project")  # it imports hatchling
HOOK = "[tool.hatch.build.targets.wheel.hooks.opjit]"
ORDINARY = f"""
[build-system]
requires = ["hatchling", "opjit"]
build-backend = "hatchling.build"

[project]
name = "ordinary"
dynamic = ["version"]
description = "As the packaging guide shows one"
readme = {{text = "Its long description", content-type = "text/x-rst"}}
license = "BSD-3-Clause"
license-files = ["LICENSE*"]
authors = [{{name = "Ada", email = "ada@example.org"}}]
maintainers = [{{name = "Max"}}]
keywords = ["torch"]
classifiers = ["Programming Language :: C"]
dependencies = ["opjit", "torch>=2.10"]

[project.scripts]
ordinary = "ordinary:scale_add"

[project.gui-scripts]
ordinary-gui = "ordinary:scale_add"

[project.urls]
Source = "https://example.org/ordinary"

[project.entry-points."opjit.ops"]
ordinary = "ordinary"

[tool.hatch.version]
path = "src/ordinary/__init__.py"

{HOOK}
archs = ["{Cpu().host_arch()}"]
"""


def pip(*arguments: str, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        cwd=cwd,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_pip_builds_a_wheel_that_runs_without_a_compiler(tmp_path: Path) -> None:
    made = CliRunner().invoke(main, ["new", "--project", "my-kernels", str(tmp_path)])
    assert made.exit_code == 0, made.output
    root = tmp_path / "my-kernels"
    pyproject = root / "pyproject.toml"
    arch = Cpu().host_arch()
    pyproject.write_text(re.sub(r"archs = \[.*\]", f'archs = ["{arch}"]', pyproject.read_text()))
    readme = (root / "README.md").read_text()
    printed_lines = made.output.strip().replace(", then ", "\n")
    install, wheel_it = re.findall(
        r"pip ((?:install|wheel) .*?)(?: && pytest|$)", printed_lines, re.MULTILINE
    )
    for printed in (install, wheel_it):
        assert "--no-build-isolation" in printed
        assert f"pip {printed} " in readme
    pip(*shlex.split(wheel_it), "--quiet", "-w", str(tmp_path / "dist"), cwd=root)
    pip(
        *shlex.split(install),
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(tmp_path / "installed"),
        cwd=root,
    )
    assert sorted(os.listdir(root)) == [".clangd", "README.md", "pyproject.toml", "src", "tests"]
    [wheel] = (tmp_path / "dist").iterdir()
    assert wheel.name.startswith("my_kernels-0.1.0-py3-none-manylinux_2_")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        told = archive.read("my_kernels-0.1.0.dist-info/METADATA").decode()
        archive.extractall(tmp_path / "site")
    assert {
        "my_kernels/__init__.py",
        "my_kernels/scale_add/op.py",
        "my_kernels/scale_add/scale_add.c",
    } <= set(names)
    folders = [name.split("/")[5] for name in names if name.endswith(".so")]
    assert [folder.rpartition("-")[0] for folder in folders] == [arch]
    for line in (
        "Name: my-kernels",
        "Requires-Dist: torch>=2.10",
        "Requires-Dist: pytest; extra == 'test'",
        "Provides-Extra: test",
        "# my-kernels",
    ):
        assert line in told.splitlines()
    path = os.pathsep.join(
        [str(tmp_path / "site"), str(helpers.ROOT), os.environ.get("PYTHONPATH", "")]
    )
    code = "import torch, my_kernels\nprint(my_kernels.scale_add(torch.ones(2), torch.ones(2), 2.0).tolist())"
    assert (
        fresh(
            code, {**no_compiler(tmp_path), "PYTHONPATH": path, "OPJIT_CACHE": str(tmp_path / "c")}
        ).stdout
        == "[3.0, 3.0]\n"
    )


def test_an_ordinary_pyproject_builds_and_the_same_sources_make_the_same_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = new_project("ordinary", tmp_path)
    (root / "pyproject.toml").write_text(ORDINARY)
    (root / "LICENSE").write_text("Do as you like.")
    with (root / "src" / "ordinary" / "__init__.py").open("a") as file:
        file.write('\n__version__ = "2.5"\n')
    monkeypatch.chdir(root)
    wheels = []
    for cache in ("one", "other"):
        monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / cache))
        wheels.append(tmp_path / cache / build.build_wheel(str(tmp_path / cache)))
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    with zipfile.ZipFile(wheels[0]) as archive:
        told = archive.read("ordinary-2.5.dist-info/METADATA").decode().splitlines()
        points = archive.read("ordinary-2.5.dist-info/entry_points.txt").decode()
        assert archive.read("ordinary-2.5.dist-info/licenses/LICENSE") == b"Do as you like."
        assert sum(name.endswith(".so") for name in archive.namelist()) == 1
    for line in (
        "Author-email: Ada <ada@example.org>",
        "Maintainer: Max",
        "License-Expression: BSD-3-Clause",
        "Its long description",
    ):
        assert line in told
    for group in ("console_scripts", "gui_scripts", "opjit.ops"):
        assert f"[{group}]\nordinary" in points


def test_installed_editable_it_is_found_by_its_entry_point_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = new_project("editable-kernels", tmp_path, backward=True)
    monkeypatch.chdir(root)
    name = build.build_editable(str(tmp_path))
    assert name == "editable_kernels-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / name) as archive:
        archive.extractall(tmp_path / "site")
    code = f"""
        import site
        site.addsitedir({str(tmp_path / "site")!r})
        import opjit
        print(opjit.get("editable_kernels::scale_add", "cpu").name(), opjit.registry.find("editable_kernels::scale_add").folder)
        """
    assert fresh(code).stdout.split() == [
        "editable_kernels::scale_add",
        str(root / "src" / "editable_kernels" / "scale_add"),
    ]


def test_an_sdist_and_metadata_need_neither_torch_nor_opjit(tmp_path: Path) -> None:
    root = new_project("source-kernels", tmp_path)
    code = f"""
        import sys
        sys.modules["torch"] = sys.modules["opjit"] = None  # importing one raises ImportError
        from hatchling import build
        print(build.build_sdist({str(tmp_path)!r}), build.prepare_metadata_for_build_wheel({str(tmp_path)!r}))
        """
    assert (
        fresh(code, cwd=root).stdout
        == "source_kernels-0.1.0.tar.gz source_kernels-0.1.0.dist-info\n"
    )
    with tarfile.open(tmp_path / "source_kernels-0.1.0.tar.gz") as source:
        files = source.getnames()
    assert "source_kernels-0.1.0/tests/test_source_kernels.py" in files
    assert "source_kernels-0.1.0/src/source_kernels/scale_add/scale_add.c" in files


def test_its_own_tests_pass_also_below_a_project_with_other_settings(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = "--no-such-option"\n'
    )
    root = new_project("tested-kernels", tmp_path, backward=True)
    path = os.pathsep.join([str(root / "src"), str(helpers.ROOT), os.environ.get("PYTHONPATH", "")])
    done = helpers.module(
        "pytest",
        "-q",
        "-W",
        "error",
        "-p",
        "no:cacheprovider",
        "-k",
        "hand or results or drawn",
        cwd=root,
        changes={"PYTHONPATH": path, "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path / "h")},
    )
    assert done.returncode == 0, done.stdout


def test_the_environment_replaces_the_archs_and_the_wheel_has_neither_stale_binaries_nor_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = new_project("Some.Kernels", tmp_path)
    op = root / "src" / "Some_Kernels" / "scale_add"
    arch = Cpu().host_arch()
    for left_out in ("test_scale_add.py", "prebuilt/v2/old.so"):
        (op / left_out).parent.mkdir(parents=True, exist_ok=True)
        (op / left_out).touch()
    monkeypatch.chdir(root)
    monkeypatch.setenv("OPJIT_WHEEL_ARCHS", arch)
    with zipfile.ZipFile(tmp_path / build.build_wheel(str(tmp_path))) as archive:
        names = archive.namelist()
    folders = [name.split("/")[5] for name in names if name.endswith(".so")]
    assert [folder.rpartition("-")[0] for folder in folders] == [arch]
    assert not [name for name in names if "test_" in name]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (
            "archs =",
            "arch =",
            f'expected a list of archs in {HOOK}, such as archs = ["x86-64-v3", "sm_90"], got {{\'arch\': ',
        ),
        ("archs = [", 'archs = "x86-64-v3" #', "expected a list of archs"),
        ("archs = [", "archs = [] # ", "name the archs to build for, such as x86-64-v3"),
        ("archs = [", 'archs = ["x86"] # ', "unknown arch 'x86'; known: "),
        ('version = "0.1.0"\n', "", "`project.version`"),
        (
            'version = "0.1.0"',
            'version = "first"',
            "Invalid version `first` from field `project.version`",
        ),
        (
            "packages =",
            'packages = ["src/other"] #',
            "expected a package in {root}/src/other, with an __init__.py that declares its ops",
        ),
        (
            "packages =",
            "only-include =",
            "no op is declared in any package of the wheel; call opjit.add_path(",
        ),
    ],
)
def test_what_cannot_be_built_gets_an_error_that_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, told: str
) -> None:
    # A name of its own, as this process declares its op.
    root = new_project(tmp_path.name.replace("test", "project"), tmp_path)
    file = root / "pyproject.toml"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after, 1))
    monkeypatch.chdir(root)
    with pytest.raises((OpjitError, ValueError)) as caught:
        build.build_wheel(str(tmp_path / "dist"))
    assert told.replace("{root}", str(root)) in str(caught.value)
    assert list(tmp_path.rglob("*.whl")) == []


def test_a_project_s_folder_that_is_there_stays(tmp_path: Path) -> None:
    new_project("mine", tmp_path)
    (tmp_path / "mine" / "README.md").write_text("mine")
    with pytest.raises(OpjitError, match="exists already; nothing was written"):
        new_project("mine", tmp_path)
    assert (tmp_path / "mine" / "README.md").read_text() == "mine"
    with pytest.raises(OpjitError, match="'1st' cannot be a wheel's name"):
        new_project("1st", tmp_path)
    assert os.listdir(tmp_path) == ["mine"]
