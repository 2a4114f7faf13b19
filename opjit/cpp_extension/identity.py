"""A C++ extension that torch.utils.cpp_extension builds: what decides the bytes of its binary, and the entry that has them.

    <root>/v1/cpp_extension.<name>/<python>-torch<version>-<base>/<key>/

<base> stands for what can be told before a build: sources, the headers that a scan of their #include lines finds, flags, torch,
Python, CUDA archs. The key adds who compiled, and the headers that only the compiler found (an #include of a macro, say). Those
are listed in the manifest, and their content is compared at each look-up.

The headers of torch, Python, the CUDA Toolkit and the system are thousands; their versions stand for them.
"""

import hashlib
import importlib.machinery
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch

from opjit import files, headers, resources, store, toolchain
from opjit.backends import cpu
from opjit.errors import BuildError, EntryError, ToolMissing, one_string
from opjit.recipe import FORMAT, base_key, document_key
from opjit.store import Entry, Store
from opjit.toolchain import Compiler, Nvcc
from opjit.words import Words

_CUDA = (".cu", ".cuh")
# What in the environment gives the compilers folders and flags.
_INCLUDE_VARIABLES = ("CPATH", "CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH")
_FLAG_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
# Arguments that decide no byte, or that have a place of their own in the key.
_COMMON = {"name", "extra_cflags", "extra_cuda_cflags", "extra_sycl_cflags", "extra_ldflags", "extra_include_paths", "build_directory",
           "verbose", "with_cuda", "with_sycl", "is_python_module", "keep_intermediates"}
_OF_LOAD = _COMMON | {"sources", "is_standalone"}
_OF_INLINE = _COMMON | {"cpp_sources", "cuda_sources", "sycl_sources", "use_pch"}


class Unusual(Exception):
    """Arguments that only torch itself can answer: it builds them, or says what is wrong with them."""


class Extension(NamedTuple):
    """Everything that decides the bytes of an extension's binary.

    Attributes:
        name: what TORCH_EXTENSION_NAME is.
        sources: paths, in order; none where texts stand for them.
        roots: the sources, and what flags include.
        inline: SHA-256 of the texts that stand for sources, what torch makes more of them from, and what only torch understands.
        texts: the texts themselves.
        flags: by language, each word of the command line; folders and files without their paths.
        libraries: static ones, which end up in the binary.
        include: folders that headers are looked for in, except those that a version stands for.
        program: whether it is linked as an executable.
        archs: as in TORCH_CUDA_ARCH_LIST; empty where flags name them; None where nothing is compiled for CUDA.
        inputs: SHA-256 of every source and header that the scan found, by its portable name.
        toolchain: who compiles; None where somebody is missing.
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

    @property
    def folder(self) -> str:
        """Where portable names start from."""
        return os.path.dirname(self.sources[0]) if self.sources else os.sep

    @property
    def file_name(self) -> str:
        """Of the binary, in an entry."""
        return re.sub(r"\W", "_", self.name, flags=re.ASCII)[:200] + ("" if self.program else ".so")

    @property
    def for_whom(self) -> str:
        """What it is built for, in words."""
        return f"torch {torch.__version__} and Python {_python()}" + (f", CUDA archs {self.archs}" if self.archs else "")

    def document(self) -> dict[str, Any]:
        """What the key is the hash of, before the compiler's own list of headers is known."""
        document = {
            "format": FORMAT,
            "made_by": "torch.utils.cpp_extension",
            "name": self.name,
            "torch": [str(torch.__version__), torch.version.git_version, torch.version.cuda, bool(torch._C._GLIBCXX_USE_CXX11_ABI)],
            "python": [importlib.machinery.EXTENSION_SUFFIXES[0], _python()],
            "sources": [self._portable(path) for path in self.sources],
            "inline": dict(self.inline),
            "flags": {language: list(words) for language, words in self.flags.items()},
            "archs": self.archs,
            "inputs": dict(sorted(self.inputs.items())),
            "toolchain": None if self.toolchain is None else dict(sorted(self.toolchain.items())),
            "found": {},
        }
        if self.program:  # it looks for torch's libraries where torch's builder found them
            document["run_path"] = os.path.join(os.path.dirname(torch.__file__), "lib")
        return document

    @property
    def key(self) -> str:
        """Identity of what is asked for and who compiles it; the lock's name."""
        return document_key(self.document())

    @property
    def base(self) -> str:
        """Identity of what is asked for, whoever compiles it."""
        return base_key(self.document())

    def shelf(self, root: Store) -> Path:
        """The folder of the entries that differ in nothing but their compilers and what these found."""
        tag = f"{sys.implementation.cache_tag}-torch{torch.__version__}-{self.base[:20]}"
        name = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in self.name[:100])
        return root.base / f"cpp_extension.{name}" / tag

    def find(self, root: Store, quiet: bool = False) -> Entry | None:
        """The verified entry; None is a miss, with one warning where there was an entry that is no good.

        Where there is no compiler, anybody's binary will do.
        """
        wanted = self.document()

        def fits(known: dict[str, Any]) -> bool:
            found = known.get("found")
            compilers = known.get("toolchain") if self.toolchain is None else wanted["toolchain"]
            return known == {**wanted, "toolchain": compilers, "found": found} and self._holds(found)

        shelf = self.shelf(root)
        return store.first(shelf, None, fits, quiet) if root.trusted(shelf.parent, shelf) else None

    def _holds(self, found: object) -> bool:
        """Whether the headers that a compiler found are what they were."""
        if not isinstance(found, dict):
            raise EntryError("its manifest does not say which headers the compiler found")
        try:
            return all(files.digest(self._place(name)) == content for name, content in found.items())
        except OSError:
            return False

    def headers_beyond(self, read: Iterable[str], trusted: tuple[str, ...]) -> dict[str, str]:
        """What the compiler read that neither the scan found nor a version stands for: path by portable name."""
        known = {os.path.realpath(self._place(name)) for name in self.inputs}
        return {self._portable(headers.plain(path)): path for path in read
                if not os.path.realpath(path).startswith(trusted) and os.path.realpath(path) not in known}

    def inputs_now(self) -> dict[str, str]:
        """The inputs' digests as the files are at this moment."""
        return _scan(self)

    def _portable(self, path: str) -> str:
        return headers.portable_name(path, self.folder, str(resources.folder("kernels_c")), self.include)

    def _place(self, name: str) -> str:
        """The path of a portable name."""
        found = re.match(r"<(opjit|include (\d+))>/", name)
        if found is None:
            return os.path.normpath(os.path.join(self.folder, name))
        if found[2] is None:
            return str(resources.folder("kernels_c") / name[found.end():])
        if int(found[2]) >= len(self.include):
            raise EntryError(f"its manifest names {name}, and there is no such folder")
        return os.path.join(self.include[int(found[2])], name[found.end():])


def describe(arguments: Mapping[str, Any], memory: Path | None) -> Extension:
    """What a call of load or load_inline asks for.

    Args:
        arguments: of torch's function, by name.
        memory: where compilers are remembered.

    Raises:
        Unusual: it is not opjit's to answer.
        FileNotFoundError: a source or a header cannot be read.
        BuildError, UnknownArch: an argument is wrong.
    """
    name, standalone = arguments["name"], bool(arguments.get("is_standalone"))
    if not isinstance(name, str) or not name or "/" in name or sys.platform != "linux" or torch.version.hip:
        raise Unusual
    if standalone and arguments["is_python_module"]:
        raise Unusual
    sources = _sources(arguments)
    inline = _beyond(arguments, _OF_LOAD) if "sources" in arguments else _inline(arguments)
    sycl = any(arguments.get(parameter) for parameter in ("with_sycl", "sycl_sources", "extra_sycl_cflags"))
    if sycl or any(path.endswith(".sycl") for path in sources):
        raise Unusual
    with_cuda = arguments["with_cuda"]
    compiled_for_cuda = any(path.endswith(_CUDA) for path in sources) or bool(arguments.get("cuda_sources"))
    cuda = compiled_for_cuda if with_cuda is None else bool(with_cuda)
    who, trusted = _who(memory, cuda)
    words = Words()
    flags = {"c": words.of(_strings("extra_cflags", arguments)), "link": words.of(_strings("extra_ldflags", arguments))}
    if cuda:
        from opjit import archs

        flags["cuda"] = words.of(_strings("extra_cuda_cflags", arguments))
        flags["environment"] = [f"{variable}={os.environ.get(variable, '')}" for variable in _FLAG_VARIABLES]
    if any("native" in word for language in flags.values() for word in language):  # what it stands for, not how it is spelled
        flags["native"] = [cpu.identity(), *(map(str, archs.capabilities()) if cuda else ())]
    given = [os.path.abspath(path) for path in _strings("extra_include_paths", arguments)]
    inherited = [folder for variable in _INCLUDE_VARIABLES for folder in os.environ.get(variable, "").split(os.pathsep) if folder]
    texts = inline.pop("texts", ())
    folders = (*beside(arguments, texts), *given, *words.include, *inherited, *map(os.path.dirname, words.forced))
    include = tuple(dict.fromkeys(folder for folder in folders if not (os.path.realpath(folder) + os.sep).startswith(trusted)))
    archives = tuple(path for path in words.archives() if not os.path.realpath(path).startswith(trusted))
    extension = Extension(name, sources, (*sources, *words.forced), inline, texts, flags, archives, include, standalone,
                          archs.chosen(name, _strings("extra_cuda_cflags", arguments)) if cuda else None, {}, who)
    return extension._replace(inputs=_scan(extension))


def _strings(parameter: str, arguments: Mapping[str, Any]) -> list[str]:
    """A list of strings among the arguments; None is an empty one."""
    value = arguments[parameter]
    if isinstance(value, str):
        raise BuildError(one_string(arguments["name"], parameter, value), op=str(arguments["name"]), target="torch's extension builder")
    if not isinstance(value, (list, tuple, type(None))) or not all(isinstance(item, str) for item in value or ()):
        raise Unusual
    return [item.strip() for item in value or ()]


def beside(arguments: Mapping[str, Any], texts: Iterable[bytes]) -> list[str]:
    """The build directory of inline sources that include a header there: torch would put them beside it."""
    if not arguments["build_directory"]:
        return []
    folder = os.path.abspath(arguments["build_directory"])
    return [folder] if any(True for text in texts for _ in headers.included(text, folder, ())) else []


def _sources(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    given = arguments.get("sources", [])
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, (list, tuple)) or ("sources" in arguments and not given):
        raise Unusual
    try:
        return tuple(os.path.abspath(os.fspath(path)) for path in given)
    except TypeError:
        raise Unusual from None


def _inline(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What torch makes the sources from, and the texts among it under "texts"."""
    found: dict[str, Any] = {}
    texts = []
    for parameter in ("cpp_sources", "cuda_sources"):
        given = [arguments[parameter]] if isinstance(arguments[parameter], str) else arguments[parameter] or []
        if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
            raise Unusual
        content = [text.encode("utf-8", "surrogateescape") for text in given]
        found[parameter] = [hashlib.sha256(text).hexdigest() for text in content]
        texts += content
    found |= _beyond(arguments, _OF_INLINE)  # functions, with_pytorch_error_handling, and more
    functions = found["functions"]
    if isinstance(functions, dict):  # its order is that of the bindings
        found["functions"] = [list(item) for item in functions.items()]
    elif not isinstance(functions, (str, list, type(None))):
        raise Unusual
    return {**found, "texts": tuple(texts)}


def _beyond(arguments: Mapping[str, Any], known: Set[str]) -> dict[str, Any]:
    """Arguments that only torch understands: what later versions of it add, and words that it will refuse, which must be no hit."""
    found = {parameter: arguments[parameter] for parameter in arguments.keys() - known}
    if not all(map(_plain, found.values())):
        raise Unusual
    return found


def _plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(isinstance(name, str) and _plain(item) for name, item in value.items())
    return value is None or isinstance(value, (str, bool, int))


def _scan(extension: Extension) -> dict[str, str]:
    included = [path for text in extension.texts for path in headers.included(text, "", extension.include)]
    found = headers.closure([*extension.roots, *included], extension.include)
    found |= {path: files.digest(path) for path in extension.libraries}
    return {extension._portable(path): digest for path, digest in found.items()}


def _who(memory: Path | None, cuda: bool) -> tuple[dict[str, str] | None, tuple[str, ...]]:
    """Who compiles, for the key, and what the real path of a header starts with that a version stands for."""
    try:
        cxx = toolchain.find_cxx(memory)
        compiler = toolchain.find_compiler(memory) if cuda else None
        nvcc = toolchain.find_nvcc(memory) if cuda else None
    except ToolMissing:
        cxx = compiler = nvcc = None
    known = cxx is not None and (not cuda or nvcc is not None)
    python = os.path.join(sys.base_prefix, "include", f"python{sys.version_info[0]}.{sys.version_info[1]}{sys.abiflags}")
    return identity(cxx, compiler, nvcc) if known and cxx is not None else None, versioned(cxx, nvcc, [python])


def identity(cxx: Compiler, compiler: Compiler | None, nvcc: Nvcc | None) -> dict[str, str]:
    """What enters an extension's key: who compiles, not from where."""
    who = {"cxx.version": cxx.version, "cxx.machine": cxx.machine}
    if nvcc is not None:
        who["nvcc.build"] = nvcc.build
    if compiler is not None:
        who["cc.version"] = compiler.version
    return who


def versioned(cxx: Compiler | None, nvcc: Nvcc | None, more: Sequence[str]) -> tuple[str, ...]:
    """What the real path of a file starts with that a version in the key stands for."""
    folders = [os.path.dirname(torch.__file__), *(cxx.includes.split(":") if cxx else ()), *([nvcc.root] if nvcc else ()), *more]
    return files.inside(folders)


def _python() -> str:
    return ".".join(map(str, sys.version_info[:3]))
