"""Describe one row as text, and read cells of a row as text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from allranks.errors import DataError
from allranks.spec.data_sources import Row


@dataclass(frozen=True)
class Example:
    """One row as text. ``turns`` alternate (text, trained?); ``answer`` is the correct reply, if known.

    ``empty`` is the column or part without which there is nothing to learn, where a row has no text in it.
    """

    turns: tuple[tuple[str, bool], ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    label: str | None = None
    answer: str | None = None
    empty: str = ""
    row: int = -1
    """Number of the row in its file, from 0."""
    source: str = ""
    """Name of its source in a mixture."""
    first_trained: int = 0
    """Assistant messages before this one belong to the prompt."""
    tools: tuple[dict[str, Any], ...] = ()
    """Descriptions of tools, for the chat template."""

    @property
    def place(self) -> str:
        """Return where the row is, for messages."""
        return f"{self.source}, row {self.row}" if self.source else f"row {self.row}"

    @property
    def prompt(self) -> str:
        """Return the text before the first trained turn."""
        head = []
        for text, trained in self.turns:
            if trained:
                break
            head.append(text)
        return "".join(head)


Render = Callable[[Row, int], Example]


def is_missing(value: Any) -> bool:
    """Return whether a cell has no value; NaN is how pandas writes a missing one."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def row_text(row: Row, names: list[str], number: int) -> str:
    """Return the cells of these columns as text, a line each; missing ones are left out.

    Raises:
        DataError: a cell is a list or an object.
    """
    parts = []
    for name in names:
        value = row.get(name)
        if is_missing(value):
            continue
        if not isinstance(value, (str, int, float)):
            raise DataError(f"row {number}, column {name!r}: expected text, found a {type(value).__name__}")
        parts.append(encodable(str(value), f"row {number}, column {name!r}"))
    return "\n".join(part for part in parts if part)


def encodable(text: str, where: str) -> str:
    """Return the text, or refuse half of a surrogate pair, which JSON can express and UTF-8 cannot.

    Raises:
        DataError: names the row, the column and the code unit.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: character {error.start} is \\u{ord(text[error.start]):04x}, half of a surrogate pair, which is not text; remove it, "
            "or write both halves"
        ) from None
    return text
