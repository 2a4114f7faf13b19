"""torch.ops.<namespace>.<op> finds ops of OPJIT_PATH and of installed packages, which nothing declared yet."""

from __future__ import annotations

from pathlib import Path

import pytest

import opjit
from tests.helpers import fresh, install_package, write_op


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "ops"
    write_op(folder / "plus", op_py="import torch, opjit\n"
             "assert not hasattr(torch.ops.nstest, 'other')  # asks while it is being read\n"
             "@opjit.op('nstest::plus(Tensor x) -> Tensor')\ndef plus(x): return torch.empty_like(x)\n")
    monkeypatch.setenv("OPJIT_PATH", str(folder))
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    return folder


def test_an_op_of_opjit_path_is_found_by_its_name(path: Path) -> None:
    fresh("""
        import torch, opjit
        assert torch.ops.nstest.plus(torch.ones(2)).tolist() == [2, 2]
        assert not hasattr(torch.ops.nstest, "minus") and not hasattr(torch.ops.aten, "no_such_op")
        try:
            torch.ops.nstest.minus
        except AttributeError as error:
            assert "no attribute 'minus'" in str(error), error
    """)


def test_a_compiled_function_finds_it_too(path: Path) -> None:
    fresh("""
        import torch, opjit
        compiled = torch.compile(lambda x: torch.ops.nstest.plus(x) * 2, fullgraph=True, backend="eager")
        assert compiled(torch.ones(2)).tolist() == [4, 4]
    """)


def test_an_op_of_an_installed_package_is_found_by_its_name(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    install_package(site, "nstest", "nstest = nstest_ops", {})
    install_package(site, "stranger", "stranger = stranger_ops",
                    {"stranger_ops.py": "raise SystemExit('an entry point of another namespace was loaded')\n"})
    path.rename(site / "nstest_ops")
    (site / "nstest_ops" / "__init__.py").touch()
    monkeypatch.delenv("OPJIT_PATH")
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    fresh("""
        import torch, opjit
        assert torch.ops.nstest.plus(torch.ones(2)).tolist() == [2, 2]
        assert not hasattr(torch.ops.nstest, "minus") and not hasattr(torch.ops.nowhere, "plus")
    """)


def test_a_fault_in_opjit_path_is_the_reason_and_hasattr_is_false(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPJIT_PATH", str(tmp_path / "missing"))
    fresh("""
        import torch, opjit
        assert not hasattr(torch.ops.nstest, "plus")
        try:
            torch.ops.nstest.plus
        except AttributeError as error:
            assert "torch.ops.nstest.plus was not found: OPJIT_PATH names" in str(error), error
    """)


def test_dir_shows_the_public_names() -> None:
    assert dir(opjit) == sorted(opjit.__all__)
    assert all(hasattr(opjit, name) for name in dir(opjit))
