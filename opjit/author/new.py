"""``opjit new``: a folder to start from, filled from templates/."""

import json
import keyword
import os
import platform
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from opjit import files, resources
from opjit.errors import DeclarationError

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_PROJECT = r"[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?"
_TAKEN = {
    "torch",
    "opjit",
    "Any",
    "Iterator",
    "annotations",
    "reference",
    "samples",
    "workloads",
}
# The names of torch, without importing torch, which takes seconds.
_NAMESPACES = {
    "aten",
    "c10d",
    "export",
    "inductor",
    "mkl",
    "mkldnn",
    "onednn",
    "prim",
    "prims",
    "profiler",
    "quantized",
    "rngprims",
    "sparse",
    "static_runtime",
    "symm_mem",
    "torchaudio",
    "torchvision",
}


def new_op(
    qualified: str,
    parent: Path,
    backward: bool = False,
    cuda: bool = False,
    kind: str = "elementwise",
) -> Path:
    """Write the folder of a new op, whole or not at all. Raises DeclarationError for a bad name or a folder that exists."""
    namespace, name = _split_name(qualified)
    _write(parent / name, _op_files(namespace, name, backward, cuda, kind))
    return parent / name


def new_project(project: str, parent: Path, backward: bool = False, cuda: bool = False) -> Path:
    """Write a project: pyproject.toml with opjit's build hook, a package with an op, and tests."""
    package = package_name(project)
    _split_name(f"{package}::scale_add")
    arm = platform.machine() == "aarch64"
    archs = ["armv8-a", "neoverse-v2"] if arm else ["x86-64-v3", "x86-64-v4"]
    listed = json.dumps([*archs, *(["sm_80", "sm_90"] if cuda else [])])
    texts = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"src/{package}/__init__.py": "package.py",
        f"tests/test_{package}.py": "test.py",
    }
    filled = _filled("project", texts, project=project, package=package, archs=listed)
    op = _op_files(package, "scale_add", backward, cuda)
    del op["test_scale_add.py"]  # the tests of the project check every op
    inner = {f"src/{package}/scale_add/{file}": text for file, text in op.items()}
    _write(parent / project, {**filled, **inner})
    return parent / project


def new_backend(name: str, parent: Path) -> Path:
    """Write a backend for a device type of torch that opjit does not support: the object to register, a kernel, a test."""
    _check_name(name, {"cpu", "cuda", *_TAKEN}, f"{name!r} cannot be a backend's name")
    texts = {
        "backend.py": "backend.py",
        f"kernels/opjit/tensor_negate.{name}.c": "kernel.c",
        f"test_{name}.py": "test.py",
    }
    _write(parent / name, {"__init__.py": "", **_filled("backend", texts, name=name)})
    return parent / name


def _op_files(
    namespace: str, name: str, backward: bool, cuda: bool, kind: str = "elementwise"
) -> dict[str, str]:
    """Return the texts of an op's files. `kind` is a directory of templates."""
    values = {"namespace": namespace, "name": name, "folder": f".{os.sep}{name}"}
    suffixes = ["c", "cu"] if cuda else ["c"]
    texts = {f"{name}.{each}": f"{kind}/kernel.{each}" for each in suffixes}
    texts["op.py"] = f"{kind}/op.py"
    texts[f"test_{name}.py"] = "test.py" if kind == "elementwise" else "checks.py"
    if not backward:
        return _filled("op", texts, **values)
    texts |= {f"{name}_backward.{each}": f"{kind}/backward.{each}" for each in suffixes}
    found = _filled("op", texts, **values)
    found["op.py"] += resources.filled(f"op/{kind}/backward.py.in", **values)
    return found


def _filled(kind: str, texts: Mapping[str, str], /, **values: str) -> dict[str, str]:
    """Return the texts of files from the names of their templates in a folder."""
    return {
        file: resources.filled(f"{kind}/{template}.in", **values)
        for file, template in texts.items()
    }


def _split_name(qualified: str) -> tuple[str, str]:
    namespace, colons, name = qualified.partition("::")
    if not colons:
        raise DeclarationError(
            f"expected namespace::name, such as mylib::{qualified or 'scale_add'}, got {qualified!r}: your own "
            "namespace keeps the op apart from other people's"
        )
    refusal = f"{qualified!r} cannot be an op's name"
    _check_name(namespace, _NAMESPACES, refusal)
    _check_name(name, _TAKEN, refusal)
    if namespace == "opjit" and (resources.folder("kernels_c") / name).exists():
        raise DeclarationError(
            f"{refusal}, as opjit has this op; choose another, such as mylib::{name}"
        )
    return namespace, name


def _check_name(name: str, taken: Collection[str], refusal: str) -> None:
    if not re.fullmatch(_NAME, name) or keyword.iskeyword(name) or name.startswith("__"):
        raise DeclarationError(
            f"{refusal}: {name!r} is not a valid name in both C and Python; use letters, digits and _"
        )
    if name in taken:
        raise DeclarationError(
            f"{refusal}: {name!r} is taken, by torch or by the files that `opjit new` writes; choose another"
        )


def package_name(project: str) -> str:
    """Return the importable form of a project's name. Raises DeclarationError if it cannot be one."""
    if not re.fullmatch(_PROJECT, project):
        raise DeclarationError(
            f"{project!r} cannot be a wheel's name: expected letters, digits, '-' and '_', with a letter first"
        )
    return re.sub(r"[-.]+", "_", project)


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    """Make a folder of files, and of settings for editors, by one rename."""
    staged = folder.parent / f".{folder.name}.{files.random_name()}"
    try:
        settings = resources.filled(
            "clangd.in", include=json.dumps(f"-I{resources.include_path()}")
        )
        for name, text in {**texts, ".clangd": settings}.items():
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            (staged / name).write_text(text, "utf-8")
        if folder.exists() or not files.put_if_free(staged, folder):
            raise DeclarationError(
                f"{folder} exists already; nothing was written. Choose another name, or another directory to put it in"
            )
    except OSError as error:
        raise DeclarationError(
            f"{folder} cannot be written: {error}; choose another directory"
        ) from error
    finally:
        files.remove_tree(staged)
