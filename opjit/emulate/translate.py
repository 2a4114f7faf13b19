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

from opjit.builder.cuda_reader import CudaReader, Edit, Kernel, edited
from opjit.builder.tokens import tokenize

_ALIGNING = {"alignas", "__align__", "__attribute__"}  # before parentheses
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

    Raises NvccOnly for a text that opjit cannot read.
    """
    translated = edited(text, _Translator(text).edits())
    return f"#line 1 {json.dumps(path, ensure_ascii=False)}\n{translated}"


def synchronization(text: str) -> list[int]:
    """Return the lines of the calls of barriers and atomics in a text, outside of macros."""
    return [
        text.count("\n", 0, token.start) + 1
        for token, after in pairwise(tokenize(text))
        if after.text == "("
        and re.fullmatch(r"__syncthreads\w*|__syncwarp|sync|atomic[A-Z]\w*", token.text)
    ]


class _Translator(CudaReader):
    """One file, and the edits that translate it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.attributes = set[int]()  # places of attributes of shared variables
        for begin, end in self.closing.items():
            if self.words[begin - 1] in _ALIGNING:
                self.attributes.update(range(begin - 1, end + 1))

    def edits(self) -> Iterator[Edit]:
        for directive in self.every:
            if directive.kind == "directive" and re.search("<<<|__global__", directive.text):
                start = self.text.index("#", directive.start) + 1
                for first, last, new in _Translator(self.text[start : directive.end]).edits():
                    yield start + first, start + last, new
        yield from self._launches()
        for kernel in self.kernels():
            yield self._kernel(kernel)
        for at, word in enumerate(self.words):
            if word == "__shared__":
                yield self._shared(at)
            elif word in _ASM:
                yield self._asm(at)
            elif word == "__noinline__" and self.words[at - 1] != "(":
                yield (self.tokens[at].start, self.tokens[at].end, "__attribute__((noinline))")

    def _launches(self) -> Iterator[Edit]:
        """Note the configuration before a call of a kernel, and after it that the kernel has used it."""
        for begin, end in self.launches():
            first = self.tokens[self.callee(begin)].start
            last = self.tokens[self.closing[end + 3]].end
            configuration = self.code(begin + 1, end)
            yield first, first, f"(emu_configured(EMU_HERE, {configuration}), "
            yield self.tokens[begin].start, self.tokens[end + 2].end, ""
            yield last, last, ", emu_launched())"

    def _kernel(self, kernel: Kernel) -> Edit:
        """Begin a kernel's body with a launch, for calls by the host."""
        bound = "0"
        if "__launch_bounds__" in self.words[kernel.begin : kernel.name]:
            at = self.words.index("__launch_bounds__", kernel.begin) + 1
            bound = self.code(*next(self.groups(at + 1, self.closing[at])))
        addresses, pointer = self.own_call(kernel)
        start = self.tokens[kernel.body].end
        return (
            start,
            start,
            f" if (!emu_is_thread()) {{ void *emu_arguments[] = {addresses}; "
            f"emu_launch_as<{pointer}>"
            f"(EMU_TEXT({self.words[kernel.name]}), {bound}, emu_arguments); return; }}",
        )

    def _shared(self, index: int) -> Edit:
        """Replace a declaration of shared variables."""
        begin = index
        while self.words[begin - 1] in _BEFORE_SHARED or begin - 1 in self.attributes:
            begin -= 1
        end = self.find(index, len(self.words), ";")
        dynamic = "extern" in self.words[begin:end]
        aligned = re.search(
            r"(?:__align__|alignas|aligned)\s*\(((?:[^()]|\([^()]*\))*)\)",
            self.code(begin, end),
        )
        alignment = aligned[1] if aligned else "alignof({}_emu_t)"
        every = (at for at in range(begin, end) if at not in self.attributes)
        words = [at for at in every if self.words[at] not in _STORAGE]
        name = self._first_name(words)
        kind = self.code(words[0], words[name - 1] + 1)
        groups = [
            (self.words[first], self.code(first + 1, last))
            for first, last in self.groups(words[name], end)
        ]
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
            for start, end in self.closing.items()
            if start < index < end
        )

    def _asm(self, index: int) -> Edit:
        """Replace inline PTX by C++, or by an error that the compiler raises if it keeps the line."""
        at = self.words.index("(", index)
        close = self.closing[at]
        inner = at + 1
        strings = []
        while self.tokens[inner].kind == "string":
            strings.append(self.words[inner][1:-1])
            inner += 1
        ptx = re.sub(r"(\s|\\[nt])+", " ", "".join(strings)).strip("; ")
        operands = [
            f"({self.code(start + 1, end)})"
            for start, end in sorted(self.closing.items())
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
