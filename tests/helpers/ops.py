"""The ops that tests declare and build: their folders, recipes and targets."""

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import opjit
from opjit import backends, resources
from opjit.backends import Backend, targets
from opjit.backends.cpu import machine_of
from opjit.backends.targets import Target
from opjit.catalog import registry
from opjit.recipe import recipe, schema, toolchain
from opjit.recipe.recipe import Recipe

BUNDLED = [
    op.qualified for op in registry.all_ops() if op.folder.parent == resources.folder("kernels_c")
]
MakeOp = Callable[..., opjit.Op]  # the fixture make_op
Growth = Callable[[Callable[[], object], int], int]  # the fixture growth
OnCompile = Callable[[str], None]  # the fixture on_compile
# .ci/aarch64 sets it: the tools that the compilers run are another machine's.
EMULATED = "QEMU_LD_PREFIX" in os.environ
CPU_ARCHS = [*backends.for_device("cpu").archs()][::-1]  # lowest first
# This machine's kind; it runs two at least.
LEVELS = [arch for arch in CPU_ARCHS if machine_of(arch) == platform.machine()]
FOREIGN = next(arch for arch in CPU_ARCHS if arch not in LEVELS)
SCHEMA = "keytest::plus(Tensor x) -> Tensor"
PLUS = """\
#include "opjit.h"
#include "amount.h"

opjit_status plus_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32, "plus takes float32, not %s", opjit_dtype_name(x->dtype));
    OPJIT_CHECK(x->contiguous, "plus takes a contiguous tensor");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = ((const float *)x->data)[i] + AMOUNT;
    return OPJIT_OK;
}
"""
PLUS_CUDA = """\
#include "opjit_cuda.h"
#include "amount.h"

static __global__ void plus_kernel(const float *from, float *to, int64_t n)
{
    OPJIT_KERNEL_LOOP(i, n)
        to[i] = from[i] + AMOUNT;
}

opjit_status plus_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "plus takes a contiguous float32 tensor");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    plus_kernel<<<opjit_blocks(x->numel, 256), 256, 0, stream>>>((const float *)x->data, (float *)out->data, x->numel);
    return OPJIT_LAUNCHED();
}
"""
# Gets and calls it, in a process that has declared it.
GET = "print(opjit.get('keytest::plus', 'cpu')(torch.ones(1)).tolist())\n"


def op_py(schema: str, options: str = "") -> str:
    """The op.py of an op whose result is like its first argument."""
    name = schema.partition("(")[0].rpartition("::")[2]
    return f'import torch\nimport opjit\n\n@opjit.op("{schema}"{options})\ndef {name}(x, *others):\n    return torch.empty_like(x)\n'


OP_PY = op_py(SCHEMA)


def write_op(folder: Path, **changed: str) -> Path:
    """An op's folder with everything: op.py, plus.c, plus.cu, amount.h. Names in `changed` have ``_`` for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {
        "op_py": OP_PY,
        "plus_c": PLUS,
        "plus_cu": PLUS_CUDA,
        "amount_h": "#define AMOUNT 1.0f\n",
        **changed,
    }.items():
        stem, _, suffix = name.rpartition("_")
        (folder / f"{stem}.{suffix}").write_text(text, encoding="utf-8")
    return folder


def elementwise(name: str, value: str, scalars: str = "") -> str:
    """The C of an op whose result has `value`, an expression of ``from[i]``, for each element of a float32 tensor."""
    return f"""
opjit_status {name}_cpu(const opjit_tensor *x, {scalars}opjit_tensor *out)
{{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    const float *from = (const float *)x->data;
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = {value};
    return OPJIT_OK;
}}
"""


def declared(namespace: str, folder: Path, patch: pytest.MonkeyPatch) -> opjit.Op:
    """The op of `write_op` in another namespace, declared once in a process; its folder is the test's own."""
    known = registry.declared(f"{namespace}::plus")
    if known is None:
        [known] = opjit.add_path(write_op(folder, op_py=OP_PY.replace("keytest", namespace)))
    declaration = replace(known.declaration, folder=write_op(folder))
    patch.setattr(known, "declaration", declaration)
    return known


def write_cxx(folder: Path, text: str = 'extern "C" int value() { return VALUE; }\n') -> str:
    """The path of a C++ source without any header."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plain.cpp").write_text(text)
    return str(folder / "plain.cpp")


def cpu() -> Backend:
    return backends.for_device("cpu")


def cuda_target(arch: str) -> Target:
    nvcc = toolchain.find_nvcc(None)
    assert nvcc is not None
    return targets.named(arch, backends.for_device("cuda"), nvcc.version)


def is_across_ranks(op: opjit.Op) -> bool:
    """Whether the op has an argument for a group of ranks, which its samples make on the device of their tensors."""
    return any(argument.name == "group" for argument in op.schema.arguments)


def install_package(site: Path, name: str, point: str, modules: Mapping[str, str]) -> None:
    """An installed distribution with an entry point for ops, and its modules by their paths."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[opjit.ops]\n{point}\n")
    for path, text in modules.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)


def describe(
    folder: Path,
    target: Target | None = None,
    text: str = SCHEMA,
    compiler: Mapping[str, str] | None = None,
) -> Recipe:
    """The recipe of the op in a folder, as api.describe makes it, but without declaring the op to torch."""
    target = target or targets.here(cpu())
    parsed = schema.parse(text)
    compilers = [compiler] if compiler is not None else toolchain.identities_of(target, None)
    source = folder / f"{parsed.name}{target.backend.suffix}"
    flags = target.backend.flags(target.arch, target.runtime)
    return recipe.describe(parsed, target, source, flags, compilers)


def declare(folder: Path) -> str:
    """The first lines of a fresh process's code: imports, and the op of a folder."""
    return (
        "import warnings\nimport torch\nimport opjit\nfrom opjit.catalog import registry\nfrom pathlib import Path\n"
        f"registry.declare_folder(Path({str(folder)!r}))\n"
    )
