"""An op's library in a C++ program: TorchScript and AOTInductor find the op, and no Python runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from tests.helpers import ROOT, fresh

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(1800)]
EXAMPLE = ROOT / "examples" / "10_wheel" / "run.cpp"
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
torch._inductor.aoti_compile_and_package(torch.export.export(Model(), (torch.ones(4),)), package_path={folder!r} + "/model.pt2")
"""
PACKAGE = ("#include <torch/script.h>", "#include <torch/csrc/inductor/aoti_package/model_package_loader.h>\n#include <torch/torch.h>")
LOAD = ("""    torch::jit::Module model = torch::jit::load(words[count - 1]);
    std::cout << model.forward({torch::arange(4.0)}).toTensor() << std::endl;
""", """    torch::inductor::AOTIModelPackageLoader model(words[count - 1]);
    std::cout << model.run({torch::arange(4.0)})[0] << std::endl;
""")


def program(folder: Path, text: str) -> Path:
    (folder / "run.cpp").write_text(text, encoding="utf-8")
    places = [place for folder_ in cpp_extension.include_paths() for place in ("-isystem", folder_)]
    where = Path(torch.__file__).parent / "lib"
    words = [shutil.which("c++") or "c++", "-std=c++20", "-O0", "-w", *places, str(folder / "run.cpp"), "-o", str(folder / "run"),
             f"-L{where}", f"-Wl,-rpath,{where}", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    subprocess.run(words, check=True)
    return folder / "run"


def test_torchscript_and_aotinductor_find_the_ops(tmp_path: Path) -> None:
    libraries = fresh(BUILD.format(folder=str(tmp_path)), {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}).stdout.split()
    text = EXAMPLE.read_text(encoding="utf-8")
    packaged = text.replace(*PACKAGE).replace(*LOAD)
    assert packaged.count("Loader") == 1
    for name, source in (("model.pt", text), ("model.pt2", packaged)):
        run = program(tmp_path, source)
        done = subprocess.run([run, *libraries, tmp_path / name], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert [float(line) for line in done.stdout.split()[:4]] == [6.0, 8.5, 11.0, 13.5]
    without = subprocess.run([run, *libraries[1:], tmp_path / "model.pt2"], capture_output=True, text=True, check=False)
    assert without.returncode != 0
    subprocess.run([run, libraries[0], *libraries, tmp_path / "model.pt2"], check=True)  # one of them twice


