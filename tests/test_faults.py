"""The thirty faults that a compile cache meets, and the tests that hold each of them: real kills, disks, damage and servers; patched where
they are called are an rmdir that fails (7), a flock that misbehaves (11), equal process ids (14), another torch (16), other clocks (26).

 1  the builder is killed while it holds the lock
        request/test_concurrency.py::test_a_killed_builder_s_waiter_builds_at_once
        store/test_lock.py::test_a_waiter_is_told_whom_it_waits_for_since_when_and_each_step_and_takes_over_from_the_dead
 2  a kill between the library's writing and the manifest's
        store/test_store.py::test_a_builder_killed_before_the_rename_leaves_no_entry_and_nothing_that_blocks
        store/test_store.py::test_old_staging_folders_are_swept_and_fresh_ones_stay
        request/test_concurrency.py::test_a_builder_killed_at_any_moment_leaves_nothing_that_harms
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
        request/test_places.py::test_where_everything_is_full_the_error_says_so
        store/test_lock.py::test_a_full_filesystem_of_locks_costs_one_warning
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
        store/test_lock.py::test_a_filesystem_without_locks_costs_one_warning
12  a compiler that never makes the same twice, and two builders that race
        request/test_concurrency.py::test_two_builds_that_differ_are_never_mixed
13  a fork while the lock is held; 32 threads that want one op
        store/test_lock.py::test_a_child_that_leaves_the_block_of_its_parent_does_not_free_the_lock
        store/test_lock.py::test_a_child_of_a_holder_that_was_killed_does_not_keep_the_lock
        request/test_concurrency.py::test_while_a_thread_builds_the_environment_stays_as_it_is_and_a_forked_child_can_get_ops
        request/test_concurrency.py::test_32_threads_that_ask_for_one_op_compile_it_once
14  a scan while temporary files lie about; two hosts with equal process ids
        store/test_prune.py::test_nothing_that_a_builder_writes_on_its_way_looks_like_an_entry
        store/test_prune.py::test_two_hosts_with_one_process_id_never_share_a_temporary_name
15  a clear or a prune during a look-up, before the dlopen, during a publish
        store/test_prune.py::test_a_cache_that_is_cleared_during_a_look_up_is_a_miss
        cpp_extension/test_dropin.py::test_an_extension_that_is_cleared_between_the_look_and_dlopen_is_built_again
        store/test_prune.py::test_a_cache_that_is_cleared_during_a_publication_gives_a_working_op
        store/test_prune.py::test_a_cache_that_is_removed_under_the_compiler_gives_a_working_op
        store/test_prune.py::test_four_processes_get_what_others_clear_all_the_time
16  another patch, local tag or C++ ABI of torch
        cpp_extension/test_extension_key.py::test_another_build_of_torch_is_another_extension_and_the_old_one_is_not_loaded
        builder/test_binaries.py::test_another_torch_builds_the_same_binaries_under_the_same_keys
17  nvcc swapped for another; a library for another CUDA runtime
        recipe/test_key.py::test_an_nvcc_swapped_at_its_path_is_another_key
        builder/test_errors.py::test_an_nvcc_of_another_major_version_than_torch_s_is_refused_before_it_compiles
        store/test_cuda_entries.py::test_a_library_that_asks_for_another_cuda_runtime_is_refused_before_it_is_opened
        library/test_library.py::test_a_library_for_another_major_version_of_cuda_is_refused
18  one toolkit by a link and by its real path; another order of PATH
        recipe/test_key.py::test_a_toolkit_by_a_link_and_by_its_real_path_gives_one_key
        recipe/test_key.py::test_a_compiler_found_by_another_path_gives_one_key
19  two GPU archs and two CPU levels in one home; -march=native
        store/test_store.py::test_two_archs_share_a_cache
        ahead/test_precompile.py::test_cuda_ops_are_built_for_several_archs_without_a_gpu
        cpp_extension/test_extension_key.py::test_native_stands_for_the_cpu_at_hand
        recipe/test_flags.py::test_a_flag_that_would_break_a_promise_is_refused_with_another_way
20  other content under an older or equal date; each field of what is asked for, one at a time
        recipe/test_key.py::test_each_field_of_a_recipe_flips_the_key
        cpp_extension/test_extension_key.py::test_each_field_of_an_extension_flips_the_key
21  one input of the key that cannot be read
        request/test_places.py::test_an_op_with_a_header_that_cannot_be_read_is_built_for_the_process_with_a_warning
        cpp_extension/test_extension_key.py::test_an_extension_with_a_header_that_cannot_be_read_is_built_for_the_process_with_a_warning
        recipe/test_key.py::test_a_header_that_cannot_be_read_gives_a_key_that_never_comes_again
22  a folder shared with an older and a newer opjit
        store/test_prune.py::test_what_another_version_of_opjit_keeps_here_is_not_touched
        store/test_store.py::test_an_entry_with_a_wrong_field_in_its_manifest_is_not_used
23  a read-only cache: a hit, then a miss
        request/test_warm_path.py::test_a_hit_in_a_read_only_cache_makes_no_system_call_that_writes
        store/test_store.py::test_a_read_only_cache_serves_hits_silently_and_a_miss_is_built_for_the_process
        request/test_warm_path.py::test_a_warm_get_writes_nothing_starts_nothing_locks_nothing_and_imports_nothing_heavy
24  a noexec mount; no HOME, or /; a user without a name
        test_loader.py::test_an_op_in_a_noexec_cache_is_an_error_that_names_the_way_out
        cpp_extension/test_extension_key.py::test_an_extension_in_a_noexec_cache_is_an_error_that_names_the_way_out
        request/test_places.py::test_a_user_without_a_name_or_a_home_gets_his_ops
        store/test_store.py::test_a_user_without_a_home_or_a_name_gets_a_cache_of_his_own
        store/test_store.py::test_import_never_fails_for_want_of_a_home
25  a cache, a parent of it or a lock that belongs to others, or is a link
        store/test_folders.py::test_what_others_can_swap_is_not_loaded_and_one_warning_says_what_to_do
        store/test_folders.py::test_a_loop_of_links_is_no_cache_and_no_hang
        store/test_lock.py::test_a_link_planted_as_a_lock_file_or_a_note_is_not_followed
        store/test_lock.py::test_a_lock_folder_that_is_not_the_user_s_is_not_used
26  a clock set back or forward; entries of 1970 and 2100
        store/test_store.py::test_dates_decide_nothing_about_an_entry
        store/test_prune.py::test_a_fresh_entry_stays_whatever_its_dates_say
        store/test_prune.py::test_entries_dated_ahead_of_the_clock_do_not_stop_the_others_from_going_nor_stay_for_ever
        store/test_prune.py::test_a_clock_set_back_by_years_keeps_neither_everything_nor_wipes_what_is_fresh
27  a size limit reached while entries are in use; a removal that fails
        store/test_prune.py::test_what_was_not_used_for_longest_goes_first_until_the_rest_is_small_enough
        store/test_damage.py::test_a_rebuild_is_a_new_file_and_who_has_the_old_one_mapped_goes_on
        store/test_prune.py::test_what_cannot_be_removed_is_said_and_the_others_go_all_the_same
        store/test_prune.py::test_a_pruner_that_is_killed_leaves_no_half_of_an_entry
28  a remote that answers with an error, late, or never
        share/test_remote.py::test_a_remote_that_fails_costs_one_warning_and_a_moment_and_is_not_asked_again
        share/test_remote.py::test_a_remote_that_takes_no_connections_costs_one_warning
        share/test_remote.py::test_what_is_not_there_is_no_failure
29  a remote that answers with nothing, half, or another key's bytes; half an upload
        store/test_bundle.py::test_a_bundle_that_was_cut_off_is_refused_and_nothing_is_left
        share/test_remote.py::test_a_remote_that_fails_costs_one_warning_and_a_moment_and_is_not_asked_again
        cache/test_transfer.py::test_a_push_that_is_killed_in_the_middle_leaves_no_half_of_an_entry
30  a remote whose entries are not signed, or not by the right key, or were changed
        share/test_remote.py::test_an_entry_that_is_not_what_a_trusted_key_signed_is_refused_with_one_warning_and_nothing_is_written
        share/test_remote.py::test_nothing_is_parsed_before_its_signature_is_right
        share/test_remote.py::test_a_hostile_library_is_never_opened
        cache/test_transfer.py::test_a_push_says_whether_it_signs
        cache/test_transfer.py::test_a_hostile_pack_leaves_nothing_anywhere_and_every_member_is_named
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent


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
    known = {path.relative_to(TESTS).as_posix():
             {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}
             for path in TESTS.rglob("test_*.py")}
    for tests in rows.values():
        for test in tests:
            file, _, name = test.partition("::")
            assert name in known[file], test
