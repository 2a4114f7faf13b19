"""The thirty faults that a compile cache meets, and the tests that hold each of them: real kills, disks, damage and servers; patched where
they are called are an rmdir that fails (7), a flock that misbehaves (11), equal process ids (14), another torch (16), other clocks (26).

 1  the builder is killed while it holds the lock
        test_concurrency.py::test_a_killed_builder_s_waiter_builds_at_once
        test_lock.py::test_a_waiter_takes_over_when_its_holder_is_killed
        test_dropin.py::test_a_builder_that_is_killed_holds_up_nobody
 2  a kill between the library's writing and the manifest's
        test_faults.py::test_a_builder_killed_before_its_manifest_leaves_no_entry_and_its_folder_is_swept_when_old
        test_store.py::test_a_builder_killed_before_the_rename_leaves_no_entry_and_nothing_that_blocks
        test_store.py::test_old_staging_folders_are_swept_and_fresh_ones_stay
        test_concurrency.py::test_a_builder_killed_at_any_moment_leaves_nothing_that_harms
 3  an entry's file cut to nothing, by a byte, or its end zeroed
        test_faults.py::test_a_file_that_lost_its_end_is_moved_aside_and_rebuilt
        test_store.py::test_a_bad_entry_gives_one_warning_and_is_rebuilt_and_is_a_silent_hit_then
 4  three bytes overwritten, in the library or in the manifest
        test_faults.py::test_three_overwritten_bytes_are_a_miss_and_the_next_call_hits
        test_store.py::test_no_flipped_byte_in_a_manifest_goes_unseen_where_it_matters
 5  a compiler that exits with 0 and leaves nothing good
        test_faults.py::test_a_compiler_that_lies_is_named_and_nothing_is_published
        test_faults.py::test_a_cxx_compiler_that_lies_is_named_and_nothing_is_published
        test_errors.py::test_a_compiler_that_reports_success_and_leaves_no_library_is_named
 6  a full disk: in staging, in the manifest, in the lock's file, everywhere
        test_store.py::test_an_op_works_with_one_warning_when_the_disk_fills_up
        test_faults.py::test_a_disk_that_is_full_when_the_manifest_is_written_costs_a_warning
        test_faults.py::test_where_everything_is_full_the_error_says_so
        test_lock.py::test_a_full_filesystem_of_locks_costs_one_warning
 7  a staging folder that cannot be removed after the publish
        test_faults.py::test_a_staging_folder_that_is_busy_costs_nothing
        test_faults.py::test_a_staging_folder_that_may_not_be_removed_is_told_of
 8  an op rebuilt whose library another process has mapped
        test_faults.py::test_a_rebuild_is_a_new_file_and_who_has_the_old_one_mapped_goes_on
        test_store.py::test_a_bad_entry_that_a_process_has_loaded_keeps_working_there
 9  a source or a header edited while the compiler runs
        test_faults.py::test_what_is_edited_while_the_compiler_runs_is_not_stored_under_the_old_key
        test_key.py::test_sources_that_change_while_they_are_compiled_are_not_published
        test_dropin.py::test_a_source_that_changes_while_it_is_compiled_is_not_stored
10  sixteen processes at once, one cold key, many rounds
        test_faults.py::test_16_processes_compile_once_in_each_round_and_read_identical_bytes
        test_concurrency.py::test_64_processes_that_ask_for_one_cold_op_compile_it_once_and_all_get_right_answers
        test_dropin.py::test_eight_processes_compile_once
11  a flock that always succeeds, is not there, or blocks
        test_lock.py::test_a_flock_that_always_succeeds_gives_duplicate_builds_and_one_good_entry
        test_lock.py::test_a_flock_that_is_not_there_costs_each_process_one_warning
        test_lock.py::test_a_flock_that_blocks_costs_a_bounded_wait_and_a_warning_and_stops_no_fork
        test_lock.py::test_an_op_is_built_where_flock_blocks
        test_concurrency.py::test_a_filesystem_without_locks_costs_one_warning
12  a compiler that never makes the same twice, and two builders that race
        test_faults.py::test_two_builds_that_differ_are_never_mixed
13  a fork while the lock is held; 32 threads that want one op
        test_concurrency.py::test_a_child_forked_by_the_holder_of_a_lock_neither_holds_nor_frees_it
        test_lock.py::test_a_child_that_leaves_the_block_of_its_parent_does_not_free_the_lock
        test_lock.py::test_a_child_of_a_holder_that_was_killed_does_not_keep_the_lock
        test_concurrency.py::test_a_child_forked_while_another_thread_builds_can_get_ops_and_has_its_own_settings_back
        test_concurrency.py::test_32_threads_that_ask_for_one_op_compile_it_once
14  a scan while temporary files lie about; two hosts with equal process ids
        test_care.py::test_nothing_that_a_builder_writes_on_its_way_looks_like_an_entry
        test_care.py::test_two_hosts_with_one_process_id_never_share_a_temporary_name
15  a clear or a prune during a look-up, before the dlopen, during a publish
        test_care.py::test_a_cache_that_is_cleared_during_a_look_up_is_a_miss
        test_care.py::test_an_extension_that_is_cleared_between_the_look_and_dlopen_is_built_again
        test_care.py::test_a_cache_that_is_cleared_during_a_publication_gives_a_working_op
        test_care.py::test_a_cache_that_is_removed_under_the_compiler_gives_a_working_op
        test_care.py::test_four_processes_get_what_others_clear_all_the_time
16  another patch, local tag or C++ ABI of torch
        test_faults.py::test_another_build_of_torch_is_another_extension_and_the_old_one_is_not_loaded
        test_binaries.py::test_another_torch_builds_the_same_binaries_under_the_same_keys
17  nvcc swapped for another; a library for another CUDA runtime
        test_faults.py::test_an_nvcc_swapped_at_its_path_is_another_key
        test_faults.py::test_an_nvcc_of_another_major_version_than_torch_s_is_refused_before_it_compiles
        test_faults.py::test_a_library_that_asks_for_another_cuda_runtime_is_refused_before_it_is_opened
        test_load_library.py::test_a_library_for_another_major_version_of_cuda_is_refused
18  one toolkit by a link and by its real path; another order of PATH
        test_faults.py::test_a_toolkit_by_a_link_and_by_its_real_path_gives_one_key
        test_faults.py::test_a_compiler_found_by_another_path_gives_one_key
        test_key.py::test_one_compiler_by_two_paths_gives_one_key
19  two GPU archs and two CPU levels in one home; -march=native
        test_store.py::test_two_archs_share_a_cache
        test_faults.py::test_two_gpu_archs_share_a_cache
        test_faults.py::test_native_stands_for_the_cpu_at_hand
        test_flags.py::test_a_flag_that_would_break_a_promise_is_refused_with_another_way
20  other content under an older or equal date; each field of what is asked for, one at a time
        test_faults.py::test_other_content_of_the_same_size_and_date_flips_the_key
        test_key.py::test_an_older_date_with_other_content_still_flips_the_key
        test_faults.py::test_each_field_of_a_recipe_flips_the_key
        test_faults.py::test_each_field_of_an_extension_flips_the_key
21  one input of the key that cannot be read
        test_faults.py::test_an_op_with_a_header_that_cannot_be_read_is_built_for_the_process_with_a_warning
        test_faults.py::test_an_extension_with_a_header_that_cannot_be_read_is_built_for_the_process_with_a_warning
        test_key.py::test_a_header_that_cannot_be_read_gives_a_key_that_never_comes_again
22  a folder shared with an older and a newer opjit
        test_care.py::test_what_another_version_of_opjit_keeps_here_is_not_touched
        test_store.py::test_an_entry_with_a_wrong_field_in_its_manifest_is_not_used
23  a read-only cache: a hit, then a miss
        test_faults.py::test_a_hit_in_a_read_only_cache_makes_no_system_call_that_writes
        test_store.py::test_a_read_only_cache_serves_hits_silently_and_a_miss_is_built_for_the_process
        test_warm_path.py::test_a_warm_get_writes_nothing_starts_nothing_locks_nothing_and_imports_nothing_heavy
24  a noexec mount; no HOME, or /; a user without a name
        test_faults.py::test_an_op_in_a_noexec_cache_is_loaded_from_a_copy_of_the_user_s_own
        test_faults.py::test_an_extension_in_a_noexec_cache_is_loaded_from_a_copy
        test_faults.py::test_where_everything_is_noexec_the_error_names_the_way_out
        test_faults.py::test_a_user_without_a_name_or_a_home_gets_his_ops
        test_store.py::test_a_user_without_a_home_or_a_name_gets_a_cache_of_his_own
        test_store.py::test_import_never_fails_for_want_of_a_home
25  a cache, a parent of it or a lock that belongs to others, or is a link
        test_folders.py::test_what_others_can_swap_is_not_loaded_and_one_warning_says_what_to_do
        test_folders.py::test_a_loop_of_links_is_no_cache_and_no_hang
        test_store.py::test_a_cache_that_others_can_write_is_not_built_into
        test_concurrency.py::test_a_link_planted_as_a_lock_file_is_not_followed
        test_concurrency.py::test_a_lock_folder_that_is_not_the_user_s_is_not_used
26  a clock set back or forward; entries of 1970 and 2100
        test_store.py::test_dates_decide_nothing_about_an_entry
        test_care.py::test_a_fresh_entry_stays_whatever_its_dates_say
        test_care.py::test_entries_dated_ahead_of_the_clock_do_not_stop_the_others_from_going_nor_stay_for_ever
        test_care.py::test_a_clock_set_back_by_years_keeps_neither_everything_nor_wipes_what_is_fresh
27  a size limit reached while entries are in use; a removal that fails
        test_care.py::test_what_was_not_used_for_longest_goes_first_until_the_rest_is_small_enough
        test_care.py::test_what_a_process_has_loaded_keeps_working_there_when_it_is_pruned
        test_care.py::test_what_cannot_be_removed_is_said_and_the_others_go_all_the_same
        test_care.py::test_a_pruner_that_is_killed_leaves_no_half_of_an_entry
28  a remote that answers with an error, late, or never
        test_remote.py::test_a_remote_that_fails_costs_one_warning_and_a_moment_and_is_not_asked_again
        test_remote.py::test_a_remote_that_refuses_connections_costs_one_warning
        test_remote.py::test_a_remote_that_takes_connections_and_never_answers_costs_one_warning
        test_remote.py::test_a_remote_that_drops_connections_costs_one_warning
        test_remote.py::test_what_is_not_there_is_no_failure
29  a remote that answers with nothing, half, or another key's bytes; half an upload
        test_remote.py::test_an_entry_that_was_cut_off_is_not_used_and_not_kept
        test_remote.py::test_a_remote_that_fails_costs_one_warning_and_a_moment_and_is_not_asked_again
        test_transfer.py::test_a_push_that_is_killed_in_the_middle_leaves_no_half_of_an_entry
30  a remote whose entries are not signed, or not by the right key, or were changed
        test_remote.py::test_an_entry_that_is_not_what_a_trusted_key_signed_is_refused_with_one_warning_and_nothing_is_written
        test_remote.py::test_nothing_is_parsed_before_its_signature_is_right
        test_remote.py::test_a_hostile_library_is_never_opened
        test_transfer.py::test_a_push_says_whether_it_signs
        test_transfer.py::test_nothing_is_pushed_by_a_build
        test_transfer.py::test_a_hostile_pack_leaves_nothing_anywhere_and_every_member_is_named
"""

from __future__ import annotations

import ast
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import opjit
from opjit import backends, extension, files, manifest, removal, schema, targets, toolchain
from opjit.backends import Flags, cpu
from opjit.errors import BuildError, CacheWarning, EntryError, ToolMissing
from opjit.extension import Extension
from opjit.recipe import Recipe
from opjit.store import Entry, Store, verify
from tests import helpers
from tests.helpers import as_root, built, caught, copy_cache, describe, fake_compiler, fresh, mounted, process, program, tmpfs, write_op


def table() -> dict[int, list[str]]:
    """The tests of each fault, from this file's docstring."""
    assert __doc__ is not None
    rows: dict[int, list[str]] = {}
    for text in __doc__.splitlines()[2:]:
        found = re.fullmatch(r" ?(\d\d?)  \S.*", text)
        if found:
            number = int(found[1])
            assert number not in rows
            rows[number] = []
        elif text.strip():
            rows[number].append(text.strip())
    return rows


def test_each_of_the_thirty_faults_has_tests_and_each_of_them_exists() -> None:
    rows = table()
    assert list(rows) == list(range(1, 31))
    assert all(rows.values())
    known = {path.name: {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}
             for path in Path(__file__).parent.glob("test_*.py")}
    for tests in rows.values():
        for test in tests:
            file, _, name = test.partition("::")
            assert name in known[file], test


# --- what the tests share ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(built_once: tuple[Path, Entry], here: Path) -> tuple[Path, Entry]:
    """The op, and a cache of its own that holds the entry already."""
    return built_once[0], copy_cache(built_once[1], here)


GET = "print(opjit.get('keytest::plus', 'cpu')(torch.ones(1)).tolist())\n"
EXTENSION = 'extern "C" int value() { return 5; }\n'


def cxx_source(folder: Path, text: str = EXTENSION) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plain.cpp").write_text(text)
    return str(folder / "plain.cpp")


def load(path: str, *flags: str, name: str = "faults_extension") -> str:
    found = opjit.load(name, path, extra_cflags=list(flags), is_python_module=False)
    assert isinstance(found, str)
    return found


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- 2: a kill between two files -----------------------------------------------------------------------------------------------------


def test_a_builder_killed_before_its_manifest_leaves_no_entry_and_its_folder_is_swept_when_old(op: Path, here: Path) -> None:
    code = helpers.declare(op) + (
        "import os, signal\nfrom opjit import files\nplain = files.write_synced\n"
        "def write(path, content):\n"
        "    if path.name == 'manifest.json': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    plain(path, content)\n"
        "files.write_synced = write\n") + GET
    killed = subprocess.run([sys.executable, "-c", code], env=helpers.environment(), check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = (here / "v1" / "staging").iterdir()
    assert [path.suffix for path in (left / "entry").iterdir() if path.suffix == ".so"] == [".so"]
    assert helpers.entries(here) == []
    then = time.time() - 2 * 86400
    os.utime(left, (then, then))
    assert caught(op, here).warnings == []
    assert list((here / "v1" / "staging").iterdir()) == []


# --- 3, 4: damage --------------------------------------------------------------------------------------------------------------------


def zero_tail(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-min(512, path.stat().st_size // 2), os.SEEK_END)
        file.write(bytes(min(512, path.stat().st_size // 2)))


LOSSES: dict[str, Callable[[Path], None]] = {
    "all": lambda path: os.truncate(path, 0),
    "a-byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "tail-zeroed": zero_tail,
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["keytest.plus.so", "manifest.json"])
def test_a_file_that_lost_its_end_is_moved_aside_and_rebuilt(copied: tuple[Path, Entry], here: Path, name: str, loss: str) -> None:
    op, entry = copied
    good = entry.library.read_bytes()
    if (name, loss) == ("manifest.json", "a-byte"):
        os.truncate(entry.folder / name, (entry.folder / name).stat().st_size - 1)  # the newline: nothing is lost with that
    LOSSES[loss](entry.folder / name)
    bad = (entry.folder / name).read_bytes()
    after = caught(op, here)
    assert len(after.warnings) == 1
    assert str(entry.folder) in after.warnings[0]
    assert (after.entry, entry.library.read_bytes()) == (entry, good)
    assert [(aside / name).read_bytes() for aside in (here / "v1" / "staging").iterdir()] == [bad]
    assert caught(op, here) == helpers.Caught(entry, [])


def overwrite(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        before = file.read(3)
        file.seek(at)
        file.write(bytes(byte ^ 0x15 for byte in before))


@pytest.mark.parametrize("where", ["first", "middle", "last", "key", "sha256", "schema"])
def test_three_overwritten_bytes_are_a_miss_and_the_next_call_hits(copied: tuple[Path, Entry], here: Path, where: str) -> None:
    op, entry = copied
    good = {path.name: path.read_bytes() for path in entry.folder.iterdir()}
    size, described = len(good[entry.library.name]), good[manifest.NAME]
    if where in ("first", "middle", "last"):
        overwrite(entry.library, {"first": 0, "middle": size // 2, "last": size - 3}[where])
    else:
        overwrite(entry.folder / manifest.NAME, described.index(f'"{where}": "'.encode()) + len(where) + 6)
    after = caught(op, here)
    assert len(after.warnings) == 1
    assert after.entry == entry
    assert entry.library.read_bytes() == good[entry.library.name]
    assert caught(op, here) == helpers.Caught(entry, [])


# --- 5: compilers that lie -----------------------------------------------------------------------------------------------------------


OUTPUT = 'out=; previous=; for word in "$@"; do if [ "$previous" = -o ]; then out=$word; fi; previous=$word; done'
LIES = {
    "missing": 'rm -f "$out"',
    "empty": ': > "$out"',
    "no-elf": 'echo hello > "$out"',
    "no-symbols": "echo | '{compiler}' -shared -nostdlib -Wl,-rpath,'$ORIGIN' -o \"$out\" -x c -",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_compiler_that_lies_is_named_and_nothing_is_published(
    op: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    done = LIES[lie].format(compiler=helpers.real_compiler())
    fake = fake_compiler(tmp_path / "cc", after=f"if {helpers.LINKS}; then {OUTPUT}; {done}; code=0; fi")
    monkeypatch.setenv("CC", str(fake))
    with pytest.raises(BuildError, match="reported success") as refused:
        built(op, here)  # without a warning: it is not the cache's fault
    assert str(fake) in str(refused.value)
    assert refused.value.command is not None
    assert str(fake) in refused.value.command
    assert helpers.entries(here) == []


@pytest.mark.parametrize("lie", ["missing", "empty", "no-elf"])
def test_a_cxx_compiler_that_lies_is_named_and_nothing_is_published(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    links = 'case " $* " in *" -shared "*) true;; *) false;; esac'
    fake = program(tmp_path / "bin" / "c++", f"#!/bin/sh\n'{shutil.which('c++')}' \"$@\"\ncode=$?\n"
                                             f"if {links}; then {OUTPUT}; {LIES[lie]}; code=0; fi\nexit $code\n")
    monkeypatch.setenv("CXX", str(fake))
    with pytest.raises(BuildError, match="reported success") as refused:
        load(cxx_source(tmp_path / "source"))
    assert str(fake) in str(refused.value)
    assert helpers.entries(here) == []


# --- 6: a full disk ------------------------------------------------------------------------------------------------------------------


@as_root
def test_a_disk_that_is_full_when_the_manifest_is_written_costs_a_warning(
    op: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = files.write_synced

    def write(path: Path, content: bytes) -> None:
        if path.name == manifest.NAME and path.is_relative_to(here):
            subprocess.run(["dd", "if=/dev/zero", f"of={here}/filler", "bs=4k"], check=False, stderr=subprocess.DEVNULL)
            assert os.statvfs(here).f_bavail == 0
        plain(path, content)

    monkeypatch.setattr(files, "write_synced", write)
    here.mkdir(mode=0o700)
    with tmpfs(here, "size=4m"):
        after = caught(op, here)
        assert len(after.warnings) == 1
        assert "No space left on device" in after.warnings[0]
        assert after.entry.folder.is_relative_to(tmp_path / "tmp")
        assert helpers.entries(here) == []
        assert not list((here / "v1").glob("keytest.plus/*/*"))


@as_root
@pytest.mark.parametrize("size", [8, 60])
def test_where_everything_is_full_the_error_says_so(op: Path, tmp_path: Path, size: int) -> None:
    full = tmp_path / "full"
    full.mkdir(mode=0o700)
    with tmpfs(full, f"size={size}k"):
        (full / "tmp").mkdir()
        code = helpers.declare(op) + (
            "warnings.simplefilter('ignore')\n"
            "try: opjit.get('keytest::plus', 'cpu')\n"
            "except opjit.errors.OpjitError as error: print(str(error).splitlines()[0])\n")
        done = fresh(code, {"OPJIT_CACHE": str(full / "cache"), "TMPDIR": str(full / "tmp")})
        assert "No space left on device" in done.stdout
        assert helpers.entries(full / "cache") == []


# --- 7: a staging folder that stays --------------------------------------------------------------------------------------------------


def refuse_rmdir(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def rmdir(path: Any, *, dir_fd: int | None = None) -> None:
        raise OSError(code, os.strerror(code), os.fspath(path))

    monkeypatch.setattr(os, "rmdir", rmdir)


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ENOTEMPTY], ids=["EBUSY", "ENOTEMPTY"])
def test_a_staging_folder_that_is_busy_costs_nothing(op: Path, here: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    with monkeypatch.context() as patched:
        refuse_rmdir(patched, code)
        first = caught(op, here)
    assert first.warnings == []
    assert caught(op, here) == first
    (left,) = (here / "v1" / "staging").iterdir()
    os.utime(left, (1, 1))
    (op / "amount.h").write_text("#define AMOUNT 2.0f\n")
    assert caught(op, here).warnings == []
    assert list((here / "v1" / "staging").iterdir()) == [], "it is swept later, and the folder above it stays"
    assert len(helpers.entries(here)) == 2


def test_a_staging_folder_that_may_not_be_removed_is_told_of(op: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        refuse_rmdir(patched, errno.EACCES)
        first = caught(op, here)
    assert len(first.warnings) == 1
    assert "Permission denied" in first.warnings[0]
    assert str(here / "v1" / "staging") in first.warnings[0]
    assert caught(op, here) == helpers.Caught(first.entry, [])


# --- 8: a library in use -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["damaged", "cleared"])
def test_a_rebuild_is_a_new_file_and_who_has_the_old_one_mapped_goes_on(copied: tuple[Path, Entry], here: Path, how: str) -> None:
    op, entry = copied
    code = helpers.declare(op) + "import sys\nplus = opjit.get('keytest::plus', 'cpu')\n" + (
        "for line in sys.stdin: print(plus(torch.full((3,), float(line))).tolist(), flush=True)\n")
    with process(code) as user:

        def ask(number: float) -> str:
            assert user.stdin is not None
            assert user.stdout is not None
            user.stdin.write(f"{number}\n")
            user.stdin.flush()
            return user.stdout.readline()

        assert ask(1) == "[2.0, 2.0, 2.0]\n"
        inode = entry.library.stat().st_ino
        if how == "damaged":
            (entry.folder / manifest.NAME).write_text("")
            assert len(caught(op, here).warnings) == 1
        else:
            removal.clear(Store(here))
            assert caught(op, here).warnings == []
        assert f" {inode} " in Path(f"/proc/{user.pid}/maps").read_text()
        assert entry.library.stat().st_ino != inode
        assert ask(2) == "[3.0, 3.0, 3.0]\n"


# --- 9: edits while it is compiled ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "when"), [("plus.c", "before"), ("plus.c", "after"), ("amount.h", "after")])
def test_what_is_edited_while_the_compiler_runs_is_not_stored_under_the_old_key(
    op: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, when: str
) -> None:
    old = describe(op).key
    edit = f"if {helpers.COMPILES}; then sed -i 's/1.0f/5.0f/; s/AMOUNT;/AMOUNT + 4.0f;/' '{op}/{name}'; fi"
    with monkeypatch.context() as patched:
        patched.setenv("CC", str(fake_compiler(tmp_path / "cc", **{when: edit})))
        with pytest.raises(BuildError, match="changed while they were compiled; ask for it again"):
            built(op, here)
    assert helpers.entries(here) == []
    after = caught(op, here)
    assert after.warnings == []
    assert after.entry.key != old
    assert fresh(helpers.declare(op) + GET).stdout == "[6.0]\n"


# --- 10, 12: many at once ------------------------------------------------------------------------------------------------------------

# Forks children that start together; each runs `work`, which returns what is printed as one of a sorted list.
TOGETHER = """
import hashlib, json, os, sys
from torch.utils import cpp_extension  # before the forks, to stay light
from opjit import manifest
torch.set_num_threads(1)

def together(count, work):
    go, told = os.pipe(), os.pipe()
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            try:
                os.close(go[1])
                os.read(go[0], 1)  # returns when the parent closes the other end
                warnings.simplefilter("error")
                os.write(told[1], (work() + "\\n").encode())
                os._exit(0)
            except BaseException as error:
                print(type(error), error, file=sys.stderr, flush=True)
                os._exit(4)
        children.append(child)
    os.close(go[0]), os.close(go[1]), os.close(told[1])
    with open(told[0]) as file:
        lines = sorted(file.read().split())
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * count
    return lines
"""


def test_16_processes_compile_once_in_each_round_and_read_identical_bytes(
    op: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, rounds = tmp_path / "log", 4
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path / "cc", before=f"if {helpers.COMPILES}; then echo >> '{log}'; fi")))
    code = helpers.declare(op) + TOGETHER + f"""
folder, cache = Path({str(op)!r}), Path({str(here)!r})
for turn in range({rounds}):
    (folder / "amount.h").write_text(f"#define AMOUNT {{turn}}.0f\\n")

    def work():
        assert opjit.get("keytest::plus", "cpu")(torch.ones(2)).tolist() == [turn + 1.0] * 2
        (mapped,) = {{line.split()[-1] for line in open("/proc/self/maps") if line.rstrip().endswith("keytest.plus.so")}}
        return hashlib.sha256(Path(mapped).read_bytes()).hexdigest()

    print(len(set(together(16, work))), flush=True)
"""
    assert fresh(code, flags=("-W", "ignore::DeprecationWarning")).stdout == "1\n" * rounds
    assert len(log.read_text()) == rounds
    assert len(helpers.entries(here)) == rounds


def test_two_builds_that_differ_are_never_mixed(op: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a lock, so that they do race; one more process looks at every entry from the moment that it appears."""
    log, rounds = tmp_path / "log", 5
    noise = "-Wl,--build-id=0x$(od -An -N8 -tx8 /dev/urandom | tr -d ' ')"
    monkeypatch.setenv("CC", str(program(tmp_path / "cc", f"""\
        #!/bin/sh
        if {helpers.LINKS}; then
            {OUTPUT}
            '{helpers.real_compiler()}' "$@" {noise} && sha256sum < "$out" >> '{log}'
        else
            exec '{helpers.real_compiler()}' "$@"
        fi
        """)))
    code = "import fcntl\nfcntl.flock = lambda descriptor, operation: None\n" + helpers.declare(op) + TOGETHER + f"""
folder, cache = Path({str(op)!r}), Path({str(here)!r})

def agrees(entry):
    described = json.loads((entry / "manifest.json").read_bytes())
    assert hashlib.sha256((entry / described["library"]).read_bytes()).hexdigest() == described["sha256"], entry
    return described["sha256"]

watcher = os.fork()
if watcher == 0:
    while not (cache / "done").exists():
        for entry in cache.glob("v1/keytest.plus/*/*"):
            agrees(entry)
    os._exit(0)
for turn in range({rounds}):
    (folder / "amount.h").write_text(f"#define AMOUNT {{turn}}.0f\\n")

    def work():
        assert opjit.get("keytest::plus", "cpu")(torch.ones(2)).tolist() == [turn + 1.0] * 2
        (mapped,) = {{line.split()[-1] for line in open("/proc/self/maps") if line.rstrip().endswith("keytest.plus.so")}}
        return agrees(Path(mapped).parent)

    print(len(set(together(2, work))), flush=True)
(cache / "done").touch()
print(os.waitpid(watcher, 0)[1], flush=True)
"""
    assert fresh(code, flags=("-W", "ignore::DeprecationWarning")).stdout == "1\n" * rounds + "0\n"
    made = log.read_text().split()
    assert len(set(made) - {"-"}) > rounds, "no two builders raced"
    assert {json.loads((entry / manifest.NAME).read_bytes())["sha256"] for entry in helpers.entries(here)} <= set(made)


# --- 16 to 20: what a key stands for -------------------------------------------------------------------------------------------------


def test_another_build_of_torch_is_another_extension_and_the_old_one_is_not_loaded(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cxx_source(tmp_path / "source")
    changes: list[tuple[Any, str, object]] = [
        (torch, "__version__", "2.13.0+cu124"), (torch, "__version__", "2.13.0+cu121"), (torch, "__version__", "2.13.1"),
        (torch.version, "git_version", "0" * 40), (torch.version, "cuda", "12.1"),
        (torch._C, "_GLIBCXX_USE_CXX11_ABI", not torch._C._GLIBCXX_USE_CXX11_ABI)]
    first = load(path)
    monkeypatch.setenv("OPJIT_OFFLINE", "1")
    shelves = set()
    for owner, name, value in changes:
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            with pytest.raises(BuildError, match="is in no cache"):
                load(path)
            shelves.add(described(path).shelf(Store(here)))
    assert len(shelves) == len(changes)
    assert load(path) == first


def described(path: str, *flags: str) -> Extension:
    arguments = {"name": "faults_extension", "sources": path, "extra_cflags": list(flags), "extra_cuda_cflags": None, "extra_ldflags": None,
                 "extra_include_paths": None, "with_cuda": None, "is_python_module": False, "build_directory": None}
    return extension.describe(arguments, None)


def fake_nvcc(path: Path, build_version: str) -> None:
    release = re.sub(r"V(\d+\.\d+).*", r"\1", build_version)
    program(path.with_name("new"), f"""\
        #!/bin/sh
        case "$*" in
        --version) echo 'Cuda compilation tools, release {release}, {build_version}';;
        *) echo '#$ TOP={path.parents[1]}' >&2;;
        esac
        """).replace(path)


def test_an_nvcc_swapped_at_its_path_is_another_key(op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    keys, runtimes = [], []
    for build_version in ("V12.9.86", "V13.0.48", "V13.0.88"):
        fake_nvcc(nvcc, build_version)
        for _ in range(2):
            found = toolchain.require_nvcc(tmp_path / "notes")
            target = targets.named("sm_90", backends.for_device("cuda"), found.version)
            identity = toolchain.identity(toolchain.require_compiler(None), found)
            keys.append(describe(op, target, compiler=identity).key)
            runtimes.append(target.folder)
    assert len(set(keys)) == 3
    assert runtimes == ["sm_90.cuda12"] * 2 + ["sm_90.cuda13"] * 4


def test_an_nvcc_of_another_major_version_than_torch_s_is_refused_before_it_compiles(
    op: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc(tmp_path / "toolkit" / "bin" / "nvcc", "V12.9.86")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    target = targets.named("sm_90", backends.for_device("cuda"), "13.0")
    with pytest.raises(ToolMissing, match=r"wanted for cuda sm_90\.cuda13, and the nvcc in .*toolkit is that of CUDA 12\.9"):
        built(op, here, target)
    assert not here.exists() or helpers.entries(here) == []


@pytest.fixture(scope="module")
def cuda_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Entry]]:
    """An op and its entries for two GPUs, in one cache."""
    folder = write_op(tmp_path_factory.mktemp("cuda") / "plus")
    return folder, [built(folder, folder.parent / "cache", helpers.cuda_target(arch)) for arch in ("sm_80", "sm_90")]


@pytest.mark.nvcc
def test_a_library_that_asks_for_another_cuda_runtime_is_refused_before_it_is_opened(
    cuda_once: tuple[Path, list[Entry]], here: Path
) -> None:
    target = helpers.cuda_target("sm_90")
    entry = copy_cache(cuda_once[1][1], here)
    major = int(target.runtime.removeprefix("cuda"))
    ours, other = (f"libcudart.so.{number}\0".encode() for number in (major, major - 1))
    content = entry.library.read_bytes().replace(ours, other)
    described = manifest.parse((entry.folder / manifest.NAME).read_bytes())._replace(sha256=hashlib.sha256(content).hexdigest())
    for name, text in ((entry.library.name, content), (manifest.NAME, described.dump())):
        (entry.folder / name).unlink()
        (entry.folder / name).write_bytes(text)
    with pytest.raises(EntryError, match=r"asks for libcudart\.so\.\d+"):
        verify(entry.folder, target)
    with pytest.warns(CacheWarning, match="libcudart"):
        assert Store(here).find(describe(cuda_once[0], target)) is None


@pytest.mark.nvcc
def test_two_gpu_archs_share_a_cache(cuda_once: tuple[Path, list[Entry]]) -> None:
    op, (first, second) = cuda_once
    root = Store(first.folder.parents[3])
    assert first.folder.parent != second.folder.parent
    assert [root.find(describe(op, helpers.cuda_target(arch))) for arch in ("sm_80", "sm_90")] == [first, second]


@pytest.mark.nvcc
def test_a_toolkit_by_a_link_and_by_its_real_path_gives_one_key(op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = toolchain.require_nvcc(None)
    (tmp_path / "cuda").symlink_to(real.root)
    (tmp_path / "bin").symlink_to(Path(real.root) / "bin")
    target, keys = helpers.cuda_target("sm_90"), set()
    for home, path in ((real.root, None), (str(tmp_path / "cuda"), None), (None, f"{tmp_path}/bin"), (None, f"{real.root}/bin")):
        with monkeypatch.context() as patched:
            for name in ("CUDA_HOME", "CUDA_PATH"):
                patched.delenv(name, raising=False)
            if home:
                patched.setenv("CUDA_HOME", home)
            if path:
                patched.setenv("PATH", f"{path}{os.pathsep}{os.environ['PATH']}")
            assert toolchain.require_nvcc(None).root == real.root
            keys.add(describe(op, target).key)
    assert len(keys) == 1


def test_a_compiler_found_by_another_path_gives_one_key(op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gcc").symlink_to(helpers.real_compiler())
    keys = set()
    real, parts = os.path.dirname(helpers.real_compiler()), os.environ["PATH"].split(os.pathsep)
    for path in ([real, *parts], [str(tmp_path / "bin"), *parts], [real, *reversed(parts)]):
        with monkeypatch.context() as patched:
            patched.setenv("PATH", os.pathsep.join(path))
            found = toolchain.require_compiler(tmp_path / "notes")
            keys.add(describe(op, compiler=toolchain.identity(found, None)).key)
    assert len(keys) == 1


def test_native_stands_for_the_cpu_at_hand(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cxx_source(tmp_path / "source")
    first = load(path, "-march=native")
    monkeypatch.setenv("OPJIT_OFFLINE", "1")
    plain = described(path).key
    with monkeypatch.context() as patched:
        patched.setattr(backends.cpu, "identity", lambda: "another CPU")
        with pytest.raises(BuildError, match="is in no cache"):
            load(path, "-march=native")
        assert described(path).key == plain, "without the flag the CPU is nobody's business"
    assert load(path, "-march=native") == first


def test_other_content_of_the_same_size_and_date_flips_the_key(op: Path) -> None:
    keys = set()
    for amount in range(3):
        (op / "amount.h").write_text(f"#define AMOUNT {amount}.0f\n")
        os.utime(op / "amount.h", ns=(10**18, 10**18))
        keys.add(describe(op).key)
    assert len(keys) == 3


def test_each_field_of_a_recipe_flips_the_key(op: Path, tmp_path: Path) -> None:
    cuda = targets.named("sm_90", backends.for_device("cuda"), "13.0")
    recipe = describe(op, cuda, compiler={"cc.version": "gcc version 0", "cc.machine": "here", "nvcc.build": "V13.0.0"})
    given = recipe.flags
    flags = {"c": given._replace(c=(*given.c, "-more")), "cuda": given._replace(cuda=(*given.cuda, "-more")),
             "link": given._replace(link=(*given.link, "-more")), "stubs": given._replace(stubs=(*given.stubs, "more"))}
    assert flags.keys() == set(Flags._fields) - {"needed", "include"}  # the one follows from the arch, the other's files are inputs
    changed: dict[str, list[Recipe]] = {
        "schema": [recipe._replace(schema=schema.parse("keytest::plus(Tensor y) -> Tensor"))],
        "target": [recipe._replace(target=cuda._replace(backend=helpers.cpu())), recipe._replace(target=cuda._replace(arch="sm_80")),
                   recipe._replace(target=cuda._replace(runtime="cuda12"))],
        "source": [recipe._replace(source=op / "other.cu")],
        "inputs": [recipe._replace(inputs={**recipe.inputs, name: "0" * 64}) for name in [*recipe.inputs, "one_more.h"]],
        "flags": [recipe._replace(flags=more) for more in flags.values()],
        "toolchain": [recipe._replace(toolchain={**(recipe.toolchain or {}), name: "?"}) for name in [*(recipe.toolchain or {}), "ld"]],
    }
    assert changed.keys() == set(Recipe._fields)
    every = [recipe, *(one for several in changed.values() for one in several)]
    assert len({one.key for one in every}) == len(every)


def test_each_field_of_an_extension_flips_the_key(tmp_path: Path) -> None:
    one = described(cxx_source(tmp_path / "source"), "-DVALUE=1")
    changed = {
        "name": one._replace(name="another"),
        "sources": one._replace(sources=(*one.sources, str(tmp_path / "source" / "more.cpp"))),
        "inline": one._replace(inline={"cpp_sources": ["0" * 64]}),
        "flags": one._replace(flags={**one.flags, "c": ["-DVALUE=2"]}),
        "program": one._replace(program=True),
        "archs": one._replace(archs="9.0"),
        "inputs": one._replace(inputs={**one.inputs, "plain.cpp": "0" * 64}),
        "toolchain": one._replace(toolchain={**(one.toolchain or {}), "cxx.version": "?"}),
    }
    # The content of these is in `inputs`, `inline` or `sources`; where it lies is not part of a key.
    assert changed.keys() == set(Extension._fields) - {"roots", "texts", "libraries", "include"}
    assert len({one.key, *(another.key for another in changed.values())}) == len(changed) + 1


# --- 21: an input that cannot be read ------------------------------------------------------------------------------------------------

UNREADABLE = "/proc/self/mem"  # a file; reading it is an error, for root too


def test_an_op_with_a_header_that_cannot_be_read_is_built_for_the_process_with_a_warning(op: Path, here: Path) -> None:
    (op / "amount.h").write_text('#define AMOUNT 1.0f\n#if 0\n#include "broken.h"\n#endif\n')
    (op / "broken.h").symlink_to(UNREADABLE)
    code = helpers.declare(op) + "warnings.simplefilter('always')\n" + GET
    for _ in range(2):
        done = fresh(code)
        assert done.stdout == "[2.0]\n"
        assert done.stderr.count("CacheWarning") == 1
        assert "broken.h cannot be read (Input/output error)" in done.stderr
    assert helpers.entries(here) == []
    (op / "broken.h").unlink()
    (op / "broken.h").write_text("")
    assert fresh(code).stderr == ""
    assert len(helpers.entries(here)) == 1


def test_an_extension_with_a_header_that_cannot_be_read_is_built_for_the_process_with_a_warning(here: Path, tmp_path: Path) -> None:
    path = cxx_source(tmp_path / "source", f'#if 0\n#include "broken.h"\n#endif\n{EXTENSION}')
    (tmp_path / "source" / "broken.h").symlink_to(UNREADABLE)
    with pytest.warns(CacheWarning, match=r"broken\.h cannot be read") as seen:
        library = load(path)
    assert len(seen) == 1
    assert not Path(library).is_relative_to(here)
    assert helpers.entries(here) == []


# --- 23, 24: caches that cannot be written, run or named -----------------------------------------------------------------------------

WRITES = ("creat", "mkdir", "mkdirat", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "link", "linkat", "symlink",
          "symlinkat", "truncate", "ftruncate", "fallocate", "chmod", "fchmod", "fchmodat", "chown", "fchown", "lchown", "fchownat",
          "utime", "utimes", "utimensat", "futimesat", "mknod", "mknodat", "flock", "fsync", "setxattr", "fsetxattr", "write", "pwrite64",
          "writev")


@as_root
@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")
def test_a_hit_in_a_read_only_cache_makes_no_system_call_that_writes(op: Path, here: Path, tmp_path: Path) -> None:
    get = ("os.path.exists('/begins')\nplus = opjit.get('keytest::plus', 'cpu')\nos.path.exists('/ends')\n"
           "print(plus(torch.ones(1)).tolist())\n")
    code = "import os\n" + helpers.declare(op) + get
    trace = tmp_path / "trace"

    def traced() -> list[str]:
        """What was written or locked between the two marks."""
        done = subprocess.run(["strace", "-f", "-qq", "-o", str(trace), sys.executable, "-c", code], check=False, capture_output=True,
                              text=True, env=helpers.environment({"PYTHONDONTWRITEBYTECODE": "1", "HOME": "/nonexistent"}), timeout=120)
        if "ptrace" in done.stderr:
            pytest.skip(f"strace may not trace here: {done.stderr.strip()[:100]}")
        assert done.stdout == "[2.0]\n", done.stderr
        calls = trace.read_text(errors="replace").split("/begins", 1)[1].split("/ends", 1)[0].splitlines()[1:-1]
        assert any("manifest.json" in call for call in calls)
        writes = re.compile(rf"\d+ +({'|'.join(WRITES)})\(|.*O_(WRONLY|RDWR|CREAT|TRUNC)")
        return [call for call in calls if writes.match(call)]

    assert any("flock" in call for call in traced()), "the trace sees nothing: this was a miss"
    with mounted(here, "--bind", str(here)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(here)], check=True)
        before = helpers.snapshot(here), helpers.snapshot(tmp_path / "tmp")
        assert traced() == []
        assert (helpers.snapshot(here), helpers.snapshot(tmp_path / "tmp")) == before


@as_root
def test_an_op_in_a_noexec_cache_is_loaded_from_a_copy_of_the_user_s_own(op: Path, here: Path, tmp_path: Path) -> None:
    here.mkdir(mode=0o700)
    code = helpers.declare(op) + "warnings.simplefilter('always')\n" + GET
    with tmpfs(here, "noexec"):
        for _ in range(2):
            done = fresh(code)
            assert done.stdout == "[2.0]\n"
            assert done.stderr.count("CacheWarning") == 1
            assert "set OPJIT_CACHE to a folder" in done.stderr
        (entry,) = helpers.entries(here)
        own = tmp_path / "tmp" / f"opjit-{os.geteuid()}"
        (copy,) = helpers.entries(own / "cache")
        assert own.stat().st_mode & 0o777 == 0o700
        assert digest(copy / "keytest.plus.so") == digest(entry / "keytest.plus.so")
        own.chmod(0o777)  # others could have written there
        refused = fresh(code.replace("print(", "try: print(") + "except opjit.errors.LoadError as error: print(error)\n")
        assert "can be written by others" in refused.stdout
        assert "OPJIT_CACHE" in refused.stdout


@as_root
def test_an_extension_in_a_noexec_cache_is_loaded_from_a_copy(here: Path, tmp_path: Path) -> None:
    here.mkdir(mode=0o700)
    with tmpfs(here, "noexec"):
        with pytest.warns(CacheWarning, match="OPJIT_CACHE"):
            library = load(cxx_source(tmp_path / "source"))
        assert len(helpers.entries(here)) == 1
        assert Path(library).is_relative_to(tmp_path / "tmp")


@as_root
def test_where_everything_is_noexec_the_error_names_the_way_out(op: Path, tmp_path: Path) -> None:
    place = tmp_path / "noexec"
    place.mkdir(mode=0o700)
    code = helpers.declare(op) + ("warnings.simplefilter('ignore')\ntry: opjit.get('keytest::plus', 'cpu')\n"
                                  "except opjit.errors.LoadError as error: print(error)\n")
    with tmpfs(place, "noexec"):
        (place / "tmp").mkdir()
        for cache in (place / "cache", place / "tmp" / f"opjit-{os.geteuid()}" / "cache"):
            told = fresh(code, {"OPJIT_CACHE": str(cache), "TMPDIR": str(place / "tmp")}).stdout
            assert "set OPJIT_CACHE to a folder of yours on a filesystem without noexec" in told


@as_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")
@pytest.mark.parametrize("home", [None, "/"])
def test_a_user_without_a_name_or_a_home_gets_his_ops(op: Path, tmp_path: Path, home: str | None) -> None:
    """User 54321 is not in the passwd file, and may read what he needs by a capability."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    as_nobody = ("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", "--inh-caps=+dac_read_search",
                 "--ambient-caps=+dac_read_search")
    allowed = subprocess.run([*as_nobody, sys.executable, "-c", "import os"], check=False, capture_output=True, text=True, cwd="/")
    if allowed.returncode != 0:
        pytest.skip(f"no other user can run this Python: {allowed.stderr.strip()[:200]}")
    code = "import os\n" + helpers.declare(op) + "warnings.simplefilter('always')\n" + GET
    changes = {"HOME": home, "OPJIT_CACHE": None, "XDG_CACHE_HOME": None, "TMPDIR": str(tmp_path / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = fresh(code, changes, before=as_nobody, cwd=Path("/"))
    assert done.stdout == "[2.0]\n"
    own = tmp_path / "tmp" / "opjit-54321"
    assert own.stat().st_mode & 0o777 == 0o700
    if home is None:
        assert "CacheWarning" not in done.stderr
        assert len(helpers.entries(own / "cache")) == 1
    else:
        assert done.stderr.count("CacheWarning") == 1
        assert "OPJIT_CACHE" in done.stderr


def test_where_nothing_tells_the_cpu_s_flags_ops_are_built_for_the_lowest_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a chroot without /proc."""

    def missing(path: str, mode: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(cpu, "open", missing, raising=False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    cpu._host_arch.cache_clear()
    try:
        assert cpu.Cpu().host_arch() == "x86-64-v2"
    finally:
        cpu._host_arch.cache_clear()


@pytest.mark.parametrize(("name", "changes"), [("\udcff", {}), ("é", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})])
def test_a_cache_whose_path_cannot_be_written_into_a_build_file_costs_a_warning(
    name: str, changes: dict[str, str], op: Path, tmp_path: Path
) -> None:
    done = fresh(helpers.declare(op) + GET, {"OPJIT_CACHE": str(tmp_path / name), **changes})
    assert done.stdout == "[2.0]\n"
    assert done.stderr.count("CacheWarning: the cache cannot be used, so keytest::plus is built for this process only") == 1
