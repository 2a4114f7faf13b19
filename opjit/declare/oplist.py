"""A list of ops that a program used, as JSON: what `opjit record` writes and `opjit precompile --from` reads.

    {"format": 1, "ops": [{"op": "mylib::scale", "schema": "mylib::scale(Tensor x, float a) -> Tensor", "backend": "cpu",
                           "arch": "x86-64-v3", "runtime": "", "folder": "/home/me/my_ops/scale",
                           "flags": {"c": ["-DTILE=64"], "cuda": [], "link": [], "include": []}}]}

An inline op has ``"code"``, its sources by backend, in place of ``"folder"``. A list comes from anywhere, so it is read strictly, and
what it says is only ever compiled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from opjit.errors import RecordError

FORMAT = 1
FLAGS = ("c", "cuda", "link", "include")
MAX_BYTES = 64 << 20
_TEXTS = ("op", "schema", "backend", "arch", "runtime")


class Line(NamedTuple):
    """One op, used for one target.

    Attributes:
        op: its qualified name.
        schema: the text that it was declared with.
        backend, arch, runtime: of the target.
        flags: what its author adds to the backend's, by kind, each of FLAGS.
        folder: of its sources; None for an inline op.
        code: an inline op's sources, by backend.
    """

    op: str
    schema: str
    backend: str
    arch: str
    runtime: str
    flags: dict[str, list[str]]
    folder: str | None = None
    code: dict[str, str] | None = None

    def fields(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if value is not None}


def line(fields: object) -> Line:
    """Read one op of a list.

    Raises:
        ValueError: says what is wrong with it.
    """
    if not isinstance(fields, dict):
        raise ValueError("expected an object for each op")
    place = "code" if "code" in fields else "folder"
    if fields.keys() != {*_TEXTS, "flags", place}:
        raise ValueError(f"expected the fields {', '.join(_TEXTS)}, flags and folder or code, not {', '.join(map(repr, fields)) or 'none'}")
    for name in _TEXTS:
        if not isinstance(fields[name], str):
            raise ValueError(f"expected a string as {name!r}, not {fields[name]!r:.80}")
    flags, given = fields["flags"], fields[place]
    if not isinstance(flags, dict) or flags.keys() != set(FLAGS) or not all(_are_texts(values, list) for values in flags.values()):
        raise ValueError(f"expected lists of strings named {', '.join(FLAGS)} as 'flags', not {flags!r:.80}")
    if not (isinstance(given, str) if place == "folder" else isinstance(given, dict) and given and _are_texts(list(given.values()), list)):
        raise ValueError(f"expected {'a path' if place == 'folder' else 'sources by backend'} as {place!r}, not {given!r:.80}")
    found = Line(**fields)
    "".join([*(fields[name] for name in _TEXTS), *(found.code or {}).values()]).encode()  # or it is no text
    return found


def _are_texts(values: object, kind: type) -> bool:
    return isinstance(values, kind) and all(isinstance(value, str) for value in values)  # type: ignore[attr-defined]


def dump(lines: Iterable[Line]) -> str:
    """A list as text: each op and target once, in an order that depends on nothing else."""
    found = {json.dumps(each.fields(), sort_keys=True): each for each in lines}
    ordered = sorted(found.items(), key=lambda item: (item[1].op, item[1].backend, item[1].arch, item[0]))
    return json.dumps({"format": FORMAT, "ops": [each.fields() for _, each in ordered]}, indent=1) + "\n"


def read(path: Path) -> list[Line]:
    """The ops of a list.

    Raises:
        RecordError: it cannot be read, or is no such list.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it is longer than {MAX_BYTES >> 20} MiB")
        fields = json.loads(content)
        if not isinstance(fields, dict) or fields.keys() != {"format", "ops"} or not isinstance(fields["ops"], list):
            raise ValueError("expected an object with 'format' and 'ops'")
        if fields["format"] != FORMAT or type(fields["format"]) is not int:
            raise ValueError(f"it is of the format {fields['format']!r:.80}, and this opjit reads format {FORMAT}")
        return [line(each) for each in fields["ops"]]
    except (OSError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise RecordError(f"{path} is no list of ops that `opjit record` wrote: {reason}; record it again") from None
