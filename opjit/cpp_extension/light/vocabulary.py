"""The names that torch/extension.h declares: an error about any other name is the author's."""

import os
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch

from opjit.builder import parts
from opjit.cpp_extension.identity import own_folders, trusted_folders
from opjit.recipe.compilers import Compiler

_WANTED = "-std=c++20 -w -fPIC -E -P -x c++ -include torch/extension.h"
_DIRECTIVE = re.compile("^#.*$", re.MULTILINE)
# Literals may hold brackets.
_TOKEN = r'"(?:\\.|[^"\\\n])*"|\b\d(?:\'?[\w.])*|\'(?:\\.|[^\'\\\n])+\'|[{}();]'
# C10::attr has short words, which nobody uses without attr.
_OPEN = r"\bnamespace\b(?!\s+attr\b)|\benum\b(?!\s+(?:class|struct)\b)|\bextern\s*$"
_NO_NAMES = re.compile(
    r"\boperator\b\s*(?:\w+|\W{1,3})|\)(?:\s|noexcept)*:(?!:).*|->|[<>]=|<<", re.DOTALL
)
_ARGUMENTS = r"<[^<>]*>"
_NAME = r"(?<!::)(?<!:: )\b[A-Za-z_]\w*"


def of_torch(base: Path, cxx: Compiler, flags: Sequence[str] = ()) -> frozenset[str]:
    """Return the names that torch/extension.h declares in namespaces, and a few more.

    `base` is the store's directory, which keeps them. `flags` are the -D and -U flags that torch's headers test. Raises BuildError if the
    compiler fails, and OSError.
    """

    def compute(folder: Path) -> list[str]:
        places = [f"-I{place}" for place in own_folders()]
        wanted = [*_WANTED.split(), *flags, *places, os.devnull]
        text = parts.compile_part(cxx, wanted, folder)
        return sorted(declared(_DIRECTIVE.sub("", text)))

    content = ["declared names", *versions(cxx), *flags]
    return frozenset(parts.kept_json(base, content, trusted_folders(), compute))


def versions(cxx: Compiler) -> list[str]:
    """Return the versions that the compiler's view of torch's headers depends on."""
    return [
        str(torch.__version__),
        str(torch.version.git_version),
        sysconfig.get_config_var("SOABI"),
        cxx.version,
        cxx.machine,
        cxx.programs,
    ]


def declared(text: str) -> set[str]:
    """Return the names that a preprocessed text declares in namespaces, outside functions and classes. A few more do no harm."""
    found = set[str]()
    scopes = []
    statement = ""
    hidden = False
    start = 0
    for token in re.finditer(_TOKEN, text):
        statement += f" {text[start : token.start()]}"
        start = token.end()
        if token[0] == "(":
            scopes.append((statement, hidden))
            statement = ""
            hidden = True
        elif token[0] == ")":
            before, hidden = scopes.pop()
            # A pointer to a function.
            statement = before + (statement if re.match(r"\s*[*&]", statement) else ")")
        elif token[0] in "{};":
            if not hidden or "friend" in statement:
                found |= _names(statement)
            if token[0] == "{":
                scopes.append((statement, hidden))
                hidden = hidden or not re.search(_OPEN, statement)
            elif token[0] == "}":
                hidden = scopes.pop()[1]
            statement = ""
    return found


def _names(statement: str) -> set[str]:
    text = _NO_NAMES.sub(" ", statement)
    before = ""
    while text != before:
        before = text
        text = re.sub(_ARGUMENTS, " ", text)
    if "using" in text:
        text = text.partition("=")[0].replace("::", " ")
    return set(re.findall(_NAME, text))
