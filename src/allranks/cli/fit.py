"""Memory of a rank as a table: what `plan` shows of `fit`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from allranks.fit import Fit

SHOWN = (
    ("weights", "weights"),
    ("adapters", "adapters"),
    ("gathered_weights", "gathered weights"),
    ("gradients", "gradients"),
    ("optimizer_state", "optimizer state"),
    ("optimizer_temporaries", "update's temporaries"),
    ("activations", "activations"),
    ("logits", "logits"),
    ("communication", "buffers on the way"),
    ("imports", "Python, libraries"),
    ("runtime", "contexts, threads"),
    ("slack", "allocator slack"),
)
SHORT = {"end of backward": "its end", "optimizer step": "update"}


def show_fit(console: Console, found: Fit) -> None:
    """What a rank holds at each moment, the verdict, and what would make it fit."""
    from rich.markup import escape
    from rich.table import Table

    from allranks.fit.text import remedy_line, remedy_settings, verdict_line
    from allranks.report.text import bytes_text

    say = partial(console.print, highlight=False, soft_wrap=not console.is_terminal)  # piped: whole lines, for grep
    if found.moments:
        of = f"{found.model} ({found.model_source}): {found.parameters:,} parameters, {found.parameters_trained:,} trained"
        say(escape(of))
        table = Table(title="Memory of one rank, estimated", title_justify="left")
        table.add_column("held at")
        for moment in found.moments:
            table.add_column(
                SHORT.get(moment.name, moment.name),
                justify="right",
                style="bold" if moment.name == found.peak else None,
            )
        for key, words in SHOWN:
            if any(moment.parts.get(key) for moment in found.moments):
                table.add_row(words, *(bytes_text(n) if (n := m.parts.get(key)) else "" for m in found.moments))
        table.add_section()
        table.add_row("together", *(bytes_text(m.total_bytes) for m in found.moments))
        console.print(table)
    say(f"memory: {escape(verdict_line(found))}")
    for i, remedy in enumerate(found.remedies, 1):
        say(f"  {i}. {escape(remedy_line(remedy))}")
        console.print(f"     {escape(remedy_settings(remedy))}", highlight=False, soft_wrap=True)
    for note in found.notes:
        say(f"note: {escape(note)}")
