"""``opjit wheel``: op folders with binaries for several archs as a Python wheel, which needs no compiler where it is installed.

    <package>/__init__.py             declares the ops; the entry point `opjit.ops` leads opjit to it
    <package>/<op>/op.py, .c, .cu     the sources: for any other arch the op is built from them
    <package>/<op>/prebuilt/v2/…      a read-only store: a library and its manifest for each op and arch

A library calls only torch's stable C interface, so one wheel serves every Python and every torch from 2.10 on. Its tag names the
oldest glibc that the libraries run on (PEP 600); torch brings everything else. hatchling writes the wheel."""

import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.wheel import WheelBuilder

import opjit
from opjit import batch, request, resources
from opjit.author.new import package_name
from opjit.backends.targets import Target
from opjit.catalog import arguments
from opjit.errors import BadSetting, BuildError, DeclarationError, NoKernel
from opjit.library.build import LEFT_OUT, put_binary
from opjit.operators.op import Op
from opjit.store import elf, layers
from opjit.store import manifest as manifests
from opjit.store.store import default_store

_GLIBC = rb"GLIBC_2\.(\d+)\b"
_OLDEST_GLIBC = 17  # torch itself runs on nothing older
# Portable names of files that a wheel need not contain: opjit's, and the system's, which count only on a machine with a compiler.
_OF_EVERY_MACHINE = (
    "<date>/",
    "<cwd>",
    "<opjit>/",
    "<program>/",
    "<root>/",
    "<system ",
    "<variable>/",
)


def make(
    folders: Sequence[Path],
    archs: Sequence[str],
    directory: Path,
    name: str | None = None,
    version: str = "0.1.0",
    hosts: Sequence[str] = (),
) -> Path:
    """Write a wheel of op folders, with a package that declares them, into a directory, and return its path. Each becomes
    a folder of the package. `name` is the project's, and with ``_`` for ``-`` the package's; default: the ops' namespace and ``-ops``."""
    for folder in folders:
        if folder.is_dir() and not (folder / "op.py").is_file():
            raise DeclarationError(f"expected an op.py in {folder}; name the directory of each op")
    ops = {folder.resolve(): arguments.ops(os.path.join(".", folder)) for folder in folders}
    twice, count = Counter(folder.name for folder in ops).most_common(1)[0]
    if count > 1:
        raise DeclarationError(
            f"two directories are named {twice}; rename one, because each becomes a directory of the wheel's package"
        )
    every = [op for found in ops.values() for op in found]
    namespaces = sorted({op.schema.namespace for op in every})
    if name is None and len(namespaces) > 1:
        raise BadSetting(
            f"the ops have {len(namespaces)} namespaces, {' and '.join(namespaces)}; name the wheel with --name NAME"
        )
    name = name or f"{namespaces[0]}-ops"
    package = package_name(name)
    targets = targets_for(every, archs, hosts)
    values = {"ops": ", ".join(op.qualified for op in every), "archs": ", ".join(map(str, targets))}
    project = {
        "name": name,
        "version": version,
        "description": f"The torch operators {values['ops']}",
        "requires-python": ">=3.10",
        "dependencies": [f"opjit>={opjit.__version__}", "torch>=2.10"],
        "entry-points": {"opjit.ops": dict.fromkeys(namespaces, package)},
    }
    with TemporaryDirectory(prefix="opjit-wheel-") as staged:
        root = Path(staged, package)
        # Before anything is compiled, because it checks the version.
        builder = _builder(root, project)
        for folder, found in ops.items():
            shutil.copytree(folder, root / folder.name, ignore=LEFT_OUT)
            add_binaries(found, targets, folder, root / folder.name)
        (root / "__init__.py").write_text(
            resources.filled("wheel/package.py.in", **values), "utf-8"
        )
        data = {**builder.get_default_build_data(), **binary_tag(root)}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            return Path(builder.build_standard(str(directory), **data))
        except OSError as error:
            raise BuildError(
                f"the wheel cannot be written to {directory}: {error}; choose another directory",
                op=values["ops"],
                target=values["archs"],
            ) from error


def _builder(package: Path, project: dict[str, Any]) -> WheelBuilder:
    """Make hatchling's builder of a package's wheel; `project` is that table of a pyproject.toml."""
    tool = {"hatch": {"build": {"packages": [package.name], "ignore-vcs": True}}}
    builder = WheelBuilder(str(package.parent), config={"project": project, "tool": tool})
    try:
        builder.metadata.validate_fields()
    except ValueError as error:
        raise BadSetting(str(error)) from error
    return builder


def targets_for(ops: Sequence[Op], archs: Sequence[str], hosts: Sequence[str] = ()) -> list[Target]:
    """Return the targets of archs, for each of which an op has a kernel.

    Raises BadSetting, NoKernel or UnknownArch if an op cannot be built for one.
    """
    if not archs:
        raise BadSetting("name the archs to build for, such as x86-64-v3, x86-64-v4 or sm_90")
    found = batch.targets_of(archs, default_store(), hosts)
    for target in found:
        if not batch.pairs(ops, [target]):
            raise NoKernel(
                f"no kernel for {target.backend.name} in {', '.join(op.qualified for op in ops)}, so there is nothing to build "
                f"for {target.arch}; leave it out"
            )
    return found


def add_binaries(ops: Sequence[Op], targets: Sequence[Target], root: Path, to: Path) -> None:
    """Put a binary of each op for each target next to the op's source, for the time when `root` is copied to `to`.
    `root` is the resolved folder of the wheel's package, or of the one op.

    Raises DeclarationError where an op includes a file from outside."""
    for op, target in batch.pairs(ops, targets):
        entry = request.entry(op, target)
        source = op.declaration.source(target.backend)
        manifest = manifests.read_manifest(entry.folder)
        if "debug" in manifest.document:
            raise BadSetting(
                "OPJIT_DEBUG is set, but a wheel cannot contain debug builds, because they contain paths of this machine; unset it"
            )
        document = manifest.document
        for name in (*document["known"], *document["inputs"]):
            if name.startswith(_OF_EVERY_MACHINE):
                continue
            place = Path(os.path.normpath(source.parent / name))
            if name.startswith("<") or not place.is_relative_to(root):
                raise DeclarationError(
                    f"{op.qualified} includes {name}, which is outside {root}, so it would not be in the wheel; move it into that directory"
                )
        # Without the time that the build took: the same sources make the same wheel.
        manifest = manifest._replace(built_with={"opjit": opjit.__version__})
        put_binary(entry, manifest, to / source.parent.relative_to(root))


def binary_tag(folder: Path) -> dict[str, Any]:
    """Return a wheel's tag for the libraries in a folder, ``py3-none-manylinux_2_17_x86_64``, with a part for each of their processors."""
    contents = [library.read_bytes() for library in folder.rglob(f"{layers.FOLDER}/**/*.so")]
    versions = [int(version) for content in contents for version in re.findall(_GLIBC, content)]
    oldest = max([_OLDEST_GLIBC, *versions])
    platforms = sorted(
        f"manylinux_2_{oldest}_{machine}" for machine in {*map(elf.machine, contents)}
    )
    return {"pure_python": False, "tag": f"py3-none-{'.'.join(platforms)}"}
