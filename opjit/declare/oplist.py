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
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from opjit import backends, files
from opjit.backends.targets import Target
from opjit.declare.op_state import OpState
from opjit.errors import CacheWarning, RecordError
from opjit.recipe.libraries import as_written

FORMAT = 1
FLAGS = ("c", "cuda", "link", "include", "cuda_link", "sources")
MAX_BYTES = 64 << 20
_TEXTS = ("op", "schema", "backend", "arch", "runtime")


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
    """A call that loaded a C++ extension, or that built a shared library."""

    function: str  # "load" or "load_inline"; of a shared library, "build"
    arguments: dict[str, Any]  # the function's arguments, by name
    # The archs in the form of TORCH_CUDA_ARCH_LIST; empty if the flags name them; None without CUDA code.
    archs: str | None

    @property
    def name(self) -> str:
        return str(self.arguments["name"])


def _expect(condition: object, what: str, found: object) -> None:
    if not condition:
        raise ValueError(f"expected {what}, not {found!r:.80}")


def parse_extension(fields: Any) -> RecordedExtension:
    """Validate one extension of a list. Raises ValueError with the reason."""
    _expect(
        isinstance(fields, dict) and fields.keys() == set(RecordedExtension._fields),
        f"the fields {', '.join(RecordedExtension._fields)} for each extension",
        fields,
    )
    found = RecordedExtension(**fields)
    _expect(
        found.function in ("load", "load_inline", "build"),
        "load, load_inline or build as 'function'",
        found.function,
    )
    _expect(isinstance(found.archs, (str, type(None))), "a string or null as 'archs'", found.archs)
    _expect(
        isinstance(found.arguments, dict) and isinstance(found.arguments.get("name"), str),
        "an object with a name as 'arguments'",
        found.arguments,
    )
    for name, value in found.arguments.items():
        _expect(
            isinstance(value, (str, bool))
            or _are_texts(list(value.values()) if isinstance(value, dict) else value),
            f"a string, a truth value, a list or an object of strings as {name!r}",
            value,
        )
    json.dumps(fields, ensure_ascii=False).encode()  # a ValueError for lone surrogates
    return found


def parse_op(fields: Any) -> RecordedOp:
    """Validate one op of a list. Raises ValueError with the reason."""
    _expect(isinstance(fields, dict), "an object for each op", fields)
    place = "code" if "code" in fields else "folder"
    _expect(
        fields.keys() - {"tags"} == {*_TEXTS, "flags", place},
        f"the fields {', '.join(_TEXTS)}, flags and folder or code",
        list(fields),
    )
    for name in _TEXTS:
        _expect(isinstance(fields[name], str), f"a string as {name!r}", fields[name])
    flags = fields["flags"]
    sources = fields[place]
    _expect(
        isinstance(flags, dict)
        and flags.keys() == set(FLAGS)
        and all(map(_are_texts, flags.values())),
        f"lists of strings named {', '.join(FLAGS)} as 'flags'",
        flags,
    )
    if place == "folder":
        _expect(isinstance(sources, str), "a path as 'folder'", sources)
    else:
        _expect(
            isinstance(sources, dict) and sources and _are_texts(list(sources.values())),
            "sources by backend as 'code'",
            sources,
        )
    _expect(_are_texts(fields.get("tags", [])), "a list of strings as 'tags'", fields.get("tags"))
    json.dumps(fields, ensure_ascii=False).encode()  # a ValueError for lone surrogates
    return RecordedOp(**fields)


def _are_texts(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def dump_list(ops: Iterable[RecordedOp], extensions: Iterable[RecordedExtension] = ()) -> str:
    """Return the list's text: each op and target and each extension once, in an order that does not depend on the input's."""
    found = {json.dumps(each.fields(), sort_keys=True): each for each in ops}
    ordered = sorted(
        found.items(), key=lambda item: (item[1].op, item[1].backend, item[1].arch, item[0])
    )
    fields: dict[str, Any] = {"format": FORMAT, "ops": [each.fields() for _, each in ordered]}
    loaded = {json.dumps(each._asdict(), sort_keys=True): each for each in extensions}
    if loaded:
        fields["extensions"] = [
            each._asdict()
            for _, each in sorted(loaded.items(), key=lambda item: (item[1].name, item[0]))
        ]
    return json.dumps(fields, indent=1) + "\n"


def read_list(path: Path) -> tuple[list[RecordedOp], list[RecordedExtension]]:
    """Read the ops and the C++ extensions of a list. Raises RecordError if it cannot be read, or is not a recorded list."""
    try:
        fields = json.loads(files.read_regular(path, MAX_BYTES))
        fields = {"extensions": [], **fields} if isinstance(fields, dict) else {}
        if fields.keys() != {"format", "ops", "extensions"} or not all(
            isinstance(fields[name], list) for name in ("ops", "extensions")
        ):
            raise ValueError("expected an object with 'format' and 'ops'")
        if fields["format"] != FORMAT or type(fields["format"]) is not int:
            raise ValueError(
                f"its format is {fields['format']!r:.80}, and this opjit reads format {FORMAT}"
            )
        return [parse_op(each) for each in fields["ops"]], [
            parse_extension(each) for each in fields["extensions"]
        ]
    except (OSError, ValueError, RecursionError) as error:
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
        warnings.warn(
            CacheWarning(f"{name} is not recorded: OPJIT_RECORD names {path!r}: {error}"),
            stacklevel=2,
        )


def _undoubled(flag: str) -> str:
    return flag.replace("{{", "{").replace("}}", "}")


def _recorded(op: OpState, target: Target) -> RecordedOp:
    flags: dict[str, list[str]] = {name: [] for name in FLAGS}
    declaration = op.declaration
    extra = declaration.flags_of_author
    if extra is not None:  # the compilers' flags have doubled braces
        flags["c"] = [_undoubled(flag) for flag in extra.c]
        flags["cuda"] = [_undoubled(flag) for flag in extra.cuda]
        flags["link"] = as_written(extra.link)
        flags["cuda_link"] = as_written(extra.cuda_link)
        flags["include"] = list(extra.include)
        flags["sources"] = list(extra.sources)
    code = None
    if declaration.code is not None:
        texts = declaration.code.texts
        code = {
            backend.name: texts[backend.suffix]
            for backend in backends.all_backends()
            if backend.suffix in texts
        }
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
