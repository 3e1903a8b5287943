"""``allranks compare``: strategies on equal work, each held against one process before its time counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from allranks.cli.options import any_path, error_line, json_option, print_json, set_option
from allranks.errors import EXIT_FAILED, EXIT_OK


@click.command("compare")
@click.argument("spec", type=any_path)
@click.option("--strategies", default="all", show_default=True, help="Names, separated by commas; or all.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1, 100), help="Timed repeats of each.")
@set_option
@json_option
def compare_command(spec: Path, strategies: str, repeats: int, sets: tuple[str, ...], as_json: bool) -> int:
    """Run strategies in turns on equal work: a table in which only what is proved right has figures.

    train.max_steps are the timed steps of one repeat.
    """
    from allranks import asked
    from allranks.compare import run as comparing

    checked = asked.read_spec(spec, sets)
    names = (
        comparing.every_strategy() if strategies == "all" else [s.strip() for s in strategies.split(",") if s.strip()]
    )
    asked = comparing.request(checked, names, repeats)
    console = Console(stderr=as_json, quiet=as_json)
    if not console.is_terminal:
        console = Console(stderr=as_json, quiet=as_json, width=130)
    done = comparing.compare(checked, asked, _Progress(console))
    if as_json:
        print_json(done.document())
    else:
        _show(console, done)
    return EXIT_OK if done.ok else EXIT_FAILED


class _Progress:
    """One line for each thing that is begun."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(escape(text), highlight=False)

    def event(self, event: dict[str, Any]) -> None:
        if event["event"] == "compare":
            self.say(f"{event['seconds']:7.1f} s  {event['text']}")
        if event["event"] == "error" and not event.get("echo"):
            self.say(error_line(event))


def _show(console: Console, done: Any) -> None:
    from allranks.compare.show import speed_table, traffic_table

    names = [row.strategy for row in done.rows]
    base = next((n for n in ("pytorch_ddp", "simple_ddp", *names) if n in names), None)
    console.print()
    console.print(speed_table(done.rows))
    console.print("[dim]gates: parity, mechanism, equal work[/dim]")
    console.print()
    console.print(traffic_table(done.rows, base))
    console.print(f"[dim]ratio: weights, gradients and optimizer state against {base}[/dim]")
    console.print()
    for row in done.rows:
        for text in (*row.reasons, *row.marks):
            console.print(f"{row.strategy}: {escape(text)}", highlight=False)
    console.print()
    for line in done.advice:
        console.print(escape(line), highlight=False)
    console.print()
    console.print(f"comparison   {done.folder}/comparison.html", highlight=False, soft_wrap=True)
