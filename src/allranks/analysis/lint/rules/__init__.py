"""The list of all rules: id, severity, check, and the texts that all findings of a rule share."""

from __future__ import annotations

from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription, LintRule, RuleCheck
from allranks.analysis.lint.records import Violation
from allranks.analysis.lint.rules import (
    activation,
    arrays,
    batch_lines,
    caller_values,
    cancelling,
    commands,
    conditions,
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
    launchers,
    lines,
    literal_text,
    log_folders,
    loop_flow,
    loop_variables,
    lost_values,
    mismatched_names,
    options,
    ports,
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

ANY = ("script", "environment", "spec")
SLURM = "Slurm's sbatch and srun manuals"
TORCHRUN = "torch/distributed/run.py"
ELASTIC = "torch/distributed/elastic/rendezvous"
NCCL_DOCS = "NCCL user guide, environment variables"
SLURM_TEST = "tested with Slurm 22.05"


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


# The rules whose mistake has several forms.
MISSPELLED_VARIABLE = _all(variables.misspelled, variables.near_names)
INVALID_VALUE = _all(
    variables.invalid, variables.not_a_number, variables.port_zero, ports.job_as_port, ports.ports_of_options
)
FIXED_PORT = _all(lost_values.port_reaches_nothing, ports.port)
NODE_LIST = _all(quoting.node_list, lost_values.list_at_commas)
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
    script_arguments.letters,
    script_arguments.value_not_shifted,
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
    batch_lines.bare_names,
    lines.empty_value,
    unset_variables.other_case,
    subshells.foreign_arrays,
    submissions.submitted_text,
    submissions.written_text,
    mismatched_names.related_names,
    mismatched_names.only_longer_names,
    mismatched_names.index_never_set,
    mismatched_names.generated_directive,
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
    repository_files.before_source,
    repository_files.set_nowhere,
    script_arguments.beyond_count,
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
    activation.wrong_activation,
    activation.module_names,
    word_slips.doubled_words,
    word_slips.lone_interpreter,
    word_slips.cut_address,
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
OUTPUT_FOLDER = _all(log_folders.output, log_folders.log_in_root, log_folders.redirected)
SCRIPT_FOLDER = _all(directives.script_folder, directives.own_folder, directives.in_home, directives.home_as_base)
CONTAINER_SHELL_ENDED = _all(
    environments.container_ended, environments.activated_elsewhere, activation.deactivated, activation.purged
)
EXIT_CODE_LOST = _all(
    results.piped_group,
    status_flow.of_other_command,
    status_flow.cancels_itself,
    exit_codes.exit_code,
    status_flow.status_of_tee,
    status_flow.piped_function,
    status_flow.exit_behind_script,
    status_flow.only_printed,
    exit_codes.piped_inside,
    exit_codes.echoed_failure,
    exit_codes.piped_script,
    exit_codes.always_success,
    waiting.results_of_wait,
)
BACKGROUND_NOT_AWAITED = _all(
    waiting.background,
    waiting.scripts_in_background,
    waiting.waits_for_last,
    waiting.beside_last,
    questions.sent_to_session,
)
OPTION_TWICE = _all(requests.twice, requests.settings_twice, requests.lost_suffix)
EXPANDED_TOO_EARLY = _all(dataflow.early, dataflow.submitted_too_early)
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
)
NEVER_EXPANDED = _all(
    quoting.literal,
    lines.no_dollar_option,
    quoting.names_as_text,
    quoting.literal_documents,
    quoting.echoed_newlines,
    loop_variables.not_calculated,
    literal_text.braces_around,
    literal_text.closing_brace,
    literal_text.two_closing_braces,
    literal_text.own_names_in_documents,
    literal_text.name_in_braces,
)
ASKS_FOR_ANSWER = _all(environments.asks, environments.asks_more, questions.asks_for_group)
NO_TERMINAL = _all(environments.terminal, questions.needs_terminal)
STRAY_LINE = _all(commands.stray, word_slips.foreign_text, word_slips.written_prompts)
UNTERMINATED = _all(shell.unterminated, grammar.syntax)
NODE_COUNT = _all(tasks.count, counts.group_of_one, hostfiles.repeated_nodes)
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
WORLD_SIZE = _all(tasks.world_size, counts.told_world, counts.told_nodes, counts.spawned_world, sizes.world_of_options)
TIME_UNIT = _all(steps.minutes, requests.hours_as_minutes)
PATTERN_NOT_EXPANDED = _all(storage.unexpanded, requests.foreign_patterns, inner_texts.quoted_patterns)
MASTER_ADDRESS = _all(
    rendezvous.address,
    rendezvous.local_url,
    launchers.without_address,
    ranks.node_record,
    several_nodes.own_network,
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
)
CONSTANT_CONDITION = _all(
    conditions.constant,
    inner_texts.tested_patterns,
    test_values.tested_word,
    test_values.unquoted_not_empty,
    test_values.or_word,
    test_values.other_case_of_value,
)
ENDLESS_WAIT = _all(waiting.server_awaited, waiting.follows_log)
EXIT_ZERO = _all(
    exit_codes.exit_zero,
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
    arrays.line_zero,
    loop_variables.index_beyond_list,
)
OUT_OF_PLACE = _all(
    conditions.out_of_place,
    subshells.aliases,
    subshells.never_called,
    shared_files.entered_twice,
    repository_files.other_folder,
    loop_flow.folder_stays,
)
SIGNAL_NOT_TRAPPED = _all(launchers.untrapped, launchers.not_passed, activation.trapped_after_work)
PREPARED_BY_ALL = _all(shared_files.prepared_by_all, shared_files.created_by_array)
OTHER_SHELL = _all(shell.other_shell, activation.csh_script)
LOST_IN_SUBSHELL = _all(subshells.lost, subshells.exit_inside, subshells.exit_in_pipe, subshells.elsewhere)
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
NOT_RUNNABLE = _all(starting.without_folder, starting.other_language, starting.command_in_one_word)
NODE_LOCAL_FILE = _all(storage.local, storage.windows_path, shared_files.folder_of_first_node)

RULES: tuple[LintRule, ...] = (
    # Environment variables
    LintRule("unknown-variable", "error", variables.unknown, variables.UNKNOWN_WHY, "", "the libraries' own sources and binaries", ANY),
    LintRule("misspelled-variable", "warning", MISSPELLED_VARIABLE, variables.UNKNOWN_WHY, "", "the strings in libnccl 2.21 and 2.32", ANY),
    LintRule("deprecated-variable", "note", variables.deprecated, variables.DEPRECATED_WHY, "", "release notes of the library", ANY),
    LintRule("gloo-interface-syntax", "error", variables.gloo_syntax, variables.GLOO_WHY, variables.GLOO_CURE, "tested with torch 2.13", ANY),
    LintRule("invalid-value", "error", INVALID_VALUE, "The library ignores the value or refuses to start.", "", NCCL_DOCS, ANY),
    LintRule("no-effect", "note", NO_EFFECT, variables.NO_EFFECT_WHY, "remove the line", "NCCL's defaults: both are 0", ANY),
    LintRule("hard-coded-interface", "note", variables.interface, variables.INTERFACE_WHY, variables.INTERFACE_CURE, "nccl#286, nccl#1837", ANY),
    LintRule("loopback-across-nodes", "error", variables.loopback, variables.LOOPBACK_WHY, variables.INTERFACE_CURE, NCCL_DOCS),
    LintRule("transport-disabled", "note", variables.disabled, variables.DISABLED_WHY, variables.DISABLED_CURE, "nccl#667, nccl#1838", ANY),
    LintRule("fixed-gid-index", "note", variables.gid, variables.GID_WHY, "remove it, or determine it on each node", "NCCL 2.21 notes", ANY),
    LintRule("error-handling-off", "warning", variables.handling_off, variables.HANDLING_WHY, variables.HANDLING_CURE, "ProcessGroupNCCL.hpp", ANY),
    LintRule("debug-setting", "note", variables.debugging, variables.DEBUGGING_WHY, "remove it", "CUDA C++ programming guide, environment variables", ANY),
    # Rendezvous
    LintRule("fixed-port", "warning", FIXED_PORT, ports.PORT_WHY, ports.PORT_CURE, ELASTIC, ANY),
    LintRule("ephemeral-port", "note", ports.ephemeral, ports.EPHEMERAL_WHY, ports.PORT_CURE, "enroot#243"),
    LintRule("port-per-node", "error", ports.port_per_node, ports.PER_NODE_WHY, ports.PORT_CURE, "LLaMA-Factory's launcher"),
    LintRule("fixed-rendezvous-id", "note", FIXED_RENDEZVOUS_ID, ports.ID_WHY, ports.ID_CURE, ELASTIC),
    LintRule("rendezvous-id-per-node", "error", rendezvous.id_per_node, rendezvous.ID_PER_NODE_WHY, rendezvous.ID_PER_NODE_CURE, ELASTIC),
    LintRule("node-rank-ignored", "note", rendezvous.node_rank, rendezvous.RANK_WHY, rendezvous.RANK_CURE, TORCHRUN + ", pytorch#150660"),
    LintRule("node-rank-missing", "error", NODE_RANK_MISSING, rendezvous.MISSING_WHY, rendezvous.MISSING_CURE, TORCHRUN),
    LintRule("expanded-too-early", "error", EXPANDED_TOO_EARLY, dataflow.EARLY_WHY, dataflow.EARLY_CURE, "accelerate#2816"),
    LintRule("master-address", "warning", MASTER_ADDRESS, rendezvous.ADDRESS_WHY, rendezvous.ADDRESS_CURE, "nebius-solutions-library#177"),
    LintRule("address-without-host", "warning", rendezvous.hostless, rendezvous.HOSTLESS_WHY, rendezvous.HOSTLESS_CURE, ELASTIC + ", pytorch#73656"),
    LintRule("scontrol-in-container", "warning", rendezvous.container, rendezvous.CONTAINER_WHY, rendezvous.ADDRESS_CURE, "mmcv#700, pith-train#91"),
    LintRule("whole-node-list", "error", NODE_LIST, quoting.ARRAY_WHY, quoting.ARRAY_CURE, "bash manual, arrays"),
    LintRule("compressed-node-list", "error", quoting.compressed, quoting.LIST_WHY, quoting.LIST_CURE, SLURM_TEST),
    LintRule("never-expanded", "error", NEVER_EXPANDED, quoting.TEXT_WHY, quoting.TEXT_CURE, "bash manual, quoting"),
    LintRule("octal-number", "warning", ports.octal, ports.OCTAL_WHY, "", "bash manual, shell arithmetic"),
    # Tasks and resources
    LintRule("several-torchruns", "error", SEVERAL_TORCHRUNS, tasks.SEVERAL_WHY, tasks.SEVERAL_CURE, SLURM_TEST),
    LintRule("one-node-only", "error", ONE_NODE_ONLY, tasks.ONE_NODE_WHY, tasks.ONE_NODE_CURE, SLURM),
    LintRule("node-count", "error", NODE_COUNT, tasks.COUNT_WHY, tasks.COUNT_CURE, TORCHRUN),
    LintRule("fewer-tasks-than-nodes", "error", tasks.fewer, tasks.FEWER_WHY, tasks.FEWER_CURE, SLURM),
    LintRule("processes-of-one-node", "warning", tasks.processes, tasks.PROCESSES_WHY, tasks.PROCESSES_CURE, "accelerate/utils/launch.py"),
    LintRule("cpus-not-inherited", "note", tasks.inherited, tasks.INHERITED_WHY, tasks.INHERITED_CURE, "release notes of Slurm 22.05, Lightning#18650"),
    LintRule("cpus-missing", "note", tasks.missing, tasks.MISSING_WHY, tasks.MISSING_CURE, SLURM),
    LintRule("threads-missing", "note", tasks.threads, tasks.THREADS_WHY, tasks.THREADS_CURE, TORCHRUN),
    LintRule("gpus-for-the-job", "note", tasks.gpus_total, tasks.GPUS_WHY, "--gpus-per-node=<n>", SLURM),
    LintRule("gpu-per-task", "note", tasks.gpu_per_task, tasks.PER_TASK_WHY, tasks.PER_TASK_CURE, SLURM),
    LintRule("device-of-one-gpu", "error", DEVICE_OF_ONE_GPU, tasks.PER_TASK_WHY, tasks.PER_TASK_CURE, SLURM),
    LintRule("tasks-contradict", "warning", TASKS_CONTRADICT, counts.TASKS_WHY, counts.TASKS_CURE, SLURM_TEST),
    LintRule("named-nodes", "warning", counts.named_nodes, counts.NAMED_WHY, counts.NAMED_CURE, SLURM_TEST),
    LintRule("same-gpu", "warning", SAME_GPU, counts.PARALLEL_WHY, counts.PARALLEL_CURE, "CUDA C++ programming guide, environment variables"),
    LintRule("steps-wait", "warning", counts.waiting_steps, counts.STEPS_WHY, counts.STEPS_CURE, SLURM_TEST),
    LintRule("too-few-slots", "error", launchers.few_slots, launchers.SLOTS_WHY, "", "Open MPI's mpirun manual; Horovod's documentation, horovodrun"),
    LintRule("parallel-sizes", "error", sizes.parallel_sizes, sizes.SIZES_WHY, sizes.SIZES_CURE, "Megatron-LM's arguments; torchtitan's ParallelDims"),
    LintRule("host-file", "error", HOST_FILE, hostfiles.HOSTFILE_WHY, hostfiles.HOSTFILE_CURE, "DeepSpeed's launcher, runner.py"),
    LintRule("ray-step-ends", "warning", launchers.ray_step_ends, launchers.RAY_WHY, "", "Ray's documentation, Slurm; srun manual"),
    LintRule("more-ranks-than-gpus", "error", MORE_RANKS_THAN_GPUS, gpus.TOO_MANY_WHY, "set both to the same number", TORCHRUN),
    LintRule("idle-gpus", "warning", IDLE_GPUS, gpus.IDLE_WHY, gpus.IDLE_CURE, TORCHRUN),
    LintRule("idle-nodes", "warning", IDLE_NODES, steps.NODES_WHY, steps.NODES_CURE, SLURM),
    LintRule("ranks-in-separate-jobs", "warning", requests.separate_jobs, requests.SEPARATE_WHY, requests.SEPARATE_CURE, SLURM),
    LintRule("world-size", "error", WORLD_SIZE, tasks.WORLD_WHY, tasks.WORLD_CURE, "torch.distributed documentation, env://"),
    LintRule("threads-oversubscribed", "warning", THREADS, tasks.OVERSUBSCRIBED_WHY, tasks.OVERSUBSCRIBED_CURE, "OpenMP specification"),
    LintRule("fewer-cpus-than-ranks", "warning", FEW_CPUS, tasks.FEW_CPUS_WHY, tasks.FEW_CPUS_CURE, SLURM),
    LintRule("gpus-held", "warning", GPUS_HELD, requests.HELD_WHY, requests.HELD_CURE, SLURM),
    LintRule("nothing-to-do", "warning", NOTHING_TO_DO, usage.NOTHING_WHY, "take the # away; or remove the script", "bash manual, comments"),
    LintRule("memory-unit", "warning", MEMORY_UNIT, requests.UNIT_WHY, requests.UNIT_CURE, SLURM),
    LintRule("one-log-for-array", "warning", ONE_LOG_FOR_ARRAY, requests.SHARED_LOG_WHY, requests.SHARED_LOG_CURE, SLURM),
    LintRule("option-twice", "warning", OPTION_TWICE, requests.TWICE_WHY, requests.TWICE_CURE, "argparse; " + SLURM_TEST),
    LintRule("visible-devices", "warning", VISIBLE_DEVICES, gpus.VISIBLE_WHY, gpus.VISIBLE_CURE, "Slurm's gres manual"),
    LintRule("one-failed-rest-waits", "note", tasks.kill, tasks.KILL_WHY, tasks.KILL_CURE, SLURM_TEST),
    LintRule("step-exceeds-job", "error", steps.exceeds, steps.EXCEEDS_WHY, steps.EXCEEDS_CURE, SLURM),
    LintRule("step-nodes", "error", STEP_NODES, several_nodes.STEP_WHY, several_nodes.STEP_CURE, SLURM_TEST),
    LintRule("job-inside-job", "warning", steps.allocates, steps.INNER_WHY, steps.INNER_CURE, SLURM),
    LintRule("time-unit", "warning", TIME_UNIT, steps.TIME_WHY, "--time=<hours>:00:00", SLURM),
    LintRule("launchers-disagree", "error", steps.disagree, steps.DISAGREE_WHY, "the same address and port for all, and a rank for each", TORCHRUN),
    # Launchers, environment and signals
    LintRule("needs-ssh", "note", launchers.ssh, launchers.SSH_WHY, launchers.SSH_CURE, "DeepSpeed#1603, #2958"),
    LintRule("ssh-without-command", "warning", environments.ssh_session, environments.SESSION_WHY, environments.SESSION_CURE, "ssh manual"),
    LintRule("srun-without-command", "error", environments.no_command, environments.NO_COMMAND_WHY, environments.NO_COMMAND_CURE, SLURM),
    LintRule("no-terminal", "error", NO_TERMINAL, environments.TERMINAL_WHY, environments.TERMINAL_CURE, "docker run reference, foreground"),
    LintRule("container-shell-ended", "warning", CONTAINER_SHELL_ENDED, environments.ENDED_WHY, environments.ENDED_CURE, "apptainer exec manual"),
    LintRule("builtin-as-program", "error", BUILTIN_AS_PROGRAM, programs.BUILTIN_WHY, programs.BUILTIN_CURE, "bash manual, builtin commands"),
    LintRule("not-runnable", "error", NOT_RUNNABLE, starting.START_WHY, starting.START_CURE, "bash manual, command search and execution; " + SLURM_TEST),
    LintRule("old-launcher", "note", launchers.old, launchers.OLD_WHY, "use torchrun, which has the same options", TORCHRUN),
    LintRule("export-comma", "error", launchers.comma, launchers.COMMA_WHY, launchers.COMMA_CURE, SLURM_TEST),
    LintRule("export-drops-environment", "warning", launchers.drops, launchers.DROPS_WHY, launchers.DROPS_CURE, SLURM_TEST),
    LintRule("login-shell", "note", launchers.login, launchers.LOGIN_WHY, "use bash -c instead of bash -lc", "bash manual"),
    LintRule("kills-others", "warning", KILLS_OTHERS, cancelling.PKILL_WHY, cancelling.PKILL_CURE, "prime-rl's template"),
    LintRule("signal-kills-torchrun", "warning", launchers.signal, launchers.SIGNAL_WHY, launchers.SIGNAL_CURE, SLURM_TEST),
    LintRule("signal-not-trapped", "warning", SIGNAL_NOT_TRAPPED, launchers.TRAP_WHY, launchers.TRAP_CURE, "bash manual, signals; " + SLURM_TEST),
    LintRule("requeue-truncates-log", "warning", launchers.requeue, launchers.REQUEUE_WHY, "#SBATCH --open-mode=append", SLURM_TEST),
    # Batch script
    LintRule("variable-in-directive", "error", VARIABLE_IN_DIRECTIVE, directives.VARIABLE_WHY, directives.VARIABLE_CURE, SLURM_TEST),
    LintRule("directive-refused", "error", DIRECTIVE_REFUSED, directives.REFUSED_WHY, "", SLURM_TEST),
    LintRule("directive-too-late", "error", directives.late, directives.LATE_WHY, directives.LATE_CURE, SLURM_TEST),
    LintRule("directive-not-read", "warning", DIRECTIVE_NOT_READ, directives.UNREAD_WHY, "write it as #SBATCH at the start of the line", SLURM_TEST),
    LintRule("output-folder", "warning", OUTPUT_FOLDER, log_folders.OUTPUT_WHY, log_folders.OUTPUT_CURE, log_folders.OUTPUT_SOURCE),
    LintRule("no-shebang", "error", NO_SHEBANG, directives.SHEBANG_WHY, "start the file with #!/bin/bash", SLURM_TEST),
    LintRule("dos-line-breaks", "error", directives.line_breaks, directives.CRLF_WHY, "dos2unix FILE, or sed -i 's/\\r$//' FILE", SLURM_TEST, ANY),
    LintRule("exit-code-lost", "warning", EXIT_CODE_LOST, exit_codes.EXIT_WHY, exit_codes.EXIT_CURE, "bash manual, pipelines"),
    LintRule("not-exported", "error", NOT_EXPORTED, dataflow.EXPORT_WHY, "export it before srun", "bash manual, environment"),
    LintRule("unset-variable", "warning", UNSET_VARIABLE, unset_variables.UNSET_WHY, unset_variables.UNSET_CURE, SLURM + "; bash manual, expansion"),
    LintRule("test-syntax", "error", TEST_SYNTAX, shell.BRACKET_WHY, shell.BRACKET_CURE, "bash manual, conditional expressions"),
    LintRule("broken-line", "error", BROKEN_LINE, shell.LINE_WHY, shell.LINE_CURE, "bash manual, quoting"),
    LintRule("typographic-character", "error", shell.typographic, shell.TYPOGRAPHIC_WHY, shell.TYPOGRAPHIC_CURE, "bash manual, definitions"),
    LintRule("stray-line", "error", STRAY_LINE, commands.STRAY_WHY, commands.STRAY_CURE, "bash manual, command search and execution"),
    LintRule("value-split", "error", VALUE_SPLIT, commands.BLANK_WHY, commands.BLANK_CURE, "bash manual, simple command expansion"),
    LintRule("missing-colon", "error", MISSING_COLON, commands.COLON_WHY, commands.COLON_CURE, "bash manual, shell variables: PATH"),
    LintRule("quoted-tilde", "error", commands.quoted_tilde, commands.TILDE_WHY, commands.TILDE_CURE, "bash manual, tilde expansion"),
    LintRule("variable-not-expanded", "error", VARIABLE_NOT_EXPANDED, quoting.QUOTED_WHY, quoting.QUOTED_CURE, "bash manual, quoting"),
    LintRule("blank-before-equals", "error", shell.equals, shell.EQUALS_WHY, "--name=value", "argparse"),
    LintRule("csh-syntax", "error", shell.csh, shell.CSH_WHY, "NAME=value, or export NAME=value", "bash manual, set"),
    LintRule("folder-not-copied", "warning", FOLDER_NOT_COPIED, storage.COPY_WHY, "cp -r", "cp manual"),
    LintRule("unquoted-variable", "note", shell.unquoted, shell.QUOTE_WHY, shell.QUOTE_CURE, "bash manual, word splitting"),
    LintRule("literal-quotes", "warning", LITERAL_QUOTES, shell.LITERAL_WHY, shell.LITERAL_CURE, "bash manual, parameter expansion"),
    LintRule("runs-arguments", "warning", shell.runs_arguments, shell.ARGUMENTS_WHY, shell.ARGUMENTS_CURE, "bash manual, special parameters"),
    LintRule("mistyped-command", "warning", MISTYPED_COMMAND, commands.MISTYPED_WHY, "", "the names of usual commands"),
    LintRule("unterminated", "error", UNTERMINATED, shell.UNTERMINATED_WHY, shell.UNTERMINATED_CURE, "bash manual, quoting"),
    LintRule("exit-zero", "warning", EXIT_ZERO, exit_codes.ZERO_WHY, "exit 1", SLURM),
    LintRule("wait-result-lost", "warning", waiting.wait_result, waiting.RESULT_WHY, waiting.RESULT_CURE, "bash manual, wait"),
    LintRule("endless-wait", "warning", ENDLESS_WAIT, waiting.ENDLESS_WHY, waiting.ENDLESS_CURE, "bash manual, wait"),
    LintRule("conda-not-set-up", "warning", CONDA_NOT_SET_UP, environments.CONDA_WHY, environments.CONDA_CURE, "conda documentation, activate"),
    LintRule("module-after-activation", "warning", environments.module_after, environments.MODULE_WHY, environments.MODULE_CURE, "Lmod user guide, PATH"),
    LintRule("container-without-gpu", "warning", environments.without_gpu, environments.CONTAINER_WHY, environments.CONTAINER_CURE, "apptainer guide"),
    LintRule("asks-for-answer", "warning", ASKS_FOR_ANSWER, environments.ANSWER_WHY, environments.ANSWER_CURE, "pip reference, uninstall -y; apt-get manual"),
    LintRule("background-not-awaited", "error", BACKGROUND_NOT_AWAITED, waiting.WAIT_WHY, waiting.WAIT_CURE, SLURM),
    LintRule("nodes-in-sequence", "error", IN_SEQUENCE, steps.SEQUENCE_WHY, steps.SEQUENCE_CURE, TORCHRUN),
    LintRule("secret-in-script", "warning", SECRET_IN_SCRIPT, secrets.CLEAR_TEXT_WHY, secrets.CLEAR_TEXT_CURE, "huggingface_hub's documentation, security"),
    LintRule("secret-printed", "warning", SECRET_PRINTED, secrets.PRINTED_WHY, secrets.PRINTED_CURE, "bash manual, echo"),
    LintRule("placeholder", "note", shell.placeholder, shell.PLACEHOLDER_WHY, shell.PLACEHOLDER_CURE, "the file itself"),
    LintRule("script-folder", "warning", SCRIPT_FOLDER, directives.FOLDER_WHY, directives.FOLDER_CURE, SLURM),
    LintRule("set-e", "warning", SET_E, exit_codes.SET_E_WHY, exit_codes.SET_E_CURE, "bash manual, set"),
    LintRule("buffered-output", "note", subshells.buffered, subshells.BUFFERED_WHY, "export PYTHONUNBUFFERED=1", "Python manual, -u"),
    LintRule("blocks-script", "warning", BLOCKS_SCRIPT, waiting.BLOCKS_WHY, waiting.BLOCKS_CURE, "the programs' manuals"),
    LintRule("exits-early", "error", waiting.exits_early, waiting.EXIT_WHY, "remove it", "bash manual, exit and exec"),
    LintRule("same-node-rank", "error", SAME_NODE_RANK, rendezvous.SAME_RANK_WHY, rendezvous.SAME_RANK_CURE, TORCHRUN),
    LintRule("arguments-dropped", "warning", ARGUMENTS_DROPPED, dataflow.DROPPED_WHY, dataflow.DROPPED_CURE, "bash manual, special parameters"),
    LintRule("launcher-option", "error", LAUNCHER_OPTION, options.OPTION_WHY, options.OPTION_CURE, TORCHRUN + "; accelerate and deepspeed launch"),
    LintRule("loop-values", "error", LOOP_VALUES, conditions.SAME_WHY, "", "bash manual, looping constructs and arrays"),
    LintRule("index-out-of-range", "error", OUT_OF_RANGE, conditions.OUT_OF_RANGE_WHY, conditions.OUT_OF_RANGE_CURE, "bash manual, arrays"),
    LintRule("array-not-used", "warning", requests.array_not_used, requests.UNUSED_WHY, "pass $SLURM_ARRAY_TASK_ID to the program", SLURM),
    LintRule("deletes-too-much", "warning", DELETES_TOO_MUCH, storage.REMOVES_WHY, "", "bash manual, cd; rm manual"),
    LintRule("lost-in-subshell", "warning", LOST_IN_SUBSHELL, subshells.LOST_WHY, subshells.LOST_CURE, "bash manual, command execution environment"),
    LintRule("options-in-one-word", "error", quoting.joined_options, quoting.ONE_WORD_WHY, quoting.ONE_WORD_CURE, "bash manual, word splitting"),
    LintRule("unbound-variable", "warning", UNBOUND, exit_codes.UNBOUND_WHY, "", "bash manual, set -u"),
    LintRule("constant-condition", "warning", CONSTANT_CONDITION, conditions.NEVER_WHY, "", "bash manual, conditional expressions"),
    LintRule("out-of-place", "error", OUT_OF_PLACE, conditions.PLACE_WHY, "", "bash manual, functions, exec and return"),
    LintRule("unknown-option", "error", UNKNOWN_OPTION, options.UNKNOWN_OPTION_WHY, "", "pip and conda reference; " + SLURM),
    LintRule("other-shell", "warning", OTHER_SHELL, shell.SH_WHY, "#!/bin/bash", "zsh manual, options; dash manual"),
    LintRule("dependency", "warning", DEPENDENCY, submissions.DEPENDENCY_WHY, submissions.DEPENDENCY_CURE, "sbatch manual"),
    LintRule("option-of-program", "warning", OPTION_OF_PROGRAM, submissions.LATE_WHY, "", SLURM),
    # Files
    LintRule("path-in-front", "error", commands.path_in_front, commands.PATH_WHY, "", SLURM + "; bash manual, shell variables"),
    LintRule("overwritten-output", "warning", OVERWRITTEN_OUTPUT, subshells.OVER_WHY, "", "bash manual, redirections"),
    LintRule("joined-path", "warning", storage.joined_path, storage.SLASH_WHY, storage.SLASH_CURE, "bash manual, expansion"),
    LintRule("node-local-file", "error", NODE_LOCAL_FILE, storage.LOCAL_WHY, storage.LOCAL_CURE, SLURM_TEST),
    LintRule("prepared-by-all-tasks", "warning", PREPARED_BY_ALL, shared_files.PREPARED_WHY, shared_files.PREPARED_CURE, SLURM),
    LintRule("results-left-on-node", "warning", shared_files.left_on_node, shared_files.LEFT_WHY, shared_files.LEFT_CURE, "Slurm's job_container manual"),
    LintRule("pattern-not-expanded", "warning", PATTERN_NOT_EXPANDED, storage.PATTERN_WHY, storage.PATTERN_CURE, "sbatch manual, filename patterns"),
    LintRule("fixed-name-in-tmp", "warning", FIXED_NAME_IN_TMP, storage.FIXED_WHY, 'use a folder per job: d=$(mktemp -d)', "the sticky bit of /tmp"),
    LintRule("slurm-tmpdir", "note", storage.tmpdir, storage.TMPDIR_WHY, storage.TMPDIR_CURE, SLURM_TEST),
    LintRule("cache-not-shared", "warning", storage.unshared, storage.UNSHARED_WHY, storage.CACHE_CURE, "huggingface_hub's defaults", ANY),
    LintRule("cache-missing", "note", storage.missing, storage.CACHE_WHY, storage.CACHE_CURE, "huggingface_hub's defaults"),
    LintRule("sbcast", "warning", storage.sbcast, storage.SBCAST_WHY, storage.SBCAST_CURE, SLURM_TEST),
)  # fmt: skip

TOPICS = (
    ("broken-line", "stray-line", "no-shebang", "mistyped-command", "not-runnable"),
    ("ephemeral-port", "fixed-port", "fixed-rendezvous-id"),
    ("rendezvous-id-per-node", "port-per-node"),
    ("gloo-interface-syntax", "loopback-across-nodes", "transport-disabled", "hard-coded-interface"),
    ("whole-node-list", "address-without-host", "master-address", "scontrol-in-container"),
    ("expanded-too-early", "not-exported", "whole-node-list", "unset-variable", "unquoted-variable"),
    (
        "one-node-only",
        "several-torchruns",
        "node-count",
        "ranks-in-separate-jobs",
        "node-rank-missing",
        "cpus-not-inherited",
    ),
    ("unterminated", "broken-line"),
    ("broken-line", "test-syntax", "stray-line"),
    ("value-split", "stray-line", "test-syntax"),
    ("variable-in-directive", "typographic-character", "directive-not-read", "directive-refused"),
    ("srun-without-command", "broken-line"),
    ("never-expanded", "variable-not-expanded"),
    ("builtin-as-program", "lost-in-subshell"),
)
"""Rules that see one mistake from several sides: of each group, a line has only the most severe finding, or else the first one."""
