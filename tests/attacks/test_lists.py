"""Hostile lists for `opjit precompile --from`: nothing that only a list names is run, writes a file, or reads what others must not see."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import opjit
from opjit.cli import main
from opjit.declare import oplist
from opjit.errors import PrecompileError, RecordError, RemoteError
from opjit.recipe import libraries
from opjit.share import trust
from tests import helpers
from tests.ahead.test_record import one, write_list
from tests.helpers import LEVELS, write_op

pytestmark = pytest.mark.usefixtures("here")
ASSEMBLER = "-Xassembler", "-a={victim}", "-Wa,--MD,{victim}"


def refused(listed: Path) -> str:
    with pytest.raises(PrecompileError) as caught:
        opjit.precompile(recorded=listed)
    [(_, error)] = caught.value.failed
    return str(error)


def linking(folder: Path, *link: Path, **changed: Any) -> Path:
    flags = {**{name: [] for name in oplist.FLAGS}, "link": [str(path) for path in link]}
    return write_list(folder.parent / "ops.json", one(folder=str(folder), flags=flags, **changed))


def lto_object(path: Path, victim: Path, *more: str) -> Path:
    """An object whose recorded options write the file `victim` when a linker's LTO heeds them."""
    source = path.with_suffix(".c")
    source.write_text("int unused;\n")
    options = [each.format(victim=victim) for each in ASSEMBLER]
    subprocess.run(
        [helpers.real_compiler(), "-flto", "-fPIC", "-c", *options, *more, source, "-o", path],
        check=True,
        cwd=path.parent,
    )
    victim.unlink(missing_ok=True)  # the attacker's own assembler heeds them, too
    return path


@pytest.mark.parametrize("fat", [(), ("-ffat-lto-objects",)], ids=["slim", "fat"])
@pytest.mark.parametrize("archived", [False, True], ids=["object", "archive"])
def test_a_linked_object_with_lto_code_is_refused_as_its_options_reach_the_assembler(
    tmp_path: Path, archived: bool, fat: tuple[str, ...]
) -> None:
    folder = write_op(tmp_path / "plus")
    victim = tmp_path / "bashrc"
    path = lto_object(tmp_path / "l.o", victim, *fat)
    if archived:
        subprocess.run(["ar", "rcsD", tmp_path / "l.a", path], check=True)
        path = tmp_path / "l.a"
    assert "-fno-lto" in refused(linking(folder, path))
    assert not victim.exists()


def test_the_link_itself_heeds_no_lto_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "require_plain", lambda *_: None)
    folder = write_op(tmp_path / "plus")
    victim = tmp_path / "bashrc"
    opjit.precompile(
        recorded=linking(folder, lto_object(tmp_path / "l.o", victim, "-ffat-lto-objects"))
    )
    assert not victim.exists()


@pytest.mark.parametrize("name", ["x.a", "x.o", "libx.so", "libx.a"])
def test_a_linker_script_is_no_library(tmp_path: Path, name: str) -> None:
    folder = write_op(tmp_path / "plus")
    secret = tmp_path / "secret.txt"
    secret.write_text("the victim's")
    (tmp_path / name).write_text(f"TARGET(binary) INPUT({secret})")
    flags = {
        **{kind: [] for kind in oplist.FLAGS},
        "link": [f"-L{tmp_path}", "-lx"] if name[:3] == "lib" else [str(tmp_path / name)],
    }
    assert "linker script" in refused(
        write_list(tmp_path / "ops.json", one(folder=str(folder), flags=flags))
    )


def test_a_thin_archive_is_refused_as_it_names_other_files(tmp_path: Path) -> None:
    folder = write_op(tmp_path / "plus")
    (tmp_path / "thin.a").write_bytes(b"!<thin>\n")
    assert "expected a static archive or an object" in refused(linking(folder, tmp_path / "thin.a"))


@pytest.mark.parametrize(
    "opened", ["folder", "source", "header", "include", "its header", "object", "more"]
)
def test_a_file_that_only_the_list_names_must_be_closed_to_others(
    tmp_path: Path, opened: str
) -> None:
    folder = write_op(tmp_path / "plus")
    include = tmp_path / "include"
    include.mkdir()
    (include / "other.h").write_text("#define OTHER 1\n")
    (folder / "plus.c").write_text('#include "other.h"\n' + helpers.PLUS)
    (tmp_path / "more.c").write_text("int more;\n")
    source = tmp_path / "o.c"
    source.write_text("int unused;\n")
    subprocess.run(
        [helpers.real_compiler(), "-fPIC", "-c", source, "-o", tmp_path / "o.o"], check=True
    )
    place = {
        "folder": folder,
        "source": folder / "plus.c",
        "header": folder / "amount.h",
        "include": include,
        "its header": include / "other.h",
        "object": tmp_path / "o.o",
        "more": tmp_path / "more.c",
    }[opened]
    flags = {
        **{kind: [] for kind in oplist.FLAGS},
        "link": [str(tmp_path / "o.o")],
        "include": [str(include)],
        "sources": [str(tmp_path / "more.c")],
    }
    listed = write_list(tmp_path / "ops.json", one(folder=str(folder), flags=flags))
    place.chmod(place.stat().st_mode | 0o022)
    assert f"chmod go-w {place}" in refused(listed)
    place.chmod(place.stat().st_mode & ~0o022)
    assert len(opjit.precompile(recorded=listed).built) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_file_of_another_user_that_only_inline_code_of_a_list_includes_is_refused(
    tmp_path: Path, somebodys: Path
) -> None:
    (somebodys / "theirs.h").write_text("#define AMOUNT 1.0f\n")
    os.chown(somebodys / "theirs.h", helpers.SOMEBODY, helpers.SOMEBODY)
    code = helpers.PLUS.replace('"amount.h"', f'"{somebodys}/theirs.h"')
    assert f"belongs to user {helpers.SOMEBODY}" in refused(
        write_list(tmp_path / "ops.json", one(folder=None, code={"cpu": code}))
    )


@pytest.mark.parametrize("endless", ["a pipe", "/dev/zero"])
@pytest.mark.parametrize("spelling", ["path", "name", "angled", "a macro", "a macro's macro"])
def test_a_source_that_includes_a_pipe_or_a_device_is_refused_while_its_compiler_waits(
    tmp_path: Path, endless: str, spelling: str
) -> None:
    folder = write_op(tmp_path / "plus")
    place = folder / "endless.h"
    os.mkfifo(place) if endless == "a pipe" else place.symlink_to(endless)
    asked = {
        "path": f'"{place}"',
        "name": '"endless.h"',
        "angled": "<endless.h>",
        "a macro": "TWO",
        "a macro's macro": "ONE",
    }[spelling]
    (folder / "plus.c").write_text(
        f'#define ONE TWO\n#define TWO "endless.h"\n#include {asked}\n{helpers.PLUS}'
    )
    # Linux shows the file behind a link that a process has opened.
    assert f"{place} is a pipe or a device" in refused(
        write_list(tmp_path / "ops.json", one(folder=str(folder)))
    )
    done = helpers.ended(helpers.declare(folder) + "opjit.get('keytest::plus', 'cpu')")
    assert done.stderr.splitlines()[-1].startswith("opjit.errors.DeclarationError: ")


@pytest.mark.parametrize("place", ["a pipe", "/dev/zero"])
def test_a_list_and_a_key_are_regular_files(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(place) if place[0] == "/" else tmp_path / "fifo"
    if not path.exists():
        os.mkfifo(path, 0o600)
    with pytest.raises(RecordError, match="not a regular file"):
        opjit.precompile(recorded=path)
    if place == "a pipe":  # everybody may write to /dev/zero
        monkeypatch.setenv("OPJIT_TRUST", str(path))
        with pytest.raises(RemoteError, match="not a regular file"):
            trust.required()


# The words after the folder, for each command with an OP or FOLDER.
OF_FOLDERS = {
    "get": ("--device", "cpu"),
    "why": ("--device", "cpu"),
    "test": ("--only", "results"),
    "bench": (),
    "tune": (),
    "precompile": (),
    "wheel": ("--arch", LEVELS[0]),
}
# The same word is a name there.
OF_NAMES = {
    "cache clear": (),
    "cache push": ("--unsigned",),
    "cache pull": (),
    "cache pack": (),
}


def with_ops(group: click.Group = main, path: str = "") -> Iterator[str]:
    for name, each in group.commands.items():
        if isinstance(each, click.Group):
            yield from with_ops(each, f"{path}{name} ")
        elif any(
            isinstance(one, click.Argument)
            and re.search(r"\b(OP|FOLDER)\b", one.make_metavar(click.Context(each)))
            for one in each.params
        ):
            yield f"{path}{name}"


@pytest.mark.parametrize("command", sorted(with_ops()))
def test_a_folder_that_others_can_write_is_not_run_by(
    command: str, tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "open" / "plus"
    marker = tmp_path / "ran"
    write_op(
        folder, op_py=f"import pathlib\npathlib.Path({str(marker)!r}).write_text('')\n"
    ).parent.chmod(0o777)
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("OPJIT_REMOTE", f"file://{tmp_path}/remote")
    monkeypatch.setenv("OPJIT_TRUST", "unsigned")
    before = ["ops.pack"] if command == "cache pack" else []
    done = CliRunner().invoke(
        main, [*command.split(), *before, "./plus", *{**OF_FOLDERS, **OF_NAMES}[command]]
    )
    assert not marker.exists()
    if command in OF_FOLDERS:
        assert done.exit_code == 2
        assert f"{folder.parent} can be written by other users" in done.output


def test_a_wheel_s_folder_may_be_named_without_a_slash_and_is_asked_for_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_op(tmp_path / "plus", op_py="raise AssertionError('it was run')\n")
    folder.chmod(0o777)
    monkeypatch.chdir(tmp_path)
    assert (
        f"{folder} can be written by other users"
        in CliRunner().invoke(main, ["wheel", "plus", "--arch", LEVELS[0]]).output
    )
