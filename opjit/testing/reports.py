"""What a sanitizer writes to stderr, as one line that begins with the author's place."""

from __future__ import annotations

import re
from pathlib import Path

_ASAN = re.compile(r"ERROR: \w+Sanitizer: (?:attempting )?(?P<kind>[\w-]+)")
_ACCESS = re.compile(r"^(?P<what>(?:READ|WRITE) of size \d+)| caused by a (?P<signal>READ|WRITE) memory", re.MULTILINE)
_REGION = re.compile(r"is located (?P<place>\d+ bytes (?:after|before|inside of|to the (?:right|left) of)) (?P<region>\d+-byte region)")
_UBSAN = re.compile(r"^(?P<file>[^\s:]+):(?P<line>\d+):\d+: runtime error: (?P<what>.*)$", re.MULTILINE)


def find(text: str, folder: Path) -> str | None:
    """The error that a report tells of, such as ``scale.c:12: heap-buffer-overflow, WRITE of size 4, 0 bytes after a 20-byte region``.
    None if there is no report. The place is the innermost one in the op's folder."""
    undefined, address = _UBSAN.search(text), _ASAN.search(text)
    if undefined and (address is None or undefined.start() < address.start()):
        return f"{undefined['file'].removeprefix(f'{folder}/')}:{undefined['line']}: {undefined['what']}"
    if address is None:
        return None
    access, region, place = _ACCESS.search(text), _REGION.search(text), author_line(text, folder)
    parts = [address["kind"] if address["kind"] != "ABRT" else "abort"]
    if access:
        parts.append(access["what"] or access["signal"])
    if region:
        parts.append(f"{region['place']} a {region['region']}")
    return f"{f'{place}: ' if place else ''}{', '.join(parts)}"


def race(text: str, folder: Path) -> str | None:
    """The first data race of ThreadSanitizer's reports between two places in the op's folder."""
    for block in text.split("WARNING: ThreadSanitizer: data race")[1:]:
        accesses = re.split(r"^  (?=(?:Previous )?(?:atomic )?(?:[Ww]rite|[Rr]ead) of size)", block, flags=re.MULTILINE)[1:3]
        places = [author_line(access, folder) for access in accesses]
        if len(places) == 2 and all(places):
            return f"{places[0]}: data race, {accesses[0].split(' at ')[0].lower()}, with {places[1]} in another thread"
    return None


def leak(text: str, folder: Path) -> str | None:
    """The first leak of LeakSanitizer's report that the op's folder allocated."""
    for block in re.split(r"^(?=(?:Direct|Indirect) leak of)", text, flags=re.MULTILINE)[1:]:
        place = author_line(block, folder)
        if place:
            return f"{place}: {block.splitlines()[0].removesuffix(' allocated from:').lower()}"
    return None


def author_line(text: str, folder: Path) -> str | None:
    """The innermost place of a stack trace that is in the op's folder, such as ``scale.c:12``."""
    place = re.search(rf"^ *#\d+ .*?{re.escape(str(folder))}/([^\s:]+):(\d+)", text, re.MULTILINE)
    return f"{place[1]}:{place[2]}" if place else None
