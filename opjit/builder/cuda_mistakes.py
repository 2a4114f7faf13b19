"""Mistakes in an op's .cu file that compile, and that only a GPU, or a busy one, would show: warnings at the author's lines."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

from opjit.builder.compile_warnings import CompilerWarning
from opjit.builder.cuda_reader import CudaReader
from opjit.builder.tokens import code_of
from opjit.recipe.nvcc_flags import NvccOnly

_NO_STREAM = (
    "the launch lacks a stream, so it runs on CUDA's default stream and is not ordered with "
    "torch's work; pass the op's stream: "
    "kernel<<<blocks, threads, 0, stream>>>(…)"
)
_UNCHECKED = "the result of the launch is not checked before this return; return OPJIT_LAUNCHED()"
_SYNCHRONISES = (
    "cudaDeviceSynchronize stops the host until all streams are done, and is an error in a CUDA graph; "
    "work on the op's stream is in order without it"
)
_HOST_POINTER = (
    "a kernel cannot read opjit_tensor *, which points to the host's memory; pass x->data, x->numel and, for strides, "
    "opjit_layout_of(x)"
)
_UNALIGNED = (
    r"\g<at> * wants an address that is a multiple of its size, up to 16 bytes, and a tensor may start at any element: x[1:]; "
    "check it first: opjit_is_aligned of opjit_pack.h"
)
_TOO_MANY_THREADS = "a block has at most 1024 threads, so this launch of {threads} fails; use fewer threads and more blocks"
_ALLOCATES = (
    "cudaMalloc waits for the device, is an error in a CUDA graph, and bypasses torch's allocator; use OPJIT_SCRATCH for "
    "memory that lasts until the call ends"
)
_COPIES = (
    r"\g<at> stops the host, and does not run on the op's stream; use \g<at>Async(..., stream)"
)
_HOST_ACCESS = (
    "`{name}->data` is memory of the GPU, which host code cannot read or write; do it in a kernel, or copy with "
    "cudaMemcpyAsync"
)
_UNBOUNDED = (
    "nothing compares the index with a size, but the last block usually has threads beyond the last element; use "
    "OPJIT_KERNEL_LOOP(i, n), or return if i >= n"
)
_MOST_THREADS = 1024
# Each is at the group `at` of what its pattern finds in the code without comments, strings and directives.
_MISTAKES = [
    (r"\b(?P<at>cudaDeviceSynchronize)\b", _SYNCHRONISES),
    (r"\b__global__\b[^{;]*\b(?P<at>opjit_tensor)\s*(?:const\s*)?\*", _HOST_POINTER),
    (r"\b(?P<at>cudaMalloc)\s*\(", _ALLOCATES),
    (r"\b(?P<at>cudaMemcpy|cudaMemset)\s*\(", _COPIES),
]
_BOUND = r"[<>?%]|\b(?:if|for|while|min|max|switch)\b|\b[A-Z][A-Z0-9_]+\s*\("
_CAST = (
    r"[(<]\s*(?:const\s+)?(?P<at>(?:u?(?:char|short|int|long|longlong)|float|double)[24])\s*(?:const\s*)?\*\s*[)>]"
    r"[^\w;]*(?P<of>\w+)"
)
_LAUNCH_OR_CHECK = re.compile(
    r"(?P<launch><<<)|(?P<at>\breturn\s+OPJIT_OK\b)|(?i:LAUNCH|CHECK|LastError|Synchronize)"
)


def find_mistakes(path: Path) -> list[CompilerWarning]:
    """Return warnings about a file; none for text that opjit cannot read."""
    try:
        text = path.read_text("utf-8", "replace")
        found = sorted(_mistakes(text))
    except (OSError, NvccOnly):
        return []
    return [
        CompilerWarning(str(path), text.count("\n", 0, start) + 1, message)
        for start, message in found
    ]


def _mistakes(text: str) -> list[tuple[int, str]]:
    """Return the place of each mistake in a text, and the advice."""
    reader = CudaReader(text)
    code = code_of(text, "string", "directive")
    found = [
        *_launches(reader),
        *_returns(code, reader),
        *_host_accesses(code),
        *_unbounded(code, reader),
    ]
    found += [
        (match.start("at"), match.expand(advice))
        for pattern, advice in _MISTAKES
        for match in re.finditer(pattern, code)
    ]
    if not re.search(
        r"(?i)align|uintptr_t|opjit_packs?\b|__shared__", code
    ):  # and neither is a cast of an array in the author's code, because its alignment is known
        found += [
            (match.start("at"), match.expand(_UNALIGNED))
            for match in re.finditer(_CAST, code)
            if not re.search(rf"\b(?!return\b|else\b)\w+\s+{match['of']}\s*\[", code)
        ]
    return found


def _launches(reader: CudaReader) -> Iterator[tuple[int, str]]:
    """Yield the launches with too many threads in a block, or with fewer than four values between their angle brackets."""
    for begin, end in reader.launches():
        start = reader.tokens[begin].start
        values = [reader.code(*group) for group in reader.groups(begin + 1, end)]
        literal = re.fullmatch(r"(?:dim3)?([\d\s,()]+)", "".join(values[1:2]))
        if literal:
            threads = math.prod(map(int, re.findall(r"\d+", literal[1])))
            if threads > _MOST_THREADS:
                yield start, _TOO_MANY_THREADS.format(threads=threads)
        if values[3:] in ([], ["0"]):
            yield start, _NO_STREAM


def _returns(code: str, reader: CudaReader) -> Iterator[tuple[int, str]]:
    """Yield each ``return OPJIT_OK`` that follows a launch in its function, without a check between them."""
    last = 0
    for begin in sorted(reader.closing):
        if reader.words[begin - 1 : begin + 1] == [")", "{"] and begin >= last:
            last = reader.closing[begin]
            launched = False
            body = reader.tokens[begin].start, reader.tokens[last].end
            for match in _LAUNCH_OR_CHECK.finditer(code, *body):
                if launched and match["at"]:
                    yield match.start(), _UNCHECKED
                launched = bool(match["launch"] or (launched and match["at"]))


def _host_accesses(code: str) -> Iterator[tuple[int, str]]:
    """Yield reads and writes of a tensor's elements in host code. Only host code can have an opjit_tensor."""
    for name in sorted({*re.findall(r"\bopjit_tensor\s*\*\s*(?:const\s+)?(\w+)", code)}):
        data = rf"{name}\s*->\s*data\b"
        pointer = r"(?:const\s+)?\w+\s*\*\s*"
        for pattern in (
            rf"\(\s*\(\s*{pointer}\)\s*{data}\s*\)\s*\[",
            rf"\w+_cast<\s*{pointer}>\s*\(\s*{data}\s*\)\s*\[",
            rf"(?<=[;{{}}=(,])\s*\*\s*\(\s*{pointer}\)\s*{data}(?!\s*[+\[])",
            rf"\bmem(?:cpy|set|move)\s*\([^;]*?\b{data}",
        ):
            for match in re.finditer(pattern, code):
                before = code[: match.start()].rstrip()
                takes_address = before.endswith("&") and not before.endswith("&&")
                if not takes_address:
                    start = match.end() - len(match[0].lstrip())
                    yield start, _HOST_ACCESS.format(name=name)


def _unbounded(code: str, reader: CudaReader) -> Iterator[tuple[int, str]]:
    """Yield the flat indices of kernels that compare nothing."""
    for kernel in reader.kernels():
        start = reader.tokens[kernel.body].start
        body = code[start : reader.tokens[reader.closing[kernel.body]].end]
        index = re.search(r"\bblockIdx\.x\s*\*\s*blockDim\.x\s*\+\s*threadIdx\.x\b", body)
        if index and not re.search(_BOUND, body):
            yield start + index.start(), _UNBOUNDED
