"""CUDA C as C++ for the emulation of kernels_c/emulate, with every line at its number.

kernel<<<grid, block>>>(x)          (emu_configured(place, grid, block), kernel(x), emu_launched())
__global__ void kernel(T *x) {      the same, and first: if the host calls, launch this function
__shared__ float tile[32];          a reference into the block's memory
asm("ld.acquire..." : ...)          a function, for the forms in `_PTX`
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from opjit.builder.compile_step import NvccOnly
from opjit.builder.signatures import (
    callee_start,
    name_before,
    parameters_of,
    template_arguments,
)
from opjit.builder.tokens import (
    Malformed,
    launch_end,
    match_brackets,
    matching_angle,
    outer_indices,
    split_at_commas,
    tokenize,
)

_WITH_ARGUMENTS = {
    "__launch_bounds__",
    "__attribute__",
    "alignas",
    "__align__",
    "__maxnreg__",
    "__cluster_dims__",
}
_STORAGE = {"extern", "static", "__shared__"}
_BEFORE_SHARED = {*_STORAGE, "volatile", "const"}
_ASM = {"asm", "__asm__", "__asm"}
# Inline PTX by its instruction, and the C++ for its operands: {0} and so on, in their order, and {ptx}.
_PTX_TABLE = r"""
ld\.(acquire|relaxed|volatile)\S* %0, \[%1\]    {0} = emu_ptx_load((const EMU_VALUE({0}) *)({1}), emu_order_of("{ptx}"))
st\.(release|relaxed|volatile)\S* \[%0\], %1    emu_ptx_store((decltype(+({1})) *)({0}), {1}, emu_order_of("{ptx}"))
red\.\S*\.add\.\S+ \[%0\], %1            emu_ptx_add((decltype(+({1})) *)({0}), {1}, emu_order_of("{ptx}"))
atom\.\S*\.add\.\S+ %0, \[%1\], %2       {0} = emu_ptx_add((EMU_VALUE({0}) *)({1}), {2}, emu_order_of("{ptx}"))
(fence\.(acq_rel|sc)|membar)\.(sys|gpu|gl|cta)    emu_fence(emu_scope_of("{ptx}"))
mov\.u64 %0, %%?globaltimer              {0} = emu_nanoseconds()
mov\.u32 %0, %%?laneid                   {0} = emu_lane
cvt\.rn\.f16\.f32 %0, %1                 {0} = opjit_float_to_half({1}).bits
cvt\.f32\.f16 %0, %1                     {0} = opjit_half_to_float(opjit_half{{{1}}})
cvt\.rn\.bf16\.f32 %0, %1                {0} = opjit_float_to_bfloat16({1}).bits
nanosleep\.u32 %0                        emu_pause()
bar\.sync 0|barrier\.sync 0              __syncthreads()
prefetch\S* .*|griddepcontrol\..*        (void)0
\{ \.reg \.b128 (\w+); .* ld\.relaxed\.sys\.global\.b128 \1, \[%4\]; .*\}    emu_load_words((const void *)({4}), {0}, {1}, {2}, {3})
\{ \.reg \.b128 (\w+); .* st\.relaxed\.sys\.global\.b128 \[%0\], \1; \}    emu_store_words((void *)({0}), {1}, {2}, {3}, {4})
"""
_PTX = [re.split(r"  +", row) for row in _PTX_TABLE.strip().splitlines()]


def translate(text: str, path: str) -> str:
    """Translate the text of a CUDA file or header, which messages call `path`.

    Raises NvccOnly for a text that it does not understand.
    """
    try:
        edits = list(_File(text).edits())
    except Malformed as error:
        raise NvccOnly(str(error)) from None
    return f"#line 1 {json.dumps(path, ensure_ascii=False)}\n{_edited(text, edits)}"


def synchronization(text: str) -> list[int]:
    """Return the lines of the calls of barriers and atomics in a text, outside of macros."""
    return [
        text.count("\n", 0, token.start) + 1
        for token, after in pairwise(tokenize(text))
        if after.text == "("
        and re.fullmatch(r"__syncthreads\w*|__syncwarp|sync|atomic[A-Z]\w*", token.text)
    ]


def _edited(text: str, edits: Sequence[tuple[int, int, str]]) -> str:
    """Replace ranges of a text. Each keeps the number of its lines."""
    for start, end, new in sorted(edits, reverse=True):
        lines = "".join(re.findall(r"\\?\n", text[start:end]))
        flat = re.sub(r"\\?\n", " ", new)
        text = text[:start] + flat + lines + text[end:]
    return text


class _File:
    """One file: its tokens, and the edits that translate it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.every = tokenize(text)
        self.tokens = [token for token in self.every if token.kind != "directive"]
        self.words = [token.text for token in self.tokens]
        self.brackets = match_brackets(self.tokens)
        self.opening = {end: start for start, end in self.brackets.items()}
        self.attributes = set[int]()  # their tokens
        for start, end in self.brackets.items():
            if self.words[start - 1] in _WITH_ARGUMENTS:
                self.attributes.update(range(start - 1, end + 1))

    def edits(self) -> Iterator[tuple[int, int, str]]:
        for directive in self.every:
            if directive.kind == "directive" and re.search("<<<|__global__", directive.text):
                start = self.text.index("#", directive.start) + 1
                for first, last, new in _File(self.text[start : directive.end]).edits():
                    yield start + first, start + last, new
        for index, token in enumerate(self.tokens):
            if token.text == "<<<":
                yield from self._launch(index)
            elif token.text == "__global__":
                yield from self._kernel(index)
            elif token.text == "__shared__":
                yield self._shared(index)
            elif token.text in _ASM:
                yield self._asm(index)
            elif token.text == "__noinline__" and self.words[index - 1] != "(":
                yield (token.start, token.end, "__attribute__((noinline))")

    def _between(self, first: int, last: int) -> str:
        """The text from one token to before another."""
        return self.text[self.tokens[first].start : self.tokens[last - 1].end]

    def _launch(self, index: int) -> Iterator[tuple[int, int, str]]:
        """Note the configuration before a call of a kernel, and after it that the kernel has used it."""
        tokens = self.tokens
        end = launch_end(tokens, self.brackets, index)
        first = tokens[callee_start(tokens, index, self.brackets)].start
        last = tokens[self.brackets[end + 3]].end
        configuration = self.text[tokens[index].end : tokens[end].start]
        yield first, first, f"(emu_configured(EMU_HERE, {configuration}), "
        yield tokens[index].start, tokens[end + 2].end, ""
        yield last, last, ", emu_launched())"

    def _kernel(self, index: int) -> Iterator[tuple[int, int, str]]:
        """Begin a kernel's body with a launch, for calls by the host."""
        bound = "0"
        parameters = index
        for at in outer_indices(self.brackets, index + 1, len(self.tokens)):
            text = self.words[at]
            before = self.tokens[at - 1]
            if text == "(" and before.text == "__launch_bounds__":
                first, last = split_at_commas(
                    self.tokens, self.brackets, at + 1, self.brackets[at]
                )[0]
                bound = self._between(first, last)
            elif text == "(" and before.text not in _WITH_ARGUMENTS:
                parameters = at
                break
        body = self.brackets.get(parameters, len(self.tokens)) + 1
        if body >= len(self.tokens) or self.words[body] != "{":
            return  # a declaration
        name = name_before(self.tokens, parameters)
        callee = self._between(name, parameters)
        if name == parameters - 1:
            callee += self._template_of(index)
        given = parameters_of(self.tokens, self.brackets, parameters)
        types = ", ".join(self.text[each.tokens[0].start : each.end] for each in given)
        addresses = "".join(each.address for each in given)
        start = self.tokens[body].end
        yield (
            start,
            start,
            f" if (!emu_is_thread()) {{ void *emu_arguments[] = {{{addresses}nullptr}}; "
            f"emu_launch_as<void({types}), static_cast<void (*)({types})>(&{callee})>"
            f"(EMU_TEXT({self.words[name]}), {bound}, emu_arguments); return; }}",
        )

    def _template_of(self, index: int) -> str:
        """Return the arguments ``<T, n>`` of the template around a token, or an empty text."""
        at = index - 1
        while at >= 0 and self.words[at] not in (";", "{", "}", ">"):
            at = self.opening.get(at, at) - 1
        if at < 0 or self.words[at] != ">":
            return ""
        first = matching_angle(self.tokens, at) - 1
        return template_arguments(list(self.tokens[first : at + 1]))

    def _shared(self, index: int) -> tuple[int, int, str]:
        """Replace a declaration of shared variables."""
        begin = index
        while self.words[begin - 1] in _BEFORE_SHARED or begin - 1 in self.attributes:
            begin -= 1
        end = index
        while self.words[end] != ";":
            end = self.brackets.get(end, end) + 1
        dynamic = "extern" in self.words[begin:end]
        aligned = re.search(
            r"(?:__align__|alignas|aligned)\s*\(((?:[^()]|\([^()]*\))*)\)",
            self._between(begin, end),
        )
        alignment = aligned[1] if aligned else "alignof({}_emu_t)"
        every = (at for at in range(begin, end) if at not in self.attributes)
        words = [at for at in every if self.words[at] not in _STORAGE]
        name = self._first_name(words)
        kind = self._between(words[0], words[name - 1] + 1)
        groups = self._declarators(words[name:])
        declared = [self._declared(kind, group, dynamic, alignment) for group in groups]
        if dynamic and self._is_outside(index):
            declared = [self._outside(kind, groups[0][0], alignment)]
        return self.tokens[begin].start, self.tokens[end].start, "; ".join(declared)

    def _first_name(self, words: Sequence[int]) -> int:
        """The place in `words` of the first variable's name: before the first bracket, comma or end outside of ``<>``."""
        angles = 0
        for place, at in enumerate(words):
            text = self.words[at]
            angles += (text == "<") - (text == ">")
            if place and angles == 0 and text in ("[", ","):
                return place - 1
        return len(words) - 1

    def _declarators(self, words: Sequence[int]) -> list[tuple[str, str]]:
        """Each variable's name and dimensions."""
        ranges = split_at_commas(self.tokens, self.brackets, words[0], words[-1] + 1)
        return [(self.words[first], self._between(first + 1, last)) for first, last in ranges]

    def _declared(self, kind: str, group: tuple[str, str], dynamic: bool, alignment: str) -> str:
        name, dimensions = group
        alignment = alignment.format(name)
        if dynamic:
            inner = dimensions[dimensions.find("]") + 1 :]
            pointer = f"{name}_emu_t *"
            return (
                f"typedef {kind} {name}_emu_t{inner}; "
                f'{pointer}{name} = ({pointer})emu_dynamic_shared("{name}", {alignment})'
            )
        return (
            f"typedef {kind} {name}_emu_t{dimensions}; static const emu_variable {name}_emu_v = "
            f'{{"{name}", EMU_HERE, sizeof({name}_emu_t), {alignment}}}; '
            f"{name}_emu_t &{name} = *({name}_emu_t *)emu_shared(&{name}_emu_v)"
        )

    def _outside(self, kind: str, name: str, alignment: str) -> str:
        """An array of dynamic shared memory that is declared outside of functions."""
        get = f'({name}_emu_t *)emu_dynamic_shared("{name}", {alignment.format(name)})'
        return (
            f"typedef {kind} {name}_emu_t; static struct {{ "
            f"operator {name}_emu_t *() const {{ return {get}; }} "
            f"template <typename emu_i> {name}_emu_t &operator[](emu_i i) const {{ return ({get})[i]; }} "
            f"}} {name}"
        )

    def _is_outside(self, index: int) -> bool:
        """Return whether a token is outside of functions: at most in the braces of namespaces."""
        return all(
            re.search(r"\b(namespace|extern)\b[^(){};]*$", self.text[: self.tokens[start].start])
            for start, end in self.brackets.items()
            if start < index < end
        )

    def _asm(self, index: int) -> tuple[int, int, str]:
        """Replace inline PTX by C++, or by an error that the compiler raises if it keeps the line."""
        at = self.words.index("(", index)
        close = self.brackets[at]
        inner = at + 1
        strings = []
        while self.tokens[inner].kind == "string":
            strings.append(self.words[inner][1:-1])
            inner += 1
        ptx = re.sub(r"(\s|\\[nt])+", " ", "".join(strings)).strip("; ")
        operands = [
            f"({self._between(start + 1, end)})"
            for start, end in sorted(self.brackets.items())
            if inner < start < close and self.tokens[start - 1].kind == "string"
        ]
        for pattern, code in _PTX:
            if re.fullmatch(pattern, ptx):
                return (
                    self.tokens[index].start,
                    self.tokens[close].end,
                    code.format(*operands, ptx=ptx),
                )
        said = re.sub(r'[\\"]', "", ptx.partition(";")[0])
        error = f'_Pragma("GCC error \\"inline PTX is not emulated: {said}\\"")'
        return self.tokens[index].start, self.tokens[close].end, error
