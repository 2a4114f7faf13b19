"""Programs whose results once differed between the two ways to build them."""

import itertools
from pathlib import Path

import pytest
import torch

import opjit
from opjit.errors import BuildError
from tests.cpp_extension.fuzz.both import Case, Compared, compare

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(3000)]


def function(name: str, code: str, *calls: str) -> Case:
    """A program of the function `f`, which the calls name."""
    return Case(
        name,
        code,
        [f'm.def("{name}", &f);', f'm.def("{name}_wrapped", torch::wrap_pybind_function(f));'],
        [call.replace("f(", f"m.{name}{way}(") for call in calls for way in ("", "_wrapped")],
    )


def overloads(name: str, types: list[str], values: str) -> Case:
    """Every two of the types in both orders, and all in every rotation, with each value."""
    orders = [
        *itertools.permutations(types, 2),
        *(types[number:] + types[:number] for number in range(len(types))),
    ]
    code = [
        f'std::string f{number}({kind}) {{ return "{kind}"; }}' for number, kind in enumerate(types)
    ]
    binds = [
        f'm.def("{name}{number}", &f{types.index(kind)});'
        for number, order in enumerate(orders)
        for kind in order
    ]
    return Case(
        name,
        "\n".join(code),
        binds,
        [f"m.{name}{number}({value})" for number in range(len(orders)) for value in values.split()],
    )


NUMBERS = "3 True 2.5 1j None 'a' x scalar i[0,0] np.int64(3) np.float32(1) np.bool_(True) np.array(3) Index() Int() Float() Truth() float"
TEXT = "#include <sstream>\nstd::string f(at::Tensor x) {{ {} }}"
CASES = [
    overloads("c_overloads", ["double", "int64_t", "bool", "at::Tensor", "std::string"], NUMBERS),
    overloads(
        "c_overloads_complex", ["std::complex<double>", "int64_t", "at::Tensor", "float"], NUMBERS
    ),
    overloads(
        "c_overloads_lists",
        [
            "std::vector<double>",
            "std::vector<int64_t>",
            "std::vector<at::Tensor>",
            "std::optional<double>",
        ],
        "[1] [True] [1.5] [] None [x] [x,1] (1,2) range(2) {1} x np.array([1]) np.array(3) 'ab' torch.Size([1]) [None]",
    ),
    function(
        "c_below",
        "at::Tensor f(at::Tensor x) { at::AutoDispatchBelowAutograd guard; return x * 2; }",
        "f(grad)",
        "f(x)",
    ),
    function(
        "c_modes",
        "at::Tensor f(at::Tensor x) { c10::InferenceMode guard; at::AutoGradMode on(true); return x * 2; }",
        "f(grad)",
        "f(x)",
    ),
    function(
        "c_slice",
        "std::vector<int64_t> f(at::Tensor x) { return x.sizes().slice(1).vec(); }",
        "f(x)",
        "f(scalar)",
        "f(x3)",
    ),
    function(
        "c_item",
        "double f(at::Tensor x) { return x.sum().item<double>(); }",
        "f(x)",
        "f(meta)",
        "under(Raises(KeyError('k')), lambda: f(x))",
        "faked(lambda x: f(x), x)",
    ),
    function(
        "c_channels",
        "at::Tensor f(at::Tensor x) { return x.contiguous(at::MemoryFormat::ChannelsLast); }",
        "f(meta)",
        "f(image)",
        "f(x)",
    ),
    function(
        "c_dense",
        "at::Tensor f(at::Tensor x) { return x.to_dense(); }",
        "f(jagged)",
        "f(coo)",
        "f(nested)",
    ),
    function(
        "c_sizes",
        "std::vector<int64_t> f(at::Tensor x) { return x.sizes().vec(); }",
        "f(jagged)",
        "f(nested)",
        "f(coo)",
    ),
    function(
        "c_size",
        "int64_t f(at::Tensor x) { return x.size(0); }",
        "f(nested)",
        "f(jagged)",
        "f(csr)",
        "f(scalar)",
    ),
    function(
        "c_contiguous",
        "bool f(at::Tensor x) { return x.is_contiguous(at::MemoryFormat::ChannelsLast); }",
        "f(csr)",
        "f(image)",
        "f(nested)",
    ),
    function(
        "c_itemsize",
        "int64_t f(std::optional<at::Tensor> x) { return x.value_or(at::Tensor()).itemsize(); }",
        "f(x)",
        "f(None)",
    ),
    function(
        "c_layout",
        TEXT.format(
            'TORCH_CHECK(x.dim() > 9, x.layout(), at::MemoryFormat::ChannelsLast, at::kSparse); return "";'
        ),
        "f(coo)",
        "f(image)",
        "f(csr)",
        "f(jagged)",
    ),
    function(
        "c_dtype",
        TEXT.format(
            "std::ostringstream s; s << x.dtype() << x.scalar_type() << x.device().type(); return s.str();"
        ),
        "f(quantised)",
        "f(x)",
        "f(cx)",
        "f(meta)",
    ),
    function(
        "c_scalar",
        TEXT.format(
            "return c10::str(x.item(), c10::Scalar(true), c10::Scalar(2.0), x.sizes(), x.options());"
        ),
        "f(scalar)",
        "f(cx[0, 0])",
        "f(mask[0, 0])",
        "f(i[0, 0])",
    ),
    function(
        "c_bool",
        "bool f(bool x) { return x; }",
        "f(float)",
        "f(torch.Tensor)",
        "f(True)",
        "f(None)",
        "f(3)",
        "f(scalar)",
        "f(Truth())",
        "f(Broken())",
        "f(np.bool_(0))",
        "f(lies(bool))",
    ),
    function(
        "c_numbers",
        "std::tuple<int64_t, double> f(std::tuple<int64_t, double> x) { return x; }",
        "f((1, 2))",
        "f([1, 2.5])",
        "f(b'ab')",
        "f('ab')",
        "f((1,))",
    ),
    function(
        "c_vector",
        "std::vector<int64_t> f(std::vector<int64_t> x) { return x; }",
        "f(np.array(3))",
        "f(np.array([1, 2]))",
        "f(scalar)",
        "f(iter([1]))",
        "f(b'ab')",
    ),
    function(
        "c_text",
        "std::string f(std::string x) { return x; }",
        "f('a')",
        "f(b'a')",
        "f(bytearray(b'a'))",
        "f(lies(bytearray))",
        "f(Mock(spec=str))",
        "f('\\ud800')",
    ),
    function(
        "c_dtypes",
        "at::ScalarType f(at::ScalarType x) { return x; }",
        "f(torch.int8)",
        "f(lies(torch.dtype))",
        "f(Mock(spec=torch.dtype))",
        "f(1)",
    ),
    function(
        "c_devices",
        "at::Device f(at::Device x) { return x; }",
        "f(torch.device('meta'))",
        "f(lies(torch.device))",
        "f(Mock(spec=torch.device))",
        "f('cpu')",
    ),
    Case(
        "c_pickle",
        "int64_t f(int64_t x) { return x; }",
        ['m.def("f", &f, "doc", py::arg("x") = 3);'],
        [
            "pickled(m.f, m)",
            "m.f.__name__",
            "m.f.__module__",
            "m.f.__doc__",
            "m.f()",
            "m.f(x=2)",
            "m.f(y=2)",
        ],
    ),
    Case(
        "c_switch",
        "int f(at::Tensor x) { switch (x.dtype()) { default: return 1; } }",
        ['m.def("switch", &f);'],
        ["m.switch(x)"],
    ),
]


@pytest.fixture(scope="module")
def compared(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    kept = pytestconfig.pluginmanager.has_plugin("cacheprovider")
    return compare(
        CASES,
        Path(pytestconfig.cache.mkdir("differences")) if kept else tmp_path_factory.getbasetemp(),
    )


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_the_fast_way_gives_torchs_results(name: str, compared: Compared) -> None:
    assert [one[1:] for one in compared.differences if one.case.name == name] == []


def test_torchs_headers_compile_all_but_one(compared: Compared) -> None:
    assert list(compared.wrong) == ["c_switch"]


def test_a_standard_that_torchs_headers_refuse_is_refused() -> None:
    if "C++20" not in (Path(torch.__file__).parent / "include/ATen/ATen.h").read_text(
        encoding="utf-8"
    ):
        pytest.skip("this torch takes C++17")
    with pytest.raises(BuildError, match=r"C\+\+20"):
        opjit.load_inline(
            "old_standard", "int f() { return 1; }", functions="f", extra_cflags=["-std=c++17"]
        )


def test_a_header_that_is_named_by_its_path_is_left_as_it_is(tmp_path: Path) -> None:
    """Light headers replace torch's headers by files of the same names in a folder of the build."""
    header = tmp_path / "mine.h"
    header.write_text("#define MINE 7\n")
    beside = tmp_path / "beside" / "other.h"
    beside.parent.mkdir()
    beside.write_text("#define OTHER 1\n")
    source = tmp_path / "absolute.cpp"
    source.write_text(
        f'#include <torch/extension.h>\n#include "{header}"\n#include "beside/../beside/other.h"\n'
        "int64_t f(at::Tensor x) { return x.numel() + MINE + OTHER; }\n"
        'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("f", &f); }\n'
    )
    module = opjit.load("absolute_header", [str(source)])
    assert module.f(torch.ones(2)) == 10
    assert header.read_text() == "#define MINE 7\n"
    assert beside.read_text() == "#define OTHER 1\n"
