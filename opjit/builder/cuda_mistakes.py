"""Mistakes in an op's .cu file that compile, and that only a GPU, or a busy one, would show: warnings at the author's lines."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from opjit.builder.compile_warnings import CompilerWarning
from opjit.builder.tokens import (
    Malformed,
    Token,
    code_of,
    launch_end,
    match_brackets,
    split_at_commas,
    tokenize,
)

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
    """Return warnings about a file; none for text that opjit cannot divide into tokens."""
    try:
        text = path.read_text("utf-8", "replace")
        tokens = [token for token in tokenize(text) if token.kind not in ("directive", "string")]
        brackets = match_brackets(tokens)
        launches = list(_launches(tokens, brackets))
    except (OSError, Malformed):
        return []
    code = code_of(text, tokens)
    found = [
        *launches,
        *_returns(code, tokens, brackets),
        *_host_accesses(code),
        *_unbounded(code, tokens, brackets),
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
    return [
        CompilerWarning(str(path), text.count("\n", 0, start) + 1, message)
        for start, message in sorted(found)
    ]


def _launches(tokens: Sequence[Token], brackets: Mapping[int, int]) -> Iterator[tuple[int, str]]:
    """Yield the launches with too many threads in a block, or with fewer than four values between their angle brackets."""
    for begin, token in enumerate(tokens):
        if token.text != "<<<":
            continue
        end = launch_end(tokens, brackets, begin)
        values = split_at_commas(tokens, brackets, begin + 1, end)
        block = "".join(
            tokens[index].text for start, stop in values[1:2] for index in range(start, stop)
        )
        threads = _threads(block)
        if threads > _MOST_THREADS:
            yield token.start, _TOO_MANY_THREADS.format(threads=threads)
        streams = [tokens[index].text for start, stop in values[3:] for index in range(start, stop)]
        if streams in ([], ["0"]):
            yield token.start, _NO_STREAM


def _returns(
    code: str, tokens: Sequence[Token], closing: Mapping[int, int]
) -> Iterator[tuple[int, str]]:
    """Yield each ``return OPJIT_OK`` that follows a launch in its function, without a check between them."""
    last = 0
    for begin in sorted(closing):
        if tokens[begin].text == "{" and tokens[begin - 1].text == ")" and begin >= last:
            last = closing[begin]
            launched = False
            for match in _LAUNCH_OR_CHECK.finditer(code, tokens[begin].start, tokens[last].end):
                if launched and match["at"]:
                    yield match.start(), _UNCHECKED
                launched = bool(match["launch"] or (launched and match["at"]))


def _threads(block: str) -> int:
    """Return the threads of a block of literal sizes, ``512`` or ``dim3(16,16)``; 0 for another one."""
    sizes = block.removeprefix("dim3(").removesuffix(")").split(",")
    if not all(size.isdecimal() for size in sizes):
        return 0
    return math.prod(map(int, sizes))


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


def _unbounded(
    code: str, tokens: Sequence[Token], brackets: Mapping[int, int]
) -> Iterator[tuple[int, str]]:
    """Yield the flat indices of kernels that compare nothing."""
    for begin, token in enumerate(tokens):
        if token.text != "__global__":
            continue
        opening = next((i for i in range(begin, len(tokens)) if tokens[i].text in "{;"), None)
        if opening is None or opening not in brackets:
            continue
        body = code[tokens[opening].start : tokens[brackets[opening]].end]
        index = re.search(r"\bblockIdx\.x\s*\*\s*blockDim\.x\s*\+\s*threadIdx\.x\b", body)
        if index and not re.search(_BOUND, body):
            yield tokens[opening].start + index.start(), _UNBOUNDED
