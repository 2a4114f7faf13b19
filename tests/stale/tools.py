"""Draws scripts in the place of tools, and flags that choose tools."""

from dataclasses import dataclass

from tests.stale.case import Program
from tests.stale.draft import Draft
from tests.stale.links import HIDDEN


@dataclass(frozen=True)
class Tool:
    """A tool that a script takes the place of.

    Attributes:
        lines, term: of a program that has the number which the script adds, or 0.
        command: what the script runs; `{number}` and `{compiler}` are filled in.
        ways: how the script is found.
    """

    lines: tuple[str, ...]
    term: str
    command: str
    ways: tuple[str, ...]


FOUND = ("PATH", "COMPILER_PATH", "-B", "--prefix")
BYTE = (
    '__asm__(".section .rodata\\n.globl tooled\\ntooled:\\n.ifdef TOOL\\n.byte TOOL\\n.else\\n.byte 0\\n.endif\\n.text");',
    f"extern const unsigned char tooled[] {HIDDEN};",
)
MACRO = ("#ifndef TOOL", "#define TOOL 0", "#endif")
TOOLS = {
    "cc": Tool(MACRO, "TOOL", 'exec {compiler} -DTOOL={number} "$@"', ("CC",)),
    "launcher": Tool(MACRO, "TOOL", 'exec "$@" -DTOOL={number}', ("launcher",)),
    "wrapper": Tool(
        MACRO,
        "TOOL",
        'case "$1" in *cc1*) exec "$@" -DTOOL={number};; *) exec "$@";; esac',
        ("-wrapper",),
    ),
    "as": Tool(BYTE, "tooled[0]", 'exec /usr/bin/as --defsym TOOL={number} "$@"', FOUND),
    "ld": Tool(
        ("extern char tool[] __attribute__((weak));",),
        "(int)(unsigned long)tool",
        'exec /usr/bin/ld --defsym=tool={number} "$@"',
        FOUND,
    ),
}


def _chooses(draft: Draft, way: str, path: str) -> bool:
    """Let the request use the script at a path. Returns whether it can do without: the script is found in a folder if it is there."""
    if way == "CC":
        draft.environment |= {"CC": path, "CXX": path}
    elif way == "launcher":
        draft.launcher.append(path)
    elif way == "-wrapper":
        draft.cflags += ["-wrapper", path]
    elif way in ("-B", "--prefix"):
        flag = {"-B": "-B{here}/bin/", "--prefix": "--prefix={here}/bin/"}[way]
        draft.cflags.append(flag)
        draft.ldflags.append(flag)
        return True
    else:
        draft.environment[way] = "{here}/bin:{PATH}" if way == "PATH" else "{here}/bin/"
        draft.variable(f"{way} changes", way, "{PATH}" if way == "PATH" else None)
        return True
    return False


def tools(draft: Draft) -> None:
    """A script in the place of the compiler, the assembler or the linker."""
    first = draft.number()
    second = draft.other(first)
    name = draft.rng.choice(sorted(TOOLS))
    tool = TOOLS[name]
    way = draft.rng.choice(tool.ways)
    compiler = "/usr/bin/g++" if draft.kind.startswith("load") else "/usr/bin/gcc"
    text = "#!/bin/sh\n" + tool.command.replace("{compiler}", compiler) + "\n"
    path = f"bin/{name}"
    draft.lines += tool.lines
    draft.terms.append(tool.term)
    draft.files |= {"number": f"{first}", "bin/y": ""}
    reads = draft.chance(0.3)
    number = "$(cat {here}/number)" if reads else str(first)
    script = Program(text.replace("{number}", number))
    optional = _chooses(draft, way, "{here}/" + path)
    if optional and draft.chance(0.3):
        draft.writes(f"{name} appears by {way}", path, script)
        return
    draft.files[path] = script
    draft.writes(f"{name} changes by {way}", path, Program(text.replace("{number}", str(second))))
    if optional:
        draft.writes(f"{name} goes by {way}", path, None)
    if reads:
        draft.writes(f"a file that {name} reads by {way} changes", "number", f"{second}")


def specs(draft: Draft) -> None:
    """A file of specs, or another linker."""
    if draft.chance(0.3):
        draft.ldflags.append("-fuse-ld=bfd")

        def change(after: Draft) -> None:
            after.ldflags = [word.replace("bfd", "gold") for word in after.ldflags]

        draft.edit("another linker by a flag", change)
        return
    first = draft.number()
    text = "*cpp:\n+ -DSPEC={}\n\n"
    draft.files["specs"] = text.format(first)
    flags = ["--specs={here}/specs", "-specs={here}/specs", "-specs=./specs"]
    draft.cflags.append(draft.choose(flags))
    draft.terms.append("SPEC")
    draft.writes("a file of specs changes", "specs", text.format(draft.other(first)))
