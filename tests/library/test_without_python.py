"""Ops in a C++ program: TorchScript finds them, a package of AOTInductor holds them, and no Python runs."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from opjit.library import package
from opjit.recipe import schema
from tests.helpers import ROOT, fresh
from tests.tensors import DEVICES

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(1800)]
EXAMPLES = ROOT / "examples"
BUILD = """
import sys, warnings
import torch, opjit
warnings.simplefilter("ignore")
scale = opjit.inline('cpptest::scale(Tensor x, float a=2.5, str kind="a\\\\"b") -> Tensor', like="x", c='''
opjit_status scale_cpu(const opjit_tensor *x, double a, const char *kind, opjit_tensor *out)
{{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous && strlen(kind) == 3, "scale takes contiguous float32");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = (float)a * ((const float *)x->data)[i];
    return OPJIT_OK;
}}''')
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.ops.cpptest.scale(x) + torch.ops.opjit.allreduce(x)
for name in ("cpptest::scale", "allreduce"):
    print(opjit.build_library(name, {folder!r}, "cpu"))
torch.jit.trace(Model(), torch.ones(4)).save({folder!r} + "/model.pt")
opjit.aoti_compile_and_package(torch.export.export(Model(), (torch.ones(4),)), package_path={folder!r} + "/model.pt2")
"""
DIRECT = """
import warnings
import torch, opjit
warnings.simplefilter("ignore")
if {device!r} == "cpu":
    opjit.inline("pt2test::mix(Tensor x, Tensor? u, Tensor? v,"
                 " float a, float? b, float? c, int k, int? n, int? m, ScalarType d, bool t=True) -> Tensor",
                 like="x", c='''
opjit_status mix_cpu(const opjit_tensor *x, const opjit_tensor *u, const opjit_tensor *v,
                     double a, const double *b, const double *c, int64_t k, const int64_t *n, const int64_t *m,
                     opjit_dtype d, bool t, opjit_tensor *out)
{{
    OPJIT_CHECK(u && !v && b && !c && n && !m && d == OPJIT_FLOAT64 && t, "an argument is lost");
    OPJIT_CHECK(*(const float *)x->data >= 0, "the first element is negative");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = (float)(a * ((const float *)x->data)[i] + ((const float *)u->data)[i] + *b * (double)k + (double)*n);
    return OPJIT_OK;
}}''')
class Model(torch.nn.Module):
    def forward(self, x):
        rows = [x[None, i:i + 1] for i in range(3)]
        cells = torch.ops.opjit.lltm_forward(rows[0], x.new_ones(3, 2), x[:3], rows[1], rows[2])
        mixed = torch.ops.pt2test.mix(x, 2 * x, None, 0.5, 0.25, None, -3, 7, None, torch.float64) if x.is_cpu else x
        return torch.ops.opjit.allreduce(x, dtype=torch.float64), torch.ops.opjit.allreduce(x), *cells, mixed
x = torch.arange(1.0, 5, device={device!r})
opjit.aoti_compile_and_package(torch.export.export(Model(), (x,)), package_path={path!r})
print([each.tolist() for each in Model()(x)])
"""
RUN = """
import sys, torch
model = torch._inductor.aoti_load_package({path!r})
x = torch.arange(1.0, 5, device={device!r})
for _ in range(100):
    found = model(x)
print([each.tolist() for each in found])
try:
    assert {device!r} != "cpu" or model(-x) is None
except RuntimeError:
    assert "opjit" not in sys.modules
"""


def program(folder: Path, text: str) -> Path:
    (folder / "run.cpp").write_text(text, encoding="utf-8")
    places = [place for folder_ in cpp_extension.include_paths() for place in ("-isystem", folder_)]
    where = Path(torch.__file__).parent / "lib"
    words = [
        shutil.which("c++") or "c++",
        "-std=c++20",
        "-O0",
        "-w",
        *places,
        str(folder / "run.cpp"),
        "-o",
        str(folder / "run"),
        f"-L{where}",
        f"-Wl,-rpath,{where}",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
        "-ldl",
    ]
    subprocess.run(words, check=True)
    return folder / "run"


def printed(command: list[str | Path]) -> list[float]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()[:4]]


def test_torchscript_finds_the_ops_and_a_package_of_aotinductor_holds_them(tmp_path: Path) -> None:
    """scale takes a str, so the model calls it through the dispatcher; allreduce it calls directly."""
    libraries = fresh(
        BUILD.format(folder=str(tmp_path)), {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    ).stdout.split()
    run = program(tmp_path, (EXAMPLES / "10_wheel" / "run.cpp").read_text(encoding="utf-8"))
    assert printed([run, *libraries, tmp_path / "model.pt"]) == [6.0, 8.5, 11.0, 13.5]
    # One of them twice.
    assert printed([run, libraries[0], *libraries, tmp_path / "model.pt"]) == [
        6.0,
        8.5,
        11.0,
        13.5,
    ]
    assert (
        subprocess.run(
            [run, *libraries[1:], tmp_path / "model.pt"], capture_output=True, check=False
        ).returncode
        != 0
    )
    for path in libraries:
        Path(path).resolve().unlink()
    run = program(tmp_path, (EXAMPLES / "07_from_cpp" / "run.cpp").read_text(encoding="utf-8"))
    assert printed([run, tmp_path / "model.pt2"]) == [6.0, 8.5, 11.0, 13.5]


def test_a_model_does_not_call_an_op_directly_that_has_the_name_of_a_function_of_torchs() -> None:
    direct = {
        name: package._takes_shim(schema.parse(f"pt2test::{name}(Tensor x) -> Tensor"), "cuda")
        for name in ("abs", "abs_", "mine")
    }
    assert direct == {"abs": False, "abs_": True, "mine": True}


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_calls_ops_directly_with_every_kind_of_argument(
    tmp_path: Path, device: str
) -> None:
    """In Python, too, without opjit: nothing declares the ops there. An error of a kernel is the model's."""
    path = str(tmp_path / "model.pt2")
    eager = fresh(
        DIRECT.format(device=device, path=path), {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    ).stdout
    assert fresh(RUN.format(device=device, path=path), cold=True).stdout == eager
