"""Show a run while `allranks run` follows it: a progress line that fits the terminal, and the output of a user's own program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import Progress, ProgressColumn, Task
from rich.progress_bar import ProgressBar
from rich.segment import Segment

from allranks.rundir.paths import RunDir
from allranks.rundir.progress import REPORTED
from allranks.utils.formatting import finite_float, finite_int
from allranks.utils.inputs import read_appended
from allranks.utils.text import printable

BAR_WIDTH = 20
"""Smallest width of the bar beside other fields."""
MIN_BAR_WIDTH = 4


TRAINING = "training"
"""The phase that the step and its loss show anyway."""
LOOK_S = 0.3
CHUNK_BYTES = 64 << 10  # shown at most of one log per look; what comes faster is left out, and said
LINE_BYTES = 4000
NO_OUTPUT = "none"
OUTPUTS = ("rank0", "all", NO_OUTPUT)


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


class ProgramProgress:
    """Combine the events ``progress`` of all ranks. Those read in the output are ignored once the program reports."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.total: int | None = None
        self._loss = ""
        self._reports = False
        self._speeds: dict[int, float] = {}  # tokens per second by rank
        self._last: dict[int, float] = {}
        self._step_at: tuple[int, float] | None = None
        self._steps_per_s: float | None = None

    def take(self, event: dict[str, Any]) -> dict[str, str] | None:
        """Return the texts ``step``, ``loss`` and ``speed``; None if the event is ignored."""
        reported = event.get("source") == REPORTED
        if self._reports and not reported:
            return None
        if reported and not self._reports:
            self.__init__()
            self._reports = True
        rank, at = finite_int(event.get("rank")), finite_float(event.get("last", event.get("time")))
        if rank is None or at is None:
            return None
        tokens, passed_s = finite_int(event.get("tokens")), at - self._last.get(rank, at)
        if tokens is not None and passed_s > 0:
            self._speeds[rank] = tokens / passed_s
        self._last[rank] = at
        if rank == 0:
            self._take_first_rank(event, at)
        note = "" if reported else " (log)"
        shown = f"step {self.step}" + (f"/{self.total}" if self.total else "") + note if self.step is not None else ""
        return {"step": shown, "loss": self._loss, "speed": self._speed()}

    def _take_first_rank(self, event: dict[str, Any], at: float) -> None:
        step = finite_int(event.get("step"))
        if step is not None:
            if self._step_at is not None and at > self._step_at[1] and step > self._step_at[0]:
                self._steps_per_s = (step - self._step_at[0]) / (at - self._step_at[1])
            self._step_at, self.step = (step, at), step
        self.total = finite_int(event.get("total")) or self.total
        if "loss" in event:
            loss = finite_float(event["loss"])
            self._loss = f"loss {'nan' if loss is None else format(loss, '.4f')}"

    def _speed(self) -> str:
        if self._speeds:
            return f"{sum(self._speeds.values()):,.0f} tokens/s"
        return "" if self._steps_per_s is None else f"{self._steps_per_s:.3g} steps/s"


class ProgramOutput(threading.Thread):
    """Show new lines of the ranks' logs until the block ends; as a context manager around the run.

    Escape sequences and secrets are removed. Of a line that a program overwrites (carriage returns, as progress bars do) the last state is shown.

    Args:
        show: prints a line.
        which: ``rank0`` or ``all``.
    """

    def __init__(self, run: RunDir, show: Callable[[str], object], which: str) -> None:
        super().__init__(name="output", daemon=True)
        self._run, self._show, self._which = run, show, which
        self._offsets: dict[Path, int] = {path: path.stat().st_size for path in self._logs().values()}
        self._rests: dict[Path, bytes] = {}
        self._stopped = threading.Event()
        self._failed = False

    def __enter__(self) -> ProgramOutput:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.join(timeout=10.0)
        self._look(last=True)

    def run(self) -> None:
        while not self._stopped.wait(LOOK_S):
            self._look()

    def _logs(self) -> dict[int, Path]:
        attempts = self._run.attempts()
        logs = self._run.rank_logs(attempts[-1]) if attempts else {}
        return {rank: path for rank, path in logs.items() if self._which == "all" or rank == 0}

    def _look(self, *, last: bool = False) -> None:
        """Show new events. A display never ends a run."""
        if self._failed:
            return
        try:
            for rank, path in self._logs().items():
                for line in self._new_lines(path, last=last):
                    self._show(f"[rank {rank}] {line}" if self._which == "all" else line)
        except Exception:  # noqa: BLE001 - a closed terminal, a damaged folder
            self._failed = True

    def _new_lines(self, path: Path, *, last: bool) -> list[str]:
        from allranks.utils.redaction import redact
        from allranks.utils.text import printable

        try:
            data, skipped = read_appended(path, self._offsets.get(path, 0), CHUNK_BYTES)
        except OSError:
            return []
        self._offsets[path] = self._offsets.get(path, 0) + skipped + len(data)
        before = b"" if skipped else self._rests.get(path, b"")
        *whole, rest = (before + data).split(b"\n")
        if skipped:
            whole = whole[1:]
        if last:
            whole, rest = [*whole, rest], b""
        self._rests[path] = rest[-LINE_BYTES:]
        lines = [printable(_visible(line).decode("utf-8", "replace")).rstrip() for line in whole]
        shown = redact("\n".join(line for line in lines if line)).split("\n") if any(lines) else []
        return [f"... {skipped:,} bytes are not shown; the log has all: {path}", *shown] if skipped else shown


def _visible(line: bytes) -> bytes:
    """Return the final state of a line as a terminal would show it, shortened."""
    states = [part for part in line[-4 * LINE_BYTES :].split(b"\r") if part.strip()]
    return states[-1][:LINE_BYTES] if states else b""
