"""A CUDA kernel without nvcc: NVRTC compiles the device's part of a .cu file in this process, the C++ compiler the host's.

nvcc parses CUDA's headers three times, in five processes one after another: 0.6 to 0.9 s for an empty file. This takes 0.2 to 0.3 s
(tests/benchmarks/cold.py --cuda), and needs no CUDA Toolkit. Files that it does not take are left to nvcc.

    work/host/, device/       the split files, in the places of the op's folder and opjit's headers
    opjit_host.o              the host's part
    opjit_kernel.fatbin       machine code for each arch
    opjit_fatbin.c            registers it with the CUDA runtime, as code that nvcc generates does
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from opjit import resources
from opjit.builder import host_device_split, nvrtc
from opjit.builder.compile_step import CompilerFailed, NvccOnly, run_tool
from opjit.recipe import headers, nvcc_flags, toolchain
from opjit.recipe.nvcc_flags import LINE_INFO
from opjit.recipe.recipe import Recipe
from opjit.recipe.toolchain import Compiler, Nvrtc

_NOWHERE = "/opjit/"
_DEPTH = 4  # folders above an op's own that its headers may lie in: "../common.h"
# Functions that C++'s headers overload, in the host's part. Those headers take 0.1 s, so they are read only for these.
_MATH = re.compile(r"\b(?:std\s*::|(?:l?l?abs|fabs|sqrt|cbrt|hypot|pow|exp2?|expm1|log(?:2|10|1p)?|l?l?r?int|l?l?round|nearbyint|ceil|"
                   r"floor|trunc|fm(?:in|ax|od|a)|fdim|remainder|copysign|a?(?:sin|cos|tan)h?|atan2|erfc?|[tl]gamma|isnan|isinf|isfinite|signbit|"
                   r"ldexp|frexp|scalbl?n|div)\s*\()")


class CompiledKernel(NamedTuple):
    """Files for the link, and flags for it."""

    source: Path
    objects: tuple[Path, ...]
    link: tuple[str, ...]
    output: str  # the compilers'


class CudaFile(NamedTuple):
    """A .cu file to compile.

    Attributes:
        main: the place of the file that is compiled.
        texts: the files to split, by path: those that have the author's code.
        names: their places below the folder of a part, by path.
        host: flags of the C++ compiler, folders included.
        device: flags of NVRTC, folders included.
        archs: such as ``["sm_80", "sm_90"]``; ``"compute_90"`` is PTX.
        shown: a function from a file's path to its name in the device's part.
        headers: texts for NVRTC by the names in #include lines.
        first: code that the host reads before it pretends to be nvcc.
        spaces: execution spaces of macros from headers that are not split.
    """

    main: str
    texts: Mapping[str, str]
    names: Mapping[str, str]
    host: Sequence[str]
    device: Sequence[str]
    archs: Sequence[str]
    shown: Callable[[str], str]
    headers: Mapping[str, str]
    first: str = ""
    spaces: Mapping[str, set[str]] = MappingProxyType({})


def compile_kernels(recipe: Recipe, work: Path, compiler: Compiler, found: Nvrtc) -> list[CompiledKernel]:
    """Compile an op's kernel and its author's other sources. Raises what `compile_kernel` raises."""
    kernels = [compile_kernel(recipe, recipe.source, work / "opjit_kernel.cu", work, compiler, found)]
    for number, source in enumerate(recipe.flags.sources, 1):
        folder = work / f"source{number}"
        folder.mkdir()
        including = folder / "opjit_kernel.cu"
        including.write_text(f'#include "{os.path.relpath(source, recipe.folder)}"\n', "utf-8", "surrogateescape")
        one = compile_kernel(recipe, Path(source), including, folder, compiler, found)
        registration = work / f"opjit_fatbin{number}.c"  # torch's builder takes no two files of one name
        registration.write_text(one.source.read_text("utf-8").replace("opjit_kernel.fatbin", f"{folder.name}/opjit_kernel.fatbin"), "utf-8")
        kernels.append(one._replace(source=registration))
    return kernels


def compile_kernel(recipe: Recipe, source: Path, glue: Path, work: Path, compiler: Compiler, found: Nvrtc) -> CompiledKernel:
    """Compile one source of an op in a folder.

    Args:
        glue: the generated .cu file, which includes the source.

    Raises:
        NvccOnly: only nvcc takes the file or a flag.
        CompilerFailed: a compiler refused it.
        OSError: the disk is full.
    """
    device_flags, host_flags = translated(recipe.flags.cuda)
    files, paths = _OpFiles(recipe, source, glue), recipe.places(work)
    unit = CudaFile(glue.name, files.texts, files.names,
                [*(flag.format(**paths) for flag in host_flags), *(f"-I{work}/host/{place}" for place in files.include)],
                [*(flag.format(**paths) for flag in device_flags), *(f"--include-path={work}/device/{place}" for place in files.include)],
                recipe.target.arch.split("+"), _shown(recipe), {})
    output = compile_unit(unit, work, compiler, found)
    major = recipe.target.runtime.removeprefix("cuda")
    return CompiledKernel(work / "opjit_fatbin.c", (work / "opjit_host.o",), (f"-L{found.runtime}", f"-l:libcudart.so.{major}"), output)


def compile_unit(unit: CudaFile, work: Path, compiler: Compiler, found: Nvrtc) -> str:
    """Compile a .cu file in a folder into opjit_host.o, and opjit_fatbin.c with opjit_kernel.fatbin. Returns the compilers' output.

    Raises:
        NvccOnly, CompilerFailed, OSError: see `compile_kernel`.
    """
    macros = {**host_device_split.macros_of(unit.texts.values()), **unit.spaces}
    parts = {path: host_device_split.split(text, macros) for path, text in unit.texts.items()}
    _write(parts, unit, work)
    first = _cuda_headers(unit.texts.values())
    if any(_MATH.search(part.host) for part in parts.values()):
        first += ["cmath", "cstdlib"]
    variables = [variable for part in parts.values() for variable in part.variables]
    host, device = _Host(unit, work, compiler, found), _Device(unit, work, found)
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
        raise NvccOnly(f"NVRTC gives {unknown[0]} another name than the C++ compiler")
    registered = _registration(kernels, host.variables(variables), {symbol: symbols[address] for symbol, address in addresses.items()})
    (work / "opjit_fatbin.c").write_text(registered, "utf-8")
    return host.output + device.output


def _shown(recipe: Recipe) -> Callable[[str], str]:
    """Return the function from a file's path to its name in the device's part: the path for a debugger, else a name that is the same on
    every machine. NVRTC would complete a relative name in line information by the working folder."""
    if recipe.flags.debug:
        return str
    lines = LINE_INFO & {*recipe.flags.cuda}
    return lambda path: f"{_NOWHERE if lines else ''}{Path(path).name}"


def _write(parts: Mapping[str, host_device_split.Halves], unit: CudaFile, work: Path) -> None:
    """Write both parts of each file. Messages of the host's name the author's file, the device's its name in `unit.shown`."""
    for path, part in parts.items():
        name = unit.names[path]
        for kind, text, shown in (("host", part.host, path), ("device", part.device, unit.shown(path))):
            place = work / kind / name
            place.parent.mkdir(parents=True, exist_ok=True)
            escaped = shown.replace("\\", r"\\").replace('"', r"\"")
            place.write_text(f'#line 1 "{escaped}"\n{text}', "utf-8", "surrogateescape")


def translated(flags: Iterable[str]) -> tuple[list[str], list[str]]:
    """Translate nvcc's flags into NVRTC's and the host compiler's. Raises NvccOnly for one that neither has."""
    try:
        return nvcc_flags.translated(flags)
    except KeyError as unknown:
        raise NvccOnly(f"NVRTC has no flag {unknown.args[0]}") from None


class _OpFiles:
    """The author's file, the headers that it includes, and their places in the folder of a part."""

    def __init__(self, recipe: Recipe, source: Path, glue: Path) -> None:
        folder, include, added = str(recipe.folder), str(resources.folder("kernels_c")), recipe.flags.include
        deep = "/".join("abcd"[:_DEPTH])
        self.include = [f"{deep}/op", "opjit", *(f"added{index}" for index in range(len(added)))]
        self.texts: dict[str, str] = {}
        self.names: dict[str, str] = {}
        for path in (str(glue), *headers.closure([str(source), f"{include}/opjit_cuda.h"], (folder, include, *added))):
            name = headers.portable_name(path, folder, include, added)
            if path == str(glue):
                place = glue.name
            elif name.startswith("<opjit>/"):
                place = f"opjit/{name.removeprefix('<opjit>/')}"
            elif name.startswith("<include "):
                place = f"added{name.removeprefix('<include ').replace('>', '', 1)}"
            elif name.count("../") > _DEPTH:
                raise NvccOnly(f"it includes {name}, far from its folder")
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
    names = r"(?:cuda_\w+|cuComplex|vector_\w+|cu(?:blas|dnn|fft|solver|sparse)\w*|curand|nccl)\.h"
    include = re.compile(rf"^[ \t]*#[ \t]*include[ \t]*[<\"]({names})[>\"]", re.M)
    found = include.findall("\n".join(texts))
    return list(dict.fromkeys(["cuda_runtime.h", *found]))


class _Host:
    """The host's part."""

    def __init__(self, unit: CudaFile, work: Path, compiler: Compiler, found: Nvrtc) -> None:
        self.unit, self.work = unit, work
        include = str(resources.folder("kernels_c"))
        folders = [f"-I{include}/nvrtc", *(part for folder in found.headers.split(":") for part in ("-isystem", folder))]
        self.command = [compiler.path, "-x", "c++", *unit.host, "-fPIC", *folders,
                        "-idirafter", f"{include}/nvrtc/absent", "-Wp,-MD,opjit_host.deps",
                        *toolchain.listing(compiler, "opjit_host"), "-c", "opjit_host.cpp", "-o", "opjit_host.o"]
        self.symbols: dict[str, int] = {}
        self.output = ""

    def compile(self, kernels: frozenset[str], first: Iterable[str]) -> dict[str, str]:
        """Compile it. Returns the symbols of its kernels with their names in C++, template arguments included."""
        text = "".join(f"#include <{name}>\n" for name in first)
        text += f'{self.unit.first}#undef __CUDACC__\n#define __CUDACC__ 1\n#define __NVCC__ 1\n#include "host/{self.unit.main}"\n'
        (self.work / "opjit_host.cpp").write_text(text, "utf-8")
        self.output = run_tool(self.command, self.work)
        table = run_tool(["readelf", "--syms", "--wide", "opjit_host.o"], self.work)  # nm takes 20 ms for its plugins
        rows = [line.split() for line in table.splitlines()]
        defined = [row for row in rows if len(row) == 8 and row[4] in ("GLOBAL", "WEAK") and row[6] != "UND"]
        self.symbols = {row[7]: int(row[2], 0) for row in defined if row[3] == "OBJECT"}
        functions = [row[7] for row in defined if row[3] == "FUNC"]
        names = run_tool(["c++filt", "--no-params", *functions], self.work).splitlines() if functions else []
        return {symbol: _without_type(name) for symbol, name in zip(functions, names, strict=True)
                if _without_type(name).partition("<")[0] in kernels}

    def variables(self, wanted: Sequence[host_device_split.Variable]) -> dict[str, tuple[host_device_split.Variable, int]]:
        """Return the symbols of device variables in the host's part, each with its size in bytes."""
        found = {_mangled(variable.name): variable for variable in wanted}
        missing = [variable.name for symbol, variable in found.items() if symbol not in self.symbols]
        if missing:
            raise NvccOnly(f"the C++ compiler does not define {missing[0]}, a variable in device memory")
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

    def __init__(self, unit: CudaFile, work: Path, found: Nvrtc) -> None:
        self.unit, self.work, self.library, self.code, self.output = unit, work, found.library, b"", ""
        folders = [Path(folder) for folder in found.headers.split(":")]
        self.headers = {} if any((folder / "nv/target").is_file() for folder in folders) else {"nv/target": nvrtc.NV_TARGET}
        # NVRTC's int64_t is `long`, as the host's; libcu++ takes it for `long long`, a type with another name in symbols.
        integers = next((folder / "cuda/std/cstdint" for folder in folders if (folder / "cuda/std/cstdint").is_file()), None)
        if integers is not None:
            self.headers["cuda/std/cstdint"] = re.sub(r"long long(?=;)", "long", integers.read_text("utf-8"))
        self.headers |= unit.headers
        self.options = ["-default-device", *unit.device, *(f"--include-path={folder}" for folder in folders)]

    def compile(self, expressions: Sequence[str]) -> Mapping[str, str]:
        """Compile it for each arch into opjit_kernel.fatbin. Returns the symbols of expressions: kernels' instances and variables."""
        source = (self.work / "device" / self.unit.main).read_text("utf-8", "surrogateescape")

        def compile_for(arch: str) -> nvrtc.DeviceCode:
            options = [f"--gpu-architecture={arch}", *self.options]
            try:
                return nvrtc.compile_for(self.library, source, Path(self.unit.main).name, self.headers, options, expressions)
            except CompilerFailed as failed:
                raise CompilerFailed(str(failed).replace(_NOWHERE, "")) from None

        with ThreadPoolExecutor() as pool:  # threads, as NVRTC needs no process
            codes = dict(zip(self.unit.archs, pool.map(compile_for, self.unit.archs), strict=True))
        self.output = "".join(each.log.replace(_NOWHERE, "") for each in codes.values())
        self.code = nvrtc.fatbin({arch: each.code for arch, each in codes.items()})
        (self.work / "opjit_kernel.fatbin").write_bytes(self.code)
        return codes[self.unit.archs[0]].symbols


def _registration(kernels: Mapping[str, str], variables: Mapping[str, tuple[host_device_split.Variable, int]],
                  of_variables: Mapping[str, str]) -> str:
    """Return C code that registers the fat binary, its kernels and its variables, as nvcc's code does when a library is loaded.

    Args:
        kernels: the device's symbols by the host's.
        variables: device variables with their sizes, by the host's symbols.
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
