"""From a failed build's output to an error whose first line is the compiler's first real complaint."""

from __future__ import annotations

import re
import time
from pathlib import Path

from opjit import files
from opjit.errors import CompileError

_COMPLAINT = re.compile(r"(?::\d+(?::\d+)?: (?:fatal )?error: |\(\d+\): (?:catastrophic )?error|: undefined reference to |"
                        r"Unresolved extern function |not supported on \.target |cannot find -l|: error: |fatal error|"
                        r"multiple definition of )")
# Lines about the command, not the code: ninja's frame, and gcc's remark on a C++ flag that torch always passes.
_FRAME = re.compile(r"^(?:\[\d+/\d+\] |FAILED: |ninja: |collect2: error: |Error building extension|"
                    r".*option '-std=c\+\+\d+' is valid for C\+\+|"
                    r"In file included from .*opjit_(?:glue\.c|kernel\.cu):\d+)")
_NOT_C = "; an op's kernel is plain C over opjit.h: "
# What to do about a complaint and the line under it; the first that fits is told. Those of C are for ops' sources in C only.
_OF_C = [(re.compile(pattern), _NOT_C + hint) for pattern, hint in [
    (r"/include/(?:torch|ATen|c10|caffe2|pybind11)/[^:]*:\d+:\d+: (?:fatal )?error: |"
     r"fatal error: '?(?:torch|ATen|c10|caffe2|pybind11)/.*(?:No such file|file not found)",
     "torch's headers are not for ops, and C++ code goes to opjit.load"),
    (r"fatal error: '?[\w/]+'?(?:: No such file| file not found)", "a header without .h is one of C++, and C++ code goes to opjit.load"),
    (r"error: (?:implicit declaration of function|call to undeclared function) 'opjit_printf'", "#include \"opjit_printf.h\" for it"),
    (r"error: expected identifier or '\('.*\n.*\bextern \"C\"", "leave out extern \"C\", which opjit's glue does not need"),
]]
_OF_OPS = [(re.compile(r"undefined reference to |Unresolved extern function "),
            "; an op is compiled from one source: define it there, or #include the file that does, or name its library in extra_ldflags")]
_OF_ALL = [
    (re.compile(r"fatal error: .*(?:No such file|file not found)"), "; the folder of a header goes into extra_include_paths"),
    (re.compile(r"not supported on \.target 'sm_\d+'"), "; what an arch has alone is in the target with an a behind it, such as sm_90a"),
]
_SHOWN = 16  # lines of the compiler's output in the message


def diagnose(output: str, op: str, target: str, logs: Path, wanted: tuple[str, str] | None = None) -> CompileError:
    """Make the error of a failed cpp_extension.load.

    Args:
        output: the text of torch's error: ninja's whole output.
        logs: folder that receives the complete text.
        wanted: an op's source, and the prototype of the function that it is to define.
    """
    log = logs / f"{op.replace('::', '.')}.{time.strftime('%Y%m%d-%H%M%S')}.{files.unique()}.log"
    files.write_note(log, output)
    command = next((following for line, following in zip(output.splitlines(), output.splitlines()[1:], strict=False)
                    if line.startswith("FAILED: ")), None)
    lines = [_told(line, op, wanted) for line in output.splitlines() if not _FRAME.match(line) and line != command]
    first = next((index for index, line in enumerate(lines) if _COMPLAINT.search(line)), None)
    if first is None:
        told = "\n".join(lines[-_SHOWN:]).strip() or output.strip() or "no output"
        message = f"{op} for {target} was not built: {told}"
    else:
        complaint, hint = lines[first].strip(), _hint("\n".join(lines[first:first + 2]), wanted[0] if wanted else None)
        message = "\n".join([f"{complaint.rstrip('.')}{hint}" if hint else complaint, f"while building {op} for {target}:",
                             *lines[first + 1:first + _SHOWN]])
    where = f"\nfull output: {log}" if log.exists() else ""
    return CompileError(message + where, op=op, target=target, command=command, log=log if where else None)


def _told(line: str, op: str, wanted: tuple[str, str] | None) -> str:
    """A line of a compiler's or linker's, or what it means where it speaks of opjit's glue."""
    if wanted is not None:
        source, prototype = wanted
        function = prototype.partition("(")[0].split()[-1]
        if re.search(rf"undefined reference to [`']{function}'|identifier \"{function}\" is undefined", line):
            return f"{source}: error: it does not define {function}, which {op} calls: {prototype}"
        if "cannot be used to initialize an entity" in line and "opjit_kernel.cu" in line:
            return f"{source}: error: {function} is not as the schema of {op} asks, {prototype}: {line.partition('error: ')[2]}"
    return line


def _hint(complaint: str, source: str | None) -> str:
    """What a complaint and the line under it leave out: what to do; empty where the compiler has said it all."""
    known = [*(_OF_C if source and source.endswith(".c") else []), *(_OF_OPS if source else []), *_OF_ALL]
    return next((hint for pattern, hint in known if pattern.search(complaint)), "")
