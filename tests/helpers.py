"""What the tests of the key, the store and the build share: an op's folder, its recipe, an entry, and programs that pose as others."""

import functools
import grp
import os
import platform
import pty
import pwd
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner, Result

import opjit
from opjit import backends, cache, files, resources
from opjit.backends import Backend, targets
from opjit.backends.cpu import machine_of
from opjit.backends.targets import Target
from opjit.builder import build
from opjit.catalog import registry
from opjit.cli import main
from opjit.cpp_extension import autograd_part
from opjit.declare import cpp_autograd
from opjit.errors import CacheWarning
from opjit.recipe import schema, toolchain
from opjit.recipe.document import document_key
from opjit.recipe.recipe import Recipe, read_inputs
from opjit.store import elf, inventory, lock, manifest, usage
from opjit.store.entry import Entry, verify
from opjit.store.store import Store
from tests import zygote

ROOT = Path(opjit.__file__).resolve().parents[1]
BUNDLED = [
    op.qualified for op in registry.all_ops() if op.folder.parent == resources.folder("kernels_c")
]

MakeOp = Callable[..., opjit.Op]  # the fixture make_op
Growth = Callable[[Callable[[], object], int], int]  # the fixture growth
OnCompile = Callable[[str], None]  # the fixture on_compile

DAY = 86400.0
TIMEOUT = 800.0  # seconds that a process may take: on a busy machine a C++ extension takes minutes; pytest ends the test at 900
SOMEBODY = 12345  # a user id that nobody has
EMULATED = (
    "QEMU_LD_PREFIX" in os.environ
)  # by .ci/aarch64: the tools that the compilers run are another machine's
CPU_ARCHS = [*backends.for_device("cpu").archs()][::-1]  # lowest first
LEVELS = [
    arch for arch in CPU_ARCHS if machine_of(arch) == platform.machine()
]  # this machine's kind; it runs two at least
FOREIGN = next(arch for arch in CPU_ARCHS if arch not in LEVELS)
UNREADABLE = "/proc/self/mem"  # a file; reading it is an error, for root too
SCHEMA = "keytest::plus(Tensor x) -> Tensor"
PLUS = """\
#include "opjit.h"
#include "amount.h"

opjit_status plus_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32, "plus takes float32, not %s", opjit_dtype_name(x->dtype));
    OPJIT_CHECK(x->contiguous, "plus takes a contiguous tensor");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = ((const float *)x->data)[i] + AMOUNT;
    return OPJIT_OK;
}
"""
PLUS_CUDA = """\
#include "opjit_cuda.h"
#include "amount.h"

static __global__ void plus_kernel(const float *from, float *to, int64_t n)
{
    OPJIT_KERNEL_LOOP(i, n)
        to[i] = from[i] + AMOUNT;
}

opjit_status plus_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "plus takes a contiguous float32 tensor");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    plus_kernel<<<opjit_blocks(x->numel, 256), 256, 0, stream>>>((const float *)x->data, (float *)out->data, x->numel);
    return OPJIT_LAUNCHED();
}
"""
# Gets and calls it, in a process that has declared it.
GET = "print(opjit.get('keytest::plus', 'cpu')(torch.ones(1)).tolist())\n"


def op_py(schema: str, options: str = "") -> str:
    """The op.py of an op whose result is like its first argument."""
    name = schema.partition("(")[0].rpartition("::")[2]
    return f'import torch\nimport opjit\n\n@opjit.op("{schema}"{options})\ndef {name}(x, *others):\n    return torch.empty_like(x)\n'


OP_PY = op_py(SCHEMA)


def write_op(folder: Path, **changed: str) -> Path:
    """An op's folder with everything: op.py, plus.c, plus.cu, amount.h. Names in `changed` have ``_`` for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {
        "op_py": OP_PY,
        "plus_c": PLUS,
        "plus_cu": PLUS_CUDA,
        "amount_h": "#define AMOUNT 1.0f\n",
        **changed,
    }.items():
        stem, _, suffix = name.rpartition("_")
        (folder / f"{stem}.{suffix}").write_text(text, encoding="utf-8")
    return folder


def elementwise(name: str, value: str, scalars: str = "") -> str:
    """The C of an op whose result has `value`, an expression of ``from[i]``, for each element of a float32 tensor."""
    return f"""
opjit_status {name}_cpu(const opjit_tensor *x, {scalars}opjit_tensor *out)
{{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    const float *from = (const float *)x->data;
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = {value};
    return OPJIT_OK;
}}
"""


def declared(namespace: str, folder: Path, patch: pytest.MonkeyPatch) -> opjit.Op:
    """The op of `write_op` in another namespace, declared once in a process; its folder is the test's own."""
    known = registry.declared(f"{namespace}::plus")
    if known is None:
        [known] = opjit.add_path(write_op(folder, op_py=OP_PY.replace("keytest", namespace)))
    declaration = replace(known.declaration, folder=write_op(folder))
    patch.setattr(known, "declaration", declaration)
    return known


def write_cxx(folder: Path, text: str = 'extern "C" int value() { return VALUE; }\n') -> str:
    """The path of a C++ source without any header."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plain.cpp").write_text(text)
    return str(folder / "plain.cpp")


def cpu() -> Backend:
    return backends.for_device("cpu")


def cuda_target(arch: str) -> Target:
    nvcc = toolchain.find_nvcc(None)
    assert nvcc is not None
    return targets.named(arch, backends.for_device("cuda"), nvcc.version)


def install_package(site: Path, name: str, point: str, modules: Mapping[str, str]) -> None:
    """An installed distribution with an entry point for ops, and its modules by their paths."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[opjit.ops]\n{point}\n")
    for path, text in modules.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)


def describe(
    folder: Path,
    target: Target | None = None,
    text: str = SCHEMA,
    compiler: Mapping[str, str] | None = None,
) -> Recipe:
    """The recipe of the op in a folder, as api.describe makes it, but without declaring the op to torch."""
    target = target or targets.here(cpu())
    parsed = schema.parse(text)
    compilers = [compiler] if compiler is not None else toolchain.identities_of(target, None)
    source = folder / f"{parsed.name}{target.backend.suffix}"
    flags = target.backend.flags(target.arch, target.runtime)
    return Recipe(
        parsed,
        target,
        source,
        read_inputs(source, target, flags),
        flags,
        compilers[0] if compilers else None,
        others=tuple(compilers[1:]),
    )


def built(folder: Path, cache: Path, target: Target | None = None, text: str = SCHEMA) -> Entry:
    """The entry of the op in a folder: found in the cache, or built into it."""
    recipe = describe(folder, target, text)
    store = Store(cache)
    return store.find(recipe) or build.build(recipe, store)


@contextmanager
def cache_warnings() -> Iterator[list[str]]:
    """A list that holds, when the block has ended, the text of every CacheWarning in it; no other warning may come."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield texts
    texts += [str(one.message) for one in seen]
    assert all(one.category is CacheWarning for one in seen), texts


class Caught(NamedTuple):
    """What `caught` saw."""

    entry: Entry
    warnings: list[str]


def caught(folder: Path, cache: Path, target: Target | None = None) -> Caught:
    """Like `built`, with the text of every CacheWarning."""
    with cache_warnings() as texts:
        entry = built(folder, cache, target)
    return Caught(entry, texts)


def program(path: Path, text: str) -> Path:
    """An executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    path.chmod(0o755)
    return path


def real_compiler() -> str:
    found = toolchain.find_compiler(None)
    assert found is not None
    return os.path.realpath(found.path)


@functools.cache
def shares_libstdcxx(compiler: str) -> bool:
    """Whether a C++ compiler is there and links libstdc++ as a shared library: with another copy of it torch's own extensions crash."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "text.so"
        text = (
            "#include <string>\nstd::string text(int number) { return std::to_string(number); }\n"
        )
        with suppress(OSError):
            subprocess.run(
                [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)],
                input=text.encode(),
                capture_output=True,
                check=False,
            )
        return library.exists() and any(
            name.startswith(("libstdc++.", "libc++."))
            for name in elf.inspect(library.read_bytes()).needed
        )


def fake_compiler(path: Path, before: str = "", after: str = "") -> Path:
    """A compiler that is the real one, with shell commands before and after; in them ``$1`` … are its arguments."""
    assert real_compiler() != str(path), "it would run itself for ever"
    return program(
        path, f"#!/bin/sh\n{before}\n'{real_compiler()}' \"$@\"\ncode=$?\n{after}\nexit $code\n"
    )


# True in a fake compiler when it compiles an op's glue (not when it is asked who it is, compiles the runtime, or links).
COMPILES = 'case " $* " in *" -c "*opjit_glue.c*) true;; *) false;; esac'
# True when it makes an op's library from objects.
LINKS = 'case " $* " in *" -ltorch_cpu "*) true;; *) false;; esac'
# Sets $out to the file that the compiler is asked for.
OUTPUT = 'out=; previous=; for word in "$@"; do if [ "$previous" = -o ]; then out=$word; fi; previous=$word; done'
# What a compiler may leave there and report success all the same.
LIES = {
    "missing": 'rm -f "$out"',
    "empty": ': > "$out"',
    "text": 'echo hello > "$out"',
    "half-an-elf": 'head -c 100 "$out" > "$out.x"; mv "$out.x" "$out"',
    "an-elf-without-sections": "printf '\\177ELF\\002\\001\\001' > \"$out\"",
    "an-executable": 'cp "{python}" "$out"',
    "no-symbols": "echo | '{compiler}' -shared -nostdlib -Wl,-rpath,'$ORIGIN' -o \"$out\" -x c -",
}


def fake_nvcc(path: Path, build_version: str) -> None:
    """An nvcc that says which one it is, and no more; it takes the place of another at one stroke."""
    release = re.sub(r"V(\d+\.\d+).*", r"\1", build_version)
    program(
        path.with_name("new"),
        f"""\
        #!/bin/sh
        case "$*" in
        --version) echo 'Cuda compilation tools, release {release}, {build_version}';;
        *) echo '#$ TOP={path.parents[1]}' >&2;;
        esac
        """,
    ).replace(path)


def environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """This process's, with opjit importable and changes; None takes a variable away."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    values: dict[str, str | None] = {**os.environ, "PYTHONPATH": path, **(changes or {})}
    return {name: value for name, value in values.items() if value is not None}


def ended(
    code: str,
    changes: Mapping[str, str | None] | None = None,
    *,
    cold: bool = False,
    python: str = sys.executable,
    flags: tuple[str, ...] = (),
    user: int | None = None,
    cwd: Path | None = None,
    before: tuple[str, ...] = (),
    arguments: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process, and wait for its end: a child of the zygote, where that is as good.

    It is not for what a test says of Python's start and end, of the import of torch, or of a process that no other forked: `cold`
    starts Python anew, and so do another Python, user or flag, a command before it, and variables that are read at the start."""
    code = textwrap.dedent(code)
    if cold or python != sys.executable or user is not None or before or set(flags[::2]) - {"-W"}:
        words = [*before, python, *flags, "-c", code, *arguments]
        return subprocess.run(
            words,
            env=environment(changes),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
            user=user,
            cwd=cwd,
        )
    return _run("-c", code, changes, flags, cwd, arguments)


def fresh(
    code: str, changes: Mapping[str, str | None] | None = None, **how: Any
) -> subprocess.CompletedProcess[str]:
    """The same for code that must exit with 0."""
    done = ended(code, changes, **how)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def command(*words: str | Path, **changes: str | None) -> subprocess.CompletedProcess[str]:
    """The command `opjit` in a process of its own, however it ends; `changes` are of the environment."""
    return module("opjit", *words, changes=changes)


def on_terminal(*words: str | Path, **changes: str | None) -> tuple[int, str]:
    """The exit code and the output of the command `opjit` on a terminal."""
    return python_on_terminal("-m", "opjit", *words, **changes)


def python_on_terminal(*words: str | Path, **changes: str | None) -> tuple[int, str]:
    """The same of Python."""
    ours, theirs = pty.openpty()
    shown = b""
    with subprocess.Popen(
        [sys.executable, *words], stdout=theirs, stderr=theirs, env=environment(changes)
    ) as process:
        os.close(theirs)
        with suppress(OSError):  # Linux's end of a terminal that nobody holds
            while part := os.read(ours, 1 << 16):
                shown += part
    os.close(ours)
    return process.returncode, shown.decode()


def module(
    name: str,
    *words: str | Path,
    changes: Mapping[str, str | None] | None = None,
    flags: tuple[str, ...] = (),
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """``python -m``, however it ends."""
    return _run("-m", name, changes, flags, cwd, words)


def script(
    path: Path,
    *words: str | Path,
    changes: Mapping[str, str | None] | None = None,
    flags: tuple[str, ...] = ("-W", "error"),
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """``python path``, however it ends, with warnings as errors."""
    return _run("script", str(path), changes, flags, cwd, words)


def example(name: str, *words: str | Path, **how: Any) -> str:
    """What a script of examples/ prints, which must exit with 0."""
    done = script(ROOT / "examples" / name, *words, **how)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def started(code: str, changes: Mapping[str, str | None] | None = None) -> zygote.Process:
    """A process in a session of its own, with pipes, for the test to end."""
    return _forked("-c", textwrap.dedent(code), environment(changes), stdin=subprocess.PIPE)


def started_command(
    *words: str | Path, changes: Mapping[str, str | None] | None = None
) -> zygote.Process:
    """The command `opjit` in a session of its own, for the test to end."""
    return _forked("-m", "opjit", environment(changes), arguments=words)


def _run(
    kind: str,
    code: str,
    changes: Mapping[str, str | None] | None,
    flags: Sequence[str],
    cwd: Path | None,
    arguments: Sequence[str | Path],
) -> subprocess.CompletedProcess[str]:
    """A program in a child of the zygote, or in a new process where a child would not heed a variable."""
    chosen = environment(changes)
    if zygote.unheeded(chosen):
        words = [sys.executable, *flags, *([kind] if kind != "script" else []), code, *arguments]
        return subprocess.run(
            words, env=chosen, capture_output=True, text=True, timeout=TIMEOUT, check=False, cwd=cwd
        )
    running = _forked(kind, code, chosen, cwd, flags, arguments)
    try:
        out, err = running.communicate(TIMEOUT)
    except subprocess.TimeoutExpired:
        running.end()
        raise
    return subprocess.CompletedProcess(running.args, running.wait(), out, err)


def _forked(
    kind: str,
    code: str,
    chosen: dict[str, str],
    cwd: Path | None = None,
    flags: Sequence[str] = (),
    arguments: Sequence[str | Path] = (),
    stdin: int | None = None,
) -> zygote.Process:
    request = zygote.Request(
        kind,
        code,
        [str(word) for word in arguments],
        chosen,
        str(cwd or Path.cwd()),
        zygote.umask(),
        [*flags[1::2]],
    )
    return zygote.Process(request, stdin)


def cache_command(*words: str) -> Result:
    """`opjit cache …`, in this process."""
    return CliRunner().invoke(main, ["cache", *words])


def refused(*words: str | Path) -> str:
    """The one line that a command refuses with, in this process."""
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert (done.exit_code, done.output[:7], done.output.count("\n")) == (1, "Error: ", 1), (
        done.output
    )
    return done.output


def keys() -> set[str]:
    """Of the entries in the cache that OPJIT_CACHE names."""
    return {item.key for item in cache.entries()}


def date(folder: Path, used: float, written: float | None = None) -> None:
    """Set when an entry was used last, and when it was written."""
    os.utime(next(folder.glob("*.so")), (used, used if written is None else written))


def declare(folder: Path) -> str:
    """The first lines of a fresh process's code: imports, and the op of a folder."""
    return (
        "import warnings\nimport torch\nimport opjit\nfrom opjit.catalog import registry\nfrom pathlib import Path\n"
        f"registry.declare_folder(Path({str(folder)!r}))\n"
    )


def no_compiler(tmp: Path) -> dict[str, str | None]:
    """An environment without any compiler or build tool."""
    empty = tmp / "no-tools"
    empty.mkdir(exist_ok=True)
    return {"PATH": str(empty), "CC": None, "CXX": None, "CUDA_HOME": str(empty), "CUDA_PATH": None}


def elsewhere(tmp: Path) -> dict[str, str | None]:
    """An environment without compilers and without a cache that has anything."""
    return {**no_compiler(tmp), "OPJIT_CACHE": str(tmp / "no-cache"), "OPJIT_OFFLINE": "1"}


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Mode, size and modification time of all there is under a folder, but for the counts that a process leaves when it ends."""
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        if path.name == usage.NAME:
            continue
        with suppress(FileNotFoundError):
            status = path.lstat()
            found[str(path)] = (
                status.st_mode,
                0 if stat.S_ISDIR(status.st_mode) else status.st_size,
                status.st_mtime_ns,
            )
    return found


def entries(cache: Path) -> list[Path]:
    return sorted(item.folder for item in inventory.scan(Store(cache)))


def good(cache: Path) -> list[str]:
    """The ops of all entries, each of which must verify."""
    for folder in entries(cache):
        verify(folder, targets.named(folder.parts[-2][:-21], cpu()))
    return [folder.parts[-3].replace(".", "::", 1) for folder in entries(cache)]


def copy_package(to: Path) -> Path:
    """opjit, its C headers and its templates, in another place."""
    for name in ("opjit", "kernels_c", "templates"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    return to


def open_to_group(path: Path) -> None:
    """Let a group that is not this user's own write a file or a folder."""
    if os.geteuid() == 0:
        os.chown(path, -1, SOMEBODY)
    elif grp.getgrgid(path.stat().st_gid).gr_name == pwd.getpwuid(os.geteuid()).pw_name:
        pytest.skip("this user's group is his own")
    path.chmod(path.stat().st_mode | 0o020)


def as_verified(entry: Entry) -> Entry:
    """The entry as if its library's file, as it is now, had been verified."""
    with open(entry.library, "rb") as file:
        return replace(entry, verified=files.identity(file.fileno()))


def copy_cache(entry: Entry, to: Path) -> Entry:
    """Copy the cache that an entry is in; the entry there."""
    source = entry.folder.parents[3]
    shutil.copytree(source, to)
    folder = to / entry.folder.relative_to(source)
    return as_verified(replace(entry, folder=folder, library=folder / entry.library.name))


def planted(entry: Entry, count: int, **changed: object) -> list[Path]:
    """Folders of more entries beside one: the same library under other keys. Fields of the manifest's document can be changed."""
    described = manifest.parse((entry.folder / manifest.NAME).read_bytes())
    found = []
    for number in range(count):
        inputs = {**described.document["inputs"], f"planted{number}": "0" * 64}
        document = {**described.document, "inputs": inputs, **changed}
        other = described._replace(document=document, key=document_key(document))
        folder = entry.folder.with_name(other.key)
        folder.mkdir(mode=0o700)
        for path in entry.folder.iterdir():
            (folder / path.name).write_bytes(
                other.dump() if path.name == manifest.NAME else path.read_bytes()
            )
            (folder / path.name).chmod(0o644)
        found.append(folder)
    return found


no_exec = pytest.mark.no_qemu("qemu reads code, so a filesystem without execution does not stop it")
as_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can mount, or give a file to another user"
)


@contextmanager
def mounted(where: Path, *options: str) -> Iterator[None]:
    """Something mounted at a folder; a skip where that is not allowed."""
    done = subprocess.run(
        ["mount", *options, str(where)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"this machine does not allow mounts: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)


def tmpfs(where: Path, options: str) -> AbstractContextManager[None]:
    """A filesystem in memory, this user's alone, mounted at a folder. Options are mount's: ``"size=60k"``, ``"size=200m,noexec"``."""
    return mounted(where, "-t", "tmpfs", "-o", f"mode=700,{options}", "none")


@contextmanager
def process(code: str, changes: Mapping[str, str | None] | None = None) -> Iterator[zygote.Process]:
    """A process in a session of its own, with pipes, which is ended with all its children."""
    running = started(code, changes)
    try:
        yield running
    finally:
        running.end()


def until(
    true: Callable[[], bool],
    seconds: float = 60,
    process: subprocess.Popen[Any] | zygote.Process | None = None,
) -> None:
    """Wait for something that must happen within some seconds, and before the process ends that is to do it."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        assert process is None or process.poll() is None, (
            f"the process ended before it happened: {process.communicate()}"
        )
        time.sleep(0.01)


def state(pid: int) -> str:
    """A process's as the kernel's letter: ``S`` for one that sleeps, ``T`` for a stopped one, and nothing for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    return state(pid) not in ("", "Z")


def hold(key: str = "key", waiting: Callable[[str], None] = lambda holder: None) -> list[str]:
    """Take and free the lock of a key; the warnings it gave."""
    with cache_warnings() as texts, lock.held(key, waiting):
        pass
    return texts


def free_port() -> str:
    """A port of 127.0.0.1 that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def no_nvcc(patch: pytest.MonkeyPatch) -> None:
    """As on a machine without the CUDA Toolkit."""
    patch.setattr(toolchain, "find_nvcc", lambda notes: None)


def no_nvrtc(patch: pytest.MonkeyPatch) -> None:
    """As on a machine whose torch has no NVRTC."""
    patch.setattr(toolchain, "find_nvrtc", lambda runtime, notes: None)


def take_cpp_autograd(patch: pytest.MonkeyPatch) -> None:
    """Give each op that this process loads autograd's kernel in C++, which is compiled once for the cache of all tests."""
    autograd_part.make()
    entry = cpp_autograd.find_entry()
    assert entry is not None
    patch.setattr(cpp_autograd, "find_entry", lambda: entry)
    patch.setattr(cpp_autograd, "is_on", lambda switch, **_: switch == "OPJIT_CPP_AUTOGRAD")
