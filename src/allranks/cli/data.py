"""``allranks data``: show the rows that a run would train on, as the model reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks.cli.options import any_path, echo, json_option, print_json, set_option, warn
from allranks.errors import EXIT_OK, EXIT_REQUEST

if TYPE_CHECKING:
    from allranks.cli.console import SafeConsole
    from allranks.spec import RunSpec

MAX_ROW_CHARACTERS = 3000
OPEN, CLOSE = "⟦", "⟧"


@click.command("data")
@click.argument("spec", type=any_path)
@set_option
@click.option(
    "--rows", type=click.IntRange(0, 1000), default=3, show_default=True, help="Show this many training rows."
)
@json_option
def data_command(spec: Path, sets: tuple[str, ...], rows: int, as_json: bool) -> int:
    """Show the rows that a run of SPEC would train on: template, trained tokens, and rows cut, left out or repeated."""
    from allranks.cli.console import SafeConsole
    from allranks.launch import preview
    from allranks.nodes.preflight.request import ask_hub
    from allranks.utils.redaction import redact_tree

    run = preview.prepare(spec, sets)
    ask_hub(run.spec)  # this machine loads the rows, whatever the launcher; the hub's own client tries again and again
    read = preview.inspect_data(run, rows=rows)
    document = redact_tree(read)
    document["secrets_hidden"] = document["shown"] != read["shown"]
    problem = preview.few_sequences(run, document["facts"])
    if as_json:
        print_json({**document, "world_size": run.plan.world_size, "problem": problem})
        warn(document["facts"]["warnings"])
    else:
        _show(SafeConsole(), run.spec, document, run.plan.world_size)
    if problem is not None:
        echo(f"allranks: {problem}", err=True)
    return EXIT_OK if problem is None else EXIT_REQUEST


def _show(console: SafeConsole, spec: RunSpec, document: dict[str, Any], world_size: int) -> None:
    from rich.markup import escape
    from rich.table import Table

    lines = list(data_lines(spec, document, world_size))
    if console.is_terminal:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, text in lines:
            table.add_row(name, escape(text))
        console.print(table)
    else:
        for name, text in lines:  # piped: whole lines, for grep
            console.print(f"{name:<9} {text}", highlight=False, markup=False, soft_wrap=True)
    if document["shown"]:
        legend = "green text is trained" if console.is_terminal else f"the text between {OPEN} and {CLOSE} is trained"
        hidden = "; *** replaces text that looks like a secret" if document["secrets_hidden"] else ""
        console.say(f"\nThe first rows as the model reads them; {legend}{hidden}.")
    for row in document["shown"]:
        _show_row(console, row, mixed=bool(document["facts"]["sources"]))


def data_lines(spec: RunSpec, document: dict[str, Any], world_size: int) -> Iterator[tuple[str, str]]:
    """Return the facts on the data as (name, text)."""
    assert spec.data is not None
    data, facts, size = spec.data, document["facts"], document["row_tokens"]
    labels, longest = facts["labels"], f"data.max_length {data.max_length}"
    rows = {name: _rows(facts[name]) for name in ("rows", "rows_train", "rows_truncated", "rows_without_target")}
    shown = {name: _numbers(numbers) for name, numbers in document["numbers"].items()}
    yield "data", f"{facts['source']}: {rows['rows']}; columns {', '.join(map(str, document['columns']))}"
    yield "template", template_text(facts)
    for one in facts["sources"]:
        times = one["rows_train"] / max(1, one["rows"] - one["rows_held_out"])
        used = f"each occurs {times:.2g} times" if times >= 1 else f"{times:.1%} of them are used"
        share = one["rows_train"] / sum(other["rows_train"] for other in facts["sources"])
        text = f"{one['source']}: weight {one['weight']:g}, {one['rows_train']:,} of the rows of an epoch ({share:.0%})"
        yield "source", f"{text}, from {one['rows']:,} rows; {used}"
    held_out = spec.eval.source or f"data.eval_fraction {data.eval_fraction:g}"
    yield "rows", f"{rows['rows_train']} to train on, {facts['rows_eval']:,} held out ({held_out})"
    if facts["rows_truncated"]:
        lost = f"{facts['tokens_cut']:,} tokens lost{shown['cut']}"
        yield "cut", f"{rows['rows_truncated']} longer than {longest}, {lost}"
    if facts["rows_without_target"]:
        text = f"whose prompt alone is longer than data.max_length{shown['dropped']}"
        yield "dropped", f"{rows['rows_without_target']}, {text}"
    if facts["rows_identical"]:
        text = f"identical to an earlier training row{shown['identical']}"
        yield "identical", f"{_rows(facts['rows_identical'])} {text}"
    share = facts["tokens_trained"] / max(1, facts["tokens_real"])
    trained = "" if labels else f", {facts['tokens_trained']:,} of them trained ({share:.0%})"
    lengths = f"rows of {size['shortest']} to {size['longest']} tokens, median {size['median']}"
    yield "tokens", f"{facts['tokens_real']:,}{trained}; {lengths}; tokenizer {document['tokenizer']}"
    if labels:
        yield "labels", ", ".join(f"{label} = {number}" for label, number in labels.items())
    packing = "one per row" if labels else f"data.packing: {data.packing}"
    full = f"{facts['sequences']:,} of at most {data.max_length} tokens, {facts['fill']:.0%} full ({packing})"
    yield "sequences", f"{full}, for {world_size} rank{'s' * (world_size != 1)}"
    for warning in facts["warnings"]:
        yield "warning", warning


def template_text(facts: dict[str, Any]) -> str:
    """Return the template, why it was chosen, and which chat template writes the messages."""
    written = {
        "model": "written with the model's chat template",
        "default": "the model has no chat template, so the default one of allranks is used and saved with it",
    }.get(facts.get("chat_template") or "")
    reason = facts.get("template_reason")
    return f"{facts.get('template')}{f' ({reason})' if reason else ''}{f'; {written}' if written else ''}"


def _rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"


def _numbers(rows: list[int]) -> str:
    shown = ", ".join(map(str, rows[:5]))
    return f" (row {shown}{', ...' if len(rows) > 5 else ''})" if rows else ""


def _show_row(console: SafeConsole, row: dict[str, Any], *, mixed: bool) -> None:
    from rich.text import Text

    from allranks.utils.text import escaped

    label = f", label {row['label']}" if row["label"] is not None else f", {row['tokens_trained']} trained"
    where = f"{row['source']}, " if mixed else ""
    part = f" (part {row['part']} of {row['parts']})" if row["parts"] > 1 else ""
    cut = f", {row['cut_tokens']} more cut" if row["cut_tokens"] else ""
    head = f"\n{where}row {row['row']}{part}: {row['tokens']} tokens{label}{cut}"
    console.print(head, style="bold", highlight=False, markup=False)
    text, left = Text(), MAX_ROW_CHARACTERS
    for segment in row["segments"]:
        part = escaped(segment["text"])[:left]
        left -= len(part)
        if segment["trained"]:
            text.append(part if console.is_terminal else f"{OPEN}{part}{CLOSE}", style="green")
        else:
            text.append(part, style="dim")
    if left <= 0:
        text.append(f" … (the first {MAX_ROW_CHARACTERS:,} characters)", style="bold")
    console.print(text, soft_wrap=not console.is_terminal)
