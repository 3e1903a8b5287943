"""``allranks plan``: show ranks, environment and the estimated memory per rank, without running anything."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from allranks.cli.options import any_path, json_option, print_json, set_option, warn
from allranks.errors import EXIT_OK

if TYPE_CHECKING:
    from allranks.cli.console import SafeConsole
    from allranks.launch.preview import PreparedRun
    from allranks.planning.env_vars import EnvVar
    from allranks.planning.memory import Fit
    from allranks.planning.records import LaunchPlan
    from allranks.spec import RunSpec

MAX_NODE_ROWS = 8


@click.command("plan")
@click.argument("spec", type=any_path)
@click.option("--full", is_flag=True, help="Show every rank, and the variables that are not set, each with its reason.")
@set_option
@json_option
def plan_command(spec: Path, full: bool, sets: tuple[str, ...], as_json: bool) -> int:
    """Show ranks, batch arithmetic, environment variables with reasons, and memory per rank, without running
    anything."""
    from allranks.launch.preview import prepare

    show_dry_run(prepare(spec, sets), as_json, full=full)
    return EXIT_OK


def show_dry_run(run: PreparedRun, as_json: bool, *, full: bool = False) -> None:
    """Show everything that is known about a run before it starts."""
    import msgspec

    from allranks.launch.preview import sequence_problem
    from allranks.launch.restarts import restart_line
    from allranks.planning.cost import cost_line
    from allranks.planning.replicas import verify_line

    saves, compared = (
        checkpoint_line(run.spec, len(run.plan.nodes)),
        verify_line(run.plan, run.spec.observe.verify_every),
    )
    lines = (training_line(run.spec), saves, compared, restart_line(run.spec), cost_line(run.spec, run.plan))
    problem = sequence_problem(run)
    show_plan(
        msgspec.structs.replace(run.plan, warnings=[*run.plan.warnings, problem]) if problem else run.plan,
        as_json,
        run.batch_script,
        run.fit,
        run.hand_commands,
        "\n".join(filter(None, lines)),
        full=full,
    )


def training_line(spec: RunSpec) -> str | None:
    """Return model, data and schedule in one line, or the command line of a user's own program."""
    if spec.script is not None:
        from allranks.nodes.rank_command import working_directory
        from allranks.planning.rank_environment import command_line

        script = spec.script
        return (
            f"program: {command_line(script)}, in {working_directory(script)}; a stop sends SIGTERM, and SIGKILL after "
            f"{script.grace_s:g} s"
        )
    if spec.model is None or spec.data is None:
        return None
    from allranks.spec.data_sources import source_of

    data, train = spec.data, spec.train
    rows = f", {data.subset:,} of its rows" if data.subset else ""
    shape = "" if data.source == "builtin:noise" else f", at most {data.max_length} tokens each"
    warm = f" after {train.warmup_steps} warm-up steps" if train.warmup_steps else ""
    adapter = f" with {spec.adapter.type}" if spec.adapter.type != "none" else ""
    return (
        f"training: {spec.model.name}{adapter} on {source_of(data)}{rows}{shape}; lr {train.lr:g} "
        f"{train.schedule}{warm}, seed {train.seed}"
    )


def checkpoint_line(spec: RunSpec, nodes: int) -> str | None:
    """Return a line on the interval of checkpoints, if the spec gives it as a time or leaves it to be measured."""
    saves = spec.checkpoint
    if not isinstance(saves.every, str) or saves.mode == "none" or spec.script is not None:
        return None
    if saves.every_s is not None:
        return f"checkpoint every {saves.every} of wall time"
    mtbf = f"one failure in {saves.failure_interval_h(nodes):g} h (checkpoint.mtbf_h)"
    return f"checkpoint every: auto, from the cost of a save, measured in the run, and {mtbf}"


def device_line(plan: LaunchPlan) -> str:
    """Return a line that says what decided the device."""
    if plan.device_is_provisional:
        return f"device auto: {plan.device_source} ({plan.device_reason}); planned for {plan.device} until it is known"
    return f"device {plan.device}: {plan.device_source} ({plan.device_reason})"


def hang_line(plan: LaunchPlan) -> str:
    """Return a line with the hang time limits."""
    if plan.hang is None:
        return "hangs: not monitored (observe.hang_s)"
    if plan.batch is None:
        return (
            f"hangs: if no rank makes progress for 10 times the usual interval, at least {plan.hang.step_s:g} s, and "
            f"none works, or for {plan.hang.long_s:g} s while one works and others wait for it, the ranks are "
            "inspected and reported (observe.hang_s)"
        )
    return (
        f"hangs: a rank that makes no progress for {plan.hang.step_s:g} s in a step, or {plan.hang.long_s:g} s in "
        "other phases, is inspected and reported (observe.hang_s)"
    )


def show_plan(
    plan: LaunchPlan,
    as_json: bool,
    script: str | None = None,
    memory: Fit | None = None,
    commands: list[str] | None = None,
    training: str | None = None,
    *,
    full: bool = False,
) -> None:
    """Show the plan as tables, with the batch script or the per-node commands if there are any; or as JSON.

    Args:
        full: show every rank and every variable; JSON always has them.
    """
    import msgspec
    from rich.markup import escape

    from allranks.cli.console import FittedColumn, print_fitted, table_console
    from allranks.planning.rank_environment import with_hidden_secrets

    plan = msgspec.structs.replace(plan, environment=with_hidden_secrets(plan.environment))
    if as_json:
        more = {"fit": msgspec.to_builtins(memory), "batch_script": script, "commands": commands}
        print_json(msgspec.to_builtins(plan) | {name: value for name, value in more.items() if value})
        warn(plan.warnings)
        return
    console = table_console()
    say = partial(console.print, highlight=False, soft_wrap=not console.is_terminal)  # piped: whole lines, for grep
    for sentence in _summary_lines(plan, training):
        say(sentence)
    if full:
        columns = [FittedColumn(name) for name in ("rank", "node", "local rank", "host")]
        print_fitted(console, columns, [[str(value) for value in row] for row in plan.rank_rows()], title="Ranks")
    else:
        _show_nodes(console, plan)
    _show_environment(console, plan.environment, full=full)
    if memory is not None:
        show_memory(console, memory)
    for warning in plan.warnings:
        say(f"note: {escape(warning)}")
    if commands:
        starts = zip(plan.nodes, commands, strict=True)
        script = "\n".join(f"  {node.host or node.node}:  {command}" for node, command in starts)
    if script:
        console.print("\nTo start manually, one command per node:\n" if commands else "\nBatch script:\n")
        console.print(script, highlight=False, markup=False, soft_wrap=True)


def _show_nodes(console: SafeConsole, plan: LaunchPlan) -> None:
    """Show the ranks of each node; nodes that the scheduler chooses, and one node alone, in one line."""
    from allranks.cli.console import FittedColumn, print_fitted
    from allranks.utils.text import format_ranks

    nodes = plan.nodes
    ranks = f"{'rank' if plan.world_size == 1 else 'ranks'} {format_ranks(list(range(plan.world_size)))}"
    if len(nodes) == 1 or all(node.host is None for node in nodes):
        hosts = f"{len(nodes)} nodes, {plan.procs_per_node} on each" if len(nodes) > 1 else nodes[0].host or "node 0"
        console.print(f"{ranks} on {hosts}", highlight=False, markup=False)
        return
    shown = nodes if len(nodes) <= MAX_NODE_ROWS + 1 else nodes[:MAX_NODE_ROWS]
    rows = [[format_ranks(node.ranks), str(node.node), node.host or f"node {node.node}"] for node in shown]
    if more := nodes[len(shown) :]:
        last = format_ranks([rank for node in more for rank in node.ranks])
        rows.append([last, format_ranks([node.node for node in more]), f"{len(more)} more nodes (--full)"])
    print_fitted(console, [FittedColumn(name) for name in ("ranks", "node", "host")], rows, title="Ranks")


def _show_environment(console: SafeConsole, variables: list[EnvVar], *, full: bool) -> None:
    """Show the variables of the ranks. Without `full`, those that are left alone are only named."""
    from allranks.cli.console import FittedColumn, print_fitted

    absent = {True: "(on each node)", False: "(not set)"}
    rows = [
        [i.name, absent[i.source == "nodes"] if i.value is None else i.value, i.source, i.reason]
        for i in variables
        if full or i.value is not None
    ]
    columns = [FittedColumn("variable", fold_to=31), FittedColumn("value", fold_to=12), FittedColumn("source")]
    if rows:
        print_fitted(console, [*columns, FittedColumn("why", fold_to=20)], rows, title="Environment of the ranks")
    if full:
        return
    later = [item.name for item in variables if item.value is None and item.source == "nodes"]
    unset = [item.name for item in variables if item.value is None and item.source != "nodes"]
    for words, names in (("decided on each node", later), ("left at their defaults", unset)):
        if names:
            text = f"{words}: {', '.join(names)} (reasons: --full)"
            console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def _summary_lines(plan: LaunchPlan, training: str | None) -> Iterator[str]:
    """Return the plan's header lines, with markup."""
    from rich.markup import escape

    yield (
        f"[bold]{escape(plan.run_name)}[/bold]: {plan.world_size} rank{'s' * (plan.world_size > 1)} on "
        f"{len(plan.nodes)} node{'s' * (len(plan.nodes) > 1)}, {'strategy ' if plan.batch else ''}{plan.work}, "
        f"launcher {plan.launcher}"
    )
    yield escape(device_line(plan))
    if training:
        yield escape(training)
    yield f"rendezvous: {escape(plan.rendezvous)}; collectives time out after {plan.timeout_s} s"
    yield hang_line(plan)
    if plan.batch:
        work = f"{plan.max_steps} steps" if plan.epochs is None else f"{plan.epochs:g} epoch{'s' * (plan.epochs != 1)}"
        yield (
            f"{work} of {plan.batch.micro_batch_size} micro x {plan.world_size} ranks x {plan.batch.grad_accum} "
            f"accumulation = {plan.batch.global_batch_size} sequences"
        )
    if plan.batch and any(value is not None for value in plan.strategy_options.values()):
        yield f"{plan.strategy}: {escape(_options(plan.strategy_options))}"
    if plan.replication:
        yield escape(plan.replication)
    if plan.compile_reason:
        yield escape(f"transformer blocks are {'' if plan.compiled else 'not '}compiled: {plan.compile_reason}")


def _options(options: dict[str, object]) -> str:
    """Return options as one line of YAML flow style; options without a value are omitted."""
    parts = []
    for name, value in options.items():
        if isinstance(value, dict):
            parts.append(f"{name}: {{{_options(value)}}}")
        elif value is not None:
            parts.append(f"{name}: {str(value).lower() if isinstance(value, bool) else value}")
    return ", ".join(parts)


MEMORY_PARTS = (
    ("weights", "weights"),
    ("adapters", "adapters"),
    ("gathered_weights", "gathered weights"),
    ("gradients", "gradients"),
    ("optimizer_state", "optimizer state"),
    ("optimizer_temporaries", "update temporaries"),
    ("activations", "activations"),
    ("weight_copies", "copies of weights"),
    ("logits", "logits"),
    ("communication", "communication buffers"),
    ("imports", "Python, libraries"),
    ("runtime", "contexts, threads"),
    ("slack", "allocator slack"),
)
SHORT_MOMENT_NAMES = {"end of backward": "end of step", "optimizer step": "update"}


def show_memory(console: SafeConsole, estimate: Fit) -> None:
    """Show a rank's memory in each phase, the verdict, and what would make it fit."""
    from rich.markup import escape

    from allranks.cli.console import FittedColumn, print_fitted
    from allranks.planning.memory.remedies import remedy_line, remedy_settings, verdict_line
    from allranks.utils.text import format_bytes

    say = partial(console.print, highlight=False, soft_wrap=not console.is_terminal)  # piped: whole lines, for grep
    if estimate.moments:
        of = (
            f"{estimate.model} ({estimate.model_source}): {estimate.parameters:,} parameters, "
            f"{estimate.parameters_trained:,} trained"
        )
        say(escape(of))
        # in a narrow terminal the smallest phases are left out first, and the peak never
        by_size = sorted((m for m in estimate.moments if m.name != estimate.peak), key=lambda m: -m.total_bytes)
        drops = {m.name: place for place, m in enumerate(by_size, 1)}
        titles = {m.name: SHORT_MOMENT_NAMES.get(m.name, m.name) for m in estimate.moments}
        columns = [FittedColumn(title, right=True, drop=drops.get(name, 0)) for name, title in titles.items()]
        rows = [
            [words, *(format_bytes(n) if (n := m.parts.get(key)) else "" for m in estimate.moments)]
            for key, words in MEMORY_PARTS
            if any(m.parts.get(key) for m in estimate.moments)
        ]
        rows.append(["together", *(format_bytes(m.total_bytes) for m in estimate.moments)])
        print_fitted(console, [FittedColumn("phase"), *columns], rows, title="Memory of one rank, estimated")
    say(f"memory: {escape(verdict_line(estimate))}")
    for i, remedy in enumerate(estimate.remedies, 1):
        say(f"  {i}. {escape(remedy_line(remedy))}")
        console.print(f"     {escape(remedy_settings(remedy))}", highlight=False, soft_wrap=True)
    for note in estimate.notes:
        say(f"note: {escape(note)}")
