"""The tests themselves: each can fail, and each module's tests are where its name says."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import opjit
from tests import tiers

HERE = Path(__file__).parent
PACKAGE = Path(opjit.__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef
# Calls that fail by themselves: of pytest, torch, numpy, opjit.testing, and of a program that must end with 0.
FAIL = {
    "raises",
    "warns",
    "fail",
    "assert_close",
    "gradcheck",
    "gradgradcheck",
    "opcheck",
    "check",
    "check_call",
    "check_output",
}


def functions(text: str) -> Iterator[Function]:
    return (node for node in ast.walk(ast.parse(text)) if isinstance(node, Function))


def called(function: Function) -> set[str]:
    """Names that a function calls or passes on, and the fixtures that it takes."""
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)} | {
        node.attr for node in nodes if isinstance(node, ast.Attribute)
    }
    return names | {argument.arg for argument in function.args.args}


def can_fail(function: Function) -> bool:
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    checked = any(
        isinstance(node, ast.keyword)
        and node.arg == "check"
        and isinstance(node.value, ast.Constant)
        and node.value.value
        for node in nodes
    )
    return (
        checked
        or any(isinstance(node, ast.Assert | ast.Raise) for node in nodes)
        or bool(called(function) & FAIL)
    )


def test_each_test_can_fail() -> None:
    """By itself, or by a function of the tests that it calls."""
    found = {
        (path, function.name): function
        for path in HERE.rglob("*.py")
        for function in functions(path.read_text(encoding="utf-8"))
    }
    failing = {
        name
        for (_, name), function in found.items()
        if can_fail(function) and not name.startswith("test_")
    }
    more = failing
    while more:
        more = {
            name
            for (_, name), function in found.items()
            if not name.startswith("test_") and called(function) & failing
        } - failing
        failing |= more
    idle = [
        f"{path.relative_to(HERE)}::{name}"
        for (path, name), function in found.items()
        if name.startswith("test_")
        and path.name.startswith("test_")
        and not can_fail(function)
        and not called(function) & failing
    ]
    assert idle == []


def test_each_module_s_tests_are_in_the_file_of_its_name_or_where_the_room_says() -> None:
    missing = []
    wrong = []
    for folder in [
        PACKAGE,
        *(path for path in PACKAGE.rglob("*") if path.is_dir() and any(path.glob("*.py"))),
    ]:
        room = HERE / (folder.relative_to(PACKAGE).parts or ["."])[0]
        init = room / "__init__.py"
        rows = re.findall(
            r"^([\w ]+): (.+)$",
            ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or "",
            re.MULTILINE,
        )
        lines = {name: files for names, files in rows for name in names.split()}
        for name in (path.stem for path in folder.glob("*.py") if path.name != "__init__.py"):
            if not (room / f"test_{name}.py").exists() and name not in lines:
                missing.append(f"{init.relative_to(HERE)} has no line for {name}")
        wrong += [
            file for files in lines.values() for file in files.split() if not (HERE / file).exists()
        ]
        modules = {path.stem for path in (PACKAGE / room.relative_to(HERE)).rglob("*.py")}
        wrong += [
            f"{init.relative_to(HERE)}: {name}"
            for name in lines
            if name not in modules or (room / f"test_{name}.py").exists()
        ]
    assert (missing, wrong) == ([], [])


def test_the_list_of_slow_tests_names_tests_that_there_are() -> None:
    texts = [path.read_text(encoding="utf-8") for path in HERE.rglob("test_*.py")]
    there = {function.name for text in texts for function in functions(text)}
    listed = {name.partition("[")[0] for name in tiers.durations()}
    assert listed - there == set()
