"""Rich console for all verbs that print tables; quoted text cannot send escape sequences to the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from allranks.utils.text import printable


class SafeConsole(Console):
    """Strip escape sequences and control characters from all text; keep the colours and cursor movements that rich adds."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
