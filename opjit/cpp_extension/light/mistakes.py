"""Which of a compiler's errors no other header can mend, so that a program is not compiled again with torch/extension.h, which only brings
more declarations and macros. So the first error stays if it is in the author's own text, no word of that text is a macro there alone, and
it is a name that torch/extension.h declares in no namespace, a header that no folder has, or one to which more declarations do not matter:
a missing semicolon, a class without such a member, a type that does not become another."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from opjit.cpp_extension.light import Prepared, headers, vocabulary
from opjit.cpp_extension.light.policy import macro

_ERROR = re.compile(
    r"^(?P<file>[^\s:()]+)(?::\d+:\d+|\(\d+\)): (?:fatal )?error(?: #[\w-]+)?: (?P<text>.*)$",
    re.MULTILINE,
)
_NO_FILE = re.compile(r"\S+: No such file or directory$|'\S+' file not found$")
_QUOTED = r"['\"](?:[\w:]*::)?(\w+)['\"]"
_UNDECLARED = re.compile(
    rf"{_QUOTED} (?:was not declared in this scope|(?:in namespace '[^']+' )?does not name a type|has not been declared|is not a type"
    rf"|is not a member of '[^'<]+')|(?:identifier|use of undeclared identifier|unknown type name) {_QUOTED}"
)
_SETTLED = re.compile(
    r"expected '[^']+'(?: or '[^']+')* (?:before|after|at end)|missing terminating|stray '|(?:redefinition|redeclaration) of '"
    r"|conflicting declaration '|'[^'<]*\b(?:class|struct|union) (?!py\b|pybind11|opjit)[\w:]+' has no member named '"
    r"|no matching function for call to 'at::Tensor::"
    r"|(?:cannot|could not) convert (?!.*(?:\bpy\b|pybind11|opjit|incomplete|for argument))|invalid conversion from '(?!.*for argument)"
)
_OLD = re.compile(
    r".*at::DeprecatedTypeProperties\W+to\W+[\w:]+::ScalarType\b"
)  # x.type() in AT_DISPATCH, whose macro the compiler blames
_DEFINED = re.compile(r"^[ \t]*#[ \t]*(?:define|undef)[ \t]+(\w+)", re.MULTILINE)


def is_final(output: str, prepared: Prepared, work: Path, cuda: tuple[str, ...] = ()) -> bool:
    """Return whether the first error in a compiler's output is surely there with torch/extension.h, too. `work`: where the compiler ran.
    `cuda`: folders of CUDA's headers, if the text was split for NVRTC, which may also lack what the other part declares."""
    error, code, torchs = _ERROR.search(output), prepared.program.code, [str(headers.INCLUDE)]
    old = error is not None and _OLD.match(error["text"])
    if error is None or not (
        old
        or os.path.join(work, error["file"]) in prepared.files
        or (cuda and error["file"] in map(os.path.basename, prepared.files))
    ):
        return False
    if _NO_FILE.match(error["text"]):
        return True
    undeclared = _UNDECLARED.match(error["text"])
    name = undeclared and (undeclared[1] or undeclared[2])
    if name is None and not old and (cuda or not _SETTLED.match(error["text"])):
        return False
    if (
        cuda
        and name
        and (len(re.findall(rf"\b{name}\b", code)) != 1 or _occurs(name, [*torchs, *cuda]))
    ):
        return False
    flags = tuple(
        flag for flag in prepared.program.flags if _occurs(macro(flag), torchs)
    )  # such as setuptools' -DNDEBUG
    if name in vocabulary.of_torch(prepared.base, prepared.cxx, flags)[1]:
        return False
    changed = {*_DEFINED.findall(code.rpartition("#include")[0])}  # before torch's headers are read
    if not old and any(_occurs(word, torchs) for word in changed):
        return False
    words = (
        {*headers.WORD.findall(code)} - changed - {"PYBIND11_MODULE"}
    )  # which is ours, and means the same
    return not vocabulary.different(words, prepared.folders, prepared.base, prepared.cxx, flags)


def _occurs(word: str, folders: Iterable[str]) -> bool:
    """Whether any header has a word."""
    pattern = re.compile(rb"\b%s\b" % word.encode())
    files = (path for folder in folders for path in Path(folder).rglob("*") if path.is_file())
    return any(pattern.search(path.read_bytes()) for path in files)
