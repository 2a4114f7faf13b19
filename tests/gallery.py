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
from difflib import unified_diff
from pathlib import Path
from typing import NamedTuple

from tests.helpers import ROOT, ended

PAGE = ROOT / "opjit/ERRORS.md"
HEAD = """\
# Errors

<!-- Written by `python -m tests.gallery`, which provokes each error. -->

Search this page for the first words of a message, or look up its class below. To read the sections of a class in a terminal, run:

```sh
opjit help NoKernel
```

When a build fails without an obvious reason, run `opjit doctor`. To catch errors, catch `opjit.errors.OpjitError` for all of them, or
`BuildError` for failures of compilers and disks. All of them are RuntimeErrors. `EntryError` and `UntrustedFolder` never reach your
program: opjit treats the entry as a miss and prints one `CacheWarning`. In the messages below, `…` replaces a directory of the example.

"""
EXAMPLE = """
## The example op

Many sections use the op `demo::clip` in the directory `clip`. If a section shows a change in `clip/clip.c` and no program, the program
calls `opjit.add_path("clip")` and then `torch.ops.demo.clip(torch.ones(3), 0.5)`. This is the correct `clip/clip.c`:

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

    `where` and `now` are words of the message: the position of the mistake, and the remedy. The page shows the text of the file `shown`,
    the cause and the fix."""

    title: str
    code: str
    where: str
    now: str
    files: dict[str, str] | None = None
    shown: str = ""
    cause: str = ""
    fix: str = ""


class Error(NamedTuple):
    """An error: its class, its message without the directories of this run, and the names of all errors that were created on the way."""

    name: str
    message: str
    made: tuple[str, ...]


def clip(c: str = GOOD_C) -> dict[str, str]:
    return {"clip/op.py": CLIP_PY, "clip/clip.c": c}


CASES = [
    Case(
        "Unknown op",
        'opjit.get("alreduce")',
        "'opjit::alreduce'",
        "did you mean allreduce",
        cause="No op of this name is declared. Usually the name is misspelled, or the op's directory is not in `OPJIT_PATH`.",
        fix="Use the suggested name, or declare the op with `opjit.add_path`. `opjit list` shows all declared ops.",
    ),
    Case(
        "Unknown device",
        'opjit.get("allreduce", "cudda")',
        "'cudda'",
        "expected a device such as 'cpu' or 'cuda'",
        cause="torch doesn't have a device type of this name.",
        fix="Use `cpu`, `cuda` or the name of a registered backend.",
    ),
    Case(
        "Unknown architecture",
        'opjit.build_library("allreduce", "build", arch="sm90")',
        "'sm90'",
        "known: ",
        cause="No backend builds for this architecture, or the installed CUDA compilers don't support it. opjit checks `arch=`, "
        "`--arch` and `TORCH_CUDA_ARCH_LIST` before it builds anything.",
        fix="Use one of the names in the message. Architectures of NVIDIA GPUs have an underscore, as in `sm_90`.",
    ),
    Case(
        "Unsupported type in a schema",
        'opjit.inline("f(Tensor x, Device d) -> Tensor", c="")',
        "argument `d`",
        "use the device of a Tensor argument",
        cause="torch's stable C interface cannot pass this type to a kernel.",
        fix="Use a supported type, see [map the schema to C](../examples/01_first_op/README.md#map-the-schema-to-c).",
    ),
    Case(
        "Op without a tensor argument",
        'opjit.inline("f(int n) -> Tensor", c="")',
        "'inline::f(int n) -> Tensor'",
        "add one, such as",
        cause="torch chooses the kernel by the device of the tensor arguments.",
        fix="Add a tensor argument, such as a tensor on the device of the result.",
    ),
    Case(
        "Schema that torch cannot read",
        'opjit.inline("f(Tensor x)", c="")',
        "inline::f(Tensor x)",
        "",
        cause="torch's parser of schemas rejects this text. The message ends with the position or the type.",
        fix="Write the schema in torch's syntax. End it with `-> Tensor`, or with `-> ()`, and write a list as `float[] a`.",
    ),
    Case(
        "Op name without a namespace",
        '@opjit.op("clip(Tensor x) -> Tensor")\ndef clip(x):\n    return torch.empty_like(x)',
        "clip",
        "namespace",
        cause="Only the bundled ops have the namespace `opjit`, so the name of your op needs a namespace.",
        fix="Add a namespace, as in `mylib::clip`.",
    ),
    Case(
        "Fake kernel with other arguments",
        '@opjit.op("demo::clip(Tensor x, float limit) -> Tensor")\ndef clip(x):\n    return torch.empty_like(x)',
        "fake kernel of demo::clip",
        "",
        cause="The declared Python function can't be called with the arguments of the schema.",
        fix="Give the function the schema's arguments, in the same order and with the same defaults.",
    ),
    Case(
        "Duplicate op name",
        'opjit.add_path("clip")\nopjit.add_path("other")',
        "…/clip, the other in …/other",
        "rename one",
        {**clip(), "other/op.py": CLIP_PY, "other/clip.c": GOOD_C},
        cause="Two op directories declare the same name.",
        fix="Rename one of the ops, or choose a different namespace.",
    ),
    Case(
        "Directory not found",
        'opjit.add_path("clp")',
        "…/clp",
        "",
        cause="The directory of the op doesn't exist. A relative path starts from the current directory.",
        fix="Pass the path of a directory that contains an `op.py`, or of a directory of such directories.",
    ),
    Case(
        "New op in an existing directory",
        'opjit.cli.main(["new", "demo::clip"], standalone_mode=False)',
        "clip exists already",
        "Choose another name",
        clip(),
        cause="`opjit new` never writes into an existing directory.",
        fix="Choose another name, or pass another parent directory: `opjit new demo::clip DIRECTORY`.",
    ),
    Case(
        "Missing benchmark cases",
        'opjit.cli.main(["bench", "./clip"], standalone_mode=False)',
        "demo::clip",
        "workloads",
        clip(),
        cause="`opjit bench` needs a reference and benchmark cases, and `op.py` doesn't declare them.",
        fix="Add them to `op.py`, see [declarations](testing/CHECKS.md#declarations-in-oppy).",
    ),
    Case(
        "Error in op.py",
        'opjit.add_path("clip")',
        "",
        "",
        {"clip/op.py": CLIP_PY + "clip.reference(torch.clmp)\n"},
        cause="Python raised this error in your `op.py`.",
        fix="Fix the line that the traceback shows. The command adds the file and the line, without opjit's part of the traceback.",
    ),
    Case(
        "No kernel for the device",
        CALL,
        "demo::clip has no kernel for cpu",
        "expected clip.c in …/clip",
        {"clip/op.py": CLIP_PY},
        cause="The op directory lacks a source file for this device, or the file has another name.",
        fix="Add the file in the message.",
    ),
    Case(
        "Compile error",
        CALL,
        "…/clip/clip.c:9:77",
        "did you mean 'limit'?",
        clip(GOOD_C.replace("limit);", "limt);")),
        "clip/clip.c",
        cause="The C compiler rejected your source. The message starts with its first error.",
        fix="Fix the line that the message shows.",
    ),
    Case(
        "Missing include",
        CALL,
        "…/clip/clip.c:8:35",
        "include '<math.h>'",
        clip(CLIP_C),
        "clip/clip.c",
        cause="The source uses a function without its header.",
        fix="Include the header that the compiler suggests.",
    ),
    Case(
        "Wrong prototype",
        CALL,
        "…/clip/clip.c:4:14",
        "expected opjit_status clip_cpu(const opjit_tensor *x, double",
        clip(GOOD_C.replace("double limit", "float limit")),
        "clip/clip.c",
        cause="The C function doesn't have the prototype that follows from the schema.",
        fix="Copy the expected prototype from the message, or change the schema.",
    ),
    Case(
        "Missing function",
        CALL,
        "clip_cpu",
        "expected opjit_status clip_cpu(const opjit_tensor *x, double",
        clip(GOOD_C.replace("clip_cpu", "clp_cpu")),
        "clip/clip.c",
        cause="The source doesn't define the function of the op for this device. Usually its name is misspelled.",
        fix="Rename the function to the expected name, which is the op's name and the device: `clip_cpu`.",
    ),
    Case(
        "Unclosed bracket",
        CALL,
        "…/clip/clip.c:",
        "is not closed",
        clip(GOOD_C.rstrip()[:-1]),
        "clip/clip.c",
        cause="A bracket or brace of your source is not closed. The message has its position.",
        fix="Close the bracket.",
    ),
    Case(
        "Kernel rejects its argument",
        CALL.replace("torch.ones(3)", "torch.ones(3).double()"),
        "[clip.c:6]",
        "takes float32",
        clip(),
        cause="An `OPJIT_CHECK` in the kernel failed. The message ends with its file and line.",
        fix="Pass a supported argument, or support more dtypes with `OPJIT_DISPATCH_FLOATING`.",
    ),
    Case(
        "Op without a backward",
        CALL.replace("torch.ones(3)", "torch.ones(3, requires_grad=True)") + ".sum().backward()",
        "demo::clip",
        "",
        clip(),
        cause="The program differentiates through an op that declares no backward.",
        fix=(
            "Declare a backward, see [gradients](../examples/03_gradients/README.md). If the op needs "
            "no gradient, declare it with `differentiable=False`."
        ),
    ),
    Case(
        "Compiler not found",
        'os.environ["CC"] = "/nowhere/gcc"\nopjit.get("round_ste", "cpu")',
        "CC is '/nowhere/gcc'",
        "set it to the path of gcc",
        cause="`CC` or `CXX` doesn't name an executable file.",
        fix="Set the variable to the path of gcc or clang, or unset it.",
    ),
    Case(
        "Not cached",
        'os.environ["OPJIT_OFFLINE"] = "1"\nopjit.get("round_ste", "cpu")',
        "opjit::round_ste for cpu",
        "or unset OPJIT_OFFLINE",
        cause="`OPJIT_OFFLINE=1` forbids building and downloading, and no cache has the op.",
        fix="Build the op in advance with `opjit precompile`, or unset `OPJIT_OFFLINE`.",
    ),
    Case(
        "No device",
        'opjit.get("allreduce", "cuda")',
        "",
        "opjit get OP --arch sm_90",
        cause="The process cannot use a device of this kind. Perhaps torch is a CPU build.",
        fix="Run the op on another device, or only build it with `opjit get OP --arch sm_90`.",
    ),
    Case(
        "Lost rank",
        """opjit.get("all_reduce_ranks", "cpu")
rank = 0 if os.fork() else 1
store = f"file://{os.path.abspath('store')}"
torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
group = opjit.distributed.peers(device="cpu", timeout=2)
if rank == 1:
    os._exit(0)
try:
    torch.ops.opjit.all_reduce_ranks(torch.ones(3), group.name)
except RuntimeError:
    opjit.distributed.check(group.name)""",
        "rank 1 has ended",
        "make a smaller group",
        cause="A rank ended, was late, or called another op of the group.",
        fix="If the rank was only late, raise the time limit with `timeout=` or `OPJIT_PEER_TIMEOUT`. Otherwise make a group without it.",
    ),
    Case(
        "Directory not writable",
        'opjit.build_library("round_ste", "/proc/build", "cpu")',
        "'/proc/build'",
        "choose a directory that you can write",
        cause="opjit cannot create files in the build directory.",
        fix="Choose a directory to which you can write.",
    ),
    Case(
        "Incomplete op package",
        'opjit.load_library("clip.so")',
        "…/clip.so",
        "copy the directory from opjit.build_library as a whole",
        {"clip.so": "not a library"},
        cause="The library was copied without the rest of its op package.",
        fix="Copy the directory from `opjit.build_library` as a whole, with its links.",
    ),
    Case(
        "Damaged op package",
        'library = opjit.build_library("round_ste", "build", "cpu")\nos.chmod(library, 0o600)\n'
        "os.truncate(library, 100)\nopjit.load_library(library)",
        "opjit.round_ste.so",
        "build it again with opjit.build_library",
        cause="The library doesn't match its manifest.",
        fix="Build the op package again.",
    ),
    Case(
        "Op directory is writable by other users",
        'os.chmod("clip", 0o777)\nos.environ["OPJIT_PATH"] = os.path.abspath("clip")\n'
        'opjit.get("demo::clip")',
        "…/clip can be written by other users",
        "chmod go-w …/clip",
        clip(),
        cause="opjit refuses to run an `op.py` that other users could replace.",
        fix="Run the `chmod` command in the message.",
    ),
    Case(
        "Cache is writable by other users",
        'os.mkdir("shared")\nos.chmod("shared", 0o777)\nos.environ["OPJIT_CACHE"] = "shared"\n'
        'opjit.get("round_ste", "cpu")',
        "…/shared can be written by other users",
        "chmod go-w …/shared",
        cause="opjit ignores a cache in which other users could replace binaries. The op still works, but every process builds it again.",
        fix="Run the `chmod` command in the message, or set `OPJIT_CACHE` to another directory.",
    ),
    Case(
        "Built but not cached",
        'os.mkdir("shared")\nos.chmod("shared", 0o777)\nos.environ["OPJIT_CACHE"] = "shared"\n'
        'opjit.cli.main(["get", "round_ste", "--device", "cpu"], standalone_mode=False)',
        "opjit::round_ste for cpu",
        "set OPJIT_CACHE to a directory",
        cause="The build succeeded, but the cache is not usable.",
        fix="Set `OPJIT_CACHE` to a directory that only you can write, or pass `--build-directory`.",
    ),
    Case(
        "Compiler warning",
        CALL,
        "…/clip/clip.c:7",
        "",
        clip(GOOD_C.replace("    OPJIT_TRY", "    const int8_t most = 300;\n    OPJIT_TRY")),
        "clip/clip.c",
        cause="The compiler warned about your source. The op works.",
        fix="Fix the line that the warning shows.",
    ),
    Case(
        "Invalid cache size",
        'opjit.cache.prune(size="big")',
        "'big'",
        "expected a size such as 5GiB",
        cause="The size of the cache lacks a number, or its unit is unknown.",
        fix="Use a size such as `5GiB`, or `0` for no limit.",
    ),
    Case(
        "Unknown check",
        'opjit.cli.main(["test", "./clip", "--only", "speed"], standalone_mode=False)',
        "'speed'",
        "results",
        clip(),
        cause="`opjit test` doesn't have a check of this name.",
        fix="Use one of the names in the message. [What each check needs](testing/CHECKS.md#what-each-check-needs) explains them.",
    ),
    Case(
        "Untrusted remote cache",
        'opjit.cli.main(["cache", "pull", "file:///srv/opjit"], standalone_mode=False)',
        "file:///srv/opjit",
        "set OPJIT_TRUST",
        cause="opjit fetches nothing from a remote cache before you name its signer.",
        fix="Set `OPJIT_TRUST` to the public key of the publisher, see [remote caches](cache/README.md#remote-caches).",
    ),
    Case(
        "Failed precompile",
        'opjit.add_path("clip")\nopjit.precompile(["demo::clip"])',
        "…/clip/clip.c:8:35",
        "include '<math.h>'",
        clip(CLIP_C),
        cause="At least one build failed. The other builds are finished.",
        fix="Fix the error that the message shows, and run the command again.",
    ),
    Case(
        "Program cannot be recorded",
        'opjit.cli.main(["record", "--", "no-such-program"], standalone_mode=False)',
        "'no-such-program'",
        "what follows -- is a program with its arguments",
        cause="The program after `--` doesn't exist or isn't executable.",
        fix="Put the program and its arguments after `--`.",
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
        folder.chmod(0o755)  # as a folder of a project, which other users can reach
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
    # The page has the message of a CUDA build of torch. A CPU build has a similar one.
    cpu_build = r"torch \S+ is a build without CUDA; install .* or only build it:"
    text = re.sub(cpu_build, "no CUDA GPU is visible to torch; you can still build the op:", text)
    text = re.sub(r"\.\d{8}-\d{6}\.[0-9a-f]{32}\.log", ".….log", text)
    text = re.sub(r"cpu x86-64-v\d", "cpu x86-64-v3", text)
    text = re.sub(r"\bx86-64-v\d\.[0-9a-f]{20}\b", "x86-64-v3.…", text)
    return re.sub(r"\d+\.\d+ s\b", "0.42 s", text)


def page() -> str:
    """The page's text."""
    found = list(zip(CASES, all_provoked(), strict=True))
    sections = dict[str, list[str]]()
    for case, error in found:
        sections.setdefault(error.name, []).append(section(case, error))
    texts = [f"\n## {name}\n{''.join(sections[name])}" for name in sorted(sections)]
    return f"{HEAD}{index(found)}{EXAMPLE}```c\n{GOOD_C}```\n{''.join(texts)}"


def index(found: list[tuple[Case, Error]]) -> str:
    """The links to the sections of each class."""
    links = dict[str, list[str]]()
    for case, error in found:
        anchor = re.sub(r"[^\w\- ]", "", case.title.lower()).replace(" ", "-")
        links.setdefault(error.name, []).append(f"[{case.title}](#{anchor})")
    return "".join(f"- **{name}:** {', '.join(links[name])}\n" for name in sorted(links))


def all_provoked() -> list[Error]:
    """Each case's error, provoked in a process of its own."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(provoke, CASES))


def section(case: Case, error: Error) -> str:
    source = ""
    if case.shown:
        changed = unified_diff(
            GOOD_C.splitlines(), (case.files or {})[case.shown].splitlines(), n=0, lineterm=""
        )
        lines = [line for line in changed if not line.startswith(("---", "+++", "@@"))]
        source = "\n".join([f"The change in `{case.shown}`:\n\n```diff", *lines, "```\n\n"])
    program = "" if case.shown and case.code == CALL else f"```python\n{case.code}\n```\n\n"
    return (
        f"\n### {case.title}\n\n{source}{program}"
        f"```text\n{error.name}: {error.message.rstrip()}\n```\n\n"
        f"**Cause.** {case.cause}\n\n**Fix.** {case.fix}\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
