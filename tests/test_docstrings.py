"""Every public function and class has an example in its docstring, and each example prints what it says."""

import doctest
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import opjit
from opjit.store.entry import Entry
from tests.helpers import copy_parts, fresh

FILES = {
    "my_ops/scale/op.py": """\
import torch
import opjit

@opjit.op("mylib::scale(Tensor x, float a) -> Tensor")
def scale(x, a):
    return torch.empty_like(x)

@scale.reference
def reference(x, a):
    return x * a

@scale.samples
def samples(device):
    yield torch.ones(3, device=device), 2.5
""",
    "my_ops/scale/scale.c": """\
#include "opjit.h"

opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "scale takes a contiguous float32 tensor");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = (float)a * ((const float *)x->data)[i];
    return OPJIT_OK;
}
""",
    "ext.cpp": """\
#include <torch/extension.h>

at::Tensor twice(at::Tensor x) { return x + x; }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("twice", &twice); }
""",
    "some_package.py": "from torch.utils import cpp_extension\nmodule = cpp_extension.load('ext', ['ext.cpp'])\n",
}
SCALE = '[scale] = opjit.add_path("my_ops")'
BUILDS_CPP = re.compile(r"aoti|cpp_extension|distributed|^load(_inline)?$")
BEFORE = {  # what an example takes for granted
    **dict.fromkeys(("Sample", "Workload", "build_library", "load_library"), SCALE),
    "aoti_compile_and_package": "model = torch.nn.Module()\nmodel.forward = lambda x: torch.ops.opjit.allreduce(x)",
    "watch": "train = lambda: None",
    "explain": f'{SCALE}\nopjit.precompile(["mylib::scale"])\nwith open("my_ops/scale/scale.c", "a") as file: print("//\\n//", file=file)',
    "check_precompiled": (
        "from opjit.backends import for_device, targets\nfrom opjit.catalog import registry\nfrom opjit.declare import oplist\n"
        'recorded = oplist._recorded(registry.find("allreduce"), targets.here(for_device("cpu")))\n'
        'with open("ops.json", "w") as file: file.write(oplist.dump_list([recorded]))'
    ),
    **dict.fromkeys(
        ("cache", *(f"cache.{name}" for name in ("clear", "entries", "verify", "stats", "pack"))),
        'opjit.precompile(["allreduce"])',
    ),
    "cache.unpack": 'import os\nos.environ["OPJIT_TRUST"] = "unsigned"\nopjit.precompile(["allreduce"])\nopjit.cache.pack("ops.pack")',
}
MODULES: dict[str, ModuleType] = {
    "cache": opjit.cache,
    "cpp_extension": opjit.cpp_extension,
    "distributed": opjit.distributed,
    "testing": opjit.testing,
}
CODE = """
import doctest, sys, warnings
import torch, opjit
warnings.simplefilter("ignore")  # -W error is for opjit's own tests: torch warns of its own functions
sys.path.insert(0, "")
names = {{"torch": torch, "opjit": opjit}}
exec({before!r}, names)
parsed = doctest.DocTestParser().get_doctest({text!r}, names, {name!r}, {name!r}, 0)
sys.exit(doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(parsed).failed)
"""


def public() -> dict[str, object]:
    """Functions and classes of `opjit`, functions of its modules for users, and the modules themselves."""
    found: dict[str, object] = {"opjit": opjit, **MODULES}
    found |= {name: value for name in opjit.__all__ if callable(value := getattr(opjit, name))}
    for module, value in MODULES.items():
        found |= {
            f"{module}.{name}": function
            for name in vars(value)["__all__"]
            if inspect.isfunction(function := getattr(value, name))
        }
    return found


def test_the_public_names_are_those_of_every_room() -> None:
    assert {
        "opjit",
        "get",
        "Op",
        "cache.prune",
        "cpp_extension.patched",
        "distributed.ready",
        "testing.check",
    } <= public().keys()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if BUILDS_CPP.search(name) else ())
        for name in public()
    ],
)
def test_an_example_prints_what_it_says(
    tmp_path: Path, name: str, built_once: tuple[Path, Entry]
) -> None:
    text = inspect.getdoc(public()[name]) or ""
    assert doctest.DocTestParser().get_examples(text), f"{name} has no example"
    for path, content in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content, encoding="utf-8")
    copy_parts(built_once[1], tmp_path / "opjit")
    code = CODE.format(before=BEFORE.get(name, ""), text=text.replace("…", "..."), name=name)
    fresh(code, {"OPJIT_CACHE": str(tmp_path / "opjit"), "CUDA_VISIBLE_DEVICES": ""}, cwd=tmp_path)
