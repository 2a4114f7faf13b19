"""A CUDA kernel without nvcc: NVRTC compiles the device's part of a .cu file in this process, the C++ compiler the host's.

nvcc parses CUDA's headers three times, in five processes one after another: 0.6 to 0.9 s for an empty file. This takes 0.2 to 0.3 s
(tests/benchmarks/cold.py --cuda), and needs no CUDA Toolkit. Files that it does not take are left to nvcc."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from opjit import resources
from opjit.builder import budget, host_device_split, nvrtc
from opjit.builder.compile_step import CompilerFailed, NvccOnly, run_tool
from opjit.recipe import headers, nvcc_flags, toolchain
from opjit.recipe.nvcc_flags import LINE_INFO
from opjit.recipe.recipe import Recipe
from opjit.recipe.toolchain import Compiler, Nvrtc

_NOWHERE = "/opjit/"
_CUDA_HEADERS = re.compile(
    r"^[ \t]*#[ \t]*include[ \t]*[<\"]((?:cuda_\w+|cuComplex|vector_\w+|cu(?:blas|dnn|fft|solver|sparse)\w*|curand|"
    r"nccl)\.h)[>\"]",
    re.MULTILINE,
)  # which the host reads before it pretends to be nvcc
# Functions that C++'s headers overload, in the host's part. Those headers take 0.1 s, so they are read only for these.
_MATH = re.compile(
    r"\b(?:std\s*::|(?:l?l?abs|fabs|sqrt|cbrt|hypot|pow|exp2?|expm1|log(?:2|10|1p)?|l?l?r?int|l?l?round|nearbyint|ceil|"
    r"floor|trunc|fm(?:in|ax|od|a)|fdim|remainder|copysign|a?(?:sin|cos|tan)h?|atan2|erfc?|[tl]gamma|isnan|isinf|isfinite|signbit|"
    r"ldexp|frexp|scalbl?n|div)\s*\()"
)


class CudaFile(NamedTuple):
    """A .cu file to compile."""

    main: str  # the place of the file that is compiled
    texts: Mapping[str, str]  # the files to split, by path: those that have the author's code
    names: Mapping[str, str]  # their places below the folder of a part, by path
    host: Sequence[str]  # flags of the C++ compiler, folders included
    device: Sequence[str]  # flags of NVRTC, folders included
    archs: Sequence[str]  # such as ["sm_80", "sm_90"]; "compute_90" is PTX
    shown: Callable[[str], str]  # from a file's path to its name in the device's part
    headers: Mapping[str, str]  # texts for NVRTC by the names in #include lines
    first: str = ""  # code that the host reads before it pretends to be nvcc
    spaces: Mapping[str, set[str]] = MappingProxyType(
        {}
    )  # execution spaces of macros from headers that are not split


def compile_kernels(
    recipe: Recipe, sources: Iterable[Path], work: Path, compiler: Compiler, found: Nvrtc
) -> tuple[list[Path], list[Path], str]:
    """Compile the generated .cu files of an op, which include its author's, each in a folder of its own. Returns sources and objects for
    the link, and the output. Raises NvccOnly if only nvcc takes a file or flag, CompilerFailed, or OSError if the disk is full."""
    registrations, objects, output = list[Path](), list[Path](), ""
    for source in sources:
        folder = work / source.stem
        folder.mkdir()
        output += compile_unit(_unit(recipe, source, folder), folder, compiler, found)
        registration = (
            work / f"{source.stem}_fatbin.c"
        )  # torch's builder takes no two files of one name
        text = (folder / "opjit_fatbin.c").read_text("utf-8")
        registration.write_text(
            text.replace("opjit_kernel.fatbin", f"{folder.name}/opjit_kernel.fatbin"), "utf-8"
        )
        registrations.append(registration)
        objects.append(folder / "opjit_host.o")
    return registrations, objects, output


def _unit(recipe: Recipe, source: Path, work: Path) -> CudaFile:
    device_flags, host_flags = translated(recipe.flags.cuda)
    folders, paths = recipe.include_path, recipe.places(work)
    own = headers.closure([str(source), f"{folders[1]}/opjit_cuda.h"], tuple(folders))
    names = {path: source.name if path == str(source) else f"files{path}" for path in own}
    host = [
        *(flag.format(**paths) for flag in host_flags),
        *(f"-I{work}/host/files{place}" for place in folders),
    ]
    device = [
        *(flag.format(**paths) for flag in device_flags),
        *(f"--include-path={work}/device/files{place}" for place in folders),
    ]
    # NVRTC completes a relative name in line information by the working folder, and the binary names no folder of this machine.
    nowhere = _NOWHERE if LINE_INFO & {*recipe.flags.cuda} else ""
    return CudaFile(
        source.name,
        {path: Path(path).read_text("utf-8", "surrogateescape") for path in names},
        names,
        host,
        device,
        recipe.target.arch.split("+"),
        str if recipe.flags.debug else lambda path: f"{nowhere}{Path(path).name}",
        {},
    )


def compile_unit(unit: CudaFile, work: Path, compiler: Compiler, found: Nvrtc) -> str:
    """Compile a .cu file into opjit_host.o, opjit_kernel.fatbin with machine code for each arch, and opjit_fatbin.c, which registers that
    with the CUDA runtime, as code that nvcc generates does. Other files may have the same names. Returns the compilers' output. Raises as
    above."""
    macros = {**host_device_split.macros_of(unit.texts.values()), **unit.spaces}
    own = hashlib.sha256(
        "\0".join([work.name, *unit.texts.values()]).encode("utf-8", "surrogateescape")
    ).hexdigest()[:16]
    parts = {
        path: host_device_split.split(text, macros, f"opjit_unnamed_{own}")
        for path, text in unit.texts.items()
    }
    _write(parts, unit, work)
    first = list(
        dict.fromkeys(["cuda_runtime.h", *_CUDA_HEADERS.findall("\n".join(unit.texts.values()))])
    )
    if any(_MATH.search(part.host) for part in parts.values()):
        first += ["cmath", "cstdlib"]
    variables = {
        _mangled(variable.name): variable for part in parts.values() for variable in part.variables
    }
    kernels = frozenset().union(*(part.kernels for part in parts.values()))
    addresses = {symbol: f"&{variable.name}" for symbol, variable in variables.items()}
    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(_compile_host, unit, work, compiler, found, first, kernels)
        templates = any(
            part.templates for part in parts.values()
        )  # the host's part says which instances there are
        named = [name for name in compiled.result()[1].values() if "<" in name] if templates else []
        device = _compile_device(unit, work, found, [*dict.fromkeys((*named, *addresses.values()))])
        sizes, names, output = compiled.result()
    missing = [variable.name for symbol, variable in variables.items() if symbol not in sizes]
    if missing:
        raise NvccOnly(
            f"the C++ compiler does not define {missing[0]}, a variable in device memory"
        )
    launched = {
        symbol: device.symbols[name] if "<" in name else symbol for symbol, name in names.items()
    }
    unknown = [
        name
        for symbol, name in names.items()
        if launched[symbol].encode() + b"\0" not in device.code
    ]
    if unknown:
        raise NvccOnly(f"NVRTC gives {unknown[0]} another name than the C++ compiler")
    # As nvcc's: others see none but kernels that are neither static nor templates. The linker would keep one of two instances of a name.
    internal = frozenset().union(*(part.internal for part in parts.values()))
    hidden = [
        *variables,
        *(symbol for symbol, name in names.items() if "<" in name or name in internal),
    ]
    renamed = {symbol: f"{symbol}.{own}" for symbol in hidden}
    if renamed:
        run_tool(
            [
                f"{toolchain.binutils(compiler)}objcopy",
                *(f"--redefine-sym={old}={new}" for old, new in renamed.items()),
                "opjit_host.o",
            ],
            work,
        )
    registered = _registration(
        {renamed.get(symbol, symbol): name for symbol, name in launched.items()},
        [
            (variable.constant, sizes[symbol], renamed[symbol], device.symbols[addresses[symbol]])
            for symbol, variable in variables.items()
        ],
    )
    (work / "opjit_kernel.fatbin").write_bytes(device.code)
    (work / "opjit_fatbin.c").write_text(registered, "utf-8")
    return output + device.log


def _write(parts: Mapping[str, host_device_split.Halves], unit: CudaFile, work: Path) -> None:
    """Write both parts of each file. Messages of the host's name the author's file, the device's its name in `unit.shown`."""
    for path, part in parts.items():
        name = unit.names[path]
        for kind, text, shown in (
            ("host", part.host, path),
            ("device", part.device, unit.shown(path)),
        ):
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


def _compile_host(
    unit: CudaFile,
    work: Path,
    compiler: Compiler,
    found: Nvrtc,
    first: Iterable[str],
    kernels: Collection[str],
) -> tuple[dict[str, int], dict[str, str], str]:
    """Compile the host's part, which reads `first` before it pretends to be nvcc. `kernels` are names without template arguments. Returns
    by symbol its variables' sizes and its kernels' names in C++ with template arguments, and the output."""
    text = "".join(f"#include <{name}>\n" for name in first)
    text += f'{unit.first}#undef __CUDACC__\n#define __CUDACC__ 1\n#define __NVCC__ 1\n#include "host/{unit.main}"\n'
    (work / "opjit_host.cpp").write_text(text, "utf-8")
    include = str(resources.folder("kernels_c"))
    folders = [
        f"-I{include}/nvrtc",
        *(part for folder in found.headers.split(":") for part in ("-isystem", folder)),
    ]
    output = run_tool(
        [
            compiler.path,
            "-x",
            "c++",
            *unit.host,
            "-fPIC",
            *folders,
            "-idirafter",
            f"{include}/nvrtc/absent",
            "-Wp,-MD,opjit_host.deps",
            *toolchain.listing(compiler, "opjit_host"),
            "-c",
            "opjit_host.cpp",
            "-o",
            "opjit_host.o",
        ],
        work,
        budget.CXX_JOB,
    )  # with what NVRTC takes meanwhile
    table = run_tool(
        ["readelf", "--syms", "--wide", "opjit_host.o"], work
    )  # nm takes 20 ms for its plugins
    rows = [line.split() for line in table.splitlines()]
    defined = {
        row[7]: row
        for row in rows
        if len(row) == 8 and row[3] in ("FUNC", "OBJECT") and row[6] != "UND"
    }
    functions = [symbol for symbol, row in defined.items() if row[3] == "FUNC"]
    shown = run_tool(["c++filt", "--no-params", *functions], work).splitlines() if functions else []
    names = dict(zip(functions, map(_without_type, shown), strict=True))
    if static := [
        name
        for symbol, name in names.items()
        if name.partition("<")[0] in kernels and defined[symbol][4] == "LOCAL"
    ]:
        raise NvccOnly(f"{static[0]} is static by a macro, or in one of its declarations")
    return (
        {
            symbol: int(row[2], 0)
            for symbol, row in defined.items()
            if row[3] == "OBJECT" and row[4] != "LOCAL"
        },
        {symbol: name for symbol, name in names.items() if name.partition("<")[0] in kernels},
        output,
    )


def _without_type(name: str) -> str:
    """Return ``ns::scale<float>`` for ``void ns::scale<float>``, as c++filt writes template instances."""
    depth = 0
    for index, letter in enumerate(name):
        depth += (letter in "<(") - (letter in ">)")
        if letter == " " and depth == 0:
            return name[index + 1 :]
    return name


def _mangled(name: str) -> str:
    """Return a variable's symbol, by the Itanium C++ ABI."""
    parts = name.split("::")
    return name if len(parts) == 1 else f"_ZN{''.join(f'{len(part)}{part}' for part in parts)}E"


def _compile_device(
    unit: CudaFile, work: Path, found: Nvrtc, expressions: Sequence[str]
) -> nvrtc.DeviceCode:
    """Compile the device's part for each arch into a fat binary. The expressions name kernels' instances and variables."""
    folders = [Path(folder) for folder in found.headers.split(":")]
    own = (
        {}
        if any((folder / "nv/target").is_file() for folder in folders)
        else {"nv/target": nvrtc.own_header("nv_target.h")}
    )
    # NVRTC's int64_t is `long`, as the host's; libcu++ takes it for `long long`, a type with another name in symbols.
    integers = next(
        (path for folder in folders if (path := folder / "cuda/std/cstdint").is_file()), None
    )
    if integers is not None:
        own["cuda/std/cstdint"] = re.sub(r"long long(?=;)", "long", integers.read_text("utf-8"))
    own |= unit.headers
    options = ["-default-device", *unit.device, *(f"--include-path={folder}" for folder in folders)]
    source = (work / "device" / unit.main).read_text("utf-8", "surrogateescape")

    def compile_for(arch: str) -> nvrtc.DeviceCode:
        try:
            return nvrtc.compile_for(
                found.library,
                source,
                Path(unit.main).name,
                own,
                [f"--gpu-architecture={arch}", *options],
                expressions,
            )
        except CompilerFailed as failed:
            raise CompilerFailed(str(failed).replace(_NOWHERE, "")) from None

    with ThreadPoolExecutor() as pool:  # threads, as NVRTC needs no process
        codes = list(pool.map(compile_for, unit.archs))
    return nvrtc.DeviceCode(
        nvrtc.fatbin({arch: each.code for arch, each in zip(unit.archs, codes, strict=True)}),
        codes[0].symbols,
        "".join(each.log.replace(_NOWHERE, "") for each in codes),
    )


def _registration(
    kernels: Mapping[str, str], variables: Sequence[tuple[bool, int, str, str]]
) -> str:
    """Return C code that registers the fat binary, its kernels (the device's symbols by the host's) and its variables (whether they are
    constant, their bytes, and their symbols in the host's and the device's part), as nvcc's does."""
    symbols = [*kernels, *(host for _, _, host, _ in variables)]
    declarations = [
        f'extern char opjit_{index} __asm__("{symbol}");\n__asm__(".hidden {symbol}");'
        for index, symbol in enumerate(symbols)
    ]
    calls = [
        f'    __cudaRegisterFunction(handle, &opjit_{index}, "{name}", "{name}", -1, 0, 0, 0, 0, 0);'
        for index, name in enumerate(kernels.values())
    ]
    calls += [
        f'    __cudaRegisterVar(handle, &opjit_{index}, "{name}", "{name}", 0, {size}, {int(constant)}, 0);'
        for index, (constant, size, _, name) in enumerate(variables, len(kernels))
    ]
    text = resources.template("fatbin.c.in")
    return text.replace("$declarations", "\n".join(declarations)).replace(
        "$calls", "\n".join(calls)
    )
