"""Draws inputs of a compiler that are not in a graph of headers: flags, forced headers, files of the assembler, dates, variables."""

from collections.abc import Callable, Mapping

from tests.stale.case import Dated, Link, Made
from tests.stale.draft import Draft
from tests.stale.links import HIDDEN, binary, exports, linker, shared, symbol
from tests.stale.tools import specs, tools

# Names of files that have a meaning in a Makefile or a shell.
STEMS = [
    "a b",
    "a  b",
    " a",
    "a$b",
    "a$$b",
    "a#b",
    "a\\b",
    "a\\ b",
    "a:b",
    "a%b",
    "a*b",
    "ä",
    "a'b",
    "a&b",
    "a;b",
    "a~b",
    "a=b",
    "a,b",
    "(a)",
]


def definition(draft: Draft) -> None:
    """A macro on the command line."""
    first = draft.number()
    spelling = draft.rng.choice(["-DV={}", "-D V={}", "-DV=({}+0)", "-DV(x)=x*{}"])
    draft.cflags.append(spelling.format(first))
    draft.terms.append("V(1)" if "(x)" in spelling else "V")
    draft.sets("a macro's value changes", spelling.format(draft.other(first)))


def forced(draft: Draft) -> None:
    """A header that a flag includes."""
    first = draft.number()
    text = "#define FORCED {}\n"
    place = draft.rng.choice(["f.h", "fd/f.h"])
    draft.files[place] = text.format(first)
    draft.files["fe/y.h"] = ""
    flag = draft.rng.choice(
        ["-include", "-imacros", "--include", "--imacros", "--include=", "-include joined"]
    )
    name = "{here}/" + place if draft.chance(0.5) else "f.h"
    if flag.endswith("="):
        draft.cflags.append(flag + name)
    elif flag.endswith("joined"):
        draft.cflags.append("-include" + name)
    else:
        draft.cflags += [flag, name]
    draft.cflags += ["-I{here}/fe", "-I{here}/fd"]
    draft.terms.append("FORCED")
    draft.writes("a forced header changes", place, text.format(draft.other(first)))
    draft.writes("a forced header appears earlier", "fe/f.h", text.format(draft.number()))
    draft.writes(
        "a forced header appears in the current folder", "f.h", text.format(draft.number())
    )


def assembler(draft: Draft) -> None:
    """A byte that the assembler takes from a file or a flag."""
    first = draft.number()
    second = draft.number()
    ways = ["incbin", "searched", "include", "nested", "options", "symbol", "header", "relative"]
    if draft.kind.startswith("load"):
        ways.remove("relative")
    way = draft.rng.choice(ways)
    data = "data.bin"
    head = ".section .rodata\\n.globl blob\\nblob: "
    tail = "\\n.byte 0\\n.text"
    if way in ("incbin", "header"):
        body = f'.incbin \\"{{here}}/{data}\\"'
    elif way == "relative":
        body = f'.incbin \\"{data}\\"'
    elif way == "searched":
        body = '.incbin \\"found.bin\\"'
        draft.cflags += draft.rng.choice(
            [
                ["-Wa,-I,{here}/s1,-I,{here}/s2"],
                ["-I{here}/s1", "-I{here}/s2"],
                ["-Wa,-I{here}/s1", "-Wa,-I{here}/s2"],
            ]
        )
        draft.files["s1/y"] = ""
        data = "s2/found.bin"
        draft.writes("a file of the assembler appears earlier", "s1/found.bin", f"{draft.number()}")
    elif way == "include":
        data = "x.s"
        body = '.include \\"{here}/x.s\\"'
    elif way == "nested":
        body = '.include \\"{here}/y.s\\"'
        draft.files["y.s"] = f'.incbin "{{here}}/{data}"\n'
    else:
        body = ".byte OPT"
        data = "options"
        draft.cflags.append(
            "-Wa,@{here}/options" if way == "options" else f"-Wa,--defsym,OPT={first}"
        )
    text = {"x.s": ".byte {}\n", "options": "--defsym OPT={}\n"}.get(data, "{}")
    if way == "symbol":
        draft.sets("a symbol of the assembler changes", f"-Wa,--defsym,OPT={draft.other(first)}")
    else:
        draft.files[data] = text.format(first)
        draft.writes("a file of the assembler changes", data, text.format(draft.other(first)))
        draft.files["other.data"] = text.format(second)
        draft.writes("a file of the assembler becomes a link", data, Link("{here}/other.data"))
        draft.writes("a file of the assembler goes", data, None)
    if (
        draft.chance(0.15) and draft.kind != "op"
    ):  # the assembler then runs when the library is linked
        draft.cflags.append("-flto")
        draft.ldflags.append("-flto")
    statement = f'__asm__("{head}{body}{tail}");'
    if way == "header":
        draft.files["asm.h"] = f"#define EMBED {statement}\n"
        draft.lines += ['#include "asm.h"', "EMBED"]
    else:
        draft.lines.append(statement)
    draft.lines.append(f"extern const unsigned char blob[] {HIDDEN};")
    draft.terms.append("(100 * blob[0] + blob[1])")


def shell(draft: Draft) -> None:
    """Text that a shell expands."""
    first = draft.number()
    second = draft.other(first)
    draft.files["v"] = f"{first}"
    draft.environment["MYX"] = f"{first}"
    flag = draft.rng.choice(
        [
            "-DX=`cat {here}/v`",
            "-DX=$(cat {here}/v)",
            "-DX=$$(cat {here}/v)",
            "-DX=1$MYX",
            "-DX=1${MYX}",
            "-DX=$$MYX",
            "-DX=$$((MYX))",
        ]
    )
    draft.cflags.append(flag)
    draft.terms.append("X")
    draft.writes("a file that a shell reads changes", "v", f"{second}")
    draft.variable("a variable that a shell expands changes", "MYX", f"{second}")


def dates(draft: Draft) -> None:
    """A date in the program."""
    macros = ["__TIMESTAMP__"] if draft.kind == "op" else ["__TIME__", "__DATE__", "__TIMESTAMP__"]
    macro = draft.rng.choice(macros)
    draft.clock = draft.clock or macro != "__TIMESTAMP__"
    spelling = draft.rng.randrange(4)
    text = macro
    before = ""
    if spelling == 1:
        text = "WHEN"
        before = f"#define WHEN {macro}\n"
    elif spelling == 2:
        text = f"JOIN({macro[:5]}, {macro[5:]})"
        before = "#define JOIN(a, b) a##b\n"
    elif spelling == 3:
        text = "WHEN"
        draft.cflags.append(f"-DWHEN={macro}")
    draft.environment["SOURCE_DATE_EPOCH"] = "86400"
    line = f"{before}static const char when[] = {text};\n"
    place = 5 if macro == "__DATE__" else 18 if macro == "__TIMESTAMP__" else 7
    draft.terms.append(f"when[{place}]")
    draft.files["when.h"] = Dated(line, 10_001)
    draft.lines.append('#include "when.h"')
    draft.variable("SOURCE_DATE_EPOCH changes", "SOURCE_DATE_EPOCH", "172801")
    draft.writes("a header is dated anew", "when.h", Dated(line, 10_002))


def generated(draft: Draft) -> None:
    """A header that the request brings."""
    first = draft.number()
    text = "#undef GEN\n#define GEN {}\n"
    name = draft.rng.choice(["gen.h", "sub/gen.h", "gen.inc"])
    draft.generated[name] = text.format(first)
    line = draft.rng.choice(
        [
            '#include "{}"',
            "#include <{}>",
            '#include/**/"{}"',
            '#define GN "{}"\n#include GN',
            '#import "{}"',
        ]
    )
    draft.lines.append(line.format(name))
    draft.terms.append("GEN")
    draft.files |= {"g/y.h": "", f"g2/{name}": text.format(draft.number())}
    draft.cflags += ["-I{here}/g", "-I{here}/g2"]
    second = text.format(draft.other(first))

    def change(after: Draft) -> None:
        after.generated[name] = second

    def gone(after: Draft) -> None:
        del after.generated[name]

    draft.edit("a generated header changes", change)
    draft.edit("a generated header goes", gone)
    draft.writes("a file shadows a generated header", f"g/{name}", text.format(draft.number()))
    draft.writes(
        "a file beside the source shadows a generated header", name, text.format(draft.number())
    )


def precompiled(draft: Draft) -> None:
    """A precompiled header beside a header."""
    first = draft.number()
    how = "header++" if draft.kind.startswith("load") else "header"
    text = "#define PRE {}\n"
    draft.files["pre.h"] = text.format(first)
    draft.lines.insert(0, '#include "pre.h"')
    draft.terms.append("PRE")
    compiled = Made(how, text.format(draft.other(first)))
    if draft.chance(0.5):
        draft.files["pre.h.gch"] = compiled
        draft.writes("a precompiled header goes", "pre.h.gch", None)
        draft.writes(
            "a precompiled header changes", "pre.h.gch", Made(how, text.format(draft.number()))
        )
    else:
        draft.writes("a precompiled header appears", "pre.h.gch", compiled)
        draft.writes("a precompiled header appears in a folder", "pre.h.gch/one.gch", compiled)


def response(draft: Draft) -> None:
    """Flags for the compiler in a file."""
    first = draft.number()
    draft.files |= {
        "flags": f"-DRESPONSE={first} -I{{here}}/r1\n",
        "outer.flags": "@{here}/flags\n",
    }
    draft.cflags.append(
        draft.choose(["@{here}/flags", "@flags", "@{here}/outer.flags", "-Wp,@{here}/flags"])
    )
    draft.terms.append("RESPONSE")
    draft.writes(
        "a file of flags changes", "flags", f"-DRESPONSE={draft.other(first)} -I{{here}}/r2\n"
    )


def current_folder(draft: Draft) -> None:
    """Flags whose paths start from the current folder."""
    for name in ("w1", "w2"):
        draft.files[f"{name}/inc/cwd.h"] = f"#define CWD {draft.number()}\n"
        draft.files[f"{name}/libcwd.a"] = Made(
            "archive", f"int cwd(void) {{ return {draft.number()}; }}\n"
        )
    draft.folder = "w1"
    draft.cflags += draft.rng.choice(
        [["-Iinc"], ["-isystem", "inc"], ["-idirafter", "./inc"], ["-I", "../w1/../w1/inc"]]
    )
    draft.lines.append(draft.rng.choice(["#include <cwd.h>", "#/**/include <cwd.h>"]))
    draft.terms.append("CWD")
    if draft.chance(0.5):
        draft.ldflags += draft.rng.choice([["libcwd.a"], ["./libcwd.a"], ["-L.", "-lcwd"]])
        draft.lines.append("extern int cwd(void);")
        draft.terms.append("cwd()")

    def change(after: Draft) -> None:
        after.folder = "w2"

    draft.edit("the current folder changes", change)
    draft.writes(
        "a header in the current folder changes", "w1/inc/cwd.h", f"#define CWD {draft.number()}\n"
    )


def surroundings(draft: Draft) -> None:
    """Variables that may matter to tools."""
    name, values = draft.rng.choice(
        [
            ("LANG", ("C", "de_DE.UTF-8")),
            ("LC_ALL", ("C", "C.UTF-8")),
            ("TZ", ("UTC", "America/New_York")),
            ("TMPDIR", ("{here}/t1", "{here}/t2")),
            ("LD_RUN_PATH", ("/nowhere/a", "/nowhere/b")),
            ("GCC_COMPARE_DEBUG", ("", "-gtoggle")),
            ("DEPENDENCIES_OUTPUT", ("{here}/t1/deps", "{here}/t2/deps")),
            ("SUNPRO_DEPENDENCIES", ("{here}/t1/deps", "{here}/t2/deps")),
            ("LDEMULATION", ("elf_x86_64", "elf_i386")),
            ("GNUTARGET", ("elf64-x86-64", "elf32-i386")),
            ("COLLECT_GCC_OPTIONS", ("", "'-v'")),
            ("CFLAGS", ("-DSET=1", "-DSET=2")),
            ("CPPFLAGS", ("-DSET=1", "-DSET=2")),
            ("LDFLAGS", ("", "-Wl,-z,now")),
            ("NVCC_PREPEND_FLAGS", ("-DSET=1", "-DSET=2")),
        ]
    )
    first, second = values
    draft.files |= {"t1/y": "", "t2/y": ""}
    draft.lines += ["#ifndef SET", "#define SET 0", "#endif"]
    draft.terms.append("SET")
    draft.environment[name] = first
    draft.variable(f"{name} changes", name, second)


def names_of_files(draft: Draft) -> None:
    """A program that has the names of its files."""
    draft.files["n1/named.h"] = "static const char named[] = __FILE__;\n"
    draft.files["n2/named.h"] = "static const char named[] = __FILE__;\n"
    draft.lines.append("#include <named.h>")
    draft.cflags.append("-I{here}/n1")
    draft.terms.append("named[sizeof named - 10]")
    draft.sets("a header of the same text is found elsewhere", "-I{here}/n2")
    draft.lines.append("static const char base[] = __BASE_FILE__;")
    draft.terms.append("(int)(sizeof base > 4)")


def reports(draft: Draft) -> None:
    """Flags that ask the compiler for a report of what it reads, or change it."""
    first = draft.number()
    text = "#define REP {}\n"
    draft.files["sys/rep.h"] = text.format(first)
    draft.lines.append("#include <rep.h>")
    draft.terms.append("REP")
    draft.cflags += ["-isystem", "{here}/sys"]
    draft.cflags += draft.rng.choice(
        [
            ["-MMD"],
            ["-MMD", "-MP"],
            ["-MD", "-MF", "{here}/own.d"],
            ["-MT", "other"],
            ["-MQ", "other"],
            ["-Wp,-MD,{here}/own.d"],
            ["-Wp,-MMD,{here}/own.d"],
            ["-H"],
            ["-pipe"],
            ["-Wa,--MD,{here}/own.d"],
            ["-fpch-deps"],
            ["-save-temps=obj"],
            ["-fdirectives-only"],
        ]
    )
    if draft.chance(0.2):
        draft.ldflags.append("-Wl,--dependency-file={here}/own.d")
    draft.writes("a header of the system changes", "sys/rep.h", text.format(draft.other(first)))


def parent_of_link(draft: Draft) -> None:
    """A header whose path goes through a link and up again."""
    for place in ("up", "deep", "deeper"):
        draft.files[f"{place}/up.h"] = f"#define UP {draft.number()}\n"
        draft.files[f"{place}/inner/y.h"] = ""
    draft.files["up/lane"] = Link("{here}/deep/inner")
    draft.lines.append(draft.rng.choice(['#include "lane/../up.h"', "#include <lane/../up.h>"]))
    draft.cflags.append("-I{here}/up")
    draft.terms.append("UP")
    draft.writes("a header behind a link changes", "deep/up.h", f"#define UP {draft.number()}\n")
    draft.writes("a link on the way to a header changes", "up/lane", Link("{here}/deeper/inner"))


def once(draft: Draft) -> None:
    """A header that is reached in two ways, and is read once if they are one file."""
    text = "#pragma once\n#ifdef ONCE\n#undef ONCE\n#define ONCE 2\n#else\n#define ONCE 1\n#endif\n"
    draft.files["once1/once.h"] = Dated(text, 10_000)
    draft.files["once2/once.h"] = Link("{here}/once1/once.h")
    draft.lines += ['#include "once1/once.h"', '#include "once2/once.h"']
    draft.terms.append("ONCE")
    draft.writes("a link becomes a copy", "once2/once.h", Dated(text, 20_000))


def source(draft: Draft) -> None:
    """The source itself."""
    first = draft.number()
    second = draft.number()
    draft.lines.append(f"#define SOURCE {first}")
    draft.terms.append("SOURCE")
    place = len(draft.lines) - 1

    def change(after: Draft) -> None:
        after.lines[place] = f"#define SOURCE {second}"

    def swap(after: Draft) -> None:
        after.cflags.reverse()

    draft.edit("the source changes", change)
    draft.cflags += [f"-DORDER={first}", "-UORDER"]
    draft.lines += ["#ifndef ORDER", "#define ORDER 0", "#endif"]
    draft.terms.append("ORDER")
    draft.edit("flags change places", swap)


def empty_element(draft: Draft) -> None:
    """A variable with an empty element, which is the current folder."""
    first = draft.number()
    draft.folder = "cwd"
    draft.files |= {"cwd/empty.h": f"#define EMPTY {first}\n", "ev/y.h": ""}
    draft.environment["CPATH"] = draft.rng.choice(
        ["{here}/ev:", ":{here}/ev", "{here}/ev::{here}/ev"]
    )
    draft.lines.append("#include <empty.h>")
    draft.terms.append("EMPTY")
    draft.writes(
        "a header in the current folder changes",
        "cwd/empty.h",
        f"#define EMPTY {draft.other(first)}\n",
    )
    draft.writes(
        "a header appears in a folder of a variable",
        "ev/empty.h",
        f"#define EMPTY {draft.number()}\n",
    )


def odd_names(draft: Draft) -> None:
    """Files whose names need quotes in a report."""
    first = draft.number()
    stem = draft.rng.choice(STEMS)
    way = draft.rng.choice(["header", "folder", "archive", "data"])
    if way == "header":
        name = f"{stem}.h"
        text = "#define ODD {}\n"
        draft.lines.append(f'#include "{name}"')
        draft.terms.append("ODD")
    elif way == "folder":
        name = f"{stem}/odd.h"
        text = "#define ODD {}\n"
        draft.lines.append(f'#include "{name}"')
        draft.terms.append("ODD")
    elif way == "data":
        name = f"{stem}.bin"
        text = "{}"
        path = "{here}/" + name.replace("\\", "\\\\\\\\")
        draft.lines.append(
            f'__asm__(".section .rodata\\n.globl odd\\nodd: .incbin \\"{path}\\"\\n.text");'
        )
        draft.lines.append(f"extern const unsigned char odd[] {HIDDEN};")
        draft.terms.append("(100 * odd[0] + odd[1])")
    else:
        name = f"{stem}.a"
        text = "int odd(void) {{ return {}; }}\n"
        draft.ldflags.append("{here}/" + name)
        draft.lines.append("extern int odd(void);")
        draft.terms.append("odd()")
    contents = [text.format(first), text.format(draft.other(first))]
    if way == "archive":
        draft.files[name] = Made("archive", contents[0])
        draft.writes("a file of an odd name changes", name, Made("archive", contents[1]))
    else:
        draft.files[name] = contents[0]
        draft.writes("a file of an odd name changes", name, contents[1])
        draft.writes("a file of an odd name goes", name, None)


Piece = Callable[[Draft], None]
# Pieces, and the kinds of programs that can have them: b: opjit.build, l: load, o: ops.
PIECES: Mapping[str, tuple[Piece, str]] = {
    "definition": (definition, "blo"),
    "forced": (forced, "bl"),
    "assembler": (assembler, "blo"),
    "linker": (linker, "blo"),
    "exports": (exports, "bl"),
    "binary": (binary, "b"),
    "symbol": (symbol, "bl"),
    "shell": (shell, "bl"),
    "dates": (dates, "blo"),
    "generated": (generated, "b"),
    "precompiled": (precompiled, "bl"),
    "response": (response, "bl"),
    "current folder": (current_folder, "b"),
    "tools": (tools, "bl"),
    "specs": (specs, "bl"),
    "surroundings": (surroundings, "blo"),
    "names of files": (names_of_files, "bl"),
    "reports": (reports, "bl"),
    "parent of a link": (parent_of_link, "bl"),
    "once": (once, "blo"),
    "source": (source, "bl"),
    "empty element": (empty_element, "b"),
    "odd names": (odd_names, "blo"),
    "shared": (shared, "bl"),
}
