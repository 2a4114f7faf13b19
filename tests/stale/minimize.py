"""Makes a wrong case smaller while it stays wrong, and prints it as a program."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tests.stale.case import Case, Dated, Link, Made, Program, State, changed
from tests.stale.compare import Compared, compare

LISTS = ("cflags", "ldflags", "include", "launcher")
MAPPINGS = ("files", "generated", "environment")
TRIALS = 150  # at most; each is some builds


def _without_words(case: Case) -> Iterator[Case]:
    """The case without one or two neighboring words of a list, in both states."""
    for name in LISTS:
        before = getattr(case.before, name)
        after = getattr(case.after, name)
        if len(before) != len(after):
            continue
        for count in (2, 1):
            for start in range(len(before) - count + 1):
                kept = [range(start), range(start + count, len(before))]
                numbers = [number for part in kept for number in part]
                first = changed(case.before, **{name: tuple(before[each] for each in numbers)})
                second = changed(case.after, **{name: tuple(after[each] for each in numbers)})
                yield replace(case, before=first, after=second)


def _without_names(case: Case) -> Iterator[Case]:
    """The case without one name of a mapping, in both states."""
    for field in MAPPINGS:
        before = getattr(case.before, field)
        after = getattr(case.after, field)
        for name in sorted(before.keys() | after.keys()):
            if name != "a.c":
                first = {each: value for each, value in before.items() if each != name}
                second = {each: value for each, value in after.items() if each != name}
                yield replace(
                    case,
                    before=changed(case.before, **{field: first}),
                    after=changed(case.after, **{field: second}),
                )


def _without_lines(case: Case) -> Iterator[Case]:
    """The case without a line, or a condition and its lines, of a text that is the same in both states."""
    for name, content in case.before.files.items():
        if not isinstance(content, str) or case.after.files.get(name) != content:
            continue
        lines = content.split("\n")
        for count in (3, 2, 1):
            for start in range(len(lines) - count + 1):
                text = "\n".join(lines[:start] + lines[start + count :])
                yield replace(
                    case,
                    before=changed(case.before, files={**case.before.files, name: text}),
                    after=changed(case.after, files={**case.after.files, name: text}),
                )


Smaller = Callable[[Case], Iterator[Case]]


def minimized(found: Compared, folder: Path) -> Compared:
    """A smaller case with the same verdict."""
    best = found
    trials = 0
    simple = replace(found.case, together=False, quiet=False)
    candidate = compare(simple, folder)
    if candidate.verdict == found.verdict:
        best = candidate
    ways: Sequence[Smaller] = (_without_words, _without_names, _without_lines)
    smaller_found = True
    while smaller_found and trials < TRIALS:
        smaller_found = False
        for way in ways:
            again = True
            while again and trials < TRIALS:
                again = False
                for smaller in way(best.case):
                    trials += 1
                    compared = compare(smaller, folder)
                    if compared.verdict == found.verdict and compared.at == found.at:
                        best = compared
                        smaller_found = True
                        again = True
                        break
                    if trials >= TRIALS:
                        break
    return best


def _file(name: str, content: object) -> str:
    if content is None:
        return f"remove {name}"
    if isinstance(content, Link):
        return f"{name} -> {content.target}"
    if isinstance(content, Made):
        return f"{name} ({content.how}): {content.text!r}"
    if isinstance(content, Dated):
        return f"{name} (dated {content.seconds}): {content.text!r}"
    if isinstance(content, Program):
        return f"{name} (mode 755): {content.text!r}"
    return f"{name}: {content!r}"


def _request(state: State) -> list[str]:
    words = {name: getattr(state, name) for name in (*LISTS, "generated", "environment", "folder")}
    return [f"{name} = {value!r}" for name, value in words.items() if value and value != "."]


def script(compared: Compared) -> str:
    """The case in lines: files and request, the edit, and the answers."""
    case = compared.case
    old: Mapping[str, object] = case.before.files
    new: Mapping[str, object] = case.after.files
    together = "one process" if case.together else "a process for each request"
    lines = [
        f"{compared.verdict}: {case.kind}, {case.name} ({together}{', quiet' if case.quiet else ''})"
    ]
    lines += [f"  {_file(name, content)}" for name, content in old.items()]
    lines += [f"  {line}" for line in _request(case.before)]
    lines.append("  edit:")
    touched = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    lines += [f"    {_file(name, new.get(name))}" for name in touched]
    before = _request(case.before)
    lines += [f"    {line}" for line in _request(case.after) if line not in before]
    lines.append(
        f"  first {compared.first}; {compared.at}: {compared.warm}, expected {compared.clean}"
    )
    return "\n".join(lines)
