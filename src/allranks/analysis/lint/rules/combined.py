"""Checks of rules whose mistake has several forms: each joins the functions that look for one form."""

from __future__ import annotations

from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription, RuleCheck
from allranks.analysis.lint.records import Violation
from allranks.analysis.lint.rules import (
    activation,
    arrays,
    batch_lines,
    caller_values,
    cancelling,
    case_patterns,
    commands,
    conditions,
    containers,
    counts,
    dataflow,
    derived_counts,
    directives,
    empty_values,
    environments,
    error_exits,
    exit_codes,
    gpus,
    grammar,
    hostfiles,
    inner_texts,
    last_commands,
    launchers,
    left_unused,
    lines,
    literal_text,
    log_folders,
    loop_flow,
    loop_variables,
    lost_values,
    mismatched_names,
    near_misses,
    never_run,
    node_lists,
    node_loops,
    options,
    plain_commands,
    ports,
    program_launchers,
    programs,
    questions,
    quoting,
    ranks,
    redirections,
    removals,
    rendezvous,
    repository_files,
    requests,
    results,
    script_arguments,
    secrets,
    settings,
    several_nodes,
    shared_files,
    shell,
    sizes,
    slurm_values,
    starting,
    status_flow,
    steps,
    storage,
    submissions,
    subshells,
    tasks,
    test_values,
    unset_variables,
    usage,
    variables,
    waiting,
    word_slips,
)


def _all(*checks: RuleCheck) -> RuleCheck:
    """Return one check of several: a rule whose mistake has several forms. Of one place only the first check reports."""

    def check(job: JobDescription) -> Iterator[Violation]:
        places: set[int] = set()
        for part in checks:
            hits = [hit for hit in part(job) if hit.offset not in places]
            places.update(hit.offset for hit in hits)
            yield from hits

    return check


def _certain_first(*checks: RuleCheck) -> RuleCheck:
    """Return one check of several: the first that is certain reports, and notes count only if none is."""

    def check(job: JobDescription) -> Iterator[Violation]:
        found = [list(part(job)) for part in checks]
        certain = ([hit for hit in hits if hit.severity != "note"] for hits in found)
        yield from next((hits for hits in certain if hits), [hit for hits in found for hit in hits])

    return check


MISSPELLED_VARIABLE = _all(variables.misspelled, variables.near_names)
INVALID_VALUE = _all(
    variables.invalid, variables.not_a_number, variables.port_zero, ports.job_as_port, ports.ports_of_options
)
FIXED_PORT = _all(lost_values.port_reaches_nothing, ports.port)
NODE_LIST = _all(node_lists.node_list, lost_values.list_at_commas)
ARGUMENTS_DROPPED = _all(
    dataflow.arguments_dropped,
    lost_values.option_ignored,
    lost_values.option_overwritten,
    caller_values.options_unused,
    caller_values.options_collected,
    caller_values.options_replaced,
    caller_values.argument_replaced,
    caller_values.settings_for_nobody,
    caller_values.settings_fixed,
    never_run.launcher_not_run,
    script_arguments.letters,
    script_arguments.value_not_shifted,
    script_arguments.option_as_value,
)
NOT_EXPORTED = _all(
    dataflow.not_exported,
    dataflow.without_export,
    dataflow.not_passed,
    dataflow.into_container,
    lost_values.named_not_exported,
    lost_values.quoted_for_another_shell,
    lost_values.quoted_for_ssh,
    lost_values.devices_not_exported,
    lost_values.exported_list,
    repository_files.read_by_child,
)
UNSET_VARIABLE = _all(
    unset_variables.unset,
    unset_variables.set_too_late,
    lines.set_in_comment,
    unset_variables.no_slurm_name,
    derived_counts.of_step,
    unset_variables.other_names,
    batch_lines.pbs_names,
    batch_lines.sbatch_names,
    batch_lines.bare_names,
    lines.empty_value,
    unset_variables.other_case,
    subshells.foreign_arrays,
    submissions.submitted_text,
    submissions.written_text,
    mismatched_names.related_names,
    near_misses.nearly_own,
    near_misses.swapped_letters,
    mismatched_names.only_longer_names,
    mismatched_names.index_never_set,
    mismatched_names.generated_directive,
    mismatched_names.printed_names,
    lost_values.missing_arguments,
    lost_values.set_only_inside,
    loop_variables.expanded_before_loop,
    loop_variables.other_name_in_branch,
    lost_values.used_before_in_block,
    lost_values.path_of_misspelt,
    empty_values.keywords,
    empty_values.set_in_front,
    empty_values.set_below,
    empty_values.one_of_many,
    empty_values.in_other_case,
    empty_values.longer_than_own,
    empty_values.name_as_folder,
    repository_files.before_source,
    repository_files.set_nowhere,
    script_arguments.beyond_count,
    script_arguments.default_without_sign,
)
TEST_SYNTAX = _all(
    shell.brackets, conditions.conditions, conditions.fractions, shell.unset_value, shell.colon_assignment
)
MISTYPED_COMMAND = _all(
    commands.mistyped,
    commands.misspelt_commands,
    lines.assigned_program,
    options.misspelt_subcommands,
    commands.repeated_words,
    batch_lines.foreign_programs,
    activation.misspelt_starters,
    activation.nothing_to_deactivate,
    activation.wrong_activation,
    activation.module_names,
    word_slips.doubled_words,
    word_slips.lone_interpreter,
    word_slips.cut_address,
    word_slips.misspelt_truth,
    plain_commands.mode_without_name,
)
IDLE_GPUS = _certain_first(
    gpus.idle,
    steps.few_started,
    steps.one_gpu_config,
    usage.one_after_another,
    counts.told_fewer,
    counts.few_in_parallel,
    usage.few_parts,
    usage.openmmlab_fewer,
    usage.on_cpu,
    programs.on_cpu,
    usage.cpu_build,
    activation.program_of_one_gpu,
)
MORE_RANKS_THAN_GPUS = _all(
    gpus.too_many,
    derived_counts.total_per_node,
    steps.too_many_started,
    counts.told_more,
    gpus.few_visible,
    sizes.parts_of_servers,
    ranks.listed_gpus,
    ranks.cpus_as_ranks,
    usage.listed_more,
    programs.other_launchers,
    usage.openmmlab_more,
    several_nodes.ranks_of_config,
)
MEMORY_UNIT = _all(requests.megabytes, steps.small_memory, requests.bytes_of_memory, usage.memory_of_ranks)
VISIBLE_DEVICES = _all(
    gpus.visible_devices,
    steps.listed_twice,
    launchers.ignored_devices,
    gpus.of_all_ranks,
    gpus.of_loops,
    derived_counts.chosen_device,
    sizes.unreadable_list,
    sizes.queried_devices,
    programs.slots_as_devices,
)
SEVERAL_TORCHRUNS = _all(
    tasks.several,
    tasks.on_first_node,
    steps.launchers_in_tasks,
    steps.per_gpu_tasks,
    hostfiles.on_every_node,
    ranks.launchers_by_mpirun,
)
BROKEN_LINE = _all(
    shell.continued,
    lines.joined_words,
    lines.assignments_of_command,
    lines.hash_in_quotes,
    near_misses.glued_comment,
    lines.cut_commands,
    lines.hydra_arguments,
    lines.swallowed_by,
    lines.no_assignments,
    quoting.inline_python,
    inner_texts.split_scripts,
)
DELETES_TOO_MUCH = _all(
    removals.whole_trees,
    removals.removed_before_read,
    removals.caches_of_tasks,
    removals.pattern_of_siblings,
    removals.removed_after_submission,
    removals.own_checkout,
    storage.deletions,
    storage.of_other_tasks,
    storage.of_other_jobs,
    shared_files.removed_by_array,
)
FIXED_NAME_IN_TMP = _all(storage.fixed, storage.lone_dollar, removals.patterns_in_tmp)
OUTPUT_FOLDER = _all(log_folders.output, log_folders.log_in_root, log_folders.of_other_systems, log_folders.redirected)
SCRIPT_FOLDER = _all(directives.script_folder, directives.own_folder, directives.in_home, directives.home_as_base)
CONTAINER_SHELL_ENDED = _all(
    environments.container_ended, environments.activated_elsewhere, activation.deactivated, activation.purged
)
EXIT_CODE_LOST = _all(
    results.piped_group,
    status_flow.of_other_command,
    status_flow.cancels_itself,
    last_commands.hides_result,
    exit_codes.exit_code,
    exit_codes.group_to_tee,
    status_flow.status_of_tee,
    status_flow.piped_function,
    status_flow.exit_behind_script,
    status_flow.only_printed,
    exit_codes.piped_inside,
    exit_codes.echoed_failure,
    results.piped_script,
    exit_codes.always_success,
    left_unused.counted_failures,
    last_commands.hides_results_of_background,
    waiting.results_of_wait,
)
BACKGROUND_NOT_AWAITED = _all(
    waiting.background,
    waiting.scripts_in_background,
    waiting.waits_for_last,
    waiting.beside_last,
    containers.left_running,
    questions.sent_to_session,
)
OPTION_TWICE = _all(requests.twice, requests.settings_twice, requests.lost_suffix)
EXPANDED_TOO_EARLY = _all(dataflow.early, dataflow.submitted_too_early, submissions.wrapped_too_early)
NO_SHEBANG = _all(directives.shebang, directives.interpreter)
SET_E = _all(exit_codes.set_e, error_exits.ends_script)
UNBOUND = _all(exit_codes.unbound, error_exits.tested_unset)
SECRET_PRINTED = _all(secrets.printed, secrets.traced)
SECRET_IN_SCRIPT = _all(secrets.secret, secrets.more_secrets)
VARIABLE_NOT_EXPANDED = _all(
    quoting.not_expanded,
    quoting.quoted_setting,
    quoting.quoted_name,
    inner_texts.shell_names_in_programs,
    literal_text.escaped,
    literal_text.json_in_quotes,
)
VALUE_SPLIT = _all(
    commands.value_split,
    lines.blank_value,
    lines.split_mounts,
    sizes.queried_count,
    derived_counts.miscounted,
    activation.exported_words,
    script_arguments.split_names,
    plain_commands.commas_between,
)
NEVER_EXPANDED = _all(
    quoting.literal,
    lines.no_dollar_option,
    quoting.names_as_text,
    quoting.literal_documents,
    quoting.echoed_newlines,
    loop_variables.not_calculated,
    loop_variables.product_as_text,
    literal_text.braces_around,
    literal_text.closing_brace,
    literal_text.two_closing_braces,
    literal_text.own_names_in_documents,
    literal_text.name_in_braces,
    literal_text.name_as_folder,
    literal_text.name_of_loop,
    literal_text.bare_program,
    literal_text.process_names,
)
ASKS_FOR_ANSWER = _all(environments.asks, environments.asks_more, questions.asks_for_group)
NO_TERMINAL = _all(environments.terminal, questions.needs_terminal)
STRAY_LINE = _all(
    commands.stray,
    near_misses.module_alone,
    word_slips.foreign_text,
    word_slips.written_prompts,
    word_slips.terminal_prompts,
)
UNTERMINATED = _all(shell.unterminated, grammar.syntax)
NODE_COUNT = _all(tasks.count, counts.group_of_one, hostfiles.repeated_nodes, node_loops.first_rank_of_loop)
INPUT_NOT_READ = _all(plain_commands.input_not_read, plain_commands.tee_without_pipe)
PORT_PER_NODE = _all(ports.port_per_node, node_loops.ports_of_loop)
FIXED_RENDEZVOUS_ID = _all(ports.identity, hostfiles.stale_address)
MISSING_COLON = _all(commands.missing_colon, commands.semicolon, commands.path_lost, activation.search_paths)
VARIABLE_IN_DIRECTIVE = _all(directives.variable, batch_lines.literal_variables)
DIRECTIVE_NOT_READ = _all(derived_counts.all_commented, directives.unread, requests.cut_list, batch_lines.unread_lines)
DIRECTIVE_REFUSED = _all(
    directives.refused,
    directives.pbs_without_letter,
    directives.bad_counts,
    slurm_values.refused_directives,
    requests.refused_times,
    requests.exclusive_options,
    requests.counted_gpus,
    requests.misplaced_walltime,
    batch_lines.refused_lines,
    batch_lines.blank_in_request,
    batch_lines.value_missing,
    batch_lines.open_list,
)
UNKNOWN_OPTION = _all(options.unknown_option, slurm_values.refused_commands)
NO_EFFECT = _all(variables.no_effect, counts.never_default, activation.set_after_work)
DEVICE_OF_ONE_GPU = _all(counts.device_of_one, gpus.beyond_visible, usage.beyond_job)
SAME_GPU = _all(counts.same_gpu, gpus.overlapping, sizes.device_of_all, loop_variables.device_never_changes)
NAMED_NODES = _all(counts.named_nodes, node_lists.fixed_hosts)
TASKS_CONTRADICT = _all(
    counts.contradicting_tasks,
    counts.gpus_of_tasks,
    derived_counts.step_per_node,
    slurm_values.tasks_as_total,
    counts.step_of_one_task,
    sizes.lightning_alone,
    sizes.lightning_tasks,
    usage.mpi_alone,
)
HOST_FILE = _all(
    hostfiles.one_line,
    hostfiles.list_as_file,
    hostfiles.host_lines,
    hostfiles.include_form,
    several_nodes.without_hosts,
)
ONE_NODE_ONLY = _all(tasks.one_node, ranks.factory_alone)
NODE_RANK_MISSING = _all(rendezvous.rank_missing, ranks.factory_rank)
NOTHING_TO_DO = _all(usage.nothing, usage.not_run)
IDLE_NODES = _all(steps.idle_nodes, counts.few_processes, usage.one_node_programs, usage.one_node_launchers)
FEW_CPUS = _all(tasks.few_cpus, usage.one_cpu, usage.loader_workers, derived_counts.masks)
THREADS = _all(tasks.oversubscribed, usage.threads_of_tasks, activation.threads_of_node, lost_values.set_over_request)
OPTION_OF_PROGRAM = _all(submissions.late_options, submissions.submitted_program)
DEPENDENCY = _all(submissions.dependency, submissions.wrong_field, submissions.last_of_loop)
WORLD_SIZE = _all(
    tasks.world_size,
    counts.told_world,
    counts.told_nodes,
    counts.spawned_world,
    sizes.world_of_options,
    program_launchers.told_launcher,
)
TIME_UNIT = _all(steps.minutes, requests.hours_as_minutes)
QUOTED_TILDE = _all(commands.quoted_tilde, storage.tilde_of_option)
PATTERN_NOT_EXPANDED = _all(
    storage.unexpanded, requests.foreign_patterns, inner_texts.quoted_patterns, arrays.number_without_array
)
MASTER_ADDRESS = _all(
    rendezvous.address,
    rendezvous.local_url,
    launchers.without_address,
    ranks.node_record,
    several_nodes.own_network,
    node_loops.addresses_of_loop,
)
LAUNCHER_OPTION = _all(
    options.launcher_option,
    launchers.filters,
    options.unknown_launcher_option,
    options.malformed,
    options.worker_without_address,
    options.exclusive,
    settings.refused_settings,
    settings.without_value,
    programs.container_options,
    containers.relative_folder,
    programs.mpi_options,
    several_nodes.rendezvous_words,
    several_nodes.ranks_of_loop,
    word_slips.container_without_detach,
)
BLOCKS_SCRIPT = _all(waiting.blocks, launchers.ray_blocks)
LITERAL_QUOTES = _all(
    shell.literal_quotes, quoting.quotes_in_value, inner_texts.operators_in_values, programs.json_in_quotes
)
LOOP_VALUES = _all(
    conditions.loops,
    quoting.first_element,
    settings.array_of_options,
    quoting.appended_text,
    quoting.quoted_list,
    subshells.reads_the_list,
    loop_flow.same_variable,
    loop_flow.list_as_text,
    loop_flow.replaced_in_loop,
)
CONSTANT_CONDITION = _all(
    conditions.constant,
    inner_texts.tested_patterns,
    test_values.tested_word,
    test_values.unquoted_not_empty,
    test_values.or_word,
    test_values.other_case_of_value,
    case_patterns.taken_twice,
    test_values.text_as_number,
    loop_flow.tested_too_early,
)
ENDLESS_WAIT = _all(waiting.server_awaited, waiting.follows_log, waiting.endless_loop, script_arguments.never_shifted)
EXIT_ZERO = _all(
    results.exit_zero,
    exit_codes.status_of_block,
    exit_codes.exit_of_message,
    exit_codes.trapped_exit,
    results.told_failure,
    status_flow.told_and_ignored,
)
CONDA_NOT_SET_UP = _all(environments.conda, environments.conda_elsewhere, environments.conda_in_shell)
ONE_LOG_FOR_ARRAY = _all(requests.shared_log, requests.one_log, arrays.shared_files, arrays.shared_settings)
OUT_OF_RANGE = _all(
    conditions.out_of_range,
    arrays.computed_index,
    arrays.case_of_task,
    near_misses.branches_of_task,
    arrays.line_zero,
    loop_variables.index_beyond_list,
)
OUT_OF_PLACE = _all(
    conditions.out_of_place,
    subshells.aliases,
    subshells.never_called,
    shared_files.entered_twice,
    repository_files.other_folder,
    repository_files.inside_itself,
    loop_flow.folder_stays,
    starting.relative_twice,
)
SIGNAL_NOT_TRAPPED = _all(
    launchers.untrapped, launchers.not_passed, activation.trapped_after_work, left_unused.signal_without_step
)
PREPARED_BY_ALL = _all(shared_files.prepared_by_all, shared_files.created_by_array)
OTHER_SHELL = _all(shell.other_shell, activation.csh_script)
LOST_IN_SUBSHELL = _all(
    subshells.lost, subshells.exit_inside, subshells.exit_in_pipe, subshells.elsewhere, never_run.only_sets
)
SAME_NODE_RANK = _all(
    rendezvous.same_rank_everywhere,
    rendezvous.rank_not_used,
    ranks.wrong_ranks,
    ranks.constant_rank,
    ranks.rank_of_loop,
    programs.index_of_tasks,
    several_nodes.rank_of_hosts,
    several_nodes.rank_of_config,
)
OVERWRITTEN_OUTPUT = _all(
    subshells.overwritten,
    subshells.tee_in_loop,
    subshells.wrong_order,
    results.message_over_log,
    results.log_over_messages,
    redirections.misspelt,
    redirections.opened_twice,
    redirections.version_as_file,
    redirections.own_input,
    redirections.lost_first_lines,
    redirections.one_log_for_two,
    redirections.one_file_for_loop,
    redirections.thrown_away,
)
GPUS_HELD = _all(requests.held, requests.sleeps_at_end)
FOLDER_NOT_COPIED = _all(storage.not_copied, shared_files.archives)
IN_SEQUENCE = _all(steps.sequence, several_nodes.scripts_in_sequence)
STEP_NODES = _all(several_nodes.step_nodes, several_nodes.ray_drivers)
BUILTIN_AS_PROGRAM = _all(programs.builtins, starting.functions)
KILLS_OTHERS = _all(cancelling.pkill, cancelling.of_user, cancelling.cancels_jobs)
NOT_RUNNABLE = _all(
    starting.without_folder, starting.other_language, starting.command_in_one_word, starting.in_new_folder
)
NODE_LOCAL_FILE = _all(
    storage.local, storage.windows_path, shared_files.folder_of_first_node, shared_files.made_where_submitted
)
ARRAY_NOT_USED = _all(requests.array_not_used, arrays.number_not_used, left_unused.choice_in_comment)
