"""The texts that opjit generates for a build: the key holds a number that stands for them."""

import hashlib
import re
from pathlib import Path

import pytest

from opjit import backends, resources
from opjit.builder import cuda, glue, layouts, nvrtc
from opjit.builder.host_device_split import Halves
from opjit.recipe.recipe import GLUE_GENERATOR
from opjit.recipe.schema import parse
from tests.stub_device import Stub

GENERATED = {8: "b4afa66ba1abad05"}  # what is generated for the ops below, by number
SCHEMAS = [
    "a::writes(Tensor x, Tensor(a!) y, Tensor(b!)? z, Tensor(c!)[] zs, Tensor(d!)[]? more) -> ()",
    "a::takes(Tensor? x, Tensor[] xs, Tensor[]? more, int n, SymInt? m, float f, float? g, bool b, bool? c, str s, str? t, ScalarType d, "
    "ScalarType? e, int[] ns, float[]? fs, bool[2] bs, int errno, *, str last='\"?\\\\') -> Tensor",
    "a::makes(Tensor x) -> (Tensor, Tensor? second, Tensor[] third, int, float f, bool b)",
    "a::number(Tensor[] x) -> int",
    "a::draws(Tensor x, Generator? generator=None) -> Tensor",
    "a::writes_(Tensor(a!) x, float a) -> Tensor(a!)",
    "a::out(Tensor? x, *, Tensor(a!) out, Tensor(b!) other) -> (Tensor(a!), Tensor(b!))",
]
CODE = """\
#include <cooperative_groups.h>
namespace { __constant__ float table[4]; static __device__ int count; }
__host__ __device__ inline float twice(float v) { return 2 * v; }
__device__ __noinline__ float thrice(float v) { return 3 * v; }
namespace ns { template <typename T, int n = 3> static __global__ void scale(const T *x, T *y = nullptr) { y[0] = n * x[0]; } }
extern "C" __global__ void plain(float *x) { extern __shared__ float tile[]; x[0] = thrice(tile[0]); }
static int launches;
int run(float *x, cudaStream_t stream) { ns::scale<float><<<1, dim3(2, 2), 0, stream>>>(x, x); plain<<<1, 256>>>(x); return launches; }
"""


def test_other_generated_text_has_another_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holes = {
        name: sorted({*re.findall(r"\$\w+", resources.template(name))})
        for name in ("glue.c.in", "kernel.in", "fatbin.c.in")
    }
    # The key holds the templates' own text.
    monkeypatch.setattr(resources, "template", lambda name: "\n".join(holes[name]))
    found = [
        text
        for schema in map(parse, SCHEMAS)
        for backend in (backends.for_device("cpu"), backends.for_device("cuda"), Stub(tmp_path))
        for text in glue.render(schema, backend, "op.c").values()
    ]
    halves = Halves(CODE)
    found += [
        halves.host,
        halves.device,
        *sorted(halves.kernel_names),
        *sorted(halves.internal),
        *map(str, halves.variables.items()),
    ]
    layout = layouts.Layout("job", "j", ("a", "b"))
    found += [layout.note(3), layout.check([[16, 8, 0, 8]])]
    found += [cuda._registration({"_Z1a": "_Z1b"}, [(True, 16, "_Z1c", "_Z1d")])]
    found += [
        f"{name}\n{text}"
        for name, text in {**nvrtc.headers(), "nv/target": nvrtc.own_header("nv_target.h")}.items()
    ]
    digest = hashlib.sha256("\0".join(found).encode()).hexdigest()[:16]
    told = "increase recipe.GLUE_GENERATOR, which is part of the key, and enter it with this digest"
    assert GENERATED.get(GLUE_GENERATOR) == digest, told
