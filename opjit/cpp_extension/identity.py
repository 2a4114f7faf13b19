"""What decides the bytes of a C++ extension's binary, and where the cache keeps it:

    <root>/v1/cpp_extension.<name>/<python>-torch<version>-<base>/<key>/    <python>: such as cpython-312

<base> covers all that is known before a build: sources, the headers that a scan of #include lines finds, flags, torch, Python, and CUDA
archs. The key adds the compilers, and the headers that only a compiler finds (through an #include of a macro, say). The manifest lists
those headers, and each look-up compares their content.

For the thousands of headers of torch, Python, the CUDA Toolkit and the system, the key has versions only. Headers in /usr/local/include are
the user's; there a scan must find them, as compilers do not list what lies in a folder that they search by themselves.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from opjit import files, resources
from opjit.backends import cpu
from opjit.cpp_extension.arguments import InlineCall, LoadCall, LoaderCall
from opjit.cpp_extension.flags import capabilities, cuda_archs
from opjit.errors import BuildError, EntryError, ToolMissing, one_string
from opjit.recipe import headers, toolchain
from opjit.recipe.command_line import CommandLine
from opjit.recipe.recipe import FORMAT, base_key, document_key
from opjit.recipe.toolchain import Compiler, Nvcc, Nvrtc

MADE_BY = "torch.utils.cpp_extension"
_CUDA = (".cu", ".cuh")
# Environment variables that add folders and flags to the compilers' command lines.
_INCLUDE_VARIABLES = ("CPATH", "CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH")
_FLAG_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
_USERS_FOLDER = "/usr/local/include"  # compilers search it, but their versions say nothing about the headers that users put there


class Unsupported(Exception):
    """Arguments for torch alone, which builds them or raises an error."""


class Extension(NamedTuple):
    """Everything that decides the bytes of an extension's binary.

    Attributes:
        name: the value of TORCH_EXTENSION_NAME.
        sources: paths, sorted; empty for inline sources.
        roots: the sources, and files that flags include.
        inline: the SHA-256 of inline sources, and arguments that only torch interprets.
        texts: the inline sources.
        flags: the words of the command line by language, without the paths of folders and files.
        libraries: static libraries, which become part of the binary.
        include: the folders of headers, except those that a version in the key covers.
        program: whether it is an executable.
        archs: as in TORCH_CUDA_ARCH_LIST; empty if flags name them; None without CUDA code.
        inputs: the SHA-256 of every source and header that the scan finds, by portable name.
        toolchain: the compilers' versions; None if a compiler is missing.
        light_toolchains: the same for light headers: with NVRTC, which is preferred, and with nvcc.
        light: the version of light headers that it is built with; empty for torch/extension.h.
        pybind11: whether pybind11's own headers bind it with light headers.
        reason: why it is built with torch's own, for people.
    """

    name: str
    sources: tuple[str, ...]
    roots: tuple[str, ...]
    inline: Mapping[str, Any]
    texts: tuple[bytes, ...]
    flags: Mapping[str, Sequence[str]]
    libraries: tuple[str, ...]
    include: tuple[str, ...]
    program: bool
    archs: str | None
    inputs: Mapping[str, str]
    toolchain: Mapping[str, str] | None
    light_toolchains: tuple[Mapping[str, str] | None, ...] = (None,)
    light: str = ""
    pybind11: bool = False
    reason: str = ""

    @property
    def folder(self) -> str:
        """The folder from which portable names start."""
        return os.path.dirname(self.sources[0]) if self.sources else os.sep

    @property
    def file_name(self) -> str:
        """The binary's name in an entry."""
        return re.sub(r"\W", "_", self.name, flags=re.ASCII)[:200] + ("" if self.program else ".so")

    @property
    def purpose(self) -> str:
        """The target, for messages."""
        return f"torch {torch.__version__} and Python {platform.python_version()}" + (f", CUDA archs {self.archs}" if self.archs else "")

    def document(self) -> dict[str, Any]:
        """The document that the key hashes; a build adds the headers that the compiler found."""
        document = {
            "format": FORMAT,
            "made_by": MADE_BY,
            "name": self.name,
            "torch": [str(torch.__version__), torch.version.git_version, torch.version.cuda, bool(torch._C._GLIBCXX_USE_CXX11_ABI)],
            "python": [importlib.machinery.EXTENSION_SUFFIXES[0], platform.python_version()],
            "sources": [self._portable(path) for path in self.sources],
            "inline": dict(self.inline),
            "flags": {language: list(words) for language, words in self.flags.items()},
            "archs": self.archs,
            "inputs": dict(sorted(self.inputs.items())),
            "toolchain": None if self.toolchain is None else dict(sorted(self.toolchain.items())),
            "found": {},
        }
        if self.light:
            document["light"] = self.light
        if self.program:  # an executable has the path of torch's libraries in it
            document["run_path"] = os.path.join(os.path.dirname(torch.__file__), "lib")
        return document

    @property
    def key(self) -> str:
        """The hash of the extension and its compilers."""
        return document_key(self.document())

    @property
    def base(self) -> str:
        """The hash of the extension without its compilers."""
        return base_key(self.document())

    @property
    def place_of_entries(self) -> str:
        """The folder below v1 of the entries that differ only in their compilers, and in the headers that those found."""
        return entries_folder(self.document())

    def other_headers(self, read: Iterable[str], trusted: tuple[str, ...]) -> dict[str, str]:
        """Headers that a compiler read, but that neither the scan nor a version covers: paths by portable name."""
        scanned = {os.path.realpath(self.place(name)) for name in self.inputs}
        return {self._portable(headers.normalized(path)): path for path in read
                if not os.path.realpath(path).startswith(trusted) and os.path.realpath(path) not in scanned}

    def inputs_now(self) -> dict[str, str]:
        """The current digests of the inputs."""
        return _scan(self)

    def _portable(self, path: str) -> str:
        return headers.portable_name(path, self.folder, str(resources.folder("kernels_c")), self.include)

    def place(self, name: str) -> str:
        """The path of a portable name.

        Raises:
            EntryError: the name refers to an include folder that the extension does not have.
        """
        if name.startswith("<opjit>/"):
            return str(resources.folder("kernels_c") / name.removeprefix("<opjit>/"))
        try:
            return os.path.normpath(headers.path_of(name, self.folder, self.include))
        except IndexError:
            raise EntryError(f"its manifest names {name}, which is in no include folder") from None


def folder_name(name: str) -> str:
    """The name of the folder of all entries of an extension; similar names may share it."""
    return "cpp_extension." + "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in name[:100])


def entries_folder(document: Mapping[str, Any]) -> str:
    """The folder of an extension's entries below v1, by the document of any of them.

    Raises:
        EntryError: it is not an extension's document.
    """
    name, torchs, pythons = (document.get(field) for field in ("name", "torch", "python"))
    texts = [name, *((field[:1] or [None])[0] if isinstance(field, list) else None for field in (torchs, pythons))]
    if document.get("made_by") != MADE_BY or not all(isinstance(text, str) for text in texts):
        raise EntryError("its manifest names no C++ extension")
    name, version, suffix = map(str, texts)
    tag = "-".join(suffix.strip(".").split("-")[:2])  # cpython-312
    return f"{folder_name(name)}/{tag}-torch{version}-{base_key({**document, 'found': {}})[:20]}"


def describe(call: LoadCall | InlineCall, memory: Path | None, archs: str | None = None) -> Extension:
    """Describe the extension that a call requests.

    Args:
        memory: the folder of notes on compilers.
        archs: the archs to compile CUDA code for, in the format of TORCH_CUDA_ARCH_LIST; None is those of this machine and its environment.

    Raises:
        Unsupported: only torch can handle the call.
        FileNotFoundError: a source does not exist.
        BuildError, UnknownArch: an argument is wrong.
    """
    name, standalone = call.name, isinstance(call, LoadCall) and bool(call.is_standalone)
    if not isinstance(name, str) or not name or "/" in name or sys.platform != "linux" or torch.version.hip:
        raise Unsupported
    if standalone and call.is_python_module:
        raise Unsupported
    sources: tuple[str, ...] = ()
    texts: tuple[bytes, ...] = ()
    if isinstance(call, LoadCall):
        sources, inline = _sources(call.sources), _as_json(call.newer)
        languages = {os.path.splitext(path)[1] for path in sources}
    else:
        inline, texts = _inline(call)
        languages = {suffix for suffix, given in ((".cu", call.cuda_sources), (".sycl", call.sycl_sources)) if given}
    if call.with_sycl or call.extra_sycl_cflags or ".sycl" in languages:
        raise Unsupported
    cuda = not languages.isdisjoint(_CUDA) if call.with_cuda is None else bool(call.with_cuda)
    compilers, light, trusted = find_compilers(memory, cuda)
    flags, command_line = _flags(call, cuda)
    extra = [os.path.abspath(path) for path in _strings("extra_include_paths", call)]
    inherited = [folder for variable in _INCLUDE_VARIABLES for folder in os.environ.get(variable, "").split(os.pathsep) if folder]
    folders = (*header_folder(call, texts), *extra, *command_line.include, *inherited, *map(os.path.dirname, command_line.forced),
               _USERS_FOLDER)
    include = tuple(dict.fromkeys(folder for folder in folders if not (os.path.realpath(folder) + os.sep).startswith(trusted)))
    archives = tuple(path for path in command_line.archives() if not os.path.realpath(path).startswith(trusted))
    if cuda and archs is None:
        archs = cuda_archs(name, _strings("extra_cuda_cflags", call))
    extension = Extension(name, sources, (*sources, *command_line.forced), inline, texts, flags, archives, include, standalone,
                          archs if cuda else None, {}, compilers, light)
    return extension._replace(inputs=_scan(extension))


def _flags(call: LoaderCall, cuda: bool) -> tuple[dict[str, list[str]], CommandLine]:
    command_line = CommandLine(call.build_directory or "")
    flags = {"c": command_line.add(_strings("extra_cflags", call)), "link": command_line.add(_strings("extra_ldflags", call))}
    if cuda:
        flags["cuda"] = command_line.add(_strings("extra_cuda_cflags", call))
        flags["environment"] = [f"{variable}={os.environ.get(variable, '')}" for variable in _FLAG_VARIABLES]
        flags["torch"] = _changed_by_user()
    if any("native" in word for language in flags.values() for word in language):  # its meaning differs between machines
        flags["native"] = [cpu.identity(), *(map(str, capabilities()) if cuda else ())]
    return flags, command_line


def _changed_by_user() -> list[str]:
    """What a user can change of torch's commands for CUDA: its nvcc, and the flags of its module, which only who imported it can change."""
    found = [f"PYTORCH_NVCC={os.environ['PYTORCH_NVCC']}"] if "PYTORCH_NVCC" in os.environ else []
    if "torch.utils.cpp_extension" in sys.modules:
        from opjit.builder import torch_builder

        own = torch_builder.copy().COMMON_NVCC_FLAGS
        now = torch_builder.settings().get("COMMON_NVCC_FLAGS", own)
        found += now if now != own else []
    return found


def _strings(parameter: str, call: LoaderCall) -> list[str]:
    """An argument that is a list of strings; None means an empty list."""
    value = getattr(call, parameter) or None
    if isinstance(value, str):
        raise BuildError(one_string(call.name, parameter, value), op=call.name, target="torch's extension builder")
    if not isinstance(value, (list, tuple, type(None))) or not all(isinstance(item, str) for item in value or ()):
        raise Unsupported
    return [item.strip() for item in value or ()]


def header_folder(call: LoaderCall, texts: Iterable[bytes]) -> list[str]:
    """The build directory, if inline sources include a header from there: torch compiles them in that folder."""
    if not call.build_directory:
        return []
    folder = os.path.abspath(call.build_directory)
    scan = headers.Scan()
    return [folder] if any(scan.find(kind, name, folder, ()) for text in texts for kind, name in headers.parsed(text)[1]) else []


def _sources(given: object) -> tuple[str, ...]:
    sources = [given] if isinstance(given, str) else given
    if not isinstance(sources, (list, tuple)) or not sources:
        raise Unsupported
    try:
        return tuple(sorted(os.path.abspath(os.fspath(path)) for path in sources))
    except TypeError:
        raise Unsupported from None


def _inline(call: InlineCall) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """The arguments from which torch makes the sources, and the inline sources among them."""
    found: dict[str, Any] = {}
    texts = []
    for parameter, given in (("cpp_sources", call.cpp_sources), ("cuda_sources", call.cuda_sources)):
        sources = [given] if isinstance(given, str) else given or []
        if not isinstance(sources, list) or not all(isinstance(text, str) for text in sources):
            raise Unsupported
        content = [text.encode("utf-8", "surrogateescape") for text in sources]
        found[parameter] = [hashlib.sha256(text).hexdigest() for text in content]
        texts += content
    if not isinstance(call.functions, (str, list, dict, type(None))):
        raise Unsupported
    functions = list(call.functions.items()) if isinstance(call.functions, dict) else call.functions  # in the order of the bindings
    return found | _as_json({**call.newer, "functions": functions, "with_pytorch_error_handling": call.with_pytorch_error_handling,
                             "no_implicit_headers": call.no_implicit_headers}), tuple(texts)


def _as_json(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that only torch interprets. Unknown ones are included: torch must see them, so they must not be a cache hit."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(arguments)))
    except (TypeError, ValueError):
        raise Unsupported from None
    return found


def _scan(extension: Extension) -> dict[str, str]:
    scan = headers.Scan()
    scan.texts = {f"inline {number}": text for number, text in enumerate(extension.texts)}
    words = [word for language in extension.flags.values() for word in language]
    found = headers.closure([*extension.roots, *scan.texts], extension.include, scan, words)
    found |= {path: files.digest(path) for path in extension.libraries}
    return {extension._portable(path): digest for path, digest in found.items() if path not in scan.texts}


def find_compilers(memory: Path | None, cuda: bool) -> tuple[dict[str, str] | None, tuple[dict[str, str] | None, ...], tuple[str, ...]]:
    """The compilers' identity for the key, None if one is missing; those with light headers; and the prefixes of headers that a version
    covers."""
    python = os.path.join(sys.base_prefix, "include", f"python{sys.version_info[0]}.{sys.version_info[1]}{sys.abiflags}")
    try:
        cxx = toolchain.find_cxx(memory)
        compiler = toolchain.find_compiler(memory) if cuda else None
        nvcc = toolchain.find_nvcc(memory) if cuda else None
        nvrtc = find_nvrtc(memory) if cuda else None
    except ToolMissing:
        cxx = None
    if cxx is None:
        return None, (None,), trusted_prefixes(None, None, None, [python])
    full = compiler_identity(cxx, compiler, nvcc) if nvcc or not cuda else None
    light = [compiler_identity(cxx, None, nvrtc)] if nvrtc else []
    return full, (*light, full) if full or not light else (*light,), trusted_prefixes(cxx, nvcc, nvrtc, [python])


def find_nvrtc(memory: Path | None) -> Nvrtc | None:
    """The NVRTC of torch's version of CUDA; None if there is none."""
    return toolchain.find_nvrtc(f"cuda{torch.version.cuda.partition('.')[0]}", memory) if torch.version.cuda else None


def compiler_identity(cxx: Compiler, compiler: Compiler | None, cuda: Nvcc | Nvrtc | None) -> dict[str, str]:
    """The compilers' versions, which enter the key; their paths do not. `compiler` is nvcc's for the host."""
    versions = {"cxx.version": cxx.version, "cxx.machine": cxx.machine}
    if isinstance(cuda, Nvrtc):
        versions["nvrtc.version"] = cuda.version
    elif cuda is not None:
        versions["nvcc.build"] = cuda.build
    if compiler is not None:
        versions["cc.version"] = compiler.version
    return versions


def trusted_prefixes(cxx: Compiler | None, nvcc: Nvcc | None, nvrtc: Nvrtc | None, more: Sequence[str]) -> tuple[str, ...]:
    """The prefixes of real paths that a version in the key covers."""
    compilers = [folder for folder in cxx.includes.split(":") if folder != os.path.realpath(_USERS_FOLDER)] if cxx else []
    cuda = [*([nvcc.root] if nvcc else ()), *(nvrtc.headers.split(":") if nvrtc else ())]
    return files.inside([os.path.dirname(torch.__file__), *compilers, *cuda, *more])
