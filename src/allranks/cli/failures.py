"""``allranks failures``: what diagnose knows, and what becomes of the forty failures of the field notes."""

from __future__ import annotations

import click
import msgspec

from allranks.cli.options import json_option, print_json
from allranks.errors import EXIT_OK, RequestError


@click.command("failures")
@click.argument("name", required=False)
@json_option
def failures_command(name: str | None, as_json: bool) -> int:
    """List the failures that `diagnose` names and those that allranks prevents or refuses; NAME (a class or a number) shows one."""
    from allranks.diagnose.catalogue import CATALOGUE
    from allranks.diagnose.failures import FAILURES

    entries = [_entry(e) for e in CATALOGUE.values()]
    rows = [msgspec.to_builtins(f) for f in FAILURES]
    if name is not None:
        entries = [e for e in entries if e["id"] == name]
        rows = [r for r in rows if str(r["number"]) == name or name in r["classes"]]
        if not entries and not rows:
            raise RequestError(f"{name}: diagnose knows no such class; `allranks failures` lists them")
    if as_json:
        print_json({"classes": entries, "failures": rows})
    elif name is not None:
        _one(entries, rows)
    else:
        _all(entries, rows)
    return EXIT_OK


def _entry(entry) -> dict[str, str]:
    names = ("id", "title", "cause", "fix", "next_test", "reference", "example")
    return {name: getattr(entry, name) for name in names}


def _one(entries: list[dict[str, str]], rows: list[dict]) -> None:
    for e in entries:
        click.echo(f"{e['id']}: {e['title']}")
        for label, key in (
            ("why", "cause"),
            ("do", "fix"),
            ("to be sure", "next_test"),
            ("for example", "example"),
            ("see", "reference"),
        ):
            click.echo(f"  {label:<11} {e[key]}")
    for r in rows:
        click.echo(f"failure {r['number']}: {r['title']}; {r['how']}: {r['where']}")


def _all(entries: list[dict[str, str]], rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for title, columns, lines in (
        ("What diagnose names", ("class", "what it is"), [(e["id"], e["title"]) for e in entries]),
        (
            "The forty failures",
            ("#", "failure", "is", "by"),
            [(str(r["number"]), r["title"], r["how"], r["where"]) for r in rows],
        ),
    ):
        table = Table(
            title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim"
        )
        for column in columns:
            table.add_column(column, overflow="fold", no_wrap=column in ("class", "#", "is"))
        for line in lines:
            table.add_row(*line)
        console.print(table)
        console.print()
    console.print("allranks failures NAME shows one with its cause, cure and test.", soft_wrap=True)
