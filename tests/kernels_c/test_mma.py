"""opjit_mma.h: each product and each copy against plain torch; and archs=["sm_90a"], which builds what one GPU alone has."""

from pathlib import Path

import pytest
import torch

import opjit
from opjit import request
from opjit.errors import CompileError, DeclarationError
from opjit.store import elf, inventory
from opjit.store.store import default_store
from opjit.wanted import target_of
from tests import helpers
from tests.helpers import MakeOp

# A row of a, and a column of b, has 32 bytes along k in all types. A register has 4 of them.
PRODUCT = """
#include "opjit_mma.h"
template <typename element, typename sum>
static __device__ void multiply(const uint32_t *a, const uint32_t *b, sum *out)
{
    const int lane = threadIdx.x, row = lane / 4, word = lane % 4;
    const uint32_t of_a[4] = {a[row * 8 + word], a[(row + 8) * 8 + word], a[row * 8 + word + 4], a[(row + 8) * 8 + word + 4]};
    const uint32_t of_b[2] = {b[row * 8 + word], b[row * 8 + word + 4]};
    sum d[4] = {};
    OPJIT_PRODUCT(d, of_a, of_b, element());
    for (int i = 0; i < 4; i++)
        out[(row + i / 2 * 8) * 8 + word * 2 + i % 2] = d[i];
}
static __global__ void product(const uint32_t *a, const uint32_t *b, OPJIT_SUM *out)
{
#if OPJIT_HAS_MMA
    multiply<OPJIT_ELEMENT>(a, b, out);
#endif
}
opjit_status product_cuda(const opjit_tensor *a, const opjit_tensor *b, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty(out, OPJIT_SIZES(16, 8), OPJIT_RESULT, a));
    product<<<1, 32, 0, stream>>>((const uint32_t *)a->data, (const uint32_t *)b->data, (OPJIT_SUM *)out->data);
    return OPJIT_LAUNCHED();
}
"""
KINDS = {
    torch.bfloat16: ("opjit_bfloat16", "opjit_mma_m16n8k16"),
    torch.float16: ("opjit_half", "opjit_mma_m16n8k16"),
    torch.float32: ("float", "opjit_mma_m16n8k8"),
    torch.int8: ("int8_t", "opjit_mma_m16n8k32"),
    torch.float8_e4m3fn: ("opjit_float8_e4m3fn", "opjit_mma_m16n8k32"),
    torch.float8_e5m2: ("opjit_float8_e5m2", "opjit_mma_m16n8k32"),
}


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_warp_s_product_is_torch_s(make_op: MakeOp, cuda_device: str, dtype: torch.dtype) -> None:
    element, product = KINDS[dtype]
    is_integer = dtype == torch.int8
    macros = {
        "OPJIT_ELEMENT": element,
        "OPJIT_PRODUCT": product,
        "OPJIT_SUM": "int32_t" if is_integer else "float",
        "OPJIT_RESULT": "OPJIT_INT32" if is_integer else "OPJIT_FLOAT32",
    }
    code = "".join(f"#define {name} {value}\n" for name, value in macros.items()) + PRODUCT
    result = torch.int32 if is_integer else torch.float32
    op = make_op(
        "product(Tensor a, Tensor b) -> Tensor",
        cuda=code,
        fake=lambda a, b: a.new_empty((16, 8), dtype=result),
    )
    depth = 32 // dtype.itemsize
    # TF32 and float8 have few bits: small integers are exact in all of these types.
    a = torch.randint(-4, 5, (16, depth), device=cuda_device).to(dtype)
    b = torch.randint(-4, 5, (8, depth), device=cuda_device).to(dtype)
    assert torch.equal(op(a, b).double(), a.double() @ b.double().T)


# The tile of a tensor of 1 to 5 dimensions, in the order of its memory.
TILE = """
#include "opjit_mma.h"
static __global__ void copy(const __grid_constant__ opjit_tensor_map map, const __grid_constant__ opjit_ints5 at, int dim, int count,
                            float *out)
{
#if OPJIT_HAS_TMA
    __shared__ __align__(1024) float tile[4096];
    __shared__ opjit_mbarrier full;
    if (threadIdx.x == 0) {
        opjit_mbarrier_init(&full, 1);
        opjit_fence_mbarrier_init();
        opjit_mbarrier_arrive_expect_tx(&full, count * sizeof(float));
        const int *i = at.at;
        switch (dim) {
        case 1: opjit_tma_load_1d(tile, &map, &full, i[0]); break;
        case 2: opjit_tma_load_2d(tile, &map, &full, i[0], i[1]); break;
        case 3: opjit_tma_load_3d(tile, &map, &full, i[0], i[1], i[2]); break;
        case 4: opjit_tma_load_4d(tile, &map, &full, i[0], i[1], i[2], i[3]); break;
        case 5: opjit_tma_load_5d(tile, &map, &full, i[0], i[1], i[2], i[3], i[4]); break;
        }
    }
    __syncthreads();
    opjit_mbarrier_wait(&full, 0);
    for (int i = threadIdx.x; i < count; i += blockDim.x)
        out[i] = tile[i];
#endif
}
opjit_status tile_cuda(const opjit_tensor *x, const opjit_ints *box, const opjit_ints *at, opjit_tensor *out, cudaStream_t stream)
{
    opjit_tiled tiled = {x->data, x->dtype, x->dim, {}, {}};
    opjit_tensor_map map;
    opjit_ints5 first = {};
    uint32_t sizes[5];
    int64_t count = 1;
    for (int64_t d = 0; d < x->dim && d < 5; d++) {
        tiled.sizes[d] = x->sizes[d];
        tiled.strides[d] = x->strides[d];
        sizes[d] = (uint32_t)box->data[d];
        first.at[x->dim - 1 - d] = (int)at->data[d];
        count *= box->data[d];
    }
    OPJIT_TRY(opjit_tensor_map_encode(&map, &tiled, sizes, OPJIT_NO_SWIZZLE));
    OPJIT_TRY(opjit_empty(out, box->len, box->data, x->dtype, x));
    copy<<<1, 128, 0, stream>>>(map, first, (int)x->dim, (int)count, (float *)out->data);
    return OPJIT_LAUNCHED();
}
""".replace("static __global__", "struct opjit_ints5 {\n    int at[5];\n};\nstatic __global__", 1)


@pytest.fixture
def tile(make_op: MakeOp) -> opjit.Op:
    return make_op(
        "tile(Tensor x, int[] box, int[] at) -> Tensor",
        cuda=TILE,
        fake=lambda x, box, at: x.new_empty(box),
    )


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5])
def test_tma_loads_a_tile_with_zeros_outside_of_the_tensor(
    tile: opjit.Op, cuda_device: str, dim: int
) -> None:
    sizes, box, at = [3, 2, 5, 7, 64][-dim:], [2, 2, 3, 4, 16][-dim:], [2, 1, 3, 5, 56][-dim:]
    x = torch.rand(sizes, device=cuda_device)
    padded = torch.zeros([s + b for s, b in zip(sizes, box, strict=True)], device=cuda_device)
    padded[tuple(slice(size) for size in sizes)] = x
    want = padded[tuple(slice(a, a + b) for a, b in zip(at, box, strict=True))]
    assert torch.equal(tile(x, box, at), want)


@pytest.mark.parametrize(
    ("sizes", "offset", "box", "message"),
    [
        ((8, 16), 1, (4, 16), "data at a multiple of 16 bytes"),
        ((8, 15), 0, (4, 8), "that of dimension 0 has 60 bytes"),
        ((8, 16), 0, (4, 3), "a row of a tile is a multiple of 16 bytes, not 12"),
        ((8, 1024), 0, (4, 512), "1 to 256 elements in a dimension; dimension 1 has 512"),
        ((0, 16), 0, (4, 16), "sizes from 1 to 2^32 - 1; dimension 0 has 0"),
        ((1,) * 5 + (16,), 0, (1,) * 5 + (16,), "1 to 5 dimensions, not 6"),
    ],
)
def test_the_error_of_a_tensor_map_says_which_rule_is_broken(
    tile: opjit.Op,
    cuda_device: str,
    sizes: tuple[int, ...],
    offset: int,
    box: tuple[int, ...],
    message: str,
) -> None:
    count = torch.Size(sizes).numel()
    x = torch.rand(count + offset, device=cuda_device)[offset:].reshape(sizes)
    with pytest.raises(RuntimeError) as error:
        tile(x, box, [0] * len(sizes))
    assert message in str(error.value)


# --- Archs, without a GPU --------------------------------------------------------------------------------------------------------------

WGMMA = """
#include "opjit_mma.h"
static __global__ void fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
opjit_status fenced_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    fence<<<1, 128, 0, stream>>>();
    return OPJIT_LAUNCHED();
}
"""


def _fenced(folder: Path, namespace: str, options: str = "") -> opjit.Op:
    folder.mkdir()
    (folder / "fenced.cu").write_text(WGMMA)
    (folder / "op.py").write_text(
        helpers.op_py(f"{namespace}::fenced(Tensor x) -> Tensor", options)
    )
    [op] = opjit.add_path(folder)
    return op


@pytest.mark.nvcc
def test_archs_builds_for_one_gpu_alone_where_a_request_names_its_capability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    op = _fenced(tmp_path / "one", "archtest", ", archs=['sm_90a']")
    entry = request.entry(op, target_of("cuda", "sm_90"))
    assert elf.inspect(entry.library.read_bytes()).cuda_archs == {"sm_90a"}
    assert request.entry(op, target_of("cuda", "sm_90a")).key == entry.key
    [item] = inventory.scan(default_store())
    assert item.arch.startswith("sm_90a.")


@pytest.mark.nvcc
def test_without_archs_the_error_says_what_to_declare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    op = _fenced(tmp_path / "none", "noarchtest")
    with pytest.raises(CompileError, match=r'declare the op with archs=\["sm_90a"\]'):
        request.entry(op, target_of("cuda", "sm_90"))


@pytest.mark.parametrize("archs", ["'sm_90a'", "['9.0a']", "['sm_90']"])
def test_archs_of_another_form_are_refused(tmp_path: Path, archs: str) -> None:
    with pytest.raises(DeclarationError, match="archs is a list of names such as sm_90a, not"):
        _fenced(tmp_path / "wrong", "wrongarchtest", f", archs={archs}")


@pytest.mark.nvcc
def test_a_library_has_one_binary_for_two_names_of_an_arch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    _fenced(tmp_path / "two", "twicearchtest", ", archs=['sm_90a']")
    library = opjit.build_library(
        "twicearchtest::fenced", tmp_path / "out", arch=["sm_90", "sm_90a"], name="fenced"
    )
    [binary] = library.parent.rglob("prebuilt/**/*.so")
    assert elf.inspect(binary.read_bytes()).cuda_archs == {"sm_90a"}
