"""CUDA C as C++ for the emulation of kernels_c/emulate, with every line at its number.

kernel<<<grid, block>>>(x)          (emu_configured(place, grid, block), kernel(x), emu_launched())
__global__ void kernel(T *x) {      the same, and first: if the host calls, launch this function
__shared__ float tile[32];          a reference into the block's memory
asm("ld.acquire..." : ...)          a function, for the forms in `_PTX`
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from opjit import resources
from opjit.builder.cuda_reader import CudaReader, Edit, KernelDefinition, edited
from opjit.builder.tokens import tokenize
from opjit.recipe.nvcc_flags import NvccOnly

_NO_SIZE = r"\[\s*\]"  # of an array of dynamic shared memory
_ASM = {"asm", "__asm__", "__asm"}
# Features that are not emulated, by words of an #include or of g++'s first error.
_NOT_EMULATED = r"""
mma\.h|wmma|nvcuda|mma_sync: tensor cores are not emulated, except by the functions of opjit_mma.h
pipeline|memcpy_async|barrier\.h|cuda/: asynchronous copies and libcu++ are not emulated
cub/|cub::|thrust: CUB and Thrust are not emulated
tex[123]D|cudaTexture|'texture'|cudaSurface|surf[123]D: textures are not emulated
cluster_dims|this_cluster|cluster_group: clusters of blocks are not emulated, except those of opjit_launch_cluster()
cudaGraph|cudaStreamBeginCapture: CUDA graphs are not emulated
cublas|cudnn|cufft|curand|cusparse|cusolver|nccl: NVIDIA's libraries are not emulated
inline PTX: its instructions are not emulated
'(cuda[A-Z]|cu[A-Z]|__)\w+' (was|has|does) not [^;]*$: this name of CUDA is not emulated
"""
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


def device_folder() -> Path:
    return resources.folder("kernels_c") / "emulate"


def missing_feature(text: str) -> str | None:
    """Return the sentence about a feature that is not emulated, if a text names one."""
    for row in _NOT_EMULATED.strip().splitlines():
        pattern, _, sentence = row.rpartition(": ")
        if re.search(pattern, text):
            return sentence
    return None


class TranslatedFiles:
    """Files of a program, for one folder: its sources, and the headers that they include from the program.

    Attributes:
        texts: their texts by their names in the folder, not yet translated. #include lines have these names, or the emulation's headers.
        paths: the files by these names.
        missing: the lines that include headers of features that are not emulated.
    """

    def __init__(self, include: Sequence[str]) -> None:
        self.include = include
        self.texts = dict[str, str]()
        self.paths = dict[str, Path]()
        self.missing = list[str]()

    def add(self, path: Path) -> str:
        """Add a file, and return its name in the folder."""
        path = path.resolve()
        for name, known in self.paths.items():
            if known == path:
                return name
        name = path.name
        if name in self.paths:
            name = f"{len(self.paths)}.{name}"
        self.paths[name] = path
        text = path.read_text("utf-8", "surrogateescape")
        self.texts[name] = self.linked(text, name, path.parent)
        return name

    def linked(self, text: str, name: str, *near: Path) -> str:
        """Add the headers that a text includes. Returns it with other #include lines. `near` has the folder in which a name in quotes is
        searched first."""

        def header(found: re.Match[str]) -> str:
            wanted = found[2]
            if re.fullmatch(r"(ATen|c10)/cuda/\w+\.(h|cuh)", wanted):
                return '#include "torch_cuda.h"'
            if (device_folder() / "cuda" / wanted).is_file():
                return f'#include "cuda/{wanted}"'
            missing = missing_feature(wanted)
            if missing:
                line = text.count("\n", 0, found.start()) + 1
                self.missing.append(f"{name}:{line}: {missing}")
            places = [Path(folder, wanted) for folder in self.include]
            if found[1] == '"':
                places = [*(folder / wanted for folder in near), *places]
            local = next(filter(Path.is_file, places), None)
            return f'#include "{self.add(local)}"' if local else found[0]

        return re.sub(r'#[ \t]*include[ \t]*([<"])([\w./+-]+)[>"]', header, text)

    def translated(self) -> dict[str, str]:
        """Return the translated texts. Raises NvccOnly for a text that opjit cannot read."""
        texts = dict[str, str]()
        for name, text in self.texts.items():
            try:
                texts[name] = translate(text)
            except NvccOnly as reason:
                raise NvccOnly(f"{name}: {reason}") from None
        return texts


def translate(text: str) -> str:
    """Translate the text of a CUDA file or header. Raises NvccOnly for a text that opjit cannot read."""
    return edited(text, _Translator(text).edits())


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

    def edits(self) -> Iterator[Edit]:
        for directive in self.every:
            if directive.kind == "directive" and re.search("<<<|__global__", directive.text):
                start = self.text.index("#", directive.start) + 1
                for first, last, new in _Translator(self.text[start : directive.end]).edits():
                    yield start + first, start + last, new
        yield from self.launch_edits("(emu_configured(EMU_HERE, {}), ", ", emu_launched())")
        for kernel in self.kernels():
            yield self._kernel(kernel)
        for at, word in enumerate(self.words):
            if word == "__shared__":
                yield self._shared(at)
            elif word in _ASM:
                yield self._asm(at)
            elif word == "__noinline__" and self.words[at - 1] != "(":
                yield (self.tokens[at].start, self.tokens[at].end, "__attribute__((noinline))")

    def _kernel(self, kernel: KernelDefinition) -> Edit:
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
        """Replace a declaration of shared variables. A type has them as members, for their sizes and alignment."""
        begin = self.last(index, ";", "{", "}", ":") + 1
        end = self.find(index, len(self.words), ";")
        members = re.sub(r"\b(extern|static|__shared__)\b", "", self.code(begin, end))
        names = self.declared_names(index + 1, end)
        of = f"{names[0]}_emu_t"
        declared = [f"struct {of} {{ {re.sub(_NO_SIZE, '[1]', members)}; }}"]
        for name in names:
            if "extern" not in self.words[begin:end]:
                declared += [
                    f'static const emu_variable {name}_emu_v = {{"{name}", EMU_HERE, sizeof({of}::{name}), alignof({of})}}',
                    f"auto &{name} = *(decltype({of}::{name}) *)emu_shared(&{name}_emu_v)",
                ]
            elif self._is_outside(index):
                declared.append(
                    f'static const emu_dynamic<decltype({of}::{name})> {name} = {{"{name}", alignof({of})}}'
                )
            else:
                declared.append(
                    f'auto {name} = emu_dynamic<decltype({of}::{name})>{{"{name}", alignof({of})}}.begin()'
                )
        return self.tokens[begin].start, self.tokens[end].start, "; ".join(declared)

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
