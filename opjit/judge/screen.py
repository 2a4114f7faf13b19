"""What is refused before it runs: imports that no kernel needs, and lines that reach for the judge. Each refusal says what it would do."""

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from opjit import resources
from opjit.builder.compile_step import run_tool
from opjit.judge.verdict import Ended

# What a library may import: C's functions for memory, texts, numbers and sorting, and what compilers add. (A regular expression of names.)
_C = re.compile(
    r"""
    mem(?:cpy|move|set|cmp|chr|pcpy) | b(?:cmp|zero|search) | str\w+ | [mc]alloc | realloc | free | aligned_alloc | posix_memalign
    | (?:ll?)?(?:abs|div) | qsort(?:_r)? | s?rand(?:_r)? | v?s?n?f?printf | put(?:s|char) | fput[sc]\w* | fwrite | fflush | std(?:out|err)
    | abort | is(?:alpha|digit|space) | to(?:lower|upper) | ato[if] | __errno_location | fe\w+except | fe[gs]etround
    | sigaction | syscall | getpid
    | __cxa_finalize | __gmon_start__ | _ITM_\w+ | __stack_chk_fail | __tls_get_addr | __assert_fail | __cpu_\w+ | __g\w+_personality_v0
    | _Unwind_Resume | _Znwm | _ZdlPv | __\w+[dtsx][cif][34]? | _ZGV\w+
    | c?a?(?:sin|cos|tan)h?\w? | (?:a?tan2|sincos|exp(?:2|10|m1)?|log(?:2|10|1p|b)?|ilogb|c?pow|c?sqrt|cbrt|hypot|fabs|ceil|floor
    | trunc|l?l?rint|l?l?round|nearbyint|fmod|remainder|remquo|modf|frexp|ldexp|scalb(?:l?n)?|copysign|nextafter|nexttoward|fdim
    | fm(?:in|ax|a)|erfc?|[lt]gamma|lgamma_r|[jy][01n]|nan|c(?:abs|arg|real|imag|conj|exp|log))[fl]?""",
    re.VERBOSE,
)
_CUDA = re.compile(
    r"__cuda\w+|cudaLaunchKernel\w*|cuda(?:Get|Peek)\w*Error\w*|cudaGetDevice|cudaDeviceGetAttribute|cudaFunc[SG]et\w+|"
    r"cudaOccupancy\w+|cudaMem(?:set|cpy|cpyToSymbol)Async|cudaGetSymbol\w+"
)
_WRAPPED = re.compile(r"__(\w+?)_(?:chk|finite)|__isoc\d+_(\w+)")
_RUNTIMES = re.compile(
    r"sigaction|syscall|getpid|_?Py[A-Z]\w+|aoti_torch_\w+"
)  # what opjit's runtime calls for itself
_TORCHS_OPERATOR = re.compile(r"aoti_torch_(?:cpu|cuda)_+(\w+?)(?:_out)?")
_REASONS = [
    (re.compile(names), reason)
    for names, reason in (
        (
            r"pthread_\w+|thrd_\w+|clone\d?|v?fork|sem_\w+|timer_\w+|GOMP_\w+",
            "starts threads or processes",
        ),
        (r"_?_?(?:libc_)?dl\w+", "looks up symbols at run time"),
        (
            r"clock\w*|time\w*|gettimeofday|\w*sleep|alarm|setitimer",
            "reads a clock, or waits for one",
        ),
        (
            r"mprotect|m(?:un|re)?map\w*|madvise|ptrace|process_vm_\w+|shm\w+|memfd_create|pkey_\w+",
            "changes or reads memory of others",
        ),
        (
            r"f?d?open\w*|creat|unlink\w*|rename\w*|p?write\w*|p?f?read\w*|remove|mkdir|f?stat\w*|ftruncate",
            "uses files",
        ),
        (r"socket|connect|send\w*|recv\w*|poll|select|epoll_\w+", "uses sockets"),
        (
            r"sig\w+|raise|kill|_?set?jmp\w*|_*longjmp\w*|atexit|on_exit|__cxa_atexit",
            "takes control by signals, jumps or exits",
        ),
        (
            r"_?exit|_Exit|quick_exit|exec\w+|system|popen|posix_spawn\w*",
            "ends the process, or starts programs",
        ),
        (r"\w*getenv|\w*setenv|putenv|_*environ", "uses the environment"),
        (r"syscall|getpid", "makes system calls"),
        (r"_?Py\w+", "calls Python"),
        (
            r"cuda(?:Stream|Event|Graph|ThreadExchange)\w+",
            "makes streams, events or graphs of its own",
        ),
        (r"cuda?(?:Ctx|Device)\w+", "changes the device's settings"),
        (r"cu\w+", "manages the device itself"),
        (r"aoti_torch_\w+|torch_\w+|_ZN\w*(?:2at|3c10|5torch)\w+", "calls torch's own operators"),
    )
]
_TEXTS = [
    (re.compile(pattern, re.IGNORECASE), reason)
    for pattern, reason in (
        (
            r"\b_*(?:con|de)structor_*\b|\b_*ifunc_*\b|\.(?:pre)?init_array",
            "runs code when it is loaded",
        ),
        (
            r"(?<=\")[^\"\n]*\b(?:syscall|sysenter|int\s*\$?0x80|svc)\b|\.(?:incbin|byte)\b",
            "makes system calls",
        ),
        (
            r"createpolicy|evict_last|cudaAccessPolicy\w*|persisting\w*",
            "keeps its data in the L2 cache from call to call",
        ),
        (r"\bglobaltimer\w*|\b_*nanosleep\b", "reads a clock, or waits for one"),
        (r"\bcudaGraph\w+|\bcudaLaunchDevice\w*", "makes streams, events or graphs of its own"),
    )
]


@cache
def _of_runtime() -> frozenset[str]:
    """The names of torch's, Python's and CUDA's functions in opjit's own runtime and glue: every op's library may import them."""
    texts = [path.read_text("utf-8") for path in resources.folder("kernels_c").glob("opjit*.[hc]")]
    return frozenset(
        re.findall(
            r"\b(?:aoti_torch|torch|_?Py)\w*", "\n".join([*texts, resources.template("glue.c.in")])
        )
    )


def check_source(text: str) -> None:
    """Hold C or CUDA text against what runs before, beside or under its function. Raises Ended."""
    plain = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    for name in re.findall(r"\b[A-Za-z_]\w*(?=\s*\()", plain):
        if (
            _RUNTIMES.fullmatch(name)
            and not (_TORCHS_OPERATOR.fullmatch(name) and name in _of_runtime())
        ) or (name.startswith("cuda") and not _CUDA.fullmatch(name)):
            raise Ended("cheat", f"{_reason(name)}: {name}", reusable=True)
    for pattern, reason in _TEXTS:
        if found := pattern.search(plain):
            raise Ended("cheat", f"{reason}: {found[0].strip()}", reusable=True)


def check_library(path: Path, operators: Sequence[str]) -> None:
    """Hold a library against the list of what it may import; nothing of it runs. Raises Ended.
    It may call some of torch's operators that the reference calls, not all."""
    table = run_tool(
        ["readelf", "--wide", "--dyn-syms", "--dynamic", "--relocs", str(path)], path.parent
    )
    rows = [line.split() for line in table.splitlines()]
    names = sorted({row[7].partition("@")[0] for row in rows if len(row) > 7 and row[6] == "UND"})
    refused = [name for name in names if not _allowed(name)]
    called = {found[1]: name for name in names if (found := _TORCHS_OPERATOR.fullmatch(name))}
    if operators and {*operators} <= called.keys():
        refused += called.values()
    if refused:
        reason = next(filter(None, map(_reason, refused)), "needs what no kernel does")
        raise Ended("cheat", f"{reason}: {', '.join(refused)[:4000]}", reusable=True)
    most = (
        8 if "libcudart" not in table else 16
    )  # bytes: the compiler's own function, and the registration of CUDA's code
    if "IRELATIV" in table or any(
        row[1:2] == [f"({kind}_ARRAYSZ)"] and int(row[2]) > most
        for row in rows
        for kind in ("INIT", "FINI")
    ):
        raise Ended("cheat", "runs code when it is loaded", reusable=True)
    if any(
        code in path.read_bytes() for code in (b"\x0f\x05", b"\x0f\x34", b"\xcd\x80")
    ):  # also parts of other instructions
        listing = run_tool(["objdump", "-d", "--no-show-raw-insn", str(path)], path.parent)
        if found := re.search(r"\t(syscall|sysenter|int\s+\$0x80)", listing):
            raise Ended("cheat", f"makes system calls: the instruction {found[1]}", reusable=True)


def _allowed(name: str) -> bool:
    wrapped = _WRAPPED.fullmatch(name)
    plain = wrapped[1] or wrapped[2] if wrapped else name
    return name in _of_runtime() or bool(_C.fullmatch(plain) or _CUDA.fullmatch(name))


def _reason(name: str) -> str:
    return next((reason for names, reason in _REASONS if names.fullmatch(name)), "")


_PYTHON = [
    (re.compile(names), reason)
    for names, reason in (
        (
            r"gc\.get_\w+|sys\._getframe|sys\._current_frames|inspect\.\w*(?:stack|frame)\w*",
            "searches the process for what is not its own",
        ),
        (
            r"(?:sys|threading)\.(?:settrace|setprofile|addaudithook|monitoring.*)",
            "watches the code that measures it",
        ),
        (
            r"(?:torch\.)?(?:cuda\.)?(?:Stream|ExternalStream|set_stream)|torch\.cuda\.stream",
            "makes a stream of its own",
        ),
        (
            r"torch\.cuda\.(?:CUDAGraph|graph|make_graphed_callables)",
            "replays a graph that was captured before",
        ),
        (
            r"(?:\w+\.)*(?:Thread|Timer|(?:Thread|Process)PoolExecutor|start_new_thread)|multiprocessing\..+|os\.(?:v?fork\w*|posix_spawnp?|spawn\w+)",
            "starts threads or processes",
        ),
        (
            r"os\.(?:kill|killpg|setsid|_exit|abort)|signal\.\w+|atexit\.\w+|faulthandler\.\w+",
            "takes control by signals, jumps or exits",
        ),
        (
            r"os\.(?:p?write\w*|sendfile|dup2?|fdopen|memfd_create)|socket\.\w+|mmap\.\w+",
            "writes to the pipes of the judge",
        ),
        (r"ctypes\.\w+", "reads or writes memory by address"),
        (r"os\.(?:environ|putenv|unsetenv)(?:\.\w+)?", "changes the environment"),
        (
            r"(?:torch\.)?(?:Tensor\.)?_make_(?:wrapper_)?subclass|\w+\.as_subclass",
            "returns a tensor that computes later",
        ),
        (
            r"torch\.set_float32_matmul_precision|torch\.backends\.\w+\.matmul\.\w+",
            "computes in lower precision",
        ),
        (r"opjit\.judge.*", "reaches for the judge"),
    )
]


def check_python(text: str) -> None:
    """Refuse Python that reaches for what is not its own. It stops no determined program, and names what others do. Raises
    Ended, or SyntaxError."""
    tree = ast.parse(text)
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        if isinstance(node, ast.ImportFrom)
        else alias.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    for node in ast.walk(tree):
        for name in _names(node, imported):
            for names, reason in _PYTHON:
                if names.fullmatch(name):
                    raise Ended(
                        "cheat",
                        f"{reason}: {name} in line {getattr(node, 'lineno', 0)}",
                        reusable=True,
                    )
        if isinstance(node, ast.Constant) and re.search(
            r"/proc/|/dev/shm|opjit.judge", str(node.value)
        ):
            raise Ended(
                "cheat",
                f"reaches for other processes or the judge: {node.value!r} in line {node.lineno}",
                reusable=True,
            )


def _names(node: ast.AST, imported: dict[str, str]) -> Iterator[str]:
    """The dotted name that an expression is, by the imports' own names."""
    if isinstance(node, (ast.Attribute, ast.Name)) and re.fullmatch(
        r"[\w.]+", text := ast.unparse(node)
    ):
        first, dot, rest = text.partition(".")
        yield imported.get(first, first) + dot + rest
