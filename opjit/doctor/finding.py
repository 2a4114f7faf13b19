"""What a check of ``opjit doctor`` found."""

from __future__ import annotations

from typing import NamedTuple

OK, NOTE, WARNING, PROBLEM = "ok", "note", "warning", "problem"


class Finding(NamedTuple):
    """One line of the doctor's.

    Attributes:
        about: what was looked at.
        state: ``"ok"``; ``"note"`` for what is worth knowing; ``"warning"`` for what costs time or safety, while ops work;
            ``"problem"`` for what keeps ops from being built or loaded.
        seen: one line.
        todo: one line: what to do about a problem or a warning.
    """

    about: str
    state: str
    seen: str
    todo: str = ""


def from_error(about: str, state: str, error: BaseException, todo: str = "") -> Finding:
    """An error as a finding. opjit's own messages say behind a semicolon what to do."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    seen, _, advice = first.partition("; ")
    return Finding(about, state, seen, advice or todo)
