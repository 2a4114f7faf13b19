"""The C++ extension that a call of load or load_inline requests.

For the headers of torch, Python, the CUDA Toolkit and the system, the key has only versions. /usr/local/include belongs to the user. opjit
scans it, because torch's compilers do not list the headers that they find there.
"""

import importlib.machinery
import json
import os
import platform
import re
import shlex
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from opjit import files
from opjit.backends.cuda import Cuda, capabilities
from opjit.cpp_extension.arguments import InlineCall, LoadCall, LoaderCall
from opjit.errors import BuildError, ToolMissing, UnknownArch, one_string
from opjit.recipe import compilers, toolchain
from opjit.recipe.build_inputs import EXTENSION, ProjectInputs
from opjit.recipe.command_line import folders, portable, refused_flag, split, surroundings
from opjit.recipe.compilers import Compiler, Nvcc, Nvrtc
from opjit.recipe.reads import INLINE, Places, trusted_prefixes
from opjit.recipe.toolchain import BuildTools, ToolVersions

CUDA = (".cu", ".cuh")
# Increase it when light headers, or the split of CUDA files, change the binary of the same text; a test fails until you do.
LIGHT = "11"
EMULATED = "-DOPJIT_EMULATE_EXTENSION"  # of an extension with CUDA sources that have become C++
_WORDS = {"c": "extra_cflags", "link": "extra_ldflags", "cuda": "extra_cuda_cflags"}
_FLAGS = (*_WORDS.values(), "extra_sycl_cflags")
_EXPANDED = r"[`$*?~\[]"  # by the shell
_NINJA = re.compile(r"\$(?:([$ :])|\{[\w.-]+\}|[\w-]+)", re.ASCII)
_OF_TORCH = r"(?<!\$)(?:\$\$)*\$\{?(?:ninja_required_version|cxx|nvcc|sycl|\w*flags)\b"
_Call = TypeVar("_Call", bound=LoaderCall)


class Unsupported(Exception):
    """Arguments for torch alone, which builds them or raises an error."""


@dataclass(frozen=True)
class Extension(ProjectInputs):
    """All inputs of an extension's binary. Its name is TORCH_EXTENSION_NAME, and its sources are sorted."""

    made_by = EXTENSION
    include: tuple[str, ...]  # the directories of headers, apart from the compilers'
    # The SHA-256 of inline sources, and arguments that only torch interprets.
    inline: Mapping[str, Any]
    # In the form of TORCH_CUDA_ARCH_LIST. It is empty if flags name the archs, and None without CUDA code.
    archs: str | None
    # The compilers' versions with light headers: with NVRTC, which is preferred, and with nvcc.
    light_toolchains: tuple[Mapping[str, str] | None, ...] = (None,)
    light: str = (
        ""  # the version of light headers that it is built with; empty for torch/extension.h
    )
    pybind11: bool = False  # whether it uses pybind11's binding with light headers
    stable: str = ""  # the version of torch's stable ABI that its binary needs; empty if it needs this torch and Python
    reason: str = ""  # why it is built with torch/extension.h, for people

    @property
    def purpose(self) -> str:
        return f"torch {torch.__version__} and Python {platform.python_version()}" + (
            f", CUDA archs {self.archs}" if self.archs else ""
        )

    def own_fields(self) -> dict[str, Any]:
        document = {**super().own_fields(), "inline": dict(self.inline), "archs": self.archs}
        if self.stable:  # see stable.py
            return {
                **document,
                "stable": [
                    self.stable,
                    platform.machine(),
                    None if self.archs is None else torch.version.cuda,
                ],
            }
        return {
            **document,
            **({"light": self.light} if self.light else {}),
            "torch": [
                str(torch.__version__),
                torch.version.git_version,
                torch.version.cuda,
                bool(torch._C._GLIBCXX_USE_CXX11_ABI),
            ],
            "python": [importlib.machinery.EXTENSION_SUFFIXES[0], platform.python_version()],
        }


def expanded(call: _Call) -> _Call:
    """Return the call with its flags expanded by ninja and the shell, as torch's builder does. Raises Unsupported and BuildError."""
    changed = dict[str, Any]()
    for parameter in _FLAGS:
        written = " ".join(_strings(parameter, call))
        if re.search(_EXPANDED, written):
            if re.search(_OF_TORCH, written):  # variables of build.ninja
                raise Unsupported
            text = _NINJA.sub(r"\1", written)
            shown = f'exec 2>/dev/null; set -- {text}; [ $# = 0 ] || printf "%s\\0" "$@"'
            done = compilers.run_compiler(["/bin/sh", "-c", shown])
            if done.returncode:
                raise BuildError(
                    f"the shell cannot expand {parameter} of {call.name!r}: {text}",
                    op=call.name,
                    target="torch's extension builder",
                )
            words = done.stdout.split("\0")[:-1]
            changed[parameter] = [shlex.quote(word).replace("$", "$$") for word in words]
    return replace(call, **changed)


def describe(
    call: LoadCall | InlineCall, memory: Path | None, archs: str | None = None
) -> Extension:
    """Describe the extension that a call requests.

    `memory` is the directory of notes on compilers. `archs` has the form of TORCH_CUDA_ARCH_LIST, and None means the architectures of
    this machine. Raises Unsupported if only torch can handle the call, FileNotFoundError for a source, BuildError, UnknownArch.
    """
    name = call.name
    if (
        not isinstance(name, str)
        or not name
        or "/" in name
        or sys.platform != "linux"
        or torch.version.hip
    ):
        raise Unsupported
    sources = tuple[str, ...]()
    texts = dict[str, bytes]()
    if isinstance(call, LoadCall):
        if call.is_standalone:
            raise Unsupported
        sources = _sources(call.sources)
        inline = _as_json(call.newer)
        languages = {os.path.splitext(path)[1] for path in sources}
    else:
        inline, texts = _inline(call)
        languages = {
            suffix
            for suffix, given in ((".cu", call.cuda_sources), (".sycl", call.sycl_sources))
            if given
        }
    if call.with_sycl or call.extra_sycl_cflags or ".sycl" in languages:
        raise Unsupported
    cuda = not languages.isdisjoint(CUDA) if call.with_cuda is None else bool(call.with_cuda)
    cxx, full, light = _find_compilers(memory, cuda)
    words = {kind: split(_strings(parameter, call)) for kind, parameter in _WORDS.items()}
    extra = [os.path.abspath(path) for path in _strings("extra_include_paths", call)]
    extra += quoted_folder(call)
    places = _places_of_call(call, sources, extra, words, cxx)
    every = [word for each in words.values() for word in each]
    flags = _flags(words, extra, places, cuda, call.build_directory or "")
    if cuda and archs is None:
        archs = _cuda_archs(name, _strings("extra_cuda_cflags", call))
    return Extension(
        name=name,
        sources=sources,
        texts=texts,
        places=places,
        known={},  # until `now` reads the files
        toolchain=full,
        doubt=refused_flag(every) or "",
        flags=flags,
        include=places.include,
        inline=inline,
        archs=archs if cuda else None,
        light_toolchains=light,
    ).now()


def _places_of_call(
    call: LoaderCall,
    sources: tuple[str, ...],
    extra: list[str],
    words: Mapping[str, list[str]],
    cxx: Compiler | None,
) -> Places:
    """Return the directories that give files portable names."""
    every = [word for each in words.values() for word in each]
    folder = (
        os.path.dirname(sources[0]) if sources else os.path.abspath(call.build_directory or os.sep)
    )
    system = toolchain.system_folders([cxx] if cxx else [])
    own = trusted_folders()
    seen = [part for value in compilers.honoured().values() for part in value.split(os.pathsep)]
    include = [*extra, *folders(every), *filter(os.path.isabs, seen)]  # such as CPATH
    include = [each for each in include if not (os.path.realpath(each) + os.sep).startswith(own)]
    library = folders(words["link"], "L", call.build_directory or "")
    return Places(
        folder,
        tuple(dict.fromkeys(include)),
        tuple(dict.fromkeys(library)),
        system,
        own_folders(),
    )


def own_folders() -> tuple[str, ...]:
    """The directories of torch's and Python's headers, in the order of torch's commands, under the names that torch's builder uses."""
    torchs = os.path.join(os.path.dirname(torch.__file__), "include")
    return torchs, f"{torchs}/torch/csrc/api/include", sysconfig.get_path("include")


def _flags(
    words: Mapping[str, list[str]], extra: list[str], places: Places, cuda: bool, directory: str
) -> dict[str, list[str]]:
    kinds = ("c", "cuda") if cuda else ("c",)
    flags = {kind: portable(words[kind], places) for kind in kinds}
    flags["link"] = portable(words["link"], places, directory)
    flags["include"] = [places.name(folder) for folder in extra]
    every = [word for kind in flags for word in words.get(kind, ())]
    flags |= surroundings(every, toolchain.split_launcher("CXX")[0])
    variables = [f"{name}={value}" for name, value in compilers.honoured().items()]
    if variables:
        flags["environment"] = variables
    if cuda:
        flags["torch"] = _changed_by_user()
    if cuda and "native" in flags:
        flags["native"] += map(str, capabilities())
    return flags


def _changed_by_user() -> list[str]:
    """The parts of torch's commands for CUDA that a user can change: its nvcc and, after importing it, the flags of its module."""
    found = (
        [f"PYTORCH_NVCC={toolchain.split_launcher('PYTORCH_NVCC')[1]}"]
        if "PYTORCH_NVCC" in os.environ
        else []
    )
    if "torch.utils.cpp_extension" in sys.modules:
        from opjit.builder import torch_builder

        own = torch_builder.private_copy().COMMON_NVCC_FLAGS
        now = torch_builder.settings().get("COMMON_NVCC_FLAGS", own)
        found += now if now != own else []
    return found


def _cuda_archs(name: str, flags: list[str]) -> str:
    """The architectures to compile CUDA code for; empty if the flags for nvcc name them. Raises UnknownArch if nothing determines them."""
    if any("arch" in flag for flag in flags if "TORCH_EXTENSION_NAME" not in flag):
        return ""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if listed and listed != "native":
        return listed
    named = [
        re.fullmatch(r"sm_(\d+)(\d)([af]?)", part)
        for part in os.environ.get("OPJIT_ARCH", "").split("+")
    ]
    if all(named):
        return ";".join(f"{part[1]}.{part[2]}{part[3]}" for part in named if part)
    if torch.cuda.device_count() == 0:
        raise UnknownArch(
            f"{name} has CUDA code, but no GPU is visible and no arch is set: set TORCH_CUDA_ARCH_LIST=9.0 or "
            "OPJIT_ARCH=sm_90, or add -gencode flags to extra_cuda_cflags"
        )
    newest = max(
        (int(number[0]) // 10, int(number[0]) % 10)
        for arch in torch.cuda.get_arch_list()
        if (number := re.findall(r"^sm_(\d+)", arch))
    )
    # torch's choice: the visible GPUs, and PTX for later ones.
    found = sorted({min(newest, capability) for capability in capabilities()})
    return ";".join(f"{major}.{minor}" for major, minor in found) + "+PTX"


def _strings(parameter: str, call: LoaderCall) -> list[str]:
    """Return an argument that is a list of strings. None means an empty list."""
    value = getattr(call, parameter) or []
    if isinstance(value, str):
        raise BuildError(
            one_string(call.name, parameter, value),
            op=call.name,
            target="torch's extension builder",
        )
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise Unsupported
    return [item.strip() for item in value]


def quoted_folder(call: LoaderCall) -> list[str]:
    """The build directory, where torch compiles inline sources, so that they find headers there."""
    folder = call.build_directory if isinstance(call, InlineCall) else None
    return [os.path.abspath(folder)] if folder else []


def _sources(given: object) -> tuple[str, ...]:
    sources = [given] if isinstance(given, str) else given
    if not isinstance(sources, (list, tuple)) or not sources:
        raise Unsupported
    try:
        return tuple(sorted(os.path.abspath(os.fspath(path)) for path in sources))
    except TypeError:
        raise Unsupported from None


def _inline(call: InlineCall) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The arguments from which torch makes the sources, and the inline sources among them."""
    found = {}
    texts = dict[str, bytes]()
    for parameter in ("cpp_sources", "cuda_sources"):
        given = getattr(call, parameter)
        sources = [given] if isinstance(given, str) else given or []
        if not isinstance(sources, list) or not all(isinstance(text, str) for text in sources):
            raise Unsupported
        encoded = [text.encode("utf-8", "surrogateescape") for text in sources]
        found[parameter] = list(map(files.sha256, encoded))
        texts |= {f"{INLINE}{parameter}/{number}": text for number, text in enumerate(encoded)}
    if not isinstance(call.functions, (str, list, dict, type(None))):
        raise Unsupported
    # The order is the order of the bindings.
    functions = list(call.functions.items()) if isinstance(call.functions, dict) else call.functions
    return found | _as_json(
        {
            **call.newer,
            "functions": functions,
            "with_pytorch_error_handling": call.with_pytorch_error_handling,
            "no_implicit_headers": call.no_implicit_headers,
        }
    ), texts


def _as_json(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that only torch interprets. Unknown ones are included: torch must see them, so they must not be a cache hit."""
    try:
        return dict(json.loads(json.dumps(dict(arguments))))
    except (TypeError, ValueError):
        raise Unsupported from None


def _find_compilers(
    memory: Path | None, cuda: bool
) -> tuple[Compiler | None, ToolVersions | None, tuple[ToolVersions | None, ...]]:
    """Return the C++ compiler, and the compilers' part of the key: with torch/extension.h (None if one is missing), and with light
    headers."""
    try:
        cxx = toolchain.require_cxx(memory)
        compiler = toolchain.find_compiler(memory) if cuda else None
        nvcc = find_nvcc(memory) if cuda else None
        nvrtc = find_nvrtc(memory) if cuda else None
    except ToolMissing:
        return None, None, (None,)
    full = toolchain.identity(compiler, nvcc, cxx) if nvcc or not cuda else None
    light = [toolchain.identity(None, nvrtc, cxx)] if nvrtc else []
    return cxx, full, (*light, full) if full or not light else (*light,)


def find_nvrtc(memory: Path | None) -> Nvrtc | None:
    """Find the NVRTC of torch's version of CUDA, or return None."""
    return toolchain.find_nvrtc(Cuda().runtime(None), memory) if torch.version.cuda else None


def find_nvcc(memory: Path | None) -> Nvcc | None:
    """Find the nvcc of torch's version of CUDA, or return None."""
    return toolchain.nvcc_of(Cuda().runtime(None), memory)


def trusted_folders(*more: str, tools: BuildTools | None = None) -> tuple[str, ...]:
    """The prefixes of real paths that a version in the key covers: of torch, Python, CUDA, and more folders."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}{sys.abiflags}"
    found = [
        os.path.dirname(torch.__file__),
        os.path.join(sys.base_prefix, "include", version),
        *(sysconfig.get_path(name) for name in ("include", "platinclude")),
        *(tools.folders if tools else ()),
        *more,
    ]
    system = tools.compiler.includes.split(":") if tools else ()
    return trusted_prefixes(found, system)
