"""The thirty faults that a compile cache meets, and the tests that hold each of them: real kills, disks, damage and servers; patched where
they are called are an rmdir that fails (7), a flock that misbehaves (11), equal process ids (14), another torch (16), other clocks (26).

 1  the builder is killed while it holds the lock
        request/test_concurrency.py::test_a_killed_builder_s_waiter_builds_at_once
        store/test_lock.py::test_a_waiter_is_told_whom_it_waits_for_since_when_and_each_step_and_takes_over_from_the_dead
 2  a kill between the library's writing and the manifest's
        store/test_store.py::test_a_builder_killed_before_the_rename_leaves_no_entry_and_nothing_that_blocks
        store/test_store.py::test_old_staging_folders_are_swept_and_fresh_ones_stay
 3  an entry's file cut to nothing, by a byte, or its end zeroed
        store/test_store.py::test_a_bad_entry_gives_one_warning_and_is_rebuilt_and_is_a_silent_hit_then
 4  three bytes overwritten, in the library or in the manifest
        store/test_store.py::test_a_bad_entry_gives_one_warning_and_is_rebuilt_and_is_a_silent_hit_then
        store/test_store.py::test_no_flipped_byte_in_a_manifest_goes_unseen_where_it_matters
 5  a compiler that exits with 0 and leaves nothing good
        cpp_extension/test_extension_key.py::test_a_cxx_compiler_that_lies_is_named_and_nothing_is_published
        builder/test_errors.py::test_a_compiler_that_reports_success_and_leaves_no_library_is_named
 6  a full disk: in staging, in the manifest, in the lock's file, everywhere
        store/test_store.py::test_an_op_works_with_one_warning_when_the_disk_fills_up
        store/test_damage.py::test_a_disk_that_is_full_when_the_manifest_is_written_costs_a_warning
 7  a staging folder that cannot be removed after the publish
        store/test_damage.py::test_a_staging_folder_that_is_busy_costs_nothing
        store/test_damage.py::test_a_staging_folder_that_may_not_be_removed_is_told_of
 8  an op rebuilt whose library another process has mapped
        store/test_damage.py::test_a_rebuild_is_a_new_file_and_who_has_the_old_one_mapped_goes_on
 9  a source or a header edited while the compiler runs
        builder/test_errors.py::test_what_is_edited_while_the_compiler_runs_is_not_stored_under_the_old_key
        cpp_extension/test_dropin.py::test_a_source_that_changes_while_it_is_compiled_is_not_stored
10  sixteen processes at once, one cold key, many rounds
        request/test_concurrency.py::test_64_processes_and_then_16_compile_once_in_each_round_and_read_identical_bytes
        cpp_extension/test_dropin.py::test_processes_that_load_one_extension_at_once_compile_it_once
11  a flock that always succeeds, is not there, or blocks
        store/test_lock.py::test_a_flock_that_always_succeeds_gives_duplicate_builds_and_one_good_entry
        store/test_lock.py::test_a_flock_that_blocks_costs_a_bounded_wait_and_a_warning_and_stops_no_fork
12  a compiler that never makes the same twice, and two builders that race
        request/test_concurrency.py::test_two_builds_that_differ_are_never_mixed
13  a fork while the lock is held; 32 threads that want one op
        store/test_lock.py::test_a_child_that_leaves_the_block_of_its_parent_does_not_free_the_lock
        store/test_lock.py::test_a_child_of_a_holder_that_was_killed_does_not_keep_the_lock
14  a scan while temporary files lie about; two hosts with equal process ids
        store/test_prune.py::test_nothing_that_a_builder_writes_on_its_way_looks_like_an_entry
        store/test_prune.py::test_two_hosts_with_one_process_id_never_share_a_temporary_name
15  a clear or a prune during a look-up, before the dlopen, during a publish
        store/test_prune.py::test_a_cache_that_is_cleared_during_a_look_up_is_a_miss
        cpp_extension/test_dropin.py::test_an_extension_that_is_cleared_between_the_look_and_dlopen_is_built_again
16  another patch, local tag or C++ ABI of torch
        cpp_extension/test_extension_key.py::test_another_build_of_torch_is_another_extension_and_the_old_one_is_not_loaded
        builder/test_binaries.py::test_another_torch_builds_the_same_binaries_under_the_same_keys
17  nvcc swapped for another; a library for another CUDA runtime
        recipe/test_key.py::test_an_nvcc_swapped_at_its_path_is_another_key
        builder/test_errors.py::test_an_nvcc_of_another_major_version_than_torch_s_is_refused_before_it_compiles
18  one toolkit by a link and by its real path; another order of PATH
        recipe/test_key.py::test_a_toolkit_by_a_link_and_by_its_real_path_gives_one_key
        recipe/test_key.py::test_a_compiler_found_by_another_path_gives_one_key
19  two GPU archs and two CPU levels in one home; -march=native
        store/test_store.py::test_two_archs_share_a_cache
        ahead/test_precompile.py::test_cuda_ops_are_built_for_several_archs_without_a_gpu
20  other content under an older or equal date; each field of what is asked for, one at a time
        recipe/test_key.py::test_each_field_of_a_recipe_flips_the_key
        cpp_extension/test_extension_key.py::test_each_field_of_an_extension_flips_the_key
21  one input of the key that cannot be read
        request/test_places.py::test_an_op_with_a_header_that_cannot_be_read_is_built_for_the_process_with_a_warning
        cpp_extension/test_extension_key.py::test_an_extension_with_a_header_that_cannot_be_read_is_built_for_the_process_with_a_warning
22  a folder shared with an older and a newer opjit
        store/test_prune.py::test_what_another_version_of_opjit_keeps_here_is_not_touched
        store/test_store.py::test_an_entry_with_a_wrong_field_in_its_manifest_is_not_used
23  a read-only cache: a hit, then a miss
        request/test_warm_path.py::test_a_hit_in_a_read_only_cache_makes_no_system_call_that_writes
        store/test_store.py::test_a_read_only_cache_serves_hits_silently_and_a_miss_is_built_for_the_process
24  a noexec mount; no HOME, or /; a user without a name
        test_loader.py::test_an_op_in_a_noexec_cache_is_an_error_that_names_the_way_out
        cpp_extension/test_extension_key.py::test_an_extension_in_a_noexec_cache_is_an_error_that_names_the_way_out
25  a cache, a parent of it or a lock that belongs to others, or is a link
        store/test_folders.py::test_what_others_can_swap_is_not_loaded_and_one_warning_says_what_to_do
        store/test_folders.py::test_a_loop_of_links_is_no_cache_and_no_hang
26  a clock set back or forward; entries of 1970 and 2100
        store/test_store.py::test_dates_decide_nothing_about_an_entry
        store/test_prune.py::test_a_fresh_entry_stays_whatever_its_dates_say
27  a size limit reached while entries are in use; a removal that fails
        store/test_prune.py::test_what_was_not_used_for_longest_goes_first_until_the_rest_is_small_enough
        store/test_damage.py::test_a_rebuild_is_a_new_file_and_who_has_the_old_one_mapped_goes_on
28  a remote that answers with an error, late, or never
        share/test_remote.py::test_a_remote_that_fails_costs_one_warning_and_a_moment_and_is_not_asked_again
        share/test_remote.py::test_a_remote_that_takes_no_connections_costs_one_warning
29  a remote that answers with nothing, half, or another key's bytes; half an upload
        store/test_bundle.py::test_a_bundle_that_was_cut_off_is_refused_and_nothing_is_left
        share/test_remote.py::test_a_remote_that_fails_costs_one_warning_and_a_moment_and_is_not_asked_again
30  a remote whose entries are not signed, or not by the right key, or were changed
        share/test_remote.py::test_an_entry_that_is_not_what_a_trusted_key_signed_is_refused_with_one_warning_and_nothing_is_written
        share/test_remote.py::test_nothing_is_parsed_before_its_signature_is_right
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent


def table() -> dict[int, list[str]]:
    """The tests of each fault, from this file's docstring."""
    rows: dict[int, list[str]] = {}
    for text in (__doc__ or "").splitlines()[2:]:
        if found := re.fullmatch(r" ?(\d\d?)  \S.*", text):
            rows[int(found[1])] = tests = []
        elif text.strip():
            tests.append(text.strip())
    return rows


def test_each_of_the_thirty_faults_has_tests_and_each_of_them_exists() -> None:
    rows = table()
    assert list(rows) == list(range(1, 31))
    assert all(rows.values())
    known = {path.relative_to(TESTS).as_posix():
             {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}
             for path in TESTS.rglob("test_*.py")}
    for tests in rows.values():
        for test in tests:
            file, _, name = test.partition("::")
            assert name in known[file], test
