"""Small C++ programs, built with torch's own headers and the fast way: which of their calls differ.

torch's headers take 20 s to parse, so its build has all programs in one file. The fast way builds them in groups, as a user's program names
few things: a header that a program lacks must not come from its neighbor. Each module is opened and called in a child of its own."""

import functools
import hashlib
import json
import os
import re
import signal
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import cpp_extension

from tests.cpp_extension.corpus.outcomes import Outcome, outcome, without_places
from tests.cpp_extension.corpus.reference import INCLUDE, MACRO, includes
from tests.cpp_extension.fuzz.names import names

NAME = "drawn"  # of every module, so that both ways say the same
FLAGS = ["-w"]
SECONDS = 300  # for the calls of a module
_LINE = re.compile(
    r"^(?:In file included from )?/?(c\w+)[:.](?=\d)|/?\b(c\w+):\d+:\d+:", re.MULTILINE
)


class Case(NamedTuple):
    """A program.

    Attributes:
        name: of its namespace, which no other program has: c and a number or a word.
        code: its functions, with what it includes beyond torch/extension.h.
        binds: statements about `m` in PYBIND11_MODULE.
        calls: Python expressions of `m` and of what `names` has.
    """

    name: str
    code: str
    binds: Sequence[str]
    calls: Sequence[str]


class Difference(NamedTuple):
    case: Case
    call: str
    torch: Outcome
    fast: Outcome

    def __str__(self) -> str:
        """The program, and what its call gives."""
        return "\n".join(
            [
                f"--- {self.case.name}: {self.call}",
                self.case.code,
                *self.case.binds,
                f"  torch: {self.torch}",
                f"  fast:  {self.fast}",
            ]
        )


class Compared(NamedTuple):
    """What a comparison found.

    Attributes:
        differences: calls that give something else; for a program that only the fast way compiles, a call of "".
        fast: the programs that the fast way took.
        left: the others, which torch's headers are used for, with the reason.
        wrong: programs that torch's headers do not compile, with the compiler's message.
    """

    differences: list[Difference]
    fast: list[Case]
    left: dict[str, str]
    wrong: dict[str, str]


def text(cases: Sequence[Case]) -> str:
    """The source with all the programs."""
    parts = ["#include <torch/extension.h>", includes(case.code for case in cases)]
    for case in cases:
        parts += [
            f'namespace {case.name} {{\n#line 1 "{case.name}"',
            INCLUDE.sub("", case.code),
            "}",
        ]
        parts += [f"#undef {name}" for name in dict.fromkeys(MACRO.findall(case.code))]
    parts.append("PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {")
    for case in cases:
        parts += [
            f'#line 100 "{case.name}"',
            "{",
            f"using namespace {case.name};",
            *case.binds,
            "}",
        ]
    return "\n".join([*parts, "}", ""])


def fast_module(source: str) -> Any:
    """Raises RuntimeError with the reason where opjit would use torch's own headers."""
    import opjit
    from opjit.cpp_extension import build

    original = build.build

    def light_only(extension: Any, *others: Any, **more: Any) -> Any:
        if not extension.light:
            raise RuntimeError(extension.reason)
        return original(extension, *others, **more)

    build.build = light_only
    return opjit.load_inline(NAME, source, extra_cflags=FLAGS, no_implicit_headers=True)


def torchs_module(source: str, folder: Path) -> Any:
    """The module that torch's own headers make, in a folder that keeps it."""
    place = folder / hashlib.sha256(f"{torch.__version__} {source}".encode()).hexdigest()[:16]
    place.mkdir(parents=True, exist_ok=True)
    (place / "lock").unlink(missing_ok=True)
    path = place / "all.cpp"
    if not path.exists():
        path.write_text(source, encoding="utf-8")
    return cpp_extension.load(NAME, [str(path)], extra_cflags=FLAGS, build_directory=str(place))


def run(make: Callable[[], Any], cases: Sequence[Case], place: Path) -> list[Outcome] | str:
    """What the calls of a module give, in order; or why there is no module. A call that ends its process gives the signal."""
    calls = [call for case in cases for call in case.calls]
    found: list[Outcome] = []
    while len(found) < len(calls):
        child = os.fork()
        if child == 0:
            _answer(make, calls[len(found) :], place)
        _, status = os.waitpid(child, 0)
        lines = [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines()]
        if not lines:
            return f"its static initialisers ended the process: {status}"
        if "problem" in lines[0]:
            return str(lines[0]["problem"])
        found += lines[1:]
        if status:
            found.append(
                {
                    "call": calls[len(found)],
                    "ended": signal.Signals(status & 127).name if status & 127 else status,
                }
            )
    return found


def _answer(make: Callable[[], Any], calls: Sequence[str], place: Path) -> None:
    """Write what the calls give, a line each, and end this process."""
    try:
        with place.open("w", encoding="utf-8", buffering=1) as file:
            try:
                module = make()
            except BaseException as error:
                file.write(json.dumps({"problem": f"{error}\n{error.__cause__ or ''}"}) + "\n")
                return
            file.write("{}\n")
            signal.alarm(SECONDS)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a program may write there
            torch.set_num_threads(1)
            warnings.simplefilter("ignore")
            for call in calls:
                file.write(json.dumps(outcome(call, {**names(call), "m": module}, _clean)) + "\n")
    finally:
        os._exit(0)


def _clean(text: str) -> str:
    # The process counts the sizes j1, j2 of nested tensors.
    return re.sub(r"id='\d+'|\bj\d+", "id", without_places(text))


def _blamed(problem: str, cases: Sequence[Case]) -> dict[str, str]:
    """The programs that the compiler's messages name as wrong, each with the first message."""
    found: dict[str, str] = {}
    for line in problem.splitlines():
        if re.search(r"error:|required from|instantiation of|expansion of|in .constexpr.", line):
            for one, other in _LINE.findall(line):
                found.setdefault(one or other, line)
    return {case.name: found[case.name] for case in cases if case.name in found}


def compare(cases: Sequence[Case], folder: Path, group: int = 6) -> Compared:
    """Build and call the programs both ways."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"answers-{os.getpid()}"
    total = Compared([], [], {}, {})
    good = list(cases)
    while isinstance(
        answers := run(functools.partial(torchs_module, text(good), folder), good, place), str
    ):
        blamed = _blamed(answers, good)
        if not blamed:
            raise AssertionError(
                f"torch's headers do not build the programs, and none is named:\n{answers}\n{text(good)}"
            )
        total.wrong.update(blamed)
        good = [case for case in good if case.name not in blamed]
    expected = dict(
        zip(((case.name, call) for case in good for call in case.calls), answers, strict=True)
    )
    for start in range(0, len(good), group):
        _compare_group(good[start : start + group], expected, place, total)
    for case in cases:
        if case.name in total.wrong and not isinstance(
            run(functools.partial(fast_module, text([case])), [case], place), str
        ):
            total.differences.append(
                Difference(case, "", {"error": total.wrong[case.name]}, {"value": "it compiles"})
            )
    place.unlink(missing_ok=True)
    return total


def _compare_group(
    cases: Sequence[Case], expected: dict[tuple[str, str], Outcome], place: Path, total: Compared
) -> None:
    answers = run(functools.partial(fast_module, text(cases)), cases, place)
    if isinstance(answers, str):
        if len(cases) == 1:
            total.left[cases[0].name] = answers.strip().partition("\n")[0]
            return
        blamed = _blamed(answers, cases)
        rest = [case for case in cases if case.name not in blamed]
        for part in (
            [[case] for case in cases if case.name in blamed] + [rest]
            if blamed and rest
            else [cases[::2], cases[1::2]]
        ):
            _compare_group(part, expected, place, total)
        return
    total.fast.extend(cases)
    calls = [(case, call) for case in cases for call in case.calls]
    total.differences.extend(
        Difference(case, call, expected[case.name, call], found)
        for (case, call), found in zip(calls, answers, strict=True)
        if found != expected[case.name, call]
    )
