"""C++ extensions away from the cache that built them: in layers, packs, remotes and recorded lists, and on several ranks."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import opjit
from opjit import distributed
from opjit.ahead.plan import plan_recorded
from opjit.cache import transfer
from opjit.cpp_extension.binary import ExtensionRequest
from opjit.declare import oplist
from opjit.declare.oplist import RecordedExtension
from opjit.errors import CacheWarning, PrecompileError
from opjit.share import remote, trust
from opjit.store import bundle
from tests import helpers, remotes
from tests.helpers import cache_command, fresh, program
from tests.remotes import from_folder, serving

pytestmark = pytest.mark.usefixtures("here")
# What it returns stands in a header that a scan finds, and in one that only the compiler does.
SOURCE = """\
#include "scanned.h"
#define TEXT(name) #name
#include TEXT(hidden.h)
extern "C" int value() { return SCANNED + HIDDEN; }
"""
LOAD = """
import ctypes, opjit
path = opjit.load({name!r}, [{source!r}], is_python_module=False)
print(path, ctypes.CDLL(path).value())
"""


@pytest.fixture
def name() -> str:
    """A name that no other test loads anything under."""
    return f"cluster_{os.urandom(4).hex()}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkout(tmp_path / "source")


def checkout(folder: Path, scanned: int = 1, hidden: int = 10) -> Path:
    """A folder of sources; the path of the one to load."""
    folder.mkdir(parents=True)
    (folder / "scanned.h").write_text(f"#define SCANNED {scanned}\n")
    (folder / "hidden.h").write_text(f"#define HIDDEN {hidden}\n")
    (folder / "plain.cpp").write_text(SOURCE)
    return folder / "plain.cpp"


def build(name: str, source: Path) -> Path:
    """The library, from this process."""
    return Path(str(opjit.load(name, [str(source)], is_python_module=False)))


def elsewhere(tmp_path: Path, name: str, source: Path, **changes: str | None) -> tuple[Path, int]:
    """The library and what it returns, in a process without a compiler and with an empty cache."""
    settings = {
        **helpers.no_compiler(tmp_path),
        "OPJIT_CACHE": str(tmp_path / "elsewhere"),
        **changes,
    }
    path, value = fresh(LOAD.format(name=name, source=str(source)), settings).stdout.split()
    return Path(path), int(value)


def is_missed(tmp_path: Path, name: str, source: Path, **changes: str | None) -> bool:
    """Whether a process with an empty cache that may not build finds the extension nowhere."""
    settings = {"OPJIT_CACHE": str(tmp_path / "elsewhere"), "OPJIT_OFFLINE": "1", **changes}
    done = helpers.ended(LOAD.format(name=name, source=str(source)), settings)
    return done.returncode != 0 and "is not cached" in done.stderr


# --- layers ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_an_extension_in_a_layer_is_a_hit_without_a_compiler_and_the_layer_stays_as_it_is(
    here: Path, name: str, source: Path, tmp_path: Path
) -> None:
    built = build(name, source)
    before = helpers.snapshot(here)
    moved = checkout(tmp_path / "another" / "checkout")
    assert elsewhere(tmp_path, name, moved, OPJIT_LAYERS=f"{tmp_path}/nothing:{here}") == (
        built,
        11,
    )
    assert helpers.snapshot(here) == before
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("changed", [{"scanned": 2}, {"hidden": 20}], ids=str)
def test_an_extension_in_a_layer_is_a_miss_where_a_header_differs(
    here: Path, name: str, source: Path, tmp_path: Path, changed: dict[str, int]
) -> None:
    build(name, source)
    assert is_missed(
        tmp_path, name, checkout(tmp_path / "changed", **changed), OPJIT_LAYERS=str(here)
    )
    assert not is_missed(tmp_path, name, source, OPJIT_LAYERS=str(here))


def test_a_damaged_entry_and_a_layer_that_others_can_write_are_not_loaded(
    here: Path, name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build(name, source)
    shutil.copytree(here, tmp_path / "layer")
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("OPJIT_LAYERS", str(tmp_path / "layer"))
    copied = tmp_path / "layer" / library.relative_to(here)
    content = copied.read_bytes()
    copied.write_bytes(content[:-1] + b"?")
    with pytest.warns(CacheWarning, match="does not have the SHA-256 in its manifest"):
        assert build(name, source).is_relative_to(tmp_path / "elsewhere")
    copied.write_bytes(content)
    copied.parent.parent.chmod(0o777)
    with pytest.warns(
        CacheWarning,
        match=r"can be written by other users.*\(for a read-only cache, OPJIT_LAYERS\)",
    ):
        assert build(name, source).is_relative_to(tmp_path / "elsewhere")
    copied.parent.parent.chmod(0o700)
    assert build(name, source) == copied


# --- packs and remotes ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private key, whose public one is trusted; no remote has failed yet."""
    pytest.importorskip("cryptography")
    private, public = trust.keygen("ci", tmp_path / "keys")
    monkeypatch.setenv("OPJIT_TRUST", public)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(remote, "_IN_ALL", 60.0)
    remotes.forget(monkeypatch)
    return private


@pytest.fixture
def held(tmp_path: Path) -> Path:
    """The folder of a remote."""
    return tmp_path / "remote"


def objects(held: Path, suffix: str) -> list[Path]:
    return sorted(path for path in held.rglob(f"*.{suffix}"))


@pytest.mark.filterwarnings("ignore:OPJIT_TRUST=unsigned")
def test_an_entry_under_another_extensions_name_is_not_pulled(
    name: str, source: Path, tmp_path: Path, held: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(name, source)
    transfer.push(held.as_uri(), sign=None)
    folder = held / "v2" / f"cpp_extension.{name}"
    folder.rename(folder.with_name("cpp_extension.innocent"))
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("OPJIT_TRUST", "unsigned")
    report = transfer.pull(held.as_uri())
    assert report.moved == []
    assert [
        problem
        for problem in report.problems
        if f"an entry of the extension {name}, which is not the one in its name" in problem
    ]
    assert helpers.entries(tmp_path / "elsewhere") == []


@pytest.mark.parametrize("scheme", ["file", "http"])
def test_a_remote_gives_an_extension_to_a_machine_without_a_compiler(
    here: Path, name: str, source: Path, tmp_path: Path, key: Path, held: Path, scheme: str
) -> None:
    library = build(name, source)
    assert cache_command("push", held.as_uri(), "--sign", str(key)).exit_code == 0
    before = helpers.snapshot(held)
    assert (
        cache_command("push", held.as_uri(), "--sign", str(key)).output
        == "uploaded 0, 1 already there, 0 left out\n"
    )
    assert helpers.snapshot(held) == before
    with serving(from_folder(held)) as server:
        url = held.as_uri() if scheme == "file" else server.url
        moved = checkout(tmp_path / "another" / "checkout")
        assert elsewhere(tmp_path, name, moved, OPJIT_REMOTE=url) == (
            tmp_path / "elsewhere" / library.relative_to(here),
            11,
        )
    assert not is_missed(tmp_path, name, moved)  # without the remote: it is in the cache now


def test_the_entry_that_fits_the_headers_here_is_fetched_by_those_who_have_the_compiler_and_by_those_who_have_none(
    name: str, source: Path, tmp_path: Path, key: Path, held: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both entries lie on one shelf, as their base key is the same, and each was pushed from another cache."""
    places = {}
    for hidden in (10, 20):
        monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / f"cache-{hidden}"))
        places[hidden] = checkout(tmp_path / str(hidden), hidden=hidden)
        build(name, places[hidden])
        transfer.push(held.as_uri(), sign=key)
    assert len(objects(held, "opjit")) == 2
    assert {len(path.read_text().split()) for path in objects(held, "key")} == {2}
    monkeypatch.setenv("OPJIT_REMOTE", held.as_uri())
    for hidden, place in places.items():
        assert elsewhere(tmp_path, name, place)[1] == 1 + hidden
        monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / f"again-{hidden}"))
        fetched = build(name, place)
        assert sorted(path.name for path in fetched.parent.iterdir()) == sorted(
            ["manifest.json", fetched.name]
        )
    changed = checkout(tmp_path / "changed", hidden=30)
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "again"))
    with helpers.cache_warnings() as texts:
        assert (build(name, changed).parent / "build.ninja").is_file()
    assert texts == []


def test_a_pointer_holds_the_newest_keys_and_a_damaged_one_is_written_anew(
    name: str, source: Path, tmp_path: Path, key: Path, held: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(name, source)
    transfer.push(held.as_uri(), sign=key)
    lost = {path: path.read_bytes() for path in objects(held, "key")}
    for path in lost:
        path.write_bytes(b"\n".join([b"0" * 64] * (remote.MOST_KEYS + 1)))
    transfer.push(held.as_uri(), sign=key)
    assert {path: path.read_bytes() for path in objects(held, "key")} == lost
    for path in lost:
        path.write_bytes(
            b"\n".join(f"{number:064x}".encode() for number in range(remote.MOST_KEYS))
        )
    transfer.push(held.as_uri(), sign=key)
    for path, content in lost.items():
        assert path.read_bytes().split() == [
            content,
            *(f"{number:064x}".encode() for number in range(remote.MOST_KEYS - 1)),
        ]
    assert elsewhere(tmp_path, name, source, OPJIT_REMOTE=held.as_uri())[1] == 11


def test_an_extension_that_takes_longer_than_an_op_may_still_arrives(
    name: str, source: Path, tmp_path: Path, key: Path, held: Path
) -> None:
    build(name, source)
    transfer.push(held.as_uri(), sign=key)
    at_once = from_folder(held)
    slowly = from_folder(held, latency=1.5)
    with serving(
        lambda handler: (slowly if handler.path.endswith(".opjit") else at_once)(handler)
    ) as server:
        assert elsewhere(tmp_path, name, source, OPJIT_REMOTE=server.url)[1] == 11


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        ("unsigned", "it is not signed"),
        ("pointer", "its pointer does not contain a key"),
        ("another entry", "built from other sources"),
        ("another shelf", "from other sources"),
    ],
)
def test_what_a_remote_should_not_have_is_neither_loaded_nor_stored(
    name: str,
    source: Path,
    tmp_path: Path,
    key: Path,
    held: Path,
    monkeypatch: pytest.MonkeyPatch,
    attack: str,
    reason: str,
) -> None:
    build(name, source)
    if attack.startswith("another"):
        other_source = checkout(tmp_path / "other", scanned=5)
        if attack == "another shelf":  # entries whose sources are equal share a shelf
            other_source.write_text(f"{SOURCE}// another text\n")
        build(name, other_source)
    transfer.push(held.as_uri(), sign=None if attack == "unsigned" else key)
    good = objects(held, "opjit")
    if attack == "pointer":
        for path in objects(held, "key"):
            path.write_bytes(b"../../../../etc/passwd")
    elif attack == "another entry":
        contents = [path.read_bytes() for path in good]
        for path, content in zip(good, reversed(contents), strict=True):
            path.write_bytes(content)
    elif attack == "another shelf":
        one, other = (path.parent for path in good)
        for there, here in ((one, other), (other, one)):
            for path in here.glob("*.key"):
                path.write_bytes(next(there.glob("*.opjit")).stem.encode())
        for path in good:
            shutil.copy(path, (other if path.parent == one else one) / path.name)
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("OPJIT_REMOTE", held.as_uri())
    with pytest.warns(CacheWarning, match=reason):
        library = build(name, source)
    assert (library.parent / "build.ninja").is_file(), "it was fetched"
    assert len(helpers.entries(tmp_path / "elsewhere")) == 1


def test_an_entry_is_pulled_with_its_signature_checked(
    here: Path,
    name: str,
    source: Path,
    tmp_path: Path,
    key: Path,
    held: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = build(name, source)
    transfer.push(held.as_uri(), sign=key)
    [content] = [path.read_bytes() for path in objects(held, "opjit")]
    assert bundle.parse_bundle(content).signature is not None
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "elsewhere"))
    assert transfer.pull(held.as_uri(), ops=[f"cpp_extension::{name}"]).problems == []
    assert elsewhere(tmp_path, name, source) == (
        tmp_path / "elsewhere" / library.relative_to(here),
        11,
    )


# --- record and precompile ---------------------------------------------------------------------------------------------------------------


PROGRAM = """
import opjit, os, pathlib
from opjit import cpp_extension
here = pathlib.Path(__file__).parent
for _ in range(2):
    cpp_extension.load({name!r}, [here / "csrc" / "plain.cpp"], extra_cflags=["-DMORE"], is_python_module=False)
os.chdir(here / "csrc")
cpp_extension.load_inline({name!r} + "_inline", '#include <hidden.h>\\nextern "C" int value() {{ return HIDDEN; }}',
                          extra_include_paths=["."], is_python_module=False, no_implicit_headers=True, verbose=True)
"""


@pytest.fixture
def repository(name: str, tmp_path: Path) -> Path:
    """A program with its extensions' sources, and beside it the list of what it loads."""
    folder = tmp_path / "repository"
    checkout(folder / "csrc")
    (folder / "program.py").write_text(PROGRAM.format(name=name))
    done = helpers.command(
        "record", "-o", folder / "ops.json", "--", sys.executable, folder / "program.py"
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.torch
def test_the_list_has_each_call_once_with_paths_that_move_with_it(
    repository: Path, name: str
) -> None:
    path = repository / "ops.json"
    inline, plain = sorted(oplist.read_list(path)[1], key=lambda each: each.function, reverse=True)
    assert plain.arguments["sources"] == ["csrc/plain.cpp"]
    assert (plain.name, plain.arguments["extra_cflags"], plain.archs) == (name, ["-DMORE"], None)
    assert (inline.name, inline.arguments["extra_include_paths"]) == (f"{name}_inline", ["csrc"])
    assert "verbose" not in inline.arguments
    assert str(repository) not in path.read_text()
    assert len(json.loads(path.read_text())["extensions"]) == 2
    assert oplist.read_list(path)[0] == []


def test_a_list_in_another_checkout_fills_a_layer_that_the_program_needs_no_compiler_with(
    repository: Path, here: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    repository.rename(moved)
    shutil.rmtree(here)
    done = helpers.command(
        "precompile", "--from", moved / "ops.json", "--store", tmp_path / "layer"
    )
    assert done.returncode == 0
    assert "2 C++ extensions of the list are not built" in done.stderr
    assert helpers.entries(tmp_path / "layer") == []
    command = (
        "precompile",
        "--from",
        moved / "ops.json",
        "--store",
        tmp_path / "layer",
        "--extensions",
    )
    done = helpers.command(*command)
    assert done.stdout.splitlines()[-1].startswith(
        "2 built, 0 already there, 0 skipped, 0 failed"
    ), done.stdout + done.stderr
    assert helpers.command(*command).stdout.startswith("0 built, 2 already there")
    for entry in helpers.entries(tmp_path / "layer"):
        assert all(
            path.stat().st_mode & 0o044 == 0o044
            for path in (entry.parent.parent, entry.parent, entry, *entry.iterdir())
        )
    settings = {
        **helpers.no_compiler(tmp_path),
        "OPJIT_LAYERS": str(tmp_path / "layer"),
        "OPJIT_OFFLINE": "1",
    }
    assert helpers.script(moved / "program.py", changes=settings).returncode == 0


def test_a_list_is_built_in_the_cache_and_what_cannot_be_built_is_named(
    repository: Path, here: Path, name: str
) -> None:
    shutil.rmtree(here)
    (repository / "csrc" / "plain.cpp").unlink()
    with pytest.raises(
        PrecompileError,
        match=rf"cannot build the C\+\+ extension {name}: .*csrc/plain.cpp does not exist",
    ) as failed:
        opjit.precompile(recorded=repository / "ops.json", extensions=True)
    assert [each for each, _ in failed.value.failed] == [name]
    (repository / "csrc" / "plain.cpp").write_text("int value() { return 0 }\n")
    with pytest.raises(PrecompileError, match="expected ';'"):
        opjit.precompile(recorded=repository / "ops.json", extensions=True)
    checkout(repository / "fixed").rename(repository / "csrc" / "plain.cpp")
    [built] = opjit.precompile(recorded=repository / "ops.json", extensions=True).built
    assert str(built).startswith(f"{name} for torch ")
    program = repository / "program.py"
    assert helpers.script(program, changes={"OPJIT_OFFLINE": "1"}).returncode == 0


def test_a_recorded_arch_is_built_for_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Path, no_gpu: None
) -> None:
    arguments: dict[str, Any] = {"name": "ext", "sources": [str(source)], "with_cuda": True}
    (tmp_path / "ops.json").write_text(
        oplist.dump_list([], [RecordedExtension("load", arguments, "9.0+PTX")])
    )
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    [wanted] = plan_recorded(tmp_path / "ops.json", [], None, extensions=True).wanted
    assert isinstance(wanted, ExtensionRequest)
    assert wanted.inputs.archs == "9.0+PTX"


def test_a_call_that_cannot_be_written_is_logged_and_the_others_are_recorded(
    tmp_path: Path,
    name: str,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    raw = tmp_path / "raw"
    raw.touch()
    monkeypatch.setenv("OPJIT_RECORD", str(raw))
    opjit.load(name, [str(source)], is_python_module=False, keep_intermediates=0)  # type: ignore[arg-type]
    build(name, source)
    assert [record.getMessage().partition(" is not")[0] for record in caplog.records] == [
        f"the C++ extension {name}"
    ]
    [line] = raw.read_text().splitlines()
    assert json.loads(line)["arguments"]["sources"] == ["source/plain.cpp"]


# --- ranks of a job -----------------------------------------------------------------------------------------------------------------------

RANK = """
import ctypes, opjit, opjit.distributed
try:
    path = opjit.distributed.load({name!r}, [{source!r}], is_python_module=False)
    print(path, ctypes.CDLL(path).value(), flush=True)
except opjit.errors.OpjitError as error:
    print(type(error).__name__, "reported by" in str(error), flush=True)
"""


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each source that any process compiles."""
    log = tmp_path / "compiled"
    log.touch()
    text = f'#!/bin/sh\ncase " $* " in *" -c "*) echo x >> \'{log}\';; esac\nexec \'{shutil.which("c++")}\' "$@"\n'
    monkeypatch.setenv("CXX", str(program(tmp_path / "bin" / "c++", text)))
    return log


def ranks(tmp_path: Path, places: list[str]) -> list[dict[str, str | None]]:
    """The environment of each rank of a job, by its node's name. A node has a cache and a place for locks of its own."""
    port = helpers.free_port()
    found = list[dict[str, str | None]]()
    for number, place in enumerate(places):
        (tmp_path / place / "tmp").mkdir(parents=True, exist_ok=True)
        found.append(
            {
                "RANK": str(number),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_RANK": str(places[:number].count(place)),
                "LOCAL_WORLD_SIZE": str(places.count(place)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OPJIT_CACHE": str(tmp_path / place / "cache"),
                "TMPDIR": str(tmp_path / place / "tmp"),
            }
        )
    return found


def outputs(running: list[Any]) -> list[str]:
    return [process.communicate(120)[0] for process in running]


def test_an_extension_is_built_once_in_a_job_and_the_nodes_without_it_get_its_bytes(
    name: str, source: Path, tmp_path: Path, compiled: Path
) -> None:
    job = ranks(tmp_path, ["a", "a", "b", "b"])
    job[3] |= helpers.no_compiler(tmp_path)
    code = RANK.format(name=name, source=str(source))
    found = [text.split() for text in outputs([helpers.started(code, each) for each in job])]
    assert [value for _, value in found] == ["11"] * 4
    assert [
        Path(path).is_relative_to(str(each["OPJIT_CACHE"]))
        for (path, _), each in zip(found, job, strict=True)
    ] == [True] * 4
    assert compiled.read_text() == "x\n"
    again = [
        text.split()
        for text in outputs([helpers.started(code, each) for each in ranks(tmp_path, ["a", "b"])])
    ]
    assert again == [found[0], found[2]]
    assert compiled.read_text() == "x\n"


def test_a_rank_with_another_header_has_an_entry_of_its_own(
    name: str, source: Path, tmp_path: Path, compiled: Path
) -> None:
    places = [source, checkout(tmp_path / "another", hidden=20)]
    running = [
        helpers.started(RANK.format(name=name, source=str(place)), each)
        for place, each in zip(places, ranks(tmp_path, ["a", "b"]), strict=True)
    ]
    assert [text.split()[1] for text in outputs(running)] == ["11", "21"]
    assert compiled.read_text() == "x\nx\n"


def test_a_process_that_is_no_rank_loads_as_usual(name: str, source: Path, here: Path) -> None:
    loaded = distributed.load(name, [str(source)], is_python_module=False)
    assert Path(loaded).is_relative_to(here)
    assert opjit.load(name, [str(source)], is_python_module=False) == loaded
    text = 'extern "C" int value() { return 3; }'
    inline = distributed.load_inline(
        f"{name}_inline", text, is_python_module=False, no_implicit_headers=True
    )
    assert Path(inline).is_relative_to(here)
