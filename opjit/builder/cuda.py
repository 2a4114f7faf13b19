"""A CUDA kernel without nvcc: NVRTC compiles the device's part of a .cu file in this process, the C++ compiler the host's.

nvcc parses CUDA's headers three times, in five processes one after another: 0.6 to 0.9 s for an empty file. This takes 0.2 to 0.3 s
(tests/benchmarks/cold.py --cuda), and needs no CUDA Toolkit. Files that it does not take are left to nvcc.

    work/host/, device/       the split files, in the places of the op's folder and opjit's headers
    opjit_host.o              the host's part
    opjit_kernel.fatbin       machine code for each arch
    opjit_fatbin.c            registers it with the CUDA runtime, as code that nvcc generates does
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from opjit import resources
from opjit.backends import Flags
from opjit.builder import nvrtc, split
from opjit.builder.tokens import Unsupported
from opjit.recipe import headers, toolchain
from opjit.recipe.recipe import Recipe
from opjit.recipe.toolchain import Compiler, Nvrtc

__all__ = ["Failed", "Unsupported", "compile_kernel"]
_DEPTH = 4  # folders above an op's own that its headers may lie in: "../common.h"
_DEVICE = re.compile(r"-[DU].*|-std=.*|--?use_fast_math|--?(ftz|prec-div|prec-sqrt|fmad)=\w+|--?maxrregcount=\d+|--?restrict|"
                     r"--?extra-device-vectorization|--split-compile=\d+|--frandom-seed=\w+|--?diag-(suppress|warn|error)=[\d,]+")
_HOST = re.compile(r"-[DU].*|-std=.*|-O\d")
_NEITHER = re.compile(r"-gencode=.*|-W.*|-w|-Xcudafe=.*|-U__CUDA_NO_.*|-MD|--?(expt-)?relaxed-constexpr")
# Functions that C++'s headers overload, in the host's part. Those headers take 0.1 s, so they are read only for these.
_MATH = re.compile(r"\b(?:std\s*::|(?:l?l?abs|fabs|sqrt|cbrt|hypot|pow|exp2?|expm1|log(?:2|10|1p)?|l?l?r?int|l?l?round|nearbyint|ceil|"
                   r"floor|trunc|fm(?:in|ax|od|a)|fdim|remainder|copysign|a?(?:sin|cos|tan)h?|atan2|erfc?|[tl]gamma|isnan|isinf|isfinite|signbit|"
                   r"ldexp|frexp|scalbl?n|div)\s*\()")


class Failed(Exception):
    """A compiler refused the code. The message is its output."""


class Made(NamedTuple):
    """Files for the link, and flags for it."""

    source: Path
    objects: tuple[Path, ...]
    link: tuple[str, ...]


def compile_kernel(recipe: Recipe, glue: Path, work: Path, compiler: Compiler, found: Nvrtc) -> Made:
    """Compile an op's kernel in a folder.

    Args:
        glue: the generated .cu file, which includes the author's.

    Raises:
        Unsupported: only nvcc takes the file or a flag.
        Failed: a compiler refused it.
        OSError: the disk is full.
    """
    device_flags, host_flags = translated(recipe.flags)
    files = _Files(recipe, glue)
    macros = split.macros_of(files.texts.values())
    parts = {path: split.split(text, macros) for path, text in files.texts.items()}
    _write(parts, files, work)
    first = _cuda_headers(files.texts.values())
    if any(_MATH.search(part.host) for part in parts.values()):
        first += ["cmath", "cstdlib"]
    variables = [variable for part in parts.values() for variable in part.variables]
    host, device = _Host(recipe, work, compiler, found, host_flags, files), _Device(recipe, work, found, device_flags, files)
    addresses = {_mangled(variable.name): f"&{variable.name}" for variable in variables}
    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(host.compile, frozenset().union(*(part.kernels for part in parts.values())), first)
        templates = any(part.templates for part in parts.values())  # the host's part says which instances there are
        named = [name for name in compiled.result().values() if "<" in name] if templates else []
        symbols = device.compile([*dict.fromkeys((*named, *addresses.values()))])
        instances = compiled.result()
    kernels = {symbol: symbols[name] if "<" in name else symbol for symbol, name in instances.items()}
    unknown = [name for symbol, name in instances.items() if kernels[symbol].encode() + b"\0" not in device.code]
    if unknown:
        raise Unsupported(f"NVRTC gives {unknown[0]} another name than the C++ compiler")
    registered = _registration(kernels, host.variables(variables), {symbol: symbols[address] for symbol, address in addresses.items()})
    (work / "opjit_fatbin.c").write_text(registered, "utf-8")
    major = recipe.target.runtime.removeprefix("cuda")
    return Made(work / "opjit_fatbin.c", (work / "opjit_host.o",), (f"-L{found.runtime}", f"-l:libcudart.so.{major}"))


def _write(parts: Mapping[str, split.Parts], files: _Files, work: Path) -> None:
    """Write both parts of each file. Messages of the host's name the author's file, the device's only its name: it may be in the code."""
    for path, part in parts.items():
        name = files.names[path]
        for kind, text, shown in (("host", part.host, path), ("device", part.device, Path(name).name)):
            place = work / kind / name
            place.parent.mkdir(parents=True, exist_ok=True)
            escaped = shown.replace("\\", r"\\").replace('"', r"\"")
            place.write_text(f'#line 1 "{escaped}"\n{text}', "utf-8", "surrogateescape")


def translated(flags: Flags) -> tuple[list[str], list[str]]:
    """Translate nvcc's flags into NVRTC's and the host compiler's. Raises Unsupported for one that neither has."""
    device, host = [], []
    waiting = iter(flags.cuda)
    for flag in waiting:
        if flag == "-Xcompiler":
            host.append(next(waiting))
        elif flag == "-MF":
            next(waiting)
        elif flag.startswith("-Xcompiler="):
            host += flag.removeprefix("-Xcompiler=").split(",")
        elif flag.startswith("-Xptxas="):
            device += [f"--ptxas-options={each}" for each in flag.removeprefix("-Xptxas=").split(",")]
        elif not _NEITHER.fullmatch(flag):
            if not (_DEVICE.fullmatch(flag) or _HOST.fullmatch(flag)):
                raise Unsupported(f"NVRTC has no flag {flag}")
            device += [flag] if _DEVICE.fullmatch(flag) else []
            host += [flag] if _HOST.fullmatch(flag) else []
    return device, host


class _Files:
    """The author's file, the headers that it includes, and their places in the folder of a part."""

    def __init__(self, recipe: Recipe, glue: Path) -> None:
        folder, include, added = str(recipe.folder), str(resources.folder("kernels_c")), recipe.flags.include
        deep = "/".join("abcd"[:_DEPTH])
        self.include = [f"{deep}/op", "opjit", *(f"added{index}" for index in range(len(added)))]
        self.texts: dict[str, str] = {}
        self.names: dict[str, str] = {}
        for path in (str(glue), *headers.closure([str(recipe.source), f"{include}/opjit_cuda.h"], (folder, include, *added))):
            name = headers.portable_name(path, folder, include, added)
            if path == str(glue):
                place = glue.name
            elif name.startswith("<opjit>/"):
                place = f"opjit/{name.removeprefix('<opjit>/')}"
            elif name.startswith("<include "):
                place = f"added{name.removeprefix('<include ').replace('>', '', 1)}"
            elif name.count("../") > _DEPTH:
                raise Unsupported(f"it includes {name}, far from its folder")
            else:
                place = str(Path(*_joined(f"{deep}/op/{name}")))
            self.texts[path], self.names[path] = Path(path).read_text("utf-8", "surrogateescape"), place


def _joined(path: str) -> list[str]:
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return parts


def _cuda_headers(texts: Iterable[str]) -> list[str]:
    """Return the CUDA headers that files include. The host reads them first, before it pretends to be nvcc."""
    include = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[<\"]((?:cuda_|cuComplex|vector_)\w+\.h)[>\"]", re.M)
    found = include.findall("\n".join(texts))
    return list(dict.fromkeys(["cuda_runtime.h", *found]))


def _paths(recipe: Recipe, work: Path) -> dict[str, str]:
    """Return the values of the placeholders in flags."""
    return {"folder": str(recipe.folder), "include": str(resources.folder("kernels_c")), "staging": str(work),
            **{f"added{index}": path for index, path in enumerate(recipe.flags.include)}}


class _Host:
    """The host's part."""

    def __init__(self, recipe: Recipe, work: Path, compiler: Compiler, found: Nvrtc, flags: Sequence[str], files: _Files) -> None:
        self.work, self.compiler = work, compiler
        include, paths = str(resources.folder("kernels_c")), _paths(recipe, work)
        folders = [f"-I{work}/host/{place}" for place in files.include] + [f"-I{include}/nvrtc"]
        folders += [part for folder in found.headers.split(":") for part in ("-isystem", folder)]
        self.command = [compiler.path, "-x", "c++", *(flag.format(**paths) for flag in flags), "-fPIC", *folders,
                        "-idirafter", f"{include}/nvrtc/absent", "-Wp,-MD,opjit_host.deps", "-c", "opjit_host.cpp", "-o", "opjit_host.o"]
        self.symbols: dict[str, int] = {}

    def compile(self, kernels: frozenset[str], first: Iterable[str]) -> dict[str, str]:
        """Compile it. Returns the symbols of its kernels with their names in C++, template arguments included."""
        text = "".join(f"#include <{name}>\n" for name in first)
        text += '#undef __CUDACC__\n#define __CUDACC__ 1\n#define __NVCC__ 1\n#include "host/opjit_kernel.cu"\n'
        (self.work / "opjit_host.cpp").write_text(text, "utf-8")
        _run(self.command, self.work)
        table = _run(["readelf", "--syms", "--wide", "opjit_host.o"], self.work)  # nm takes 20 ms for its plugins
        rows = [line.split() for line in table.splitlines()]
        defined = [row for row in rows if len(row) == 8 and row[4] in ("GLOBAL", "WEAK") and row[6] != "UND"]
        self.symbols = {row[7]: int(row[2], 0) for row in defined if row[3] == "OBJECT"}
        functions = [row[7] for row in defined if row[3] == "FUNC"]
        names = _run(["c++filt", "--no-params", *functions], self.work).splitlines() if functions else []
        return {symbol: _without_type(name) for symbol, name in zip(functions, names, strict=True)
                if _without_type(name).partition("<")[0] in kernels}

    def variables(self, wanted: Sequence[split.Variable]) -> dict[str, tuple[split.Variable, int]]:
        """Return the symbols of device variables in the host's part, each with its size in bytes."""
        found = {_mangled(variable.name): variable for variable in wanted}
        missing = [variable.name for symbol, variable in found.items() if symbol not in self.symbols]
        if missing:
            raise Unsupported(f"the C++ compiler does not define {missing[0]}, a variable in device memory")
        return {symbol: (variable, self.symbols[symbol]) for symbol, variable in found.items()}


def _without_type(name: str) -> str:
    """Return ``ns::scale<float>`` for ``void ns::scale<float>``, as c++filt writes template instances."""
    depth = 0
    for index, letter in enumerate(name):
        depth += (letter in "<(") - (letter in ">)")
        if letter == " " and depth == 0:
            return name[index + 1:]
    return name


def _mangled(name: str) -> str:
    """Return a variable's symbol, by the Itanium C++ ABI."""
    parts = name.split("::")
    return name if len(parts) == 1 else f"_ZN{''.join(f'{len(part)}{part}' for part in parts)}E"


class _Device:
    """The device's part."""

    def __init__(self, recipe: Recipe, work: Path, found: Nvrtc, flags: Sequence[str], files: _Files) -> None:
        self.work, self.library, self.archs, self.code = work, found.library, recipe.target.arch.split("+"), b""
        folders = [Path(folder) for folder in found.headers.split(":")]
        self.headers = {} if any((folder / "nv/target").is_file() for folder in folders) else {"nv/target": nvrtc.NV_TARGET}
        # NVRTC's int64_t is `long`, as the host's; libcu++ takes it for `long long`, a type with another name in symbols.
        integers = next((folder / "cuda/std/cstdint" for folder in folders if (folder / "cuda/std/cstdint").is_file()), None)
        if integers is not None:
            self.headers["cuda/std/cstdint"] = re.sub(r"long long(?=;)", "long", integers.read_text("utf-8"))
        given = [flag.format(**_paths(recipe, work)) for flag in flags]
        self.options = ["-default-device", "-w", *given, *(f"--include-path={work}/device/{place}" for place in files.include),
                        *(f"--include-path={folder}" for folder in folders)]

    def compile(self, expressions: Sequence[str]) -> Mapping[str, str]:
        """Compile it for each arch into opjit_kernel.fatbin. Returns the symbols of expressions: kernels' instances and variables."""
        source = (self.work / "device/opjit_kernel.cu").read_text("utf-8", "surrogateescape")

        def compile_for(arch: str) -> nvrtc.Compiled:
            options = [f"--gpu-architecture={arch}", *self.options]
            try:
                return nvrtc.compile_for(self.library, source, "opjit_kernel.cu", self.headers, options, expressions)
            except nvrtc.Failed as failed:
                raise Failed(str(failed)) from None

        with ThreadPoolExecutor() as pool:  # threads, as NVRTC needs no process
            made = dict(zip(self.archs, pool.map(compile_for, self.archs), strict=True))
        self.code = nvrtc.fatbin({arch: each.cubin for arch, each in made.items()})
        (self.work / "opjit_kernel.fatbin").write_bytes(self.code)
        return made[self.archs[0]].symbols


def _registration(kernels: Mapping[str, str], variables: Mapping[str, tuple[split.Variable, int]], of_variables: Mapping[str, str]) -> str:
    """Return C code that registers the fat binary, its kernels and its variables, as nvcc's code does when a library is loaded.

    Args:
        kernels: the device's symbols by the host's.
        variables: with their sizes, by the host's symbols.
        of_variables: the device's symbols of variables by the host's.
    """
    declarations, calls = [], []
    for index, symbol in enumerate((*kernels, *variables)):
        declarations.append(f'extern char opjit_{index} __asm__("{symbol}");')
    for index, name in enumerate(kernels.values()):
        calls.append(f'    __cudaRegisterFunction(handle, &opjit_{index}, "{name}", "{name}", -1, 0, 0, 0, 0, 0);')
    for index, (symbol, (variable, size)) in enumerate(variables.items(), len(kernels)):
        name = of_variables[symbol]
        calls.append(f'    __cudaRegisterVar(handle, &opjit_{index}, "{name}", "{name}", 0, {size}, {int(variable.constant)}, 0);')
    text = resources.template("fatbin.c.in")
    return text.replace("$declarations", "\n".join(declarations)).replace("$calls", "\n".join(calls))


def _run(command: Sequence[str], work: Path) -> str:
    """Run a tool and return its output. Raises Failed, or OSError if the disk is full."""
    done = toolchain.run(command, work)
    if done.returncode:
        toolchain.refuse_full_disk(done.stdout, work)
        raise Failed(done.stdout)
    return done.stdout
