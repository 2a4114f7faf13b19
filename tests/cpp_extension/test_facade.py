"""Light headers for C++ extensions: torch's layouts, counted references, and torch's own headers for all other programs."""

from __future__ import annotations

import subprocess
import sysconfig
import warnings
from collections.abc import Mapping
from contextlib import suppress
from operator import methodcaller
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import opjit
from opjit.cpp_extension import build, entries, facade, vocabulary
from opjit.cpp_extension.identity import Extension, describe
from opjit.recipe import toolchain
from opjit.store.entry import Entry
from opjit.store.manifest import Manifest
from opjit.store.store import Store, default_root
from tests.helpers import fresh

pytestmark = pytest.mark.torch
REAL = str(Path(torch.__file__).parent / "include")
PROGRAM = """
torch::Tensor doubled(torch::Tensor x) {
    TORCH_CHECK(x.dim() > 0, "x has ", x.dim(), " dimensions");
    return x + x;
}
"""
# Types that cross the border to libtorch, and what a light header calls them.
TYPES = ["at::Tensor", "at::TensorBase", "c10::Scalar", "c10::SymInt", "c10::Device", "c10::IntArrayRef", "std::optional<c10::Device>",
         "std::optional<at::Tensor>", "std::optional<c10::Scalar>", "c10::OptionalArrayRef<int64_t>", "at::indexing::Slice",
         "at::indexing::TensorIndex", "c10::IListRef<at::Tensor>", "at::Generator", "c10::Storage", "c10::Stream", "c10::ScalarType"]


def layout(folder: Path, include: list[str], headers: list[str]) -> str:
    """The size, alignment and way of being passed of each type, as symbols of an object file."""
    lines = [f"#include <{header}>" for header in headers]
    for number, name in enumerate(TYPES):
        facts = {"size": f"sizeof({name})", "align": f"alignof({name})", "trivial": f"1 + std::is_trivially_copyable_v<{name}>"}
        for what, value in facts.items():
            lines.append(f'extern "C" {{ extern char {what}_{number}[{value}]; char {what}_{number}[{value}] = {{1}}; }}')
    (folder / "layout.cpp").write_text("\n".join(lines))
    compiler = toolchain.require_cxx(None).path
    words = [compiler, "-std=c++20", "-w", "-c", "layout.cpp", "-o", "layout.o", *(f"-I{place}" for place in include), "-isystem", REAL,
             f"-I{sysconfig.get_path('include')}"]
    subprocess.run(words, cwd=folder, check=True, timeout=300)
    return subprocess.run(["nm", "-S", "layout.o"], cwd=folder, check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout


def sizes(listing: str) -> dict[str, str]:
    words = [line.split() for line in listing.splitlines()]
    return {line[3]: line[1] for line in words if len(line) == 4 and line[3].startswith(("size_", "align_", "trivial_"))}


def test_each_type_has_torchs_layout(tmp_path: Path) -> None:
    light, real = tmp_path / "light", tmp_path / "real"
    light.mkdir()
    real.mkdir()
    found = sizes(layout(light, facade.write([], light / "facade"), ["torch/extension.h"]))
    expected = sizes(layout(real, [], ["ATen/TensorIndexing.h", "ATen/core/IListRef.h"]))
    assert len(expected) == 3 * len(TYPES)
    assert found == expected


def loaded(name: str, text: str, **arguments: Any) -> Any:
    return opjit.load_inline(name, text, extra_cflags=["-O1"], **arguments)


def described(name: str) -> list[Manifest]:
    """The manifests of an extension's entries, the newest first."""
    from opjit.store.entry import read

    return [read(entry.folder)[0] for entry in entries.entries(name, Store(default_root()))]


@pytest.fixture(scope="module")
def counting() -> ModuleType:
    text = """
        #include <map>
        torch::Tensor same(torch::Tensor x) { return x; }
        const torch::Tensor &reference(const torch::Tensor &x) { return x; }
        std::vector<torch::Tensor> many(torch::Tensor x, int64_t n) { return std::vector<torch::Tensor>(n, x); }
        int64_t moved(std::vector<torch::Tensor> xs) {
            torch::Tensor a = xs.at(0), b = std::move(a), c;
            a = b; c = a; c = c; b = std::move(c); std::swap(a, b); a = torch::Tensor();
            std::map<int, torch::Tensor> kept; kept[1] = b; kept[2] = b; xs.push_back(b); xs.insert(xs.begin(), b);
            return b.numel() + a.defined();
        }
        torch::Tensor fails(torch::Tensor x) {
            torch::Tensor y = x, z = x.view({-1});
            TORCH_CHECK(false, "with ", y.numel(), " values");
            return z;
        }
        torch::Tensor fails_inside(torch::Tensor x) { torch::Tensor y = x; return torch::matmul(y, y.reshape({3, 2, 2})); }
        std::optional<torch::Tensor> maybe(std::optional<torch::Tensor> x) { return x; }
        std::tuple<torch::Tensor, torch::Tensor> pair(torch::Tensor x) { return {x, x}; }
        torch::Tensor column(torch::Tensor x) { using namespace torch::indexing; return x.index({Slice(), 0}); }
        torch::Tensor joined(torch::Tensor x) { return torch::cat({x, x}, 0) + torch::stack({x, x}).sum(); }
        void filled(torch::Tensor x) { x[0] = 7; x[1][0] = torch::ones({}); }
    """
    names = ["same", "reference", "many", "moved", "fails", "fails_inside", "maybe", "pair", "column", "joined", "filled"]
    module = loaded("counting", text, functions=names)
    assert described("counting")[0].built_with["headers"] == "light headers"
    assert isinstance(module, ModuleType)
    return module


CALLS = ["m.same(x)", "m.reference(x)", "m.many(x, 5)", "m.moved([x, x])", "m.fails(x)", "m.fails_inside(x)", "m.maybe(x)", "m.maybe(None)",
         "m.pair(x)", "m.column(x)", "m.joined(x)", "m.filled(x)", "m.same(1)", "m.many(x, 'a')", "m.moved([x, 1])"]


def uses(x: torch.Tensor) -> int:
    """The number of references to a tensor in C++."""
    return int(methodcaller("_use_count")(x))  # torch's stubs of some versions lack it


@pytest.mark.parametrize("call", CALLS)
def test_no_reference_is_lost_or_kept(counting: ModuleType, call: str) -> None:
    x = torch.arange(12.0).reshape(4, 3)
    before = uses(x)
    for _ in range(3):
        with suppress(RuntimeError, TypeError):
            eval(call, {"m": counting, "x": x})
        assert uses(x) == before


def test_a_failed_function_raises_what_torch_raises(counting: ModuleType) -> None:
    x = torch.ones(4, 3)
    with pytest.raises(RuntimeError, match=r"^with 12 values$"):
        counting.fails(x)
    with pytest.raises(TypeError, match=r"many\(\): incompatible function arguments[^$]*1. \(arg0: torch.Tensor, arg1: "):
        counting.many(x)
    assert counting.same(x) is x


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Extension]:
    """The extensions that would be built."""
    found: list[Extension] = []

    def built(extension: Extension, arguments: Mapping[str, Any], store: Store, must_store: bool) -> Entry:
        found.append(extension)
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "build", built)
    return found


@pytest.mark.parametrize(("arguments", "variable", "light"),
                         [({}, None, True), ({"fast": False}, None, False), ({}, "0", False), ({}, "1", True)])
def test_light_headers_can_be_switched_off(asked: list[Extension], monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any],
                                           variable: str | None, light: bool) -> None:
    if variable is not None:
        monkeypatch.setenv("OPJIT_FAST", variable)
    with pytest.raises(KeyboardInterrupt):
        loaded("switched", PROGRAM, functions="doubled", **arguments)
    assert bool(asked[0].facade) == light
    assert asked[0].key != asked[0]._replace(facade="" if light else facade.version()).key


MEANING = """
#include <cmath>
#include <functional>
double magnitude(double x) { return abs(x); }
int64_t whole(int64_t x) { return abs(x); }
std::vector<int64_t> widths(double y) {
    float x = static_cast<float>(y);
    return {sizeof(exp(x)), sizeof(sqrt(x)), sizeof(pow(x, x)), sizeof(floor(x)), sizeof(fabs(x)), sizeof(tanh(x)), sizeof(fmaxf(x, x))};
}
std::vector<bool> undefined() { torch::Tensor x; return {x.defined(), x.is_cuda(), x.is_cpu(), x.is_meta()}; }
bool floats(torch::Tensor x) { return x.is_floating_point(); }
torch::Tensor blob(int64_t strides, bool deleter) {
    static float values[6] = {1, 2, 3, 4, 5, 6};
    auto none = std::function<void(void *)>();
    if (deleter)
        return torch::from_blob(values, {2, 3}, none).clone();
    return torch::from_blob(values, {2, 3}, std::vector<int64_t>(strides, 3)).clone();
}
std::string pick(std::vector<double> values) { return "list of " + std::to_string(values.size()); }
std::string text(std::string value) { return value; }
int64_t product(at::IntArrayRef values) { int64_t p = 1; for (auto v : values) p *= v; return p; }
void warn_and_fail() { TORCH_WARN("a warning"); TORCH_CHECK(false, "the error"); }
bool with_gradients() { return at::GradMode::is_enabled(); }
static void more(py::module_ m) { m.def("late", [](int64_t) { return "int"; }); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("magnitude", &magnitude); m.def("whole", &whole); m.def("widths", &widths); m.def("undefined", &undefined);
    m.def("floats", &floats); m.def("blob", &blob); m.def("text", &text); m.def("product", &product);
    m.def("warn_and_fail", torch::wrap_pybind_function(warn_and_fail));
    m.def("with_gradients", &with_gradients, py::call_guard<torch::NoGradGuard>());
    m.def("pick", &pick); m.def("pick", &text);
    m.def("kind", [](int64_t) { return "int"; }); m.def("kind", [](bool) { return "bool"; });
    more(m); m.def("late", [](std::string) { return "str"; });
}
"""


@pytest.fixture(scope="module")
def meaning() -> Any:
    module = loaded("meaning", MEANING)
    assert described("meaning")[0].built_with["headers"] == "light headers"
    return module


def test_opjit_why_names_the_headers(meaning: Any) -> None:
    entry = entries.entries("meaning", Store(default_root()))[0]
    assert entry.headers == "light headers"
    assert "\n    with light headers" in str(entry)


def test_functions_of_the_c_library_have_the_overloads_of_c_plus_plus(meaning: Any) -> None:
    assert meaning.magnitude(-0.5) == 0.5
    assert meaning.whole(-(1 << 40)) == 1 << 40
    assert meaning.widths(1.0) == [4] * 7


def test_an_undefined_tensor_is_on_no_device(meaning: Any) -> None:
    assert meaning.undefined() == [False] * 4


def test_float8_is_a_floating_point_type(meaning: Any) -> None:
    assert meaning.floats(torch.zeros(2).to(torch.float8_e5m2))
    assert not meaning.floats(torch.zeros(2, dtype=torch.int64))


def test_memory_becomes_a_tensor_only_if_its_strides_fit(meaning: Any) -> None:
    assert meaning.blob(0, True).tolist() == [[1, 2, 3], [4, 5, 6]]  # an empty deleter is none
    with pytest.raises(RuntimeError, match="as many strides as sizes, got 1 and 2"):
        meaning.blob(1, False)


def test_an_overload_takes_what_pybind11_takes(meaning: Any) -> None:
    numpy = pytest.importorskip("numpy")
    assert meaning.pick(i for i in (1.0, 2.0)) == "list of 2"
    assert meaning.pick("a") == "a"
    assert meaning.text(bytearray(b"ab")) == "ab"
    assert [meaning.kind(value) for value in (numpy.bool_(True), True, 1, numpy.int64(1))] == ["bool", "int", "int", "int"]
    assert [meaning.late(1), meaning.late("a")] == ["int", "str"]


def test_sizes_are_lists_and_tuples(meaning: Any) -> None:
    assert [meaning.product([2, 3]), meaning.product((2, 3))] == [6, 6]
    for wrong in (range(2, 4), {2, 3}, (i for i in (2, 3)), 2, "23"):
        with pytest.raises(TypeError):
            meaning.product(wrong)


def test_an_error_comes_before_a_warning_that_is_one(meaning: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="the error"):
            meaning.warn_and_fail()


def test_a_guard_is_there_during_the_call(meaning: Any) -> None:
    assert torch.is_grad_enabled()
    assert not meaning.with_gradients()


REFUSED = {
    "#if PY_MAJOR_VERSION >= 3\n#endif": "Python's C interface",
    "#ifdef AT_MKL_ENABLED\n#endif": "AT_MKL_ENABLED",
    "at::Tensor f(at::Tensor x) { return x.std(0); }": "std or var",
    'const char *text = R"(a)";': "raw string",
    "const char quote = '\"'; TORCH_LIBRARY(ns, m) {} // \"": "TORCH_LIBRARY",
    "TORCH_LIBRARY(ns, m) {}": "TORCH_LIBRARY",
    "struct F : torch::autograd::Function<F> {};": "torch::autograd::Function",
    "torch::nn::Linear linear(1, 2);": "beyond operators",
    "#include <torch/csrc/autograd/custom_function.h>": "torch/csrc/autograd/custom_function.h",
    "#include <Python.h>": "Python.h",
    "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { py::class_<int>(m, \"A\"); }": "pybind11's class_",
    "void f(pybind11::dict d) {}": "pybind11's dict",
    "at::Storage f(at::Tensor x) { return x.storage(); }": "Storage",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_only_torch_has_is_named(asked: list[Extension], text: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        loaded("refused", text, functions=[])
    assert not asked[0].facade
    assert REFUSED[text] in asked[0].reason


@pytest.mark.parametrize("text", ["// TORCH_LIBRARY\n", "/* torch::nn::Linear */", 'const char *text = "PyTorch";',
                                  "struct Node { int Storage; };"])
def test_comments_and_names_of_ones_own_are_not_refused(asked: list[Extension], text: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        loaded("taken", text + PROGRAM, functions="doubled")
    assert asked[0].facade


@pytest.mark.parametrize("arguments", [{"extra_ldflags": ["-lhelper"]}, {"extra_ldflags": ["helper.o"]},
                                       {"extra_cflags": ["-D_GLIBCXX_DEBUG"]}])
def test_code_of_others_keeps_torchs_headers(asked: list[Extension], arguments: dict[str, Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        opjit.load_inline("linked", PROGRAM, functions="doubled", **arguments)
    assert not asked[0].facade


def test_a_header_of_the_program_is_read_too(tmp_path: Path, asked: list[Extension]) -> None:
    (tmp_path / "a.h").write_text("torch::nn::Linear linear(1, 2);\n")
    (tmp_path / "a.cpp").write_text('#include <torch/extension.h>\n#include "a.h"\n')
    with pytest.raises(KeyboardInterrupt):
        opjit.load("with_header", [str(tmp_path / "a.cpp")])
    assert "beyond operators" in asked[0].reason


def test_a_program_without_torch_keeps_its_headers(tmp_path: Path, asked: list[Extension]) -> None:
    (tmp_path / "a.cpp").write_text("int f() { return 1; }\n")
    with pytest.raises(KeyboardInterrupt):
        opjit.load("plain", [str(tmp_path / "a.cpp")], is_python_module=False)
    assert asked[0].reason == "it includes none of torch's headers"


@pytest.mark.slow
def test_a_program_that_light_headers_cannot_compile_is_built_with_torchs_own() -> None:
    text = "int64_t count(const torch::Tensor &x) { return x.use_count(); }"  # no method of light headers
    module = loaded("counted", text, functions="count")
    assert module.count(torch.ones(2)) >= 1
    headers = described("counted")[0].built_with["headers"]
    assert headers.startswith("torch's own headers: ")
    assert "use_count" in headers
    arguments = {"name": "counted", "cpp_sources": text, "cuda_sources": None, "functions": "count", "extra_cflags": ["-O1"]}
    program = f"""
import opjit
from opjit.cpp_extension import build
def forbidden(*_):
    raise SystemExit("it was built again")
build.build = forbidden
print(opjit.load_inline(**{arguments!r}).count.__name__)
"""
    assert fresh(program).stdout == "count\n"  # torch's entry is found, and light headers are not tried again


def test_the_text_of_every_source_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text("int a;\n")
    (tmp_path / "b.cpp").write_text("int b;\n")
    arguments = {"name": "two", "sources": [str(tmp_path / "a.cpp"), str(tmp_path / "b.cpp")], "build_directory": None, "with_cuda": None,
                 "extra_cflags": [], "extra_cuda_cflags": [], "extra_ldflags": [], "extra_include_paths": [], "is_standalone": False,
                 "is_python_module": True}
    assert sorted(vocabulary.texts(describe(arguments, None))) == ["int a;\n", "int b;\n"]
