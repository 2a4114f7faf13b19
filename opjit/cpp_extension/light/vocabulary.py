"""The macros and names that torch/extension.h brings: what light headers, which bring fewer, are compared with."""

from __future__ import annotations

import json
import re
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from opjit.builder import runtime_objects
from opjit.cpp_extension.light import headers
from opjit.recipe.toolchain import Compiler

_FILE = "vocabulary.json"
_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*"|\b\d(?:\'?[\w.])*|\'(?:\\.|[^\'\\\n])+\'|[{}();]'
)  # literals may hold brackets
_LINE = re.compile(r"^#[ \t]*(define|undef) (\w+)(.*)$", re.MULTILINE)
_OPEN = re.compile(
    r"\bnamespace\b(?!\s+attr\b)|\benum\b|\bextern\s*$"
)  # c10::attr has short words, which nobody names without attr
_NO_NAMES = re.compile(
    r'operator\s*(?:""\s*\w+|\W{1,3})|\)(?:\s|noexcept)*:(?!:).*|->|[<>]=|<<', re.DOTALL
)
_ARGUMENTS = re.compile(r"<[^<>]*>")
_NAME = re.compile(r"(?<!::)(?<!:: )\b[A-Za-z_]\w*")


def of_torch(
    base: Path, cxx: Compiler, flags: Sequence[str] = ()
) -> tuple[Mapping[str, str], frozenset[str]]:
    """Return the macros of torch/extension.h with their texts, and all names that it declares in namespaces, with a few more. `base` keeps
    it; `flags`: those of -D and -U that torch's headers heed. Raises BuildError if the compiler fails, OSError."""

    def make(staged: Path) -> None:
        macros, rest = _preprocessed((), cxx, flags)
        (staged / _FILE).write_text(json.dumps([macros, sorted(declared(rest))]))

    content = ["vocabulary", *versions(cxx), *flags]
    macros, names = json.loads(
        (runtime_objects.kept(base, content, (_FILE,), make) / _FILE).read_text()
    )
    return macros, frozenset(names)


def versions(cxx: Compiler) -> list[str]:
    """What the compiler makes of torch's headers depends on."""
    return [
        str(torch.__version__),
        str(torch.version.git_version),
        sysconfig.get_config_var("SOABI"),
        cxx.version,
        cxx.machine,
    ]


def different(
    words: Iterable[str],
    folders: Sequence[str],
    base: Path,
    cxx: Compiler,
    flags: Sequence[str] = (),
) -> list[str]:
    """Return the words that torch/extension.h defines as another macro than light headers in `folders`. Raises as `of_torch` does."""
    (theirs, _), (light, _) = of_torch(base, cxx, flags), _preprocessed(folders, cxx, flags)
    return sorted(word for word in words if theirs.get(word) != light.get(word))


def _preprocessed(
    folders: Sequence[str], cxx: Compiler, flags: Sequence[str]
) -> tuple[dict[str, str], str]:
    """Return the macros of torch/extension.h and the text without them, with some folders searched first."""
    places = (
        *folders,
        headers.INCLUDE,
        headers.INCLUDE / headers.API,
        sysconfig.get_path("include"),
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program.cpp").write_text("#include <torch/extension.h>\n")
        runtime_objects.run(
            cxx,
            [
                "-std=c++20",
                "-w",
                "-fPIC",
                "-E",
                "-P",
                "-dD",
                *flags,
                *(f"-I{each}" for each in places),
                "program.cpp",
                "-o",
                "program.ii",
            ],
            Path(folder),
        )
        text = Path(folder, "program.ii").read_text("utf-8", "replace")
    macros: dict[str, str] = {}
    for kind, name, meaning in _LINE.findall(text):
        if kind == "define":
            macros[name] = meaning
        else:
            macros.pop(name, None)
    return macros, re.sub("^#.*$", "", text, flags=re.MULTILINE)


def declared(text: str) -> set[str]:
    """Return the names that a preprocessed text declares in namespaces, outside of functions and classes; a few more do no harm."""
    found, scopes = set[str](), list[tuple[str, bool]]()
    statement, hidden, start = "", False, 0
    for token in _TOKEN.finditer(text):
        statement += f" {text[start : token.start()]}"
        start = token.end()
        if token[0] == "(":
            scopes.append((statement, hidden))
            statement, hidden = "", True
        elif token[0] == ")":
            before, hidden = scopes.pop()
            statement = before + (
                statement if re.match(r"\s*[*&]", statement) else ")"
            )  # a pointer to a function
        elif token[0] in "{};":
            if not hidden or "friend" in statement:
                found |= _names(statement)
            if token[0] == "{":
                scopes.append((statement, hidden))
                hidden = hidden or not _OPEN.search(statement)
            elif token[0] == "}":
                hidden = scopes.pop()[1]
            statement = ""
    return found


def _names(statement: str) -> set[str]:
    if "using" in statement:
        return set(re.findall(r"\w+", statement))
    text, before = _NO_NAMES.sub(" ", statement), ""
    while text != before:
        before, text = text, _ARGUMENTS.sub(" ", text)
    return set(_NAME.findall(text))
