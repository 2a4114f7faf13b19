"""A declaration that travels without its folder: an op.py with the modules beside it that it imports.

Where it arrives, Python runs the bytes that were verified. It writes no byte code beside them, and reads none.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from opjit.errors import DeclarationError

_sources: dict[str, bytes] = {}  # verified Python files, by absolute path


def collect(file: Path) -> dict[str, bytes]:
    """Read an op.py and the modules beside it that it imports, directly or through each other.

    Returns:
        The files by their path relative to the op.py's folder; that is ``op.py`` for itself.

    Raises:
        DeclarationError: it imports a file of its folder in a way that works only there.
        OSError: a file cannot be read.
    """
    found: dict[str, bytes] = {}
    waiting = [file.name]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path] = (file.parent / path).read_bytes()
            waiting += _imported(file, path, found[path])
    return found


def _imported(file: Path, path: str, source: bytes) -> Iterator[str]:
    """The files beside an op.py that one of them imports."""
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield from _relative(file, path, node)
            continue
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        for name in [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]:
            if _came_from(file.parent, name.partition(".")[0]):
                raise DeclarationError(f"{file.parent / path}:{node.lineno} imports {name}, which is found only while its folder is on "
                                       f"sys.path; write `from .{name} import …`")


def _came_from(folder: Path, name: str) -> bool:
    """Whether a module was imported from a folder because that folder is on sys.path."""
    loaded = getattr(sys.modules.get(name), "__file__", None)
    return loaded is not None and Path(loaded).resolve() in (folder / f"{name}.py", folder / name / "__init__.py")


def _relative(file: Path, path: str, node: ast.ImportFrom) -> Iterator[str]:
    """The files that a relative import of one of an op.py's files names."""
    folder = Path(path).parent
    above = folder.parts[:len(folder.parts) - node.level + 1]
    outside = node.level - 1 > len(folder.parts)
    parts = (*above, *(node.module or "").split(".")) if node.module else above
    wanted = [parts] if node.module else [(*above, alias.name) for alias in node.names]
    for each in wanted:
        modules = [_module(file.parent, each[:end]) for end in range(1, len(each) + 1)]
        if outside or None in modules or file.name in modules:
            raise DeclarationError(f"{file.parent / path}:{node.lineno} imports {'.' * node.level}{node.module or node.names[0].name}, "
                                   "which is no module beside its op.py; move what it needs into one, or import it by the full name of an "
                                   "installed package")
        yield from (module for module in modules if module)
    if node.module:  # a name may be a module of the package
        yield from filter(None, (_module(file.parent, (*parts, alias.name)) for alias in node.names))


def _module(folder: Path, parts: tuple[str, ...]) -> str | None:
    """The file of a module, relative to a folder."""
    name = "/".join(parts)
    return next((path for path in (f"{name}.py", f"{name}/__init__.py") if (folder / path).is_file()), None)


class _Loader(SourceLoader):
    """Loads one verified file. As it has no date for it, Python keeps no byte code."""

    def __init__(self, path: str) -> None:
        self.path = path

    def get_filename(self, fullname: str) -> str:
        return self.path

    def get_data(self, path: Any) -> bytes:
        try:
            return _sources[path]
        except KeyError:
            raise FileNotFoundError(path) from None


class _Finder(MetaPathFinder):
    """Finds the modules beside a verified op.py."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        last = name.rpartition(".")[2]
        for folder in path or ():
            for file, package in ((f"{folder}/{last}.py", None), (f"{folder}/{last}/__init__.py", [f"{folder}/{last}"])):
                if file in _sources:
                    return importlib.util.spec_from_file_location(name, file, loader=_Loader(file), submodule_search_locations=package)
        return None


_finder = _Finder()


def loader(folder: Path, sources: Mapping[str, bytes]) -> SourceLoader:
    """Return the loader of a folder's op.py, and have Python find the modules beside it.

    Args:
        sources: verified files, by their path in the folder.
    """
    _sources.update({str(folder / path): content for path, content in sources.items()})
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    return _Loader(str(folder / "op.py"))
