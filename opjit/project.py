"""A build backend (PEP 517, PEP 660) for projects whose package holds op folders: ``build-backend = "opjit.project"``.

The package lies in src/ or beside pyproject.toml and is named after the project. Its wheel is the package as it is, with binaries
for ``tool.opjit.archs`` beside each op's sources. `opjit new --project NAME` writes such a project.
"""

from __future__ import annotations

import gzip
import importlib
import io
import os
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from opjit import wheel
from opjit.wheel import WheelError

_KNOWN = {"name", "version", "description", "readme", "requires-python", "license", "keywords", "classifiers", "dependencies",
          "optional-dependencies", "urls", "scripts", "entry-points"}


class Project(NamedTuple):
    """What pyproject.toml says.

    Attributes:
        package: the folder of the package.
        fields: of a wheel's metadata.
        points: entry points, by group and name.
    """

    package: Path
    archs: tuple[str, ...]
    fields: dict[str, list[str]]
    points: dict[str, dict[str, str]]
    description: str


def read(root: Path) -> Project:
    """The project in a folder.

    Raises:
        WheelError: its pyproject.toml says something that this backend does not do, or there is no package.
    """
    if sys.version_info < (3, 11):
        raise WheelError("pyproject.toml is read with Python's own reader, which came with Python 3.11; build with that or a later one: "
                         "the wheel is the same for every Python")
    import tomllib

    with open(root / "pyproject.toml", "rb") as file:
        document = tomllib.load(file)
    table, settings = document.get("project", {}), document.get("tool", {}).get("opjit", {})
    unknown = sorted([*(f"project.{key}" for key in table.keys() - _KNOWN), *(f"tool.opjit.{key}" for key in settings.keys() - {"archs"})])
    if unknown or not {"name", "version"} <= table.keys():
        raise WheelError(f"pyproject.toml: opjit's build backend does nothing with {', '.join(unknown)}; leave it out" if unknown else
                         "pyproject.toml: expected name and version under [project]")
    package = wheel.package_name(table["name"], table["version"])
    folder = next((place for place in (root / "src" / package, root / package) if (place / "__init__.py").is_file()), None)
    if folder is None:
        raise WheelError(f"expected the package {package} with an __init__.py in src/ or beside pyproject.toml")
    points = {**table.get("entry-points", {}), **({"console_scripts": table["scripts"]} if "scripts" in table else {})}
    readme = root / table["readme"] if "readme" in table else None
    return Project(folder, tuple(settings.get("archs", ())), _fields(table), points, readme.read_text(encoding="utf-8") if readme else "")


def _fields(table: Mapping[str, Any]) -> dict[str, list[str]]:
    """The project's table as metadata."""
    fields = {"Name": [table["name"]], "Version": [table["version"]], "Summary": [table.get("description", "")],
              "Requires-Python": [table.get("requires-python", ">=3.10")], "Keywords": [",".join(table.get("keywords", []))],
              "License": [table.get("license", "")], "Classifier": table.get("classifiers", []),
              "Project-URL": [f"{name}, {url}" for name, url in table.get("urls", {}).items()],
              "Requires-Dist": list(table.get("dependencies", [])), "Provides-Extra": list(table.get("optional-dependencies", {}))}
    for extra, needs in table.get("optional-dependencies", {}).items():
        for need in needs:
            name, _, marker = need.partition(";")
            condition = f"({marker.strip()}) and extra == '{extra}'" if marker else f"extra == '{extra}'"
            fields["Requires-Dist"].append(f"{name.strip()}; {condition}")
    if "readme" in table:
        fields["Description-Content-Type"] = ["text/markdown" if table["readme"].endswith(".md") else "text/plain"]
    return {name: [value for value in values if value] for name, values in fields.items()}


def build_wheel(wheel_directory: str, config_settings: Mapping[str, str] | None = None, metadata_directory: str | None = None) -> str:
    """PEP 517. ``config_settings["arch"]`` takes the place of tool.opjit.archs."""
    project = read(Path.cwd())
    chosen = (config_settings or {}).get("arch")
    sys.path.insert(0, str(project.package.parent))
    try:
        importlib.import_module(project.package.name)  # an op.py may import from its package
    finally:
        sys.path.pop(0)
    from opjit import catalog

    root = project.package.resolve()
    ops = [op for op in catalog.all_ops() if op.folder.is_relative_to(root)]
    if not ops:
        raise WheelError(f"{project.package.name} declares no op; call opjit.add_path(Path(__file__).parent) in its __init__.py")
    targets = wheel.wanted(chosen.split(",") if chosen else project.archs, ops)
    contents = {f"{root.name}/{name}": content for name, content in {**wheel.tree(root), **wheel.prebuilt(ops, targets, root)}.items()}
    return wheel.write(Path(wheel_directory), project.fields, contents, project.points, project.description).name


def build_editable(wheel_directory: str, config_settings: Mapping[str, str] | None = None, metadata_directory: str | None = None) -> str:
    """PEP 660: a wheel that names the folder of the sources."""
    project = read(Path.cwd())
    pointer = {f"__editable__.{project.package.name}.pth": f"{project.package.parent.resolve()}\n".encode()}
    return wheel.write(Path(wheel_directory), project.fields, pointer, project.points, project.description).name


def build_sdist(sdist_directory: str, config_settings: Mapping[str, str] | None = None) -> str:
    """PEP 517: the project's files, without hidden ones and what was built."""
    root = Path.cwd()
    project = read(root)
    [name], [version] = project.fields["Name"], project.fields["Version"]
    stem = f"{wheel.package_name(name, version).lower()}-{version}"
    contents = {name: content for name, content in wheel.tree(root).items() if name.partition("/")[0] not in ("build", "dist")}
    contents["PKG-INFO"] = wheel.metadata(project.fields, project.description).encode()
    place = Path(sdist_directory) / f"{stem}.tar.gz"
    with (open(place, "wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,
          tarfile.open(fileobj=packed, mode="w") as archive):
        for name, content in sorted(contents.items()):
            entry = tarfile.TarInfo(f"{stem}/{name}")
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return os.path.basename(place)
