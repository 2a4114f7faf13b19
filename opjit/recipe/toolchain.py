"""Find the compilers, and identify them by the version and target that they print and by the programs that they run. Asking one costs a
process, so the cache keeps its answer until something changes that these programs read."""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from shutil import which
from typing import NamedTuple, NoReturn, TypeVar

from opjit import files, processes, progress
from opjit.backends import Backend, DeviceCompiler, targets
from opjit.backends.targets import Target
from opjit.errors import ToolMissing
from opjit.recipe import reads, recorder
from opjit.recipe.compilers import (
    Compiler,
    DeviceCompilerInfo,
    Nvcc,
    Nvrtc,
    is_script,
    probe_compiler,
    probe_device_compiler,
    probe_nvcc,
)

_Tool = TypeVar("_Tool", Compiler, Nvcc, DeviceCompilerInfo)


def split_launcher(variable: str) -> tuple[list[str], str]:
    """Return what CC, CXX or the like names: ``ccache gcc`` is a launcher, which no key has, and a compiler; a path may have blanks."""
    value = os.environ.get(variable, "")
    *launcher, compiler = value.split() or [""]
    if launcher and not which(value) and all(map(which, [*launcher, compiler])):
        return launcher, compiler
    return [], value


def launcher_texts(launcher: Iterable[str]) -> list[str]:
    """Return the SHA-256 of the scripts in a launcher, for the key: they may change the command. A program such as ccache does not."""
    named = [which(word) or word for word in launcher]
    return [files.digest(path) for path in named if os.path.isfile(path) and is_script(path)]


def find_compiler(notes: Path | None, host: str | None = None) -> Compiler | None:
    """Find $CC or, if it is not set, gcc, cc or clang on PATH.

    For another host CPU, find Debian's gcc for it. None if there is no compiler.
    """
    chosen = f"{host}-linux-gnu-gcc" if host and is_cross(host) else split_launcher("CC")[1]
    names = [chosen] if chosen else ["gcc", "cc", "clang"]
    return _find(notes, "cc", names, Compiler, probe_compiler)


def find_cxx(notes: Path | None) -> Compiler | None:
    """Find $CXX or, if it is not set, c++, like torch's extension builder.

    None if it does not exist.
    """
    chosen = split_launcher("CXX")[1] if "CXX" in os.environ else "c++"
    return _find(notes, "cxx", [chosen], Compiler, partial(probe_compiler, language="c++"))


def find_nvcc(notes: Path | None) -> Nvcc | None:
    """Find nvcc in $CUDA_HOME, on PATH, in /usr/local/cuda, or in pip's packages.

    None if it does not exist.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    names = [f"{home}/bin/nvcc"] if home else []
    names += ["nvcc", "/usr/local/cuda/bin/nvcc"]
    names += [str(path) for wheel in cuda_wheels() for path in sorted(wheel.glob("cu*/bin/nvcc"))]
    return _find(notes, "nvcc", names, Nvcc, probe_nvcc)


def working_nvcc(notes: Path | None) -> Nvcc | None:
    """Find nvcc.

    None if it does not exist or does not work.
    """
    try:
        return find_nvcc(notes)
    except ToolMissing:
        return None


def nvcc_of(runtime: str, notes: Path | None) -> Nvcc | None:
    """Find a working nvcc of the major version of a runtime, such as ``"cuda13"``, or of any for an empty text."""
    nvcc = working_nvcc(notes)
    major = runtime.removeprefix("cuda")
    return nvcc if nvcc and nvcc.version.startswith(major) else None


def find_device_compiler(wanted: DeviceCompiler, notes: Path | None) -> DeviceCompilerInfo | None:
    kind = f"own-{files.sha256(' '.join(wanted.version))[:8]}"
    return _find(
        notes,
        kind,
        [wanted.command],
        DeviceCompilerInfo,
        partial(probe_device_compiler, wanted=wanted),
    )


@cache
def find_nvrtc(runtime: str, notes: Path | None) -> Nvrtc | None:
    """Find NVRTC for a runtime (``"cuda13"``, or any for an empty text), which pip installs with
    torch, or which is in the CUDA Toolkit.

    Its headers are of its release: CCCL refuses the headers of another.
    """
    major = runtime.removeprefix("cuda") or "[0-9]*"
    installations = _cuda_installations(working_nvcc(notes))
    found = [(path, own) for own in installations for path in own.find(f"libnvrtc.so.{major}")]
    for library, own in found:
        builtins = own.find(f"libnvrtc-builtins.so{library.suffix}.*")
        release = builtins[0].name.partition(".so.")[2] if builtins else library.suffix[1:]
        same = [each for each in installations if each.release == release] or [own]
        same.sort(key=lambda each: each != own)
        runtimes = [path for each in same for path in each.find(f"libcudart.so{library.suffix}")]
        headers = ":".join(dict.fromkeys(str(folder) for each in same for folder in each.headers))
        if runtimes and headers:
            version = f"{release} {same[0].digest([library, *builtins])}"
            return Nvrtc(str(library), headers, str(runtimes[0].parent), version)
    return None


class _CudaInstallation(NamedTuple):
    """The headers and libraries of one release of CUDA."""

    headers: Sequence[Path]  # folders
    libraries: Sequence[Path]  # folders
    release: str

    def find(self, pattern: str) -> list[Path]:
        return [path for folder in self.libraries for path in sorted(folder.glob(pattern))]

    def digest(self, libraries: Iterable[Path]) -> str:
        """Digest the names and sizes of libraries and headers, the same with and without the CUDA Toolkit."""
        sizes = [(path.name, path.stat().st_size) for path in libraries]
        for folder in self.headers:
            sizes += sorted(
                (entry.name, entry.stat().st_size)
                for entry in os.scandir(folder)
                if entry.is_file()
            )
        return files.sha256(json.dumps(sizes))[:16]


def _cuda_installations(nvcc: Nvcc | None) -> list[_CudaInstallation]:
    """Find pip's installations and the CUDA Toolkit. pip has a folder for CUDA 13, and a folder for each library of CUDA 12."""
    roots = []
    for wheel in cuda_wheels():
        whole = sorted(wheel.glob("cu[0-9]*"))
        roots += [*([root] for root in whole), sorted({*wheel.glob("*")} - {*whole})]
    if nvcc:
        roots.append([Path(nvcc.root), *sorted(Path(nvcc.root).glob("targets/*-linux"))])
    return [_cuda_installation(each) for each in roots]


def _cuda_installation(roots: Iterable[Path]) -> _CudaInstallation:
    places = [root / name for root in roots for name in ("include", "include/cccl")]
    folders = [folder for folder in places if folder.is_dir()]
    release = {folder: cuda_release(folder) for folder in folders}
    folders.sort(key=lambda folder: not release[folder])
    libraries = [folder for root in roots for folder in (root / "lib", root / "lib64")]
    return _CudaInstallation(folders, libraries, release[folders[0]] if folders else "")


def cuda_release(folder: str | Path) -> str:
    """Return the release of CUDA's headers in a folder, such as ``"13.0"``. Empty if it has none."""
    try:
        with open(f"{folder}/cuda_runtime_api.h", "rb") as header:
            found = re.search(rb"#define CUDART_VERSION +(\d+)", header.read(1 << 14))
    except OSError:
        return ""
    number = int(found[1]) if found else 0
    return f"{number // 1000}.{number % 1000 // 10}"


def cuda_wheels() -> list[Path]:
    """Return the folders in which pip puts NVIDIA's packages, a folder each."""
    import importlib.util

    spec = importlib.util.find_spec("nvidia")
    return [Path(place) for place in spec.submodule_search_locations or ()] if spec else []


def link_missing_headers(nvcc: Nvcc, folder: Path) -> str:
    """Link those headers of pip's NVIDIA packages that a toolkit lacks, such as cuSPARSE's, into a folder. Returns its path."""
    folder.mkdir(exist_ok=True)
    for header in (path for wheel in cuda_wheels() for path in sorted(wheel.glob("*/include/*"))):
        if (
            not Path(nvcc.root, "include", header.name).exists()
            and not (folder / header.name).is_symlink()
        ):
            (folder / header.name).symlink_to(header)
    return str(folder)


def is_cross(host: str) -> bool:
    """Return whether a processor is not this machine's, so that a cross compiler builds for it."""
    import platform

    return host != platform.machine()


def binutils(compiler: Compiler) -> str:
    """Return the start of the names of the programs that change the compiler's object files."""
    host = compiler.machine.partition("-")[0]
    return f"{host}-linux-gnu-" if is_cross(host) else ""


def require_compiler(notes: Path | None, host: str | None = None) -> Compiler:
    found = find_compiler(notes, host)
    if found is None and host and is_cross(host):
        package = f"{host.replace('_', '-')}-linux-gnu"
        raise ToolMissing(
            "cc",
            f"no C compiler for {host} on this {os.uname().machine} machine: opjit looked for {host}-linux-gnu-gcc on "
            f"PATH; install it (Debian and Ubuntu: apt install gcc-{package}, for CUDA g++-{package}), or build on "
            f"a machine with {host}",
        )
    return found or _missing(
        "cc", "CC", "C", "opjit looked for $CC, gcc, cc and clang on PATH", ("gcc", "clang"), "op"
    )


def require_cxx(notes: Path | None) -> Compiler:
    looked = "torch's extension builder calls $CXX or, if it is not set, c++ on PATH"
    return find_cxx(notes) or _missing("c++", "CXX", "C++", looked, ("g++", "clang++"), "extension")


def _missing(
    tool: str, variable: str, language: str, looked: str, names: tuple[str, str], built: str
) -> NoReturn:
    if os.environ.get(variable):
        raise ToolMissing(
            tool,
            f"{variable} is {os.environ[variable]!r}, which is not an executable program; set it to the path of "
            f"{names[0]} or {names[1]} without options, which a launcher such as ccache may precede, or unset it",
        )
    raise ToolMissing(
        tool,
        f"no {language} compiler: {looked}; install one (Debian and Ubuntu: apt install {names[0]}) or set "
        f"OPJIT_CACHE to a cache that holds the built {built}",
    )


def pip_install(*parts: str) -> str:
    """Return the command that installs parts of CUDA, such as ``"nvcc"``, in the release of torch."""
    from torch.version import cuda

    release = cuda or ""
    line = "-cu12" if release.startswith("12.") else ""
    exact = f"=={release}.*" if release else ""
    return shlex.join(["pip", "install", *(f"nvidia-cuda-{part}{line}{exact}" for part in parts)])


def install_nvrtc() -> str:
    return pip_install("nvrtc", "runtime", "cccl")


def install_nvcc() -> str:
    """Return how to install nvcc, which pip has from CUDA 13 on."""
    command = pip_install("nvcc", "cccl")
    return "install the CUDA Toolkit" + ("" if "-cu12" in command else f", or {command}")


def require_nvcc(notes: Path | None) -> Nvcc:
    nvcc = find_nvcc(notes)
    if nvcc is None:
        raise ToolMissing(
            "nvcc",
            "no CUDA compiler: opjit looked for NVRTC, which pip installs with a CUDA build of torch, and for "
            "nvcc in $CUDA_HOME, on PATH, in /usr/local/cuda and in pip's packages; install the CUDA Toolkit, or "
            f"{install_nvrtc()}; both compile CUDA ops even without a GPU",
        )
    return nvcc


def require_own(backend: Backend, wanted: DeviceCompiler, notes: Path | None) -> DeviceCompilerInfo:
    own = find_device_compiler(wanted, notes)
    if own is None:
        where = (
            "the program does not exist"
            if os.sep in wanted.command
            else "opjit looked for it on PATH"
        )
        raise ToolMissing(
            wanted.command,
            f"no {wanted.command}, which compiles kernels for {backend.name}: {where}; {wanted.install}",
        )
    return own


def _find(
    notes: Path | None,
    kind: str,
    names: Iterable[str],
    tool: type[_Tool],
    probe: Callable[[str, Path], _Tool],
) -> _Tool | None:
    """Return the answer of `probe` on the first program that exists, or a note of it if nothing changed that the program and its children
    asked for."""
    found = next(filter(None, map(which, names)), None)
    if found is None:
        return None
    path = os.path.abspath(found)  # the build runs in another folder
    note = notes and notes / f"{kind}-{files.sha256(os.fsencode(path))[:16]}"
    if known := _unchanged_answer(tool, note):
        return known
    with processes.importing:  # no hit needs them
        from opjit import lock
        from opjit.recipe import record_reader

    waited = list[str]()
    with ExitStack() as once, files.scratch_folder() as work:
        if note:
            once.enter_context(lock.held(note.name, waited.append, progress.log))
        if known := _unchanged_answer(tool, note):
            return known
        if waited:  # the answer cannot be kept, so nobody needs to wait for another one
            once.close()
        recorder.start(notes)
        started = files.tick(work)
        answer = probe(path, work)
        reader = record_reader.RecordReader(str(work), reads.Moment(), (), started)
        with suppress(record_reader.Changed):  # the next request asks again
            read = reader.reads([work / recorder.LOG])
            if note and read.local and not read.doubt:
                files.write_checked(note, answer._asdict())
                reads.remember(read, reads.EVERYWHERE, note.with_suffix(".reads"), started)
    return answer


def _unchanged_answer(tool: type[_Tool], note: Path | None) -> _Tool | None:
    """Return the answer in a note, unless a file changed that the program and its children asked for."""
    known = files.read_checked(note)
    if not note or not isinstance(known, dict) or tuple(known) != tool._fields:
        return None
    return tool(**known) if reads.is_unchanged(note.with_suffix(".reads")) else None


class BuildTools(NamedTuple):
    """The tools of a build. An op has a C compiler, an extension a C++ compiler and, for the key, nvcc's compiler of the host's code."""

    cc: Compiler | None
    cxx: Compiler | None = None
    nvcc: Nvcc | None = None
    nvrtc: Nvrtc | None = None
    own: DeviceCompilerInfo | None = None  # the device's compiler

    @property
    def compiler(self) -> Compiler:
        """The compiler that links."""
        found = self.cxx or self.cc
        assert found is not None
        return found

    @property
    def folders(self) -> list[str]:
        """The folders of CUDA's files, which a version in the key covers."""
        found = [self.nvcc.root] if self.nvcc else []
        return [*found, *self.nvrtc.headers.split(":"), self.nvrtc.runtime] if self.nvrtc else found


class ToolVersions(dict[str, str]):
    """The tools in a key, and the folders that the compilers of the host's code search without a
    flag.
    """

    folders: tuple[str, ...] = ()  # of headers and libraries


def system_folders(compilers: Iterable[Compiler]) -> tuple[str, ...]:
    """Return the folders of headers and libraries that compilers search without a flag."""
    found = [
        folder
        for tool in compilers
        for folder in (*tool.includes.split(":"), *tool.libraries.split(":"))
        if folder
    ]
    return tuple(dict.fromkeys(found))


def identity(
    cc: Compiler | None,
    device: Nvcc | Nvrtc | DeviceCompilerInfo | None = None,
    cxx: Compiler | None = None,
) -> ToolVersions:
    """Return the part of a key for compilers of C and C++, each with its assembler and its linker, and for the compiler of a device."""
    versions = ToolVersions()
    hosts = {name: tool for name, tool in (("cc", cc), ("cxx", cxx)) if tool is not None}
    versions.folders = system_folders(hosts.values())
    for name, tool in hosts.items():
        versions[f"{name}.version"] = tool.version
        versions[f"{name}.machine"] = tool.machine
        versions[f"{name}.programs"] = tool.programs
    if isinstance(device, Nvrtc):
        versions["nvrtc.version"] = device.version
    elif isinstance(device, Nvcc):
        versions["nvcc.build"] = device.build
    elif device is not None:
        versions |= {"device.version": device.version, "device.sha256": device.sha256}
    return versions


def identities_of(target: Target, notes: Path | None) -> list[ToolVersions]:
    """Return the versions of a target's compilers, NVRTC before nvcc. Empty if one is missing: then any compiler's binary matches."""
    backend = target.backend
    try:
        compiler = find_compiler(notes, target.host)
        if compiler is None:
            return []
        if backend.uses_nvcc:
            nvcc = None if is_cross(target.host) else nvcc_of(target.runtime, notes)
            found = [find_nvrtc(target.runtime, notes), nvcc]
            return [identity(compiler, device) for device in found if device]
        if backend.compiler:
            own = find_device_compiler(backend.compiler, notes)
            return [identity(compiler, own)] if own else []
        return [identity(compiler)]
    except ToolMissing:
        return []


def target_of(
    arch: str, notes: Path | None, backend: Backend | None = None, host: str | None = None
) -> Target:
    """Return the target of an arch by its name; for CUDA, with torch's runtime or, for a torch without CUDA, that of the compilers.

    Raises UnknownArch if no backend builds for it.
    """
    target = targets.named(arch, backend, None, host)
    if not target.backend.uses_nvcc or target.runtime:
        return target
    found = find_nvcc(notes) or find_nvrtc("", notes)
    return targets.named(arch, target.backend, found.version if found else None, host)
