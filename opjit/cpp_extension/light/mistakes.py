"""Finds compiler errors that no header can fix, so that a program is not compiled again with torch/extension.h.

torch/extension.h only adds declarations, because the program's text has the same tokens with both (see `streams`). The first error
therefore stays if it is in the author's text and more declarations cannot fix it. Examples are a name that torch/extension.h does not
declare in any namespace, a missing header, a missing semicolon, an unknown member of a class, and a conversion between types that light
headers define.
"""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from opjit.cpp_extension.light import Prepared, headers, vocabulary

_ERROR = re.compile(
    r"^(?P<file>[^\s:()]+)(?::\d+:\d+|\(\d+\)): (?:fatal )?error(?: #[\w-]+)?: (?P<text>.*)$",
    re.MULTILINE,
)
_NO_FILE = r"\S+: No such file or directory$|'\S+' file not found$"
_QUOTED = r"['\"](?:[\w:]*::)?((?:\w|[^\x00-\x7f])+)['\"]"
_UNDECLARED = (
    rf"{_QUOTED} (?:was not declared in this scope|(?:in namespace '[^']+' )?does not name a type|has not been declared|is not a type"
    rf"|is not a member of '[^'<]+')|(?:identifier|use of undeclared identifier|unknown type name) {_QUOTED}"
)
# Errors that another declaration does not fix. Each type that a conversion names must be complete with light headers.
_SETTLED = (
    r"expected '[^']+'(?: or '[^']+')* (?:before|after|at end)|missing terminating|stray '|extended character |this '.' is not closed"
    r"|(?:redefinition|redeclaration) of '|conflicting declaration '"
    r"|'[^'<]*\b(?:class|struct|union) (?!py\b|pybind11|opjit)[\w:]+' has no member named '"
    r"|invalid conversion from '(?!.*for argument)"
)
_CONVERTED = r"(?:cannot|could not) convert (?!.*(?:incomplete|for argument))"
_NO_METHOD = r"no matching function for call to 'at::Tensor::\w+(\(.*\))'"
_TYPES = r"'([^']+)'"
_COMPLETE_NAMES = """
    void bool char int long short unsigned signed float double size_t int8_t uint8_t int16_t int32_t int64_t const static aka
    std string vector allocator basic_string char_traits __cxx11 initializer_list brace enclosed initializer list optional tuple pair
    at torch c10 Tensor TensorBase ArrayRef IntArrayRef ScalarType Device DeviceType Layout MemoryFormat Scalar SymInt SymIntArrayRef
    TensorOptions DeprecatedTypeProperties OptionalArrayRef OptionalIntArrayRef
"""
_COMPLETE = frozenset(_COMPLETE_NAMES.split())
# x.type() in AT_DISPATCH. The compiler reports the macro.
_OLD = r".*at::DeprecatedTypeProperties\W+to\W+[\w:]+::ScalarType\b"
_DEFINED = re.compile(r"^[ \t]*#[ \t]*(?:define|undef)[ \t]+(\w+)", re.MULTILINE)


def is_final(output: str, prepared: Prepared, work: Path, cuda: Sequence[str] = ()) -> bool:
    """Return whether the first error in a compiler's output certainly also occurs with torch/extension.h.

    The program's text has the same tokens with both. `work` is the directory in which the compiler ran. `cuda` are the directories of
    CUDA's headers if the text was split for NVRTC, because a part may then lack declarations of the other part.
    """
    error = _ERROR.search(output)
    if error is None:
        return False
    code = prepared.code
    torchs = [str(headers.INCLUDE)]
    old = re.match(_OLD, error["text"]) is not None
    lacking = "cuda_cmake_macros.h" in error["text"]  # of a torch without CUDA
    if not (old or lacking or _is_authors(error["file"], prepared, work, bool(cuda))):
        return False
    if re.match(_NO_FILE, error["text"]):
        return True

    undeclared = re.match(_UNDECLARED, error["text"])
    name = undeclared and (undeclared[1] or undeclared[2])
    if name is None and not old and (cuda or not _is_settled(error["text"], output)):
        return False
    if cuda and name:
        once = len(re.findall(rf"\b{name}\b", code)) == 1
        if not once or _occurs(name, [*torchs, *cuda]):
            return False

    changed = {*_DEFINED.findall(code.rpartition("#include")[0])}  # before torch's headers are read
    if not old and any(_occurs(word, torchs) for word in changed):
        return False
    # Setuptools gives -DNDEBUG, for example.
    flags = tuple(flag for flag in prepared.flags if _occurs(flag[2:].partition("=")[0], torchs))
    return name not in vocabulary.of_torch(prepared.base, prepared.cxx, flags)


def _is_authors(file: str, prepared: Prepared, work: Path, split: bool) -> bool:
    """Whether a message's file is the author's. The file of a split text has a name without directories."""
    names = map(os.path.basename, prepared.files)
    return os.path.join(work, file) in prepared.files or (split and file in names)


def _is_settled(error: str, output: str) -> bool:
    """Whether no declaration that light headers may lack can fix an error."""
    if re.match(_SETTLED, error):
        return True
    if re.match(_CONVERTED, error):
        return all(map(_is_complete, re.findall(_TYPES, error)))
    method = re.match(_NO_METHOD, error)
    candidates = re.findall(r"(?m)note: candidate: '(.*)'$", output)
    if method is None or not candidates:
        return False
    parameters = [candidate[candidate.index("(") :] for candidate in candidates]
    return all(map(_is_complete, (method[1], *parameters)))


def _is_complete(types: str) -> bool:
    """Whether light headers define each class that a message names. Their arguments can be known templates and numbers."""
    return {*headers.WORD.findall(types)} <= _COMPLETE


def _occurs(word: str, folders: Iterable[str]) -> bool:
    """Whether any header has a word."""
    pattern = re.compile(rb"\b%s\b" % word.encode())
    files = (path for folder in folders for path in Path(folder).rglob("*") if path.is_file())
    return any(pattern.search(path.read_bytes()) for path in files)
