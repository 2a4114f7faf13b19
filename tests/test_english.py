"""Pages, docstrings, comments and messages read as native English: the rates of telling patterns stay near other projects' rates.

A bound is twice the rate of an anchor, but at least 1 per 1,000 sentences, and at least 2 sentences. For pages, the anchors are the
Markdown pages of uv, HF kernels and tvm-ffi (175 pages). For code, the anchor is click. Fillers have bounds per 10,000 words of the pages:
twice the anchors' rate, or the rate that the pages have reached. No word has a lower bound.

    python -m tests.test_english          # print the rates
    python -m tests.test_english own      # print the sentences with a pattern
"""

import ast
import functools
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers import ROOT


class Pattern(NamedTuple):
    """A pattern to avoid, its remedy, and the anchors' rates per 1,000 sentences."""

    regex: str
    remedy: str
    pages: float
    code: float | None  # None: not counted, because a message has a semicolon before its remedy


PATTERNS = {
    "too": Pattern(r", too\b", "put 'also' before the verb", 0.1, 0.0),
    "also + preposition": Pattern(
        r"(^|[,;(] )also (in|of|on|with|without|where|when|after|that|from|by|behind|if|for)\b",
        "put 'also' before the verb",
        0.1,
        0.0,
    ),
    "what": Pattern(
        r"\b[Ww]hat (it|an?|the|is|was|are|were|has|had|no|others?|torch|opjit|only|each|any|they|makes?|needs?"
        r"|decides?|takes?|does|goes|comes|runs?|can|cannot|must)\b",
        "name the thing",
        1.2,
        4.9,
    ),
    "who": Pattern(r"(^|[:;,.] )[Ww]ho(ever)?\b", "name the person", 0.0, 0.0),
    "those of": Pattern(
        r"\b[Tt]hose (of|with|in|for|from|that|which|who)\b|\bthat of\b",
        "repeat the noun",
        1.0,
        0.0,
    ),
    "one that": Pattern(r"\bones? (that|which|without|whose)\b", "repeat the noun", 0.3, 0.0),
    "where": Pattern(
        r"(^|[.:;,] |- |\| |\b(only|also|and|or|except|unless) )"
        r"[Ww]here (no|an?|the|it|they|nothing|that|such|others|there)\b",
        "if, when",
        0.6,
        0.4,
    ),
    "as": Pattern(
        r", as (?!well|if|in\b|opposed|long|far|soon|described|defined|shown|specified|needed|required"
        r"|of\b|per\b|an? )",
        "because, like",
        2.0,
        3.6,
    ),
    "is none": Pattern(r"\b(is|are|has|have) none\b", "negate the verb", 0.0, 0.0),
    "has no": Pattern(
        r"\b(has|have|takes?|gets?|knows?|names?|brings?|gives?|leaves?) no\b",
        "negate the verb",
        1.7,
        2.2,
    ),
    "take": Pattern(r"\b[Tt]akes?\b", "accept, use, need, last", 4.3, 7.6),
    "own": Pattern(r"\bown\b", "cut it, or 'separate'", 5.3, 1.3),
    "says": Pattern(
        r"\b(says?|tells?|told|knows?|knew|asks?)\b", "report, show, support", 3.7, 6.2
    ),
    "lies": Pattern(r"\b(lies|lie|stands?|lends?|mends?)\b", "is in", 0.1, 0.0),
    "others": Pattern(r"\b[Oo]thers\b", "name them", 1.0, 0.4),
    "such": Pattern(r"\b[Ss]uch (?!as)", "this kind of", 6.2, 1.3),
    "whose": Pattern(r"\bwhose\b", "with", 0.7, 0.4),
    "archaic": Pattern(
        r"\b(anew|besides?|thrice|alike|likewise|aside|beforehand|meanwhile)\b",
        "again, next to, also",
        0.1,
        0.0,
    ),
    "else": Pattern(r"(, |; |\()else\b", "otherwise, or", 0.0, 0.4),
    "semicolon": Pattern(r";", "a conjunction, or a new sentence", 10.5, None),
}


class Filler(NamedTuple):
    """A filler, its remedy, and per 10,000 words of the pages the anchors' rate and the bound."""

    regex: str
    remedy: str
    anchors: float
    most: float


FILLERS = {
    "comma because": Filler(r", because\b", "a colon, 'so', 'since', or two sentences", 1.1, 3.0),
    "for example": Filler(r"(?<=\w), for example\b", "'such as', or leave it out", 1.9, 5.0),
    "therefore": Filler(r"\bTherefore\b", "'so', or leave it out", 0.0, 0.7),
    "names": Filler(
        r"\b(it|that|which|why|test|code|command|error|line|manifest|message|page|report|table|warning) names\b"
        r"|\bnames (an?|the|it|its|that)\b",
        "show, list, report, contain",
        0.0,
        1.6,
    ),
    "each": Filler(r"\b([Ee]ach|[Ee]very)\b", "a, all, or the plural", 19.0, 38.0),
}


class Sentence(NamedTuple):
    place: str
    text: str


def _split(place: str, text: str) -> Iterator[Sentence]:
    """The sentences of a text, with code and link targets left out."""
    text = re.sub(r"``?[^`]*``?", "CODE", re.sub(r"\]\([^)]*\)", "]", text))
    for sentence in re.split(r"(?<=[.:?!])\s+(?=[A-Z\[\"'(])", re.sub(r"\s+", " ", text).strip()):
        if len(sentence.split()) >= 3:
            yield Sentence(place, sentence)


def of_page(page: Path) -> Iterator[Sentence]:
    """The sentences of a page's paragraphs, list items and table cells."""
    name = page.relative_to(ROOT).as_posix()
    paragraph: list[str] = []
    in_code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
            line = ""
        if in_code or line.startswith(("#", "<!--", "    ")):
            line = ""
        starts_item = re.match(r"\s*([-*]|\d+\.)\s|\|", line)
        if paragraph and (not line.strip() or starts_item):
            yield from _split(f"{name}:{number}", " ".join(paragraph))
            paragraph = []
        if line.startswith("|"):
            for cell in line.strip("|").split("|"):
                yield from _split(f"{name}:{number}", cell)
        elif line.strip():
            paragraph.append(re.sub(r"^\s*([-*]|\d+\.)\s+", "", line))
    yield from _split(name, " ".join(paragraph))


def of_python(path: Path) -> Iterator[Sentence]:
    """The sentences of a file's docstrings, messages and comments."""
    source = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = set()
    inside = set()
    nodes = list(ast.walk(ast.parse(source)))
    for node in nodes:
        if isinstance(node, documented) and ast.get_docstring(node):
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            docstrings.add(id(first.value))
            text = (ast.get_docstring(node) or "").partition("Example:")[0]
            for part in re.split(r"\n\s*\n|\n\s*(?=\w+: )", text):
                yield from _split(f"{name}:{first.lineno}", part)
        if isinstance(node, ast.JoinedStr):
            inside |= {id(value) for value in node.values}
            parts = [
                str(each.value) if isinstance(each, ast.Constant) else "X" for each in node.values
            ]
            yield from _split(f"{name}:{node.lineno}", "".join(parts))
    for node in nodes:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        is_message = len(node.value.split()) >= 5 and "\\" not in node.value
        if is_message and id(node) not in docstrings | inside:
            yield from _split(f"{name}:{node.lineno}", node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _split(f"{name}:{token.start[0]}", token.string[1:])


def of_c(path: Path) -> Iterator[Sentence]:
    """The sentences of a file's comments."""
    source = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    for comment in re.finditer(r"/\*(.*?)\*/|//([^\n]*)", source, re.DOTALL):
        line = source.count("\n", 0, comment.start()) + 1
        text = re.sub(r"^\s*\* ?", "", comment[1] or comment[2] or "", flags=re.MULTILINE)
        text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)  # an example's code
        for part in re.split(r"\n\s*\n", text):
            yield from _split(f"{name}:{line}", part)


@functools.cache
def pages() -> dict[str, list[Sentence]]:
    """The sentences of each page."""
    paths = [ROOT / "README.md"]
    for folder in (".github", "examples", "kernels_c", "opjit", "tests/benchmarks"):
        paths += sorted((ROOT / folder).rglob("*.md"))
    return {path.relative_to(ROOT).as_posix(): list(of_page(path)) for path in paths}


@functools.cache
def rooms() -> dict[str, list[Sentence]]:
    """The sentences of each package of `opjit`, of its modules, and of `kernels_c`."""
    found: dict[str, list[Sentence]] = {}
    for path in sorted((ROOT / "opjit").rglob("*.py")):
        relative = path.relative_to(ROOT / "opjit")
        room = f"opjit/{relative.parts[0]}"
        found.setdefault(room, []).extend(of_python(path))
    headers = [
        path
        for path in sorted((ROOT / "kernels_c").rglob("*"))
        if path.suffix in (".h", ".c", ".cu", ".cpp")
    ]
    found["kernels_c"] = [sentence for path in headers for sentence in of_c(path)]
    return found


def with_pattern(sentences: list[Sentence], name: str) -> list[Sentence]:
    return [each for each in sentences if re.search(PATTERNS[name].regex, each.text)]


def everything(found: dict[str, list[Sentence]]) -> list[Sentence]:
    """The sentences of all pages or packages."""
    return [each for sentences in found.values() for each in sentences]


def _refused(sentences: list[Sentence], name: str, anchor: float) -> str:
    """The sentences with a pattern if its bound is broken, otherwise an empty text."""
    found = with_pattern(sentences, name)
    allowed = max(2, int(max(2 * anchor, 1.0) * len(sentences) / 1000))
    if len(found) <= allowed:
        return ""
    shown = "\n".join(f"  {place}: {text}" for place, text in found)
    return (
        f"{name!r} ({PATTERNS[name].remedy}): {len(found)} sentences, at most {allowed}:\n{shown}"
    )


@pytest.mark.parametrize("name", PATTERNS)
def test_pages_avoid_a_pattern(name: str) -> None:
    refused = _refused(everything(pages()), name, PATTERNS[name].pages)
    assert not refused, refused


@pytest.mark.parametrize("name", [name for name in PATTERNS if PATTERNS[name].code is not None])
def test_docstrings_comments_and_messages_avoid_a_pattern(name: str) -> None:
    refused = _refused(everything(rooms()), name, PATTERNS[name].code or 0)
    assert not refused, refused


def _with_any_pattern(name: str) -> set[Sentence]:
    """The sentences of a page or a package that have a pattern which counts there."""
    if name in pages():
        return {each for pattern in PATTERNS for each in with_pattern(pages()[name], pattern)}
    counted = [pattern for pattern in PATTERNS if PATTERNS[pattern].code is not None]
    return {each for pattern in counted for each in with_pattern(rooms().get(name, []), pattern)}


def filler_rate(name: str) -> float:
    """Return how often a filler is in 10,000 words of the pages."""
    text = " ".join(each.text for each in everything(pages()))
    return 10_000 * len(re.findall(FILLERS[name].regex, text)) / len(text.split())


@pytest.mark.parametrize("name", FILLERS)
def test_pages_have_few_fillers(name: str) -> None:
    rate = filler_rate(name)
    filler = FILLERS[name]
    assert rate <= filler.most, f"{name!r} ({filler.remedy}): {rate:.1f} per 10,000 words"


def rows_and_words() -> tuple[list[tuple[str, str]], int]:
    """The rows of all tables, each with its page, and the number of words of all pages."""
    rows = []
    words = 0
    for name in pages():
        text = (ROOT / name).read_text(encoding="utf-8")
        words += len(text.split())
        without_code = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        rows += [(name, row) for row in re.findall(r"^\|.*$", without_code, re.MULTILINE)]
    return rows, words


def test_a_cell_of_a_table_is_short() -> None:
    """A table is for look-up. For longer texts, use a list."""
    rows, _ = rows_and_words()
    long = [
        (page, cell)
        for page, row in rows
        for cell in row.strip("|").split("|")
        if len(cell.split()) > 12
    ]
    assert not long


def test_few_words_are_in_tables() -> None:
    rows, words = rows_and_words()
    assert sum(len(row.split()) for _, row in rows) <= 0.12 * words


def show_rates() -> None:
    in_pages = everything(pages())
    in_code = everything(rooms())
    print(f"{'per 1,000 sentences':<22}{'pages':>8}{'anchors':>8}{'code':>8}{'click':>8}")
    for name, pattern in PATTERNS.items():
        page_rate = 1000 * len(with_pattern(in_pages, name)) / max(1, len(in_pages))
        code_rate = 1000 * len(with_pattern(in_code, name)) / max(1, len(in_code))
        code_anchor = "" if pattern.code is None else f"{pattern.code:.1f}"
        print(f"{name:<22}{page_rate:8.1f}{pattern.pages:8.1f}{code_rate:8.1f}{code_anchor:>8}")
    print(f"{'per 10,000 words':<22}{'pages':>8}{'anchors':>8}{'at most':>8}")
    for name, filler in FILLERS.items():
        print(f"{name:<22}{filler_rate(name):8.1f}{filler.anchors:8.1f}{filler.most:8.1f}")
    for name, sentences in (pages() | rooms()).items():
        hits = len(_with_any_pattern(name))
        print(f"{name:<44} {len(sentences):5d} sentences, {hits:4d} with a pattern")


if __name__ == "__main__":
    everywhere = everything(pages() | rooms())
    for chosen in sys.argv[1:]:
        for sentence in with_pattern(everywhere, chosen):
            print(f"{sentence.place}: {sentence.text}")
    if not sys.argv[1:]:
        show_rates()
