"""Imports go down the layers in CONTRIBUTING or stay on their floor, and no file imports itself by a detour."""

import ast
import graphlib
import io
import subprocess
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

import opjit
from opjit.environment import VARIABLES
from tests.test_contributing import floors

PACKAGE = Path(opjit.__file__).parent
MODULES = {
    ".".join(("opjit", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in PACKAGE.rglob("*.py")
}

# Each number is what the tree has, or the aim behind it once the tree is below the aim. No number goes up, whatever is being built.
MOST = {
    "packages": 23,
    "modules": 216,
    "floors": 16,
    "classes": 229,  # aim 215
    "functions": 2_044,  # aim 1,750
    "public names": 26,  # of opjit itself
    "environment variables": 19,
    "tokens": 219_104,  # aim 165,000
}
MOST_PER_LINE = 8.5
LONGEST_STATEMENT = 60  # tokens
MOST_LONG_STATEMENTS = 0
MOST_FILES_OF_A_NAME = 4
MOST_LINES_OF_A_FILE = 500
MOST_LINES_OF_A_FUNCTION = 70  # without its docstring
_SPECIAL = ("__getattr__", "__dir__")
_STATEMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr, ast.Raise)
_COUNTED = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)


def imports(module: str) -> dict[str, int]:
    """The modules of opjit that one imports anywhere in its text, late and for types too, and the line of each."""
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{module}, line {node.lineno}: a relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in inner]
        else:
            continue
        found |= {name: node.lineno for name in names if name in MODULES and name != module}
    return found


def _room(module: str) -> str:
    """The package of a module, or the module itself if it stands in none."""
    return [*module.split("."), "__init__"][1]


def test_no_import_goes_up() -> None:
    height = {room: -number for number, floor in enumerate(floors()) for room in floor}

    def floor(module: str) -> int:
        return height[_room(module)]

    assert [
        f"{module} imports {name} in line {line}"
        for module in MODULES
        for name, line in imports(module).items()
        if floor(name) > floor(module)
    ] == []


def test_no_imports_form_a_circle() -> None:
    graphlib.TopologicalSorter(
        {module: imports(module).keys() for module in MODULES}
    ).prepare()  # names the circle


def test_no_packages_form_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        room = _room(module)
        graph.setdefault(room, set()).update({*map(_room, imports(module))} - {room})
    graphlib.TopologicalSorter(graph).prepare()


def test_no_code_below_a_request_compares_the_name_of_a_device() -> None:
    """It asks the backend, so that another device is a file next to cpu.py."""
    names = {"cpu", "cuda"}
    below: set[str] = set()
    for floor in reversed(floors()):
        if "request" in floor:
            break
        below.update(floor)
    found = []
    for module, path in MODULES.items():
        if _room(module) in below:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Compare):
                    sides = ast.walk(node)
                    if any(
                        isinstance(side, ast.Constant) and side.value in names for side in sides
                    ):
                        found.append(f"{module}:{node.lineno}")
    assert found == []


def test_a_class_has_a_name_of_its_own() -> None:
    """One name, one meaning: an underscore in front does not tell two classes apart."""
    places: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def _files_of_functions() -> dict[str, list[Path]]:
    """The files with a function on their first level, by its name without an underscore in front."""
    files: dict[str, list[Path]] = {}
    for path in MODULES.values():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name not in _SPECIAL:
                files.setdefault(node.name.lstrip("_"), []).append(path)
    return files


def test_a_function_s_name_is_unique_in_its_package_and_in_few_files() -> None:
    for name, files in _files_of_functions().items():
        assert len(set(files)) <= MOST_FILES_OF_A_NAME, (name, files)
        for package in {path.parent for path in files}:
            assert len([path for path in files if path.parent == package]) == 1, (name, package)


def test_a_function_fits_a_screen_and_a_file_has_one_subject() -> None:
    for module, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        documented = _docstring_lines(tree)
        assert len(text.splitlines()) <= MOST_LINES_OF_A_FILE, module
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = {*range(node.lineno, (node.end_lineno or node.lineno) + 1)} - documented
                assert len(lines) <= MOST_LINES_OF_A_FUNCTION, (module, node.name)


@dataclass(frozen=True)
class Density:
    """How much a tree of Python says in a line: names, numbers, strings and operators outside docstrings."""

    tokens: int
    lines: int
    long_statements: list[str]  # their places

    @classmethod
    def of(cls, files: Iterable[Path]) -> "Density":
        tokens = 0
        lines = 0
        places = []
        for path in files:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
            counts = _tokens_by_line(text, _docstring_lines(tree))
            tokens += sum(counts.values())
            lines += len(counts)
            for node in ast.walk(tree):
                if isinstance(node, _STATEMENTS) and not _is_literal(node):
                    end = node.end_lineno or node.lineno
                    count = sum(counts.get(line, 0) for line in range(node.lineno, end + 1))
                    if count > LONGEST_STATEMENT:
                        places.append(f"{path.name}:{node.lineno}")
        return cls(tokens, lines, places)


def _docstring_lines(tree: ast.Module) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if ast.get_docstring(node):
            first = node.body[0]
            found.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found


def _tokens_by_line(text: str, left_out: set[int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    depth = 0  # in f-strings, which are one token before Python 3.12, and several since then
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.start[0]
        name = tokenize.tok_name[token.type]
        depth -= name == "FSTRING_END"
        counted = token.type in _COUNTED or name == "FSTRING_START"
        if counted and depth == 0 and line not in left_out:
            counts[line] = counts.get(line, 0) + 1
        depth += name == "FSTRING_START"
    return counts


def _is_literal(node: ast.stmt) -> bool:
    """Whether a statement assigns a table of literals, or of calls of one constructor, or passes names on: its length is its content."""
    value = getattr(node, "value", None)
    if isinstance(value, ast.Call):
        given = [*value.args, *(each.value for each in value.keywords)]
        return all(isinstance(each, (ast.Name, ast.Constant)) for each in given)
    return isinstance(value, (ast.Dict, ast.Tuple, ast.List, ast.Set, ast.Constant))


def _words_of_split_strings(tree: ast.Module) -> int:
    """How many words stand in strings that the module splits: a table that is a string counts as one."""
    texts = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    words = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("split", "splitlines"):
            split = node.value
            text = texts.get(split.id) if isinstance(split, ast.Name) else None
            text = split.value if isinstance(split, ast.Constant) else text
            words += len(text.split()) if isinstance(text, str) else 0
    return words


def _sizes() -> dict[str, int]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in MODULES.values()]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    tokens = Density.of(MODULES.values()).tokens
    return {
        "packages": len([path for path in MODULES.values() if path.name == "__init__.py"]),
        "modules": len(MODULES),
        "floors": len(floors()),
        "classes": len([node for node in nodes if isinstance(node, ast.ClassDef)]),
        "functions": len([node for node in nodes if isinstance(node, ast.FunctionDef)]),
        "public names": len(opjit.__all__),
        "environment variables": len(VARIABLES),
        "tokens": tokens + sum(map(_words_of_split_strings, trees)),
    }


def test_the_house_is_no_larger_than_its_bounds() -> None:
    """Lines are free, tokens and concepts are not."""
    sizes = _sizes()
    assert {name: size for name, size in sizes.items() if size > MOST[name]} == {}


def _bounds_in(commit: str) -> dict[str, int]:
    """The bounds in a commit; none without a repository, and in the first commit of the table."""
    done = subprocess.run(
        ["git", "show", f"{commit}:tests/test_house.py"],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    for node in ast.parse(done.stdout).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MOST":
            return dict(ast.literal_eval(node.value))
    return {}


def test_no_bound_is_higher_than_in_the_commit_before() -> None:
    before = [bounds for commit in ("HEAD", "HEAD~1") if (bounds := _bounds_in(commit))]
    if not before:
        pytest.skip("there is no commit with bounds to compare with")
    for bounds in before:
        assert {name: most for name, most in MOST.items() if most > bounds.get(name, most)} == {}


def test_the_code_is_no_denser_than_it_was() -> None:
    package = Density.of(PACKAGE.rglob("*.py"))
    assert package.tokens / package.lines <= MOST_PER_LINE
    assert len(package.long_statements) <= MOST_LONG_STATEMENTS, package.long_statements


def test_tests_are_no_denser_than_the_code() -> None:
    tests = Density.of(Path(__file__).parent.rglob("*.py"))
    assert tests.tokens / tests.lines <= MOST_PER_LINE
