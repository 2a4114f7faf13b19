"""Known cases of the assembler, the linker, the shell and the compiler's surroundings."""

import subprocess
from collections.abc import Iterator, Mapping

from tests.stale.case import Content, Dated, Link, Made, Program
from tests.stale.row import HIDDEN, ONE, TWO, Row, X, given, row

BYTE = f"extern const unsigned char blob[] {HIDDEN};\nint value(void) {{ return blob[0]; }}\n"
SECTION = '__asm__(".section .rodata\\n.globl blob\\nblob: {}\\n.text");\n'
INCBIN = SECTION.format('.incbin \\"{here}/data.bin\\"')
EXT = "extern int ext(void);\nint value(void) { return ext(); }\n"
ARCHIVES = [Made("archive", f"int ext(void) {{ return {n}; }}\n") for n in (1, 2)]
OBJECTS = [Made("object", f"int ext(void) {{ return {n}; }}\n") for n in (1, 2)]
THIN = [Made("thin", f"int ext(void) {{ return {n}; }}\n") for n in (1, 2)]
EXTRA = "int extra(void) { return 1; }\nint value(void) { return 1; }\n"
MAPS = ["{ global: value; local: *; };\n", "{ global: value; extra; local: *; };\n"]
LINKED: Mapping[str, tuple[str, ...]] = {
    "-l": ("-L{here}", "-lf"),
    "word": ("libf.a",),
    "path": ("./libf.a",),
    "absolute": ("{here}/libf.a",),
    "whole": ("-L{here}", "-Wl,--whole-archive,-lf,--no-whole-archive"),
    "-Wl,-L": ("-Wl,-L{here}", "-lf"),
    "library=": ("-L{here}", "-Wl,--library=f"),
    "directory=": ("--library-directory={here}", "-lf"),
    "-l apart": ("-L{here}", "-l", "f"),
    "-L apart": ("-L", "{here}", "-lf"),
    "colon": ("-L{here}", "-l:libf.a"),
    "xlinker": ("-L{here}", "-Xlinker", "-lf"),
}
SCRIPTS: Mapping[str, tuple[str, ...]] = {
    "=": ("-Wl,--version-script=m.map",),
    "comma": ("-Wl,--version-script,m.map",),
    "path": ("-Wl,--version-script={here}/m.map",),
    "xlinker": ("-Xlinker", "--version-script={here}/m.map"),
}
_CC1 = subprocess.run(
    ["gcc", "-print-prog-name=cc1"], capture_output=True, text=True, check=True
).stdout.strip()


def _assembler() -> Iterator[Row]:
    data = {"files": given(data_bin="1")}
    edit = {"files": given(data_bin="2")}
    yield row(5, "incbin", "blo", INCBIN + BYTE, edit, **data)
    header = {"files": given(data_bin="1", x_h=INCBIN)}
    yield row(5, "incbin in a header", "bl", '#include "x.h"\n' + BYTE, edit, **header)
    first, second = (f".section .rodata\n.globl blob\nblob: .byte {n}\n.text\n" for n in (1, 2))
    text = '__asm__(".include \\"{here}/x.s\\"");\n' + BYTE
    yield row(5, ".include", "blo", text, {"files": given(x_s=second)}, files=given(x_s=first))
    text = SECTION.format(".byte OPT") + BYTE
    options = {"cflags": ("-Wa,@{here}/opts",), "files": {"opts": "--defsym OPT=1\n"}}
    yield row(5, "options", "bl", text, {"files": {"opts": "--defsym OPT=2\n"}}, **options)


def _archives() -> Iterator[Row]:
    edit = {"files": given(libf_a=ARCHIVES[1])}
    start = given(libf_a=ARCHIVES[0])
    for name, flags in LINKED.items():
        yield row(6, f"archive, {name}", "bl", EXT, edit, files=start, ldflags=flags)
    thin = {"files": given(libf_a=THIN[0]), "ldflags": ("-L{here}", "-lf")}
    yield row(6, "thin archive", "bl", EXT, {"files": given(libf_a=THIN[1])}, **thin)
    for name in ("libg.so", "libg.a"):
        script = {
            "files": {**start, name: "INPUT({here}/libf.a)\n"},
            "ldflags": ("-L{here}", "-lg"),
        }
        yield row(6, f"script {name}", "bl", EXT, edit, **script)
    both = given(l1__libf_a=ARCHIVES[0], l2__libf_a=ARCHIVES[1])
    l1, l2 = ({"environment": {"LIBRARY_PATH": f"{{here}}/l{n}"}} for n in (1, 2))
    yield row(6, "variable, other folder", "bl", EXT, l2, files=both, ldflags=("-lf",), **l1)
    edit = {"files": given(l1__libf_a=ARCHIVES[1])}
    yield row(6, "variable, content", "bl", EXT, edit, files=both, ldflags=("-lf",), **l1)
    later = {"files": given(l1__y="", l2__libf_a=ARCHIVES[0])}
    flags = ("-L{here}/l1", "-L{here}/l2", "-lf")
    yield row(6, "appears earlier", "bl", EXT, edit, ldflags=flags, **later)
    other = {"ldflags": ("-L{here}/l2", "-lf")}
    yield row(6, "other folder", "bl", EXT, other, files=both, ldflags=("-L{here}/l1", "-lf"))


def _linker() -> Iterator[Row]:
    edit = {"files": given(f_o=OBJECTS[1])}
    files: Mapping[str, Content] = {"f.o": OBJECTS[0], "list": "{here}/f.o\n"}
    ways = {"word": "f.o", "path": "./f.o", "absolute": "{here}/f.o"}
    lists = {"-Wl,@": "-Wl,@{here}/list", "@": "@{here}/list"}
    for name, flag in {**ways, **lists}.items():
        yield row(6, f"object, {name}", "bl", EXT, edit, files=files, ldflags=(flag,))
    for name, flags in SCRIPTS.items():
        edit = {"files": given(m_map=MAPS[1])}
        start = {"files": given(m_map=MAPS[0]), "ldflags": flags}
        yield row(6, f"version script, {name}", "bl", EXTRA, edit, **start)
    text = BYTE.replace("blob", "_binary_data_bin_start")
    start = {"files": given(data_bin="1"), "ldflags": ("-Wl,-b,binary,data.bin,-b,default",)}
    yield row(6, "binary", "bl", text, {"files": given(data_bin="2")}, **start)


def _shell() -> Iterator[Row]:
    flags = {"backticks": "`cat {here}/v`", "dollar": "$(cat {here}/v)"}
    for name, flag in {**flags, "dollars": "$$(cat {here}/v)"}.items():
        start = {"files": {"v": "1"}, "cflags": (f"-DX={flag}",)}
        yield row(7, f"file, {name}", "blo", X, {"files": {"v": "2"}}, **start)
    for kinds, flag in {"bo": "$MYX", "blo": "$$MYX"}.items():  # ninja removes $MYX from "l"
        start = {"environment": {"MYX": "1"}, "cflags": (f"-DX={flag}",)}
        yield row(7, f"variable, {flag}", kinds, X, {"environment": {"MYX": "2"}}, **start)


def _wrappers() -> Iterator[Row]:
    variables = {"CC": "{here}/cc", "CXX": "{here}/cc"}
    for kinds, real in (("bo", "/usr/bin/gcc"), ("l", "/usr/bin/g++")):
        script = f'#!/bin/sh\nexec {real} -DX=%s "$@"\n'
        edit = {"files": {"cc": Program(script % 2)}}
        start = {"files": {"cc": Program(script % 1)}, "environment": variables}
        yield row(8, "wrapper, edited", kinds, X, edit, **start)
        reads = {"cc": Program(script % "$(cat {here}/v)"), "v": "1"}
        other_file = {"files": {"v": "2"}}
        yield row(
            8, "wrapper reads a file", kinds, X, other_file, files=reads, environment=variables
        )
        hears = {"files": {"cc": Program(script % "$MYX")}}
        first_value = {"environment": {**variables, "MYX": "1"}}
        other_value = {"environment": {"MYX": "2"}}
        yield row(8, "wrapper reads a variable", kinds, X, other_value, **hears, **first_value)
    first, second = (Program(f'#!/bin/sh\nexec "$@" -DX={n}\n') for n in (1, 2))
    start = {"files": {"run": first}, "launcher": ("{here}/run",)}
    yield row(8, "launcher, edited", "b", X, {"files": {"run": second}}, **start)


def _compilers() -> Iterator[Row]:
    first, second = (f"*cpp:\n+ -DX={n}\n\n" for n in (1, 2))
    for name, flag in {"long": "--specs={here}/s", "short": "-specs={here}/s"}.items():
        start = {"files": {"s": first}, "cflags": (flag,)}
        yield row(8, f"specs, {name}", "bl", X, {"files": {"s": second}}, **start)
    one, two, seven = (Program(f'#!/bin/sh\nexec {_CC1} "$@" -DX={n}\n') for n in (1, 2, 7))
    for name, flag in {"--prefix": "--prefix={here}/t/", "-B": "-B{here}/t/"}.items():
        start = {"files": {"t/cc1": one}, "cflags": (flag,)}
        yield row(8, f"tools, {name}", "b", X, {"files": {"t/cc1": two}}, **start)
    text = "#ifndef X\n#define X 1\n#endif\n" + X
    for name in ("COMPILER_PATH", "GCC_EXEC_PREFIX"):
        edit = {"environment": {name: "{here}/t/"}}
        yield row(8, f"tools, {name}", "b", text, edit, files={"t/cc1": seven})
    text = '#include "x.h"\n' + X
    for kinds, how in (("b", "header"), ("l", "header++")):
        compiled = Made(how, TWO)
        appears = {"files": {"x.h.gch": compiled}}
        yield row(8, "precompiled appears", kinds, text, appears, files={"x.h": ONE})
        both: Mapping[str, Content] = {"x.h": ONE, "x.h.gch": compiled}
        yield row(8, "precompiled goes", kinds, text, {"files": {"x.h.gch": None}}, files=both)


def _dates() -> Iterator[Row]:
    start = {"environment": {"SOURCE_DATE_EPOCH": "1"}}
    for macro, place, second in (("__TIME__", 7, "2"), ("__DATE__", 5, "864000")):
        text = f"int value(void) {{ return {macro}[{place}]; }}\n"
        yield row(8, macro, "bl", text, {"environment": {"SOURCE_DATE_EPOCH": second}}, **start)
    text = '#include "x.h"\nint value(void) { return stamp[18]; }\n'
    first, second_date = (
        Dated("static const char stamp[] = __TIMESTAMP__;\n", 10_000 + n) for n in (1, 2)
    )
    edit = {"files": {"x.h": second_date}}
    yield row(8, "__TIMESTAMP__", "blo", text, edit, files={"x.h": first})


def _others() -> Iterator[Row]:
    text = '#include "x.h"\n' + X
    links = {"x.h": Link("one.h"), "one.h": ONE, "two.h": TWO}
    yield row(9, "link", "blo", text, {"files": {"x.h": Link("two.h")}}, files=links)
    yield row(9, "flag", "blo", X, {"cflags": ("-DX=2",)}, cflags=("-DX=1",))
    start = {"files": given(x_h=TWO, v__x_h=ONE), "include": ("{here}/v",)}
    yield row(9, "header goes", "blo", text, {"files": {"x.h": None}}, **start)
    both = given(v1__x_h=ONE, v2__x_h=TWO)
    text = "#include <x.h>\n" + X
    for name in ("C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "CPATH"):
        edit, first = ({"environment": {name: f"{{here}}/v{n}"}} for n in (2, 1))
        yield row(9, f"{name} changes", "bl", text, edit, files=both, **first)


def rows() -> Iterator[Row]:
    yield from _assembler()
    yield from _archives()
    yield from _linker()
    yield from _shell()
    yield from _wrappers()
    yield from _compilers()
    yield from _dates()
    yield from _others()
