"""From a failed build's output to an error whose first line is the compiler's first real complaint."""

from __future__ import annotations

import re
import time
from pathlib import Path

from opjit import files
from opjit.errors import CompileError

_COMPLAINT = re.compile(r"(?::\d+(?::\d+)?: (?:fatal )?error: |\(\d+\): (?:catastrophic )?error|: undefined reference to |"
                        r"cannot find -l|: error: |fatal error|multiple definition of )")
# Lines about the command, not the code: ninja's frame, and gcc's remark on a C++ flag that torch always passes.
_FRAME = re.compile(r"^(?:\[\d+/\d+\] |FAILED: |ninja: |collect2: error: |Error building extension|"
                    r".*option '-std=c\+\+\d+' is valid for C\+\+|"
                    r"In file included from .*opjit_(?:glue\.c|kernel\.cu):\d+)")
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
        message = "\n".join([lines[first].strip(), f"while building {op} for {target}:", *lines[first + 1:first + _SHOWN]])
    where = f"\nfull output: {log}" if log.exists() else ""
    return CompileError(message + where, op=op, target=target, command=command, log=log if where else None)


def _told(line: str, op: str, wanted: tuple[str, str] | None) -> str:
    """A line of a compiler's or linker's, or what it means where it speaks of opjit's glue or leaves out what to do."""
    if wanted is not None:
        source, prototype = wanted
        function = prototype.partition("(")[0].split()[-1]
        if re.search(rf"undefined reference to [`']{function}'|identifier \"{function}\" is undefined", line):
            return f"{source}: error: it does not define {function}, which {op} calls: {prototype}"
    if re.search(r"fatal error: .*(?:No such file|file not found)", line):
        return f"{line}; the folder of a header goes into extra_include_paths"
    return line
