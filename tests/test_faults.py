"""Thirty faults that a compile cache must survive: the behavior that opjit guarantees, and the tests of it, which exist.

The tests kill real processes, fill real disks, damage real files, and run real servers. Only five faults are simulated by patching a
function: a failing rmdir (7), a misbehaving flock (11), equal process IDs (14), another torch (16), and other clocks (26).
"""

from pathlib import Path

import pytest

TESTS: dict[int, tuple[str, ...]] = {
    # A builder is killed while it holds the lock. A waiting process takes over immediately.
    # While it waits, it reports which process it waits for.
    1: (
        "request/test_concurrency.py::test_a_killed_builder_s_waiter_builds_at_once",
        "test_lock.py::test_a_waiter_is_told_whom_it_waits_for_since_when_and_each_step_and_takes_over_from_the_dead",
    ),
    # A builder is killed between the library and the manifest, or at any other moment. No entry
    # appears, and nothing blocks. Old staging directories are removed later, and fresh ones
    # stay.
    2: (
        "store/test_store.py::test_a_builder_killed_before_the_rename_leaves_no_entry_and_nothing_that_blocks",
        "store/test_store.py::test_old_staging_folders_are_swept_and_fresh_ones_stay",
        "request/test_concurrency.py::test_a_builder_killed_at_any_moment_leaves_nothing_that_harms",
    ),
    # The file of an entry is empty, one byte too short, or ends with zeros. One warning, and
    # opjit builds the entry again. The next request is a hit without a warning.
    3: (
        "store/test_store.py::test_a_bad_entry_gives_one_warning_and_is_rebuilt_and_is_a_silent_hit_then",
    ),
    # Three bytes of a library or of a manifest are overwritten. As for fault 3. In a manifest,
    # opjit notices all flipped bytes that could change its meaning.
    4: (
        "store/test_store.py::test_a_bad_entry_gives_one_warning_and_is_rebuilt_and_is_a_silent_hit_then",
        "store/test_store.py::test_no_flipped_byte_in_a_manifest_goes_unseen_where_it_matters",
    ),
    # A compiler exits with 0 and leaves no valid library. An error shows the compiler, and
    # nothing is published.
    5: (
        "cpp_extension/test_extension_key.py::test_a_cxx_compiler_that_lies_is_named_and_nothing_is_published",
        "builder/test_errors.py::test_a_compiler_that_reports_success_and_leaves_no_library_is_named",
    ),
    # The disk is full when opjit stages a build, writes the manifest or makes a lock file, or
    # all disks are full. The op works, with one warning. If no directory has space, the error
    # reports that no space is left.
    6: (
        "store/test_store.py::test_an_op_works_with_one_warning_when_the_disk_fills_up",
        "store/test_damage.py::test_a_disk_that_is_full_when_the_manifest_is_written_costs_a_warning",
        "request/test_places.py::test_where_everything_is_full_the_error_says_so",
        "test_lock.py::test_a_full_filesystem_of_locks_costs_one_warning",
    ),
    # A staging directory can't be removed when its entry has been published. If it is busy, a
    # later request removes it. If the removal is not permitted, one warning shows the
    # directory.
    7: (
        "store/test_damage.py::test_a_staging_folder_that_is_busy_costs_nothing",
        "store/test_damage.py::test_a_staging_folder_that_may_not_be_removed_is_told_of",
    ),
    # An op is rebuilt when another process has its library mapped. The rebuild is a new file,
    # so the process continues with the old one.
    8: (
        "store/test_damage.py::test_a_rebuild_is_a_new_file_and_who_has_the_old_one_mapped_goes_on",
    ),
    # A source or a header is edited while the compiler runs. The binary is not stored under the
    # old key.
    9: (
        "builder/test_errors.py::test_what_is_edited_while_the_compiler_runs_is_not_stored_under_the_old_key",
        "cpp_extension/test_dropin.py::test_a_source_that_changes_while_it_is_compiled_is_not_stored",
    ),
    # 64 processes, and then 16, request one op that is not cached, in several rounds. One
    # process of a round compiles, and all of them read identical bytes.
    10: (
        "request/test_concurrency.py::test_64_processes_and_then_16_compile_once_in_each_round_and_read_identical_bytes",
        "cpp_extension/test_dropin.py::test_processes_that_load_one_extension_at_once_compile_it_once",
    ),
    # `flock` always succeeds, is missing, or blocks. Without working locks, opjit may build
    # twice, and publishes one valid entry. A lock that blocks costs a limited wait. In both
    # cases, one warning explains it.
    11: (
        "test_lock.py::test_a_flock_that_always_succeeds_gives_duplicate_builds_and_one_good_entry",
        "test_lock.py::test_a_flock_that_blocks_costs_a_bounded_wait_and_a_warning_and_stops_no_fork",
        "test_lock.py::test_a_filesystem_without_locks_or_a_process_without_threads_costs_one_warning_that_says_so",
    ),
    # A compiler is not deterministic, and two builders race. Files of two builds are never
    # mixed in one entry.
    12: ("request/test_concurrency.py::test_two_builds_that_differ_are_never_mixed",),
    # A process forks while it holds the lock, or 32 threads request one op. A child can neither
    # free its parent's lock nor keep it, and can request ops. Only one thread compiles.
    13: (
        "test_lock.py::test_a_child_that_leaves_the_block_of_its_parent_does_not_free_the_lock",
        "test_lock.py::test_a_child_of_a_holder_that_was_killed_does_not_keep_the_lock",
        "request/test_concurrency.py::test_while_a_thread_builds_the_environment_stays_as_it_is_and_a_forked_child_can_get_ops",
        "request/test_concurrency.py::test_32_threads_that_ask_for_one_op_compile_it_once",
    ),
    # A scan meets temporary files, or two hosts have equal process IDs. Temporary files never
    # look like entries, and two hosts never share a temporary name.
    14: (
        "store/test_prune.py::test_nothing_that_a_builder_writes_on_its_way_looks_like_an_entry",
        "store/test_prune.py::test_two_hosts_with_one_process_id_never_share_a_temporary_name",
    ),
    # The cache is cleared or pruned during a lookup, before `dlopen`, or during a publication.
    # The lookup is a miss, and the op works.
    15: (
        "store/test_prune.py::test_a_cache_that_is_cleared_during_a_look_up_is_a_miss",
        "cpp_extension/test_dropin.py::test_an_extension_that_is_cleared_between_the_look_and_dlopen_is_built_again",
        "store/test_prune.py::test_a_cache_that_is_cleared_during_a_publication_gives_a_working_op",
        "store/test_prune.py::test_a_cache_that_is_removed_under_the_compiler_gives_a_working_op",
        "store/test_prune.py::test_four_processes_get_what_others_clear_all_the_time",
    ),
    # torch differs in its patch version, local version or C++ ABI. A C++ extension is built
    # again, and the old one is not loaded. An op has the same binary and the same key.
    16: (
        "cpp_extension/test_extension_key.py::test_another_build_of_torch_is_another_extension_and_the_old_one_is_not_loaded",
        "builder/test_binaries.py::test_another_torch_builds_the_same_binaries_under_the_same_keys",
    ),
    # nvcc is replaced by another version, or a library needs another CUDA runtime. The key
    # changes. An nvcc or a library for another major version of CUDA is rejected before it is
    # used.
    17: (
        "recipe/test_key.py::test_an_nvcc_swapped_at_its_path_is_another_key",
        "builder/test_errors.py::test_an_nvcc_of_another_major_version_than_torch_s_is_refused_before_it_compiles",
        "store/test_damage.py::test_a_library_that_asks_for_another_cuda_runtime_is_refused_before_it_is_opened",
        "library/test_library.py::test_a_library_for_another_major_version_of_cuda_is_refused",
    ),
    # A toolkit is reached through a link and through its real path, or PATH has another order.
    # The key is the same.
    18: (
        "recipe/test_key.py::test_a_toolkit_by_a_link_and_by_its_real_path_gives_one_key",
        "recipe/test_key.py::test_a_compiler_found_by_another_path_gives_one_key",
    ),
    # Two GPU architectures and two CPU architectures share one home directory, or a flag is
    # `-march=native`. Architectures have separate entries. In a C++ extension, `native` means
    # the CPU of this machine. An op rejects the flag with an alternative.
    19: (
        "store/test_store.py::test_two_archs_share_a_cache",
        "ahead/test_precompile.py::test_cuda_ops_are_built_for_several_archs_without_a_gpu",
        "cpp_extension/test_extension_key.py::test_native_stands_for_the_cpu_at_hand",
        "recipe/test_flags.py::test_a_flag_that_would_break_a_promise_is_refused_with_another_way",
    ),
    # Content changes under an older or equal date, or one field of a request changes. The key
    # changes.
    20: (
        "recipe/test_key.py::test_each_field_of_a_recipe_flips_the_key",
        "cpp_extension/test_extension_key.py::test_each_field_of_an_extension_flips_the_key",
    ),
    # An input of the key can't be read. If no compiler reads it, it doesn't matter. Otherwise
    # the request gets a key that no other request has.
    21: (
        "request/test_places.py::test_a_header_that_the_compiler_does_not_read_need_not_be_readable",
        "cpp_extension/test_extension_key.py::test_a_header_that_cannot_be_read_and_that_no_compiler_reads_does_not_matter",
        "recipe/test_key.py::test_a_source_that_cannot_be_read_gives_a_key_that_never_comes_again",
    ),
    # An older and a newer opjit share a cache. opjit doesn't touch files of other versions, and
    # doesn't use an entry with an invalid field.
    22: (
        "store/test_prune.py::test_what_another_version_of_opjit_keeps_here_is_not_touched",
        "store/test_store.py::test_an_entry_with_a_wrong_field_in_its_manifest_is_not_used",
    ),
    # The cache is read-only. A hit makes no system call that writes. After a miss, opjit builds
    # the op for this process.
    23: (
        "request/test_warm_path.py::test_a_hit_in_a_read_only_cache_makes_no_system_call_that_writes",
        "store/test_store.py::test_a_read_only_cache_serves_hits_silently_and_a_miss_is_built_for_the_process",
        "request/test_warm_path.py::test_a_warm_get_writes_nothing_starts_nothing_locks_nothing_and_imports_nothing_heavy",
    ),
    # The cache is mounted with noexec, HOME is unset or `/`, or the user has no name. With
    # noexec, an error shows the remedy. Otherwise, the user gets a private cache, and ops work.
    24: (
        "test_loader.py::test_an_op_in_a_noexec_cache_is_an_error_that_names_the_way_out",
        "cpp_extension/test_extension_key.py::test_an_extension_in_a_noexec_cache_is_an_error_that_names_the_way_out",
        "request/test_places.py::test_a_user_without_a_name_or_a_home_gets_his_ops",
        "store/test_store.py::test_a_user_without_a_home_or_a_name_gets_a_cache_of_his_own",
        "store/test_store.py::test_import_never_fails_for_want_of_a_home",
    ),
    # The cache, a directory above it, or a lock belongs to another user or is a link. opjit
    # doesn't load from it, and one warning shows the remedy. It never follows a link in place
    # of a lock or a note.
    25: (
        "store/test_folders.py::test_what_others_can_swap_is_not_loaded_and_one_warning_says_what_to_do",
        "store/test_folders.py::test_a_loop_of_links_is_no_cache_and_no_hang",
        "test_lock.py::test_a_link_planted_as_a_lock_file_or_a_note_is_not_followed",
        "test_lock.py::test_a_lock_folder_that_is_not_the_user_s_is_not_used",
    ),
    # The clock is set back or forward, or entries have dates of 1970 or 2100. Dates never
    # decide whether an entry is valid. Pruning keeps fresh entries, and removes entries with
    # future dates in the end.
    26: (
        "store/test_store.py::test_dates_decide_nothing_about_an_entry",
        "store/test_prune.py::test_a_fresh_entry_stays_whatever_its_dates_say",
        "store/test_prune.py::test_entries_dated_ahead_of_the_clock_do_not_stop_the_others_from_going_nor_stay_for_ever",
        "store/test_prune.py::test_a_clock_set_back_by_years_keeps_neither_everything_nor_wipes_what_is_fresh",
    ),
    # When a size limit is reached, entries are in use, or a removal fails. The least recently
    # used entries are removed first, and processes continue with mapped libraries. A failed
    # removal is reported, and the other entries are removed.
    27: (
        "store/test_prune.py::test_what_was_not_used_for_longest_goes_first_until_the_rest_is_small_enough",
        "store/test_damage.py::test_a_rebuild_is_a_new_file_and_who_has_the_old_one_mapped_goes_on",
        "store/test_prune.py::test_what_cannot_be_removed_is_said_and_the_others_go_all_the_same",
        "store/test_prune.py::test_a_pruner_that_is_killed_leaves_no_half_of_an_entry",
    ),
    # A remote cache answers with an error, late, or never. One warning and a limited wait, and
    # the process doesn't contact this remote cache again. A missing object is not a failure.
    28: (
        "share/test_remote.py::test_a_remote_that_fails_costs_one_warning_and_a_moment_and_is_not_asked_again",
        "share/test_remote.py::test_a_remote_that_takes_no_connections_costs_one_warning",
        "share/test_remote.py::test_what_is_not_there_is_no_failure",
    ),
    # A remote cache answers with nothing, with a part, or with the bytes of another key, or an
    # upload is interrupted. The answer is rejected, and nothing of it is left. An interrupted
    # upload leaves no partial entry.
    29: (
        "store/test_bundle.py::test_a_bundle_that_was_cut_off_is_refused_and_nothing_is_left",
        "share/test_remote.py::test_a_remote_that_fails_costs_one_warning_and_a_moment_and_is_not_asked_again",
        "cache/test_transfer.py::test_a_push_that_is_killed_in_the_middle_leaves_no_half_of_an_entry",
    ),
    # Entries of a remote cache are unsigned, signed with another key, or changed. They are
    # rejected with one warning before they are parsed. Nothing is written or opened.
    30: (
        "share/test_remote.py::test_an_entry_that_is_not_what_a_trusted_key_signed_is_refused_with_one_warning_and_nothing_is_written",
        "share/test_remote.py::test_nothing_is_parsed_before_its_signature_is_right",
        "share/test_remote.py::test_a_hostile_library_is_never_opened",
        "cache/test_transfer.py::test_a_push_says_whether_it_signs",
        "cache/test_transfer.py::test_a_pull_leaves_a_hostile_object_out_whether_or_not_a_signature_is_asked_for",
    ),
}


def test_there_are_thirty_faults() -> None:
    assert list(TESTS) == list(range(1, 31))


@pytest.mark.parametrize("fault", TESTS)
def test_each_test_of_a_fault_exists(fault: int) -> None:
    for test in TESTS[fault]:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8"), name
