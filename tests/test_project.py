"""A project made by `opjit new --project`: pip builds its wheel through opjit's backend, and installs it editable."""

from __future__ import annotations

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

from opjit import project
from opjit.backends.cpu import Cpu
from opjit.cli import main
from opjit.errors import OpjitError
from opjit.scaffold import new_project
from opjit.wheel import WheelError
from tests import helpers
from tests.helpers import environment, fresh, no_compiler

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the backend reads pyproject.toml with Python 3.11's reader")


def pip(*arguments: str, cwd: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], cwd=cwd, env=environment(), text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, done.stdout


def test_pip_builds_a_wheel_that_runs_without_a_compiler(tmp_path: Path) -> None:
    made = CliRunner().invoke(main, ["new", "--project", "my-kernels", str(tmp_path)])
    assert made.exit_code == 0, made.output
    root = tmp_path / "my-kernels"
    arch = Cpu().host_arch()
    readme = (root / "README.md").read_text()
    printed_lines = made.output.strip().replace(", then ", "\n")
    install, wheel_it = re.findall(r"pip ((?:install|wheel) .*?)(?: && pytest|$)", printed_lines, re.MULTILINE)
    for printed in (install, wheel_it):
        assert "--no-build-isolation" in printed
        assert f"pip {printed} " in readme
    pip(*shlex.split(wheel_it), "--quiet", "--config-settings", f"arch={arch}", "-w", str(tmp_path / "dist"), cwd=root)
    pip(*shlex.split(install), "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path / "installed"), cwd=root)
    assert sorted(os.listdir(root)) == ["README.md", "pyproject.toml", "src", "tests"]
    [wheel] = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        told = archive.read("my_kernels-0.1.0.dist-info/METADATA").decode()
        archive.extractall(tmp_path / "site")
    assert {"my_kernels/__init__.py", "my_kernels/scale_add/op.py", "my_kernels/scale_add/scale_add.c"} <= set(names)
    assert [name.split("/")[5] for name in names if name.endswith(".so")] == [arch]
    for line in ("Name: my-kernels", "Requires-Dist: torch>=2.10", "Requires-Dist: pytest; extra == 'test'", "Provides-Extra: test",
                 "# my-kernels"):
        assert line in told.splitlines()
    path = os.pathsep.join([str(tmp_path / "site"), str(helpers.ROOT), os.environ.get("PYTHONPATH", "")])
    code = "import torch, my_kernels\nprint(my_kernels.scale_add(torch.ones(2), torch.ones(2), 2.0).tolist())"
    assert fresh(code, {**no_compiler(tmp_path), "PYTHONPATH": path, "OPJIT_CACHE": str(tmp_path / "c")}).stdout == "[3.0, 3.0]\n"


def test_installed_editable_it_is_found_by_its_entry_point_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = new_project("editable-kernels", tmp_path, backward=True)
    monkeypatch.chdir(root)
    name = project.build_editable(str(tmp_path))
    assert name == "editable_kernels-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / name) as archive:
        archive.extractall(tmp_path / "site")
    code = f"""
        import site
        site.addsitedir({str(tmp_path / "site")!r})
        import opjit
        print(opjit.get("editable_kernels::scale_add", "cpu").name(), opjit.catalog.find("editable_kernels::scale_add").folder)
        """
    assert fresh(code).stdout.split() == ["editable_kernels::scale_add", str(root / "src" / "editable_kernels" / "scale_add")]
    with tarfile.open(tmp_path / project.build_sdist(str(tmp_path))) as source:
        files = source.getnames()
    assert "editable_kernels-0.1.0/tests/test_editable_kernels.py" in files
    assert "editable_kernels-0.1.0/src/editable_kernels/scale_add/scale_add.c" in files


def test_its_own_tests_pass(tmp_path: Path) -> None:
    root = new_project("tested-kernels", tmp_path, backward=True)
    path = os.pathsep.join([str(root / "src"), str(helpers.ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "-k", "hand or results or drawn"],
                          cwd=root, env=environment({"PYTHONPATH": path, "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path / "h")}), text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("before", "after", "told"), [
    ('readme =', 'authors = [{name = "A"}]\nreadme =', "does nothing with project.authors; leave it out"),
    ("archs =", "arch =", "does nothing with tool.opjit.arch; leave it out"),
    ('version = "0.1.0"\n', "", "expected name and version under"),
    ('version = "0.1.0"', 'version = "first"', "'first' is no version"),
    ('name = "told"', 'name = "other"', "expected the package other with an __init__.py"),
])
def test_what_the_backend_does_not_do_is_said(tmp_path: Path, before: str, after: str, told: str) -> None:
    root = new_project("told", tmp_path)
    file = root / "pyproject.toml"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after, 1))
    with pytest.raises(WheelError) as caught:
        project.read(root)
    assert told in str(caught.value)


def test_a_project_s_folder_that_is_there_stays(tmp_path: Path) -> None:
    new_project("mine", tmp_path)
    (tmp_path / "mine" / "README.md").write_text("mine")
    with pytest.raises(OpjitError, match="exists already; nothing was written"):
        new_project("mine", tmp_path)
    assert (tmp_path / "mine" / "README.md").read_text() == "mine"
    with pytest.raises(OpjitError, match="'1st' cannot be a wheel's name"):
        new_project("1st", tmp_path)
    assert os.listdir(tmp_path) == ["mine"]
