"""What the tests share: a private cache, ops made on the spot, fresh processes, and reasons to skip."""

import contextlib
import gc
import hashlib
import itertools
import os
import shutil
import signal
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import opjit
from opjit import files
from opjit.backends import Flags
from opjit.backends.cuda import Cuda
from opjit.builder import runtime_objects
from opjit.catalog import registry
from opjit.recipe import recorder, toolchain
from opjit.recipe.compilers import Compiler
from opjit.store.entry import Entry
from opjit.store.store import Store
from tests import helpers, remotes, tiers, zygote
from tests.helpers import (
    COMPILES,
    EMULATED,
    SOMEBODY,
    built,
    copy_cache,
    emulated,
    fake_compiler,
    shares_libstdcxx,
    write_op,
)

OPS = Path(__file__).parent / "ops"
# Give every op that a test's process loads autograd's kernel in C++.
CPP_AUTOGRAD = "OPJIT_TEST_CPP_AUTOGRAD" in os.environ
TIERS = pytest.StashKey[tiers.Tiers]()
_namespaces = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    tiers.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a CUDA build of torch says here that it finds no driver
        has = {
            "gpu": torch.cuda.is_available(),
            "nvcc": toolchain.find_nvcc(None) is not None and not EMULATED,
        }
    hidden = torch.version.cuda is not None and not has["gpu"] and Path("/dev/nvidia0").exists()
    config.stash[TIERS] = tiers.Tiers(config, has, hidden)
    config.pluginmanager.register(config.stash[TIERS], "tiers")
    if getattr(config.option, "dist", None) == "load":
        config.option.dist = (
            "worksteal"  # neighbors stay in one process, which makes what they share once
        )
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # a shell's background job ignores Ctrl-C, and so would all programs it starts
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.stash[TIERS]
    chosen.select(items)
    reasons = {
        "gpu": "torch sees no CUDA GPU",
        "nvcc": "no nvcc: the CUDA Toolkit is not installed, or is another machine's",
    }
    for item in items:
        for name, reason in reasons.items():
            if not chosen.has[name] and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))
        if EMULATED and (mark := item.get_closest_marker("no_qemu")):
            item.add_marker(pytest.mark.skip(reason=mark.args[0]))


def pytest_collection_finish() -> None:
    """Leave what imports and collection made out of later garbage collections, each of which would walk through it."""
    gc.collect()
    gc.freeze()


def run_folder(factory: pytest.TempPathFactory) -> Path:
    """The folder of this run, which all workers share."""
    return (
        factory.getbasetemp().parent
        if "PYTEST_XDIST_WORKER" in os.environ
        else factory.getbasetemp()
    )


@pytest.fixture(scope="session", autouse=True)
def shared_cache(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """The cache of tests that have none of their own. It is in pytest's: for all workers, and kept between runs, as keys are content.

    With ``-p no:cacheprovider``, or where others could write into pytest's cache, a run begins with nothing. The user's cache and settings
    are left alone either way."""
    root = run_folder(tmp_path_factory) / "cache"
    if pytestconfig.pluginmanager.has_plugin("cacheprovider"):
        kept = Path(pytestconfig.cache.mkdir("opjit"))
        kept.chmod(0o700)
        root = root if Store(kept).problem() else kept
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("OPJIT_")]:
            patch.delenv(name)
        patch.setenv("OPJIT_CACHE", str(root))
        if "CXX" in os.environ and not shares_libstdcxx(
            os.environ["CXX"]
        ):  # torch's own extensions crash with a second libstdc++
            patch.setenv(
                "CXX", next(filter(shares_libstdcxx, ("g++", "c++", "clang++")), os.environ["CXX"])
            )
        # Children do not compile it for `opjit precompile`.
        patch.setenv("OPJIT_CPP_AUTOGRAD", "0")
        if CPP_AUTOGRAD:
            helpers.take_cpp_autograd(patch)
        yield
    zygote.stop()


@pytest.fixture(scope="session", autouse=True)
def copied_parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    """The runtime and the stubs are compiled once in a run and copied into each new cache, where they would take 0.3 s.

    Gives the function that compiles them."""
    kept = run_folder(tmp_path_factory) / "parts"
    kept.mkdir(exist_ok=True)
    plain = runtime_objects._make

    def move_record(folder: Path, old: bytes, new: bytes) -> None:
        """Change the folder in which the tools ran in the record of what they read."""
        log = folder / recorder.LOG
        if log.exists():
            log.write_bytes(log.read_bytes().replace(old, new))

    def make(work: Path, include: str, compiler: Compiler, flags: Flags) -> None:
        texts = [path.read_bytes() for path in sorted(Path(include).glob("opjit*"))]
        made = kept / hashlib.sha256(repr((include, compiler, flags, texts)).encode()).hexdigest()
        if made.is_dir():
            for path in made.iterdir():
                shutil.copy(path, work)
            move_record(work, b"<work>", os.fsencode(work))
            return
        plain(work, include, compiler, flags)
        own = kept / files.random_name()
        shutil.copytree(work, own)
        move_record(own, os.fsencode(work), b"<work>")
        with contextlib.suppress(OSError):  # another thread or worker was faster
            own.rename(made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime_objects, "_make", make)
        yield plain


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """The folder of a test, which other users can reach, as a shared one: pytest lets nobody else enter its own."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder.stat().st_mode & 0o011 != 0o011:
            folder.chmod(folder.stat().st_mode | 0o011)
    return tmp_path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache, and a place for locks and temporary files, of the test's own: the cache's path, where nothing is yet."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "cache"


@pytest.fixture
def op(tmp_path: Path) -> Path:
    """The folder of keytest::plus, which this process does not declare, for the test to change."""
    return write_op(tmp_path / "plus")


@pytest.fixture(scope="module")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Entry]:
    """Another folder of that op, and its entry in the cache beside it, which the tests of a file share and leave as they are."""
    folder = write_op(tmp_path_factory.mktemp("built-once") / "plus")
    return folder, built(folder, folder.parent / "cache")


@pytest.fixture
def entry(built_once: tuple[Path, Entry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """The op's entry in a cache of the test's own, which OPJIT_CACHE names."""
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    return copy_cache(built_once[1], tmp_path / "cache")


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> remotes.Published:
    """An op, which this process declares, and a remote with its signed entry, for tests that leave both as they are."""
    return remotes.publish(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> remotes.Published:
    """Another op, pushed by somebody else."""
    return remotes.publish(tmp_path_factory.mktemp("other"), "remoteother", 7.0)


@pytest.fixture
def on_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``on_compile(commands)``: from now on, the compiler runs commands of the shell before it compiles an op's source."""
    return lambda commands: monkeypatch.setenv(
        "CC", str(fake_compiler(tmp_path / "own-cc", f"if {COMPILES}; then {commands}; fi"))
    )


@pytest.fixture
def log(tmp_path: Path, on_compile: Callable[[str], None]) -> Path:
    """A file with a line for each run of the compiler on an op's source."""
    path = tmp_path / "compiled"
    path.touch()
    on_compile(f"echo $$ >> '{path}'")
    return path


@pytest.fixture
def somebodys() -> Iterator[Path]:
    """A folder of another user's, who can get to it: pytest keeps its own to itself. Only for root."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # TMPDIR may be closed to others
        os.chown(folder, SOMEBODY, SOMEBODY)
        yield Path(folder)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that the machine may have are none of the test's, nor of the processes that it starts."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(Cuda, "available", lambda self: "this test has no GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu), "emulated"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device of a test's tensors: the CPU with C kernels, a GPU, and the CPU with emulated CUDA kernels."""
    yield from _device(request.param)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "emulated"])
def cuda_device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device of a test of CUDA kernels: a GPU, and the CPU with emulated kernels."""
    yield from _device(request.param)


def _device(name: str) -> Iterator[str]:
    if name != "emulated":
        yield name
        return
    if torch.cuda.is_available():
        pytest.skip("the GPU runs this test")
    with emulated(checked=True):
        yield "cpu"


@pytest.fixture
def make_op(tmp_path: Path) -> Callable[..., opjit.Op]:
    """``make_op(schema, source, fake=None, cuda=None, **options)``: declare an op from a folder and in a namespace of its own.

    The schema comes without a namespace; the source without ``#include "opjit.h"``, which is line 1 of the file."""

    def make(
        schema: str,
        source: str = "",
        *,
        fake: Callable[..., Any] | None = None,
        cuda: str = "",
        **options: Any,
    ) -> opjit.Op:
        namespace = f"optest{next(_namespaces)}"
        name = schema.partition("(")[0]
        folder = tmp_path / namespace
        folder.mkdir()
        if source:
            (folder / f"{name}.c").write_text(
                '#include "opjit.h"\n' + textwrap.dedent(source), encoding="utf-8"
            )
        if cuda:
            (folder / f"{name}.cu").write_text(
                '#include "opjit_cuda.h"\n' + textwrap.dedent(cuda), encoding="utf-8"
            )
        path = folder / "op.py"
        path.write_text(
            f"@opjit.op({f'{namespace}::{schema}'!r}, **options)\n"
            f"def {name}_op(*args, **kwargs):\n"
            "    return fake(*args, **kwargs) if fake else None\n",
            encoding="utf-8",
        )
        module: dict[str, Any] = {"opjit": opjit, "fake": fake, "options": options}
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module)
        declared = module[f"{name}_op"]
        assert isinstance(declared, opjit.Op)
        return declared

    return make


@pytest.fixture(scope="session")
def everything() -> opjit.Op:
    """An op that takes every type of the table and reports what it got as JSON; see tests/ops/everything."""
    registry.declare_folder(OPS / "everything")
    return registry.find("optest::everything")


@pytest.fixture(scope="session")
def increment() -> opjit.Op:
    """``optest::increment(Tensor(a!) x) -> ()`` adds one to every element."""
    registry.declare_folder(OPS / "increment")
    return registry.find("optest::increment")


@pytest.fixture(scope="session")
def double() -> opjit.Op:
    """``optest::double(Tensor x) -> Tensor`` with a backward, strided, any floating dtype; in C and CUDA."""
    registry.declare_folder(OPS / "double")
    return registry.find("optest::double")


@pytest.fixture(scope="session")
def parts() -> None:
    """``optest::parts(Tensor x) -> (Tensor whole, Tensor fraction)`` and ``optest::joined``, its inverse, in one folder."""
    registry.declare_folder(OPS / "parts")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """torch's number of threads, to be set for this test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def growth() -> Callable[[Callable[[], object], int], int]:
    """``growth(call, times)``: bytes that this process's resident memory grows by over so many calls, after a tenth of them to warm up."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )

    def grown(call: Callable[[], object], times: int) -> int:
        for _ in range(times // 10):
            call()
        before = resident()
        for _ in range(times):
            call()
        return resident() - before

    return grown
