"""Imports go down the picture of the house in CONTRIBUTING or stay on their floor, and no file imports itself by a detour."""

import ast
import graphlib
from pathlib import Path

import opjit
from tests.test_contributing import floors

PACKAGE = Path(opjit.__file__).parent
MODULES = {
    ".".join(("opjit", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in PACKAGE.rglob("*.py")
}


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


def test_no_import_goes_up() -> None:
    height = {room: -number for number, floor in enumerate(floors()) for room in floor}

    def floor(module: str) -> int:
        return height[[*module.split("."), "__init__"][1]]

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


def test_a_class_has_a_name_of_its_own() -> None:
    """One name, one meaning: an underscore in front does not tell two classes apart."""
    places: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}
