"""What a person sees in the terminal: progress while a run goes on, and its summary. Plain text when not a terminal."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from allranks.cli.options import error_line
from allranks.planning import LaunchPlan
from allranks.report.text import bytes_text, plain, seconds_text

PHASES = {
    "prepare": "preparing data",
    "build": "building the model",
    "prove": "proving the ranks",
    "train": "training",
    "evaluate": "evaluating",
    "save": "saving",
    "done": "done",
}
PLAIN_EVERY_S = 10.0


class Live:
    """Follows a run: a progress bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, console: Console, plan: LaunchPlan) -> None:
        self._console, self._plan = console, plan
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._total = 0
        self._last_line = 0.0
        self._rate: list[tuple[float, int]] = []
        self._loss: float | None = None

    def __enter__(self) -> Live:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description:<20}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[where]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("starting the ranks", total=None, where="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(escape(text), highlight=False, soft_wrap=not self._console.is_terminal)

    def event(self, event: dict[str, Any]) -> None:
        """Take in one event of any rank; rank 0's are shown."""
        if event["event"] == "error" and not event.get("echo"):
            self.say(error_line(event))
        if event["event"] == "hang":
            ranks = ", ".join(map(str, event["ranks"]))
            self.say(
                f"hang     {f'rank {ranks} on ' + str(event['host']) + ' fell out' if ranks else 'all ranks wait'}; the run is ended"
            )
        if event["event"] == "warning":
            self.say(f"note     rank {event['rank']}: {plain(event['message'])}")
        if event["rank"] != 0:
            return
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler:
            handler(event)

    def _on_phase(self, event: dict[str, Any]) -> None:
        if "total_steps" in event:
            self._total = event["total_steps"]
            if self._bar and self._task is not None:
                self._bar.update(self._task, total=self._total, completed=event["first_step"])
        if self._bar and self._task is not None:
            self._bar.update(self._task, description=PHASES.get(event["name"], event["name"]))
        elif event["name"] in ("prepare", "build", "prove") or "total_steps" in event:
            self.say(PHASES[event["name"]])

    def _on_data(self, event: dict[str, Any]) -> None:
        cut = (
            f", {event['rows_truncated']} rows cut to fit ({event['tokens_cut']} tokens)"
            if event["rows_truncated"]
            else ""
        )
        lost = (
            f", {event['rows_without_target']} rows left out (prompt longer than max_length)"
            if event["rows_without_target"]
            else ""
        )
        self.say(
            f"data     {event['rows_train']} rows to train on, {event['rows_eval']} held out; {event['sequences']} sequences, "
            f"{event['fill']:.0%} full{cut}{lost} [{event['how']}, {event['seconds']:.1f} s]"
        )

    def _on_remark(self, event: dict[str, Any]) -> None:
        self.say(f"note     {event['message']}")

    def _on_model(self, event: dict[str, Any]) -> None:
        self.say(
            f"model    {event['parameters']:,} parameters, {event['parameters_trained']:,} trained; "
            f"{event['device']}, torch {event['torch']}, {event['threads']} thread{'s' * (event['threads'] != 1)} a rank"
        )

    def _on_proof(self, event: dict[str, Any]) -> None:
        count, rows = event["world_size"], event["rows_checked"]
        answer = "1 rank answers" if count == 1 else f"{count} ranks answer"
        self.say(
            f"proof    {answer}, weights equal ({event['weights_hash'][:12]}), rows disjoint and complete ({rows})"
        )

    def _on_eval(self, event: dict[str, Any]) -> None:
        parts = [f"loss {event['loss']:.4f}"]
        if event.get("perplexity") is not None:
            parts.append(f"perplexity {event['perplexity']:.2f}")
        if event.get("accuracy") is not None:
            parts.append(f"accuracy {event['accuracy']:.1%}")
        if event.get("exact_match") is not None:
            parts.append(f"right answers {event['exact_match']:.1%} of {event['checked']}")
        self.say(f"held out {', '.join(parts)} (after step {event['step']})")

    def _on_checkpoint(self, event: dict[str, Any]) -> None:
        self.say(f"saved    step {event['step']} ({event['mode']}, {event['seconds']:.2f} s)")

    def _on_step(self, event: dict[str, Any]) -> None:
        self._loss = event["loss"]
        self._rate = [*self._rate[-9:], (event["time"], event["tokens"] * self._plan.world_size)]
        where = f"step {event['step']}/{self._total}  loss {_number(self._loss)}  {self._speed()}"
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=event["step"], where=where)
        elif time.monotonic() - self._last_line > PLAIN_EVERY_S or event["step"] == self._total:
            self._last_line = time.monotonic()
            self.say(where)

    def _speed(self) -> str:
        if len(self._rate) < 2:
            return ""
        seconds = self._rate[-1][0] - self._rate[0][0]
        return f"{sum(n for _, n in self._rate[1:]) / seconds:,.0f} tokens/s" if seconds > 0 else ""


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def summary_table(metrics: dict[str, Any]) -> Table:
    """The summary of a run as a table of two columns."""
    table = Table(
        title=f"{metrics['run_name']}: {metrics['status']}",
        title_justify="left",
        show_header=False,
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column(style="dim")
    table.add_column()
    for name, value in summary_rows(metrics):
        table.add_row(name, value)
    return table


def summary_rows(m: dict[str, Any]) -> list[tuple[str, str]]:
    """The lines of the summary, only those that are known."""
    step, proof = m.get("step_time_s"), m.get("sync_proof")
    if m["model"] is None:  # a program of the user's own, of which no steps, tokens or proofs are known
        ranks = f"{m['world_size']} on {m['nodes']} node{'s' * (m['nodes'] > 1)}, your own program, {m['device']}"
        network = (m.get("network") or {}).get("line")
        known = [("ranks", ranks), ("time", seconds_text(m["wall_time_s"] or 0)), ("network", network)]
        return [(name, value) for name, value in known if value]
    rows = [
        (
            "ranks",
            f"{m['world_size']} on {m['nodes']} node{'s' * (m['nodes'] > 1)}, {m['strategy']}, {m['device']}, {m['dtype']}",
        ),
        ("proof", "world size, equal weights, disjoint data: shown at step 0" if proof else "not reached"),
        (
            "steps",
            f"{m['steps']} in {m['wall_time_s'] or 0:.1f} s"
            + (f" over {m['attempts']} attempts" if m.get("attempts", 1) > 1 else ""),
        ),
        ("train loss", _change(m["train_loss_first"], m["train_loss_last"])),
        ("held-out loss", _change(m.get("eval_loss_first"), m["eval_loss"])),
        ("perplexity", None if m["perplexity"] is None else f"{m['perplexity']:.3f}"),
        ("accuracy", None if m["accuracy"] is None else f"{m['accuracy']:.1%}"),
        ("right answers", _share(m.get("exact_match_first"), m.get("exact_match"))),
        ("tokens", f"{m['tokens_real']:,} real, {m['tokens_trained']:,} trained, {m['tokens_padded']:,} padding"),
        (
            "speed",
            None
            if m["tokens_per_s"] is None
            else f"{m['tokens_per_s']:,.0f} real tokens/s ({m['tokens_per_s_per_rank']:,.0f} a rank), after 5 warm-up steps",
        ),
        ("step time", None if step is None else f"median {step['median']:.3f} s, p90 {step['p90']:.3f} s"),
        ("epoch", None if m.get("epoch_s") is None else f"{seconds_text(m['epoch_s'])} of training"),
        ("network", (m.get("network") or {}).get("line")),
        ("MFU", None if m["mfu"] is None else f"{m['mfu']:.1%}"),
        ("peak memory", bytes_text(m["peak_memory_bytes"]) + " a rank"),
    ]
    return [(name, value) for name, value in rows if value]


def _change(before: float | None, after: float | None) -> str | None:
    if after is None:
        return None
    return f"{after:.4f}" if before is None or before == after else f"{before:.4f} -> {after:.4f}"


def _share(before: float | None, after: float | None) -> str | None:
    if after is None:
        return None
    return f"{after:.1%}" if before is None or before == after else f"{before:.1%} -> {after:.1%}"


def samples_table(samples: list[dict[str, Any]]) -> Table:
    """Sample answers before and after training."""
    table = Table(title="Held-out questions", title_justify="left", show_lines=False)
    for name in ("question", "right answer", "before", "after"):
        table.add_column(name, overflow="fold", max_width=48)
    for s in samples:
        table.add_row(*(escape(_flat(s.get(k))) for k in ("prompt", "expected", "before", "after")))
    return table


def _flat(text: Any) -> str:
    if text is None:
        return "-"
    for header in ("### Instruction:", "### Input:", "### Response:"):
        text = str(text).replace(header, "")
    flat = " ".join(plain(text).split())  # an untrained model says anything, also what a terminal obeys
    return flat if len(flat) <= 160 else flat[:157] + "..."
