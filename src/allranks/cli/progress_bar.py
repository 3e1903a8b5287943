"""Show the progress of a run in one line that fits the terminal: bar, step, loss, speed, elapsed and remaining time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import Progress, ProgressColumn, Task
from rich.progress_bar import ProgressBar
from rich.segment import Segment

from allranks.utils.text import printable

BAR_WIDTH = 20
"""Smallest width of the bar beside other fields."""
MIN_BAR_WIDTH = 4


TRAINING = "training"
"""The phase that the step and its loss show anyway."""


class Field(NamedTuple):
    """A field of the line; those with the highest number are left out first, those with 0 never."""

    text: str
    drop: int
    style: str = ""


def clock_text(seconds: float) -> str:
    """Format 65 as 1:05, 3671 as 1:01:11."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def fitting_fields(before: Sequence[Field], after: Sequence[Field], width: int) -> tuple[list[Field], list[Field], int]:
    """Return the fields before and after the bar that fit, and the width of the bar; 0: no bar."""
    kept: set[int] = set()
    taken = 0
    for field in sorted((f for f in (*before, *after) if f.text), key=lambda f: f.drop):
        needed = cell_len(field.text) + 1
        if not field.drop or taken + needed + BAR_WIDTH <= width:
            kept.add(id(field))
            taken += needed
    bar = width - taken if width - taken >= MIN_BAR_WIDTH else 0
    return [f for f in before if id(f) in kept], [f for f in after if id(f) in kept], bar


class ProgressLine(ProgressColumn):
    """The whole line as one column, because rich narrows every column of a line that is too long."""

    max_refresh = None

    def render(self, task: Task) -> _Line:
        return _Line(task)


class _Line:
    def __init__(self, task: Task) -> None:
        self._task = task

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        task = self._task
        left = task.time_remaining if task.total is not None else None
        before, after, width = fitting_fields(
            [Field(printable(task.description), drop=4 if task.description == TRAINING else 1)],
            [
                Field(printable(task.fields["step"]), drop=1),
                Field(printable(task.fields["loss"]), drop=2),
                Field(printable(task.fields["speed"]), drop=3),
                Field(clock_text(task.elapsed or 0), drop=0, style="progress.elapsed"),
                Field("" if left is None else f"{clock_text(left)} left", drop=0, style="progress.remaining"),
            ],
            options.max_width,
        )
        line = [part for field in before for part in (_segment(console, field), Segment(" "))]
        if width:
            bar = ProgressBar(
                total=task.total,
                completed=task.completed,
                width=width,
                pulse=task.total is None,
                animation_time=task.get_time(),
            )
            line += list(console.render(bar, options.update(width=width)))
        line += [part for field in after for part in (Segment(" "), _segment(console, field))]
        yield from (segment for segment in line if segment.text != "\n")


def _segment(console: Console, field: Field) -> Segment:
    return Segment(field.text, console.get_style(field.style) if field.style else None)


def run_progress(console: Console) -> Progress:
    """Return the progress display of a run. Its task has the fields step, loss and speed."""
    return Progress(ProgressLine(), console=console, transient=True, expand=True)
