"""Build emulated binaries of ops: the CUDA kernel as C++, in a folder of parts.

It is never an entry of the store, so that no cache, remote or wheel offers it as a CUDA binary. Its debug information has paths of this
machine."""

import ctypes
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from opjit import backends, files, loader, resources
from opjit.backends import DeviceCompiler, Flags, cpu
from opjit.backends.targets import here
from opjit.builder import compile_warnings, cuda_mistakes, glue, parts, runtime_objects
from opjit.builder.compile_step import CompilerFailed, run_tool
from opjit.builder.diagnosis import diagnose
from opjit.declare.op_state import OpState
from opjit.emulate.translate import TranslatedFiles, device_folder, missing_feature
from opjit.errors import NoKernel, OpjitError
from opjit.recipe import nvcc_flags, recorder, toolchain
from opjit.recipe.nvcc_flags import NvccOnly
from opjit.recipe.schema import c_names
from opjit.store.entry import Entry
from opjit.store.store import default_store

RUNTIME = "libopjit_emulate.so"
_BINARY = "emulated.so"
_CXX = ["-std=c++17", "-gdwarf-4", "-w", "-fPIC", "-fexceptions"]
_RUNTIME_LINK = ["-shared", "-lstdc++", "-ldl", f"-Wl,-soname,{RUNTIME}"]
_GLUE = ["-shared", "-std=gnu11", "-O2", "-fPIC", "-fexceptions", "-fvisibility=hidden"]
# A division by 0 ends no process on a GPU.
_SANITIZED = ["-fsanitize-coverage=trace-pc", "-fsanitize=integer-divide-by-zero"]
_KERNEL = [*_CXX, *_SANITIZED, "-fvisibility=hidden", "-ffp-contract=fast"]
# Translated files are searched first.
_OF_OPS = [
    "-Ifiles",
    "-Daoti_torch_cuda_mm_out=aoti_torch_cpu_mm_out",
    "-Daoti_torch_cuda_addmm_out=aoti_torch_cpu_addmm_out",
]
_CHECKED = [
    "-O1",
    "-DOPJIT_EMULATE_CHECKED",
    "-fsanitize=thread,alignment,bounds",
    "--param=tsan-distinguish-volatile=1",
]
# Helpers are inlined in the author's code, so that each of their accesses has a line there.
_HELPERS = """#pragma push_macro("__device__")
#undef __device__
#define __device__ EMU_INLINED
{}
#pragma pop_macro("__device__")
"""
_WRAPPED = "empty_strided empty_like empty_broadcast contiguous scratch"


class Emulated(cpu.Cpu):
    """The emulated device for the glue: kernels are CUDA's, and tensors the CPU's."""

    name = "cuda"
    suffix = ".cu"
    compiler: DeviceCompiler | None = DeviceCompiler("g++", "")  # the kernel is a separate file


def install_emulated(op: OpState, checked: bool) -> None:
    """Build an op's CUDA kernel for the emulation, and make torch call it for CPU tensors.

    Raises:
        NoKernel: the op lacks a CUDA kernel, or the kernel uses a feature that is not emulated.
        CompileError: g++ does not compile it.
    """
    library = binary(op, checked)
    runtime().emu_set_checking(int(checked))
    loader.load(entry_of(library), op.qualified)


def warn_of_mistakes(op: OpState) -> None:
    """Give the warnings about mistakes in an op's kernel that a build for a GPU gives."""
    for path in _sources(op):
        compile_warnings.emit(cuda_mistakes.find_mistakes(path), path, None)


def _sources(op: OpState) -> list[Path]:
    """Return the .cu files of an op, the kernel's first."""
    op.write_code()
    extra = op.declaration.flags_of_author
    others = extra.sources if extra else ()
    first = op.declaration.source(backends.for_device("cuda"))
    return [first, *(Path(path) for path in others if path.endswith(".cu"))]


@cache
def warn_of_emulation() -> None:
    """Warn once that OPJIT_EMULATE is set."""
    warnings.warn(
        "OPJIT_EMULATE is set, so CUDA kernels run emulated on the CPU. opjit checks their results, races and bounds; times mean nothing",
        stacklevel=5,
    )


def set_checking() -> bool:
    """Check the accesses of kernels unless OPJIT_EMULATE is ``fast``, and return whether they are checked."""
    checked = os.environ.get("OPJIT_EMULATE") != "fast"
    runtime().emu_set_checking(int(checked))
    return checked


def entry_of(library: Path) -> Entry:
    """Return an emulated library in the form of an entry of the store. It can be opened once `runtime` is."""
    with library.open("rb") as file:
        identity = files.inode_signature(file.fileno())
    return Entry(library.parent, library.parent.name, library, "store", identity)


@cache
def runtime() -> ctypes.CDLL:
    """Open the runtime library of the emulation, for the whole process, and build it first if no cache has it."""
    library = ctypes.CDLL(str(runtime_folder() / RUNTIME))
    library.emu_reached.restype = ctypes.c_char_p
    library.emu_see.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_bool)
    return library


def runtime_folder() -> Path:
    """Return the folder of the runtime library. Raises BuildError if the compiler fails."""
    compiler = toolchain.require_compiler(default_store().notes)
    sources = sorted(map(str, device_folder().glob("*.cc")))
    flags = [*_CXX, "-O2", *_RUNTIME_LINK]

    def make(staged: Path) -> None:
        parts.compile_part(compiler, [*sources, *flags, "-o", RUNTIME], staged)

    content = [own_text(), compiler.version, compiler.machine, flags]
    return parts.kept(base(), parts.name_of(content), (RUNTIME,), (f"{device_folder()}/",), make)


def base() -> Path:
    return default_store().base


@cache
def own_text() -> str:
    """A digest of the emulation itself: its C++, and the Python that translates."""
    paths = sorted([*device_folder().rglob("*.*"), *Path(__file__).parent.glob("*.py")])
    return files.sha256(b"\0".join(path.read_bytes() for path in paths))


def binary(op: OpState, checked: bool) -> Path:
    """Return the path of an op's emulated library, and build it unless a cache has it. Raises as `install_emulated` does."""
    sources = _sources(op)
    source = sources[0]
    include = [str(source.parent), resources.include_path()]
    code = op.declaration.code
    names = {} if code is None else {source.name: code.shown or source.name}
    flags = compiler_flags(checked)
    extra = op.declaration.flags_of_author
    if extra is not None:
        include += extra.include
        flags += nvcc_flags.translated(extra.cuda)[1]
    compiler = toolchain.require_compiler(default_store().notes)
    recorder.start(default_store().notes)
    program = TranslatedFiles(include)
    units = [program.add(path) for path in sources]
    program.add(Path(include[1], "opjit_cuda.h"))
    rendered = glue.render(op.schema, Emulated(), source.name)["opjit_glue.c"]
    places = [*map(str, program.paths.values())]
    content = [own_text(), rendered, compiler.version, flags, names, places, program.texts]

    def make(staged: Path) -> None:
        work = staged / "build"
        work.mkdir()
        try:
            write_translated(program, work, names)
            (work / "opjit_glue.c").write_text(rendered, "utf-8")
            for number, unit in enumerate(units):
                text = f'#include "cuda/cuda_runtime.h"\n#include "{unit}"\n'
                text = text if number else _entry(op, text)
                (work / f"{unit}.cc").write_text(text, "utf-8", "surrogateescape")
                run_tool([compiler.path, *_OF_OPS, *flags, "-c", f"{unit}.cc"], work)
            linked, _ = runtime_objects.folder(base(), compiler, _flags_of_cpu())
            run_tool([compiler.path, *_link(units, linked, include[1], checked, staged)], work)
        except NvccOnly as reason:
            raise NoKernel(f"{op.qualified} is not emulated: {reason}") from None
        except CompilerFailed as failed:
            raise _explained(op, str(failed)) from None

    # A digest in the key stands for the files of the emulation.
    covered = (f"{device_folder()}/", f"{base()}/")
    return parts.kept(base(), parts.name_of(content), (_BINARY,), covered, make) / _BINARY


def _flags_of_cpu() -> Flags:
    target = here(backends.for_device("cpu"))
    return target.backend.flags(target.arch, "")


def compiler_flags(checked: bool) -> list[str]:
    """The flags of g++. With a level of the processor that has -mfma, products and sums are fused as nvcc fuses them."""
    march = [flag for flag in _flags_of_cpu().c if flag.startswith("-march=")]
    included = f"-I{device_folder()}"
    return [*_KERNEL, *(_CHECKED if checked else ["-O2"]), *march, included]


def write_translated(program: TranslatedFiles, work: Path, names: Mapping[str, str]) -> None:
    """Write a program below the folder ``files``. `names` has other names than paths for messages."""
    (work / "files").mkdir()
    own = Path(resources.include_path()).resolve()
    for name, text in program.translated().items():
        path = program.paths[name]
        shown = json.dumps(names.get(name, str(path)), ensure_ascii=False)
        text = f"#line 1 {shown}\n{text}"
        if path.parent == own and path.name.startswith("opjit_"):
            text = _HELPERS.format(text)
        (work / "files" / name).write_text(text, "utf-8", "surrogateescape")


def _entry(op: OpState, source: str) -> str:
    """Return the C++ file of an op: the line that includes its source, and the function that the glue calls around the author's."""
    schema = op.schema
    names = c_names(schema)
    declared = ", ".join(glue.numbered_parameters(schema))
    shown = ", ".join(f'"{name}"' for name in names)
    values = ", ".join(f"opjit_{number}" for number in range(len(names)))
    function = glue.function_name(schema, "cuda")
    return f"""
#include "opjit_calls.h"
#include "opjit_cuda.h"
#define OPJIT_OP_{schema.name} 1
{source}
extern "C" opjit_status opjit_{function}({declared})
{{
    return emu_run({function}, {len(schema.arguments)}, {{{shown}}}, {values});
}}
"""


def _link(
    units: Sequence[str], linked: Path, include: str, checked: bool, staged: Path
) -> list[str]:
    """The words after the compiler's name that link an op's library."""
    compiled = [f"{unit}.o" for unit in units]
    compiled += [str(linked / name) for name in runtime_objects.OBJECTS]
    wrapped = [f"-Wl,--wrap=opjit_{name}" for name in _WRAPPED.split()] if checked else []
    return [
        *_GLUE,
        f"-I{include}",
        "opjit_glue.c",
        *compiled,
        *wrapped,
        f"-L{linked}",
        f"-L{runtime_folder()}",
        "-ltorch_cpu",
        f"-l:{RUNTIME}",
        "-lstdc++",
        "-lm",
        "-Wl,-z,defs",
        "-o",
        str(staged / _BINARY),
    ]


def _explained(op: OpState, output: str) -> OpjitError:
    """Make the error of a file that g++ refuses: a table names the missing feature, or the compiler's message is the reason."""
    error = diagnose(output, op.qualified, "cuda, emulated", base() / "logs")
    for line in str(error).splitlines():
        missing = missing_feature(line.partition("error: ")[2])
        if missing:
            return NoKernel(f"{op.qualified} is not emulated: {line}: {missing}")
    return error
