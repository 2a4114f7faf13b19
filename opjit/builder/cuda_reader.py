"""Reads CUDA C: the kernels of a text, their parameters, and their launches.

host_device_split.py writes the host's and the device's part from it, and emulate/translate.py writes C++ for the CPU. All places are
indices of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from opjit.builder.tokens import match_brackets, tokenize
from opjit.recipe.nvcc_flags import NvccOnly

# Names before parentheses that do not contain parameters.
_ATTRIBUTES_NAMES = """
    __launch_bounds__ __attribute__ alignas __align__ __cluster_dims__ __maxnreg__
    __block_size__ decltype noexcept __declspec asm __asm__ requires explicit
"""
_ATTRIBUTES = frozenset(_ATTRIBUTES_NAMES.split())
# Words before or after a type, and words that are types: no parameter has them as its name.
_QUALIFIERS = {"__grid_constant__", "__restrict__", "const", "volatile"}
_TYPES = {"bool", "char", "double", "float", "int", "long", "short", "signed", "unsigned"}
_LINE = re.compile(r"^#line (\d+) (.*)\n", re.MULTILINE)
Edit = tuple[int, int, str]  # the start and end of a part of a text, and its replacement, a line


class Parameter(NamedTuple):
    """A parameter of a kernel or template: its name with ``...`` for a pack, the places of its first token and of its name, and its end
    before a default argument."""

    name: str
    begin: int
    named: int
    end: int


class KernelDefinition(NamedTuple):
    """The definition of a kernel: its ``template <...>``, which may be empty, ``__global__``, its name, and the brackets that open its
    parameters and its body."""

    template: range
    begin: int
    name: int
    parameters: int
    body: int


class CudaReader:
    """A text, and the tokens of its code. Raises NvccOnly if its brackets do not match, for example because branches of ``#if`` open one
    twice."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.every = tokenize(text)
        self.tokens = [token for token in self.every if token.kind != "directive"]
        self.words = [token.text for token in self.tokens]
        self.closing, unmatched = match_brackets(self.tokens)
        if unmatched:
            raise NvccOnly("its braces do not match, perhaps in branches of #if")
        self.opening = {end: begin for begin, end in self.closing.items()}

    def code(self, begin: int, end: int) -> str:
        """Return the code from one token to before another in one line, without comments and directives."""
        pieces = list[str]()
        for at in range(begin, end):
            if pieces and self.tokens[at - 1].end < self.tokens[at].start:
                pieces.append(" ")
            pieces.append(self.words[at])
        return "".join(pieces)

    def outer(self, begin: int, end: int) -> Iterator[int]:
        """Yield the places outside of brackets, including the opening brackets."""
        at = begin
        while at < end:
            yield at
            at = self.closing.get(at, at) + 1

    def find(self, begin: int, end: int, *marks: str) -> int:
        """Return the first of some marks outside of brackets, also of the angle brackets of templates. Returns `end` without one."""
        angles = 0
        for at in self.outer(begin, end):
            text = self.words[at]
            if text in marks and angles <= 0:
                return at
            angles += (text == "<") - (text == ">")
        return end

    def last(self, before: int, *marks: str) -> int:
        """Return the last of some marks before a place, outside of the brackets that close before it. Returns -1 without one."""
        at = before - 1
        while at >= 0 and self.words[at] not in marks:
            at = self.opening.get(at, at) - 1
        return max(at, -1)

    def groups(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts between commas."""
        while begin < end:
            comma = self.find(begin, end, ",")
            yield begin, comma
            begin = comma + 1

    def declared_names(self, begin: int, end: int) -> list[str]:
        """Return the names of the variables that a declaration declares."""
        ends = (self.find(*group, "=", "[") for group in self.groups(begin, end))
        return [self.words[at - 1] for at in ends]

    def matching_angle(self, at: int) -> int:
        """Return the ``>`` that belongs to a ``<``, or the other way round."""
        forward = self.words[at] == "<"
        pairs = self.closing if forward else self.opening
        depth = 0
        while 0 <= at < len(self.words):
            depth += (self.words[at] == "<") - (self.words[at] == ">")
            if depth == 0:
                return at
            at = pairs.get(at, at) + (1 if forward else -1)
        raise NvccOnly("its angle brackets do not match")

    def after_template(self, at: int) -> int:
        """Return the place behind ``template <...>``, or the same place if it does not begin there."""
        while self.words[at : at + 2] == ["template", "<"]:
            at = self.matching_angle(at + 1) + 1
        return at

    def parameters_of(self, begin: int, end: int) -> int:
        """Return the parenthesis that opens the parameters of the function that is declared in a part, or `end` without one."""
        found = end
        for at in self.outer(begin, end):
            before = self.words[at - 1]
            if self.words[at] == ":":
                break
            if self.words[at] == "(" and at > begin and before not in _ATTRIBUTES:
                is_call = before == ")" and self.words[at - 3] == "operator"
                if is_call or before == ">" or self.tokens[at - 1].kind == "name":
                    found = at
        return found

    def launches(self) -> Iterator[tuple[int, int]]:
        """Yield the ``<<<`` of each launch, and the first mark of its ``>>>``, which the arguments follow."""
        for begin, text in enumerate(self.words):
            if text == "<<<":
                ends = filter(self._ends_launch, self.outer(begin + 1, len(self.words)))
                end = next(ends, None)
                if end is None:
                    raise NvccOnly("it has <<< without >>> and arguments in parentheses")
                yield begin, end

    def launch_edits(self, before: str, after: str) -> Iterator[Edit]:
        """Yield edits that make a call of each launch, between two texts. The first has ``{}`` for the configuration."""
        for begin, end in self.launches():
            first = self.tokens[self._callee(begin)].start
            last = self.tokens[self.closing[end + 3]].end
            yield first, first, before.format(self.code(begin + 1, end))
            yield self.tokens[begin].start, self.tokens[end + 2].end, ""
            yield last, last, after

    def _ends_launch(self, at: int) -> bool:
        words = self.words[at : at + 4]
        return (
            words == [">", ">", ">", "("] and self.tokens[at + 2].start == self.tokens[at].start + 2
        )

    def _callee(self, launch: int) -> int:
        """Return the place at which the name of the kernel before a ``<<<`` begins."""
        at = launch - 1
        if self.words[at] == ")":
            return self.opening[at]
        while True:
            if self.words[at] == ">":
                at = self.matching_angle(at) - 1
            if self.tokens[at].kind != "name":
                raise NvccOnly("it launches something else than a name")
            joined = self.words[at - 1] in ("::", "##") and at >= 2  # ## in a macro
            if joined and (self.tokens[at - 2].kind == "name" or self.words[at - 2] == ">"):
                at -= 2
                continue
            return at - (self.words[at - 1] in ("template", "::"))

    def kernels(self) -> Iterator[KernelDefinition]:
        """Yield the definitions of kernels."""
        for begin, text in enumerate(self.words):
            if text == "__global__":
                rest = self.outer(begin, len(self.words))
                body = next((at for at in rest if self.words[at] in ("{", ";")), begin)
                parameters = self.parameters_of(begin, body)
                if parameters < body and self.words[body] == "{":
                    name = parameters - 1
                    if self.words[name] == ">":
                        name = self.matching_angle(name) - 1
                    yield KernelDefinition(
                        self._template_before(begin), begin, name, parameters, body
                    )

    def _template_before(self, at: int) -> range:
        """Return the ``template <...>`` of the declaration around a place."""
        end = self.last(at, ";", "{", "}", ">")
        is_template = end >= 0 and self.words[end] == ">"
        return range(self.matching_angle(end) - 1, end + 1) if is_template else range(0)

    def parameters(self, kernel: KernelDefinition) -> list[Parameter]:
        """Return the parameters of a kernel. Raises NvccOnly if one lacks a name."""
        inside = kernel.parameters + 1, self.closing[kernel.parameters]
        return [] if self.words[slice(*inside)] == ["void"] else self._named(*inside)

    def own_call(self, kernel: KernelDefinition) -> tuple[str, str]:
        """Return code for the body of a kernel: an array of its arguments' addresses, and a pointer to the kernel, one of its overloads."""
        parameters = self.parameters(kernel)
        addresses = "".join(f"(void *)&{each.name}, " for each in parameters)
        types = ", ".join(self.code(each.begin, each.end) for each in parameters)
        callee = self.code(kernel.name, kernel.parameters)
        arguments = self._named(kernel.template.start + 2, kernel.template.stop - 1)
        if arguments and kernel.name == kernel.parameters - 1:
            callee += f"<{', '.join(each.name for each in arguments)}>"
        return f"{{{addresses}nullptr}}", f"static_cast<void (*)({types})>(&{callee})"

    def _named(self, begin: int, end: int) -> list[Parameter]:
        found = []
        for first, last in self.groups(begin, end):
            last = self.find(first, last, "=")
            named = self.find(first, last, "[") - 1
            before = self.words[first:named]
            has_type = before[-1:] != ["::"] and not _QUALIFIERS.issuperset(before)
            is_name = self.tokens[named].kind == "name"
            if not (has_type and is_name) or self.words[named] in _QUALIFIERS | _TYPES:
                raise NvccOnly("a kernel has an unnamed parameter")
            name = self.words[named] + "..." * (before[-1] == ".")
            found.append(Parameter(name, first, named, last))
        return found


def edited(text: str, edits: Iterable[Edit]) -> str:
    """Replace parts of a text, so that each line outside of them keeps its number. Leaves out edits inside of a part."""
    pieces = []
    at = 0
    for start, end, new in sorted(edits):
        if start >= at:
            pieces += [text[at:start], new, _kept_lines(text[start:end])]
            at = end
    return "".join([*pieces, text[at:]])


def _kept_lines(removed: str) -> str:
    """Return the ends of the lines of a part that is removed, or a directive with the number of its last line."""
    directives = [*_LINE.finditer(removed)]
    if not directives:
        return "".join(re.findall(r"\\?\n", removed))
    last = directives[-1]
    number = int(last[1]) + removed.count("\n", last.end())
    return f"\n#line {number} {last[2]}\n"
