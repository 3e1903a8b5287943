"""``allranks plan``: what would run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from allranks.cli.options import any_path, json_option, print_json, set_option
from allranks.errors import EXIT_OK

if TYPE_CHECKING:
    from allranks.envpolicy import EnvVar
    from allranks.fit import Fit
    from allranks.planning import LaunchPlan
    from allranks.spec import RunSpec

MAX_RANK_ROWS = 16


@click.command("plan")
@click.argument("spec", type=any_path)
@set_option
@json_option
def plan_command(spec: Path, sets: tuple[str, ...], as_json: bool) -> int:
    """Show ranks, batch arithmetic, the environment with the reason of every variable, and the memory of a rank. Touches
    nothing."""
    from allranks import asked, preflight

    checked = asked.read_spec(spec, sets)
    preflight.check_request(checked)
    show_request(checked, as_json)
    return EXIT_OK


def show_request(spec: RunSpec, as_json: bool) -> None:
    """All that is known of a run before it is started."""
    from allranks import asked

    show_plan(
        asked.plan(spec),
        as_json,
        asked.batch_script(spec),
        asked.fit(spec),
        asked.hand_commands(spec),
        training_line(spec),
    )


def training_line(spec: RunSpec) -> str | None:
    """What is trained on what; None for a program of the user's own."""
    if spec.model is None or spec.data is None:
        return None
    data, train = spec.data, spec.train
    rows = f", {data.subset:,} rows of it" if data.subset else ""
    shape = "" if data.source == "builtin:noise" else f", at most {data.max_length} tokens each"
    warm = f" after {train.warmup_steps} steps of warm-up" if train.warmup_steps else ""
    adapter = f" with {spec.adapter.type}" if spec.adapter.type != "none" else ""
    return f"training: {spec.model.name}{adapter} on {data.source}{rows}{shape}; lr {train.lr:g} {train.schedule}{warm}, seed {train.seed}"


def _unset(item: EnvVar) -> str:
    return "(on each node)" if item.source == "nodes" else "(left alone)"


def hang_line(plan: LaunchPlan) -> str:
    """How long ranks may be silent."""
    if plan.hang is None:
        return "hangs: not watched (observe.hang_s)"
    return (
        f"hangs: a rank that makes no progress for {plan.hang.step_s:g} s in a step, or {plan.hang.long_s:g} s in other phases, is looked at and named "
        "(observe.hang_s)"
    )


def show_plan(
    plan: LaunchPlan,
    as_json: bool,
    script: str | None = None,
    memory: Fit | None = None,
    commands: list[str] | None = None,
    training: str | None = None,
) -> None:
    """The plan as tables, with the batch script or the commands of the nodes where there are any; or as JSON."""
    import msgspec
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from allranks.envpolicy import hidden

    plan = msgspec.structs.replace(plan, environment=hidden(plan.environment))
    if as_json:
        more = {"fit": msgspec.to_builtins(memory), "batch_script": script, "commands": commands}
        print_json(msgspec.to_builtins(plan) | {name: value for name, value in more.items() if value})
        return
    console = Console()
    say = partial(console.print, highlight=False, soft_wrap=not console.is_terminal)  # piped: whole lines, for grep
    for sentence in _sentences(plan, training):
        say(sentence)
    ranks = Table(title="Ranks", title_justify="left")
    for name in ("rank", "node", "local rank", "host"):
        ranks.add_column(name)
    rows = plan.rank_rows()
    for row in rows[:MAX_RANK_ROWS]:
        ranks.add_row(*map(str, row))
    if len(rows) > MAX_RANK_ROWS:
        ranks.add_row(
            "...", f"{len(plan.nodes)} nodes", f"{plan.procs_per_node} a node", f"up to rank {plan.world_size - 1}"
        )
    console.print(ranks)
    table = Table(title="Environment of the ranks", title_justify="left")
    for name in ("variable", "value", "decided by", "why"):
        table.add_column(name, overflow="fold")
    for item in plan.environment:
        table.add_row(
            item.name, escape(item.value) if item.value is not None else _unset(item), item.source, escape(item.reason)
        )
    console.print(table)
    if memory is not None:
        from allranks.cli.fit import show_fit

        show_fit(console, memory)
    for warning in plan.warnings:
        say(f"note: {escape(warning)}")
    if commands:
        starts = zip(plan.nodes, commands, strict=True)
        script = "\n".join(f"  {node.host or node.node}:  {command}" for node, command in starts)
    if script:
        console.print("\nTo be started by hand, one command a node:\n" if commands else "\nBatch script:\n")
        console.print(script, highlight=False, markup=False, soft_wrap=True)


def _sentences(plan: LaunchPlan, training: str | None) -> Iterator[str]:
    """What the plan's head says, with markup."""
    from rich.markup import escape

    yield (
        f"[bold]{plan.run_name}[/bold]: {plan.world_size} rank{'s' * (plan.world_size > 1)} on {len(plan.nodes)} "
        f"node{'s' * (len(plan.nodes) > 1)}, {'strategy ' if plan.batch else ''}{plan.work}, launcher {plan.launcher}"
    )
    if training:
        yield escape(training)
    yield f"rendezvous: {plan.rendezvous}; collectives time out after {plan.timeout_s} s"
    yield hang_line(plan)
    if plan.batch:
        length = f"{plan.epochs:g} epochs" if plan.epochs is not None else f"{plan.max_steps} steps"
        yield (
            f"{length} of {plan.batch.micro_batch_size} micro x {plan.world_size} ranks x {plan.batch.grad_accum} accumulation"
            f" = {plan.batch.global_batch_size} sequences"
        )
    if plan.batch and any(value is not None for value in plan.strategy_options.values()):
        yield f"{plan.strategy}: {escape(_options(plan.strategy_options))}"


def _options(options: dict[str, object]) -> str:
    """Options in YAML's short form, on one line; what has no value is left out."""
    parts = []
    for name, value in options.items():
        if isinstance(value, dict):
            parts.append(f"{name}: {{{_options(value)}}}")
        elif value is not None:
            parts.append(f"{name}: {str(value).lower() if isinstance(value, bool) else value}")
    return ", ".join(parts)
