"""Lay out the blocks of `tables` as text without rich, whose import takes as long as reading a small trace.

The text is the same that rich gives in a pipe. Where that takes more than padding, because a table is wider than the terminal or a
character can be wider than one column, there is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import zip_longest

from allranks.analysis.trace.tables import Block, Cell, Rule, Table

_GAP = "  "
_WORD = re.compile(r"\S+\s*")
_PLAIN = re.compile("[ -~\u2026]*")  # the last is the ellipsis of shortened names


def plain_text(blocks: Iterable[Block], width: int) -> str | None:
    """Return the text for a terminal of `width` columns, or None if only rich can lay it out."""
    lines: list[str] = []
    for block in blocks:
        made = _lines(block, width)
        if made is None:
            return None
        lines += made
    return "\n".join(lines)


def _lines(block: Block, width: int) -> list[str] | None:
    if isinstance(block, Table):
        return _plain_table(block, width)
    if isinstance(block, Rule):
        return ["\u2500" * width]
    text = "".join(part for part, _ in block.parts)
    if block.wrap:
        return _wrapped(text, width)
    return [text] if _PLAIN.fullmatch(text) else None


def _plain_table(table: Table, width: int) -> list[str] | None:
    cells = [[c.text if isinstance(c, Cell) else c for c in row] for row in table.rows]
    rows = [[c.split("\n") if i >= table.left else [c] for i, c in enumerate(row)] for row in cells]
    rows.insert(0, [[name] for name in table.columns])
    widths = [max(len(part) for cell in column for part in cell) for column in zip(*rows, strict=True)]
    total = sum(widths) + len(_GAP) * (len(widths) - 1)
    title = _wrapped(table.title, total) if table.title else None
    if title is None or total > width or not all(widths):
        return None
    if not all(_PLAIN.fullmatch(part) and (part or len(cell) == 1) for row in rows for cell in row for part in cell):
        return None
    lines = [line.ljust(total) for line in title]
    for row in rows:
        for parts in zip_longest(*row, fillvalue=""):
            aligned = (
                part.ljust(size) if i < table.left else part.rstrip().rjust(size)
                for i, (part, size) in enumerate(zip(parts, widths, strict=True))
            )
            lines.append(_GAP.join(aligned))
    return lines


def _wrapped(text: str, width: int) -> list[str] | None:
    """Return the lines of a paragraph; None if a word is longer than a line."""
    if not _PLAIN.fullmatch(text) or text.startswith(" "):
        return None
    lines = [""]
    for word in _WORD.findall(text):
        size = len(word.rstrip())
        if size > width:
            return None
        if len(lines[-1]) + size > width:
            lines.append("")
        lines[-1] += word
    return [line[:width] for line in lines]
