"""The page of errors shows what each mistake prints now, has every class of error, and each message is one that helps."""

import re

import pytest

from opjit import errors
from tests import gallery
from tests.gallery import CASES, Case
from tests.helpers import command

MESSAGES = dict(
    re.findall(
        r"^### (.*?)\n.*?^```text\n\w+: (.*?)\n```$",
        gallery.PAGE.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
)
WORDS = 55  # of opjit's own in a message
LINES = 12  # of a message, with the compiler's


@pytest.mark.slow
def test_each_mistake_prints_what_the_page_shows_and_each_class_of_error_is_made() -> None:
    """A compiler's own lines depend on its version, so only first lines are compared. After a change: python -m tests.gallery."""
    provoked = gallery.all_provoked()
    kept = re.findall(r"^```text\n(.*)$", gallery.PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    shown = [f"{error.name}: {error.message}".splitlines()[0] for error in provoked]
    assert sorted(kept) == sorted(shown)
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert classes <= {name for error in provoked for name in (error.name, *error.made)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_each_message_says_where_and_what_now_in_few_words(case: Case) -> None:
    message = MESSAGES[case.title]
    assert case.where in message
    assert case.now in message
    assert case.cause
    assert case.fix
    assert len(message.splitlines()[0].split()) <= WORDS
    assert len(message.splitlines()) <= LINES
    lines = [line.strip() for line in message.splitlines() if re.search(r"\w{3}", line)]
    assert len(lines) == len(set(lines)), "no line is said twice"


@pytest.mark.parametrize(
    ("kind", "title", "words", "code"),
    [("UnknownOp", "Unknown op", "alreduce", 2), ("CompileError", "Compile error", "./clip", 1)],
)
def test_a_command_prints_the_message_and_where_to_read_more(
    kind: str, title: str, words: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    [case] = [case for case in CASES if case.title == title]
    with gallery.folder_of(case) as folder:
        monkeypatch.chdir(folder)
        done = command("get", words, **gallery.changes(folder))
        assert (done.returncode, gallery.plain(done.stdout + done.stderr, folder).rstrip()) == (
            code,
            f"Error: {MESSAGES[title].rstrip()}\nRun `opjit help {kind}` for causes and fixes.",
        )
        explained = command("help", kind).stdout
    assert explained.startswith(f"{title} ")
