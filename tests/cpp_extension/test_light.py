"""Light headers for C++ extensions: counted references, the headers that names bring, and torch/extension.h for what is left."""

import hashlib
import re
import shutil
import subprocess
import sysconfig
import warnings
from contextlib import suppress
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import opjit
from opjit import files, processes
from opjit.builder import parts
from opjit.cpp_extension import build, entries, identity
from opjit.cpp_extension.identity import Extension, own_folders
from opjit.cpp_extension.light import (
    Prepared,
    core,
    headers,
    macros,
    mistakes,
    policy,
    streams,
    table,
    vocabulary,
)
from opjit.cpp_extension.light.policy import Program
from opjit.errors import CompileError, CompileWarning
from opjit.recipe import toolchain
from opjit.store.entry import Entry
from opjit.store.manifest import Manifest
from opjit.store.store import Store, default_root
from tests import helpers
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
        torch::Tensor same(torch::Tensor x) { return x; }
        const torch::Tensor &reference(const torch::Tensor &x) { return x; }
        std::vector<torch::Tensor> many(torch::Tensor x, int64_t n) { return std::vector<torch::Tensor>(n, x); }
        int64_t counted(std::vector<torch::Tensor> xs) { return xs.size(); }
        torch::Tensor fails(torch::Tensor x) {
            torch::Tensor y = x, z = x.view({-1});
            TORCH_CHECK(false, "with ", y.numel(), " values");
            return z;
        }
        torch::Tensor fails_inside(torch::Tensor x) { torch::Tensor y = x; return torch::matmul(y, y.reshape({3, 2, 2})); }
        std::optional<torch::Tensor> maybe(std::optional<torch::Tensor> x) { return x; }
        std::tuple<torch::Tensor, torch::Tensor> pair(torch::Tensor x) { return {x, x}; }
    """
    names = ["same", "reference", "many", "counted", "fails", "fails_inside", "maybe", "pair"]
    module = loaded("counting", text, functions=names)
    assert described("counting")[0].built_with["headers"] == "light headers"
    assert isinstance(module, ModuleType)
    return module


CALLS = [
    "m.same(x)",
    "m.reference(x)",
    "m.many(x, 5)",
    "m.counted([x, x])",
    "m.fails(x)",
    "m.fails_inside(x)",
    "m.maybe(x)",
    "m.maybe(None)",
    "m.pair(x)",
    "m.same(1)",
    "m.many(x, 'a')",
    "m.counted([x, 1])",
]


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
    with pytest.raises(
        TypeError,
        match=r"many\(\): incompatible function arguments[^$]*1. \(arg0: torch.Tensor, arg1: ",
    ):
        counting.many(x)
    assert counting.same(x) is x


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Extension]:
    """The extensions that would be built."""
    found: list[Extension] = []

    def built(extension: Extension, *others: Any) -> Entry:
        found.append(extension)
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "build", built)
    return found


@pytest.mark.parametrize(
    ("arguments", "variable", "taken"),
    [({}, None, True), ({"fast": False}, None, False), ({}, "0", False), ({}, "1", True)],
)
def test_light_headers_can_be_switched_off(
    asked: list[Extension],
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    variable: str | None,
    taken: bool,
) -> None:
    if variable is not None:
        monkeypatch.setenv("OPJIT_FAST", variable)
    with pytest.raises(KeyboardInterrupt):
        loaded("switched", PROGRAM, functions="doubled", **arguments)
    assert bool(asked[0].light) == taken
    assert asked[0].key != replace(asked[0], light="" if taken else identity.LIGHT).key


MEANING = """
#include <cmath>
#include <functional>
double magnitude(double x) { return abs(x); }
int64_t whole(int64_t x) { return abs(x); }
std::vector<int64_t> widths(double y) {
    float x = static_cast<float>(y);
    return {sizeof(exp(x)), sizeof(sqrt(x)), sizeof(pow(x, x)), sizeof(floor(x)), sizeof(fabs(x)), sizeof(tanh(x)), sizeof(fmaxf(x, x))};
}
std::string pick(std::vector<double> values) { return "list of " + std::to_string(values.size()); }
std::string text(std::string value) { return value; }
void warn_and_fail() { TORCH_WARN("a warning"); TORCH_CHECK(false, "the error"); }
bool with_gradients() { return at::GradMode::is_enabled(); }
static void more(py::module_ m) { m.def("late", [](int64_t) { return "int"; }); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("magnitude", &magnitude); m.def("whole", &whole); m.def("widths", &widths); m.def("text", &text);
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


def test_an_overload_takes_what_pybind11_takes(meaning: Any) -> None:
    numpy = pytest.importorskip("numpy")
    assert meaning.pick(i for i in (1.0, 2.0)) == "list of 2"
    assert meaning.pick("a") == "a"
    assert meaning.text(bytearray(b"ab")) == "ab"
    assert [meaning.kind(value) for value in (numpy.bool_(True), True, 1, numpy.int64(1))] == [
        "bool",
        "int",
        "int",
        "int",
    ]
    assert [meaning.late(1), meaning.late("a")] == ["int", "str"]


def test_an_error_comes_before_a_warning_that_is_one(meaning: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="the error"):
            meaning.warn_and_fail()


def test_a_guard_is_there_during_the_call(meaning: Any) -> None:
    assert torch.is_grad_enabled()
    assert not meaning.with_gradients()


COUNT = "int64_t count(const torch::Tensor &x) { return x.numel(); }"


def prepared_in(folder: Path, *flags: str) -> Prepared:
    """Light headers for programs that are compiled in a folder, bound by opjit's binding."""
    base = Store(default_root()).base
    cxx = toolchain.require_cxx(None)
    prepared = Prepared(base, folder, cxx, False, flags, ())
    vars(prepared)["binding"] = folder / "opjit_bind.o"  # it is never linked
    return prepared


def checked(folder: Path, text: str, *flags: str) -> Program:
    """Write the light headers of a text. Raises streams.Different if it is another one with torch's headers."""
    (folder / "a.cpp").write_text(text)
    prepared = prepared_in(folder, *flags)
    system = [word for place in own_folders() for word in ("-isystem", place)]
    words = ["-std=c++20", "-fPIC", "-DTORCH_EXTENSION_NAME=mine", *flags, *system]
    prepared.check("a.cpp", [*words, "-c", "a.cpp"], "a.o", folder / "scratch")
    return prepared.programs["a.o"]


def tokens_differ(text: str, folder: Path, *flags: str) -> str:
    """Why light headers make another text of a program than torch's; an empty text if they do not."""
    try:
        checked(folder, text, *flags)
    except streams.Different as different:
        return str(different)
    return ""


BOTH_WAYS = {
    "torch's version": "#if TORCH_VERSION_MAJOR >= 2\nint a;\n#endif",
    "a compiler's macro": "#if __GNUC__ > 4 && !defined(__HIP_PLATFORM_AMD__)\nint a;\n#endif",
    "a header that exists": "#if __has_include(<ATen/Parallel.h>)\nint a;\n#endif",
    "own macro": "#define AT_MINE 1\n#if AT_MINE\nint a;\n#endif",
    "a check": 'void f(at::Tensor x) { TORCH_CHECK(x.dim() > 0, "x"); AT_ASSERT(true); }',
    "dispatch": 'void f(at::Tensor x) { AT_DISPATCH_ALL_TYPES(x.scalar_type(), "f", [&] {}); }',
    "a pasted dispatch": "#define D(a) AT_DISPATCH_##a\n"
    'void f(at::Tensor x) { D(ALL_TYPES)(x.scalar_type(), "f", [&] {}); }',
    "a binding": 'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.doc() = "x"; }',
    "limits": "#include <climits>\nint a = INT_MAX;",
    "names with the counter": "#include <torch/library.h>\nTORCH_LIBRARY_IMPL(mine, CPU, m) {}",
}
ONE_WAY = {  # a program, flags, and what is said of it
    "the counter": ("int a = __COUNTER__;", [], "it names __COUNTER__"),
    "behind another macro": (
        "#define HAVE_OMP AT_PARALLEL_OPENMP\n#if HAVE_OMP\nint a;\n#else\nint b;\n#endif",
        [],
        "at a.cpp:4 it makes `a ;`, and light headers make `b ;`",
    ),
    "behind a flag": (
        "#if WHICH\nint a;\n#else\nint b;\n#endif",
        ["-DWHICH=AT_PARALLEL_OPENMP"],
        "it makes `a ;`, and light headers make `b ;`",
    ),
    "as a text": (
        "#define TEXT2(a) #a\n#define TEXT(a) TEXT2(a)\nconst char *s = TEXT(AT_PARALLEL_OPENMP);",
        [],
        'it makes `"1" ;`, and light headers make `"AT_PARALLEL_OPENMP" ;`',
    ),
    "pasted": (
        "#define CAT(a, b) a##b\n#if CAT(AT_PARALLEL, _OPENMP)\nint a;\n#else\nint b;\n#endif",
        [],
        "it makes `a ;`, and light headers make `b ;`",
    ),
    "nothing there": ("#ifdef HAVE_UNISTD_H\nint a;\n#endif", [], "light headers make `nothing`"),
    "undefined by the program": (
        "#undef AT_PARALLEL_OPENMP\n#ifdef HAVE_UNISTD_H\n#define A 1\n#endif\nint A = 1;",
        [],
        "it makes `1 = 1 ;`",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_a_program_that_is_the_same_tokens_takes_light_headers(name: str, tmp_path: Path) -> None:
    assert tokens_differ(f"#include <torch/extension.h>\n{BOTH_WAYS[name]}\n", tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_WAY)
def test_a_macro_that_light_headers_lack_is_seen_wherever_it_decides(
    name: str, tmp_path: Path
) -> None:
    text, flags, message = ONE_WAY[name]
    assert message in tokens_differ(f"#include <torch/extension.h>\n{text}\n", tmp_path, *flags)


@pytest.mark.slow
def test_a_program_with_debug_information_takes_light_headers(tmp_path: Path) -> None:
    """With -g, the preprocessor also names the folder in which it runs."""
    assert tokens_differ("#include <torch/extension.h>\nint a;\n", tmp_path, "-g") == ""


@pytest.mark.slow
def test_torchs_headers_that_meet_a_macro_of_the_programs_are_read_themselves(
    tmp_path: Path,
) -> None:
    """TORCH_CHECK has another text with the macro that this program defines first."""
    text = "#define STRIP_ERROR_MESSAGES 1\n#include <c10/util/Exception.h>\n"
    text += '#include <torch/extension.h>\nvoid f() { TORCH_CHECK(false, "a"); }\n'
    assert tokens_differ(text, tmp_path) == ""


@pytest.mark.slow
def test_a_pasted_name_is_a_name_of_the_program() -> None:
    text = """
        #define MAKE(a, b) torch::a##b
        #define CALL(a, b) a##b
        at::Tensor made() { return MAKE(scalar_, tensor)(2.5, torch::requires_grad()); }
        at::Tensor like(at::Tensor x) { return MAKE(empty_, like)(x, torch::requires_grad()); }
        at::Tensor first(at::Tensor x) { return x.CALL(ind, ex)({0}); }
    """
    module = loaded("pasted", text, functions=["made", "like", "first"])
    assert module.made().requires_grad
    assert module.like(torch.ones(2)).requires_grad
    assert module.first(torch.arange(3.0) + 1).item() == 1
    assert described("pasted")[0].built_with["headers"] == "light headers"


@pytest.mark.slow
def test_a_header_of_cpp_that_a_name_brings_comes_with_torchs_headers(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text("#include <torch/extension.h>\n")
    places = [
        f"-I{place}"
        for place in (headers.INCLUDE, headers.INCLUDE / headers.API, sysconfig.get_path("include"))
    ]
    done = subprocess.run(
        [toolchain.require_cxx(None).path, "-std=c++20", "-w", "-M", *places, "a.cpp"],
        cwd=tmp_path,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
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


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ('PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { py::class_<int>(m, "A"); }', True),
        ("void f(pybind11::dict d) {}", True),
        ("PyObject *f();", True),
        ("bool f(PyObject *o) { return THPVariable_Check(o); }", True),
        ('m.def("f", &f, py::arg("x").noconvert());', True),
        ('m.def("f", &f, py::arg("x") = 1);', False),
        ('m.def("f", &f, py::call_guard<py::gil_scoped_release>());', False),
        ('const char *s = "PyTorch";', False),
    ],
)
def test_pybind11_binds_what_opjits_binding_does_not_have(text: str, own: bool) -> None:
    program = Program(frozenset(), headers.code_of([text]), (), plain=True)
    assert policy.needs_pybind11(program) == own


@pytest.mark.parametrize(
    "text",
    [
        "// TORCH_LIBRARY\n",
        "/* torch::nn::Linear */",
        'const char *text = "PyTorch";',
        "struct Node { int Storage; };",
    ],
)
def test_comments_and_names_of_ones_own_are_not_refused(asked: list[Extension], text: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        loaded("taken", text + PROGRAM, functions="doubled")
    assert asked[0].light


def test_a_program_without_torch_keeps_its_headers(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text("int f() { return 1; }\n")
    opjit.load("plain", [str(tmp_path / "a.cpp")], is_python_module=False)
    built_with = described("plain")[0].built_with["headers"]
    assert built_with == "torch's own headers: it includes none of torch's headers"


@pytest.mark.slow
def test_a_compiler_behind_a_launcher_takes_light_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = helpers.program(tmp_path / "launch", '#!/bin/sh\nexec "$@"\n')
    monkeypatch.setenv("CXX", f"{launcher} c++")
    assert loaded("launched", COUNT, functions="count").count(torch.ones(2)) == 2
    assert described("launched")[0].built_with["headers"] == "light headers"


def broken_compiler(path: Path, pattern: str) -> str:
    """Make a C++ compiler that fails if its arguments, between spaces, match a pattern of the shell."""
    fails = f'case " $* " in {pattern}) echo it broke; exit 1;; esac'
    compiler = f"exec '{shutil.which('c++')}' \"$@\""
    return str(helpers.program(path, f"#!/bin/sh\n{fails}\n{compiler}\n"))


@pytest.mark.slow
def test_a_preprocessor_that_refuses_a_right_program_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", broken_compiler(tmp_path / "c++", "*' -E '*main.cpp*"))
    with pytest.warns(CompileWarning, match="opjit's preprocessor failed: .*it broke"):
        assert loaded("broken", COUNT, functions="count").count(torch.ones(2)) == 2


@pytest.mark.slow
def test_a_binding_that_does_not_compile_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", broken_compiler(tmp_path / "c++", "*opjit_bind.cpp*"))
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    with pytest.warns(CompileWarning, match="opjit's binding does not compile .*it broke"):
        assert loaded("unbound", COUNT, functions="count").count(torch.ones(2)) == 2
    assert described("unbound")[0].built_with["headers"].startswith("torch's own headers: ")


@pytest.mark.slow
def test_a_program_that_light_headers_cannot_compile_is_built_with_torchs_own() -> None:
    text = """
        bool count(const torch::Tensor &x) {
            std::forward_list<int64_t> sizes(x.sizes().begin(), x.sizes().end());
            return sizes.front() > 0;
        }
    """  # torch/extension.h happens to bring a header of C++ that light headers lack
    module = loaded("counted", text, functions="count")
    assert module.count(torch.ones(2)) is True
    headers = described("counted")[0].built_with["headers"]
    assert headers.startswith("torch's own headers: ")
    assert "forward_list" in headers
    arguments = {
        "name": "counted",
        "cpp_sources": text,
        "cuda_sources": None,
        "functions": "count",
        "extra_cflags": ["-O1"],
    }
    program = f"""
import opjit
from opjit.cpp_extension import build
def forbidden(*_):
    raise SystemExit("it was built again")
build.build = forbidden
print(opjit.load_inline(**{arguments!r}).count.__name__)
"""
    # torch's entry is found, and light headers are not tried again.
    assert fresh(program).stdout == "count\n"


@pytest.mark.slow
def test_the_text_of_every_header_of_the_authors_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text("#define NAME relu\nstruct Own : torch::nn::Module {};\n")
    (tmp_path / "torchs.h").write_text("#include <torch/extension.h>\n")
    text = '#include "torchs.h"\n#if TORCH_VERSION_MAJOR\n#include "a.h"\n#endif\nint NAME;\n'
    program = checked(tmp_path, text)
    assert {Path(path).name for path in program.files} == {"a.cpp", "a.h", "torchs.h"}
    assert all(each in program.code for each in ("<torch/extension.h>", "torch::nn::Module"))
    assert "ops/relu.h" in (tmp_path / "light/a.o/ATen/Functions.h").read_text()
    assert (tmp_path / "light/a.o/torch/types.h").is_file()


# --- the precompiled core -----------------------------------------------------------------------------------------------------------------


BEFORE_TORCH = {  # what stands before the first header of torch, and whether the core may stand before that
    "nothing": ("", True),
    "headers of C and C++": ("#include <vector>\n#include <cmath>\n", True),
    "a macro that no header of the core's names": ("#define OPJIT_OWN_NAME 1\n", True),
    "a comment": ("/* one\n two */\n", True),
    "a macro that headers ask for": ("#define NDEBUG 1\n", False),
    "a macro that is a word of declarations": ("#define is_leaf 1\n", False),
    "a macro that is gone": ("#define NDEBUG 1\n#undef NDEBUG\n", True),
    "a declaration": ("namespace at { struct Own; }\n", False),
    "a pragma": ("#pragma pack(1)\n", False),
    "a header of the author's with a declaration": ('#include "own.h"\n', False),
    "a header of Python's": ("#include <Python.h>\n", False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BEFORE_TORCH)
def test_the_core_comes_first_only_where_a_program_cannot_tell(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, expected = BEFORE_TORCH[name]
    (tmp_path / "own.h").write_text("struct Before;\n")
    monkeypatch.setattr(core, "precompiled_core", lambda *_: tmp_path / "nowhere.gch")
    checked(tmp_path, f"{text}#include <torch/extension.h>\nint a;\n")
    assert (tmp_path / "light/a.o" / core.COMPILED).is_symlink() == expected


@pytest.mark.slow
def test_a_binary_is_the_same_with_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    used = list[tuple[core.Core, Path]]()
    compiled = core.precompiled_core

    def noted(known: core.Core, *others: Any) -> Path | None:
        found = compiled(known, *others)
        used.extend([(known, found)] if found else [])
        return found

    def built() -> bytes:
        loaded("cored", PROGRAM, functions="doubled", is_python_module=False)
        (entry,) = entries.entries("cored", Store(default_root()))
        (library,) = entry.folder.glob("*.so")
        content = library.read_bytes()
        files.remove_tree(entry.folder)
        return content

    monkeypatch.setattr(core, "precompiled_core", lambda *_: None)
    without = built()
    monkeypatch.setattr(core, "precompiled_core", noted)
    monkeypatch.setattr(core, "in_background", False)
    assert built() == without
    cxx = toolchain.require_cxx(None)
    if "clang" in cxx.version:
        assert not used
        return
    known, path = used[0]
    first = f"-include{path.with_name(core.FIRST)}"
    system = [word for place in own_folders() for word in ("-isystem", place)]
    command = [cxx.path, "-x", "c++", first, *known.flags, *system, "-H", "-fsyntax-only", "-"]
    said = subprocess.run(command, input="", capture_output=True, text=True, check=True).stderr
    assert f"! {path}" in said


@pytest.mark.slow
def test_a_program_that_reads_less_than_the_core_does_not_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "precompiled_core", lambda *_: tmp_path / "nowhere.gch")
    checked(tmp_path, "#include <torch/library.h>\nint a;\n")
    first = tmp_path / "light/a.o" / core.FIRST
    assert first.read_text() == ""
    for _ in range(2):  # as if nvcc followed NVRTC
        checked(tmp_path, "#include <torch/library.h>\n#include <ATen/ATen.h>\nint a;\n")
        assert first.read_text() == core.TEXT
    checked(tmp_path, "#include <torch/library.h>\nint a;\n")
    assert not first.with_name(core.COMPILED).is_symlink()


def write_core(cxx: Any, flags: Any, staged: Path) -> None:
    """Replace parts.compile_part."""
    (staged / core.COMPILED).write_text("made once")


def test_a_core_is_verified_again_only_if_its_file_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "compile_part", write_core)
    monkeypatch.setattr(core, "in_background", False)
    known = core.Core(frozenset(), frozenset(), {}, ("-fPIC",))
    base = Store(tmp_path / "cache").base
    cxx = toolchain.require_cxx(None)
    made = core.precompiled_core(known, base, cxx)
    assert made is not None
    assert core.precompiled_core(known, base, cxx) == made
    verified = list[Path]()
    is_whole = parts.is_whole

    def noted(place: Path, needed: Any) -> bool:
        verified.append(place)
        return is_whole(place, needed)

    monkeypatch.setattr(parts, "is_whole", noted)
    assert core.precompiled_core(known, base, cxx) == made
    assert verified == []
    made.write_text("damaged")
    assert core.precompiled_core(known, base, cxx) == made
    assert verified
    assert made.read_text() == "made once"


def test_the_first_build_of_a_cache_uses_the_core_of_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "compile_part", write_core)
    monkeypatch.setattr(core, "in_background", False)
    known = core.Core(frozenset(), frozenset(), {}, ("-fPIC",))
    cxx = toolchain.require_cxx(None)
    layer = Store(tmp_path / "layer")
    made = core.precompiled_core(known, layer.base, cxx)
    assert made is not None

    monkeypatch.setattr(core, "in_background", True)
    monkeypatch.setenv("OPJIT_LAYERS", str(layer.root))
    assert core.precompiled_core(known, Store(tmp_path / "cache").base, cxx) == made


def test_no_build_waits_for_the_core_and_the_second_begins_it_unless_one_compiler_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[Any]()
    monkeypatch.setattr(parts, "compile_part", write_core)
    monkeypatch.setattr(processes, "call_in_background", lambda *call: begun.append(call))
    known = core.Core(frozenset(), frozenset(), {}, ("-fPIC",))
    base = Store(tmp_path / "cache").base
    cxx = toolchain.require_cxx(None)
    monkeypatch.setenv("OPJIT_JOBS", "1")
    assert [core.precompiled_core(known, base, cxx) for _ in range(3)] == [None] * 3
    assert begun == []

    monkeypatch.setenv("OPJIT_JOBS", "2")
    assert core.precompiled_core(known, base, cxx) is None
    assert begun == []
    assert core.precompiled_core(known, base, cxx) is None
    assert len(begun) == 1
    assert core.precompiled_core(known, base, cxx) is None
    assert len(begun) == 1
    monkeypatch.setattr(
        core, "_AGAIN", 0.0
    )  # later, as if the process that makes it had been killed
    assert core.precompiled_core(known, base, cxx) is None
    assert len(begun) == 2

    make, *given = begun[0]
    make(*given)
    monkeypatch.delattr(parts, "is_whole")  # the digest was verified in the background
    made = core.precompiled_core(known, base, cxx)
    assert made is not None
    assert made.read_text() == "made once"
    assert len(begun) == 2


# --- mistakes of the author ---------------------------------------------------------------------------------------------------------------


BUILT = "torch::Tensor f(torch::Tensor x) {{ {} return x; }}"


@pytest.fixture
def headers_tried(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each build, whether it has light headers. One with torch/extension.h is not begun."""
    ways: list[bool] = []
    original = build.build

    def built(extension: Extension, *others: Any) -> Entry:
        ways.append(bool(extension.light))
        if not extension.light:
            raise KeyboardInterrupt(extension.reason)
        return original(extension, *others)

    monkeypatch.setattr(build, "build", built)
    return ways


@pytest.mark.parametrize(
    "name",
    [str(headers.INCLUDE / "c10/core/Device.h"), "../include/c10/core/Device.h"],
    ids=["absolute", "parent"],
)
def test_a_header_that_is_named_by_its_path_is_never_replaced(name: str) -> None:
    """Light headers stand in a folder of the build under torch's names, so a path would lead out of that folder."""
    assert headers.text_of("c10/core/Device.h") is not None
    assert headers.text_of(name) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("x = x + n;", "'n' was not declared"),
        ("x = x * y;", "'y' was not declared"),
        ("if (x.dim()) {", r"this '\{' is not closed"),
        ("x.sizz();", "has no member named 'sizz'"),
        ("int64_t n = x.sizes();", "cannot convert"),
        ("x = x + 1", "expected ';'"),
        ("x = torch::ad(x, x);", "'ad' is not a member"),
        ("at::Foo y;", "'Foo' is not a member"),
        ("AT_CHECK(x.dim() > 1);", "'AT_CHECK' was not declared"),
        ('x.view(1, 2, "a");', "no matching function"),
        (
            'AT_DISPATCH_FLOATING_TYPES(x.type(), "f", [&] { int y = sizeof(scalar_t); });',
            "DeprecatedTypeProperties",
        ),
    ],
)
def test_a_mistake_of_the_author_is_compiled_once(
    headers_tried: list[bool], mistake: str, message: str
) -> None:
    with pytest.raises(CompileError, match=rf"\Amain\.cpp:2:\d+: error: .*{message}"):
        loaded("mistaken", BUILT.format(mistake), functions="f")
    assert headers_tried == [True]


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ['#include "nobodys.h"\n' + PROGRAM, "#include <THC/THC.h>\n" + PROGRAM]
)
def test_a_header_that_nobody_has_is_looked_for_once(headers_tried: list[bool], text: str) -> None:
    with pytest.raises(CompileError, match=r"\Amain\.cpp:2:10: fatal error: "):
        loaded("nobodys", text, functions="doubled")
    assert headers_tried == [True]


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["auto n = JOINED(get_num, _threads)();", "c10::List<int64_t> y; auto z = at::cat(y);"]
)
def test_what_another_header_may_mend_is_compiled_with_torchs(
    headers_tried: list[bool], text: str
) -> None:
    program = f"#define JOINED(a, b) at::a##b\n{BUILT.format(text)}"
    if "JOINED" in text:  # the preprocessor shows the pasted name, so light headers have it
        loaded("mended", program, functions="f")
        assert headers_tried == [True]
        return
    with pytest.raises(KeyboardInterrupt):
        loaded("mended", program, functions="f")
    assert headers_tried == [True, False]


@pytest.mark.slow
def test_a_type_that_opjits_binding_does_not_know_is_bound_by_pybind11s(
    headers_tried: list[bool],
) -> None:
    module = loaded(
        "generated",
        "bool seeded(std::optional<at::Generator> g) { return g.has_value(); }",
        functions="seeded",
    )
    assert [module.seeded(torch.Generator()), module.seeded(None)] == [True, False]
    assert headers_tried == [True, True]
    assert described("generated")[0].built_with["headers"].endswith("pybind11")


def test_the_path_of_a_header_asks_for_no_other_one(tmp_path: Path) -> None:
    path = "torch/serialize/tensor.h"
    assert (
        headers.write(
            f"#include <{path}>\ntorch::Tensor f();",
            (path,),
            tmp_path,
            policy.BINDING,
        )
        == []
    )


UNDECLARED = "main.cpp:2:3: error: '{}' was not declared in this scope"
NO_METHOD = "main.cpp:1:2: error: no matching function for call to 'at::Tensor::{}'\nTensorBody.h:1:2: note: candidate: '{}'"
CODE = "void f() { mine(); other(known); other(BOTH); }"


@pytest.mark.parametrize(
    ("output", "code", "final"),
    [
        (UNDECLARED.format("mine"), CODE, True),
        (UNDECLARED.format("known"), CODE, False),
        (
            UNDECLARED.format("mine"),
            "#define NDEBUG 1\n#include <torch/all.h>\n" + CODE,
            False,
        ),  # which torch's headers ask for
        (
            UNDECLARED.format("mine"),
            "#define OWN_OF_NOBODY 1\n#include <torch/all.h>\n" + CODE,
            True,
        ),
        ("torch/all.h:2:3: error: 'mine' was not declared in this scope", CODE, False),
        ("main.cpp:1:2: error: expected class-name before '{' token", CODE, False),
        ("main.cpp:1:2: error: 'class py::module_' has no member named 'mine'", CODE, False),
        (
            "main.cpp:1:2: error: cannot convert 'A' to 'B' for argument '1' to 'int known(B)'",
            CODE,
            False,
        ),
        ("main.cpp:1:2: error: cannot convert 'A' to 'B' in initialization", CODE, False),
        ("main.cpp:1:2: error: cannot convert 'at::Tensor' to 'int' in return", CODE, True),
        (
            NO_METHOD.format(
                "view(int, at::Tensor)", "at::Tensor at::Tensor::view(at::IntArrayRef) const"
            ),
            CODE,
            True,
        ),
        (
            NO_METHOD.format(
                "index(int)",
                "at::Tensor at::Tensor::index(at::ArrayRef<at::indexing::TensorIndex>)",
            ),
            CODE,
            False,
        ),
        (
            "main.cpp:1:2: error: no matching function for call to 'at::Tensor::index(int)'",
            CODE,
            False,
        ),
        (
            f"main.cpp:1:2: error: expected constructor before ';'\n{UNDECLARED.format('mine')}",
            CODE,
            False,
        ),
        ("main.cpp:1:2: error: use of undeclared identifier 'mine'", CODE, True),  # clang's
        (
            "torch/Dispatch.h:36:63: error: cannot convert 'const at::DeprecatedTypeProperties' to 'c10::ScalarType'",
            CODE,
            True,
        ),
        ("collect2: error: ld returned 1 exit status", CODE, False),
        (UNDECLARED.format("a·b"), CODE, True),
        (UNDECLARED.format("Â·"), CODE, True),
        (
            "main.cpp:1:2: error: extended character · is not valid at the start of an identifier",
            CODE,
            True,
        ),
        (
            "c10/cuda/CUDAMacros.h:8:10: fatal error: c10/cuda/impl/cuda_cmake_macros.h: No such file or directory",
            CODE,
            True,
        ),
    ],
)
def test_only_errors_that_no_header_mends_are_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, code: str, final: bool
) -> None:
    monkeypatch.setattr(vocabulary, "of_torch", lambda *_: frozenset(["known"]))
    monkeypatch.setattr(mistakes, "_occurs", lambda word, folders: word == "NDEBUG")
    main = frozenset([str(tmp_path / "main.cpp")])
    prepared = prepared_in(tmp_path, "-DNDEBUG")
    prepared.programs["main.o"] = Program(main, code, (), plain=True)
    assert mistakes.is_final(output, prepared, tmp_path) == final


@pytest.mark.parametrize(
    ("output", "final"),
    [
        ('cuda.cu(3): error: identifier "alone_in_text" is undefined', True),
        ('cuda.cu(3): error: identifier "twice" is undefined', False),
        ('cuda.cu(3): error: identifier "of_cuda" is undefined', False),
        ('cuda.cu(3): error: expected a ";"', False),
    ],
)
def test_the_split_of_cuda_code_is_not_blamed_on_the_author(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, final: bool
) -> None:
    """A name that the author declares may be in the other part."""
    monkeypatch.setattr(vocabulary, "of_torch", lambda *_: frozenset())
    (tmp_path / "cuda_header.h").write_text("int of_cuda;")
    source = frozenset([str(tmp_path / "cuda.cu")])
    code = "alone_in_text; twice; int twice; of_cuda;"
    prepared = prepared_in(tmp_path)
    prepared.programs["cuda.o"] = Program(source, code, (), plain=True)
    assert mistakes.is_final(output, prepared, tmp_path, (str(tmp_path),)) == final


def test_the_names_that_a_text_declares_are_those_outside_of_functions_and_classes() -> None:
    text = """
        extern "C" { extern void *copied (void *to, char = '{') noexcept (true); }
        namespace a { inline namespace b { template <typename T, int N = (1 > 0)> struct Made : Base<T> { int member; void method(); }; } }
        namespace a __attribute__((visibility("default"))) { enum Kind { one, two }; constexpr int number = sizeof(Kind); }
        using ::printed; typedef void (*pointer)(int argument); int (*called(int))(char);
        Made::Made(int size) : member(size) { int local = 1; for (int i = 0;;) {} }
        struct Own { friend bool compared(Own, Own); friend struct Other; };
        Own Own::made(const Own &own = {}) { return own; }
        enum class Scoped : char { hidden }; long operator ""_suffix(unsigned long); void call_operator();
        template <typename T = void> using Alias = Made<Kind::chosen, T>; using std::imported;
    """
    found = vocabulary.declared(text)
    assert found >= {
        "copied",
        "a",
        "b",
        "Made",
        "Kind",
        "one",
        "two",
        "number",
        "printed",
        "pointer",
        "called",
        "compared",
        "Other",
        "Own",
        "Scoped",
        "Alias",
        "imported",
        "call_operator",
    }
    assert not found & {
        "hidden",
        "_suffix",
        "chosen",
        "T",
        "to",
        "member",
        "method",
        "argument",
        "size",
        "local",
        "i",
        "own",
        "made",
        "N",
    }


@pytest.mark.slow
def test_the_names_of_torchs_headers_are_found() -> None:
    base = Store(default_root()).base
    cxx = toolchain.require_cxx(None)
    names = vocabulary.of_torch(base, cxx)
    flags = ["-std=c++20", "-fPIC"]
    texts = macros.after(["torch/extension.h"], flags, macros.Surroundings(), base, cxx).texts
    words = {word for text in table.STANDARD.values() for word in text.split()} - {"typeid"}
    some = {
        "Tensor",
        "kFloat",
        "IntArrayRef",
        "parallel_for",
        "AutoDispatchBelowAutograd",
        "module_",
    }
    assert words | headers._all_operators() - {"and", "or", "xor"} | some <= names | texts.keys()
    assert not names & {"n", "x", "idx", "total", "y", "g", "c"}


VARIABLE = """
inline bool is_stealable(const at::Tensor& data) {
  return true;
}
AutogradMeta(TensorImpl* self_impl, bool requires_grad) {
  if (requires_grad) {
    TORCH_INTERNAL_ASSERT(self_impl);
    set_requires_grad(requires_grad, self_impl);
  }
}
inline Variable make_variable(
    at::Tensor data, bool requires_grad = false) {
  if (impl::is_stealable(data))
    made->set_autograd_meta(std::make_unique<AutogradMeta>(
        made.get(), requires_grad));
}
"""


def test_torchs_make_variable_is_cut_out_of_its_header() -> None:
    assert "autograd_meta(data_impl.get(), requires_grad)" in headers._maker()


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("requires_grad));", "requires_grad, edge));"),
        ("TORCH_INTERNAL_ASSERT(self_impl);", ""),
        ("inline bool is_stealable", "bool is_stealable"),
        ("at::Tensor data", "Variable data"),
    ],
)
def test_a_make_variable_of_another_text_is_torchs_with_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, other: str
) -> None:
    monkeypatch.setattr(headers, "text_of", lambda name: VARIABLE)
    assert "impl::is_stealable(data)" in headers._maker.__wrapped__()
    changed = VARIABLE.replace(text, other)
    assert changed != VARIABLE
    monkeypatch.setattr(headers, "text_of", lambda name: changed)
    assert headers._maker.__wrapped__() == ""
    monkeypatch.undo()
    monkeypatch.setattr(headers, "_maker", str)
    needed = headers.write("", (), tmp_path, policy.BINDING)
    assert needed == [headers._VARIABLE]
    assert "autograd::make_variable(" in (tmp_path / headers._FACTORIES).read_text()


# What light headers of some programs are, by version; test_cuda.py has the split of CUDA files.
RENDERED = {"11": "d0da5bf1cf616082"}


def test_other_light_headers_have_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchs = tmp_path / "torchs"
    operators = [*headers._ALWAYS.split(), "relu", "cat"]
    for name in (
        *headers._KEPT,
        "ATen/Functions.h",
        headers._FACTORIES,
        *(f"ATen/ops/{one}.h" for one in operators),
        "ATen/ops/relu_ops.h",
        "ATen/ops/cat_ops.h",
        "torch/library.h",
        "ATen/cuda/CUDAContext.h",
        "ATen/cuda/CUDAContextLight.h",
    ):
        path = torchs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "#include <ATen/Context.h>\n#include <ATen/ops/relu.h>\n#include <ATen/ops/add.h>\n#include <cublas_v2.h>\n"
            "using at::manual_seed;\nTORCH_CUDA_CPP_API cublasHandle_t getHandle();\nITensorListRef list;\n"
            f"namespace torch {{\ninline at::Tensor zeros(int size) {{\n  return {name};\n}}\n}}\n"
        )
    variable = torchs / headers._VARIABLE
    variable.parent.mkdir(parents=True, exist_ok=True)
    variable.write_text(VARIABLE)
    read = (
        headers.text_of,
        headers._maker,
        headers._named_by,
        headers.closure,
        headers._root,
        headers._all_operators,
    )
    monkeypatch.setattr(headers, "INCLUDE", torchs)
    for one in read:
        one.cache_clear()
    programs = {
        "small": "torch::relu(x); torch::zeros(1); sort(a)",
        "library": "TORCH_LIBRARY(a, m) {} at::globalContext();",
        "bound": "torch::tensor({1}); py::dict d; THPVariable_Check(o); at::cat(x)",
        "cuda": "at::cuda::getCurrentCUDAStream();",
        "indexed": "using namespace torch::indexing; x.index({Slice()}); parallel_for(); IValue v; torch::nn::Linear l;",
    }
    for name, text in programs.items():
        bound = policy.pybind11_headers(text) if name == "bound" else policy.BINDING
        includes = ("torch/extension.h", *(["ATen/cuda/CUDAContext.h"] if name == "cuda" else []))
        headers.write(text, includes, tmp_path / "light" / name, bound)
    for one in read:
        one.cache_clear()
    own = [headers.code_of([path.read_text()]) for path in sorted(headers.OWN.iterdir())]
    made = [
        f"{path.relative_to(tmp_path)}\n{path.read_text()}"
        for path in sorted((tmp_path / "light").rglob("*.h"))
    ]
    digest = hashlib.sha256(
        " ".join("\n".join([*own, core.TEXT, *made]).split()).encode()
    ).hexdigest()[:16]
    assert RENDERED.get(identity.LIGHT) == digest, (
        "increase identity.LIGHT, which is part of the key, and enter it with this digest"
    )
