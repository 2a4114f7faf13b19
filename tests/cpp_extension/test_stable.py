"""Extensions for torch's stable ABI: which are one binary for many versions of torch and Python, and which only ask for it."""

import importlib.machinery
import json
import os
import re
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import opjit
from opjit.cpp_extension import binary, identity, stable
from opjit.cpp_extension.arguments import LoadCall
from opjit.cpp_extension.entries import entries
from opjit.store.store import Store
from tests import helpers

OTHER = os.environ.get("OPJIT_TEST_OTHER_PYTHON")
# In the style of the stable example of pytorch/extension-cpp.
MULADD = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
using torch::stable::Tensor;
Tensor mymuladd_cpu(const Tensor& a, const Tensor& b, double c) {
  STD_TORCH_CHECK(a.scalar_type() == torch::headeronly::ScalarType::Float);
  Tensor result = torch::stable::empty_like(a);
  const float *p = a.const_data_ptr<float>(), *q = b.const_data_ptr<float>();
  float* r = result.mutable_data_ptr<float>();
  for (int64_t i = 0; i < result.numel(); i++) r[i] = p[i] * q[i] + c;
  return result;
}
STABLE_TORCH_LIBRARY(NAME, m) { m.def("mymuladd(Tensor a, Tensor b, float c) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(NAME, CPU, m) { m.impl("mymuladd", TORCH_BOX(&mymuladd_cpu)); }
"""
DEFINED = "// a comment\n#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 10) << 48))\n"
FLAG = "-DTORCH_TARGET_VERSION=0x020a000000000000"
LIMITED = "-DPy_LIMITED_API=0x030A0000"
MODULE = """
#include <Python.h>
PyMODINIT_FUNC PyInit_NAME() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "NAME"};
  return PyModule_Create(&definition);
}
"""
UNUSED = "#if 0\n#include <torch/library.h>\n#endif\n#define HEADER <vector>\n#include HEADER\n"
MORE = {  # programs that name the macro and use more than the stable ABI, and why each is kept for its torch and Python
    "module": (MODULE + MULADD, "it includes Python.h"),
    "python": (f"{MODULE}#include <opcode.h>\n{MULADD}", "it includes opcode.h"),
    "unlimited": (
        f'{MODULE}{MULADD}extern "C" int PyRun_AnyFile(FILE*, const char*); int call() {{ return PyRun_AnyFile(0, 0); }}\n',
        "it imports PyRun_AnyFile",
    ),
    "version": (
        MULADD + "int minor() { return TORCH_VERSION_MINOR; }\n",
        "it has TORCH_VERSION_MINOR",
    ),
    "layout": (MULADD + "#undef TORCH_TARGET_VERSION\n", "it has #undef TORCH_TARGET_VERSION"),
    "header": (
        MULADD
        + "#define HEADER <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>\n#include HEADER\n",
        r"it includes torch/.*c_shim_cpu\.h",
    ),
    "cxx": (
        MULADD + 'void other() __asm__("_ZN3c1012get_num_threadsEv");\nvoid call() { other(); }\n',
        "it imports _ZN3c10",
    ),
    "later": (
        MULADD + 'extern "C" int torch_from_blob(); int call() { return torch_from_blob(); }\n',
        r"it imports torch_from_blob, which is no function of torch's stable ABI of 2\.10",
    ),
}


def call_of(folder: Path, text: str, name: str = "stable_extension", *flags: str) -> LoadCall:
    (folder / "muladd.cpp").write_text(text.replace("NAME", name))
    return LoadCall(
        name=name,
        sources=[str(folder / "muladd.cpp")],
        extra_cflags=list(flags),
        is_python_module=False,
    )


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        ("", [FLAG], "2.10"),
        ("", ["-D", FLAG[2:] + "ULL"], "2.10"),
        (DEFINED + "#include <a.h>\n", [], "2.10"),
        ("", [], ""),
        ("", ["-DTORCH_TARGET_VERSION=TORCH_ABI_VERSION"], ""),
        ("", [FLAG, "-UTORCH_TARGET_VERSION"], ""),
        ("", ["-DTORCH_TARGET_VERSION=0x027f000000000000"], ""),
        ("", ["-DTORCH_TARGET_VERSION=0x020a010000000000"], ""),
        ("", [FLAG, LIMITED], "2.10"),
        ("", [FLAG, "-D", "Py_LIMITED_API=3"], "2.10"),
        ("", [FLAG, "-DPy_LIMITED_API"], ""),
        ("", [FLAG, "-DPy_LIMITED_API=0x03990000"], ""),
        ("#include <a.h>\n" + DEFINED, [], ""),
        ("#if 1\n" + DEFINED + "#endif\n", [], ""),
    ],
)
def test_the_version_is_one_that_all_of_a_source_is_compiled_for_and_this_torch_has(
    tmp_path: Path, text: str, flags: list[str], expected: str
) -> None:
    assert (
        stable.target(identity.describe(call_of(tmp_path, text, "a", *flags), None), False)
        == expected
    )


def test_a_python_without_the_gil_has_another_key_with_and_without_the_limited_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a Python opens abi3t binaries (PEP 803), but no abi3 ones."""

    def key(*flags: str) -> str:
        described = identity.describe(call_of(tmp_path, MODULE, "a", *flags), None)
        described = replace(described, stable=stable.target(described, False))
        return json.dumps(described.document(), sort_keys=True, default=str)

    abi3 = [FLAG, LIMITED]
    abi3t = [*abi3, "-DPy_TARGET_ABI3T=0x030f0000"]
    kinds = [[], abi3, abi3t]
    with_gil = [key(*flags) for flags in kinds]
    monkeypatch.setattr(sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    monkeypatch.setattr(
        importlib.machinery,
        "EXTENSION_SUFFIXES",
        [".cpython-315t-x86_64-linux-gnu.so", ".abi3t.so"],
    )
    without_gil = [key(*flags) for flags in kinds]
    assert len({*with_gil, *without_gil}) == 6


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "flags"), [(UNUSED, [FLAG]), (DEFINED, []), (MODULE, [FLAG, LIMITED])]
)
def test_one_binary_serves_every_later_torch_and_every_python(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, flags: list[str]
) -> None:
    store = Store(here)
    name = f"stable_{len(flags)}"
    call = call_of(tmp_path, before + MULADD, name, *flags)
    opjit.load(**call.for_torch())
    assert getattr(torch.ops, name).mymuladd(torch.ones(2), torch.ones(2), 2.0).tolist() == [3, 3]
    [entry] = entries(name, store)
    assert "for any Python and torch from 2.10 on" in str(entry)
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    for version in ("2.10.0+cu126", "2.99.1", "3.0.0a0"):
        monkeypatch.setattr(torch, "__version__", version)
        assert (
            getattr(binary.of_call(call, store.notes).find(store), "folder", None) == entry.folder
        )
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    assert binary.of_call(call, store.notes).find(store) is None


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.skipif(
    OTHER is None, reason="OPJIT_TEST_OTHER_PYTHON names no Python with another torch"
)
def test_a_module_that_is_built_here_is_imported_under_another_torch_without_a_compiler(
    here: Path, tmp_path: Path
) -> None:
    call = LoadCall(
        **{
            **call_of(tmp_path, MODULE + MULADD, "elsewhere", FLAG, LIMITED).for_torch(),
            "is_python_module": True,
        }
    )
    built = binary.of_call(call, Store(here).notes).build(Store(here))
    code = f"""import opjit, os, sys, torch
module = opjit.load(**{call.for_torch()!r})
print(module.__name__, os.path.samefile(module.__file__, {str(built.library)!r}), torch.__version__ != {torch.__version__!r},
      torch.ops.elsewhere.mymuladd(torch.ones(2), torch.ones(2), 2.0).tolist())"""
    done = helpers.fresh(
        code, {**helpers.no_compiler(tmp_path), "OPJIT_OFFLINE": "1"}, python=OTHER
    )
    assert done.stdout == "elsewhere True True [3.0, 3.0]\n"


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_a_program_that_uses_more_than_the_stable_abi_is_kept_for_its_torch_and_why_says_so(
    here: Path, tmp_path: Path, name: str
) -> None:
    store = Store(here)
    (text, reason) = MORE[name]
    wanted = binary.of_call(
        call_of(
            tmp_path, text, f"more_{name}", "-O0", FLAG, *([] if name == "module" else [LIMITED])
        ),
        store.notes,
    )
    built = wanted.build(store)
    [entry] = entries(f"more_{name}", store)
    assert entry.document["torch"][0] == torch.__version__
    assert getattr(wanted.find(store), "folder", None) == built.folder
    assert re.search(f"it works only with this torch and Python, because {reason}", str(entry)), (
        str(entry)
    )
