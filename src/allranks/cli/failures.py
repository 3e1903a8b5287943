"""``allranks failures``: what diagnose knows, and what becomes of the forty failures of the field notes."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from allranks.cli.options import json_option, print_json
from allranks.errors import EXIT_OK, RequestError

LEGEND = "P prevented by construction, R refused before the ranks start, D named by diagnose. Pages: docs/failures/"
EVIDENCE = {
    "injected": "a test makes it really happen; what the page calls replayed is replayed",
    "replayed": "logs and facts of the real thing are replayed: it takes GPUs or a fabric",
}
OF_A_CLASS = (
    ("why", "cause"),
    ("do", "fix"),
    ("to be sure", "next_test"),
    ("for example", "example"),
    ("see", "reference"),
)


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
            raise RequestError(
                f"{name}: no failure has this number, no class this name; `allranks failures` lists them"
            )
    if as_json:
        print_json({"classes": entries, "failures": rows})
    elif name is not None:
        _one(entries, rows)
    else:
        _all(entries, rows)
    return EXIT_OK


def _entry(entry: Any) -> dict[str, str]:
    names = ("id", "title", "cause", "fix", "next_test", "reference", "example")
    return {name: getattr(entry, name) for name in names}


def _one(entries: list[dict[str, str]], rows: list[dict[str, Any]]) -> None:
    from allranks.diagnose.failures import WORDS

    for e in entries:
        click.echo(f"{e['id']}: {e['title']}")
        for label, key in OF_A_CLASS:
            click.echo(f"  {label:<11} {e[key]}")
    for r in rows:
        click.echo(f"failure {r['number']}: {r['title']}")
        click.echo(f"  {WORDS[r['how']]:<11} {r['where']}")
        for name in r["classes"]:
            click.echo(f"  {'in logs':<11} {name}")
        click.echo(f"  {'page':<11} docs/failures/{r['page']}")
        click.echo(f"  {'evidence':<11} {EVIDENCE[r['evidence']]}")
        for test in r["tests"]:
            click.echo(f"  {'test':<11} {test}")


def _all(entries: list[dict[str, str]], rows: list[dict[str, Any]]) -> None:
    from rich.console import Console

    console = Console()
    console.print(_table("What diagnose names", ("class", "what it is"), [(e["id"], e["title"]) for e in entries]))
    console.print()
    lines = [(str(r["number"]), r["title"], r["how"], r["where"]) for r in rows]
    console.print(_table("The forty failures", ("#", "failure", "how", "where"), lines))
    console.print()
    console.print(LEGEND, highlight=False)
    console.print("allranks failures NAME shows one with its cause, cure and tests.", highlight=False)


def _table(title: str, columns: tuple[str, ...], lines: list[tuple[str, ...]]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=column in ("class", "#", "how"), justify="right" if column == "#" else "left")
    for line in lines:
        table.add_row(*line)
    return table
