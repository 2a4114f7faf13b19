"""Light headers for C++ extensions: counted references, the headers that names bring, and torch/extension.h for what is left."""

from __future__ import annotations

import hashlib
import re
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
from opjit.cpp_extension import build, entries, light
from opjit.cpp_extension.identity import Extension, describe
from opjit.cpp_extension.light import headers, macros, policy, table
from opjit.recipe import toolchain
from opjit.store.entry import Entry
from opjit.store.manifest import Manifest
from opjit.store.store import Store, default_root
from tests.helpers import fresh

pytestmark = pytest.mark.torch
PROGRAM = """
torch::Tensor doubled(torch::Tensor x) {
    TORCH_CHECK(x.dim() > 0, "x has ", x.dim(), " dimensions");
    return x + x;
}
"""

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


@pytest.mark.torch
@pytest.mark.parametrize("call", CALLS)
def test_no_reference_is_lost_or_kept(counting: ModuleType, call: str) -> None:
    x = torch.arange(12.0).reshape(4, 3)
    before = uses(x)
    for _ in range(3):
        with suppress(RuntimeError, TypeError):
            eval(call, {"m": counting, "x": x})
        assert uses(x) == before


@pytest.mark.torch
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


@pytest.mark.parametrize(("arguments", "variable", "taken"),
                         [({}, None, True), ({"fast": False}, None, False), ({}, "0", False), ({}, "1", True)])
def test_light_headers_can_be_switched_off(asked: list[Extension], monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any],
                                           variable: str | None, taken: bool) -> None:
    if variable is not None:
        monkeypatch.setenv("OPJIT_FAST", variable)
    with pytest.raises(KeyboardInterrupt):
        loaded("switched", PROGRAM, functions="doubled", **arguments)
    assert bool(asked[0].light) == taken
    assert asked[0].key != asked[0]._replace(light="" if taken else light.VERSION).key


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
std::string pick(std::vector<double> values) { return "list of " + std::to_string(values.size()); }
std::string text(std::string value) { return value; }
int64_t product(at::IntArrayRef values) { int64_t p = 1; for (auto v : values) p *= v; return p; }
void warn_and_fail() { TORCH_WARN("a warning"); TORCH_CHECK(false, "the error"); }
bool with_gradients() { return at::GradMode::is_enabled(); }
static void more(py::module_ m) { m.def("late", [](int64_t) { return "int"; }); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("magnitude", &magnitude); m.def("whole", &whole); m.def("widths", &widths); m.def("undefined", &undefined);
    m.def("floats", &floats); m.def("text", &text); m.def("product", &product);
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


@pytest.mark.torch
def test_an_undefined_tensor_is_on_no_device(meaning: Any) -> None:
    assert meaning.undefined() == [False] * 4


@pytest.mark.torch
def test_float8_is_a_floating_point_type(meaning: Any) -> None:
    assert meaning.floats(torch.zeros(2).to(torch.float8_e5m2))
    assert not meaning.floats(torch.zeros(2, dtype=torch.int64))


@pytest.mark.torch
def test_an_overload_takes_what_pybind11_takes(meaning: Any) -> None:
    numpy = pytest.importorskip("numpy")
    assert meaning.pick(i for i in (1.0, 2.0)) == "list of 2"
    assert meaning.pick("a") == "a"
    assert meaning.text(bytearray(b"ab")) == "ab"
    assert [meaning.kind(value) for value in (numpy.bool_(True), True, 1, numpy.int64(1))] == ["bool", "int", "int", "int"]
    assert [meaning.late(1), meaning.late("a")] == ["int", "str"]


@pytest.mark.torch
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


@pytest.mark.torch
def test_a_guard_is_there_during_the_call(meaning: Any) -> None:
    assert torch.is_grad_enabled()
    assert not meaning.with_gradients()


def folder_of(text: str, folder: Path) -> tuple[set[str], list[str]]:
    """The words of a program's conditions, and its light headers."""
    program = policy.Program(headers.code_of([text]), ("torch/extension.h",), frozenset({"AT_MINE"}), plain=True)
    headers.write(program.code, program.includes, folder, policy.BINDING, made_by_torch=False)
    return policy.conditions(program), [str(folder), str(headers.OWN)]


@pytest.mark.slow
@pytest.mark.torch
def test_a_condition_on_a_macro_that_light_headers_lack_is_left_to_torchs_headers(tmp_path: Path) -> None:
    same = """
        #if defined(WITH_CUDA) && !defined(__HIP_PLATFORM_AMD__) || __has_include(<ATen/Parallel.h>)
        #elif TORCH_VERSION_MAJOR >= 2 || defined TORCH_CHECK || __GNUC__ > 4 || AT_MINE
        #endif
        #ifndef FLT_MAX
        #endif
    """
    other = "#ifdef HAVE_UNISTD_H\n#elif defined M_PI\n#endif"
    base = Store(default_root()).base
    words, folders = folder_of(same, tmp_path / "same")
    assert macros.different(words, folders, base, toolchain.require_cxx(None)) == []
    words, folders = folder_of(other, tmp_path / "other")
    assert macros.different(words, folders, base, toolchain.require_cxx(None)) == ["HAVE_UNISTD_H"]


@pytest.mark.slow
@pytest.mark.torch
def test_a_header_of_cpp_that_a_name_brings_comes_with_torchs_headers(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text("#include <torch/extension.h>\n")
    places = [f"-I{place}" for place in (headers.INCLUDE, headers.INCLUDE / headers.API, sysconfig.get_path("include"))]
    done = subprocess.run([toolchain.require_cxx(None).path, "-std=c++20", "-w", "-M", *places, "a.cpp"], cwd=tmp_path, check=True,
                          stdout=subprocess.PIPE, text=True, timeout=300)
    there = {Path(name).name for name in done.stdout.split()}
    assert table.STANDARD.keys() - there == set()


NEEDED = {  # what a name brings
    "TORCH_LIBRARY(ns, m) {}": "torch/library.h",
    "struct F : torch::autograd::Function<F> {};": "torch/csrc/autograd/custom_function.h",
    "torch::nn::Linear linear(1, 2);": "torch/nn.h",
    "void f() { at::globalContext(); }": "ATen/Context.h",
    "auto y = x.index({Slice()});": "ATen/TensorIndexing.h",
    "void f() { at::parallel_for(0, 1, 1, g); }": "ATen/Parallel.h",
}


@pytest.mark.parametrize("text", NEEDED)
def test_a_name_brings_its_header(text: str) -> None:
    found = table.headers_of(text, frozenset(re.findall(r"\w+", text)))
    assert NEEDED[text] in found
    assert NEEDED[text] not in table.headers_of(PROGRAM, frozenset(re.findall(r"\w+", PROGRAM)))


@pytest.mark.parametrize(("text", "own"), [
    ('PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { py::class_<int>(m, "A"); }', True), ("void f(pybind11::dict d) {}", True),
    ("PyObject *f();", True), ("bool f(PyObject *o) { return THPVariable_Check(o); }", True),
    ('m.def("f", &f, py::arg("x").noconvert());', True), ('m.def("f", &f, py::arg("x") = 1);', False),
    ('m.def("f", &f, py::call_guard<py::gil_scoped_release>());', False), ('const char *s = "PyTorch";', False),
])
def test_pybind11_binds_what_opjits_binding_does_not_have(text: str, own: bool) -> None:
    assert policy.needs_pybind11(policy.Program(headers.code_of([text]), (), frozenset(), plain=True)) == own


@pytest.mark.parametrize("text", ["// TORCH_LIBRARY\n", "/* torch::nn::Linear */", 'const char *text = "PyTorch";',
                                  "struct Node { int Storage; };"])
def test_comments_and_names_of_ones_own_are_not_refused(asked: list[Extension], text: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        loaded("taken", text + PROGRAM, functions="doubled")
    assert asked[0].light


def test_a_header_of_the_program_is_read_too(tmp_path: Path, asked: list[Extension]) -> None:
    (tmp_path / "a.h").write_text("struct Own : torch::nn::Module {};\n")
    (tmp_path / "a.cpp").write_text('#include <torch/extension.h>\n#include "a.h"\n')
    with pytest.raises(KeyboardInterrupt):
        opjit.load("with_header", [str(tmp_path / "a.cpp")])
    assert "torch::nn::Module" in policy.program_of(asked[0], implicit=False).code


def test_a_program_without_torch_keeps_its_headers(tmp_path: Path, asked: list[Extension]) -> None:
    (tmp_path / "a.cpp").write_text("int f() { return 1; }\n")
    with pytest.raises(KeyboardInterrupt):
        opjit.load("plain", [str(tmp_path / "a.cpp")], is_python_module=False)
    assert asked[0].reason == "it includes none of torch's headers"


@pytest.mark.slow
def test_a_program_that_light_headers_cannot_compile_is_built_with_torchs_own() -> None:
    text = """
        #define JOINED(a, b) at::a##b
        bool count(const torch::Tensor &x) { return JOINED(get_num, _threads)() > 0 && x.use_count() > 0; }
    """  # no word of it is get_num_threads
    module = loaded("counted", text, functions="count")
    assert module.count(torch.ones(2)) is True
    headers = described("counted")[0].built_with["headers"]
    assert headers.startswith("torch's own headers: ")
    assert "get_num_threads" in headers
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
    assert sorted(policy.program_of(describe(arguments, None), implicit=False).code.split("\n")) == ["", "", "int a;", "int b;"]


RENDERED = {"1": "86cef5deac29d949"}  # what light headers of two programs are, by version


def test_other_light_headers_have_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = tmp_path / "torchs"
    for name in (*headers._KEPT, "ATen/Functions.h", headers._FACTORIES, *(f"ATen/ops/{one}.h" for one in headers._ALWAYS.split()),
                 "ATen/ops/relu.h", "ATen/ops/relu_ops.h", "torch/library.h"):
        path = torchs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#include <ATen/Context.h>\n#include <ATen/ops/relu.h>\n#include <ATen/ops/add.h>\nusing at::manual_seed;\n"
                        f"namespace torch {{\ninline at::Tensor zeros(int size) {{\n  return {name};\n}}\n}}\n")
    read = (headers._text, headers._named_by, headers.closure, headers._root, headers._all_operators)
    monkeypatch.setattr(headers, "INCLUDE", torchs)
    for one in read:
        one.cache_clear()
    programs = {"small": "torch::relu(x); torch::zeros(1); sort(a)", "library": "TORCH_LIBRARY(a, m) {} at::globalContext();"}
    for name, text in programs.items():
        headers.write(text, ("torch/extension.h",), tmp_path / "light" / name, policy.BINDING, made_by_torch=name == "library")
    for one in read:
        one.cache_clear()
    own = [headers.code_of([path.read_text()]) for path in sorted(headers.OWN.iterdir())]
    made = [f"{path.relative_to(tmp_path)}\n{path.read_text()}" for path in sorted((tmp_path / "light").rglob("*.h"))]
    digest = hashlib.sha256(" ".join("\n".join([*own, *made]).split()).encode()).hexdigest()[:16]
    assert RENDERED.get(light.VERSION) == digest, "increase light.VERSION, which is part of the key, and enter it with this digest"
