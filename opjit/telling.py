"""What a rank tells the others of an entry: where it is, or why there is none. JSON, because who reads it does not trust it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from opjit import errors
from opjit.errors import BuildError, OpjitError

_MOST_PARTS = 1 << 12


def entry(key: str, parts: int) -> str:
    """An entry by its key, and in how many parts its bytes are in the store."""
    return json.dumps({"key": key, "parts": parts})


def failure(error: OpjitError, who: str) -> str:
    """An error that every rank would meet."""
    return json.dumps({"error": _described(error, who)})


def read(text: bytes) -> tuple[str, int, dict[str, Any] | None]:
    """Key, number of parts, and the error, of what a rank has told."""
    try:
        told = json.loads(text)
        if isinstance(told, dict) and isinstance(told.get("error"), dict):
            return "", 0, told["error"]
        key, parts = told["key"], told["parts"]
        if re.fullmatch("[0-9a-f]{64}", key) and type(parts) is int and 0 <= parts <= _MOST_PARTS:
            return key, parts, None
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return "", 0, {"kind": "BuildError", "message": "another rank told something that is no result; do all ranks have the same opjit?"}


def _described(error: OpjitError, who: str) -> dict[str, Any]:
    facts = {name: str(value) for name, value in vars(error).items() if isinstance(value, (str, Path))}
    return {"kind": type(error).__name__, "message": str(error), "facts": facts, "who": who}


def remade(told: dict[str, Any], who: str) -> OpjitError:
    """The error of another rank. Only opjit's own classes are made, with text."""
    kind = getattr(errors, str(told.get("kind")), None)
    if not (isinstance(kind, type) and issubclass(kind, OpjitError)):
        kind = BuildError
    facts: dict[str, Any] = {"op": "", "target": "", "command": None, "log": None} if issubclass(kind, BuildError) else {}
    given = told.get("facts")
    facts |= {str(name): str(value) for name, value in (given if isinstance(given, dict) else {}).items()}
    if facts.get("log") is not None:
        facts["log"] = Path(facts["log"])
    place = f"\n(as {told['who']} found)" if told.get("who") not in (None, who) else ""
    return errors._unpickled(kind, (f"{told.get('message')}{place}",), facts)
