"""C and C++ as tokens, and which brackets belong together.

tokens = tokenize(text)
brackets = match_brackets(tokens)
for index in outer_indices(brackets, 0, len(tokens)):
    print(tokens[index].text)  # outside of all brackets
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

_TOKEN = re.compile(
    r"""
    (?P<space>(?:\s|\\\n|//(?:\\\n|[^\n])*|/\*.*?\*/)+)
  | (?P<string>(?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]{0,16})\(.*?\)(?P=delimiter)"
             | (?:u8|[uUL])?"(?:\\.|[^"\\\n])*")
  | (?P<char>(?:u8|[uUL])?'(?:\\.|[^'\\\n])*')
  | (?P<name>[A-Za-z_]\w*)
  | (?P<number>\.?\d(?:[eEpP][+-]|'[0-9a-fA-F]|[\w.])*)
  | (?P<mark>\#\#|\#|<<<|::|->|&&|\|\||[^\w\s])
""",
    re.VERBOSE | re.DOTALL,
)
_DIRECTIVE = re.compile(r"#(?:\\\n|/\*.*?\*/|[^\n])*", re.DOTALL)
CLOSING = {"(": ")", "[": "]", "{": "}"}
_OPENING = {end: start for start, end in CLOSING.items()}


class Malformed(Exception):
    """A text is no sequence of tokens, or its brackets do not match.

    The message contains the reason.
    """


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

    A preprocessor directive is one token, with its continuation lines. Raises Malformed at a character that starts no token.
    """
    found = []
    at = 0
    while at < len(text):
        is_directive = text[at] == "#" and not text[text.rfind("\n", 0, at) + 1 : at].strip()
        match = (_DIRECTIVE if is_directive else _TOKEN).match(text, at)
        if match is None:
            raise Malformed(f"a character at offset {at} starts no token")

        kind = "directive" if is_directive else str(match.lastgroup)
        if kind != "space":
            found.append(Token(kind, match[0], at, match.end()))
        at = match.end()
    return tuple(found)


def code_of(text: str, tokens: Iterable[Token], without: str = "") -> str:
    """Return a text with a blank for each character outside of tokens, and in tokens of the kind `without`."""
    letters = [" "] * len(text)
    for token in tokens:
        if token.kind != without:
            letters[token.start : token.end] = token.text
    return "".join(letters)


def match_brackets(tokens: Sequence[Token]) -> dict[int, int]:
    """Return the index of the closing bracket by the index of the opening bracket, for parentheses,
    brackets and braces.

    Raises Malformed if they do not match, for example because branches of ``#if`` open one twice.
    """
    pairs = dict[int, int]()
    opened = []
    for index, token in enumerate(tokens):
        if token.kind != "mark":
            continue
        if token.text in CLOSING:
            opened.append(index)
        elif token.text in _OPENING:
            if not opened or tokens[opened[-1]].text != _OPENING[token.text]:
                raise Malformed("its braces do not match, perhaps in branches of #if")
            pairs[opened.pop()] = index
    if opened:
        raise Malformed("its braces do not match, perhaps in branches of #if")
    return pairs


def matching_angle(tokens: Sequence[Token], at: int) -> int:
    """Return the index of the ``>`` that belongs to the ``<`` at index `at`, or the other way round.

    Raises Malformed if it is missing.
    """
    forward = tokens[at].text == "<"
    depth = 0
    nested = 0
    for index in range(at, len(tokens)) if forward else range(at, -1, -1):
        text = tokens[index].text
        nested += (text in CLOSING) - (text in _OPENING)
        if nested:
            continue
        depth += (text == "<") - (text == ">")
        if depth == 0:
            return index
    raise Malformed("its angle brackets do not match")


def outer_indices(brackets: Mapping[int, int], begin: int, end: int) -> Iterator[int]:
    """Yield the indices from `begin` to before `end` that are outside of brackets, including the
    indices of opening brackets.

    `brackets` is the result of `match_brackets`.
    """
    index = begin
    while index < end:
        yield index
        index = brackets.get(index, index) + 1


def split_at_commas(
    tokens: Sequence[Token], brackets: Mapping[int, int], begin: int, end: int
) -> list[tuple[int, int]]:
    """Return the ranges of indices between the commas from `begin` to before `end`, for example the
    ranges of a function's parameters.

    Commas inside of parentheses, brackets, braces and the angle brackets of templates separate
    nothing. Without tokens, there is no range.
    """
    ranges = []
    start = begin
    angles = 0
    for index in outer_indices(brackets, begin, end):
        text = tokens[index].text
        angles += (text == "<") - (text == ">")
        if text == "," and angles <= 0:
            ranges.append((start, index))
            start = index + 1
    return [*ranges, (start, end)] if begin < end else []


def launch_end(tokens: Sequence[Token], brackets: Mapping[int, int], at: int) -> int:
    """Return the index of the first of the three ``>`` that belong to the ``<<<`` at index `at`.

    Raises Malformed if they are missing.
    """
    for index in outer_indices(brackets, at + 1, len(tokens) - 2):
        marks = [token.text for token in tokens[index : index + 3]]
        adjacent = tokens[index].start + 2 == tokens[index + 2].start
        last = index + 3 == len(tokens)
        if marks == [">", ">", ">"] and adjacent and (last or tokens[index + 3].text == "("):
            return index
    raise Malformed("it has <<< without >>>")
