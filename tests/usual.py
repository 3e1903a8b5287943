"""Which tests are usual (`make test`); the others carry the mark ``full`` and run in `make test-all`. See
tests/README.md.

`FILES` names all usual tests of a file; a name without brackets stands for all cases of a test that are not marked
``full`` where they are written. `CASES` names the usual cases of one test in a file that `FILES` does not name; none:
the test is not usual. A test that neither table names is usual unless it is marked ``full``. `DOCS` are checks of
pages, pictures and the source; they run in `make lint` and `make test-all`.
"""

PAGES = {
    "report-420", "report of a failure-420", "compared runs, sweep-420", "comparison of strategies-420", "trace-420",
    "smoke tests-420", "topology-420",
}  # fmt: skip
CASES: dict[str, set[str]] = {
    "security/test_decompression.py::test_bomb_is_read_in_part_and_the_verdict_says_so": {
        "lines-gz", "one line-xz", "zeros-bz2",
    },
    "security/test_decompression.py::test_what_comes_before_the_limit_counts": {"gz", "xz"},
    "security/test_decompression.py::test_ordinary_logs_are_read_whole": {"gz", "bz2"},
    "security/test_hostile_files.py::test_bomb_is_refused_at_once": {
        "aliases of lists", "merge keys", "nested mappings", "an integer of 900,000 digits",
        "a value that holds itself", "a key twice", "very many keys", "a program",
    },
    "security/test_decompression.py::test_real_limits_bound_a_bomb_of_gigabytes": set(),
    "security/test_file_modes.py::test_a_training_run_leaves_nothing_open_and_its_cache_shared": set(),
    "unit/test_block_forward.py::test_a_block_keeps_what_the_estimate_says": {"llama-True", "olmoe-False"},
    "unit/test_diagnose_bad_input.py::test_cut_archive_is_said_and_its_beginning_counts": {"gz", "bz2"},
    "unit/test_lora.py::test_in_bfloat16_it_is_as_close_to_float64_as_peft_under_autocast": {"True"},
    "unit/test_preflight_probe.py::test_the_connection_test_holds_10000_nodes": set(),
    "unit/test_cli_paths.py::test_a_file_that_may_not_be_read_ends_with_2_and_is_named": {"plan", "diagnose"},
    "unit/test_cli_paths.py::test_a_run_root_that_may_not_be_read_or_is_a_file_ends_with_2": {"runs"},
    "golden/test_frozen.py::test_an_old_run_resumes": {"pytorch_ddp-lora"},
    "dist/test_script_hangs.py::test_a_group_that_ddp_frees_does_not_hang": set(),
    "unit/test_pages.py::test_a_page_works": PAGES,
    "unit/test_pages.py::test_a_page_is_accessible": PAGES,
    "unit/test_pages.py::test_a_page_is_printed_whole": {"report"},
    "unit/test_profiler.py::test_a_full_disk_is_a_warning_and_training_goes_on": set(),
    "security/test_network.py::test_the_same_attack_executes_code_under_torchruns_c10d_rendezvous": set(),
}  # fmt: skip

FILES: dict[str, set[str]] = {
    **{file: set() for file in (
        "cluster/test_hangs.py", "cluster/test_isolation.py", "cluster/test_network.py", "cluster/test_seeds.py",
        "dist/test_failures_a.py", "dist/test_failures_b.py", "dist/test_fit.py", "dist/test_overload.py",
        "dist/test_resume_often.py", "dist/test_seeds.py", "gpu/test_runs.py", "gpu/test_strategies.py",
    )},
    "cluster/test_box.py": {
        "test_three_nodes_are_idle", "test_each_node_has_its_own_network_name_tmp_and_processes",
        "test_names_resolve_and_never_wait_for_dns", "test_exec_passes_output_input_and_exit_code_untouched",
        "test_gpus_are_announced_and_handed_out", "test_slurm_refuses_what_it_should_and_test_only_submits_nothing",
        "test_find_box_and_its_prefix_from_inside_too", "test_status_is_one_json_document",
        "test_jobs_and_nodes_are_read_from_the_real_commands", "test_kill_rank_ends_that_rank_and_no_other",
        "test_a_cut_link_is_silent_and_an_interface_down_is_not", "test_the_command_line_notes_and_heals",
        "test_every_fault_has_a_command", "test_down_leaves_nothing[False]", "test_an_up_that_fails_leaves_nothing",
    },
    "cluster/test_doctor.py": {
        "test_faults_of_three_kinds_are_told_apart",
        "test_every_host_with_an_agent_is_examined_and_the_one_without_is_named",
    },
    "cluster/test_preemption.py": {"test_a_preempted_training_saves_in_its_grace_time_and_continues[grace]"},
    "cluster/test_programs.py": {
        "test_ranks_run_in_the_container_and_the_driver_outside[program]",
        "test_a_bad_node_is_left_out_and_the_others_train[program]",
    },
    "cluster/test_same_answers.py": {
        "test_both_name_the_key_that_slurm_refuses[partition]",
        "test_both_name_the_key_that_slurm_refuses[time]",
        "test_both_refuse_a_run_root_that_the_login_side_may_not_write",
        "test_both_find_the_same_on_the_nodes[program]",
    },
    "cluster/test_sbatch.py": {"test_a_job_is_followed_and_its_output_is_that_of_the_script"},
    "cluster/test_slurm_runs.py": {
        "test_a_killed_rank_on_another_node_is_named", "test_ctrl_c_cancels_the_job",
        "test_a_killed_node_sends_the_job_back_to_the_queue_and_it_goes_on[program]",
        "test_cancel_and_detach", "test_inside_an_allocation_no_new_job_is_submitted",
    },
    "cluster/test_stage.py": {
        "test_only_the_node_that_lacks_it_gets_it_and_runs_it[auto]",
        "test_a_damaged_archive_is_refused_on_the_node_and_nothing_stays",
    },
    "dist/test_best.py": {
        "test_an_adapter_and_its_merged_model_say_the_same", "test_other_weights_are_not_published",
        "test_it_ends_on_all_ranks_with_the_best_kept", "test_the_best_is_exported",
        "test_replies_are_those_of_the_evaluation",
    },
    "dist/test_compare.py": {
        "test_honest_strategies_pass_and_hold_what_theory_says", "test_each_defect_still_finds_its_place",
    },
    "dist/test_deepspeed.py": {"test_adapters_reload_in_plain_peft_with_the_same_logits"},
    "dist/test_full_disk.py": {
        "test_a_disk_that_is_full_before_the_run_or_fills_up_during_it", "test_every_verb_that_writes[report-]",
        "test_every_verb_that_writes[topo-]",
    },
    "dist/test_hf_trainer.py": {"test_adapters_reload_in_plain_peft_with_the_same_logits"},
    "dist/test_loading.py": {
        "test_files_give_what_transformers_gives[True-2]", "test_a_part_that_went_astray_is_seen[other_rows]",
        "test_a_rank_that_sees_other_files_gets_those_of_rank_0[last]",
        ("test_all_ranks_hear_why_one_cannot_read_its_part[failing-rank 1: .*: .*weight cannot be read: "
         "Input/output error-3]"),
        "test_all_ranks_refuse_damaged_files",
        "test_rows_that_several_nodes_keep_are_read_by_rank_0_and_go_once_to_each_node",
        "test_ranks_end_when_a_reader_is_killed[killed-1-sight0]",
    },
    "dist/test_precision.py": {"test_a_run_in_bfloat16_saves_float32_weights_and_moments"},
    "dist/test_programs.py": {"test_a_fault_on_one_rank_is_named_by_rank_and_reason[exception]"},
    "dist/test_ranks.py": {
        "test_proof_of_ranks_that_are_one_job", "test_proof_names_what_is_wrong[one_weight-2-embed_tokens.weight]",
        "test_proof_names_what_is_wrong[sampler-3-rank 1 shares]",
        "test_proof_names_what_is_wrong[late_sampler-2-rank 1 shares]",
        "test_evaluation_is_the_same_for_any_ranks_and_batch_size",
        "test_strategies_equal_one_process_that_takes_the_ranks_in_turn",
        "test_lora_is_computed_together_or_the_strategy_says_that_it_is_not",
        "test_a_silent_fallback_of_lora_is_caught[hooks_within_lora]",
        "test_fsdp2_refuses_what_it_would_spoil_and_names_the_weight",
        "test_weights_replicated_on_two_nodes_equal_one_process",
        "test_collectives_are_those_of_the_formula",
        "test_collectives_that_the_formula_does_not_say_are_caught[adapters_not_averaged-0 calls of 0 bytes]",
        "test_planted_bugs_are_caught[shard_boundary_off_by_one]", "test_planted_bugs_are_caught[trainer_mean_loss]",
        "test_single_equals_the_reference", "test_all_ranks_hear_of_a_stop_for_the_same_step",
    },
    "dist/test_run.py": {
        "test_metrics_hold_all_that_the_contract_names", "test_token_counts_are_those_of_the_data",
        "test_the_run_folder_is_complete", "test_secrets_reach_no_file",
        "test_the_adapter_loads_in_plain_peft_with_its_named_base", "test_verbs_on_a_finished_run",
        "test_a_tiny_bert_classifies_real_news", "test_a_run_from_python_tells_an_observer",
        "test_each_rank_leaves_a_trace_with_all_that_analysis_needs",
    },
    "dist/test_saves.py": {
        "test_a_rank_that_takes_no_part_is_named_in_time",
        "test_a_rank_that_cannot_write_is_named_everywhere_and_earlier_checkpoints_stay",
        "test_a_save_behind_training_holds_the_state_of_its_moment[zero3-how0]",
        "test_a_save_is_published_when_it_is_on_the_disk_and_training_need_not_wait",
        "test_a_kill_at_any_stage_leaves_the_newest_good_checkpoint",
    },
    "dist/test_shards.py": {
        "test_every_strategy_reads_what_every_other_wrote_at_another_number_of_ranks[all]",
        "test_ranks_with_the_same_random_numbers_are_refused_under_every_family",
        "test_a_step_that_is_not_finite_on_one_rank_changes_nothing_on_any", "test_zero3_holds_three_blocks_at_most",
    },
    "dist/test_smoke.py": {"test_the_first_two_rungs"},
    "dist/test_stops.py": {
        "test_a_resumed_run_is_bitwise_one_unbroken[Ctrl-C]",
        "test_a_killed_rank_is_named_and_the_others_end",
        "test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state",
    },
    "dist/test_store.py": {
        "test_the_store_listens_on_its_address_only",
        "test_the_store_loads_the_compiled_part_of_torch_alone_or_all_of_it",
        "test_keys_of_one_training_are_not_those_of_another", "test_the_store_ends_with_its_parent[in use-9]",
        "test_the_folder_of_a_file_store_is_private_and_removed",
        "test_what_a_killed_agent_left_is_removed_and_nothing_of_others", "test_a_store_that_is_not_known_is_refused",
        "test_a_taken_fixed_port_is_refused_by_the_agent_of_node_0",
        "test_a_taken_port_of_the_control_channel_is_an_explained_refusal",
    },
    "reference/test_reference.py": {"test_the_references_do_not_import_the_package", "test_full_fine_tuning[gpt2-2]"},
}  # fmt: skip

DOCS: dict[str, set[str]] = {
    "unit/test_launchers.py": {"test_nothing_compares_a_launcher_or_a_strategy_with_a_name"},
    "unit/test_docs.py": {
        "test_generated_parts_of_pages_are_up_to_date", "test_links_lead_somewhere",
        "test_pages_name_every_folder_and_verb", "test_the_map_of_the_source_is_true", "test_only_train_imports_torch",
        "test_section_names_the_options_of_the_registry_with_their_defaults",
        "test_the_table_says_of_overlap_what_the_strategy_claims",
    },
    "unit/test_failures_table.py": {"test_page_has_its_parts_and_names_tests_that_exist"},
    "unit/test_patches.py": {"test_other_libraries_are_changed_in_one_module"},
    "unit/test_seeds.py": {"test_each_line_of_the_page_names_tests_that_exist_or_says_that_there_is_none"},
}  # fmt: skip


def is_usual(file: str, name: str, case: str) -> bool:
    """Return whether the tables leave a test in `make test`: file below tests/, function, and case without brackets."""
    if file in FILES:
        return bool({name, f"{name}[{case}]"} & FILES[file])
    cases = CASES.get(f"{file}::{name}")
    return cases is None or case in cases


def is_docs(file: str, name: str) -> bool:
    """Return whether a test checks pages or pictures alone."""
    return name in DOCS.get(file, ())


def unknown(collected: dict[str, set[str]]) -> list[str]:
    """Return the entries that name no test of the files that were collected whole."""
    named = {f"{file}::{name}" for table in (FILES, DOCS) for file, names in table.items() for name in names}
    named |= {f"{test}[{case}]" for test, cases in CASES.items() for case in cases} | CASES.keys()
    there = {f"{file}::{name}" for file, names in collected.items() for name in names}
    return sorted(entry for entry in named - there if entry.partition("::")[0] in collected)
