"""The kernels' signatures and launches, from the tokens of a .cu file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from opjit.builder.compile_step import NvccOnly
from opjit.builder.tokens import (
    Token,
    matching_angle,
    split_at_commas,
)

# Words before or after a type, and words that are types: no parameter has them as its name.
_QUALIFIERS = {"__grid_constant__", "__restrict__", "const", "volatile"}
_TYPES = {"bool", "char", "double", "float", "int", "long", "short", "signed", "unsigned"}


def callee_start(tokens: list[Token], index: int, closing: Mapping[int, int]) -> int:
    """Return the index at which the kernel's name before ``<<<`` begins."""
    at = index - 1
    if tokens[at].text == ")":
        return next(begin for begin, end in closing.items() if end == at)
    while True:
        if tokens[at].text == ">":
            at = matching_angle(tokens, at) - 1
        if tokens[at].kind != "name":
            raise NvccOnly("it launches something else than a name")
        if tokens[at - 1].text == "##" and at >= 2:  # in a macro
            at -= 2
            continue
        if (
            at >= 2
            and tokens[at - 1].text == "::"
            and (tokens[at - 2].kind == "name" or tokens[at - 2].text == ">")
        ):
            at -= 2
            continue
        if tokens[at - 1].text in ("template", "::"):
            at -= 1
        return at


def after_template(head: list[Token]) -> int:
    """Return the index after ``template <...>``; 0 without it."""
    at = 0
    while [token.text for token in head[at : at + 2]] == ["template", "<"]:
        at = matching_angle(head, at + 1) + 1
    return at


def template_arguments(head: list[Token]) -> str:
    """Return ``<T, n>`` for ``template <typename T, int n>``."""
    if sum(token.text == "template" for token in head) > 1 or len(head) <= 3:
        return ""
    names = []
    last = ""
    depth = 0
    skipping = False
    for token in head[2:]:
        outer = depth == 0
        depth += (token.text in "([{<") - (token.text in ")]}>")
        if outer and (token.text == "," or token.text == ">"):
            names.append(last)
            last = ""
            skipping = False
        elif outer and token.text == "=":
            skipping = True
        elif outer and not skipping and token.kind == "name":
            last = token.text + ("..." if last == "..." else "")
        elif outer and not skipping and token.text == "." and not last.endswith("..."):
            last = "..."
    if not all(names):
        raise NvccOnly("a kernel has an unnamed template parameter")
    return f"<{', '.join(names)}>"


class Parameter(NamedTuple):
    """A parameter of a kernel."""

    tokens: Sequence[Token]
    name: str  # with ``...`` for a pack
    end: int  # of its declaration in the text, before a default argument

    @classmethod
    def of(cls, tokens: Sequence[Token]) -> Parameter:
        end = next((index for index, token in enumerate(tokens) if token.text == "="), len(tokens))
        named = next((index for index, token in enumerate(tokens) if token.text == "["), end)
        name = tokens[named - 1]
        before = [token.text for token in tokens[: named - 1]]
        has_type = before[-1:] != ["::"] and not _QUALIFIERS.issuperset(before)
        if not has_type or name.kind != "name" or name.text in _QUALIFIERS | _TYPES:
            raise NvccOnly("a kernel has an unnamed parameter")
        is_pack = named >= 4 and tokens[named - 2].text == "."
        return cls(tokens, name.text + "..." * is_pack, tokens[end - 1].end)

    @property
    def address(self) -> str:
        return f"(void *)&{self.name}, "


def parameters_of(
    tokens: Sequence[Token], brackets: Mapping[int, int], opening: int
) -> list[Parameter]:
    """Return a kernel's parameters; ``(void)`` and ``()`` have none."""
    ranges = split_at_commas(tokens, brackets, opening + 1, brackets[opening])
    groups = [tokens[start:stop] for start, stop in ranges]
    is_void = [token.text for group in groups for token in group] == ["void"]
    return [] if is_void else [*map(Parameter.of, groups)]


def name_before(tokens: Sequence[Token], opening: int) -> int:
    """Return the index of the name of a function with parameters that open at an index."""
    at = opening - 1
    is_specialization = tokens[at].text == ">"
    return matching_angle(tokens, at) - 1 if is_specialization else at
