"""From a failed build's output to an error that starts with the compiler's first real complaint."""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from opjit import files, processes
from opjit.builder.tokens import CLOSING, code_of, match_brackets, tokenize
from opjit.errors import BuildError, CompileError

_COMPLAINT = (
    r"(?::\d+(?::\d+)?: (?:fatal )?error: |\(\d+\): (?:catastrophic )?error|: undefined reference to |"
    r"Unresolved extern function |not supported on \.target |cannot find -l|: error: |fatal error|"
    r"multiple definition of |ptxas (?:error|fatal) )"
)
# A tool that was killed, often for the memory that it took, or that crashed.
_DIED = re.compile(
    r"Killed signal terminated|error: Killed|^Killed|signal (?:9|15)\b|was killed by signal|[Oo]ut of memory|[Cc]annot allocate memory|"
    rf"memory exhausted|Segmentation fault|internal compiler error|{processes.LATE}",
    re.MULTILINE,
)
_AGAIN = "try again, with more memory if it needs it"
# Lines about the command, not the code: opjit's, and gcc's remark on a C++ flag that torch always passes.
_FRAME = (
    r"^(?:FAILED: |collect2: error: |Error building extension|"
    r".*option '-std=c\+\+\d+' is valid for C\+\+|"
    r"In file included from .*opjit_(?:glue|kernel)\.[\w.]+:\d+)"
)
# Remarks on a complaint that was shown: gcc's, with gcc's second note of the header to include, clang's and nvcc's.
_REMARK = re.compile(
    r"note: each undeclared identifier is reported only once|some warnings being treated as errors|"
    r"warning: incompatible implicit declaration of built-in function|^\d+ (?:warnings? and \d+ )?errors? generated\.|"
    r"^\d+ errors? detected in the compilation of "
)
_OF_REMARK = re.compile(r" *(?:\d+|\+\+\+)? *\||.*: note: include '<")  # its excerpt, and that note
_NOT_C = "; an op's kernel is plain C over opjit.h: "
_NO_TORCH = "an op cannot use torch's headers; build C++ code with opjit.load"
# Hints about a complaint and its next line; the first match is used. _OF_C is for ops in C, _OF_OPS for all ops.
_HABITS = [
    (r"'torch' undeclared.*\n.*\btorch\.", "write OPJIT_FLOAT32 for torch.float32"),
    (
        r"function 'AT_DISPATCH_\w+'",
        'write OPJIT_DISPATCH_FLOATING(x->dtype, "name", { ... }) for AT_DISPATCH_FLOATING_TYPES',
    ),
    (
        r"error: expected expression before '\)' token\n.*#define OPJIT_FAIL",
        'OPJIT_CHECK takes a condition and a message: OPJIT_CHECK(x->dim == 1, "expected a vector")',
    ),
    (
        r"error: '(?:std|at|c10|torch|nullptr|static_cast|reinterpret_cast|const_cast|constexpr)' undeclared|before '::'|"
        r"error: unknown type name '(?:template|class|namespace|using|constexpr|typename)'",
        "this is C++; write it in C, or build C++ code with opjit.load",
    ),
    (
        r"fatal error: '?[\w/]+'?(?:: No such file| file not found)",
        "a header without .h is a C++ header; build C++ code with opjit.load",
    ),
    (
        r"error: (?:implicit declaration of function|call to undeclared function) 'opjit_printf'",
        '#include "opjit_printf.h"',
    ),
    (r"error: expected identifier or '\('.*\n.*\bextern \"C\"", 'leave out extern "C"'),
    (r"'TORCH_CHECK'", "write OPJIT_CHECK(condition, message) for TORCH_CHECK"),
    (r"error: type defaults to 'int'.*\n.*\bauto\b", "auto is C++; write the type"),
    (
        r"no member named 'data_ptr'|is a pointer; .*\n.*\bdata_ptr\b",
        "write (const float *)x->data for x.data_ptr<float>()",
    ),
    (
        r"'opjit_tensor' has no member named ",
        "a tensor has data, numel, dim, sizes, strides, dtype and contiguous",
    ),
    (
        r"opjit_cuda\.h:\d+:\d+: fatal error: ",
        "opjit_cuda.h is for .cu files; include opjit.h",
    ),
]
_OF_C = [(pattern, _NOT_C + hint) for pattern, hint in _HABITS]
_OF_OPS = [
    (
        r"passing argument 3 of 'opjit_empty|incompatible with parameter of type.*\n.*opjit_sizes_of",
        "; OPJIT_SIZES(n, m) is two arguments, the number of sizes and the sizes: opjit_empty(out, OPJIT_SIZES(n, m), x->dtype, x)",
    ),
    (
        (
            r"aka 'opjit_(?:half|bfloat16)'|error: invalid initializer\n.*\bscalar_t\b|"
            r"(?:aggregate value used|conversion to non-scalar type).*\n.*OPJIT_DISPATCH"
        ),
        "; C cannot compute with halves: read an element with opjit_load, compute in opmath_t, and write it with opjit_store",
    ),
    (
        # The expansion of a line of Caffe by opjit_caffe.h.
        (
            r"\b(?:CUDA_KERNEL_LOOP|CUDA_POST_KERNEL_CHECK|CAFFE_GET_BLOCKS|CAFFE_CUDA_NUM_THREADS|caffe_cuda_macro)\b|"
            r"int 512 = 512"
        ),
        "; Caffe's macros are in opjit_caffe.h: include it, after any other header that has them",
    ),
    (
        (
            r"/include/(?:torch|ATen|c10|caffe2|pybind11)/[^:]*(?::\d+:\d+|\(\d+\)): (?:fatal )?error: |"
            r"fatal error: '?(?:torch|ATen|c10|caffe2|pybind11)/.*(?:No such file|file not found)"
        ),
        f"{_NOT_C}{_NO_TORCH}",
    ),
    (
        r"undefined reference to [`'](?:omp_|GOMP_|__kmpc)",
        "; an op runs on torch's threads: call opjit_parallel_for, and leave out -fopenmp",
    ),
    (
        # A name with parameters is a C++ function's.
        r"undefined reference to [`'](\w+)\(.*\)'",
        r'; if C code of the op or of a library defines \1, declare it extern "C" here; else define it, or add the file that does to '
        "extra_sources",
    ),
    (
        r"undefined reference to |Unresolved extern function ",
        "; define it in the op's source, add the file that does to extra_sources, or name its library in extra_ldflags",
    ),
    (
        r"uses too much shared data",
        "; a block has 48 KiB by default: for more, declare it extern __shared__, pass its bytes at the launch, and raise the kernel's "
        "cudaFuncAttributeMaxDynamicSharedMemorySize with cudaFuncSetAttribute",
    ),
]
_OF_ALL = [
    (
        r"error: '(?:torch|at|c10|PYBIND11_MODULE)' (?:does not name|has not been|was not)",
        "; #include <torch/extension.h> before it",
    ),
    (
        r"cuda_cmake_macros\.h:? .*(?:No such file|file not found)",
        "; this torch is a build without CUDA, which lacks the header: install a CUDA build of torch",
    ),
    # Code of torch's years before 2.
    (
        r"DeprecatedTypeProperties",
        "; where old code has x.type(), write x.scalar_type()",
    ),
    (
        r"at::Tensor::data<|Tensor['\"] has no member (?:named )?['\"]data['\"]",
        "; where old code has x.data<T>(), write x.data_ptr<T>()",
    ),
    (r"['\"]AT_CHECK['\"]", "; AT_CHECK is TORCH_CHECK now"),
    (
        r"fatal error: '?THCU?/|['\"`]THC\w+",
        "; THC left torch with 1.11: the stream is at::cuda::getCurrentCUDAStream(), in an op its last argument; THCudaCheck is "
        "C10_CUDA_CHECK, in an op OPJIT_CUDA_CHECK; THCudaMalloc is torch::empty, in an op opjit_scratch",
    ),
    (
        r"fatal error: '?(cu(?:blas|dnn|fft|rand|solver|sparse)|nccl)",
        r"; neither the CUDA Toolkit nor pip's packages have it here: install the package of pip whose name starts with nvidia-\1",
    ),
    (
        r"cannot (?:execute|find) '?(?:\S*/)?(?:as|ld)\b",
        "; install binutils (Debian and Ubuntu: apt install binutils)",
    ),
    (
        r"cannot execute '?cc1plus",
        "; CUDA code also needs the C++ compiler (Debian and Ubuntu: apt install g++)",
    ),
    (
        r"fatal error: .*(?:No such file|file not found)",
        "; pass the header's directory in extra_include_paths",
    ),
    (
        r"not supported on \.target 'sm_\d+'",
        '; for instructions of one GPU alone, declare the op with archs=["sm_90a"]',
    ),
]
_DEFINITION = r"^[ \t]*[A-Za-z_][\w\"* \t]*[\s*](?P<name>\w+)\s*\([^;{}()]*\)\s*\{"
_AT_END = re.compile(
    r"error: (?:expected .* at end of input|expected ['\"]?\}|expected a ['\"]\}|unterminated argument list)"
)
_SHOWN = 16  # lines of the compiler's output in the message
_NOTE = re.compile(r"(?P<place>[^\s:]+:\d+:\d+): note: in expansion of macro '(?P<macro>\w+)'")
_HEADER = re.compile(r"(?:\S*/)?opjit\w*\.h(?::|$)")
_PLACE = r"(?P<file>[^\s:]+):\d+:\d+: (?P<text>(?:fatal )?error: .*)"


def diagnose(
    output: str, op: str, target: str, logs: Path, expected: tuple[str, str] | None = None
) -> BuildError:
    """Make the error of a failed build from the tools' output, which a file in `logs` keeps: a CompileError if a tool refused the source,
    and not if it was killed, which another rank's may not be. `expected` is an op's source, and the prototype that it must define."""
    path = (
        logs / f"{op.replace('::', '.')}.{time.strftime('%Y%m%d-%H%M%S')}.{files.random_name()}.log"
    )
    files.write_note(path, output)
    log = path if path.exists() else None
    found = re.search(r"^FAILED: .*\n(.*)", output, re.MULTILINE)
    command = found[1] if found else None
    of_code = [
        line for line in output.splitlines() if not re.match(_FRAME, line) and line != command
    ]
    lines = _left_out(of_code, _REMARK.search, _OF_REMARK.match)
    mismatch = (
        next(filter(None, (_mismatch(line, op, expected) for line in lines)), None)
        if expected
        else None
    )
    if expected and mismatch is None and any(map(_AT_END.search, lines)):
        mismatch = unclosed(Path(expected[0]))
    if mismatch is not None:
        return CompileError(mismatch, op=op, target=target, command=command, log=log)
    first = next((index for index, line in enumerate(lines) if re.search(_COMPLAINT, line)), None)
    if first is None:
        text = "\n".join(lines[-_SHOWN:]).strip() or output.strip() or "no output"
        message = f"{op} for {target} was not built: {text}"
        if _DIED.search(output) and _AGAIN not in message:
            message += f"; a tool was killed; {_AGAIN}"
    else:
        source = expected[0] if expected else None
        hint = _hint(lines[first:], source)
        complaint, *more = (
            _at_author(lines[first:], source)[:_SHOWN] if source else lines[first : first + _SHOWN]
        )
        more = [] if hint.endswith(_NO_TORCH) else more
        message = "\n".join(
            [
                f"{complaint.strip().rstrip('.')}{hint}" if hint else complaint.strip(),
                f"while building {op} for {target}{':' if more else ''}",
                *more,
            ]
        )
    message += f"\nfull output: {log}" if log else ""
    kind = BuildError if _DIED.search(output) else CompileError
    return kind(message, op=op, target=target, command=command, log=log)


def unclosed(source: Path) -> str | None:
    """Return the complaint about a bracket that a source does not close. Compilers see its end at the end of the generated wrapper."""
    try:
        text = source.read_text("utf-8", "replace")
    except OSError:
        return None
    _, unmatched = match_brackets(tokenize(text))
    opened = [token for token in unmatched if token.text in CLOSING]
    if not opened:
        return None
    line = text.count("\n", 0, opened[-1].start) + 1
    column = opened[-1].start - text.rfind("\n", 0, opened[-1].start)
    return f"{source}:{line}:{column}: error: this '{opened[-1].text}' is not closed"


def _at_author(lines: list[str], source: str) -> list[str]:
    """Find the line in the author's source for an error in the expansion of a macro of opjit, or
    for an undefined function.
    """
    undefined = re.search(r"undefined reference to [`'](?P<name>\w+)(?:\(.*\))?'", lines[0])
    place = re.match(_PLACE, lines[0].strip())
    if undefined:
        return [f"{_used(source, undefined['name'])}: error: {undefined[0]}", *lines[1:]]
    lines = _left_out(
        lines,
        lambda line: _HEADER.match(line) and ": note: in " in line,
        lambda line: line.startswith(" "),
    )
    if place is None or not _HEADER.match(place["file"]):
        return lines
    end = next(
        (index for index, line in enumerate(lines[1:], 1) if re.match(_PLACE, line.strip())),
        len(lines),
    )
    for index, note in reversed(
        [*enumerate(map(_NOTE.match, lines[:end]))]
    ):  # the last is the innermost macro that the author uses
        if note:
            # This line repeats the error for the next dtype.
            others = [] if any(map(_HEADER.match, lines[end : end + 1])) else lines[end:]
            return [
                f"{note['place']}: {place['text']}, in what {note['macro']} expands to",
                *lines[index + 1 : end],
                *others,
            ]
    return lines


def _left_out(
    lines: list[str], starts: Callable[[str], object], follows: Callable[[str], object]
) -> list[str]:
    """Leave out the lines at which remarks start, each with the lines that follow it."""
    rest = []
    inside = False
    for line in lines:
        inside = bool(starts(line) or (inside and follows(line)))
        if not inside:
            rest.append(line)
    return rest


def _used(source: str, name: str) -> str:
    """Return the place at which a source first names a function; the source alone if it does not."""
    with suppress(OSError):
        for number, line in enumerate(Path(source).read_text("utf-8", "replace").splitlines(), 1):
            if re.search(rf"\b{name}\s*\((?!.*\)\s*;\s*$)|[=(,]\s*{name}\s*\(", line):
                return f"{source}:{number}"
    return source


def with_advice(output: str) -> str:
    """Add advice on a tool's first line to it."""
    first, *rest = output.splitlines() or [""]
    return "\n".join([f"{first}{_hint([first], None)}", *rest])


def _mismatch(line: str, op: str, expected: tuple[str, str]) -> str | None:
    """Translate a complaint that the author's function is missing or not as the schema wants it. None for any other line."""
    source, prototype = expected
    function = prototype.partition("(")[0].split()[-1]
    missing = rf"undefined reference to [`']{function}'|identifier \"{function}\" is undefined|'{function}' was not declared in this scope"
    other = rf"error: (?:conflicting types for|(?:static|non-static) declaration of) '{function}'"
    of_glue = r"opjit_kernel\.\S+ error: (?:.*cannot be used to initialize an entity|invalid conversion from)"
    if re.search(missing, line):
        defined = ", ".join(
            text for _, text in _definitions(source).values() if text.startswith("opjit_status ")
        )
        return f"{source}: error: it does not define {function}, which {op} calls: expected {prototype}, found {defined or 'no function'}"
    if not re.search(f"{other}|{of_glue}", line):
        return None
    place, found = _definitions(source).get(function, ("", "another one"))
    named = re.match(r"(.+?:\d+:\d+): ", line) if re.search(other, line) else None
    where = named[1] if named else f"{source}{place}"
    return f"{where}: error: {function} does not match the schema of {op}: expected {prototype}, found {found}"


def _definitions(source: str) -> dict[str, tuple[str, str]]:
    """Return the position, as ``:line:column``, and the prototype of each function that a source
    defines, by name.
    """
    with suppress(OSError):
        text = code_of(Path(source).read_text("utf-8", "replace"))
        return {
            match["name"]: (
                f":{text.count(chr(10), 0, match.start('name')) + 1}:"
                f"{match.start('name') - text.rfind(chr(10), 0, match.start('name'))}",
                " ".join(match[0].rstrip("{").split()),
            )
            for match in re.finditer(_DEFINITION, text, flags=re.MULTILINE)
        }
    return {}


def _hint(lines: list[str], source: str | None) -> str:
    """Return advice on a complaint, or an empty text."""
    complaint = "\n".join(lines[:2])
    hints = [
        *(_OF_OPS if source else []),
        *(_OF_C if source and source.endswith(".c") else []),
        *_OF_ALL,
    ]
    return next(
        (found.expand(hint) for pattern, hint in hints if (found := re.search(pattern, complaint))),
        "",
    )
