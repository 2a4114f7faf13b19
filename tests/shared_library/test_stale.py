"""No edit leaves a stale library: each request with a warm cache gives what one with an empty cache gives."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import opjit
from opjit.backends import cpu
from opjit.errors import BuildError, CacheWarning
from opjit.store.store import Store, default_root

STRINGS = "#define S(x) #x\n#define SS(x) S(x)\n"
VALUE = "int value(void) { return X; }\n"
HEADER = "#define X {}\n"
EXTERNAL = "int ext(void);\nint value(void) { return ext(); }\n"
DATA = (
    '__asm__(".section .rodata\\n.globl blob\\nblob: {}\\n.text");\n'
    "extern const char blob[];\nint value(void) {{ return blob[0]; }}\n"
)
ONE = HEADER.format(1)
TWO = HEADER.format(2)


@dataclass(frozen=True)
class Edit:
    """A project of one source, and what changes between two requests. Texts of files by name; None removes a file."""

    source: str
    files: Mapping[str, str] = field(default_factory=dict)
    then: Mapping[str, str | None] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)
    then_call: Mapping[str, Any] | None = None
    prepare: str = ""  # shell commands, before each request
    environment: Mapping[str, str] = field(default_factory=dict)
    then_environment: Mapping[str, str] | None = None
    differs: bool = True  # whether the edit gives another library
    cached: bool = True  # whether the second of two equal requests is a hit


def spelled(line: str, **more: Any) -> Edit:
    """An include line, whose header appears in an earlier folder."""
    return Edit(
        f"{STRINGS}{line}\n{VALUE}",
        {"a/none": "", "b/x.h": ONE},
        {"a/x.h": TWO},
        {"include": ["a", "b"], "cflags": ["-DCFG=x.h"]},
        **more,
    )


def asked(text: str, **more: Any) -> Edit:
    """A text that asks whether there is a header, which appears."""
    source = f"{text}\nint value(void) {{ return X; }}\n"
    return Edit(source, {"a/none": ""}, {"a/cfg.h": ""}, {"include": ["a"], **more})


def linked(*flags: str, file: str = "libf.a", **more: Any) -> Edit:
    """A file that the linker reads, which changes."""
    make = f"gcc -c -fPIC f.c -o f.o && rm -f {file} && ar rcs {file} f.o"
    return Edit(
        EXTERNAL,
        {"f.c": "int ext(void) { return 1; }\n"},
        {"f.c": "int ext(void) { return 2; }\n"},
        {"ldflags": list(flags)},
        prepare=more.pop("prepare", make),
        **more,
    )


TAKES = "#define X 2\n#else\n#define X 1\n#endif"
HAVE = "#define HAVE(x) __has_include(x)\n#if HAVE"
EDITS = {
    "a folder appears on the way to a header": Edit(
        f'#include "sub/../x.h"\n{VALUE}',
        {"d0/sub/none": "", "d0/x.h": ONE, "x.h": TWO},
        {"sub/none": ""},
        {"include": ["d0"]},
    ),
    "a header that a macro names": spelled("#include SS(CFG)"),
    "a header that a macro makes": spelled("#define HDR(n) <n.h>\n#include HDR(x)"),
    "import": spelled('#import "x.h"'),
    "a comment before the name": spelled('#include/**/"x.h"'),
    "a comment in the directive": spelled('#/**/include "x.h"'),
    "a digraph": spelled('%:include "x.h"'),
    "a form feed": spelled('#include\f"x.h"'),
    "a continued word": spelled('#inc\\\nlude "x.h"'),
    "include_next": Edit(
        f"#include <x.h>\n{VALUE}",
        {"a/x.h": "#include_next <x.h>\n", "b/none": "", "c/x.h": ONE},
        {"b/x.h": TWO},
        {"include": ["a", "b", "c"]},
    ),
    "a folder by another spelling": Edit(
        f"#include <x.h>\n{VALUE}",
        {"a/none": "", "b/x.h": ONE},
        {"a/x.h": TWO},
        {"cflags": ["--include-directory=a", "--include-directory=b"]},
    ),
    "isystem before I": Edit(
        f"#include <x.h>\n{VALUE}",
        {"a/x.h": ONE, "b/none": ""},
        {"b/x.h": TWO},
        {"cflags": ["-isystem", "a", "-Ib"]},
    ),
    "idirafter before I": Edit(
        f"#include <x.h>\n{VALUE}",
        {"a/x.h": ONE, "b/none": ""},
        {"b/x.h": TWO},
        {"cflags": ["-idirafter", "a", "-Ib"]},
    ),
    "iquote": Edit(
        f'#include "x.h"\n{VALUE}',
        {"a/x.h": ONE, "b/none": ""},
        {"b/x.h": TWO},
        {"include": ["a"], "cflags": ["-iquoteb"]},
    ),
    "a folder that is I and isystem": Edit(
        f"#include <x.h>\n{VALUE}",
        {"a/x.h": ONE, "b/none": ""},
        {"b/x.h": TWO},
        {"include": ["a", "b"], "cflags": ["-isystem", "a"]},
    ),
    "beside the source": Edit(
        f'#include "x.h"\n{VALUE}', {"a/x.h": ONE}, {"x.h": TWO}, {"include": ["a"]}
    ),
    "another folder": Edit(
        f"{STRINGS}#include SS(CFG)\n{VALUE}",
        {"v1/x.h": ONE, "v2/x.h": TWO},
        call={"include": ["v1"], "cflags": ["-DCFG=x.h"]},
        then_call={"include": ["v2"], "cflags": ["-DCFG=x.h"]},
    ),
    "the order of folders": Edit(
        f"#include <x.h>\n{VALUE}",
        {"a/x.h": ONE, "b/x.h": TWO},
        call={"include": ["a", "b"]},
        then_call={"include": ["b", "a"]},
    ),
    "a generated header": Edit(
        f"{STRINGS}#include SS(CFG)\n{VALUE}",
        call={"generated": {"x.h": ONE}, "cflags": ["-DCFG=x.h"]},
        then_call={"generated": {"x.h": TWO}, "cflags": ["-DCFG=x.h"]},
    ),
    "a forced header": Edit(
        VALUE, {"b/f.h": ONE}, {"b/f.h": TWO}, {"include": ["b"], "cflags": ["-include", "f.h"]}
    ),
    "a forced header that appears": Edit(
        VALUE, {"b/f.h": ONE}, {"f.h": TWO}, {"include": ["b"], "cflags": ["-include", "f.h"]}
    ),
    "has_include": asked(f'#if __has_include("cfg.h")\n{TAKES}'),
    "has_include in a function": asked(f'{HAVE}("cfg.h")\n{TAKES}'),
    "has_include with a comment": asked(f'#if __has_include(/**/"cfg.h")\n{TAKES}'),
    "has_include continued": asked(f'#if __has_inc\\\nlude("cfg.h")\n{TAKES}'),
    "has_include of a macro": asked(f'#define H "cfg.h"\n#if __has_include(H)\n{TAKES}'),
    "has_include of a flag": asked(f"#if __has_include(H)\n{TAKES}", cflags=['-DH="cfg.h"']),
    "has_include in a flag": asked(f"#if HAVE\n{TAKES}", cflags=['-DHAVE=__has_include("cfg.h")']),
    "a header that goes": Edit(
        f'#if __has_include("cfg.h")\n{TAKES}\n{VALUE}', {"cfg.h": ""}, {"cfg.h": None}
    ),
    "a precompiled header": Edit(
        f'#include "x.h"\n{VALUE}',
        {"x.h": ONE, "y.h": TWO},
        {"go": ""},
        prepare="if [ -e go -a ! -e x.h.gch ]; then gcc -O2 -fPIC -x c-header y.h -o x.h.gch; fi",
    ),
    "a precompiled header that is there": Edit(
        f'#include "x.h"\n{VALUE}',
        {"x.h": ONE, "y.h": TWO},
        {"x.h": HEADER.format(3)},
        prepare="[ -e x.h.gch ] || gcc -O2 -fPIC -x c-header y.h -o x.h.gch",
        differs=False,  # the compiler reads the precompiled header
    ),
    "a folder with a slash at its end": Edit(
        f"#include <x.h>\n{VALUE}",
        {"a/none": "", "b/x.h": ONE},
        {"a/x.h": TWO},
        {"cflags": ["-Ia/", "-Ib/"]},
    ),
    "one of two equal headers": Edit(
        f"#ifndef X\n#define X 1\n#endif\n{VALUE}",
        {"a.h": "#pragma once\n", "b.h": "#pragma once\n"},
        {"b.h": TWO},
        {"cflags": ["-include", "a.h", "-include", "b.h"]},
    ),
    "one of two equal headers that are imported": Edit(
        f'#import "a.h"\n#import "b.h"\n#ifndef X\n#define X 1\n#endif\n{VALUE}',
        {"a.h": "\n", "b.h": "\n"},
        {"b.h": TWO},
    ),
    "a pragma that makes equal headers one": Edit(
        f'#include "a.h"\n#include "b.h"\n#ifndef X\n#define X 1\n#endif\n{VALUE}',
        {"a.h": '_Pragma(\n"once")\n', "b.h": '_Pragma(\n"once")\n'},
        {"b.h": TWO},
    ),
    "a header beside its parent folder": Edit(
        f'#include "../common/x.h"\n{VALUE}',
        {"../common/x.h": ONE},
        {"../common/x.h": TWO},
        {"include": ["."]},
    ),
    "a folder of libraries that is not there": Edit(
        VALUE, {}, {}, {"ldflags": ["-L/nolib", "-lm"], "cflags": ["-DX=1"]}
    ),
    "a header in a folder that is not there": Edit(
        f'#if __has_include("/nope/x.h")\n{TAKES}\n{VALUE}'
    ),
    "a file of options": Edit(
        VALUE, {"words": "-DX=1"}, {"words": "-DX=2"}, {"cflags": ["@words"]}
    ),
    "a file of the linker's options": Edit(
        EXTERNAL,
        {
            "one.c": "int ext(void) { return 1; }\n",
            "two.c": "int ext(void) { return 2; }\n",
            "words": "one.o",
        },
        {"words": "two.o"},
        {"ldflags": ["-Wl,@words"]},
        prepare="gcc -c -fPIC one.c two.c",
    ),
    "a specs file": Edit(
        VALUE,
        {"own.specs": "*cpp:\n+ -DX=1\n"},
        {"own.specs": "*cpp:\n+ -DX=2\n"},
        {"cflags": ["-specs=own.specs"]},
    ),
    "an archive with code for the linker": linked(
        "libf.a",
        prepare="gcc -flto -frandom-seed=1 -c -fPIC f.c -o f.o && rm -f libf.a && gcc-ar rcs libf.a f.o",
    ),
    "a version script in an earlier folder": Edit(
        "int value(void) { return 1; }\nint other(void) { return 1; }\n",
        {"l/none": "", "m/m.map": "{ global: value; other; local: *; };\n"},
        {"l/m.map": "{ global: value; local: *; };\n"},
        {"ldflags": ["-Ll", "-Lm", "-Wl,--version-script=m.map"]},
    ),
    "a library that is linked as data": Edit(
        "extern const char _binary_libk_so_end[], _binary_libk_so_start[];\n"
        "int value(void) { return _binary_libk_so_start[_binary_libk_so_end - _binary_libk_so_start - 1]; }\n",
        {"k.c": "int k(void) { return 1; }\n", "end": "a"},
        {"end": "b"},
        {"ldflags": ["-Wl,-b,binary,libk.so,-b,elf64-x86-64"]},
        prepare="gcc -shared -fPIC k.c -o libk.so && printf %s $(cat end) >> libk.so",
    ),
    "a date without a warning": Edit(
        '#pragma GCC diagnostic ignored "-Wdate-time"\n'
        "const char *at = __DATE__ __TIME__;\nint value(void) { return 1; }\n",
        cached=False,
    ),
    "the date of a file": Edit(
        '#pragma GCC diagnostic ignored "-Wdate-time"\n'
        "const char *at = __TIMESTAMP__;  // __DATE__\nint value(void) { return 1; }\n",
        cached=False,
    ),
    "incbin": Edit(DATA.format('.incbin \\"d.bin\\"'), {"d.bin": "a"}, {"d.bin": "b"}),
    "an assembler's include": Edit(
        DATA.format('.include \\"d.s\\"'), {"d.s": ".byte 1\n"}, {"d.s": ".byte 2\n"}
    ),
    "an archive by its name": linked("libf.a"),
    "an archive by its path": linked("./libf.a"),
    "an object": linked("f.o"),
    "an archive among the linker's words": linked(
        "-L.", "-Wl,--whole-archive,-lf,--no-whole-archive"
    ),
    "an archive in the linker's folder": linked("-Wl,-L.", "-lf"),
    "a library in two words": linked("-L.", "-l", "f"),
    "a library by its long name": linked("-L.", "-Wl,--library=f"),
    "a folder by its long name": linked("-Wl,--library-path=.", "-lf"),
    "a thin archive": linked(
        "-L.", "-lf", prepare="gcc -c -fPIC f.c -o f.o && rm -f libf.a && ar rcsT libf.a f.o"
    ),
    "a linker script": linked(
        "-L.",
        "-lg",
        prepare="gcc -c -fPIC f.c -o f.o && rm -f libf.a && ar rcs libf.a f.o && echo 'INPUT(-lf)' > libg.so",
    ),
    "an archive in an earlier folder": Edit(
        EXTERNAL,
        {"l/none": "", "m/f.c": "int ext(void) { return 1; }\n"},
        {"l/f.c": "int ext(void) { return 2; }\n"},
        {"ldflags": ["-Ll", "-Lm", "-lf"]},
        prepare="for d in l m; do if [ -e $d/f.c ]; then gcc -c -fPIC $d/f.c -o $d/f.o && ar rcs $d/libf.a $d/f.o; fi; done",
    ),
    "a version script": Edit(
        "int value(void) { return 1; }\nint other(void) { return 1; }\n",
        {"m.map": "{ global: value; other; local: *; };\n"},
        {"m.map": "{ global: value; local: *; };\n"},
        {"ldflags": ["-Wl,--version-script=m.map"]},
    ),
    "the soname of a shared library": Edit(
        EXTERNAL,
        {"f.c": "int ext(void) { return 1; }\n"},
        {"name": "libother.so"},
        {"ldflags": ["-L.", "-lf", "-Wl,-rpath,."]},
        prepare="gcc -shared -fPIC f.c -Wl,-soname,$(cat name 2>/dev/null || echo libf.so) -o libf.so && cp libf.so libother.so",
    ),
    "the date": Edit(
        "const char *at = __DATE__ __TIME__;\nint value(void) { return 1; }\n",
        cached=False,
    ),
    "a variable that names folders": Edit(
        f"#if __has_include(<envx.h>)\n#include <envx.h>\n#else\n#define X 1\n#endif\n{VALUE}",
        {"e/envx.h": TWO},
        then_environment={"CPATH": "e", "C_INCLUDE_PATH": "e", "GCC_EXEC_PREFIX": "e/"},
    ),
}


def put(texts: Mapping[str, str | None]) -> None:
    for name, text in texts.items():
        path = Path(name)
        if text is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def value_of(path: Path) -> str:
    """What the library gives in a process of its own."""
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).value())"
    command = [sys.executable, "-c", code, str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "warm"))
    return tmp_path


def edits() -> Iterator[Any]:
    """Each edit of a project with one source and with two; the fast tier has each edit once."""
    for number, (name, edit) in enumerate(EDITS.items()):
        slow = [pytest.mark.slow]
        is_even = number % 2 == 0
        yield pytest.param(edit, ["a.c"], id=f"{name}-one", marks=[] if is_even else slow)
        yield pytest.param(edit, ["a.c", "b.c"], id=f"{name}-two", marks=slow if is_even else [])


@pytest.mark.filterwarnings("ignore::opjit.errors.CacheWarning")
@pytest.mark.parametrize(("edit", "sources"), list(edits()))
def test_an_edit_is_seen(
    project: Path, edit: Edit, sources: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(call: Mapping[str, Any], environment: Mapping[str, str]) -> Path:
        subprocess.run(["sh", "-c", edit.prepare], check=True)
        with monkeypatch.context() as patched:
            for name, value in environment.items():
                patched.setenv(name, value)
            return opjit.build("stale", sources, **call)

    put({"a.c": edit.source, "b.c": "int b;\n", **edit.files})
    first = made(edit.call, edit.environment)
    assert (made(edit.call, edit.environment) == first) is edit.cached
    put(edit.then)
    call = edit.call if edit.then_call is None else edit.then_call
    environment = edit.environment if edit.then_environment is None else edit.then_environment
    warm = made(call, environment)
    monkeypatch.setenv("OPJIT_CACHE", str(project / "clean"))
    clean = made(call, environment)
    if "__DATE__" not in edit.source:
        assert warm.read_bytes() == clean.read_bytes()
    assert (warm.parent.name == clean.parent.name) or not edit.cached
    if edit.then or edit.then_call:
        assert (warm != first) is edit.differs
    assert value_of(warm) == value_of(clean)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"cflags": ["-fplugin=x.so"]}, "a plug-in"),
        ({"cflags": ["-save-temps"]}, "a file that it writes"),
        ({"cflags": ["-E"]}, "another output"),
        ({"cuda_cflags": ["-DX=$MYX"]}, "a shell"),
        ({"cuda_cflags": ["-DX=`cat v`"]}, "a shell"),
    ],
)
def test_what_no_tool_reports_is_refused(project: Path, flags: dict[str, Any], says: str) -> None:
    put({"a.c": "int value(void) { return 1; }\n"})
    with pytest.raises(BuildError, match=says):
        opjit.build("refused", ["a.c"], **flags)


def test_what_cannot_be_known_is_not_cached_and_says_why(project: Path) -> None:
    put({"a.c": "const char *at = __DATE__;\n"})
    for _ in range(2):
        with pytest.warns(
            CacheWarning, match=r"built for this process only, because it uses __DATE__"
        ):
            opjit.build("dated", ["a.c"])
    assert not list(Store(default_root()).base.glob("shared_library.*/*"))


def test_a_forced_header_that_is_missing_is_the_compiler_s_error(project: Path) -> None:
    put({"a.c": "int value(void) { return 1; }\n"})
    with pytest.raises(BuildError, match=r"none\.h"):
        opjit.build("forced", ["a.c"], cflags=["-include", "none.h"])


def test_native_stands_for_the_cpu_at_hand(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put({"a.c": "int value(void) { return 1; }\n"})
    first = opjit.build("native", ["a.c"], cflags=["-march=native"])
    with monkeypatch.context() as patched:
        patched.setattr(cpu, "identity", lambda: "another CPU")
        assert opjit.build("native", ["a.c"], cflags=["-march=native"]) != first
    assert opjit.build("native", ["a.c"], cflags=["-march=native"]) == first


def test_a_compiler_that_is_a_script_is_asked_each_time(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put({"a.c": "int value(void) { return X; }\n", "x": "1"})
    script = project / "cc"
    script.write_text(f'#!/bin/sh\nexec gcc -DX=$(cat {os.getcwd()}/x) "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    first = opjit.build("script", ["a.c"])
    assert opjit.build("script", ["a.c"]) == first
    put({"x": "2"})
    assert ctypes.CDLL(str(opjit.build("script", ["a.c"]))).value() == 2


@pytest.mark.parametrize("name", ["reads.json", "object.o", "parts.json"])
def test_a_flipped_bit_in_a_kept_object_never_matters(project: Path, name: str) -> None:
    put({"a.c": '#include "x.h"\nint value(void) { return X; }\n', "b.c": "int b;\n", "x.h": ONE})
    first = opjit.build("flipped", ["a.c", "b.c"])
    for place in (Store(default_root()).base / "parts").glob(f"*/{name}"):
        content = bytearray(place.read_bytes())
        content[len(content) // 2] ^= 4
        place.write_bytes(content)
    put({"b.c": "int c;\n"})
    second = opjit.build("flipped", ["a.c", "b.c"])
    assert second != first
    assert ctypes.CDLL(str(second)).value() == 1


def test_a_flipped_bit_in_a_note_never_matters(project: Path) -> None:
    put({"a.c": "int value(void) { return 1; }\n"})
    first = opjit.build("noted", ["a.c"])
    base = Store(default_root()).base
    for place in (*(base / "toolchain").iterdir(), *(base / "seen").iterdir()):
        content = bytearray(place.read_bytes())
        content[-3] ^= 1
        place.write_bytes(content)
    assert opjit.build("noted", ["a.c"]) == first


def test_a_file_that_a_text_names_from_the_working_folder_is_that_of_each_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put({"a.c": DATA.format('.incbin \\"d.bin\\"'), "one/d.bin": "1", "two/d.bin": "2"})
    source = Path("a.c").absolute()
    values = []
    for folder in ("one", "two", "one"):
        monkeypatch.chdir(source.parent / folder)
        values.append(value_of(opjit.build("from", [source])).strip())
    assert values == ["49", "50", "49"]
