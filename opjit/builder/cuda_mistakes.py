"""Mistakes in an op's .cu file that compile, and that only a GPU, or a busy one, would show: warnings at the author's lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from opjit.builder.compile_warnings import Found
from opjit.builder.tokens import (
    Malformed,
    Token,
    launch_end,
    match_brackets,
    split_at_commas,
    tokenize,
)

_NO_STREAM = (
    "the launch names no stream, so it runs on CUDA's default one, beside torch's work; pass the op's: "
    "kernel<<<blocks, threads, 0, stream>>>(…)"
)
_UNCHECKED = (
    "nothing between the launch and this return asks whether CUDA took it; return OPJIT_LAUNCHED()"
)
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
# Each is at the group `at` of what its pattern finds in the code without comments, strings and directives.
_MISTAKES = [
    (re.compile(r"\b(?P<at>cudaDeviceSynchronize)\b"), _SYNCHRONISES),
    (re.compile(r"\b__global__\b[^{;]*\b(?P<at>opjit_tensor)\s*(?:const\s*)?\*"), _HOST_POINTER),
]
_CAST = re.compile(
    r"[(<]\s*(?:const\s+)?(?P<at>(?:u?(?:char|short|int|long|longlong)|float|double)[24])\s*(?:const\s*)?\*\s*[)>]"
    r"[^\w;]*(?P<of>\w+)"
)
_ALIGNS = re.compile(r"(?i)align|uintptr_t|opjit_packs?\b|__shared__")
_LAUNCH_OR_CHECK = re.compile(
    r"(?P<launch><<<)|(?P<at>\breturn\s+OPJIT_OK\b)|(?i:LAUNCH|CHECK|LastError|Synchronize)"
)


def find(path: Path) -> list[Found]:
    """Return warnings about a file; none for text that opjit cannot divide into tokens."""
    try:
        text = path.read_text("utf-8", "replace")
        tokens = [token for token in tokenize(text) if token.kind not in ("directive", "string")]
        brackets = match_brackets(tokens)
        launches = list(_launches(tokens, brackets))
    except (OSError, Malformed):
        return []
    letters = [" "] * len(text)
    for token in tokens:
        letters[token.start : token.end] = token.text
    code = "".join(letters)
    found = [*launches, *_returns(code, tokens, brackets)]
    found += [
        (match.start("at"), advice)
        for pattern, advice in _MISTAKES
        for match in pattern.finditer(code)
    ]
    if not _ALIGNS.search(
        code
    ):  # nor is a cast of the author's own array, whose alignment is known
        found += [
            (match.start("at"), match.expand(_UNALIGNED))
            for match in _CAST.finditer(code)
            if not re.search(rf"\b(?!return\b|else\b)\w+\s+{match['of']}\s*\[", code)
        ]
    return [
        Found(str(path), text.count("\n", 0, start) + 1, message)
        for start, message in sorted(found)
    ]


def _launches(tokens: Sequence[Token], brackets: Mapping[int, int]) -> Iterator[tuple[int, str]]:
    """Yield the launches with fewer than four values between their angle brackets."""
    for begin, token in enumerate(tokens):
        if token.text != "<<<":
            continue
        end = launch_end(tokens, brackets, begin)
        values = split_at_commas(tokens, brackets, begin + 1, end)
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
