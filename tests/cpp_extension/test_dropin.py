"""opjit.load and opjit.load_inline: torch.utils.cpp_extension's arguments and results, out of opjit's cache."""

import ctypes
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension as torchs

import opjit
from opjit import cpp_extension, files, processes
from opjit.builder import torch_builder
from opjit.cpp_extension import static_init
from opjit.errors import BuildError, CompileError, CompileWarning, ToolMissing, UnknownArch
from opjit.store import manifest
from tests import helpers
from tests.helpers import fresh, program
from tests.helpers import write_cxx as plain
from tests.tracing import traced

pytestmark = pytest.mark.usefixtures("here")
# A Python module that needs no header of torch: a second to build, where torch/extension.h takes half a minute.
MODULE = """\
#include <Python.h>
#include "value.h"
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
static PyObject *value(PyObject *, PyObject *) { return PyLong_FromLong(VALUE); }
static PyMethodDef methods[] = {{"value", value, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, TEXT(TORCH_EXTENSION_NAME), "", -1, methods};
PyMODINIT_FUNC JOIN(PyInit_, TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""


@pytest.fixture
def name() -> str:
    """A name that no other test loads anything under."""
    return f"dropin_{os.urandom(4).hex()}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The module's source; its header says what it returns."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "value.h").write_text("#define VALUE 1\n")
    (folder / "module.cpp").write_text(MODULE)
    return folder / "module.cpp"


def value(path: str) -> int:
    return int(ctypes.CDLL(path).value())


def compiler(folder: Path, before: str = "") -> str:
    """A g++ that first runs shell commands when it compiles; it is known by what the real one says."""
    real = shutil.which("c++")
    return str(
        program(
            folder / "g++",
            f"#!/bin/sh\ncase \" $* \" in *' -c '*) {before or ':'};; esac\nexec '{real}' \"$@\"\n",
        )
    )


@pytest.mark.torch
@pytest.mark.parametrize("function", ["load", "load_inline"])
def test_the_signature_is_that_of_the_installed_torch(function: str) -> None:
    ours, theirs = (
        list(inspect.signature(getattr(room, function)).parameters.values())
        for room in (opjit, torchs)
    )
    rest = ours.pop()
    # What a later torch adds comes last, and is passed on.
    assert rest.kind is inspect.Parameter.VAR_KEYWORD
    assert ours.pop().name == "fast"  # opjit's own
    assert [(one.name, one.default, one.kind) for one in ours] == [
        (one.name, one.default, one.kind) for one in theirs[: len(ours)]
    ]


@pytest.mark.torch
def test_what_a_later_torch_takes_reaches_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def later(**arguments: Any) -> None:
        assert arguments.pop("newest") is True
        original(**arguments)

    original: Callable[..., None] = torchs.load_inline
    monkeypatch.setattr(torchs, "load_inline", later)
    text = 'extern "C" int value() { return 3; }'
    assert (
        value(
            opjit.load_inline(
                name, text, is_python_module=False, no_implicit_headers=True, newest=True
            )
        )
        == 3
    )
    monkeypatch.undo()
    path = plain(tmp_path / "a")
    opjit.load(name, path, extra_cflags=["-DVALUE=4"], is_python_module=False)
    with pytest.raises(
        TypeError, match="extra_clags"
    ):  # a misspelled one, also where the extension is in the cache
        opjit.load(
            name, path, extra_cflags=["-DVALUE=4"], extra_clags=["-O3"], is_python_module=False
        )


def test_changed_content_is_a_new_module_in_one_process_and_old_content_the_old_one(
    here: Path, name: str, source: Path
) -> None:
    header = source.parent / "value.h"
    found = []
    for number in (1, 2, 1):
        header.write_text(f"#define VALUE {number}\n")
        module = opjit.load(name, str(source))
        found.append((module.__name__, module.value()))
        assert isinstance(module, ModuleType)
        assert Path(str(module.__file__)).is_relative_to(here)
    assert found == [(name, 1), (name, 2), (name, 1)]
    assert repr(module).startswith(f"<module {name!r} from ")


# pybind11's way: the module is kept by its name. It says what it was when it was made.
KEPT = """\
#include <Python.h>
#define TEXT(name) #name
#include TEXT(value.h)
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
static PyObject *create(PyObject *spec, PyModuleDef *)
{
    PyObject *kept = PySys_GetObject("kept"), *name = PyObject_GetAttrString(spec, "name"), *module = PyDict_GetItem(kept, name);
    if (module)
        return Py_NewRef(module);
    module = PyModule_NewObject(name);
    PyDict_SetItem(kept, name, module);
    return module;
}
static int fill(PyObject *module)
{
    if (!PyObject_HasAttrString(module, "own"))
        PyModule_AddObject(module, "own", PyModule_GetNameObject(module));
    return PyModule_AddIntConstant(module, "made", VALUE);
}
static PyModuleDef_Slot slots[] = {{Py_mod_create, (void *)create}, {Py_mod_exec, (void *)fill}, {0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "kept", "", 0, nullptr, slots};
PyMODINIT_FUNC JOIN(PyInit_, TORCH_EXTENSION_NAME)() { return PyModuleDef_Init(&module); }
"""


def test_each_content_is_a_module_of_its_own_also_beside_torchs_of_a_hidden_header_and_of_another_compiler(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "kept", {}, raising=False)
    source.write_text(KEPT)
    (tmp_path / "torchs").mkdir()
    modules = [torchs.load(name, str(source), build_directory=str(tmp_path / "torchs"))]
    for number in (2, 3):
        (source.parent / "value.h").write_text(
            f"#ifdef OTHER\n#define VALUE 4\n#else\n#define VALUE {number}\n#endif\n"
        )
        modules.append(opjit.load(name, str(source)))
    assert opjit.load(name, str(source)) is modules[2]
    real = shutil.which("c++")
    other = program(
        tmp_path / "bin" / "g++",
        f"""#!/bin/sh
        case "$*" in -v*) '{real}' "$@" 2>&1 | sed 's/gcc version /gcc version 9/';; *) exec '{real}' "$@" -DOTHER;;
        esac
        """,
    )
    monkeypatch.setenv("CXX", str(other))
    modules.append(opjit.load(name, str(source)))
    assert [module.made for module in modules] == [1, 2, 3, 4]
    assert [
        (each.__name__, each.own, each.__package__, each.__spec__.name) for each in modules
    ] == [(name, name, "", name)] * 4


@pytest.mark.parametrize("first", ["opjit", "cpp_extension"])
def test_a_second_version_that_would_end_the_process_is_an_error_whoever_loaded_the_first(
    name: str, tmp_path: Path, first: str
) -> None:
    """The libraries stand for those with a TORCH_LIBRARY: the second in a process throws in a static initializer."""
    paths = [
        plain(
            tmp_path / str(number),
            f"""\
#include <stdexcept>
#include <stdlib.h>
static int now = [] {{ if (getenv("{name}")) throw std::runtime_error("twice"); return setenv("{name}", "", 1) + {number}; }}();
""",
        )
        for number in (1, 2)
    ]
    fresh(f"import opjit\nopjit.load({name!r}, {paths[1]!r}, is_python_module=False)")
    done = fresh(f"""
import opjit, torch
from torch.utils import cpp_extension
{first}.load({name!r}, {paths[0]!r}, is_python_module=False, build_directory={str(tmp_path)!r})
try:
    opjit.load({name!r}, {paths[1]!r}, is_python_module=False)
except opjit.errors.LoadError as error:
    print("twice" in str(error))
""")
    assert done.stdout == "True\n"


@pytest.mark.torch
def test_a_warm_load_starts_nothing_writes_nothing_and_does_not_import_torchs_builder(
    here: Path, name: str, source: Path
) -> None:
    opjit.load(name, str(source))
    program = f"""
import opjit
tracing.append(True)
module = opjit.load({name!r}, {str(source)!r})
report(value=module.value())
"""
    time.sleep(2.1)  # the first load after that notes the signature of the new source
    traced(program, {"OPJIT_CACHE": str(here)})
    seen = traced(program, {"OPJIT_CACHE": str(here)})
    assert seen["value"] == 1
    assert seen["seen"] == []
    assert seen["heavy"] == []


def test_the_key_is_content(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moved checkout, a touched file and another include folder are the same; each kind of content is another entry."""

    def load(folder: Path, *flags: str) -> str:
        return str(
            opjit.load(
                name,
                [str(folder / "source" / "plain.cpp")],
                extra_cflags=["-DVALUE=5", f"-I {folder}/include", *flags],
                is_python_module=False,
            )
        )

    one = tmp_path / "one"
    other = tmp_path / "other"
    plain(
        one / "source",
        "#include <amount.h>\n#define WHERE(x) <x>\n#include WHERE(computed.h)\n"
        'extern "C" int value() { return AMOUNT + COMPUTED; }\n',
    )
    (one / "include").mkdir()
    (one / "include" / "amount.h").write_text("#define AMOUNT 10\n")
    (one / "include" / "computed.h").write_text("#define COMPUTED 1\n")
    first = load(one)
    assert value(first) == 11
    shutil.copytree(one, other)
    for path in other.rglob("*"):
        os.utime(path)
    assert load(other) == first
    document = json.loads((Path(first).parent / manifest.NAME).read_text())["document"]
    assert {"<include 0>/amount.h", "<include 0>/computed.h"} <= document["inputs"].keys()
    assert str(tmp_path) not in json.dumps(document)
    (other / "include" / "computed.h").write_text("#define COMPUTED 2\n")
    assert value(load(other)) == 12
    (other / "include" / "amount.h").write_text("#define AMOUNT 20\n")
    assert value(load(other)) == 22
    assert load(one, "-DMORE") != first
    assert load(one) == first
    monkeypatch.setattr(torch, "__version__", torch.__version__ + ".other")
    monkeypatch.setenv("OPJIT_OFFLINE", "1")
    with pytest.raises(BuildError, match="OPJIT_OFFLINE"):
        load(one)


def test_a_static_library_is_part_of_the_content(name: str, tmp_path: Path) -> None:
    path = plain(
        tmp_path / "a", 'extern "C" int amount();\nextern "C" int value() { return amount(); }\n'
    )
    for number in (1, 2):
        subprocess.run(
            ["gcc", "-c", "-fPIC", "-x", "c", "-", "-o", "amount.o"],
            cwd=tmp_path,
            check=True,
            text=True,
            input=f"int amount(void) {{ return {number}; }}",
        )
        subprocess.run(["ar", "rcs", "libamount.a", "amount.o"], cwd=tmp_path, check=True)
        assert (
            value(
                opjit.load(
                    name, path, extra_ldflags=[f"-L{tmp_path}", "-lamount"], is_python_module=False
                )
            )
            == number
        )


def test_libraries_are_found_from_the_build_directory_when_linked_and_when_opened(
    name: str, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", place / "libamount.so"],
        check=True,
        text=True,
        input="int amount(void) { return 8; }",
    )
    path = plain(
        tmp_path / "a", 'extern "C" int amount();\nextern "C" int value() { return amount(); }\n'
    )
    link = ["-L. -lamount", "-Wl,-z,defs", "-Wl,-rpath,'$$ORIGIN'"]
    for load in (torchs.load, opjit.load):
        assert (
            value(
                load(
                    name,
                    path,
                    extra_ldflags=list(link),
                    build_directory=str(place),
                    is_python_module=False,
                )
            )
            == 8
        )


def test_a_header_of_the_users_own_is_content_though_the_compiler_searches_its_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "local"
    (own / "below").mkdir(parents=True)
    cxx = program(
        tmp_path / "bin" / "g++", f"#!/bin/sh\nexec '{shutil.which('c++')}' -isystem {own} \"$@\"\n"
    )
    monkeypatch.setenv("CXX", str(cxx))
    path = plain(
        tmp_path / "a",
        "#include <amount.h>\n#define WHERE(x) <x>\n#include WHERE(computed.h)\n"
        'extern "C" int value() { return AMOUNT + COMPUTED; }\n',
    )
    for amount, computed in ((10, 1), (20, 1), (20, 2)):
        (own / "amount.h").write_text(f"#define AMOUNT {amount}\n")
        (own / "below" / "computed.h").write_text(f"#define COMPUTED {computed}\n")
        assert (
            value(
                opjit.load(
                    name, path, extra_include_paths=[str(own / "below")], is_python_module=False
                )
            )
            == amount + computed
        )


def test_a_header_from_the_future_is_no_change(name: str, source: Path) -> None:
    source.write_text(
        MODULE.replace('#include "value.h"', '#define HEADER "value.h"\n#include HEADER')
    )
    os.utime(source.parent / "value.h", (4e9, 4e9))
    assert opjit.load(name, str(source)).value() == 1


def test_empty_flags_and_names_that_are_no_identifiers_are_as_torchs(
    name: str, tmp_path: Path
) -> None:
    path = plain(tmp_path / "a", "int f();")
    for given in (f"{name}-a", f"{name}.b"):
        (tmp_path / given).mkdir()
        opjit.load(
            given,
            path,
            extra_cflags="",  # type: ignore[arg-type]
            extra_ldflags="",  # type: ignore[arg-type]
            extra_include_paths="",  # type: ignore[arg-type]
            build_directory=str(tmp_path / given),
            is_python_module=False,
        )
        assert (tmp_path / given / f"{given}.so").is_file()


def test_a_source_that_changes_while_it_is_compiled_is_not_stored(
    here: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plain(tmp_path / "a")
    monkeypatch.setenv("CXX", compiler(tmp_path / "bin", f"echo '// more' >> {path}"))
    with pytest.raises(BuildError, match="sources changed during compilation"):
        opjit.load(name, path, extra_cflags=["-DVALUE=1"], is_python_module=False)
    assert helpers.entries(here) == []


def test_a_second_c_plus_plus_library_is_a_warning(name: str, tmp_path: Path) -> None:
    archive = subprocess.run(
        ["c++", "-print-file-name=libstdc++.a"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(archive).is_absolute():
        pytest.skip("the compiler has no static libstdc++")
    text = '#include <sstream>\nextern "C" int length() { std::ostringstream text; text << 7; return (int)text.str().size(); }\n'
    (tmp_path / "length.cpp").write_text(text)
    arguments: dict[str, Any] = {
        "sources": [str(tmp_path / "length.cpp")],
        "is_python_module": False,
    }
    with pytest.warns(
        CompileWarning,
        match=rf"{name} contains a static C\+\+ library, linked by \S+ or by a flag",
    ):
        opjit.load(name, **arguments, extra_ldflags=["-static-libstdc++"])
    opjit.load(f"{name}_shared", **arguments)


def test_a_build_directory_gets_the_library_and_what_it_was_built_from(
    name: str, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    arguments: dict[str, Any] = {
        "is_python_module": False,
        "no_implicit_headers": True,
        "build_directory": str(place),
    }
    text = '#include "here.h"\nextern "C" int value() { return HERE; }'
    with pytest.raises(FileNotFoundError, match="place"):
        opjit.load_inline(name, text, **arguments)
    place.mkdir()
    (place / "here.h").write_text("#define HERE 9\n")  # torch would put main.cpp beside it
    texts = [text]
    opjit.load_inline(name, texts, **arguments)
    assert texts == [text]  # torch's function lengthens it
    assert sorted(path.name for path in place.iterdir()) == sorted(
        ["build.ninja", "here.h", "main.cpp", f"{name}.so"]
    )
    assert (place / "main.cpp").read_text() == text
    assert "-c $in -o $out" in (place / "build.ninja").read_text()  # as torch wrote it
    before = files.stat_signature(place / f"{name}.so")
    assert value(str(place / f"{name}.so")) == 9
    opjit.load_inline(name, text, **arguments)
    assert files.stat_signature(place / f"{name}.so") == before
    (place / f"{name}.so").unlink()
    opjit.load_inline(name, text, **arguments)
    assert value(str(place / f"{name}.so")) == 9


def test_messages_of_inline_code_name_the_text_and_not_a_folder_that_is_gone(name: str) -> None:
    text = 'extern "C" const char *where() { return __FILE__; }'
    library = ctypes.CDLL(
        opjit.load_inline(name, text, is_python_module=False, no_implicit_headers=True)
    )
    library.where.restype = ctypes.c_char_p
    assert library.where() == b"main.cpp"
    with pytest.raises(CompileError, match=r"\Amain\.cpp:2:9: error: 'wrong'") as raised:
        opjit.load_inline(
            name, "int x =\n        wrong;", is_python_module=False, no_implicit_headers=True
        )
    assert raised.value.log is not None
    assert "staging" not in str(raised.value) + raised.value.log.read_text()


def test_a_verbose_build_that_fails_shows_and_keeps_the_compilers_message(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CompileError, match="'it' was not declared") as raised:
        opjit.load(name, plain(tmp_path / "a", "int f() { return it; }\n"), verbose=True)
    assert "'it' was not declared" in capfd.readouterr().out
    assert raised.value.log is not None
    assert "'it' was not declared" in raised.value.log.read_text()


def test_a_verbose_build_shows_its_commands_and_nothing_of_the_recorder(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    opjit.load(name, plain(tmp_path / "a", "int f;\n"), is_python_module=False, verbose=True)
    shown = capfd.readouterr().out
    assert " -c " in shown
    assert " -shared " in shown
    assert "LD_PRELOAD" not in shown


@pytest.mark.torch
def test_torchs_precompiled_header_is_neither_made_nor_removed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = processes.run

    def running(command: Any, **settings: Any) -> Any:
        assert "c++-header" not in command
        return run(command, **settings)

    monkeypatch.setattr(processes, "run", running)
    copied = torch_builder.private_copy

    def private_copy() -> Any:
        module = copied()
        vars(module)["_TORCH_PATH"] = str(tmp_path)
        return module

    monkeypatch.setattr(torchs, "_TORCH_PATH", str(tmp_path))
    monkeypatch.setattr(torch_builder, "private_copy", private_copy)
    header = tmp_path / "include" / "torch" / "extension.h.gch"
    header.parent.mkdir(parents=True)
    header.touch()
    text = 'extern "C" int value() { return 3; }'
    paths = {
        opjit.load_inline(name, text, use_pch=use, is_python_module=False, no_implicit_headers=True)
        for use in (True, False)
    }
    opjit.load_inline(name, text + "\n", is_python_module=False, no_implicit_headers=True)
    assert len(paths) == 1
    assert header.exists()


@pytest.mark.nvcc
@pytest.mark.skipif(
    torch.version.cuda is None,
    reason="torch is a build without CUDA, so its builder has no libtorch_cuda to link",
)
def test_inline_cuda_code_has_no_folder_that_is_gone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    cuda = 'extern "C" const char *where() { return __FILE__; }'
    library = ctypes.CDLL(
        opjit.load_inline(name, "", cuda, is_python_module=False, no_implicit_headers=True)
    )
    library.where.restype = ctypes.c_char_p
    assert library.where() == b"cuda.cu"


def test_verbose_says_where_a_hit_comes_from(
    here: Path, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = plain(tmp_path / "a")
    for expected in ("-DVALUE=2", f"opjit: {name} is in the cache: {here}"):
        opjit.load(name, path, extra_cflags=["-DVALUE=2"], is_python_module=False, verbose=True)
        assert expected in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (
            '#include "absent.h"\n',
            [],
            r"plain\.cpp:1:10: fatal error: absent\.h: No such file or directory",
        ),
        ("int f() { return it; }\n", [], r"plain\.cpp:1:18: error: 'it' was not declared"),
        ("int f();\n", ["-fabsent"], "unrecognized command-line option '-fabsent'"),
        (
            'int f();\nextern "C" int value() { return f(); }\n',
            ["-Wl,-z,defs"],
            r"undefined reference to `f\(\)'",
        ),
    ],
)
def test_the_first_line_of_an_error_is_the_compilers(
    name: str, tmp_path: Path, text: str, flags: list[str], message: str
) -> None:
    link = [flag for flag in flags if flag.startswith("-Wl")]
    with pytest.raises(CompileError, match=rf"\A.*{message}.*\nwhile building {name} for torch"):
        opjit.load(
            name,
            plain(tmp_path / "a", text),
            extra_cflags=[flag for flag in flags if flag not in link],
            extra_ldflags=link,
        )


def test_a_source_may_have_a_dollar_in_its_path_and_two_may_not_have_one_object_file(
    name: str, tmp_path: Path
) -> None:
    path = plain(tmp_path / "a$b")
    assert value(opjit.load(name, path, is_python_module=False, extra_cflags=["-DVALUE=5"])) == 5
    other = Path(path).with_suffix(".cc")
    other.write_text("int other;\n")
    with pytest.raises(CompileError, match=r"have the same name, .* one object file; rename one"):
        opjit.load(name, [path, str(other)], is_python_module=False, extra_cflags=["-DVALUE=5"])


@pytest.mark.parametrize(("given", "better"), [("my-ext", "my_ext"), ("2nd", "_2nd")])
def test_a_name_that_c_plus_plus_cannot_have_is_named_where_the_code_needs_one(
    tmp_path: Path, source: Path, given: str, better: str
) -> None:
    first = f"the name '{given}' becomes TORCH_EXTENSION_NAME, which must be a C++ identifier; use {better}"
    source.write_text("int TORCH_EXTENSION_NAME;\n")
    with pytest.raises(CompileError) as caught:
        opjit.load(given, str(source))
    assert str(caught.value).splitlines()[0] == first
    assert f"while building {given} for torch" in str(caught.value)
    source.write_text("int f() { return it; }\n")  # where it does not, it is not to blame
    with pytest.raises(CompileError, match="'it' was not declared") as caught:
        opjit.load(given, str(source))
    assert first not in str(caught.value)
    assert (
        value(
            opjit.load(
                given, plain(tmp_path / "b"), extra_cflags=["-DVALUE=3"], is_python_module=False
            )
            or ""
        )
        == 3
    )


@pytest.mark.torch
def test_arguments_that_torch_refuses_are_refused(name: str, tmp_path: Path) -> None:
    path = plain(tmp_path / "a")
    with pytest.raises(ValueError, match="mutually exclusive"):
        opjit.load(name, path, is_standalone=True)
    with pytest.raises(AssertionError, match="At least one source"):
        opjit.load(name, [])
    with pytest.raises(FileNotFoundError, match=r"absent\.cpp"):
        opjit.load(name, [str(tmp_path / "absent.cpp")])
    with pytest.raises(ValueError, match="Expected 'functions' to be a list or dict"):
        opjit.load_inline(name, "int f();", functions=5, build_directory=str(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(
        BuildError,
        match=r"extra_cflags is a list of strings, not the string '-O3'; write \['-O3'\]",
    ):
        opjit.load(name, path, extra_cflags="-O3")  # type: ignore[arg-type]


def test_a_missing_compiler_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "absent-g++")
    with pytest.raises(ToolMissing, match=r"CXX is 'absent-g\+\+'"):
        opjit.load(name, plain(tmp_path / "a"))


def test_an_exception_in_a_static_initializer_is_an_error_and_not_the_end_of_the_process(
    here: Path, name: str, tmp_path: Path
) -> None:
    path = plain(
        tmp_path / "a",
        '#include <stdexcept>\nstatic int now = [] { throw std::runtime_error("no good"); return 1; }();\n',
    )
    code = f"""
    import torch, opjit
    for _ in range(2):
        try:
            opjit.load({name!r}, {path!r}, is_python_module=False)
        except opjit.errors.LoadError as error:
            print(error)
    """
    told = fresh(code).stdout  # a process of its own: where CUDA is in use, no child can try
    assert (
        len(
            re.findall(
                rf"{name} cannot be loaded, .* it threw 'no good' in a static initializer", told
            )
        )
        == 2
    )
    assert helpers.entries(here) == []


@pytest.mark.torch
def test_what_only_torch_can_build_goes_to_torch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torchs, "load", opjit.load)
    monkeypatch.setattr(torchs, "_jit_compile", lambda *arguments, **more: calls.append(arguments))
    path = plain(tmp_path / "a")
    opjit.load(name, [path], with_sycl=True, build_directory=str(tmp_path))
    opjit.load(
        name, [path], is_python_module=False, is_standalone=True, build_directory=str(tmp_path)
    )
    rest = (name, [path], None, None, None, None, None, str(tmp_path), False, None)
    assert calls == [(*rest, True, True, False), (*rest, None, False, True)]


@pytest.mark.torch
def test_the_rest_of_the_module_is_torchs() -> None:
    assert cpp_extension.include_paths() == torchs.include_paths()
    assert cpp_extension.load is opjit.load
    with pytest.raises(AttributeError):
        cpp_extension.absent  # noqa: B018


@pytest.mark.torch
def test_torchs_module_and_the_process_are_left_alone_while_opjit_builds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[object, ...]] = []
    run = processes.run_printing

    def running(command: Any, **settings: Any) -> Any:
        if Path(command[0]).name == "ninja":
            seen.append((dict(vars(torchs)), dict(os.environ)))
        return run(command, **settings)

    before = dict(vars(torchs)), dict(os.environ)
    monkeypatch.setattr(processes, "run_printing", running)
    opjit.load(name, plain(tmp_path / "a"), extra_cflags=["-DVALUE=4"], is_python_module=False)
    assert seen
    assert all(state == before for state in seen)


def test_different_extensions_are_built_side_by_side_in_one_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "compiling").mkdir()
    both = f"touch {tmp_path}/compiling/$$; for i in $(seq 600); do test $(ls {tmp_path}/compiling | wc -l) = 2 && break; sleep 0.1; done"
    monkeypatch.setenv("CXX", compiler(tmp_path / "bin", f"{both}; test $i != 600 || exit 1"))

    def load(number: int) -> int:
        path = plain(tmp_path / str(number))
        return value(
            opjit.load(
                f"{name}_{number}", path, extra_cflags=[f"-DVALUE={number}"], is_python_module=False
            )
        )

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(load, (1, 2))) == [1, 2]


def test_processes_that_load_one_extension_at_once_compile_it_once(
    name: str, source: Path, tmp_path: Path
) -> None:
    cxx = compiler(tmp_path / "bin", f"echo x >> {tmp_path}/compiled; sleep 1")
    code = f"""
import os, torch, opjit
from opjit import cpp_extension
for _ in range(4):
    if os.fork() == 0:
        os.write(1, str(opjit.load({name!r}, {str(source)!r}).value()).encode() + b"\\n")
        os._exit(0)
for _ in range(4):
    os.wait()
"""
    assert fresh(code, {"CXX": cxx}).stdout == "1\n" * 4
    assert (tmp_path / "compiled").read_text() == "x\n"


def test_cuda_code_needs_an_arch_from_somewhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.cu").touch()
    for variable in ("TORCH_CUDA_ARCH_LIST", "OPJIT_ARCH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UnknownArch, match=r"set TORCH_CUDA_ARCH_LIST=9\.0 or OPJIT_ARCH=sm_90"):
        opjit.load(name, str(tmp_path / "empty.cu"))


@pytest.mark.torch
@pytest.mark.nvcc
@pytest.mark.skipif(
    torch.version.cuda is None,
    reason="torch is a build without CUDA, so its builder has no libtorch_cuda to link",
)
def test_cuda_code_is_compiled_for_the_chosen_arch_without_a_gpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opjit.store import elf

    (tmp_path / "kernel.cu").write_text(
        "__global__ void one(float *to) { *to = 1; }\n"
        'extern "C" void launch(float *to) { one<<<1, 1>>>(to); }\n'
    )
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    libraries = {}
    for arch in ("sm_80", "sm_90"):
        monkeypatch.setenv("OPJIT_ARCH", arch)
        libraries[arch] = opjit.load(name, str(tmp_path / "kernel.cu"), is_python_module=False)
        assert elf.inspect(Path(libraries[arch]).read_bytes()).cuda_archs == {arch}
    assert libraries["sm_80"] != libraries["sm_90"]


def test_an_extension_that_is_cleared_between_the_look_and_dlopen_is_built_again(
    tmp_path: Path,
) -> None:
    done = fresh(f"""
import ctypes, opjit
from opjit import cpp_extension
plain = cpp_extension._open
def cleared_before(*arguments):
    cpp_extension._open = plain
    print(opjit.cache.clear().removed)
    return plain(*arguments)
cpp_extension._open = cleared_before
print(ctypes.CDLL(opjit.load("plain", {plain(tmp_path)!r}, extra_cflags=["-DVALUE=7"], is_python_module=False)).value())
""")
    assert done.stdout == "1\n7\n"


def test_a_library_that_lacks_a_function_is_refused_with_the_name_of_it(tmp_path: Path) -> None:
    source = tmp_path / "lacks.c"
    source.write_text("void not_there(void);\nvoid call(void) { not_there(); }\n")
    library = tmp_path / "lacks.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-z,now", source, "-o", library], check=True)
    assert static_init.check_in_child(str(library), "lacks") == "undefined symbol: not_there"


def test_a_thread_that_outlives_the_main_thread_can_build(tmp_path: Path) -> None:
    second = tmp_path / "b.cpp"
    second.write_text("int second(void) { return 2; }\n")
    sources = [plain(tmp_path / "a"), str(second)]
    code = f"""
        import threading, time, torch, opjit
        def build():
            threading.main_thread().join()
            time.sleep(0.2)
            print(opjit.load("late", {sources}, extra_cflags=["-DVALUE=1"], is_python_module=False)[-3:])
        threading.Thread(target=build).start()
    """
    assert fresh(code).stdout == ".so\n"


def test_an_error_of_the_user_shows_few_frames_of_opjit(name: str, tmp_path: Path) -> None:
    source = tmp_path / "wrong.cpp"
    source.write_text("int f( {")
    with pytest.raises(CompileError) as caught:
        opjit.load(name, str(source), is_python_module=False)
    assert [each.name for each in caught.traceback[1:]] == ["load", "_load_call"]


def test_a_source_that_the_compiler_ignores_is_named_by_the_linker(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("")
    sources = [plain(tmp_path / "a"), str(tmp_path / "notes.txt")]
    with pytest.raises(CompileError, match=r"cannot find notes\.o"):
        opjit.load(name, sources, extra_cflags=["-DVALUE=1"], is_python_module=False)


@pytest.mark.parametrize(
    ("command", "found"),
    [("LABEL=1 {folder}/compiler", "compiler with 1"), ("/no/such/nvcc", "not found")],
)
@pytest.mark.nvcc
def test_pytorch_nvcc_is_a_command_of_the_shell(
    command: str, found: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "compiler", "#!/bin/sh\necho compiler with $LABEL\nexit 3\n")
    (tmp_path / "kernel.cu").write_text('extern "C" int kernel(void) { return 3; }\n')
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setenv("PYTORCH_NVCC", command.format(folder=tmp_path))
    with pytest.raises(CompileError, match=found):
        opjit.load(name, str(tmp_path / "kernel.cu"), is_python_module=False, fast=False)


@pytest.mark.parametrize("flags", [("-MF", "{folder}/other.d"), ("-MMD", "-isystem", "{folder}")])
@pytest.mark.filterwarnings("ignore::opjit.errors.CacheWarning")
def test_an_object_whose_headers_are_not_all_listed_is_not_kept(
    flags: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    (tmp_path / "a.cpp").write_text('#include "w.h"\nextern "C" int value(void) { return W; }\n')
    (tmp_path / "b.cpp").write_text("int other(void) { return 0; }\n")
    sources = [str(tmp_path / "a.cpp"), str(tmp_path / "b.cpp")]
    for version in (1, 2):
        (tmp_path / "w.h").write_text(f"#define W {version}\n")
        path = opjit.load(
            name,
            sources,
            extra_include_paths=[str(tmp_path)],
            extra_cflags=[flag.format(folder=tmp_path) for flag in flags],
            is_python_module=False,
        )
        assert value(path) == version
    assert not Path("null.d").exists()


def test_no_compiler_starts_after_another_one_failed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPJIT_JOBS", "1")
    monkeypatch.setenv("CXX", compiler(tmp_path / "bin", f"echo x >> {tmp_path}/compiled; exit 1"))
    sources = [tmp_path / f"{each}.cpp" for each in "abc"]
    for source in sources:
        source.write_text("")
    with pytest.raises(CompileError):
        opjit.load(name, [*map(str, sources)], is_python_module=False)
    assert (tmp_path / "compiled").read_text() == "x\n"
