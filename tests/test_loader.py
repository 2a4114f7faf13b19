"""Opening a library: the file that was verified, under its own name; also from a filesystem that lets no program run."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import opjit
from opjit import loader
from opjit.errors import LoadError
from opjit.store.entry import Entry
from tests import helpers
from tests.helpers import as_root, fresh, tmpfs

HOSTILE = """\
#include <stdio.h>
__attribute__((constructor)) static void run(void) { fclose(fopen("%s", "w")); }
"""


def hostile(folder: Path) -> tuple[Path, Path]:
    """A library that leaves a file behind where it is opened, and that file."""
    ran = folder / "ran"
    (folder / "hostile.c").write_text(HOSTILE % ran)
    subprocess.run(
        [
            helpers.real_compiler(),
            "-shared",
            "-fPIC",
            "-o",
            folder / "hostile.so",
            folder / "hostile.c",
        ],
        check=True,
    )
    return folder / "hostile.so", ran


def test_the_file_that_was_verified_is_opened_though_another_one_gets_its_name(
    entry: Entry, op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted, ran = hostile(tmp_path)
    opened = ctypes.CDLL

    def late(path: str | None) -> ctypes.CDLL:
        if path is not None:
            entry.folder.rename(tmp_path / "moved")
            entry.folder.mkdir()
            shutil.copy(planted, entry.library)
            monkeypatch.setattr(ctypes, "CDLL", opened)
        return opened(path)

    monkeypatch.setattr(ctypes, "CDLL", late)
    library = loader.open_library(entry, "keytest::plus")
    assert library.opjit_kernel
    assert not ran.exists()
    opened(str(planted))
    assert ran.exists(), "else this test proves nothing"


@pytest.mark.parametrize("how", ["another file", "other bytes", "a link", "nothing"])
def test_a_library_that_was_replaced_after_its_verification_is_gone(
    entry: Entry, tmp_path: Path, how: str
) -> None:
    planted, ran = hostile(tmp_path)
    if how == "other bytes":
        entry.library.write_bytes(planted.read_bytes())
    else:
        entry.library.unlink()
        if how == "another file":
            shutil.copy(planted, entry.library)
        elif how == "a link":
            entry.library.symlink_to(planted)
    with pytest.raises(loader.Gone, match="after it was verified"):
        loader.open_library(entry, "keytest::plus")
    assert not ran.exists()


def test_a_library_goes_by_its_own_path(entry: Entry) -> None:
    """In backtraces and debuggers; and who opens that path gets the library that is open."""
    library = loader.open_library(entry, "keytest::plus")
    places = (ctypes.c_void_p * 4)()
    assert ctypes.CDLL(None).dladdr(ctypes.cast(library.opjit_kernel, ctypes.c_void_p), places) != 0
    assert ctypes.string_at(places[0] or 0) == os.fsencode(entry.library)
    assert str(entry.library) in Path("/proc/self/maps").read_text()
    assert ctypes.CDLL(str(entry.library))._handle == library._handle
    assert repr(str(entry.library)) in repr(library)


def test_an_error_of_the_dynamic_loader_names_the_library(entry: Entry) -> None:
    entry.library.write_bytes(b"\x7fELF nothing")
    with pytest.raises(
        LoadError, match=f"keytest::plus cannot be loaded: {entry.library}: "
    ) as caught:
        loader.open_library(helpers.as_verified(entry), "keytest::plus")
    assert "/proc" not in str(caught.value)


def test_each_of_many_libraries_is_opened_though_their_descriptors_have_one_number(
    make_op: Callable[..., opjit.Op],
) -> None:
    ops = [
        make_op(
            f"value{number}(Tensor x) -> int",
            f"opjit_status value{number}_cpu(const opjit_tensor *x, int64_t *out)\n"
            f"{{ (void)x; *out = {number}; return OPJIT_OK; }}\n",
            fake=lambda x: 0,
        )
        for number in range(4)
    ]
    assert [op(torch.ones(1)) for op in ops] == [0, 1, 2, 3]


@as_root
@helpers.no_exec
def test_an_op_in_a_noexec_cache_is_an_error_that_names_the_way_out(op: Path, here: Path) -> None:
    here.mkdir(mode=0o700)
    code = (
        helpers.declare(op)
        + "try: opjit.get('keytest::plus', 'cpu')\nexcept opjit.errors.LoadError as error: print(error)\n"
    )
    with tmpfs(here, "noexec"):
        for _ in range(2):
            done = fresh(code)
            assert "noexec, set OPJIT_CACHE to a directory on another filesystem" in done.stdout
            assert done.stderr == ""
        assert len(helpers.entries(here)) == 1
