"""Mistakes in an op's .cu file that compile, and that only a GPU, or a busy one, would show: warnings at the author's lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from opjit.builder.compile_step import NvccOnly
from opjit.builder.compile_warnings import Found
from opjit.builder.tokens import Token, matched, tokens_of

_NO_STREAM = ("the launch names no stream, so it runs on CUDA's default one, beside torch's work; pass the op's: "
              "kernel<<<blocks, threads, 0, stream>>>(…)")
_HOST_POINTER = ("a kernel cannot read opjit_tensor *, which points to the host's memory; pass x->data, x->numel and, for strides, "
                 "opjit_layout_of(x)")
_UNCHECKED = "nothing between the launch and this return asks whether CUDA took it; return OPJIT_LAUNCHED()"
_SYNCHRONISES = ("cudaDeviceSynchronize stops the host until all streams are done, and is an error in a CUDA graph; "
                 "work on the op's stream is in order without it")
_UNALIGNED = ("{vector} * wants an address that is a multiple of {bytes} bytes, and a tensor may start at any element: x[1:]; "
              "check it first: opjit_is_aligned(x->data, {bytes}), of opjit_pack.h")
_VECTOR = re.compile(r"(?P<type>u?char|u?short|u?int|u?long|u?longlong|float|double)(?P<width>[24])")
_SIZES = {"char": 1, "short": 2, "int": 4, "float": 4}
_CHECKED = re.compile(r"LAUNCH|CHECK|LastError|Synchronize", re.IGNORECASE)
_ALIGNS = re.compile(r"align|uintptr_t|opjit_packs?\b|__shared__", re.IGNORECASE)
_NO_TYPES = {"return", "else", "case", "goto", "sizeof", "delete", "new"}


def find(path: Path) -> list[Found]:
    """Return warnings about a file; none for text that opjit cannot divide into tokens."""
    try:
        text = path.read_text("utf-8", "replace")
        tokens = [token for token in tokens_of(text) if token.kind != "directive"]
        closing = matched(tokens)
    except (OSError, NvccOnly):
        return []
    found = [*_launches(tokens, closing), *_pointers(tokens, closing), *_returns(tokens, closing), *_casts(tokens)]
    found += [(token.start, _SYNCHRONISES) for token in tokens if token.text == "cudaDeviceSynchronize"]
    return [Found(str(path), text.count("\n", 0, start) + 1, message) for start, message in sorted(found)]


def _launches(tokens: list[Token], closing: dict[int, int]) -> Iterator[tuple[int, str]]:
    """Yield the launches with fewer than four values between their angle brackets."""
    for index, token in enumerate(tokens):
        if token.text == "<<<":
            at, values = index + 1, [list[str]()]
            while at + 2 < len(tokens) and [each.text for each in tokens[at:at + 3]] != [">", ">", ">"]:
                if tokens[at].text == ",":
                    values.append([])
                else:
                    values[-1].append(tokens[at].text)
                at = closing.get(at, at) + 1
            if len(values) < 4 or values[3] == ["0"]:
                yield token.start, _NO_STREAM


def _pointers(tokens: list[Token], closing: dict[int, int]) -> Iterator[tuple[int, str]]:
    """Yield the parameters of kernels that are pointers to tensors."""
    for index, token in enumerate(tokens):
        if token.text == "__global__":
            opens = (at for at in range(index, len(tokens)) if tokens[at].text == "(" and tokens[at - 1].text != "__launch_bounds__")
            begin = next(opens, index)
            for at in range(begin, closing.get(begin, begin)):
                if tokens[at].text == "opjit_tensor" and tokens[at + 1].text in ("*", "const"):
                    yield tokens[at].start, _HOST_POINTER


def _returns(tokens: list[Token], closing: dict[int, int]) -> Iterator[tuple[int, str]]:
    """Yield each ``return OPJIT_OK`` that follows a launch in its function, without a check between them."""
    at = 0
    while at < len(tokens):
        if tokens[at].text == "{" and tokens[at - 1].text == ")":
            launched = False
            for before, token in zip(tokens[at:closing[at]], tokens[at + 1:closing[at]], strict=False):
                launched = (launched or token.text == "<<<") and not (token.kind == "name" and _CHECKED.search(token.text))
                if launched and f"{before.text} {token.text}" == "return OPJIT_OK":
                    yield before.start, _UNCHECKED
            at = closing[at]
        at += 1


def _casts(tokens: list[Token]) -> Iterator[tuple[int, str]]:
    """Yield the casts to pointers to CUDA's vectors, if nothing in the file looks like a check of alignment."""
    if any(token.kind == "name" and _ALIGNS.search(token.text) for token in tokens):
        return
    arrays = {tokens[at].text for at in range(1, len(tokens) - 1) if tokens[at].kind == tokens[at - 1].kind == "name"
              and tokens[at + 1].text == "[" and tokens[at - 1].text not in _NO_TYPES}  # the author's own, whose alignment is known
    for index, token in enumerate(tokens[:-3]):
        match = _VECTOR.fullmatch(token.text)
        after = [each.text for each in tokens[index + 1:index + 6]]
        begins = [each.text for each in tokens[max(0, index - 2):index]]
        if match and after[:2] in (["*", ")"], ["*", ">"]) and ({"(", "<"} & set(begins)):
            operand = next((each.text for each in tokens[index + 3:index + 6] if each.kind == "name"), "")
            if operand not in arrays:
                size = _SIZES.get(match["type"].removeprefix("u"), 8) * int(match["width"])
                yield token.start, _UNALIGNED.format(vector=token.text, bytes=min(size, 16))
