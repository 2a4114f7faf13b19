"""The ops and C++ extensions that a program used, as a JSON list, which `opjit record` writes and `opjit precompile --from` reads.

    {"format": 1, "ops": [{"op": "mylib::scale", "schema": "mylib::scale(Tensor x, float a) -> Tensor", "backend": "cpu",
                           "arch": "x86-64-v3", "runtime": "", "folder": "/home/me/my_ops/scale",
                           "flags": {"c": ["-DTILE=64"], "cuda": [], "link": [], "include": []}}]}

An inline op has ``"code"``, its sources by backend, instead of ``"folder"``. A list may come from anywhere, so it is validated strictly,
and its ops are compiled but never run.

If the program loaded C++ extensions, a third field ``"extensions"`` lists these calls, with all arguments except None:

    {"function": "load", "arguments": {"name": "ext", "sources": ["csrc/ext.cpp"], "extra_cflags": ["-O2"]}, "archs": null}

A call of `opjit.build` is also listed as an extension, with the function ``"build"``. ``archs`` has the archs of its CUDA code. Paths
below the list's folder start from there, and all other paths are absolute."""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from opjit import files
from opjit.backends.targets import Target
from opjit.declare.op_state import OpState
from opjit.errors import RecordError, warn_of_cache
from opjit.recipe.libraries import as_written
from opjit.typed_json import typed

FORMAT = 1
FLAGS = ("c", "cuda", "link", "include", "cuda_link", "sources")
MAX_BYTES = 64 << 20


class RecordedOp(NamedTuple):
    """An op that was used for a target."""

    op: str
    schema: str
    backend: str
    arch: str
    runtime: str
    flags: dict[str, list[str]]  # the author's additional flags, for each kind in FLAGS
    folder: str | None = None  # the folder of the sources; None for an inline op
    code: dict[str, str] | None = None  # an inline op's sources, by backend
    tags: list[str] | None = None  # the names of the author's tags, if there are any

    def fields(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if value is not None}


class RecordedExtension(NamedTuple):
    """A call that loaded a C++ extension, built a shared library ("build"), or requested a kernel of Triton by its key."""

    function: Literal["load", "load_inline", "build", "triton"]
    arguments: dict[str, str | bool | list[str] | dict[str, str]]  # the function's, by name
    # The archs in the form of TORCH_CUDA_ARCH_LIST; empty if the flags name them; None without CUDA code.
    archs: str | None

    @property
    def name(self) -> str:
        return str(self.arguments["name"])


class _List(NamedTuple):
    """The fields of a list."""

    format: int
    ops: list[Any]
    extensions: tuple[Any, ...] = ()


def parse_extension(fields: Any) -> RecordedExtension:
    """Validate one extension of a list. Raises TypeError or ValueError with the reason."""
    found: RecordedExtension = typed(fields, RecordedExtension)
    if not isinstance(found.arguments.get("name"), str):
        raise ValueError("expected an extension's name among its arguments")
    _require_encodable(fields)
    return found


def parse_op(fields: Any) -> RecordedOp:
    """Validate one op of a list. Raises TypeError or ValueError with the reason."""
    found: RecordedOp = typed(fields, RecordedOp)
    if found.flags.keys() != set(FLAGS):
        raise ValueError(f"expected lists of strings named {', '.join(FLAGS)} as 'flags'")
    if bool(found.code) == (found.folder is not None):
        raise ValueError("expected either 'folder' or 'code' for each op")
    _require_encodable(fields)
    return found


def _require_encodable(fields: object) -> None:
    json.dumps(fields, ensure_ascii=False).encode()  # a ValueError for lone surrogates


def dump_list(ops: Iterable[RecordedOp], extensions: Iterable[RecordedExtension] = ()) -> str:
    """Return the list's text: each op and target and each extension once, in an order that does not depend on the input's."""
    fields: dict[str, Any] = {"format": FORMAT}
    found = [each.fields() for each in ops]
    fields["ops"] = _unique(found, lambda each: [each["op"], each["backend"], each["arch"]])
    calls = [each._asdict() for each in extensions]
    if calls:
        fields["extensions"] = _unique(calls, lambda each: [each["arguments"]["name"]])
    return json.dumps(fields, indent=1) + "\n"


def _unique(
    records: Iterable[dict[str, Any]], order: Callable[[dict[str, Any]], list[str]]
) -> list[dict[str, Any]]:
    texts = {json.dumps(each, sort_keys=True): each for each in records}
    return [each for _, each in sorted(texts.items(), key=lambda item: [*order(item[1]), item[0]])]


def read_list(path: Path) -> tuple[list[RecordedOp], list[RecordedExtension]]:
    """Read the ops and the C++ extensions of a list. Raises RecordError if it cannot be read, or is not a recorded list."""
    try:
        found: _List = typed(json.loads(files.read_regular(path, MAX_BYTES)), _List)
        if found.format != FORMAT:
            raise ValueError(f"its format is {found.format}, and this opjit reads format {FORMAT}")
        return [*map(parse_op, found.ops)], [*map(parse_extension, found.extensions)]
    except (OSError, TypeError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise RecordError(
            f"{path} is not a list from `opjit record`: {reason}; record it again"
        ) from None


def note(op: OpState, target: Target) -> None:
    """Append a line about an op and its target to the file that OPJIT_RECORD names; `opjit record` sets it."""
    if os.environ.get("OPJIT_RECORD"):
        append(op.qualified, _recorded(op, target).fields())


def append(name: str, fields: dict[str, Any]) -> None:
    """Append a line about an op or an extension to that file, in a single write, because other processes append lines at the same time."""
    path = os.environ["OPJIT_RECORD"]
    text = json.dumps(fields, sort_keys=True) + "\n"
    try:
        with open(
            path,
            "ab",
            buffering=0,
            opener=lambda name, flags: os.open(name, flags & ~os.O_CREAT | os.O_NOFOLLOW),
        ) as file:
            file.write(text.encode("ascii"))
    except OSError as error:
        warn_of_cache(f"{name} is not recorded: OPJIT_RECORD names {path!r}: {error}")


def _undoubled(flags: Iterable[str]) -> list[str]:
    return [flag.replace("{{", "{").replace("}}", "}") for flag in flags]


# The forms of flags in a list. The compilers' flags have doubled braces.
_FORMS = {"c": _undoubled, "cuda": _undoubled, "link": as_written, "cuda_link": as_written}


def _recorded(op: OpState, target: Target) -> RecordedOp:
    declaration = op.declaration
    extra = declaration.flags_of_author
    flags = {name: _FORMS.get(name, list)(getattr(extra, name, ())) for name in FLAGS}
    code = None
    inline = declaration.code
    if inline is not None:
        code = {backend.name: inline.texts[backend.suffix] for backend in inline.backends()}
    return RecordedOp(
        op.qualified,
        op.schema.text,
        target.backend.name,
        target.arch,
        target.runtime,
        flags,
        None if code else str(declaration.folder),
        code,
        list(op.schema.tags) or None,
    )
