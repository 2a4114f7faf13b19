"""From a failed build's output to an error that starts with the compiler's first real complaint."""

from __future__ import annotations

import re
import time
from pathlib import Path

from opjit import files
from opjit.errors import CompileError

_COMPLAINT = re.compile(r"(?::\d+(?::\d+)?: (?:fatal )?error: |\(\d+\): (?:catastrophic )?error|: undefined reference to |"
                        r"Unresolved extern function |not supported on \.target |cannot find -l|: error: |fatal error|"
                        r"multiple definition of )")
# Lines about the command, not the code: ninja's, and gcc's remark on a C++ flag that torch always passes.
_FRAME = re.compile(r"^(?:\[\d+/\d+\] |FAILED: |ninja: |collect2: error: |Error building extension|"
                    r".*option '-std=c\+\+\d+' is valid for C\+\+|"
                    r"In file included from .*opjit_(?:glue\.c|kernel\.cu):\d+)")
_NOT_C = "; an op's kernel is plain C over opjit.h: "
# Hints about a complaint and its next line; the first match is used. _OF_C is for ops in C, _OF_OPS for all ops.
_OF_C = [(re.compile(pattern), _NOT_C + hint) for pattern, hint in [
    (r"/include/(?:torch|ATen|c10|caffe2|pybind11)/[^:]*:\d+:\d+: (?:fatal )?error: |"
     r"fatal error: '?(?:torch|ATen|c10|caffe2|pybind11)/.*(?:No such file|file not found)",
     "an op cannot use torch's headers; build C++ code with opjit.load"),
    (r"fatal error: '?[\w/]+'?(?:: No such file| file not found)", "a header without .h is a C++ header; build C++ code with opjit.load"),
    (r"error: (?:implicit declaration of function|call to undeclared function) 'opjit_printf'", "#include \"opjit_printf.h\""),
    (r"error: expected identifier or '\('.*\n.*\bextern \"C\"", "leave out extern \"C\""),
]]
_OF_OPS = [(re.compile(r"undefined reference to |Unresolved extern function "),
            "; an op is compiled from one source: define it there, #include the file that does, or name its library in extra_ldflags")]
_OF_ALL = [
    (re.compile(r"cannot execute '?cc1plus"), "; CUDA code needs the C++ compiler, too (Debian and Ubuntu: apt install g++)"),
    (re.compile(r"fatal error: .*(?:No such file|file not found)"), "; pass the header's folder in extra_include_paths"),
    (re.compile(r"not supported on \.target 'sm_\d+'"), "; features of one arch alone need a target that ends in a, such as sm_90a"),
]
_SHOWN = 16  # lines of the compiler's output in the message


def diagnose(output: str, op: str, target: str, logs: Path, expected: tuple[str, str] | None = None) -> CompileError:
    """Make the error for a failed cpp_extension.load.

    Args:
        output: ninja's whole output, from torch's error.
        logs: folder for the complete output.
        expected: an op's source, and the prototype of the function that it must define.
    """
    log = logs / f"{op.replace('::', '.')}.{time.strftime('%Y%m%d-%H%M%S')}.{files.unique()}.log"
    files.write_note(log, output)
    command = next((following for line, following in zip(output.splitlines(), output.splitlines()[1:], strict=False)
                    if line.startswith("FAILED: ")), None)
    lines = [_translated(line, op, expected) for line in output.splitlines() if not _FRAME.match(line) and line != command]
    first = next((index for index, line in enumerate(lines) if _COMPLAINT.search(line)), None)
    if first is None:
        text = "\n".join(lines[-_SHOWN:]).strip() or output.strip() or "no output"
        message = f"{op} for {target} was not built: {text}"
    else:
        complaint, hint = lines[first].strip(), _hint("\n".join(lines[first:first + 2]), expected[0] if expected else None)
        message = "\n".join([f"{complaint.rstrip('.')}{hint}" if hint else complaint, f"while building {op} for {target}:",
                             *lines[first + 1:first + _SHOWN]])
    where = f"\nfull output: {log}" if log.exists() else ""
    return CompileError(message + where, op=op, target=target, command=command, log=log if where else None)


def _translated(line: str, op: str, expected: tuple[str, str] | None) -> str:
    """Translate a complaint about opjit's glue into one about the author's source; return other lines unchanged."""
    if expected is not None:
        source, prototype = expected
        function = prototype.partition("(")[0].split()[-1]
        if re.search(rf"undefined reference to [`']{function}'|identifier \"{function}\" is undefined", line):
            return f"{source}: error: it does not define {function}, which {op} calls: {prototype}"
        if "cannot be used to initialize an entity" in line and "opjit_kernel.cu" in line:
            return f"{source}: error: {function} does not match the schema of {op}, {prototype}: {line.partition('error: ')[2]}"
    return line


def _hint(complaint: str, source: str | None) -> str:
    """Return advice on a complaint and its next line, or an empty text."""
    known = [*(_OF_C if source and source.endswith(".c") else []), *(_OF_OPS if source else []), *_OF_ALL]
    return next((hint for pattern, hint in known if pattern.search(complaint)), "")
