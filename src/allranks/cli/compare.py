"""``allranks compare``: run strategies on equal work; check each against one process before it is timed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from allranks.cli.console import SafeConsole, left_out_line, narrow_table, table_console
from allranks.cli.options import any_path, complete_strategies, error_line, json_option, print_json, set_option, warn
from allranks.errors import EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from allranks.experiments.compare import Comparison


@click.command("compare")
@click.argument("spec", type=any_path)
@click.option(
    "--strategies",
    default="all",
    show_default=True,
    shell_complete=complete_strategies,
    help="Strategy names, separated by commas, or 'all'.",
)
@click.option(
    "--repeats", default=3, show_default=True, type=click.IntRange(1, 100), help="Timed repeats of each strategy."
)
@set_option
@json_option
def compare_command(spec: Path, strategies: str, repeats: int, sets: tuple[str, ...], as_json: bool) -> int:
    """Run strategies in turn on equal work and show a table; only verified strategies get results.

    train.max_steps is the number of timed steps per repeat.
    """
    from allranks.experiments import compare as comparing
    from allranks.launch import preview

    checked = preview.read_spec(spec, sets)
    names = (
        comparing.every_strategy() if strategies == "all" else [s.strip() for s in strategies.split(",") if s.strip()]
    )
    preview = comparing.comparison_request(checked, names, repeats)
    done = comparing.compare(checked, preview, ProgressPrinter(table_console(130, stderr=as_json, quiet=as_json)))
    return show_comparison(done, as_json)


def show_comparison(done: Comparison, as_json: bool) -> int:
    """Show a comparison as tables or JSON, and return the exit code of the verb."""
    if as_json:
        print_json(done.document())
    else:
        _show(table_console(130), done)
    return EXIT_OK if done.ok else EXIT_FAILED


class ProgressPrinter:
    """Print one line for each stage that begins."""

    def __init__(self, console: SafeConsole) -> None:
        self._console = console

    def say(self, text: str) -> None:
        if self._console.quiet and text.startswith("note"):  # with --json, warnings are on standard error
            warn([text.removeprefix("note").strip()])
        self._console.say(text)

    def event(self, event: dict[str, Any]) -> None:
        if event["event"] == "compare":
            self.say(f"{event['seconds']:7.1f} s  {event['text']}")
        if event["event"] == "warning":
            self.say(f"note     rank {event.get('rank')}: {event.get('message')}")
        if event["event"] == "error" and not event.get("echo"):
            self.say(error_line(event))


def _show(console: SafeConsole, done: Comparison) -> None:
    from allranks.experiments.output import terminal_tables

    for table, note in (shown for shown in terminal_tables(done.rows, done.measured) if shown[0].row_count):
        console.print()
        removed = narrow_table(table, console)
        console.print(table)
        if hint := left_out_line(removed, console.width):
            console.print(f"[dim]{hint}; --json and the page have all[/dim]", highlight=False)
        if note:
            console.print(f"[dim]{note}[/dim]", highlight=False)
    console.print()
    for row in done.rows:
        for text in (*row.reasons, *row.marks):
            console.print(f"{row.strategy}: {escape(text)}", highlight=False)
    console.print()
    for line in done.advice:
        console.print(escape(line), highlight=False)
    console.print()
    console.print(f"comparison   {done.folder}/comparison.html", highlight=False, markup=False, soft_wrap=True)
