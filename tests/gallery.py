"""Writes opjit/ERRORS.md, the page of all errors, by provoking each.

    python -m tests.gallery

A test provokes them again and compares."""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.helpers import ROOT, ended

PAGE = ROOT / "opjit/ERRORS.md"
HEAD = """\
# Errors and ways out

<!-- Written by `python -m tests.gallery`, which provokes each error. -->

Each error of opjit is a class of `opjit.errors` and a `RuntimeError`. Its message says what happened, where, why, and what to do now. The
command `opjit` prints the message alone. `…` stands for a folder of the example. `BuildError` is the class of failures of tools and disks.
A request never raises `EntryError` and `UntrustedFolder`: it treats such an entry as a miss, with one warning, a `CacheWarning`.
"""
CLIP_PY = """\
import torch
import opjit

@opjit.op("demo::clip(Tensor x, float limit) -> Tensor")
def clip(x, limit):
    return torch.empty_like(x)
"""
CLIP_C = """\
#include "opjit.h"

opjit_status clip_cpu(const opjit_tensor *x, double limit, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32, "clip takes float32, not %s", opjit_dtype_name(x->dtype));
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = fminf(((const float *)x->data)[i], (float)limit);
    return OPJIT_OK;
}
"""
GOOD_C = CLIP_C.replace("#include", "#include <math.h>\n#include", 1)
CALL = 'opjit.add_path("clip")\ntorch.ops.demo.clip(torch.ones(3), 0.5)'


class Case(NamedTuple):
    """A mistake, and the program that makes it, which has imported `torch`, `opjit` and `os`.

    `where` and `now` are words of the message: the place of the mistake, and what to do or what would be right.
    The page shows the text of the file `shown`, and a remark of its own."""

    title: str
    code: str
    where: str
    now: str
    files: dict[str, str] | None = None
    shown: str = ""
    remark: str = ""


class Error(NamedTuple):
    """What a mistake gives: the message without the folders of this run, and all of opjit's errors that were made on the way."""

    name: str
    message: str
    made: tuple[str, ...]


def clip(c: str = GOOD_C) -> dict[str, str]:
    return {"clip/op.py": CLIP_PY, "clip/clip.c": c}


CASES = [
    Case(
        "An op that does not exist",
        'opjit.get("alreduce")',
        "'opjit::alreduce'",
        "did you mean allreduce",
    ),
    Case(
        "A device that torch does not know",
        'opjit.get("allreduce", "cudda")',
        "'cudda'",
        "expected a device such as 'cpu' or 'cuda'",
    ),
    Case(
        "An arch that no backend builds for",
        'opjit.build_library("allreduce", "build", arch="sm90")',
        "'sm90'",
        "known: ",
    ),
    Case(
        "A type that has no form in C",
        'opjit.inline("f(Tensor x, Device d) -> Tensor", c="")',
        "argument `d`",
        "take the device from a Tensor argument",
    ),
    Case(
        "An op that takes no tensor",
        'opjit.inline("f(int n) -> Tensor", c="")',
        "'inline::f(int n) -> Tensor'",
        "add one, such as",
    ),
    Case(
        "A name that is taken",
        'opjit.add_path("clip")\nopjit.add_path("other")',
        "…/clip, the other in …/other",
        "rename one",
        {**clip(), "other/op.py": CLIP_PY, "other/clip.c": GOOD_C},
    ),
    Case(
        "A mistake in op.py",
        'opjit.add_path("clip")',
        "",
        "",
        {"clip/op.py": CLIP_PY + "clip.reference(torch.clmp)\n"},
        remark="Python's own error. The command adds the file and the line, without opjit's part of the traceback.",
    ),
    Case(
        "No kernel for the device",
        CALL,
        "demo::clip has no kernel for cpu",
        "expected clip.c in …/clip",
        {"clip/op.py": CLIP_PY},
    ),
    Case(
        "A mistake in C",
        CALL,
        "…/clip/clip.c:9:77",
        "did you mean 'limit'?",
        clip(GOOD_C.replace("limit);", "limt);")),
        "clip/clip.c",
    ),
    Case(
        "A header that is not included",
        CALL,
        "…/clip/clip.c:8:35",
        "include '<math.h>'",
        clip(CLIP_C),
        "clip/clip.c",
    ),
    Case(
        "A prototype that is not the schema's",
        CALL,
        "…/clip/clip.c:4:14",
        "expected opjit_status clip_cpu(const opjit_tensor *x, double",
        clip(GOOD_C.replace("double limit", "float limit")),
        "clip/clip.c",
    ),
    Case(
        "A kernel that refuses its argument",
        CALL.replace("torch.ones(3)", "torch.ones(3).double()"),
        "[clip.c:6]",
        "takes float32",
        clip(),
    ),
    Case(
        "A gradient through an op without a backward",
        CALL.replace("torch.ones(3)", "torch.ones(3, requires_grad=True)") + ".sum().backward()",
        "demo::clip",
        "",
        clip(),
        remark="Declare a backward: [gradients](../examples/03_gradients/README.md).",
    ),
    Case(
        "No compiler",
        'os.environ["CC"] = "/nowhere/gcc"\nopjit.get("round_ste", "cpu")',
        "CC is '/nowhere/gcc'",
        "set it to the path of gcc",
    ),
    Case(
        "Nothing may be built",
        'os.environ["OPJIT_OFFLINE"] = "1"\nopjit.get("round_ste", "cpu")',
        "opjit::round_ste for cpu",
        "build it ahead with `opjit precompile`, or unset OPJIT_OFFLINE",
    ),
    Case(
        "A folder that cannot be written",
        'opjit.build_library("round_ste", "/proc/build", "cpu")',
        "'/proc/build'",
        "choose a folder that you can write",
    ),
    Case(
        "A library without the rest of its folder",
        'opjit.load_library("clip.so")',
        "…/clip.so",
        "copy the folder from opjit.build_library as a whole",
        {"clip.so": "not a library"},
    ),
    Case(
        "A library that was damaged",
        'library = opjit.build_library("round_ste", "build", "cpu")\nos.chmod(library, 0o600)\n'
        "os.truncate(library, 100)\nopjit.load_library(library)",
        "opjit.round_ste.so",
        "build it again with opjit.build_library",
    ),
    Case(
        "A folder of ops that others can write",
        'os.chmod("clip", 0o777)\nos.environ["OPJIT_PATH"] = os.path.abspath("clip")\n'
        'opjit.get("demo::clip")',
        "…/clip can be written by others",
        "chmod go-w …/clip",
        clip(),
    ),
    Case(
        "A cache that others can write",
        'os.mkdir("shared")\nos.chmod("shared", 0o777)\nos.environ["OPJIT_CACHE"] = "shared"\n'
        'opjit.get("round_ste", "cpu")',
        "…/shared can be written by others",
        "chmod go-w …/shared",
    ),
    Case(
        "A build that no cache can keep",
        'os.mkdir("shared")\nos.chmod("shared", 0o777)\nos.environ["OPJIT_CACHE"] = "shared"\n'
        'opjit.cli.main(["get", "round_ste", "--device", "cpu"], standalone_mode=False)',
        "opjit::round_ste for cpu",
        "set OPJIT_CACHE to a folder of your own",
    ),
    Case(
        "A compiler's warning",
        CALL,
        "…/clip/clip.c:7",
        "",
        clip(GOOD_C.replace("    OPJIT_TRY", "    const int8_t most = 300;\n    OPJIT_TRY")),
        "clip/clip.c",
        "A `CompileWarning` is the compiler's own text at the line of the author's file; the op works.",
    ),
    Case(
        "A size that is none",
        'opjit.cache.prune(size="big")',
        "'big'",
        "expected a size such as 5GiB",
    ),
    Case(
        "A remote that is not trusted",
        'opjit.cli.main(["cache", "pull", "file:///srv/opjit"], standalone_mode=False)',
        "file:///srv/opjit",
        "set OPJIT_TRUST",
    ),
    Case(
        "An op that fails in precompile",
        'opjit.add_path("clip")\nopjit.precompile(["demo::clip"])',
        "…/clip/clip.c:8:35",
        "include '<math.h>'",
        clip(CLIP_C),
    ),
    Case(
        "A program that cannot be recorded",
        'opjit.cli.main(["record", "--", "no-such-program"], standalone_mode=False)',
        "'no-such-program'",
        "what follows -- is a program with its arguments",
    ),
]
_RUN = """
import json, os, sys, warnings
import torch, opjit, opjit.cli
from opjit.errors import OpjitError

made = set()

def note(kind, *args, **facts):
    made.add(kind.__name__)
    return RuntimeError.__new__(kind, *args)

OpjitError.__new__ = note
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    try:
        exec(sys.argv[1])
        error = next(each.message for each in warned if issubclass(each.category, (opjit.errors.CacheWarning, opjit.errors.CompileWarning)))
        place = [f"{each.filename}:{each.lineno}: warning: " for each in warned if each.category is opjit.errors.CompileWarning][:1]
    except BaseException as raised:
        error, place = raised.__cause__ if isinstance(raised.__cause__, OpjitError) and not isinstance(raised, OpjitError) else raised, []
print(json.dumps([type(error).__name__, "".join(place) + str(error), sorted(made)]))
"""


def provoke(case: Case) -> Error:
    """The error that a mistake gives in Python."""
    with folder_of(case) as folder:
        done = ended(_RUN, changes(folder), cwd=folder, arguments=(case.code,))
        if not done.stdout:
            raise AssertionError(f"{case.title}: nothing was raised\n{done.stderr}")
        name, message, made = json.loads(done.stdout.splitlines()[-1])
        return Error(name, plain(message, folder), tuple(made))


@contextmanager
def folder_of(case: Case) -> Iterator[Path]:
    """A folder with the case's files, and no other cache than the one in it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(os.path.realpath(scratch))
        for name, text in (case.files or {}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        yield folder


def changes(folder: Path) -> dict[str, str | None]:
    """Of the environment, so that a mistake is the only one."""
    unset: dict[str, str | None] = {name: None for name in os.environ if name.startswith("OPJIT_")}
    return {**unset, "OPJIT_CACHE": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}


def plain(message: str, folder: Path) -> str:
    """A message without what differs between runs and machines."""
    text = message.replace(f"{folder}/", "…/").replace(str(folder), "…").replace(str(ROOT), "…")
    text = re.sub(r"\.\d{8}-\d{6}\.[0-9a-f]{32}\.log", ".….log", text)
    text = re.sub(r"cpu x86-64-v\d", "cpu x86-64-v3", text)
    text = re.sub(r"\bx86-64-v\d\.[0-9a-f]{20}\b", "x86-64-v3.…", text)
    return re.sub(r"\d+\.\d+ s\b", "0.42 s", text)


def page() -> str:
    """The page's text."""
    return "\n".join(
        [HEAD, *(section(case, error) for case, error in zip(CASES, all_provoked(), strict=True))]
    )


def all_provoked() -> list[Error]:
    """Each case's error, provoked in a process of its own."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(provoke, CASES))


def section(case: Case, error: Error) -> str:
    source = (
        f"`{case.shown}`:\n\n```c\n{(case.files or {})[case.shown]}```\n\n" if case.shown else ""
    )
    remark = f"\n{case.remark}\n" if case.remark else ""
    return (
        f"## {case.title}\n\n{source}```python\n{case.code}\n```\n\n"
        f"```text\n{error.name}: {error.message.rstrip()}\n```\n{remark}"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
