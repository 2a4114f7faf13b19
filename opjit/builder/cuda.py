"""A CUDA kernel without nvcc: NVRTC compiles the device's part of a .cu file in this process, the C++ compiler the host's.

nvcc parses CUDA's headers three times, in five processes one after another: 0.6 to 0.9 s for an
empty file. A build lasts 0.2 to 0.3 s (tests/benchmarks/cold.py --cuda), and does not need the CUDA
Toolkit. Files that it does not support are left to nvcc.

    the file    the C++ compiler preprocesses it as nvcc does, for the host and for each arch (see preprocessed.py)
    the texts   host_device_split.py divides them
    the parts   the C++ compiler takes the host's, NVRTC the device's, in which the sizes of what kernels take are those of the host"""

import re
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from opjit import files, processes, resources
from opjit.builder import nvrtc
from opjit.builder.compile_step import CompilerFailed, LayoutDiffers, run_tool
from opjit.builder.cuda_text import HOST, CudaFile, defined_macros, flat_text, folders_of_cuda
from opjit.builder.host_device_split import Halves
from opjit.recipe import nvcc_flags, toolchain
from opjit.recipe.compilers import Compiler, Nvrtc
from opjit.recipe.nvcc_flags import LINE_INFO, NvccOnly
from opjit.recipe.recipe import Recipe

_NOWHERE = "/opjit/"
_OWN_WORDS = rf"{_NOWHERE}| OPJIT_LAYOUT_\d+ ?"  # in what NVRTC prints
# CUDA's headers, which the host reads before it pretends to be nvcc.
_CUDA_HEADERS = re.compile(
    r"^[ \t]*#[ \t]*include[ \t]*[<\"]((?:cuda_\w+|cuComplex|vector_\w+|cu(?:blas|dnn|fft|solver|sparse)\w*|curand|"
    r"nccl)\.h)[>\"]",
    re.MULTILINE,
)
# Functions that C++'s headers overload, in the host's part. Those headers cost 0.1 s, so they are
# read only for these.
_MATH = (
    r"\b(?:std\s*::|(?:l?l?abs|fabs|sqrt|cbrt|hypot|pow|exp2?|expm1|log(?:2|10|1p)?|l?l?r?int|l?l?round|nearbyint|ceil|"
    r"floor|trunc|fm(?:in|ax|od|a)|fdim|remainder|copysign|a?(?:sin|cos|tan)h?|atan2|erfc?|[tl]gamma|isnan|isinf|isfinite|signbit|"
    r"ldexp|frexp|scalbl?n|div)\s*\()"
)
_LAYOUT = (
    "opjit_layout"  # the section of host_device_split's notes on the types of kernels' parameters
)


def compile_kernels(
    recipe: Recipe, sources: Iterable[Path], work: Path, compiler: Compiler, found: Nvrtc
) -> tuple[list[Path], list[Path], str]:
    """Compile the generated .cu files of an op, which include its author's files, each in a
    separate folder.

    Returns sources and objects for the link, and the compilers' output. Raises NvccOnly if only
    nvcc supports a file or flag, LayoutDiffers if both parts have different layouts of a type,
    CompilerFailed, or OSError if the disk is full.
    """
    registrations = []
    objects = []
    output = ""
    for source in sources:
        folder = work / source.stem
        folder.mkdir()
        output += compile_unit(_unit(recipe, source, work), folder, compiler, found)
        text = (folder / "opjit_fatbin.c").read_text("utf-8")
        # torch's builder does not accept two of the same name.
        registration = work / f"{source.stem}_fatbin.c"
        named = text.replace("opjit_kernel.fatbin", f"{folder.name}/opjit_kernel.fatbin")
        registration.write_text(named, "utf-8")
        registrations.append(registration)
        objects.append(folder / "opjit_host.o")
    return registrations, objects, output


def _unit(recipe: Recipe, source: Path, work: Path) -> CudaFile:
    device, host = nvcc_flags.translated(recipe.flags.cuda)
    paths = recipe.placeholders(work)
    # NVRTC completes a relative name in line information by the working folder, and the binary must
    # not contain folders of this machine.
    nowhere = _NOWHERE if LINE_INFO & {*recipe.flags.cuda} else ""

    def show(path: str) -> str:
        return path if recipe.flags.debug else f"{nowhere}{Path(path).name}"

    folders = recipe.include_path
    host_flags = [flag.format(**paths) for flag in host]
    device_flags = [flag.format(**paths) for flag in device]
    return CudaFile(
        str(source),
        host_flags,
        folders,
        [f"-I{folder}" for folder in folders],
        device_flags,
        recipe.flags.cuda,
        recipe.target.arch.split("+"),
        show,
        {},
    )


class _Host(NamedTuple):
    """The compiled part of the host."""

    sizes: Mapping[str, int]  # of variables in device memory, by symbol
    kernels: Mapping[str, str]  # the names of kernels in C++, with template arguments, by symbol
    output: str


def compile_unit(unit: CudaFile, work: Path, compiler: Compiler, found: Nvrtc) -> str:
    """Compile a .cu file into opjit_host.o, opjit_kernel.fatbin with machine code for each arch, and opjit_fatbin.c, which registers that
    with the CUDA runtime, as code that nvcc generates does.

    Other files may have the same names. Returns the compilers' output. Raises as `compile_kernels` does."""

    release = nvrtc.release(found.library)
    host_text, *device_texts = processes.in_parallel(
        lambda arch: flat_text(unit, arch, work, compiler, found, release), [HOST, *unit.archs]
    )
    if unit.adapt:
        unit = unit.adapt(unit, host_text)
    own = _digest(work.name, host_text)
    halves = Halves(host_text, f"opjit_unnamed_{own}")
    _write_host(unit, halves, host_text, work)
    with processes.pool(1) as pool:  # NVRTC compiles the device's part meanwhile
        compiled = pool.submit(_compile_host, unit, work, compiler, found, halves.kernel_names)
        parts = [Halves(text, f"opjit_unnamed_{own}").device for text in device_texts]
        addresses = {_mangled(name): f"&{name}" for name in halves.variables}
        instances = []
        layouts = ""
        if halves.templates or halves.layouts:  # the host's part has the instances and layouts
            instances = [name for name in compiled.result().kernels.values() if "<" in name]
            layouts = _layouts(halves, compiler, work)
        device = _compile_device(
            unit, [layouts + part for part in parts], found, [*instances, *addresses.values()]
        )
        host = compiled.result()
    launched = _launched(halves, host, device)
    renamed = _hide(halves, host, addresses, own, compiler, work)
    variables = [
        (constant, host.sizes[symbol], renamed[symbol], device.symbols[addresses[symbol]])
        for symbol, constant in zip(addresses, halves.variables.values(), strict=True)
    ]
    kernels = {renamed.get(symbol, symbol): name for symbol, name in launched.items()}
    (work / "opjit_kernel.fatbin").write_bytes(device.code)
    (work / "opjit_fatbin.c").write_text(_registration(kernels, variables), "utf-8")
    return host.output + device.log


def _digest(name: str, text: str) -> str:
    """Return a text that distinguishes the symbols of a file from the symbols of other files,
    and is the same in every folder.
    """
    content = f"{name}\0{re.sub('(?m)^#line .*$', '', text)}"
    return files.sha256(content.encode("utf-8", "surrogateescape"))[:16]


def _write_host(unit: CudaFile, halves: Halves, text: str, work: Path) -> None:
    """Write the host's part, behind the headers that it reads before it pretends to be nvcc."""
    first = list(dict.fromkeys(["cuda_runtime.h", *_CUDA_HEADERS.findall(text)]))
    if re.search(_MATH, halves.host):
        first += ["cmath", "cstdlib"]
    lines = [f"#include <{name}>" for name in first]
    lines += [unit.first, "#undef __CUDACC__", "#define __CUDACC__ 1", "#define __NVCC__ 1"]
    lines += [f"#undef {name}" for name in defined_macros(unit.host)]  # the text has been expanded
    written = "\n".join([*lines, halves.host])
    (work / "opjit_host.cpp").write_text(written, "utf-8", "surrogateescape")


def _compile_host(
    unit: CudaFile, work: Path, compiler: Compiler, found: Nvrtc, kernels: Collection[str]
) -> _Host:
    """Compile the host's part. `kernels` are names without template arguments."""
    command = [compiler.path, "-x", "c++", *unit.host, *unit.folders, "-fPIC"]
    command += folders_of_cuda(found.headers)
    command += ["-Wno-invalid-offsetof", "-c", "opjit_host.cpp"]
    output = run_tool([*command, "-o", "opjit_host.o"], work)

    table = run_tool(["readelf", "--syms", "--wide", "opjit_host.o"], work)  # nm needs 20 ms
    rows = [row for row in map(str.split, table.splitlines()) if len(row) == 8 and row[6] != "UND"]
    defined = {row[7]: row for row in rows if row[3] in ("FUNC", "OBJECT")}
    functions = [symbol for symbol, row in defined.items() if row[3] == "FUNC"]
    shown = run_tool(["c++filt", "--no-params", *functions], work).splitlines() if functions else []
    # c++filt gives an instance of a template its type, and all kernels return void.
    names = {
        symbol: name.removeprefix("void ") for symbol, name in zip(functions, shown, strict=True)
    }
    known = {symbol: name for symbol, name in names.items() if name.partition("<")[0] in kernels}
    sizes = {
        symbol: int(row[2], 0)
        for symbol, row in defined.items()
        if row[3] == "OBJECT" and row[4] != "LOCAL"
    }
    return _Host(sizes, known, output)


def _mangled(name: str) -> str:
    """Return a variable's symbol, by the Itanium C++ ABI."""
    parts = name.split("::")
    if len(parts) == 1:
        return name
    return f"_ZN{''.join(f'{len(part)}{part}' for part in parts)}E"


def _layouts(halves: Halves, compiler: Compiler, work: Path) -> str:
    """Return macros that compare the types of kernels' parameters in the device's part with the
    types in the host's part.

    The host's part notes each in a section: the parameter's number, its size, its alignment, and how many members' offsets follow."""
    if not halves.layouts:
        return ""
    place = work / _LAYOUT
    objcopy = f"{toolchain.binutils(compiler)}objcopy"
    run_tool([objcopy, f"--dump-section={_LAYOUT}={_LAYOUT}", "opjit_host.o", "unused.o"], work)
    content = place.read_bytes() if place.exists() else b""
    values = [value for (value,) in struct.iter_unpack("<Q", content)]
    seen = dict[int, list[list[int]]]()
    at = 0
    while at < len(values):
        number = values[at]
        count = values[at + 3]
        seen.setdefault(number, []).append(
            [*values[at + 1 : at + 3], *values[at + 4 : at + 4 + count]]
        )
        at += 4 + count
    lines = [
        f"#define OPJIT_LAYOUT_{number} {layout.check(seen.get(number, []))}"
        for number, layout in enumerate(halves.layouts)
    ]
    return "\n".join([*lines, ""])


def _compile_device(
    unit: CudaFile, texts: Sequence[str], found: Nvrtc, expressions: Sequence[str]
) -> nvrtc.DeviceCode:
    """Compile the device's part for each arch into a fat binary. The expressions name kernels' instances and variables."""
    folders = [Path(folder) for folder in found.headers.split(":")]
    own = {}
    if not any((folder / "nv/target").is_file() for folder in folders):
        own["nv/target"] = nvrtc.own_header("nv_target.h")
    # NVRTC's int64_t is `long`, like the host's; libcu++ treats it as `long long`, a type with
    # another name in symbols.
    for folder in folders:
        integers = folder / "cuda/std/cstdint"
        if integers.is_file():
            text = re.sub(r"long long(?=;)", "long", integers.read_text("utf-8"))
            own["cuda/std/cstdint"] = text
            break
    own |= unit.headers
    authors = {flag for flag in unit.host if flag.startswith(("-D", "-U"))}
    flags = [flag for flag in unit.device if flag not in authors]
    if found.version.startswith("12."):  # it always has the process in names of internal symbols
        flags = [flag for flag in flags if not flag.startswith("--frandom-seed")]
    options = ["-default-device", *flags, *(f"--include-path={folder}" for folder in folders)]

    def compile_for(part: tuple[str, str]) -> nvrtc.DeviceCode:
        arch, text = part
        name = Path(unit.source).name
        wanted = [f"--gpu-architecture={arch}", *options]
        source = f'#include "opjit_gnu.h"\n{text}'
        try:
            return nvrtc.compile_for(found.library, source, name, own, wanted, expressions)
        except CompilerFailed as failed:
            message = re.sub(_OWN_WORDS, "", str(failed))
            if re.search(r"error.*\bthe host's part has another layout of ", message):
                raise LayoutDiffers(message) from None
            raise CompilerFailed(message) from None

    codes = processes.in_parallel(compile_for, [*zip(unit.archs, texts, strict=True)])
    machine_code = {arch: each.code for arch, each in zip(unit.archs, codes, strict=True)}
    log = "".join(re.sub(_OWN_WORDS, "", each.log) for each in codes)
    return nvrtc.DeviceCode(nvrtc.fatbin(machine_code), codes[0].symbols, log)


def _launched(halves: Halves, host: _Host, device: nvrtc.DeviceCode) -> dict[str, str]:
    """Return the device's symbol of each kernel, by the host's. Raises NvccOnly if a part lacks a kernel or variable."""
    for variable in halves.variables:
        if _mangled(variable) not in host.sizes:
            raise NvccOnly(
                f"the C++ compiler does not define {variable}, a variable in device memory"
            )
    launched = {}
    for symbol, name in host.kernels.items():
        launched[symbol] = device.symbols[name] if "<" in name else symbol
        if launched[symbol].encode() + b"\0" not in device.code:
            raise NvccOnly(f"NVRTC gives {name} another name than the C++ compiler")
    return launched


def _hide(
    halves: Halves,
    host: _Host,
    variables: Iterable[str],
    own: str,
    compiler: Compiler,
    work: Path,
) -> dict[str, str]:
    """Rename the symbols that only this file may see in the host's object file, and leave out its
    notes.

    Returns the new symbols by the old ones.

    Like with nvcc, other files see only kernels that are neither static nor templates. The linker
    would keep one of two instances of a name.
    """
    hidden = [
        symbol for symbol, name in host.kernels.items() if "<" in name or name in halves.internal
    ]
    renamed = {symbol: f"{symbol}.{own}" for symbol in [*variables, *hidden]}
    edits = [f"--redefine-sym={old}={new}" for old, new in renamed.items()]
    if halves.layouts:
        edits.append(f"--remove-section={_LAYOUT}")
    if edits:
        run_tool([f"{toolchain.binutils(compiler)}objcopy", *edits, "opjit_host.o"], work)
    return renamed


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
    return resources.filled(
        "fatbin.c.in", declarations="\n".join(declarations), calls="\n".join(calls)
    )
