"""Rich console for all verbs that print tables; quoted text cannot send escape sequences to the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from allranks.utils.text import printable

UNLIMITED = 10_000


class SafeConsole(Console):
    """Strip escape sequences and control characters from all text; keep the colours and cursor movements that rich adds."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def table_console(**options: Any) -> SafeConsole:
    """Return a console for tables: as wide as the terminal; without a limit for a file or a pipe, so that lines stay whole for grep."""
    console = SafeConsole(**options)
    return console if console.is_terminal else SafeConsole(width=UNLIMITED, **options)
