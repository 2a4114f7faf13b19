"""C and C++ as tokens, and which brackets belong together."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

# Some part matches at any place, so that blanks and comments are never tried as tokens.
_TOKEN = re.compile(
    r"""
    (?:\s+|\\\n|//(?:\\\n|[^\n])*|/\*.*?\*/)*
    (?: (?P<string>(?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]{0,16})\(.*?\)(?P=delimiter)"
                 | (?:u8|[uUL])?"(?:\\.|[^"\\\n])*")
      | (?P<char>(?:u8|[uUL])?'(?:\\.|[^'\\\n])*')
      | (?P<name>[^\W\d]\w*)
      | (?P<number>\.?\d(?:[eEpP][+-]|'[0-9a-fA-F]|[\w.])*)
      | (?P<mark>\#\#|\#|<<<|::|->|&&|\|\||[^\w\s])
      | (?P<end>\Z)
    )
""",
    re.VERBOSE | re.DOTALL,
)
_DIRECTIVE = re.compile(r"#(?:\\\n|/\*.*?\*/|[^\n])*", re.DOTALL)
CLOSING = {"(": ")", "[": "]", "{": "}"}
_OPENING = {end: start for start, end in CLOSING.items()}


class Token(NamedTuple):
    """A token of a text.

    `kind` is ``name``, ``number``, ``string``, ``char``, ``mark`` or ``directive``; `start` and `end` are offsets in the text.
    """

    kind: str
    text: str
    start: int
    end: int


@lru_cache(
    32
)  # an op's variants share their texts: 288 of them need a second of Python instead of 12
def tokenize(text: str) -> tuple[Token, ...]:
    """Return the tokens of a C or C++ text, without blanks and comments.

    A preprocessor directive is one token, with its continuation lines.
    """
    found = []
    at = 0
    while match := _TOKEN.match(text, at):
        kind = str(match.lastgroup)
        start, at = match.span(kind)
        if kind == "end":
            break
        if text[start] == "#" and not text[text.rfind("\n", 0, start) + 1 : start].strip():
            kind = "directive"
            directive = _DIRECTIVE.match(text, start)
            at = directive.end() if directive else at
        found.append(Token(kind, text[start:at], start, at))
    return tuple(found)


def code_of(text: str, *without: str) -> str:
    """Return a text with blanks in the place of comments and of tokens of the kinds `without`. All else stays at its place."""
    letters = list(re.sub(r"[^\n]", " ", text))
    for token in tokenize(text):
        if token.kind not in without:
            letters[token.start : token.end] = token.text
    return "".join(letters)


def match_brackets(tokens: Sequence[Token]) -> tuple[dict[int, int], list[Token]]:
    """Return the index of the closing bracket by the index of the opening bracket, for parentheses, brackets and braces, and the brackets
    that match no other, up to the first closing one. Branches of ``#if`` may open one twice."""
    pairs = dict[int, int]()
    opened = list[int]()
    for index, token in enumerate(tokens):
        if token.kind != "mark":
            continue
        if token.text in CLOSING:
            opened.append(index)
        elif token.text in _OPENING:
            if not opened or tokens[opened[-1]].text != _OPENING[token.text]:
                opened.append(index)
                break
            pairs[opened.pop()] = index
    return pairs, [tokens[index] for index in opened]
