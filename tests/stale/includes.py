"""Draws a graph of headers: who includes whom, in which spelling, and which directories have which copies."""

import os
from dataclasses import dataclass

from tests.stale.case import Link
from tests.stale.draft import KINDS_OF_SEARCH, Draft, Search

# Not for <...>, or not in every kind of build.
NARROW = (
    "-iquote",
    "CPATH",
    "LANGUAGE_INCLUDE_PATH",
)


@dataclass
class Header:
    """A header of the graph: its name as it is included, the macro of its number, and the headers that it includes."""

    name: str
    macro: str
    inner: list[str]
    once: str
    places: dict[str, int]  # the number of the copy in each directory


def _quoted(draft: Draft, name: str) -> str:
    return f'"{name}"' if draft.chance(0.6) else f"<{name}>"


def spelled(draft: Draft, name: str, macro: str, nested: bool) -> list[str]:
    """Lines that include a header. `macro` is part of the names of macros that they define."""
    target = _quoted(draft, name)
    rng = draft.rng
    bare = target.strip('<>"')
    plain = [f"#include {target}", f"#  include {target}  // as it is", f"\t#\tinclude\t{target}"]
    odd = [
        [f"#include/**/{target}"],
        [f"/* a */ # /* b */ include /* c */ {target}"],
        [f"#/*\n*/include {target}"],
        [f"%:include {target}"],
        [f"#include\f{target}"],
        [f"#include\v{target}"],
        [f"#incl\\\nude {target}"],
        [f"#include \\\n{target}"],
        [f"#import {target}"],
        [f"??=include {target}"],
        [f"#define H_{macro} {target}", f"#include H_{macro}"],
        [f"#define A_{macro}(x) <x>", f"#include A_{macro}({bare})"],
        [
            f"#define S_{macro}(x) #x",
            f"#define T_{macro}(x) S_{macro}(x)",
            f"#include T_{macro}({bare})",
        ],
        [
            f"#define P_{macro}(a, b) a##b",
            f"#define Q_{macro} {target}",
            f"#include P_{macro}(Q_, {macro})",
        ],
        [f"#include F_{macro}"],
        [f"#include G_{macro}(F_{macro})"],
        ["#if 1", f"#include {target}", "#endif"],
        ["#if 0", f'#include "nothing_{macro}.h"', "#else", f"#include {target}", "#endif"],
        [f"#ifndef NO_{macro}\r", f"#include {target}\r", "#endif\r"],
    ]
    if nested:
        odd.append([f"#include_next <{bare}>"])
        odd.append([f"#if __has_include_next(<{bare}>)", f"#include_next <{bare}>", "#endif"])
    lines = [rng.choice(plain)] if draft.chance(0.35) else rng.choice(odd)
    text = "\n".join(lines)
    if "??=" in text and "-trigraphs" not in draft.cflags:
        draft.cflags.append("-trigraphs")
    if f"G_{macro}" in text:
        draft.cflags.append(f"-DG_{macro}(x)=x")
    if f"F_{macro}" in text:
        draft.cflags.append(f"-DF_{macro}={target}")
    return lines


def asked(draft: Draft, name: str, macro: str) -> list[str]:
    """Lines that define a macro by whether a header is there."""
    target = _quoted(draft, name)
    yes = draft.number()
    no = draft.number()
    before: list[str] = []
    ways = [
        f"__has_include({target})",
        f"__has_include ( {target} )",
        f"__has_include(/**/{target})",
        f"__has_include(\\\n{target})",
        f"defined __has_include && __has_include({target})",
        f"!(!__has_include({target}))",
    ]
    if draft.chance(0.5):
        condition = draft.rng.choice(ways)
    else:
        way = draft.rng.randrange(5)
        condition = [
            f"HAVE_{macro}({target})",
            f"__has_include(N_{macro})",
            f"WRAP_{macro}",
            f"BY_{macro}",
            f"__has_include(D_{macro})",
        ][way]
        if way == 0:
            before = [f"#define HAVE_{macro}(x) __has_include(x)"]
        elif way == 1:
            before = [f"#define N_{macro} {target}"]
        elif way == 2:
            before = [f"#define WRAP_{macro} __has_include({target})"]
        elif way == 3:
            draft.cflags.append(f"-DBY_{macro}=__has_include({target})")
        else:
            draft.cflags.append(f"-DD_{macro}={target}")
    inner = [f"#include {target}"] if draft.chance(0.3) else []
    first = [f"#if {condition}"] if draft.chance(0.7) else ["#if 0", f"#elif {condition}"]
    return [
        *before,
        *first,
        *inner,
        f"#define {macro} {yes}",
        "#else",
        f"#define {macro} {no}",
        "#endif",
    ]


def _text(header: Header, number: int) -> str:
    define = f"#undef {header.macro}\n#define {header.macro} {number}"
    inner = "\n".join(header.inner)
    body = f"{inner}\n{define}" if inner else define
    if header.once == "pragma":
        return f"#pragma once\n{body}\n"
    if header.once == "guard":
        return f"#ifndef GUARD_{header.macro}\n#define GUARD_{header.macro}\n{body}\n#endif\n"
    return f"#ifndef INSIDE_{header.macro}\n#define INSIDE_{header.macro}\n{body}\n#undef INSIDE_{header.macro}\n#endif\n"


def _path(place: str, header: Header) -> str:
    return os.path.normpath(f"{place}/{header.name}")


def _directories(draft: Draft) -> list[str]:
    """Draw the list of directories. The first is found by quotes and angles in every kind of build."""
    count = draft.rng.randrange(2, 6)
    names = [f"d{number}" for number in range(count)]
    kinds = [draft.rng.choice(KINDS_OF_SEARCH) for _ in names]
    kinds[0] = draft.rng.choice([kind for kind in KINDS_OF_SEARCH if kind not in NARROW])
    if draft.kind == "op":
        kinds = ["include" for _ in names]
    if draft.kind.startswith("load"):  # it compiles in another folder
        kinds = ["-I" if kind == "-I relative" else kind for kind in kinds]
    searched = [Search(name, kind) for name, kind in zip(names, kinds, strict=True)]
    draft.rng.shuffle(searched)
    draft.searched += searched
    return names


def graph(draft: Draft) -> None:
    """Add a graph of headers and its edits."""
    names = _directories(draft)
    places = [*names, "."]
    headers: list[Header] = []
    for number in range(draft.rng.randrange(1, 5)):
        name = (
            draft.rng.choice(
                ["h%d.h", "h%d.h", "h%d.inc", "sub/h%d.h", "h-%d.hpp", "./h%d.h", "sub/../h%d.h"]
            )
            % number
        )
        once = draft.rng.choice(["pragma", "guard", "neither"])
        header = Header(name, f"H{number}", [], once, {"d0": draft.number()})
        for place in draft.rng.sample(places, draft.rng.randrange(0, 3)):
            header.places[place] = draft.number()
        headers.append(header)
        outer = draft.rng.choice([None, *headers[:-1]])
        if outer is None:
            draft.lines += spelled(draft, name, header.macro, nested=False)
        else:
            outer.inner += spelled(draft, name, header.macro, nested=True)
        draft.terms.append(f"#ifdef {header.macro}\n+ {number + 1} * {header.macro}\n#endif")
    questions = [_question(draft, number, headers) for number in range(draft.rng.randrange(0, 3))]
    for place in names:
        through = any("sub/.." in header.name for header in headers)
        if through or draft.chance(0.7):  # others may not even be there
            draft.files[f"{place}/sub/empty.h"] = ""
    for header in headers:
        for place, value in header.places.items():
            draft.files[_path(place, header)] = _text(header, value)
        _edits_of(draft, header, places)
    for question in questions:
        for place in places:
            draft.writes("a header that was asked for appears", f"{place}/{question}", "")
    _edits_of_list(draft, headers, names)


def _question(draft: Draft, number: int, headers: list[Header]) -> str:
    name = f"q{number}.h"
    macro = f"Q{number}"
    lines = asked(draft, name, macro)
    if draft.chance(0.6):
        draft.lines += lines
    else:
        draft.rng.choice(headers).inner += lines
    draft.terms.append(f"#ifdef {macro}\n+ {7 + number} * {macro}\n#endif")
    if draft.chance(0.3):
        path = f"d0/{name}"
        draft.files[path] = ""
        draft.writes("a header that was asked for goes", path, None)
    return name


def _edits_of(draft: Draft, header: Header, places: list[str]) -> None:
    for place, value in header.places.items():
        path = _path(place, header)
        other = _text(header, draft.other(value))
        draft.writes("a header changes", path, other)
        if len(header.places) > 1:
            draft.writes("a header goes", path, None)
        if draft.chance(0.3):
            draft.files[f"other/{header.macro}.h"] = other
            draft.writes("a header becomes a link", path, Link(f"{{here}}/other/{header.macro}.h"))
    for place in places:
        if place not in header.places:
            path = _path(place, header)
            draft.writes("a header appears", path, _text(header, draft.number()))
    if "d1" in places and "d1" not in header.places:
        draft.writes("a folder of a header's name appears", _path("d1", header) + "/inside", "")


def _edits_of_list(draft: Draft, headers: list[Header], names: list[str]) -> None:
    """Edits of the list of directories, which change no file."""

    def swap(after: Draft) -> None:
        first, second = after.rng.sample(range(len(after.searched)), 2)
        places = after.searched
        kept = places[first].directory
        places[first].directory = places[second].directory
        places[second].directory = kept

    def other_kind(after: Draft) -> None:
        chosen = after.rng.choice(after.searched)
        chosen.kind = after.rng.choice(KINDS_OF_SEARCH) if after.kind != "op" else "include"

    def drop(after: Draft) -> None:
        after.searched.remove(after.rng.choice(after.searched))

    def repeat(after: Draft) -> None:
        chosen = after.rng.choice(after.searched)
        kind = "include" if after.kind == "op" else after.rng.choice(KINDS_OF_SEARCH)
        after.searched.insert(0, Search(chosen.directory, kind))

    for name, change in (
        ("directories change places", swap),
        ("a directory is searched in another way", other_kind),
        ("a directory is not searched", drop),
        ("a directory is searched twice", repeat),
    ):
        draft.edit(name, change)
    if draft.chance(0.4):
        _linked_directory(draft, headers)


def _linked_directory(draft: Draft, headers: list[Header]) -> None:
    """A directory of the list that is a link; the edit lets it point elsewhere."""
    for target in ("one", "two"):
        draft.files[f"{target}/sub/there.h"] = ""
        for header in headers:
            if draft.chance(0.7):
                draft.files[_path(target, header)] = _text(header, draft.number())
    draft.files["linked"] = Link(draft.rng.choice(["one", "one", "d0", "d1"]))
    kind = "include" if draft.kind == "op" else draft.rng.choice(KINDS_OF_SEARCH)
    draft.searched.insert(draft.rng.randrange(len(draft.searched) + 1), Search("linked", kind))
    draft.writes(
        "a linked directory points elsewhere", "linked", Link(draft.rng.choice(["two", "d0"]))
    )
