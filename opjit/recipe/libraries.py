"""The libraries and objects that an op's author links with.

    extra_ldflags=["vendor/libfft.a", "-Lvendor", "-lfft", "-lz"], extra_cuda_ldflags=["-lcublas"]

Archives and objects, and libraries in folders that -L names, are part of the key by their content. A system library (-lz) is provided by
each machine, like libc; a CUDA library by torch. Their content is not part of the key."""

import os
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from opjit.backends import Flags, Shared
from opjit.errors import DeclarationError
from opjit.recipe import reads, toolchain

# Any other file is a script for the linker, or a list of files.
_MAGIC = {
    ".a": b"!<arch>\n",
    ".o": b"\x7fELF",
    ".so": b"\x7fELF",
}
_LTO = rb"\.(gnu\.lto_|llvm\.lto)"  # in names of sections
# CUDA's libraries that torch needs itself: a process with a CUDA build of torch has them.
_OF_TORCH_NAMES = """
    cublas cublasLt cudnn nccl cufft curand cusolver cusparse cusparseLt nvrtc nvJitLink
    cupti cufile nvshmem_host
"""
OF_TORCH = frozenset(_OF_TORCH_NAMES.split())
_NAMED = r"-l[\w+.-]+"
_TIED = r"-l(torch|c10|python|shm|opjit|aoti).*"
_OBJECT = r"[^-].*\.(a|o)"
_SHARED = r"[^-].*\.so(\.\d+)*"


def resolve(op: str, parameter: str, folder: Path, flags: Sequence[str]) -> tuple[str, ...]:
    """Return an author's linker arguments with the absolute paths of objects, archives, and
    libraries in folders that -L names.

    Raises DeclarationError if a flag would tie the binary to this machine, or does not lead to a
    file.
    """

    def refuse(flag: str, reason: str) -> DeclarationError:
        return DeclarationError(f"{op}: {parameter} cannot hold {flag!r}: {reason}")

    searched = {
        flag: reads.normalized(os.path.join(folder, flag[2:]))
        for flag in flags
        if flag.startswith("-L") and flag != "-L"
    }
    link = []
    for flag in flags:
        path = reads.normalized(os.path.join(folder, flag))
        if flag in searched:
            if not os.path.isdir(searched[flag]):
                raise refuse(
                    flag,
                    f"there is no directory {searched[flag]}; a relative path starts from {folder}",
                )
        elif re.fullmatch(_TIED, flag):
            raise refuse(
                flag,
                "it would tie the binary to one version of torch or Python; opjit.h has the "
                "parts of torch that an op needs",
            )
        elif re.fullmatch(_NAMED, flag):
            paths = (
                os.path.join(place, f"lib{flag[2:]}{suffix}")
                for place in searched.values()
                for suffix in (".so", ".a")
            )
            # A linker prefers the shared library in each folder.
            link.append(next(filter(os.path.isfile, paths), flag))
        elif re.fullmatch(_OBJECT, flag) and os.path.isfile(path):
            link.append(path)
        elif re.fullmatch(_OBJECT, flag):
            raise refuse(flag, f"there is no file {path}; a relative path starts from {folder}")
        elif re.fullmatch(_SHARED, flag):
            name = re.match(r"lib(.+?)\.so", os.path.basename(flag))
            raise refuse(
                flag,
                "the binary would name that path; link its static archive, libNAME.a, or write "
                f"'-L{os.path.dirname(flag) or '.'}', '-l{name[1] if name else 'NAME'}'",
            )
        else:
            raise refuse(
                flag,
                "it accepts a library ('-lNAME'), a directory of libraries ('-LFOLDER'), and the "
                "paths of static archives and objects ('libNAME.a', 'NAME.o'); opjit links every "
                "op with the same exports and without an RPATH",
            )
    for flag, place in searched.items():
        if not any(os.path.dirname(path) == place for path in link):
            raise refuse(
                flag,
                f"{place} holds no libNAME.so and no libNAME.a of the libraries that {parameter} names with -lNAME",
            )
    for path in filter(os.path.isabs, link):
        magic = _MAGIC[os.path.splitext(path)[1]]
        if _first_bytes(path, len(magic)) != magic:
            raise refuse(
                path,
                "expected a static archive or an object; a linker script or a thin archive names "
                "other files, and their content would not be part of the key: pass these files "
                "instead",
            )
    return tuple(link)


def _first_bytes(path: str, count: int) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(count)
    except OSError:
        return b""


def require_plain(op: str, flags: Flags) -> None:
    """Refuse files to link with that hold LTO code, which has options for the assembler: they may write any file."""
    for path in files(flags):
        if re.search(_LTO, Path(path).read_bytes()):
            raise DeclarationError(
                f"{op} links with {path}, which contains code for link-time optimization; compile "
                f"it with -fno-lto, or remove the code: objcopy -R '.gnu.lto_*' {path}"
            )


def for_cuda(flags: Flags, runtime: str) -> Flags:
    """Name each of torch's CUDA libraries by its soname, which decides the binary's bytes. One that is not found here stays as it is."""
    found = {
        flag: find_cuda_library(flag[2:], runtime) for flag in flags.link if flag[2:] in OF_TORCH
    }
    shared = {flag: each for flag, each in found.items() if each is not None}
    return flags._replace(
        link=tuple(f"-l:{shared[flag].soname}" if flag in shared else flag for flag in flags.link),
        shared=tuple(shared.values()),
    )


def find_cuda_library(name: str, runtime: str) -> Shared | None:
    """Find a CUDA library that is loaded, or that pip, the Toolkit or the system installed, but
    not next to another `runtime`.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        loaded = re.search(
            rf"^.* (/.*/(lib{re.escape(name)}\.so\.\d+)[\d.]*)$", maps.read(), re.MULTILINE
        )
    if loaded:
        return Shared(loaded[2], loaded[1])
    nvrtc = toolchain.find_nvrtc(runtime, None)
    major = runtime.removeprefix("cuda")
    folders = [Path(nvrtc.runtime)] if nvrtc else []
    folders += [
        folder for wheel in toolchain.cuda_wheels() for folder in sorted(wheel.glob("*/lib"))
    ]
    nvcc = toolchain.working_nvcc(None)
    folders += [Path(nvcc.root, "lib64")] if nvcc else []
    folders += [Path(sys.prefix, "lib"), Path("/usr/lib", f"{platform.machine()}-linux-gnu")]
    for folder in folders:
        versions = sorted(
            path
            for path in folder.glob(f"lib{name}.so.*")
            if path.suffix[1:].isdigit() and path.name.count(".") == 2
        )
        of_another = (
            list(folder.glob("libcudart.so.*")) and not (folder / f"libcudart.so.{major}").exists()
        )
        if versions and not of_another:
            return Shared(versions[-1].name, str(versions[-1]))
    return None


def include_folders(shared: Iterable[Shared]) -> list[str]:
    """Return the folders of CUDA libraries' headers, which pip installs next to the libraries."""
    places = [str(Path(each.path).parent.parent / "include") for each in shared]
    return [
        place for place in dict.fromkeys(places) if os.path.isdir(place) and place != "/usr/include"
    ]


def files(flags: Flags) -> list[str]:
    """Return the files to link with that change the binary's bytes by their content."""
    return [flag for flag in flags.link if os.path.isabs(flag)]


def arguments(flags: Flags) -> list[str]:
    """Return the linker's arguments, with the paths of torch's CUDA libraries."""
    paths = {f"-l:{each.soname}": each.path for each in flags.shared}
    return [paths.get(flag, flag) for flag in flags.link]


def to_open(flags: Flags) -> list[str]:
    """Return the shared libraries to open before the op's: the dynamic loader does not search their folders."""
    return [path for path in arguments(flags) if os.path.isabs(path) and path.endswith(".so")] + [
        each.path for each in flags.shared
    ]


def as_written(link: Iterable[str]) -> list[str]:
    """Return arguments that `resolve` turns into these."""
    written = []
    for flag in link:
        folder, name = os.path.split(flag)
        written += [f"-L{folder}", f"-l{name[3:-3]}"] if name.endswith(".so") else [flag]
    return written
