"""Known cases of headers: generated ones, other folders, headers that appear."""

from collections.abc import Iterator, Mapping

from tests.stale.case import Dated, Link
from tests.stale.row import ONE, TWO, Row, X, given, row

STRING = "#define S(x) #x\n#define SS(x) S(x)\n#include SS(CFG)\n"
BOTH = given(v1__x_h=ONE, v2__x_h=TWO)
LATER = given(v1__y_h="", v2__x_h=ONE)
V1 = ("{here}/v1",)
V2 = ("{here}/v2",)
# The second time that it is read, X is 2.
TWICE = "#pragma once\n#ifdef X\n#undef X\n#define X 2\n#else\n#define X 1\n#endif\n"

# Lines that include x.h, and the flags that they need.
INCLUDES = {
    "string": (STRING, ("-DCFG=x.h",)),
    "macro": ("#define HDR(n) <n.h>\n#include HDR(x)\n", ()),
    "import": ('#import "x.h"\n', ()),
    "comment": ('#include/**/"x.h"\n', ()),
    "comment before": ('#/**/include "x.h"\n', ()),
    "digraph": ('%:include "x.h"\n', ()),
    "form feed": ('#include\f"x.h"\n', ()),
    "continued": ('#incl\\\nude "x.h"\n', ()),
    "trigraph": ('??=include "x.h"\n', ("-trigraphs",)),
    "plain": ('#include "x.h"\n', ()),
    "angle": ("#include <x.h>\n", ()),
    "defined": ('#define H "x.h"\n#include H\n', ()),
    "flag": ("#include H\n", ("-DH=<x.h>",)),
}
# Conditions that ask for cfg.h, with the lines before and the flags that they need.
CONDITIONS = {
    "argument": ("#define HAVE(x) __has_include(x)\n", 'HAVE("cfg.h")', ()),
    "defined": ('#define H "cfg.h"\n', "__has_include(H)", ()),
    "flag": ("", "__has_include(H)", ('-DH="cfg.h"',)),
    "comment": ("", '__has_include(/**/"cfg.h")', ()),
    "continued": ("", '__has_include(\\\n"cfg.h")', ()),
    "by flag": ("", "HAVE", ('-DHAVE=__has_include("cfg.h")',)),
    "plain": ("", '__has_include("cfg.h")', ()),
    "both": ("", 'defined __has_include && __has_include("cfg.h")', ()),
}
# Flags and include folders whose order is not the order of the search: a/x.h is found until b/x.h is there.
ORDERS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "system before": (("-isystem", "{here}/a", "-I{here}/b"), ()),
    "after before": (("-idirafter", "{here}/a", "-I{here}/b"), ()),
    "long": (("--include-directory={here}/b", "--include-directory={here}/a"), ()),
    "long apart": (("--include-directory", "{here}/b", "--include-directory", "{here}/a"), ()),
    "prefix": (("-iprefix", "{here}/", "-iwithprefixbefore", "b", "-iwithprefix", "a"), ()),
    "also system": (("-isystem", "{here}/c", "-I{here}/b", "-I{here}/a"), ("{here}/c",)),
    "dropped": (("-isystem", "{here}/a"), ("{here}/a", "{here}/b")),
    "plain": (("-I{here}/b", "-I{here}/a"), ()),
    "apart": (("-I", "{here}/b", "-I", "{here}/a"), ()),
    "quote": (("-iquote", "{here}/b"), ("{here}/a",)),
}


def _if(condition: str) -> str:
    """A program whose value is 2 if a condition of the preprocessor holds, else 1."""
    return f"#if {condition}\n#define X 2\n#else\n#define X 1\n#endif\n{X}"


def _generated() -> Iterator[Row]:
    edit = {"generated": {"x.h": TWO}}
    for name in ("string", "plain", "comment", "defined"):
        text, cflags = INCLUDES[name]
        start = {"generated": {"x.h": ONE}, "cflags": cflags}
        yield row(1, f"generated, {name}", "b", text + X, edit, **start)
    yield row(1, "generated shadows", "b", "#include <x.h>\n" + X, edit, files=BOTH, include=V1)


def _folders() -> Iterator[Row]:
    for name, (text, cflags) in INCLUDES.items():
        start = {"files": BOTH, "include": V1, "cflags": cflags}
        yield row(2, f"other folder, {name}", "blo", text + X, {"include": V2}, **start)


def _asked() -> Iterator[Row]:
    for name, (before, condition, cflags) in CONDITIONS.items():
        edit = {"files": given(cfg_h="")}
        yield row(3, f"appears, {name}", "blo", before + _if(condition), edit, cflags=cflags)
    for name, condition in (("plain", "__has_include(<c.h>)"), ("argument", "HAVE(<c.h>)")):
        text = "#define HAVE(x) __has_include(x)\n" + _if(condition)
        edit = {"files": given(v1__c_h="")}
        start = {"include": V1, "files": given(v1__y_h="")}
        yield row(3, f"appears in a folder, {name}", "blo", text, edit, **start)
        variable = {"environment": {"CPATH": "{here}/v1"}}
        yield row(3, f"variable, {name}", "bl", text, variable, files=given(v1__c_h=""))
    text = "#/**/include <x.h>\n" + X
    first, second = ({"environment": {"CPATH": f"{{here}}/v{n}"}} for n in (1, 2))
    yield row(3, "other folder in a variable", "bl", text, second, files=BOTH, **first)


def _appearances() -> Iterator[Row]:
    for name, (text, cflags) in INCLUDES.items():
        start = {"files": LATER, "include": (*V1, *V2), "cflags": cflags}
        edit = {"files": given(v1__x_h=TWO)}
        yield row(4, f"appears earlier, {name}", "blo", text + X, edit, **start)
    three = {
        "files": given(a__x_h="#include_next <x.h>\n", b__y_h="", c__x_h=ONE),
        "include": ("{here}/a", "{here}/b", "{here}/c"),
    }
    edit = {"files": given(b__x_h=TWO)}
    yield row(4, "include_next", "blo", "#include <x.h>\n" + X, edit, **three)
    for name, (flags, include) in ORDERS.items():
        text = ('#include "x.h"\n' if name == "quote" else "#include <x.h>\n") + X
        start = {"files": given(a__x_h=ONE, b__y_h="", c__y_h=""), "include": include}
        yield row(4, f"order, {name}", "bl", text, edit, cflags=flags, **start)


def _forced() -> Iterator[Row]:
    ways = {"long": ("--include={here}/f.h",), "plain": ("-include", "{here}/f.h")}
    for name, flags in {**ways, "macros": ("-imacros", "{here}/f.h")}.items():
        edit = {"files": given(f_h=TWO)}
        yield row(4, f"forced, {name}", "bl", X, edit, files=given(f_h=ONE), cflags=flags)
    found = {
        "files": given(v1__y_h="", v2__f_h=ONE),
        "include": (*V1, *V2),
        "cflags": ("-include", "f.h"),
    }
    yield row(4, "forced, in a folder", "bl", X, {"files": given(v2__f_h=TWO)}, **found)
    yield row(4, "forced, appears earlier", "bl", X, {"files": given(v1__f_h=TWO)}, **found)


def _once() -> Iterator[Row]:
    """Headers that #pragma once makes the preprocessor skip, because they equal another one in text and date."""
    text = '#include "a.h"\n#include "b.h"\n' + X
    by_macro = '#define B "b.h"\n#include "a.h"\n#include B\n' + X
    copy = {"files": given(a_h=Dated(TWICE, 10_000), b_h=Dated(TWICE, 10_000))}
    later = {"files": given(a_h=Dated(TWICE, 10_000), b_h=Dated(TWICE, 20_000))}
    linked = {"files": given(a_h=Dated(TWICE, 10_000), b_h=Link("{here}/a.h"))}
    changed = {"files": given(b_h=Dated(f"{TWICE}\n", 10_000))}
    yield row(3, "once, a copy changes", "blo", text, changed, **copy)
    yield row(3, "once, a copy by a macro changes", "blo", by_macro, changed, **copy)
    yield row(
        3,
        "once, a copy by a comment changes",
        "bl",
        text.replace("include", "/**/include"),
        changed,
        **copy,
    )
    yield row(3, "once, a copy's date changes", "blo", text, {"files": later["files"]}, **copy)
    yield row(3, "once, dates become equal", "blo", text, {"files": copy["files"]}, **later)
    yield row(3, "once, a link becomes a copy", "blo", text, {"files": later["files"]}, **linked)


def rows() -> Iterator[Row]:
    yield from _once()
    yield from _generated()
    yield from _folders()
    yield from _asked()
    yield from _appearances()
    yield from _forced()
