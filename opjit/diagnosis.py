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


def diagnose(output: str, op: str, target: str, logs: Path) -> CompileError:
    """Make the error of a failed cpp_extension.load.

    Args:
        output: the text of torch's error: ninja's whole output.
        logs: folder that receives the complete text.
    """
    log = logs / f"{op.replace('::', '.')}.{time.strftime('%Y%m%d-%H%M%S')}.{files.unique()}.log"
    files.write_note(log, output)
    command = next((following for line, following in zip(output.splitlines(), output.splitlines()[1:], strict=False)
                    if line.startswith("FAILED: ")), None)
    lines = [line for line in output.splitlines() if not _FRAME.match(line) and line != command]
    first = next((index for index, line in enumerate(lines) if _COMPLAINT.search(line)), None)
    if first is None:
        told = "\n".join(lines[-_SHOWN:]).strip() or output.strip() or "no output"
        message = f"{op} for {target} was not built: {told}"
    else:
        message = "\n".join([lines[first].strip(), f"while building {op} for {target}:", *lines[first + 1:first + _SHOWN]])
    where = f"\nfull output: {log}" if log.exists() else ""
    return CompileError(message + where, op=op, target=target, command=command, log=log if where else None)
