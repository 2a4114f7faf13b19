"""``opjit wheel``: op folders with binaries for several archs as a Python wheel, which needs no compiler where it is installed.

    <package>/__init__.py             declares the ops; the entry point `opjit.ops` leads opjit to it
    <package>/<op>/op.py, .c, .cu     the sources: for any other arch the op is built from them
    <package>/<op>/prebuilt/v1/…      a store that is only read, with a library and its manifest for each op and arch

A library calls nothing but torch's stable C interface, so the one wheel serves every Python and every torch from 2.10 on. It is
tagged with the oldest glibc that its libraries ask for (PEP 600); all else that they need comes with torch.
"""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from string import Template

import opjit
from opjit import api, catalog, files, layers, manifest, resources
from opjit.errors import BuildError, NoKernel, OpjitError, UnknownArch
from opjit.op import Op
from opjit.store import Entry, Store
from opjit.targets import Target

_PROJECT = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"(\d+!)?\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9]+(\.[a-z0-9]+)*)?")
_GLIBC = re.compile(rb"GLIBC_2\.(\d+)\b")
_OLDEST_GLIBC = 17  # 2.17: what pip knows the tag of everywhere
REQUIRES = (f"opjit>={opjit.__version__}", "torch>=2.10")


class WheelError(OpjitError):
    """A wheel cannot be made of that."""


def make(folders: Sequence[Path], archs: Sequence[str], directory: Path, name: str | None = None, version: str = "0.1.0") -> Path:
    """Write a wheel of op folders, with a package that declares them.

    Args:
        folders: of ops; each becomes a folder of the package.
        archs: to build for, such as ``["x86-64-v3", "sm_90"]``.
        directory: where the wheel goes.
        name: of the project; None is the ops' one namespace and ``-ops``. The package is named after it, with ``_``.

    Returns:
        The wheel's path.

    Raises:
        WheelError: the folders, the name or the version cannot make a wheel.
        UnknownArch, ToolMissing, CompileError: a binary cannot be built here.
    """
    for folder in folders:
        if folder.is_dir() and not (folder / "op.py").is_file():
            raise WheelError(f"expected the folder of an op, with its op.py in it, and {folder} has none; name each op's folder")
    ops = {folder.resolve(): catalog.add_path(folder) for folder in folders}
    namespaces = sorted({op.schema.namespace for found in ops.values() for op in found})
    if name is None and len(namespaces) > 1:
        raise WheelError(f"the ops are of {len(namespaces)} namespaces, {' and '.join(namespaces)}, so none of them is the wheel's name; "
                         "give it one: --name NAME")
    name = name or f"{namespaces[0]}-ops"
    package = package_name(name, version)
    contents: dict[str, bytes] = {}
    for folder in ops:
        if f"{package}/{folder.name}/op.py" in contents:
            raise WheelError(f"two folders are named {folder.name}; rename one: both would be {package}/{folder.name}")
        contents.update({f"{package}/{folder.name}/{file}": content for file, content in tree(folder).items()})
    targets = wanted(archs, [op for found in ops.values() for op in found])
    for folder, found in ops.items():
        contents.update({f"{package}/{folder.name}/{file}": content for file, content in prebuilt(found, targets, folder).items()})
    names = ", ".join(op.qualified for found in ops.values() for op in found)
    values = {"ops": names, "archs": ", ".join(map(str, targets))}
    contents[f"{package}/__init__.py"] = Template(resources.template("wheel/package.py.in")).substitute(values).encode()
    fields = {"Name": [name], "Version": [version], "Summary": [f"The torch operators {names}"], "Requires-Python": [">=3.10"],
              "Requires-Dist": list(REQUIRES)}
    return write(directory, fields, contents, {"opjit.ops": dict.fromkeys(namespaces, package)})


def package_name(name: str, version: str) -> str:
    """The importable form of a project's name.

    Raises:
        WheelError: the name or the version is none.
    """
    package = re.sub(r"[-.]+", "_", name)
    if not _PROJECT.fullmatch(name) or not package.isidentifier():
        raise WheelError(f"{name!r} cannot be a wheel's name: expected letters, digits, '-' and '_', with a letter first")
    if not _VERSION.fullmatch(version):
        raise WheelError(f"{version!r} is no version: expected one like 1.2.0 or 1.2.0rc1")
    return package


def wanted(archs: Sequence[str], ops: Sequence[Op]) -> list[Target]:
    """The targets of archs, each of which an op must have a kernel for and this machine's compilers must build for.

    Raises:
        UnknownArch, NoKernel, WheelError: one is not.
    """
    if not archs:
        raise WheelError("a wheel is for archs: name them, such as --arch x86-64-v3,x86-64-v4,sm_90")
    here, found = platform.machine(), []
    for arch in dict.fromkeys(archs):
        target = api.wanted(None, arch)
        machine = "aarch64" if arch == "aarch64" else "x86_64"
        if not target.backend.uses_nvcc and target.backend.name == "cpu" and machine != here:
            raise UnknownArch(f"{arch} cannot be built here: gcc on this {here} machine compiles for {here} only; run `opjit wheel` on an "
                              f"{machine} machine for a wheel of its own")
        if not any(target.backend.name in op.backends() for op in ops):
            raise NoKernel(f"none of {', '.join(op.qualified for op in ops)} has a kernel for {target.backend.name}, so there is nothing "
                           f"to build for {arch}; leave it out")
        found.append(target)
    return found


def tree(root: Path) -> dict[str, bytes]:
    """The files of a package or of an op's folder by their names: not hidden ones, caches, binaries from before, or an op's tests."""
    found = {}
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if path.is_file() and not any(part.startswith(".") or part in ("__pycache__", layers.FOLDER) for part in parts) and not (
                path.name.startswith("test_") and (path.parent / "op.py").is_file()):
            found["/".join(parts)] = path.read_bytes()
    return found


def prebuilt(ops: Iterable[Op], targets: Sequence[Target], root: Path) -> dict[str, bytes]:
    """The layers of ops that lie under a folder that becomes part of a wheel, by file names in it; what is missing is built.

    Raises:
        WheelError: an op includes a file from outside.
        ToolMissing, CompileError: see `opjit.errors`.
    """
    found: dict[str, bytes] = {}
    for op in ops:
        for target in targets:
            if target.backend.name not in op.backends():
                continue
            source = op.source(target.backend)
            inputs = api.describe(op, target, Store(Path(os.devnull))).inputs
            for name in inputs:
                outside = name.startswith("<include ") or not Path(os.path.normpath(source.parent / name)).is_relative_to(root)
                if outside and not name.startswith("<opjit>/"):
                    raise WheelError(f"{op.qualified} includes {name}, which lies outside of {root} and would not be in the wheel; move it "
                                     "there")
            place = source.parent.relative_to(root)
            folder = Store(Path(layers.FOLDER)).folder(op.qualified, target)
            found.update({(place / folder / name).as_posix(): content for name, content in _files(api.entry(op, target))})
    return found


def _files(entry: Entry) -> Iterator[tuple[str, bytes]]:
    """What of an entry is needed where it is only read."""
    described = manifest.parse((entry.folder / manifest.NAME).read_bytes())
    yield f"{entry.key}/{described.library}", entry.library.read_bytes()
    yield f"{entry.key}/{manifest.NAME}", described._replace(built_with={"opjit": opjit.__version__}).dump()  # not how long it took


def platform_tag(libraries: Iterable[bytes]) -> str:
    """The oldest glibc that the libraries run on, with the machine: ``manylinux_2_17_x86_64``."""
    minor = max((int(number) for content in libraries for number in _GLIBC.findall(content)), default=0)
    return f"manylinux_2_{max(minor, _OLDEST_GLIBC)}_{platform.machine()}"


def write(directory: Path, fields: Mapping[str, Sequence[str]], contents: Mapping[str, bytes], points: Mapping[str, Mapping[str, str]],
          description: str = "") -> Path:
    """Write a wheel; the same contents give the same bytes.

    Args:
        fields: of the metadata, by name.
        points: entry points, by group and name.

    Raises:
        BuildError: the directory cannot be written.
    """
    libraries = [content for name, content in contents.items() if name.endswith(".so")]
    [name], [version] = fields["Name"], fields["Version"]
    tag = f"py3-none-{platform_tag(libraries) if libraries else 'any'}"
    stem = f"{package_name(name, version).lower()}-{version}"
    info = f"{stem}.dist-info"
    complete = dict(sorted(contents.items()))
    complete[f"{info}/METADATA"] = metadata(fields, description).encode()
    complete[f"{info}/WHEEL"] = (f"Wheel-Version: 1.0\nGenerator: opjit {opjit.__version__}\n"
                                 f"Root-Is-Purelib: {'false' if libraries else 'true'}\nTag: {tag}\n").encode()
    if points:
        complete[f"{info}/entry_points.txt"] = "\n".join(
            f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in sorted(each.items())) for group, each in sorted(points.items())
        ).encode()
    record = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in complete.items()]
    complete[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    place = directory / f"{stem}-{tag}.whl"
    staged = directory / f".{files.unique()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(staged, "x", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for name, content in complete.items():
                entry = zipfile.ZipInfo(name)  # dated 1980, as every time
                entry.external_attr = 0o100644 << 16
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, content, compresslevel=9)
        os.replace(staged, place)
    except OSError as error:
        raise BuildError(f"the wheel cannot be written to {directory}: {error}; choose another folder", op=stem, target=tag) from error
    finally:
        staged.unlink(missing_ok=True)
    return place


def metadata(fields: Mapping[str, Sequence[str]], description: str) -> str:
    lines = [f"{field}: {value}" for field, values in fields.items() for value in values]
    return "\n".join(["Metadata-Version: 2.1", *lines, "", description]) + ("\n" if description else "")


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
