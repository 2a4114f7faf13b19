"""The imports of a candidate's object files, before they are linked with opjit's runtime.

Evidence is the symbols and sections of the files, not the text. On a CPU an import without a reason
to refuse it is allowed, because seccomp limits the code. On a GPU only known imports are allowed.
"""

import re
from functools import cache
from pathlib import Path

from opjit import resources
from opjit.builder.compile_step import run_tool
from opjit.judge.verdict import VerdictReached

# C's functions for memory, text, numbers and sorting, and the functions that compilers add: a pattern of names.
_KNOWN = r"""
    mem(?:cpy|move|set|cmp|chr|pcpy) | b(?:cmp|zero|search) | str\w+ | [mc]alloc | realloc | free | aligned_alloc | posix_memalign
    | (?:ll?)?(?:abs|div) | qsort(?:_r)? | s?rand(?:om)?(?:_r)? | v?s?n?f?printf | put(?:s|char) | fput[sc]\w* | fwrite | fflush
    | std(?:out|err) | abort | is\w+ | to(?:lower|upper) | __ctype_\w+ | ato[if] | __errno_location | fe\w+except | fe[gs]etround
    | __cxa_finalize | __gmon_start__ | _ITM_\w+ | __stack_chk_fail | __tls_get_addr | __assert_fail | __cpu_\w+ | __g\w+_personality_v0
    | _Unwind_Resume | _Znwm | _ZdlPv | __\w+[dtsx][cif][34]? | _ZGV\w+ | _GLOBAL_OFFSET_TABLE_ | opjit_\w+
    | c?a?(?:sin|cos|tan)h?\w? | (?:a?tan2|sincos|exp(?:2|10|m1)?|log(?:2|10|1p|b)?|ilogb|c?pow|c?sqrt|cbrt|hypot|fabs|ceil|floor
    | trunc|l?l?rint|l?l?round|nearbyint|fmod|remainder|remquo|modf|frexp|ldexp|scalb(?:l?n)?|copysign|nextafter|nexttoward|fdim
    | fm(?:in|ax|a)|erfc?|[lt]gamma|lgamma_r|[jy][01n]|nan|c(?:abs|arg|real|imag|conj|exp|log))[fl]?
    | __cuda\w+ | cudaLaunchKernel\w* | cuda(?:Get|Peek)\w*Error\w* | cudaGetDevice | cudaDeviceGetAttribute | cudaFunc[SG]et\w+
    | cudaOccupancy\w+ | cudaMem(?:set|cpy|cpyToSymbol)Async | cudaGetSymbol\w+"""
_OF_NVCC = frozenset(
    ["exit", "atexit", "__cxa_guard_acquire", "__cxa_guard_release", "__cxa_guard_abort"]
)
_REFUSED = {
    "starts threads or processes": r"(?:pthread|thrd)_create|clone\d?|_*v?fork|posix_spawn\w*|GOMP_\w+",
    "looks up symbols at run time": r"_*(?:libc_)?dl(?:m?open|v?sym|addr1?|info|close|_iterate_phdr)",
    "waits for a clock, or sets one": r"\w*sleep|alarm|setitimer|timer_\w+|clock_\w*(?:set|adj)time|settimeofday",
    "changes or reads memory": r"mprotect|ptrace|process_vm_\w+|shm\w+|memfd_create|pkey_\w+",
    "uses files": r"(?:f|fd|fre)?open(?:at)?(?:64)?|creat(?:64)?|unlink\w*|rename\w*|remove|mkdir|f?truncate(?:64)?",
    "uses sockets": r"socket\w*|connect|send(?:to|msg|mmsg)?|recv(?:from|msg|mmsg)?",
    "controls the process by signals, jumps or exits": r"_*sig(?:action|nal|setjmp|longjmp|procmask|queue|altstack)|raise|kill"
    r"|_*setjmp|_*longjmp\w*|atexit|on_exit|__cxa_atexit",
    "ends the process, or starts programs": r"_?exit|_Exit|quick_exit|exec[lv]\w*|system|popen",
    "changes the environment": r"setenv|unsetenv|putenv|clearenv",
    "makes system calls": r"syscall",
    "calls Python": r"_?Py[A-Z]\w+",
    "keeps its data in the L2 cache": r"cuda(?:Stream|GraphKernelNode)SetAttribute\w*",
    "makes streams, events or graphs": r"cuda(?:Stream|Event|Graph|ThreadExchange)\w+",
    "changes the device's settings": r"cuda?(?:Ctx|Device|Set)\w+",
    "manages the device itself": r"cu[A-Z]\w+|cuda\w+",
    "calls torch's operators": r"aoti_torch_\w+|torch_\w+|_ZN\w*(?:2at|3c10|5torch)\w+",
}
_AT_LOAD = r"\.(?:init|fini|preinit_array|init_array|fini_array|ctors|dtors)(?:\.\w+)?"
# A section's name and size in readelf's lines: ``[ 5] .init PROGBITS 0000 000040 000010 ...``.
_SECTION = r"^ *\[ *\d+\] (\S+) +\S+ +\w+ \w+ (\w+)"
_CODES = (b"\x0f\x05", b"\x0f\x34", b"\xcd\x80", b"\x01\x00\x00\xd4")


def check_objects(work: Path, on_gpu: bool) -> None:
    """Check the object files of a build's folder without running them. Raises VerdictReached."""
    for path in sorted(work.rglob("*.o")):  # which does not follow the link to opjit's runtime
        if path.name.endswith("_fatbin.o"):  # the registration of CUDA code
            continue
        by_nvcc = path.name.endswith(".cuda.o")
        table = run_tool(["readelf", "--wide", "--syms", "--section-headers", str(path)], work)
        rows = (line.split() for line in table.splitlines())
        imports = sorted({row[7] for row in rows if len(row) == 8 and row[6] == "UND"})
        _check_imports(imports, on_gpu, by_nvcc)

        registration = 8 if by_nvcc else 0  # bytes of a pointer to nvcc's function
        for section, size in re.findall(_SECTION, table, re.MULTILINE):
            if re.fullmatch(_AT_LOAD, section) and int(size, 16) > registration:
                raise VerdictReached("cheat", f"runs code when it is loaded: section {section}")

        _check_instructions(path, work)


def _check_instructions(path: Path, work: Path) -> None:
    content = path.read_bytes()
    if any(code in content for code in _CODES):  # they may be parts of other instructions
        listing = run_tool(["objdump", "-d", "--no-show-raw-insn", str(path)], work)
        found = re.search(r"\t(syscall|sysenter|int\s+\$0x80|svc\s.*)", listing)
        if found:
            raise VerdictReached("cheat", f"makes system calls: the instruction {found[1]}")


def _check_imports(names: list[str], on_gpu: bool, by_nvcc: bool) -> None:
    unknown = [name for name in names if not _is_known(name) and not (by_nvcc and name in _OF_NVCC)]
    for reason, pattern in _REFUSED.items():
        found = [name for name in unknown if re.fullmatch(pattern, name)]
        if found:
            raise VerdictReached("cheat", f"{reason}: {', '.join(found)[:1000]}")
    if on_gpu and unknown:
        shown = ", ".join(unknown)[:1000]
        raise VerdictReached("compile", f"imports {shown}, which judged CUDA code cannot use")


def _is_known(name: str) -> bool:
    wrapped = re.fullmatch(r"__(\w+?)_(?:chk|finite)|__isoc\d+_(\w+)", name)
    plain = (wrapped[1] or wrapped[2]) if wrapped else name
    return name in _of_glue() or re.fullmatch(_KNOWN, plain, flags=re.VERBOSE) is not None


@cache
def _of_glue() -> frozenset[str]:
    """The names of torch in opjit's headers and backends: every op's object may import them."""
    headers = (
        resources.folder("kernels_c") / name for name in ("opjit.h", "opjit_glue.h", "opjit_shim.h")
    )
    tags = re.findall(r"\btorch_tag_\w+", "\n".join(path.read_text("utf-8") for path in headers))
    stream = "aoti_torch_get_current_cuda_stream"
    allocator = "aoti_torch_cuda_caching_allocator_raw_"
    return frozenset([*tags, stream, f"{allocator}alloc", f"{allocator}delete"])
