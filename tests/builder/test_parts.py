"""Shared parts of builds: what one machine has made, another one takes from a remote, an archive or a layer, if its files are the same."""

import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from opjit.builder import parts
from opjit.cache import transfer
from opjit.errors import EntryError
from opjit.recipe import recorder, toolchain
from opjit.share import remote, trust
from opjit.store import inventory
from opjit.store.bundle import Bundle, parse_bundle
from opjit.store.store import default_store
from tests import remotes
from tests.remotes import from_folder, serving

FILE = "number.o"


@pytest.fixture(autouse=True)
def one_machine(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """``one_machine(name)``: from now on, this process is one of another machine, with a cache of its own."""
    recorder.start(default_store().notes)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(remote, "_IN_ALL", 60.0)
    monkeypatch.setattr(remote, "_AT_LEAST", 60.0)
    remotes.forget(monkeypatch)
    (tmp_path / "system").mkdir()
    (tmp_path / "system/number.h").write_text("#define NUMBER 1\n")
    return lambda name: monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / name))


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., int]:
    """``made()``: take or make a part, an object file that depends on a header, and return how often it was made in this test."""
    counted = list[Path]()
    compiler = toolchain.require_compiler(None)

    def make(staged: Path) -> None:
        counted.append(staged)
        (staged / "number.c").write_text('#include "number.h"\nint number = NUMBER;\n')
        options = ["-c", f"-I{tmp_path / 'system'}", "number.c", "-o", FILE]
        parts.compile_part(compiler, options, staged)
        (staged / "number.c").unlink()

    def take(content: str = "number") -> int:
        name = parts.name_of(content, shared=True)
        place = parts.kept(default_store().base, name, [FILE], (), make)
        assert (place / FILE).read_bytes()[:4] == b"\x7fELF"
        return len(counted)

    return take


@pytest.fixture
def pushed(
    tmp_path: Path, made: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, str]:
    """A remote with the part of the first machine, signed, and the name of its object. The signer is trusted."""
    assert made() == 1
    private, public = trust.keygen("ci", tmp_path / "keys")
    (name,) = transfer.push((tmp_path / "remote").as_uri(), sign=private).moved
    monkeypatch.setenv("OPJIT_TRUST", public)
    return tmp_path / "remote", name


def changed(tmp_path: Path) -> None:
    """Give this machine another header than the first machine's."""
    (tmp_path / "system/number.h").write_text("#define NUMBER 22\n")


def test_a_second_machine_with_the_same_files_makes_nothing(
    pushed: tuple[Path, str],
    made: Callable[..., int],
    one_machine: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, name = pushed
    monkeypatch.setenv("OPJIT_REMOTE", folder.as_uri())
    one_machine("second")
    assert made() == 1
    with serving(from_folder(folder)) as server:
        monkeypatch.setenv("OPJIT_REMOTE", server.url)
        one_machine("third")
        assert made() == 1
        assert made() == 1
    assert server.asked == [f"/{name.removesuffix('.opjit')}.key", f"/{name}"]
    (part,) = inventory.parts(default_store())
    assert part.folder.parent.parent == default_store().base / "parts"


def test_a_pull_an_archive_and_a_layer_bring_it(
    pushed: tuple[Path, str],
    made: Callable[..., int],
    one_machine: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, name = pushed
    assert transfer.pack(tmp_path / "parts.tar").moved == [name]
    one_machine("pulled")
    assert transfer.pull(folder.as_uri()).moved == [name]
    assert transfer.pull(folder.as_uri()).there == 1
    assert made() == 1
    monkeypatch.setenv("OPJIT_LAYERS", str(tmp_path / "pulled"))
    one_machine("above a layer")
    assert made() == 1
    monkeypatch.delenv("OPJIT_LAYERS")
    monkeypatch.setenv("OPJIT_TRUST", "unsigned")
    one_machine("unpacked")
    with pytest.warns(match="unsigned"):
        assert transfer.unpack(tmp_path / "parts.tar").moved == [name]
    assert made() == 1


def test_a_machine_with_another_header_makes_its_own(
    pushed: tuple[Path, str],
    made: Callable[..., int],
    one_machine: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, name = pushed
    monkeypatch.setenv("OPJIT_REMOTE", folder.as_uri())
    changed(tmp_path)
    one_machine("second")
    assert made() == 2
    assert made() == 2
    one_machine("pulled")
    assert transfer.pull(folder.as_uri()).moved == [name]
    assert made() == 3


def test_a_part_is_made_again_once_a_header_of_the_system_has_changed(
    made: Callable[..., int], tmp_path: Path
) -> None:
    assert made() == 1
    changed(tmp_path)
    assert made() == 2
    assert made() == 2


def test_a_part_whose_compiler_could_not_be_watched_stays_on_its_machine(
    made: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "watching", lambda log: {})
    assert made() == 1
    assert made() == 1
    report = transfer.push((tmp_path / "remote").as_uri(), sign=None)
    assert report.moved == []
    (problem,) = report.problems
    assert "its compiler cannot be watched" in problem


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda found: found._replace(signature=None), id="unsigned"),
        pytest.param(lambda found: found._replace(library=found.library[:-1]), id="cut off"),
        pytest.param(
            lambda found: found._replace(manifest=found.manifest.replace(b"shared", b"others")),
            id="another name",
        ),
    ],
)
def test_a_part_that_is_not_as_its_signer_made_it_is_not_used(
    pushed: tuple[Path, str],
    made: Callable[..., int],
    one_machine: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Bundle], Bundle],
) -> None:
    folder, name = pushed
    object_of = folder / name
    object_of.write_bytes(spoil(parse_bundle(object_of.read_bytes())).dump())
    monkeypatch.setenv("OPJIT_REMOTE", folder.as_uri())
    one_machine("second")
    with pytest.warns(match="failed and is not used again"):
        assert made() == 2


def test_a_signed_part_under_the_name_of_another_is_not_used(
    pushed: tuple[Path, str],
    made: Callable[..., int],
    one_machine: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, name = pushed
    other = f"v2/parts/{parts.name_of('other', shared=True)}.opjit"
    (folder / name).rename(folder / other)
    (folder / other).with_suffix(".key").write_text(Path(other).stem)
    monkeypatch.setenv("OPJIT_REMOTE", folder.as_uri())
    one_machine("second")
    with pytest.warns(match="the entry was built from other"):
        assert made("other") == 2
    one_machine("third")
    report = transfer.pull(folder.as_uri())
    assert report.moved == []
    assert "not the one in its name" in report.problems[0]


def test_a_part_that_unpacks_to_more_than_its_limit_is_refused(
    made: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made()
    store = default_store()
    (part,) = inventory.parts(store)
    found = parts.packed(part.folder)
    size = len(zlib.decompress(found.library))
    monkeypatch.setattr(parts, "_MAX_BYTES", size - 1)
    with pytest.raises(EntryError, match="larger than"):
        parts.receive(store.base, f"shared/{part.key}", found, lambda place: False)
    assert list((store.base / "parts/shared").iterdir()) == [part.folder]


def test_a_remote_that_never_answers_delays_a_build_by_a_second(
    pushed: tuple[Path, str],
    made: Callable[..., int],
    one_machine: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "_IN_ALL", 0.2)
    monkeypatch.setattr(remote, "_AT_LEAST", 0.2)
    one_machine("second")
    with remotes.black_hole() as url:
        monkeypatch.setenv("OPJIT_REMOTE", url)
        with pytest.warns(match="failed and is not used again"):
            assert made() == 2


def test_the_parts_of_one_machine_alone_are_not_pushed(tmp_path: Path) -> None:
    base = default_store().base
    parts.kept(base, parts.name_of("own"), [FILE], (), lambda staged: (staged / FILE).touch())
    assert transfer.push((tmp_path / "remote").as_uri(), sign=None).moved == []
