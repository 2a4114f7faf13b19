"""The page of faults has an item for each fault, and each test of a fault exists."""

import re
from pathlib import Path

import pytest

from tests.helpers import ROOT

PAGE = (ROOT / "opjit/store/FAULTS.md").read_text(encoding="utf-8")
ITEMS = [int(number) for number in re.findall(r"^(\d+)\. \*\*", PAGE, flags=re.MULTILINE)]
TESTS: dict[int, tuple[str, ...]] = {
    1: (
        "request/test_concurrency.py::test_a_killed_builder_s_waiter_builds_at_once",
        "store/test_lock.py::test_a_waiter_is_told_whom_it_waits_for_since_when_and_each_step_and_takes_over_from_the_dead",
    ),
    2: (
        "store/test_store.py::test_a_builder_killed_before_the_rename_leaves_no_entry_and_nothing_that_blocks",
        "store/test_store.py::test_old_staging_folders_are_swept_and_fresh_ones_stay",
        "request/test_concurrency.py::test_a_builder_killed_at_any_moment_leaves_nothing_that_harms",
    ),
    3: (
        "store/test_store.py::test_a_bad_entry_gives_one_warning_and_is_rebuilt_and_is_a_silent_hit_then",
    ),
    4: (
        "store/test_store.py::test_a_bad_entry_gives_one_warning_and_is_rebuilt_and_is_a_silent_hit_then",
        "store/test_store.py::test_no_flipped_byte_in_a_manifest_goes_unseen_where_it_matters",
    ),
    5: (
        "cpp_extension/test_extension_key.py::test_a_cxx_compiler_that_lies_is_named_and_nothing_is_published",
        "builder/test_errors.py::test_a_compiler_that_reports_success_and_leaves_no_library_is_named",
    ),
    6: (
        "store/test_store.py::test_an_op_works_with_one_warning_when_the_disk_fills_up",
        "store/test_damage.py::test_a_disk_that_is_full_when_the_manifest_is_written_costs_a_warning",
        "request/test_places.py::test_where_everything_is_full_the_error_says_so",
        "store/test_lock.py::test_a_full_filesystem_of_locks_costs_one_warning",
    ),
    7: (
        "store/test_damage.py::test_a_staging_folder_that_is_busy_costs_nothing",
        "store/test_damage.py::test_a_staging_folder_that_may_not_be_removed_is_told_of",
    ),
    8: (
        "store/test_damage.py::test_a_rebuild_is_a_new_file_and_who_has_the_old_one_mapped_goes_on",
    ),
    9: (
        "builder/test_errors.py::test_what_is_edited_while_the_compiler_runs_is_not_stored_under_the_old_key",
        "cpp_extension/test_dropin.py::test_a_source_that_changes_while_it_is_compiled_is_not_stored",
    ),
    10: (
        "request/test_concurrency.py::test_64_processes_and_then_16_compile_once_in_each_round_and_read_identical_bytes",
        "cpp_extension/test_dropin.py::test_processes_that_load_one_extension_at_once_compile_it_once",
    ),
    11: (
        "store/test_lock.py::test_a_flock_that_always_succeeds_gives_duplicate_builds_and_one_good_entry",
        "store/test_lock.py::test_a_flock_that_blocks_costs_a_bounded_wait_and_a_warning_and_stops_no_fork",
        "store/test_lock.py::test_a_filesystem_without_locks_or_a_process_without_threads_costs_one_warning_that_says_so",
    ),
    12: ("request/test_concurrency.py::test_two_builds_that_differ_are_never_mixed",),
    13: (
        "store/test_lock.py::test_a_child_that_leaves_the_block_of_its_parent_does_not_free_the_lock",
        "store/test_lock.py::test_a_child_of_a_holder_that_was_killed_does_not_keep_the_lock",
        "request/test_concurrency.py::test_while_a_thread_builds_the_environment_stays_as_it_is_and_a_forked_child_can_get_ops",
        "request/test_concurrency.py::test_32_threads_that_ask_for_one_op_compile_it_once",
    ),
    14: (
        "store/test_prune.py::test_nothing_that_a_builder_writes_on_its_way_looks_like_an_entry",
        "store/test_prune.py::test_two_hosts_with_one_process_id_never_share_a_temporary_name",
    ),
    15: (
        "store/test_prune.py::test_a_cache_that_is_cleared_during_a_look_up_is_a_miss",
        "cpp_extension/test_dropin.py::test_an_extension_that_is_cleared_between_the_look_and_dlopen_is_built_again",
        "store/test_prune.py::test_a_cache_that_is_cleared_during_a_publication_gives_a_working_op",
        "store/test_prune.py::test_a_cache_that_is_removed_under_the_compiler_gives_a_working_op",
        "store/test_prune.py::test_four_processes_get_what_others_clear_all_the_time",
    ),
    16: (
        "cpp_extension/test_extension_key.py::test_another_build_of_torch_is_another_extension_and_the_old_one_is_not_loaded",
        "builder/test_binaries.py::test_another_torch_builds_the_same_binaries_under_the_same_keys",
    ),
    17: (
        "recipe/test_key.py::test_an_nvcc_swapped_at_its_path_is_another_key",
        "builder/test_errors.py::test_an_nvcc_of_another_major_version_than_torch_s_is_refused_before_it_compiles",
        "store/test_damage.py::test_a_library_that_asks_for_another_cuda_runtime_is_refused_before_it_is_opened",
        "library/test_library.py::test_a_library_for_another_major_version_of_cuda_is_refused",
    ),
    18: (
        "recipe/test_key.py::test_a_toolkit_by_a_link_and_by_its_real_path_gives_one_key",
        "recipe/test_key.py::test_a_compiler_found_by_another_path_gives_one_key",
    ),
    19: (
        "store/test_store.py::test_two_archs_share_a_cache",
        "ahead/test_precompile.py::test_cuda_ops_are_built_for_several_archs_without_a_gpu",
        "cpp_extension/test_extension_key.py::test_native_stands_for_the_cpu_at_hand",
        "recipe/test_flags.py::test_a_flag_that_would_break_a_promise_is_refused_with_another_way",
    ),
    20: (
        "recipe/test_key.py::test_each_field_of_a_recipe_flips_the_key",
        "cpp_extension/test_extension_key.py::test_each_field_of_an_extension_flips_the_key",
    ),
    21: (
        "request/test_places.py::test_a_header_that_the_compiler_does_not_read_need_not_be_readable",
        "cpp_extension/test_extension_key.py::test_a_header_that_cannot_be_read_and_that_no_compiler_reads_does_not_matter",
        "recipe/test_key.py::test_a_source_that_cannot_be_read_gives_a_key_that_never_comes_again",
    ),
    22: (
        "store/test_prune.py::test_what_another_version_of_opjit_keeps_here_is_not_touched",
        "store/test_store.py::test_an_entry_with_a_wrong_field_in_its_manifest_is_not_used",
    ),
    23: (
        "request/test_warm_path.py::test_a_hit_in_a_read_only_cache_makes_no_system_call_that_writes",
        "store/test_store.py::test_a_read_only_cache_serves_hits_silently_and_a_miss_is_built_for_the_process",
        "request/test_warm_path.py::test_a_warm_get_writes_nothing_starts_nothing_locks_nothing_and_imports_nothing_heavy",
    ),
    24: (
        "test_loader.py::test_an_op_in_a_noexec_cache_is_an_error_that_names_the_way_out",
        "cpp_extension/test_extension_key.py::test_an_extension_in_a_noexec_cache_is_an_error_that_names_the_way_out",
        "request/test_places.py::test_a_user_without_a_name_or_a_home_gets_his_ops",
        "store/test_store.py::test_a_user_without_a_home_or_a_name_gets_a_cache_of_his_own",
        "store/test_store.py::test_import_never_fails_for_want_of_a_home",
    ),
    25: (
        "store/test_folders.py::test_what_others_can_swap_is_not_loaded_and_one_warning_says_what_to_do",
        "store/test_folders.py::test_a_loop_of_links_is_no_cache_and_no_hang",
        "store/test_lock.py::test_a_link_planted_as_a_lock_file_or_a_note_is_not_followed",
        "store/test_lock.py::test_a_lock_folder_that_is_not_the_user_s_is_not_used",
    ),
    26: (
        "store/test_store.py::test_dates_decide_nothing_about_an_entry",
        "store/test_prune.py::test_a_fresh_entry_stays_whatever_its_dates_say",
        "store/test_prune.py::test_entries_dated_ahead_of_the_clock_do_not_stop_the_others_from_going_nor_stay_for_ever",
        "store/test_prune.py::test_a_clock_set_back_by_years_keeps_neither_everything_nor_wipes_what_is_fresh",
    ),
    27: (
        "store/test_prune.py::test_what_was_not_used_for_longest_goes_first_until_the_rest_is_small_enough",
        "store/test_damage.py::test_a_rebuild_is_a_new_file_and_who_has_the_old_one_mapped_goes_on",
        "store/test_prune.py::test_what_cannot_be_removed_is_said_and_the_others_go_all_the_same",
        "store/test_prune.py::test_a_pruner_that_is_killed_leaves_no_half_of_an_entry",
    ),
    28: (
        "share/test_remote.py::test_a_remote_that_fails_costs_one_warning_and_a_moment_and_is_not_asked_again",
        "share/test_remote.py::test_a_remote_that_takes_no_connections_costs_one_warning",
        "share/test_remote.py::test_what_is_not_there_is_no_failure",
    ),
    29: (
        "store/test_bundle.py::test_a_bundle_that_was_cut_off_is_refused_and_nothing_is_left",
        "share/test_remote.py::test_a_remote_that_fails_costs_one_warning_and_a_moment_and_is_not_asked_again",
        "cache/test_transfer.py::test_a_push_that_is_killed_in_the_middle_leaves_no_half_of_an_entry",
    ),
    30: (
        "share/test_remote.py::test_an_entry_that_is_not_what_a_trusted_key_signed_is_refused_with_one_warning_and_nothing_is_written",
        "share/test_remote.py::test_nothing_is_parsed_before_its_signature_is_right",
        "share/test_remote.py::test_a_hostile_library_is_never_opened",
        "cache/test_transfer.py::test_a_push_says_whether_it_signs",
        "cache/test_transfer.py::test_a_pull_leaves_a_hostile_object_out_whether_or_not_a_signature_is_asked_for",
    ),
}


def test_the_page_has_an_item_for_each_of_thirty_faults() -> None:
    assert ITEMS == list(TESTS) == list(range(1, 31))


@pytest.mark.parametrize("fault", TESTS)
def test_each_test_of_a_fault_exists(fault: int) -> None:
    for test in TESTS[fault]:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8"), name
