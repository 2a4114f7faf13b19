"""The plug-in of vLLM and SGLang: it replaces builders in a process that names it."""

import pytest

from tests import helpers
from tests.helpers import ROOT

# What the loaders of vLLM 0.33 and SGLang 0.5.23 do with an entry point in each of their processes.
LOAD = """
import importlib
module, _, name = {point!r}.partition(":")
load = getattr(importlib.import_module(module), name)
load()
load()
"""
PRINT = "print(torch.utils.cpp_extension.load.__module__)\n"


def point(group: str) -> str:
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    document = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    return str(document["project"]["entry-points"][group]["opjit"])


@pytest.mark.parametrize("imported", [True, False])
@pytest.mark.parametrize(
    ("group", "variable"),
    [("vllm.general_plugins", "VLLM_PLUGINS"), ("sglang.srt.plugins", "SGLANG_PLUGINS")],
)
def test_a_server_that_names_the_plug_in_has_opjits_builders(
    group: str, variable: str, imported: bool
) -> None:
    before = "import torch.utils.cpp_extension\n" if imported else ""
    code = before + LOAD.format(point=point(group)) + "import torch.utils.cpp_extension\n" + PRINT
    named = helpers.fresh(code, {variable: "other,opjit"})
    assert named.stdout == "opjit.cpp_extension\n"


@pytest.mark.parametrize("value", [None, "", "opjit_other"])
def test_an_installed_plug_in_that_nobody_names_changes_nothing(value: str | None) -> None:
    code = LOAD.format(point=point("vllm.general_plugins"))
    code += "import torch.utils.cpp_extension\n" + PRINT
    changes = {"VLLM_PLUGINS": value, "SGLANG_PLUGINS": None}
    assert helpers.fresh(code, changes).stdout == "torch.utils.cpp_extension\n"
