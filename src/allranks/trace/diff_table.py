"""A comparison of two runs as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from allranks.trace.diff import Comparison, DiffRow, Unit
from allranks.trace.shorten import short_names
from allranks.trace.units import seconds, size


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Prints the tables of `compare_tables` and what must be known about them."""
    for table in compare_tables(comparison, console.width):
        console.print()
        console.print(table)
    for remark in comparison.remarks:
        console.print(Text(f"note    {remark}", style="dim"), soft_wrap=True)


def compare_tables(comparison: Comparison, width: int = 100) -> list[Table]:
    """One table of all figures, and one of the kernels and operators that changed most."""
    title = f"{comparison.a} against {comparison.b}, per {comparison.per}"
    tables = [_table(title, comparison.rows, width)]
    if comparison.changed:
        tables.append(_table("Kernels and operators that changed most", comparison.changed, width))
    return tables


def _table(title: str, rows: Sequence[DiffRow], width: int) -> Table:
    table = Table(
        title=Text(title), title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim"
    )
    table.add_column("", no_wrap=True)
    for column in ("this", "other", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    room = max(width - 40, 20)
    for row, name in zip(rows, short_names([r.name for r in rows], room), strict=True):
        ratio = f"{row.ratio:.3g}" if row.ratio is not None else "-"
        table.add_row(Text(name), figure(row.a, row.unit), figure(row.b, row.unit), _toned(ratio, row))
    return table


def figure(value: float | None, unit: Unit) -> str:
    """A figure with its unit."""
    if value is None:
        return "-"
    if unit == "s":
        return seconds(value)
    if unit == "bytes":
        return size(value)
    return (
        f"{100 * value:.1f} %"
        if unit == "share"
        else f"{value / 1e9:.3g} GB/s"
        if unit == "bytes/s"
        else f"{value:.4g}"
    )


def _toned(ratio: str, row: DiffRow) -> Text:
    """Times that grew or fell by a tenth are coloured; of the other figures more is not plainly better or worse."""
    if row.unit != "s" or row.ratio is None or row.name == "hidden communication" or 0.9 <= row.ratio <= 1.1:
        return Text(ratio)
    return Text(ratio, style="red" if row.ratio > 1 else "green")
