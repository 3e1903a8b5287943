"""Print the blocks of `tables` with rich: colours, and names of any width."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from allranks.analysis.trace.tables import Block, Cell, Line, Rule, Table


def show_blocks(console: Console, blocks: Iterable[Block]) -> None:
    """Print all blocks."""
    for block in blocks:
        if isinstance(block, Table):
            console.print(_table(block))
        elif isinstance(block, Rule):
            console.rule()
        else:
            _show_line(console, block)


def _show_line(console: Console, line: Line) -> None:
    text = Text.assemble(*line.parts)
    if line.highlight and console.highlighter is not None:
        text = console.highlighter(text)
    console.print(text, soft_wrap=not line.wrap)


def _table(table: Table) -> RichTable:
    title = Text(table.title, style=table.title_style)
    made = RichTable(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for i, name in enumerate(table.columns):
        made.add_column(Text(name), justify="left" if i < table.left else "right", no_wrap=True)
    for row in table.rows:
        made.add_row(*(Text(c.text, style=c.style) if isinstance(c, Cell) else Text(c) for c in row))
    return made
