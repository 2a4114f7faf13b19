"""Draws inputs of the linker: archives, scripts, symbols and bytes."""

from collections.abc import Mapping

from tests.stale.case import Link, Made
from tests.stale.draft import Draft

HIDDEN = '__attribute__((visibility("hidden")))'
FORMS: Mapping[str, tuple[str, ...]] = {
    "-l": ("-L{here}/l1", "-L{here}/l2", "-lf"),
    "relative": ("-Ll1", "-Ll2", "-lf"),
    "-L apart": ("-L", "{here}/l1", "-L", "{here}/l2", "-lf"),
    "-l apart": ("-L{here}/l1", "-L{here}/l2", "-l", "f"),
    "-Wl,-L": ("-Wl,-L{here}/l1", "-Wl,-L,{here}/l2", "-lf"),
    "-Wl,-l": ("-L{here}/l1", "-L{here}/l2", "-Wl,-lf"),
    "library=": ("-L{here}/l1", "-L{here}/l2", "-Wl,--library=f"),
    "library-path=": ("-Wl,--library-path={here}/l1", "-Wl,--library-path={here}/l2", "-lf"),
    "directory=": ("--library-directory={here}/l1", "--library-directory={here}/l2", "-lf"),
    "colon": ("-L{here}/l1", "-L{here}/l2", "-l:libf.a"),
    "namespec": ("-L{here}/l1", "-L{here}/l2", "-Wl,--library=:libf.a"),
    "whole": ("-L{here}/l1", "-L{here}/l2", "-Wl,--whole-archive,-lf,--no-whole-archive"),
    "static": ("-L{here}/l1", "-L{here}/l2", "-Wl,-Bstatic", "-lf", "-Wl,-Bdynamic"),
    "group": ("-L{here}/l1", "-L{here}/l2", "-Wl,--start-group", "-lf", "-Wl,--end-group"),
    "-Xlinker": ("-L{here}/l1", "-L{here}/l2", "-Xlinker", "-lf"),
    "file": ("l2/libf.a",),
    "./file": ("./l2/libf.a",),
    "absolute": ("{here}/l2/libf.a",),
    "-Wl,file": ("-Wl,{here}/l2/libf.a",),
    "word": ("libf.a",),
    "@": ("@{here}/link",),
    "-Wl,@": ("-Wl,@{here}/link",),
    "@@": ("-Wl,@{here}/outer",),
    "script": ("-L{here}/l1", "-L{here}/l2", "-lscript"),
    "script file": ("{here}/script.ld",),
    "-T": ("-Wl,-T,{here}/text.ld",),
    "variable": ("-lf",),
}


def _forms(kind: str) -> list[str]:
    """The forms that a kind of program can have: `load` compiles in another folder, and ops refuse most."""
    if kind == "op":
        return ["file", "relative", "absolute"]
    if kind.startswith("load"):
        return [name for name, flags in FORMS.items() if "{here}" in flags[0] or name == "variable"]
    return [*FORMS]


def linker(draft: Draft) -> None:
    """A function in an archive or an object that the linker finds."""
    first = draft.number()
    text = "int ext(void) {{ return {}; }}\n"
    form = draft.rng.choice(_forms(draft.kind))
    how = draft.rng.choice(["archive", "archive", "thin"])
    place = "libf.a" if form == "word" else "l2/libf.a"
    draft.files[place] = Made(how, text.format(first))
    draft.files |= {"l1/y": "", "l2/y": ""}
    draft.ldflags += FORMS[form]
    draft.lines.append("extern int ext(void);")
    draft.terms.append("ext()")
    if form in ("@", "-Wl,@", "@@"):
        draft.files |= {"link": "{here}/l2/libf.a\n", "outer": "@{here}/link\n"}
        draft.files["l3/libf.a"] = Made("archive", text.format(draft.number()))
        draft.writes("a list of the linker changes", "link", "{here}/l3/libf.a\n")
    if form == "script":
        draft.files["l2/libscript.so"] = draft.rng.choice(
            ["INPUT({here}/l2/libf.a)\n", "GROUP(-lf)\n", "INPUT(libf.a)\n"]
        )
        draft.files["l3/libf.a"] = Made("archive", text.format(draft.number()))
        draft.writes(
            "a script of the linker changes", "l2/libscript.so", "INPUT({here}/l3/libf.a)\n"
        )
        draft.writes(
            "a script of the linker appears earlier", "l1/libscript.a", "INPUT({here}/l3/libf.a)\n"
        )
    if form == "script file":
        draft.files["script.ld"] = "INPUT({here}/l2/libf.a)\n"
    if form == "-T":
        draft.ldflags.append("{here}/l2/libf.a")
        draft.files["text.ld"] = f"SECTIONS {{ placed = {first}; }} INSERT AFTER .text;\n"
        draft.writes(
            "a script of the linker changes",
            "text.ld",
            f"SECTIONS {{ placed = {draft.other(first)}; }} INSERT AFTER .text;\n",
        )
        draft.lines.append(f"extern char placed[] {HIDDEN};")
        draft.terms.append("(int)(((unsigned long)placed & 0xfff))")
    if form == "variable":
        draft.environment["LIBRARY_PATH"] = "{here}/l1:{here}/l2"
        draft.files["l3/libf.a"] = Made("archive", text.format(draft.number()))
        draft.variable("LIBRARY_PATH changes", "LIBRARY_PATH", "{here}/l3")
    draft.writes("an archive changes", place, Made(how, text.format(draft.other(first))))
    draft.writes(
        "an archive appears earlier", "l1/libf.a", Made("archive", text.format(draft.number()))
    )
    draft.writes(
        "a shared library appears earlier",
        "l1/libf.so",
        Made("shared", text.format(draft.number())),
    )
    draft.writes(
        "a shared library appears beside an archive",
        "l2/libf.so",
        Made("shared", text.format(draft.number())),
    )
    draft.files["kept/libf.a"] = Made("archive", text.format(draft.number()))
    draft.writes("an archive becomes a link", place, Link("{here}/kept/libf.a"))
    if how == "thin":
        member = place.replace(".a", ".member.o")
        draft.files[member] = Made("object", text.format(first))
        draft.writes(
            "a member of a thin archive changes",
            member,
            Made("object", text.format(draft.number())),
        )

    def swap(after: Draft) -> None:
        flags = [
            word.replace("l1", "l*").replace("l2", "l1").replace("l*", "l2")
            for word in after.ldflags
        ]
        after.ldflags = flags

    draft.edit("directories of the linker change places", swap)


def exports(draft: Draft) -> None:
    """A file that says which functions are exported."""
    draft.lines.append("int extra(void) { return 1; }")
    maps = ["{ global: value; local: extra; };\n", "{ global: value; extra; };\n"]
    draft.rng.shuffle(maps)
    flag = draft.choose(
        [
            "-Wl,--version-script=m.map",
            "-Wl,--version-script,m.map",
            "-Wl,--version-script={here}/m.map",
            "-Wl,-version-script={here}/m.map",
            "-Xlinker --version-script={here}/m.map",
            "-Wl,@{here}/m.list",
            "{here}/m.ld",
        ]
    )
    draft.ldflags += flag.split()
    draft.files |= {
        "m.map": maps[0],
        "m.list": "--version-script={here}/m.map\n",
        "m.ld": f"VERSION {{ {maps[0]} }}",
    }
    name = "m.ld" if flag.endswith("m.ld") else "m.map"
    draft.writes(
        "a version script changes", name, f"VERSION {{ {maps[1]} }}" if name == "m.ld" else maps[1]
    )


def binary(draft: Draft) -> None:
    """Bytes that the linker takes from a file."""
    first = draft.number()
    draft.files["raw.dat"] = f"{first}"
    draft.ldflags.append(
        draft.choose(
            [
                "-Wl,-b,binary,raw.dat,-b,default",
                "-Wl,--format=binary,raw.dat,--format=default",
                "-Wl,--format,binary,raw.dat,--format,default",
            ]
        )
    )
    draft.lines.append(f"extern const char _binary_raw_dat_start[] {HIDDEN};")
    draft.terms.append("(100 * _binary_raw_dat_start[0] + _binary_raw_dat_start[1])")
    draft.writes("a binary file of the linker changes", "raw.dat", f"{draft.other(first)}")


def symbol(draft: Draft) -> None:
    """A symbol that a flag of the linker defines, by itself or from a file of symbols."""
    first = draft.number()
    draft.lines.append("extern char defined[] __attribute__((weak));")
    draft.terms.append("(int)(unsigned long)defined")
    if draft.chance(0.5):
        draft.files["symbols.ld"] = f"defined = {first};\n"
        draft.ldflags.append(
            draft.choose(
                [
                    "{here}/symbols.ld",
                    "./symbols.ld",
                    "symbols.ld",
                    "-Wl,--just-symbols=symbols.ld",
                    "-Wl,-R,symbols.ld",
                    "-Wl,--just-symbols={here}/symbols.ld",
                ]
            )
        )
        draft.writes(
            "a file of symbols changes", "symbols.ld", f"defined = {draft.other(first)};\n"
        )
    else:
        draft.ldflags.append(f"-Wl,--defsym=defined={first}")
        second = draft.other(first)

        def change(after: Draft) -> None:
            after.ldflags = [
                word.replace(f"defined={first}", f"defined={second}") for word in after.ldflags
            ]

        draft.edit("a symbol of the linker changes", change)


def shared(draft: Draft) -> None:
    """A shared library, whose name at run time is in the file that the linker finds."""
    text = "int ext2(void) {{ return {}; }}\n"
    for version in (1, 2):
        made = Made(f"shared libg.so.{version}", text.format(draft.number()))
        draft.files[f"so/libg.so.{version}"] = made
    draft.files["so/libg.so"] = Link("libg.so.1")
    draft.ldflags += ["-L{here}/so", "-lg", "-Wl,-rpath,{here}/so"]
    draft.lines.append("extern int ext2(void);")
    draft.terms.append("ext2()")
    draft.writes("a shared library has another version", "so/libg.so", Link("libg.so.2"))
    made = Made("shared libg.so.2", text.format(draft.number()))
    draft.writes("a shared library has another version", "so/libg.so.1", made)
