"""`import opjit` needs no torch, and whichever comes first, both end up whole."""

import ast

import pytest

from opjit import late_torch
from tests.helpers import fresh, module
from tests.test_house import MODULES


def imported(module: str) -> set[str]:
    """The modules that importing one imports: no function of it runs, and TYPE_CHECKING is false."""
    found = set[str]()
    for node in ast.parse(MODULES[module].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & MODULES.keys() or {node.module}
    return found


def test_what_needs_no_torch_imports_nothing_that_does() -> None:
    free = {
        module
        for module in MODULES
        if module.startswith("opjit.") and not late_torch.needs_torch(module.partition(".")[2])
    }
    assert {"opjit.request", "opjit.store.store", "opjit.recipe.toolchain"} <= free
    assert {
        module: bad
        for module in free
        if (
            bad := {
                name
                for name in imported(module)
                if name.partition(".")[0] == "torch"
                or (name.startswith("opjit.") and name not in free)
            }
        )
    } == {}


@pytest.mark.parametrize(
    "first",
    [
        "import opjit; assert 'torch' not in sys.modules; opjit.get",
        "from opjit.operators.op import Op",
        "from opjit.api import get",
        "import importlib.util as u, opjit; u.find_spec('torch')",
        "import opjit.request; assert 'torch' not in sys.modules",
        "from opjit.backends import cuda",
    ],
)
def test_the_ops_are_there_once_torch_is(first: str) -> None:
    fresh(
        f"import sys; {first}\nimport torch\nassert torch.ops.opjit.allreduce(torch.ones(3)) == 3\n"
        "assert not [finder for finder in sys.meta_path if 'late_torch' in type(finder).__module__]",
        cold=True,
    )


@pytest.mark.parametrize("words", ["path", "ls", "stats", "prune", "clear"])
def test_a_command_that_only_reads_the_cache_imports_no_torch(words: str) -> None:
    done = module("opjit", "cache", words, changes={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == 0, done.stderr
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "opjit.cli" in names
    assert "torch" not in names
