"""C++ as tokens, and which brackets belong together."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from opjit.builder.compile_step import NvccOnly

_TOKEN = re.compile(
    r"""
    (?P<space>(?:\s|\\\n|//(?:\\\n|[^\n])*|/\*.*?\*/)+)
  | (?P<string>(?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"|(?:u8|[uUL])?"(?:\\.|[^"\\\n])*")
  | (?P<char>(?:u8|[uUL])?'(?:\\.|[^'\\\n])*')
  | (?P<name>[A-Za-z_]\w*)
  | (?P<number>\.?\d(?:[eEpP][+-]|'[0-9a-fA-F]|[\w.])*)
  | (?P<mark_>\#\#|\#|<<<|::|->|&&|\|\||[^\w\s])
""",
    re.VERBOSE | re.DOTALL,
)
_DIRECTIVE = re.compile(r"#(?:\\\n|/\*.*?\*/|[^\n])*", re.DOTALL)
MATCHING = {"(": ")", "[": "]", "{": "}"}


class Token(NamedTuple):
    """A token: its kind (``name``, ``number``, ``string``, ``char``, ``mark`` or ``directive``), its text, and where that lies."""

    kind: str
    text: str
    start: int
    end: int


@lru_cache(
    32
)  # an op's variants share their texts: 288 of them take a second, not 12, of Python (tests/benchmarks/tune.py)
def tokens_of(text: str) -> list[Token]:
    """Return the tokens of a C++ source without blanks and comments; a preprocessor directive is one token."""
    found, at = [], 0
    while at < len(text):
        directive = text[at] == "#" and not text[text.rfind("\n", 0, at) + 1 : at].strip()
        match = (_DIRECTIVE if directive else _TOKEN).match(text, at)
        if match is None:
            raise NvccOnly(f"a character at offset {at} starts no token")
        kind = "directive" if directive else str(match.lastgroup).rstrip("_")
        if kind != "space":
            found.append(Token(kind, match[0], match.start(), match.end()))
        at = match.end()
    return found


def matched(tokens: list[Token]) -> dict[int, int]:
    """Pair parentheses, brackets and braces: the index of each opening one and of its end."""
    pairs: dict[int, int] = {}
    opened: list[int] = []
    for index, token in enumerate(tokens):
        if token.kind == "mark" and token.text in MATCHING:
            opened.append(index)
        elif token.kind == "mark" and token.text in MATCHING.values():
            if not opened or MATCHING[tokens[opened[-1]].text] != token.text:
                raise NvccOnly("its braces do not match, perhaps in branches of #if")
            pairs[opened.pop()] = index
    if opened:
        raise NvccOnly("its braces do not match, perhaps in branches of #if")
    return pairs


def other_angle(tokens: list[Token], at: int) -> int:
    """Return the index of the ``<`` that belongs to the ``>`` at an index, or the other way round."""
    depth = nested = 0
    for index in range(at, len(tokens)) if tokens[at].text == "<" else range(at, -1, -1):
        text = tokens[index].text
        nested += (text in "([{") - (text in ")]}")
        if not nested:
            depth += (text == "<") - (text == ">")
            if depth == 0:
                return index
    raise NvccOnly("its angle brackets do not match")
