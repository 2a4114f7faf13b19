"""Translation of CUDA C: what becomes of a text, and that each line stays where it is."""

import re

import pytest

from opjit.emulate.translate import translate
from opjit.recipe.nvcc_flags import NvccOnly

CODE = """\
extern __shared__ float dynamic[];
template <typename T, int N>
__global__ void __launch_bounds__(N * 2) twice(const T *x,
                                               T *y, int n = 3)
{
    __shared__ T tile[N][N +
                      1], last;
    alignas(16) __shared__ float wide[4];
    tile[0][threadIdx.x] = x[n];
}
#define LAUNCH(k) k<float, 8><<<grid, 32>>>(x, \\
                                            y)
void host(float *x, float *y) { ns::twice<float, 8><<<dim3(1), 32, sizeof(float) * (2 >> 1)>>>(x, y); }
"""


def test_every_line_keeps_its_number() -> None:
    translated = translate(CODE)
    lines = translated.splitlines()
    assert len(lines) == len(CODE.splitlines())
    for number, text in ((1, "dynamic"), (3, "twice"), (8, "wide"), (9, "tile[0]"), (13, "host")):
        assert text in lines[number - 1]


@pytest.mark.parametrize(
    "text",
    [
        "(emu_configured(EMU_HERE, dim3(1), 32, sizeof(float) * (2 >> 1)), ns::twice<float, 8>(x, y), emu_launched());",
        "(emu_configured(EMU_HERE, grid, 32), k<float, 8>(x, ",
        "static_cast<void (*)(const T *x, T *y, int n)>(&twice<T, N>)>(EMU_TEXT(twice), N * 2, emu_arguments)",
        "struct tile_emu_t { T tile[N][N + 1], last; };",
        "auto &last = *(decltype(tile_emu_t::last) *)emu_shared(&last_emu_v)",
        "struct wide_emu_t { alignas(16) float wide[4]; };",
        "static const emu_dynamic<decltype(dynamic_emu_t::dynamic)> dynamic = ",
    ],
)
def test_a_form_becomes_cpp(text: str) -> None:
    assert text in " ".join(translate(CODE).split())


def test_a_kernel_in_a_macro_is_translated_and_its_lines_stay() -> None:
    code = "#define KERNEL(name) __global__ void name(int *x, \\\n  int n) { \\\n __shared__ int a[1 \\\n + 1]; }\nKERNEL(k)"
    translated = translate(code)
    assert translated.count("\\\n") == 3
    assert translated.count("\n") == code.count("\n")
    assert "(&name)>(EMU_TEXT(name), 0, " in translated
    assert "int a[1 + 1]; }" in translated


@pytest.mark.parametrize(
    ("ptx", "code"),
    [
        (
            'asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");',
            "(v) = emu_ptx_load((const EMU_VALUE((v)) *)((p)), "
            'emu_order_of("ld.acquire.sys.global.u32 %0, [%1]"));',
        ),
        (
            'asm volatile("fence.acq_rel.sys;" ::: "memory");',
            'emu_fence(emu_scope_of("fence.acq_rel.sys"));',
        ),
        ('asm("mov.u64 %0, %%globaltimer;" : "=l"(t));', "(t) = emu_nanoseconds();"),
        (
            'asm("dp2a.lo.u32.u32 %0, %1;" : "=r"(v) : "r"(x));',
            "inline PTX is not emulated: dp2a.lo.u32.u32 %0, %1",
        ),
    ],
)
def test_ptx_is_a_function_or_an_error(ptx: str, code: str) -> None:
    assert code in translate(f"__device__ void f() {{ {ptx} }}")


def test_a_text_that_is_not_understood_is_refused() -> None:
    with pytest.raises(NvccOnly, match="braces do not match"):
        translate("__global__ void f() {")


@pytest.mark.parametrize(
    "parameter", ["int", "half", "const half", "const float *", "::half", "std::size_t", "float[]"]
)
def test_an_unnamed_parameter_is_refused(parameter: str) -> None:
    assert re.search("unnamed parameter", str(_refusal(f"__global__ void f({parameter}) {{}}")))


@pytest.mark.parametrize(
    "parameter", ["int64_t half", "const half half", "unsigned Size", "const std::size_t *half"]
)
def test_a_parameter_can_have_the_name_of_a_type(parameter: str) -> None:
    assert parameter.split()[-1].strip("*") in translate(f"__global__ void f({parameter}) {{}}")


def _refusal(text: str) -> NvccOnly:
    with pytest.raises(NvccOnly) as refused:
        translate(text)
    return refused.value
