"""Object files of extensions with several sources: a build takes those that it knows from the cache, and compiles the others.

    <root>/v1/objects/<key>    one file per object; see compiler_launcher.py, which writes it

The key covers the source and the headers that a scan finds, by path and content; the compilers' commands; the environment that they read;
and the versions in the extension's key, which stand for the headers of torch, Python and the system. The file lists the headers that only
the compiler found, and they must be unchanged, as for an entry. Keys hold absolute paths: an object stays on its machine.

The only source of an extension is always compiled: what changes is almost always that.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from opjit import files, progress
from opjit.builder import torch_builder
from opjit.cpp_extension import compiler_launcher
from opjit.cpp_extension.identity import Extension
from opjit.errors import EntryError
from opjit.recipe import headers, nvcc_flags
from opjit.recipe.recipe import document_key
from opjit.store import store as stores
from opjit.store.entry import MAX_BYTES
from opjit.store.store import Store

_FORMAT = 1  # of compiler_launcher.py's files
_PLAN = "objects.json"
_KNOWN = "rule known\n  command = mv $out.kept $out && mv $out.kept.d $out.d\n  depfile = $out.d\n  deps = gcc\n"
_EDGE = re.compile(r"^build (?P<out>\S+): (?P<rule>compile|cuda_compile) (?P<source>.+)$", re.MULTILINE)
# Flags that make compilers read more than the scan and their own list of headers show, and text that the shell evaluates anew each time.
_MORE = (r"@|-B|-Wp,|-specs|-isysroot|-iprefix|-iwithprefix|-imultilib|-f(?:auto-)?profile|-fbranch-prob|-fmodule|-ftest-coverage"
         r"|-save-temps")
_UNSEEN = re.compile(rf"""(?<![^\s'"])(?:{_MORE}|-X|--)|[`$;&|]""")
_UNSEEN_BY_NVCC = re.compile(rf"""(?<![^\s'"=,])(?:{_MORE}|{nvcc_flags.UNSEEN})|[`$;&|]""")
_ENVIRONMENT = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "CPATH", "CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH",
                "GCC_EXEC_PREFIX", "COMPILER_PATH", "SOURCE_DATE_EPOCH")


class _Rule(NamedTuple):
    """A rule of torch's build file. The rest of this module is tailored to it; another version of torch may have another one, and then
    nothing is kept.

    Attributes:
        command: its line.
        text: the whole rule, with {} for the command.
        variables: those of the build file that the command names; the first is the compiler.
        unseen: flags that it may not have.
    """

    command: str
    text: str
    variables: tuple[str, str, str]
    unseen: re.Pattern[str]

    def lines(self, text: str) -> list[str]:
        """Return the lines of a build file that set the rule's variables."""
        return re.findall(rf"^(?:{'|'.join(self.variables)}) = .*$", text, re.MULTILINE)


_RULES = {
    "compile": _Rule("$cxx -MMD -MF $out.d $cflags -c $in -o $out $post_cflags",
                     "rule compile\n  command = {}\n  depfile = $out.d\n  deps = gcc\n", ("cxx", "cflags", "post_cflags"), _UNSEEN),
    "cuda_compile": _Rule("$nvcc -MD -MF $out.d $cuda_cflags -c $in -o $out $cuda_post_cflags",
                          "rule cuda_compile\n  depfile = $out.d\n  deps = gcc\n  command = {}\n",
                          ("nvcc", "cuda_cflags", "cuda_post_cflags"), _UNSEEN_BY_NVCC),
}


@contextmanager
def reused(extension: Extension, compilers: Mapping[str, str], trusted: tuple[str, ...], work: Path, store: Store | None,
           started: int) -> Iterator[None]:
    """During the block, in which ninja runs, `work`/build.ninja takes known objects from the store and keeps the others there.

    Args:
        compilers: paths, by the rules that name them.
        trusted: prefixes of headers that a version in the extension's key covers.
        store: None if it cannot be used.
        started: time.time_ns() before a file was read for this build; an object from a file that is newer is not kept.
    """
    place = work / "build.ninja"
    written = place.read_bytes()
    text = written.decode("utf-8", "surrogateescape")
    folder = None if store is None or len(extension.sources) < 2 else _folder(store)
    rules = [name for name in compilers if _is_understood(name, text)]
    if folder is None or not rules:
        yield
        return
    planned = {out: each for name in rules for out, each in _plan(extension, name, compilers[name], text).items()}
    known = {out for out, each in planned.items() if _take(folder / each["key"], work / out)}
    progress.log(f"{len(known)} of {len(planned)} objects of {extension.name} are in the cache")
    new = {out: each for out, each in planned.items() if out not in known}
    plan = {"folder": str(folder), "started": started, "trusted": trusted, "objects": new}
    (work / _PLAN).write_text(json.dumps(plan), encoding="ascii")
    for rule in map(_RULES.__getitem__, rules):
        launched = f"{' '.join(map(torch_builder.quote, _launcher()))} {rule.command}"
        text = text.replace(rule.text.format(rule.command), rule.text.format(launched))
    text = text.replace("rule compile\n", f"{_KNOWN}\nrule compile\n", 1)
    text = _EDGE.sub(lambda edge: f"build {edge['out']}: {'known' if edge['out'] in known else edge['rule']} {edge['source']}", text)
    place.write_bytes(text.encode("utf-8", "surrogateescape"))
    try:
        yield
    finally:
        place.write_bytes(written)  # people read torch's commands


def as_torch(output: str) -> str:
    """Return ninja's output with torch's commands in it."""
    return output.replace(f"{shlex.join(_launcher())} ", "")


def _launcher() -> list[str]:
    return [sys.executable, "-IS", compiler_launcher.__file__, _PLAN]


def _folder(store: Store) -> Path | None:
    """Return the folder of objects; None if others could have written there, or it cannot be made."""
    folder = store.base / stores.OBJECTS
    try:
        files.make_private(folder)
    except OSError:
        return None
    problem = store.problem(folder)
    if problem is not None:
        progress.log(f"object files are not kept: {problem}")
    return None if problem else folder


def _is_understood(name: str, text: str) -> bool:
    """Whether a rule of a build file is torch's usual one, whose result depends on nothing unseen, and Python can run the launcher."""
    rule, own = _RULES[name], f"-ccbin {os.environ.get('CC')} "  # torch names $CC so, and the extension's key has it
    lines = [line.replace(own, "") for line in rule.lines(text)]
    named = os.path.basename(sys.executable or "").startswith("python")  # else it is a program that has Python in it
    can_run = named and "PYTHONHOME" not in os.environ and os.path.isfile(compiler_launcher.__file__)  # -I takes no notice of PYTHONHOME
    return can_run and rule.text.format(rule.command) in text and not any(rule.unseen.search(line) for line in lines)


def _plan(extension: Extension, name: str, compiler: str, text: str) -> dict[str, dict[str, Any]]:
    """Return the key and the inputs of each object of a rule that can be kept, by its file name."""
    rule, status = _RULES[name], os.stat(compiler)
    document, variables, scan = extension.document(), rule.lines(text), headers.Scan()
    flags = [line for line in variables if not line.startswith(f"{rule.variables[0]} = ")]
    named = {path for line in flags for path in re.split(r"[\s=,@'\"]+", line) if os.path.isabs(path) and os.path.isfile(path)}
    common = {
        "format": _FORMAT,
        **{field: document[field] for field in ("torch", "python", "toolchain")},
        "native": extension.flags.get("native"),
        "compiler": [os.path.realpath(compiler), status.st_size, status.st_mtime_ns],
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
        "commands": [rule.command, *variables],
        "named": {path: files.digest(path) for path in sorted(named)},
    }
    planned = {}
    for edge in _EDGE.finditer(text):
        source = edge["source"].replace("$ ", " ")
        if edge["rule"] == name and source in extension.sources:
            inputs = headers.closure([source, *extension.roots[len(extension.sources):]], extension.include, scan)
            key = document_key({**common, "object": edge["out"], "source": source, "inputs": inputs})
            planned[edge["out"]] = {"key": key, "inputs": inputs}
    return planned


def _take(file: Path, place: Path) -> bool:
    """Put a kept object, and its compiler's list of headers, where the build file's rule `known` takes them; say whether that is right."""
    try:
        found, listed, content = compiler_launcher.unpack(files.read(file, MAX_BYTES))
        if any(files.digest(path) != digest for path, digest in found.items()):
            return False
        Path(f"{place}.kept").write_bytes(content)
        Path(f"{place}.kept.d").write_bytes(listed)
        os.utime(file)  # pruning removes the objects that are least recently used
    except (OSError, EntryError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return True
