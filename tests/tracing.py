"""What a snippet does between two marks: every file it opens to write, process, lock and heavy import."""

import json
from typing import Any

from tests.helpers import fresh

# Modules that cost more than the whole warm path may.
HEAVY = [
    "filelock",
    "ninja",
    "rich",
    "click",
    "jinja2",
    "setuptools",
    "torch.utils.cpp_extension",
    "opjit.builder.build",
    "opjit.builder.torch_builder",
    "opjit.cache",
    "opjit.cache.verification",
    "opjit.store.inventory",
    "opjit.store.prune",
    "opjit.builder.publish",
    "opjit.builder.budget",
    "opjit.builder.glue",
    "opjit.lock",
    "opjit.cli",
    "opjit.recipe.flags",
    "opjit.library",
    "opjit.catalog.inline",
    "opjit.catalog.reload",
    "opjit.catalog.watch",
    "opjit.why",
    "opjit.ahead.plan",
    "opjit.ahead.record",
    "opjit.batch",
    "opjit.distributed",
    "opjit.doctor",
    "opjit.author.notebook",
    "IPython",
    "opjit.share.remote",
    "opjit.share.transport",
    "opjit.share.trust",
    "opjit.cache.transfer",
    "opjit.store.bundle",
    "fsspec",
    "cryptography",
]
# Puts what happens between start() and stop() into `seen`: every audited act that is more than looking.
TRACE = f"""
import json, os, sys, fcntl
import torch
heavy_before = {{name for name in {HEAVY!r} if name in sys.modules}}
seen, reads, tracing = [], [], []
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
def hook(event, arguments):
    if not tracing:
        return
    if event == "open":
        path, mode, flags = arguments
        if (isinstance(flags, int) and flags & WRITES) or (isinstance(mode, str) and set(mode) & set("wax+")):
            seen.append(f"open {{path}} {{mode}}")
        elif not isinstance(path, int):
            reads.append(str(path))
    elif event.startswith(("subprocess.", "os.posix_spawn", "os.fork", "os.exec", "os.spawn", "os.system", "pty.", "fcntl.", "socket.",
                           "tempfile.", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate",
                           "os.utime", "os.chmod", "os.chown", "os.putenv", "os.unsetenv", "shutil.", "signal.", "urllib.")):
        seen.append(f"{{event}} {{arguments!r}}")
sys.addaudithook(hook)
def report(**more):
    tracing.clear()
    heavy = sorted({{name for name in {HEAVY!r} if name in sys.modules}} - heavy_before)
    print(json.dumps({{"seen": seen, "reads": reads, "heavy": heavy, **more}}))
"""
NO_BYTECODE: dict[str, str | None] = {"PYTHONDONTWRITEBYTECODE": "1"}


def traced(code: str, changes: dict[str, str | None]) -> dict[str, Any]:
    found = json.loads(fresh(TRACE + code, {**NO_BYTECODE, **changes}).stdout)
    assert isinstance(found, dict)
    return found
