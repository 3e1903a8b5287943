"""Tables of the page: what all of them share, and the results. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from allranks.report import text
from allranks.report.gather import RunData
from allranks.report.text import NONE, count_text, number, text_or_none

MOST_ROWS = 16


@dataclass(frozen=True)
class Cell:
    """Text of a cell; ``tone`` is a class of the page: good, bad, muted, code, num, long or wrap (several lines), or none."""

    text: str
    tone: str = ""


Row = Sequence[Cell | str]


@dataclass(frozen=True)
class Table:
    """A table; without columns it is a list of names and values."""

    id: str
    title: str
    columns: list[str]
    rows: list[list[Cell]]
    note: str = ""


def table(id: str, title: str, columns: list[str], rows: Iterable[Row], note: str = "") -> Table | None:
    """A table, or None where it would be empty."""
    made = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    return Table(id, title, columns, made, note) if made else None


def facts(id: str, title: str, pairs: Iterable[tuple[str, str]], note: str = "") -> Table | None:
    """Names and values, without those that are not known."""
    return table(
        id, title, [], [(Cell(name, "muted"), value) for name, value in pairs if value and value != NONE], note
    )


def num(value: str) -> Cell:
    """A number, set flush right."""
    return Cell(value, "num")


def long(value: str) -> Cell:
    """Text that may take several lines."""
    return Cell(value, "long")


def shorten(rows: list[Row], what: str) -> tuple[list[Row], str]:
    """At most `MOST_ROWS` rows, the last among them, and a sentence about those left out."""
    if len(rows) <= MOST_ROWS:
        return rows, ""
    kept = [*rows[: MOST_ROWS - 1], rows[-1]]
    return kept, f"{len(rows) - MOST_ROWS:,} of {len(rows):,} {what} are left out, before the last."


def eval_table(data: RunData) -> Table | None:
    """Each evaluation."""
    evals = data.zero.of("eval")
    columns = [
        ("loss", "loss", text.loss_text),
        ("perplexity", "perplexity", text.perplexity_text),
        ("accuracy", "accuracy", text.share_text),
        ("right answers", "exact_match", text.share_text),
    ]
    known = [c for c in columns if any(number(e.get(c[1])) is not None for e in evals)]
    rows: list[Row] = [
        (
            num(count_text(e["step"])),
            *(num(show(e.get(key))) for _, key, show in known),
            num(count_text(e.get("rows"))),
            num(text.seconds_text(e.get("seconds"))),
        )
        for e in evals
    ]
    kept, note = shorten(rows, "evaluations")
    return table("evals", "Evaluations", ["after step", *(name for name, _, _ in known), "rows", "time"], kept, note)


def checkpoint_table(data: RunData) -> Table | None:
    """Checkpoints that were written, and those that are still there."""
    told = {e["step"]: e for e in data.zero.of("checkpoint")}
    rows: list[Row] = []
    for step in sorted({*told, *data.checkpoints}):
        event, there = told.get(step, {}), data.checkpoints.get(step, {})
        size = (
            f"{text.bytes_text(there['bytes'])} in {there['files']} file{'s' * (there['files'] != 1)}"
            if there.get("whole")
            else NONE
        )
        state = (
            Cell("✓ there", "good") if there.get("whole") else Cell("removed" if not there else "no manifest", "muted")
        )
        mode = text_or_none(event.get("mode") or there.get("mode"))
        times = (num(text.seconds_text(event.get(key))) for key in ("seconds", "written_s"))
        rows.append((num(f"{step:,}"), mode, *times, size, state))
    kept, note = shorten(rows, "checkpoints")
    columns = ["step", "mode", "pause", "complete after", "size", "state"]
    meaning = "Pause: training stood still for so long. Complete: read again and published."
    return table("checkpoints", "Checkpoints", columns, kept, f"{meaning} {note}".strip())


def trace_table(data: RunData) -> Table | None:
    """Profiler traces, and how to read them."""
    rows: list[Row] = []
    for rank, story in data.stories.items():
        for e in story.of("trace"):
            steps = f"{count_text(e.get('first_step'))} to {count_text(e.get('last_step'))}"
            size = number(e.get("bytes"))
            rows.append((num(f"{rank}"), num(count_text(e.get("attempt"))), steps, num(text.bytes_text(size))))
    kept, note = shorten(rows, "traces")
    return table(
        "traces", "Profiler traces", ["rank", "attempt", "steps", "size"], kept, f"allranks trace {data.name} {note}"
    )


def attempt_table(data: RunData) -> Table | None:
    """Each start of the run, as rank 0 told it."""
    rows: list[Row] = []
    for a in data.zero.attempts:
        spent = a.ended - a.began if a.ended is not None and a.began is not None else None
        start = f"after step {a.resumed_from}" if a.resumed_from is not None else "from the beginning"
        rows.append(
            (
                num(f"{a.number}"),
                text.clock_text(a.began),
                start,
                num(count_text(a.last_step)),
                num(text.seconds_text(spent)),
                long(a.end),
            )
        )
    kept, note = shorten(rows, "attempts")
    return table("attempts", "Attempts", ["attempt", "started", "from", "last step", "time", "end"], kept, note)


def error_table(data: RunData) -> Table | None:
    """Errors that ranks reported, causes before what followed from them."""
    rows: list[Row] = [
        (
            num(count_text(e.get("attempt"))),
            num(count_text(e.get("rank"))),
            Cell(text_or_none(e.get("type")), "code"),
            long(text_or_none(e.get("message"))),
            "another rank had gone" if e.get("echo") is True else "",
        )
        for e in data.errors()
    ]
    kept, note = shorten(rows, "errors")
    return table("errors", "Errors reported by ranks", ["attempt", "rank", "error", "message", "because"], kept, note)
