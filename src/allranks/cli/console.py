"""Print tables in the terminal: quoted text cannot send escape sequences to it, and tables fit its width.

To fit, text is folded and the least important columns are left out; numbers are never broken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from allranks.utils.text import printable, wrapped

UNLIMITED_COLUMNS = 10_000


class SafeConsole(Console):
    """Strip escape sequences and control characters from all text; keep the colours and cursor movements that rich
    adds.

    A name such as ``a:key:b`` is shown as it is: rich would put an emoji in its place.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def say(self, text: str) -> None:
        """Print a message without markup, on a terminal broken between words."""
        self.print(
            wrapped(text, self.width) if self.is_terminal else text, highlight=False, markup=False, soft_wrap=True
        )

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            safe = segment.text if segment.control else printable(segment.text)
            yield segment if safe is segment.text else Segment(safe, segment.style)


def table_console(width: int = UNLIMITED_COLUMNS, **options: Any) -> SafeConsole:
    """Return a console for tables: as wide as the terminal; of this width for a file or a pipe, so that lines stay
    whole for grep."""
    console = SafeConsole(**options)
    return console if console.is_terminal else SafeConsole(width=width, **options)


def print_fitted(
    console: SafeConsole, columns: Sequence[FittedColumn], rows: Sequence[Sequence[str]], more: str = "", **options: Any
) -> None:
    """Print a table that fits the console, and the columns that were left out; `more` says where they are."""
    table, left_out = fitted_table(columns, rows, console.width, **options)
    console.print(table)
    if left_out:
        console.print(f"[dim]{left_out_line(left_out, console.width)}{more}[/dim]", highlight=False)


GAP = 2
"""Blanks behind each column; rich counts them behind the last one, too."""
NARROWEST = 6
_PARTS = re.compile(r"[^/:_ -]*[/:_ -]?")


class FittedColumn(msgspec.Struct, frozen=True):
    """One column of a table that is fitted to a width."""

    title: str
    right: bool = False
    fold_to: int | None = None
    """Width to which its text may be folded; None: never folded."""
    drop: int = 0
    """Columns with the highest number are left out first, those with 0 never."""

    def natural(self, cells: Sequence[str]) -> int:
        """Return the width without folding."""
        return max(cell_len(line) for text in (self.title, *cells) for line in text.split("\n") or [""])


def fitted_table(
    columns: Sequence[FittedColumn], rows: Sequence[Sequence[str]], width: int, **options: Any
) -> tuple[Table, list[str]]:
    """Return a table without lines that fits the width, and the titles of the columns that were left out.

    Args:
        options: of `rich.table.Table`.
    """
    naturals = [column.natural([row[i] for row in rows]) for i, column in enumerate(columns)]
    kept = _kept(columns, naturals, width)
    widths = column_widths(columns, naturals, kept, width)
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, title_justify="left", **options)
    for i in kept:
        column = columns[i]
        table.add_column(Text(fold(column.title, widths[i])), justify="right" if column.right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(fold(row[i], widths[i])) for i in kept))  # a folder's name is no markup
    return table, [column.title for i, column in enumerate(columns) if i not in kept]


def _kept(columns: Sequence[FittedColumn], naturals: Sequence[int], width: int) -> list[int]:
    """Return the indices of the columns that fit, in their order."""
    least = [min(natural, column.fold_to or natural) for natural, column in zip(naturals, columns, strict=True)]
    kept = list(range(len(columns)))
    while sum(least[i] + GAP for i in kept) > width:
        last = max(kept, key=lambda i: (columns[i].drop, i))
        if not columns[last].drop:
            break
        kept.remove(last)
    return kept


def column_widths(
    columns: Sequence[FittedColumn], naturals: Sequence[int], kept: Sequence[int], width: int
) -> list[int]:
    """Return the width of each column: the widest that can be folded are narrowed until all fit, beyond `fold_to` if
    necessary.

    Args:
        naturals: the widths without folding.
        kept: indices of the columns that share the width, with `GAP` blanks each.
    """
    widths = list(naturals)
    while sum(widths[i] + GAP for i in kept) > width:
        able = [i for i in kept if (least := columns[i].fold_to) is not None and widths[i] > least]
        able = able or [i for i in kept if columns[i].fold_to is not None and widths[i] > NARROWEST]
        if not able:
            break
        widths[max(able, key=lambda i: widths[i])] -= 1
    return widths


def fold(text: str, width: int) -> str:
    """Break text into lines, behind a separator of names and paths where there is one."""
    lines = []
    for whole in text.split("\n"):
        line = ""
        for part in _PARTS.findall(whole):
            if line and cell_len(line + part.rstrip()) > width:
                lines.append(line.rstrip())
                line = ""
            line += part
            while cell_len(line.rstrip()) > width > 0 and len(line) > 1:
                cut = max(n for n in range(1, len(line) + 1) if n == 1 or cell_len(line[:n]) <= width)
                if cut == len(line):
                    break
                lines.append(line[:cut])
                line = line[cut:]
        lines.append(line.rstrip())
    return "\n".join(lines)


def left_out_line(titles: Sequence[str], width: int) -> str | None:
    """Return a line that names the columns that were left out; None if there are none."""
    return f"not shown in {width} columns: {', '.join(titles)}" if titles else None


def narrow_table(table: Table, console: Console) -> list[str]:
    """Remove columns from the right until a table fits the console; the first column stays. Return their titles."""
    removed: list[str] = []
    wide = console.options.update(width=UNLIMITED_COLUMNS)
    while len(table.columns) > 1 and Measurement.get(console, wide, table).maximum > console.width:
        removed.insert(0, str(table.columns.pop().header))
    return removed
