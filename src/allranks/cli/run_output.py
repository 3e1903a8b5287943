"""Show a run: a progress line that fits the terminal, the output of a user's own program, and the summary at the
end."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.progress import Progress, ProgressColumn, Task
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from allranks.analysis.effective_time import KINDS
from allranks.analysis.machine_load import machine_notes
from allranks.analysis.metrics import before_and_after
from allranks.analysis.stragglers import link_notes
from allranks.cli.console import SafeConsole
from allranks.cli.log_follower import LogFollower
from allranks.planning.cost import cost_row
from allranks.rundir.events import REPORTED, read_events
from allranks.rundir.paths import RunDir
from allranks.utils.inputs import read_appended
from allranks.utils.text import (
    NO_VALUE,
    as_dict,
    as_list,
    finite_float,
    finite_int,
    format_bytes,
    format_count,
    format_duration,
    format_value,
    printable,
    sanitize,
)

BAR_WIDTH = 16
"""Smallest width of the bar beside other fields."""
MIN_BAR_WIDTH = 4


TRAINING = "training"
"""The phase that the step and its loss show anyway."""
LOOK_S = 0.3
CHUNK_BYTES = 64 << 10  # shown at most of one log per look; what comes faster is left out, and said
LINE_BYTES = 4000
NO_OUTPUT = "none"
OUTPUTS = ("rank0", "all", NO_OUTPUT)
LOG_NOTE = " (parsed from the output of rank 0)"


class Field(NamedTuple):
    """A field of the line; those with the highest number are left out first, those with 0 never."""

    text: str
    drop: int
    style: str = ""


def fitting_fields(fields: Sequence[Field], width: int) -> tuple[list[Field], int]:
    """Return the fields beside the bar that fit, and the width of the bar; 0: no bar."""
    kept: set[Field] = set()
    taken = 0
    for field in sorted(filter(lambda f: f.text, fields), key=lambda f: f.drop):
        needed = cell_len(field.text) + 1
        if not field.drop or taken + needed + BAR_WIDTH <= width:
            kept.add(field)
            taken += needed
    return [f for f in fields if f in kept], width - taken if width - taken >= MIN_BAR_WIDTH else 0


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds))).removeprefix("0:")


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
        fields = [
            Field(printable(task.description), drop=4 if task.description == TRAINING else 1),
            *(Field(printable(task.fields[key]), drop) for drop, key in enumerate(("step", "loss", "speed"), 1)),
            Field(_clock(task.elapsed or 0), drop=0, style="progress.elapsed"),
            Field(f"{_clock(left)} left" if left is not None else "", drop=0, style="progress.remaining"),
        ]
        kept, width = fitting_fields(fields, options.max_width)
        if width:
            pulse, now = task.total is None, task.get_time()
            bar = ProgressBar(task.total, task.completed, width=width, pulse=pulse, animation_time=now)
            yield from (s for s in console.render(bar, options.update(width=width)) if s.text != "\n")
        yield Text.assemble(*((f" {field.text}", field.style) for field in kept), end="")


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


class LogReader:
    """Read the new lines of growing logs, without escape sequences and secrets.

    Of a line that a program overwrites (carriage returns, as progress bars do) the last state is returned.

    Args:
        offsets: bytes of each log that are read already.
        limit: of a log that grows by more bytes between two calls, the older ones are left out, and that is said.
    """

    def __init__(self, offsets: dict[Path, int], limit: int | None = None) -> None:
        self._offsets, self._limit = offsets, limit
        self._rests: dict[Path, bytes] = {}

    def new_lines(self, path: Path, *, last: bool = False) -> list[str]:
        """Return the new complete lines of a log; with `last` also one without a line feed."""
        from allranks.utils.redaction import redact

        try:
            data, skipped = read_appended(path, self._offsets.get(path, 0), self._limit)
        except OSError:  # removed meanwhile, or no log
            return []
        self._offsets[path] = self._offsets.get(path, 0) + skipped + len(data)
        before = b"" if skipped else self._rests.get(path, b"")
        *whole, rest = (before + data).split(b"\n")
        whole = [*whole[bool(skipped) :], *([rest] if last else [])]
        self._rests[path] = b"" if last else rest[-LINE_BYTES:]
        lines = [printable(_visible(line).decode("utf-8", "replace")).rstrip() for line in whole]
        shown = redact("\n".join(line for line in lines if line)).split("\n") if any(lines) else []
        return [f"... {skipped:,} bytes are not shown; the log has all: {path}", *shown] if skipped else shown


class ProgramOutput(LogFollower):
    """Show new lines of the ranks' logs until the block ends; as a context manager around the run.

    Args:
        show: prints a line.
        which: ``rank0`` or ``all``.
    """

    def __init__(self, run: RunDir, show: Callable[[str], object], which: str) -> None:
        super().__init__(LOOK_S)
        self._run, self._show, self._which = run, show, which
        self._reader = LogReader({path: path.stat().st_size for path in self._logs().values()}, CHUNK_BYTES)

    def _logs(self) -> dict[int, Path]:
        attempts = self._run.attempts()
        logs = self._run.rank_logs(attempts[-1]) if attempts else {}
        return {rank: path for rank, path in logs.items() if self._which == "all" or rank == 0}

    def _look(self, *, last: bool = False) -> None:
        """Show new lines. A display never ends a run."""
        try:
            for rank, path in self._logs().items():
                for line in self._reader.new_lines(path, last=last):
                    self._show(f"[rank {rank}] {line}" if self._which == "all" else line)
        except Exception:  # noqa: BLE001 - a closed terminal, a damaged folder
            self._stopped.set()


def _visible(line: bytes) -> bytes:
    """Return the final state of a line as a terminal would show it, shortened."""
    states = [part for part in line[-4 * LINE_BYTES :].split(b"\r") if part.strip()]
    return states[-1][:LINE_BYTES] if states else b""


class _SafeFormatter(string.Formatter):
    """Format fields of a file, any of which may be missing or malformed: a number that is none becomes a dash."""

    def get_value(self, key: Any, args: Any, kwargs: Any) -> Any:
        return kwargs.get(key)

    def format_field(self, value: Any, format_spec: str) -> str:
        if not format_spec:
            return format_value(value)
        number = finite_int(value) if format_spec.endswith("d") else finite_float(value)
        return NO_VALUE if number is None else format(number, format_spec)


def filled(template: str, fields: dict[str, Any], *, needed: bool = False) -> str:
    """Return a template filled with the fields; with `needed` an empty text if the first one has no value.

    >>> filled("{loss:.4f} after step {step:d}", {"loss": 0.5})
    '0.5000 after step -'
    """
    text = _SafeFormatter().vformat(template, (), fields)
    if needed:
        first = next((name, spec) for _, name, spec, _ in string.Formatter().parse(template) if name)
        value = fields.get(first[0])
        return text if (finite_float(value) is not None if first[1] else value not in (None, "")) else ""
    return text


def n_of(count: Any, word: str) -> str:
    """Return ``1 rank`` or ``2 ranks``."""
    return f"{format_count(count)} {word}{'s' * (finite_int(count) != 1)}"


def summary_table(metrics: dict[str, Any]) -> Table:
    """Return the summary of a run as a two-column table."""
    table = Table(
        title=escape(f"{format_value(metrics.get('run_name'))}: {format_value(metrics.get('status'))}"),
        title_justify="left",
        show_header=False,
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column(style="dim")
    table.add_column()
    for name, value in summary_rows(metrics):
        table.add_row(name, escape(value))
    return table


def summary_rows(m: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the summary whose values are known."""

    def known(template: str) -> str:
        return filled(template, m, needed=True)

    ranks, device = f"{format_count(m.get('world_size'))} on {n_of(m.get('nodes'), 'node')}", m.get("device")
    again = [as_dict(one) for one in as_list(m.get("restarts"))]
    restarts = ". ".join(
        filled("attempt {attempt:d}: {message}; ", one)
        + ("started again: " if one.get("action") == "restart" else "not started again: ")
        + format_value(one.get("reason"))
        for one in again
        if len(again) > 1 or one.get("action") == "restart"
    )
    effective, early = as_dict(m.get("effective_training_time")), as_dict(m.get("stopped_early"))
    wall = finite_float(effective.get("wall_time_s")) or finite_float(m.get("wall_time_s"))
    network = as_dict(m.get("network")).get("line")
    if m.get("model") is None:  # a user's own program, whose steps, tokens or proofs are unknown
        steps = known("{steps:d}") if "progress_source" in m else ""
        speeds = (known("{tokens_per_s:,.0f} tokens/s"), known("{steps_per_s:.3g} steps/s"))
        rows = {
            "ranks": f"{ranks}, your own program, {format_value(device)}",
            "steps": steps and steps + LOG_NOTE * (m["progress_source"] == "log"),
            "train loss": _change(m, "train_loss_first", "train_loss_last", trained="loss_not_finite" in m),
            "held-out loss": _change(m, "eval_loss_first", "eval_loss"),
            "speed": ", ".join(filter(None, speeds)),
            "time": format_duration(wall or 0),
            "effective": _effective_time(effective),
            "cost": cost_row(m.get("cost")),
            "restarts": restarts,
            "network": network,
        }
        return [(name, sanitize(value)) for name, value in rows.items() if value]
    attempts, best = finite_int(m.get("attempts")) or 1, m.get("best_eval_loss")
    proof = "world size, equal weights, disjoint data: shown at step 0"
    rows = {
        "ranks": f"{ranks}, " + filled("{strategy}, {device}, {dtype}", m),
        "proof": proof if m.get("sync_proof") else "not reached",
        "steps": filled("{steps:d}", m)
        + f" over {attempts} attempts" * (attempts > 1)
        + (f"; the whole run took {format_duration(wall)}" if wall else ""),
        "effective": _effective_time(effective),
        "cost": cost_row(m.get("cost")),
        "restarts": restarts,
        "train loss": _change(m, "train_loss_first", "train_loss_last", trained=bool(m.get("steps"))),
        "router loss": _change(m, "router_aux_loss_first", "router_aux_loss_last"),
        "held-out loss": _change(m, "eval_loss_first", "eval_loss", trained=bool(m.get("eval_s"))),
        "best": best != m.get("eval_loss") and known("{best_eval_loss:.4f} after step {best_step:d}"),
        "ended early": early and filled("after step {step:d}: {reason}", early),
        "perplexity": known("{perplexity:.3f}"),
        "accuracy": known("{accuracy:.1%}"),
        "exact match": _change(m, "exact_match_first", "exact_match", form=".1%"),
        "tokens": filled("{tokens_real:,d} real, {tokens_trained:,d} trained, {tokens_padded:,d} padding", m),
        "speed": known(
            "{tokens_per_s:,.0f} real tokens/s ({tokens_per_s_per_rank:,.0f} per rank), after 5 warm-up steps"
        ),
        "step time": filled("median {median:.3f} s, p90 {p90:.3f} s", as_dict(m.get("step_time_s")), needed=True),
        "epoch": finite_float(m.get("epoch_s")) is not None and f"{format_duration(m['epoch_s'])} of training",
        "network": network,
        "MFU": (mfu := known("{mfu:.1%}")) and mfu + known(", {mfu_with_attention:.1%} with attention"),
        "peak memory": format_bytes(m.get("peak_memory_bytes")) + " per rank",
        "machine": "; ".join(machine_notes(m)),
        "links": "; ".join(link_notes(m)[:3]),
        "not compiled": known("{not_compiled}"),
    }
    return [(name, sanitize(value)) for name, value in rows.items() if value]


def _effective_time(effective: dict[str, Any]) -> str:
    """Return the productive share of the wall time, and the other parts that are at least 1 % of it."""
    share, wall = (finite_float(effective.get(key)) for key in ("share", "wall_time_s"))
    if share is None or not wall:
        return ""
    parts = {kind: finite_float(effective.get(f"{kind}_s")) or 0.0 for kind in KINDS[1:]}
    rest = ", ".join(
        f"{'start-up' if kind == 'startup' else kind} {format_duration(s)}"
        for kind, s in parts.items()
        if s > 0.01 * wall
    )
    return f"{share:.1%} of the time was training that counts" + f"; the rest: {rest}" * bool(rest)


def _change(m: dict[str, Any], first: str, last: str, *, trained: bool = False, form: str = ".4f") -> str | None:
    """Format a value before and after training. A measured loss without a value was not finite."""
    before, after = finite_float(m.get(first)), finite_float(m.get(last))
    if after is None and not (trained and last in m):
        return None
    end = "nan (not finite)" if after is None else format(after, form)
    return end if before is None or before == after else f"{before:{form}} -> {end}"


def samples_table(samples: list[dict[str, Any]]) -> Table:
    """Return a table of sample answers before and after training."""
    table = Table(title="Held-out questions", title_justify="left", show_lines=False)
    early = finite_int(samples[0].get("before_step")) if samples else None
    titles = {
        "prompt": "question",
        "expected": "correct answer",
        "before": f"after step {early}" if early else "before",
        "after": "after",
    }
    shown = [key for key in titles if any(s.get(key) is not None for s in samples)]
    for key in shown:
        table.add_column(titles[key], overflow="fold", max_width=48)
    for s in samples:
        table.add_row(*(escape(_one_line(s.get(key))) for key in shown))
    return table


def _one_line(text: Any) -> str:
    if text is None:
        return "-"
    for header in ("### Instruction:", "### Input:", "### Response:"):
        text = str(text).replace(header, "")
    flat = " ".join(sanitize(text).split())  # an untrained model says anything, also what a terminal obeys
    return flat if len(flat) <= 160 else flat[:157] + "..."


def print_summary(console: SafeConsole, run: RunDir, metrics: dict[str, Any]) -> None:
    """Print sample answers and the summary."""
    samples = before_and_after(list(read_events(run.events_of(0))))
    if samples:
        console.print()
        console.print(samples_table(samples))
    if metrics["steps"] or metrics["status"] == "succeeded":
        console.print()
        console.print(summary_table(metrics))
        console.print()
