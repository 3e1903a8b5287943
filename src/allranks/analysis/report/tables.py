"""Build the tables of the page: results, expert load, hangs, own work of the ranks, CPU time and links. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from allranks.analysis.report.run_data import RunData
from allranks.utils import formatting
from allranks.utils.formatting import (
    NO_VALUE,
    as_dict,
    as_dicts,
    as_list,
    finite_float,
    finite_int,
    format_bytes,
    format_count,
    format_duration,
    format_ranks,
)
from allranks.utils.text import format_value

MAX_ROWS = 16


@dataclass(frozen=True)
class Cell:
    """Text of a cell; ``tone`` is a CSS class: good, bad, muted, code, num, long or wrap (several lines), or none."""

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
    """Return a table, or None if it would be empty."""
    made = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    return Table(id, title, columns, made, note) if made else None


def fact_table(id: str, title: str, pairs: Iterable[tuple[str, str]], note: str = "") -> Table | None:
    """Return names and values, without unknown values."""
    return table(
        id, title, [], [(Cell(name, "muted"), value) for name, value in pairs if value and value != NO_VALUE], note
    )


def number_cell(value: str) -> Cell:
    """Return a number, right-aligned."""
    return Cell(value, "num")


def long_cell(value: str) -> Cell:
    """Return text that may span several lines."""
    return Cell(value, "long")


def limit_rows(rows: list[Row], what: str) -> tuple[list[Row], str]:
    """Return at most `MAX_ROWS` rows with the last one, and a sentence about the rows left out."""
    if len(rows) <= MAX_ROWS:
        return rows, ""
    kept = [*rows[: MAX_ROWS - 1], rows[-1]]
    return kept, f"{len(rows) - MAX_ROWS:,} of {len(rows):,} {what} are left out, before the last."


def eval_table(data: RunData) -> Table | None:
    """Return the evaluations."""
    evals = data.zero.of("eval")
    columns = [
        ("loss", "loss", formatting.format_loss),
        ("perplexity", "perplexity", formatting.format_perplexity),
        ("accuracy", "accuracy", formatting.format_percent),
        ("exact match", "exact_match", formatting.format_percent),
    ]
    known = [c for c in columns if any(finite_float(e.get(c[1])) is not None for e in evals)]
    rows: list[Row] = [
        (
            number_cell(format_count(e["step"])),
            *(number_cell(show(e.get(key))) for _, key, show in known),
            number_cell(format_count(e.get("rows"))),
            number_cell(formatting.format_duration(e.get("seconds"))),
        )
        for e in evals
    ]
    kept, note = limit_rows(rows, "evaluations")
    return table("evals", "Evaluations", ["after step", *(name for name, _, _ in known), "rows", "time"], kept, note)


def checkpoint_table(data: RunData) -> Table | None:
    """Return the checkpoints that were written, and whether they still exist."""
    told = {e["step"]: e for e in data.zero.of("checkpoint")}
    rows: list[Row] = []
    for step in sorted({*told, *data.checkpoints}):
        event, there = told.get(step, {}), data.checkpoints.get(step, {})
        size = (
            f"{formatting.format_bytes(there['bytes'])} in {there['files']} file{'s' * (there['files'] != 1)}"
            if there.get("whole")
            else NO_VALUE
        )
        state = (
            Cell("✓ exists", "good") if there.get("whole") else Cell("removed" if not there else "no manifest", "muted")
        )
        mode = format_value(event.get("mode") or there.get("mode"))
        times = (number_cell(formatting.format_duration(event.get(key))) for key in ("seconds", "written_s"))
        rows.append((number_cell(f"{step:,}"), mode, *times, size, state))
    kept, note = limit_rows(rows, "checkpoints")
    columns = ["step", "mode", "pause", "complete after", "size", "state"]
    meaning = "Pause: time without training. Complete: verified and published."
    return table("checkpoints", "Checkpoints", columns, kept, f"{meaning} {note}".strip())


def trace_table(data: RunData) -> Table | None:
    """Return the profiler traces, and the command to read them."""
    rows: list[Row] = []
    for rank, story in data.histories.items():
        for e in story.of("trace"):
            steps = f"{format_count(e.get('first_step'))} to {format_count(e.get('last_step'))}"
            size = finite_float(e.get("bytes"))
            rows.append(
                (
                    number_cell(f"{rank}"),
                    number_cell(format_count(e.get("attempt"))),
                    steps,
                    number_cell(formatting.format_bytes(size)),
                )
            )
    kept, note = limit_rows(rows, "traces")
    return table(
        "traces", "Profiler traces", ["rank", "attempt", "steps", "size"], kept, f"allranks trace {data.name} {note}"
    )


def attempt_table(data: RunData) -> Table | None:
    """Return each start of the run, from rank 0's events."""
    rows: list[Row] = []
    for a in data.zero.attempts:
        spent = a.ended - a.began if a.ended is not None and a.began is not None else None
        start = f"after step {a.resumed_from}" if a.resumed_from is not None else "from the start"
        rows.append(
            (
                number_cell(f"{a.number}"),
                formatting.format_timestamp(a.began),
                start,
                number_cell(format_count(a.last_step)),
                number_cell(formatting.format_duration(spent)),
                long_cell(a.end),
            )
        )
    kept, note = limit_rows(rows, "attempts")
    return table("attempts", "Attempts", ["attempt", "started", "from", "last step", "time", "end"], kept, note)


def error_table(data: RunData) -> Table | None:
    """Return the errors that ranks reported, causes before consequences."""
    rows: list[Row] = [
        (
            number_cell(format_count(e.get("attempt"))),
            number_cell(format_count(e.get("rank"))),
            Cell(format_value(e.get("type")), "code"),
            long_cell(format_value(e.get("message"))),
            "another rank had failed" if e.get("echo") is True else "",
        )
        for e in data.errors()
    ]
    kept, note = limit_rows(rows, "errors")
    return table("errors", "Errors reported by ranks", ["attempt", "rank", "error", "message", "because"], kept, note)


def expert_table(data: RunData) -> Table | None:
    """Return the smallest, even and largest share of a block's experts, over all training steps; least even blocks first."""
    load = as_dict(data.metrics.get("expert_load"))
    layers = sorted(as_dicts(load.get("layers")), key=lambda layer: -(finite_float(layer.get("max")) or 0.0))
    rows: list[Row] = [
        (
            number_cell(format_value(layer.get("layer"))),
            number_cell(formatting.format_percent(layer.get("min"))),
            number_cell(formatting.format_percent(layer.get("mean"))),
            number_cell(formatting.format_percent(layer.get("max"))),
            number_cell(format_count(layer.get("most"))),
            number_cell(format_count(layer.get("unused"))),
        )
        for layer in layers[:MAX_ROWS]
    ]
    left = len(layers) - len(rows)
    note = (
        "Shares of the tokens of all training steps, without padding. Even: the share if all experts got the same number; "
        "unused: experts without a token."
    ) + (f" {left:,} more even blocks are not shown." if left > 0 else "")
    columns = ["block", "smallest", "even", "largest", "by expert", "unused"]
    return table("experts", "Expert load", columns, rows, note)


def hang_table(data: RunData) -> Table | None:
    """Return the stack position of each rank at the time of the hang."""
    stalled, waiting = as_dicts(data.hang.get("stalled")), as_dicts(data.hang.get("waiting"))
    made: list[Row] = []
    for item in stalled[:MAX_ROWS]:
        why = long_cell(format_value(item.get("why")))
        made.append((*_rank_and_host(item), Cell("stalled", "bad"), long_cell(format_value(item.get("where"))), why))
    for item in waiting[: max(MAX_ROWS - len(made), 1)]:
        call = long_cell(format_value(item.get("call")))
        made.append((*_rank_and_host(item), Cell("waits", "muted"), long_cell(format_value(item.get("where"))), call))
    left = len(stalled) + len(waiting) - len(made)
    alarm = as_dict(data.hang.get("alarm"))
    note = f"Limit without progress: {format_duration(alarm.get('limit_s'))}. Stacks and calls of all ranks: {format_value(data.hang.get('files'))}."
    if left > 0:
        note += f" {left} more ranks are not shown."
    notes = [str(n) for n in data.hang.get("notes") or []]
    return table(
        "hang", "Position of the ranks", ["rank", "host", "state", "line", "why"], made, " ".join([note, *notes])
    )


def _rank_and_host(item: dict[str, object]) -> tuple[Cell, str]:
    rank = finite_int(item.get("rank"))
    return number_cell(NO_VALUE if rank is None else str(rank)), format_value(item.get("host"))


_REASONS = {
    "own": Cell("slow: the others wait", "bad"),
    "unknown": Cell("slow: the others wait; reason not known", "bad"),
    "machine": Cell("its CPU time was taken", "muted"),
}


def straggler_table(data: RunData) -> Table | None:
    """Return the own time of each rank, slowest first."""
    found = as_dict(data.metrics.get("own_time"))
    factor, rows = finite_float(found.get("factor")), as_dicts(found.get("ranks"))
    made: list[Row] = []
    for item in rows[:MAX_ROWS]:
        reason = str(item.get("reason"))
        slow = _REASONS["own"] if item.get("slow") is True else Cell("", "muted")
        made.append(
            (
                number_cell(format_value(item.get("rank"))),
                format_value(item.get("host")),
                number_cell(format_duration(item.get("own_s"))),
                _ratio(item.get("relative")),
                number_cell(format_duration(item.get("backward_s"))),
                _ratio(item.get("backward_relative")),
                number_cell(format_duration(item.get("optimizer_s"))),
                _ratio(item.get("optimizer_relative")),
                _share(item.get("queued_share")),
                _REASONS.get(reason, slow),
            )
        )
    note = (
        "Medians of a step, without waiting for other ranks. Relative to the median of the others, without the time in which the rank "
        "had no core."
    )
    if factor is not None:
        note += f" A rank is slow from a ratio of {factor:g}, if it persists."
    if len(rows) > MAX_ROWS:
        note += f" {len(rows) - MAX_ROWS} faster ranks are not shown."
    columns = [
        "rank",
        "host",
        "data and forward",
        "relative",
        "backward",
        "relative",
        "optimizer",
        "relative",
        "no core",
        "",
    ]
    return table("pace", "Own work of each rank", columns, made, note)


def machine_table(data: RunData) -> Table | None:
    """Return what happened to the CPU time of the ranks on each host, most disturbed first."""
    rows = as_dicts(data.metrics.get("machine_load"))
    rows = sorted(rows, key=lambda item: -(finite_float(item.get("taken_share")) or 0.0))
    made: list[Row] = [
        (
            format_value(item.get("host")),
            number_cell(format_value(item.get("cores"))),
            _share(item.get("taken_share")),
            _number(item.get("others_cores")),
            _number(item.get("steal_cores")),
            _share(item.get("competing_share")),
            _share(item.get("throttled_share")),
        )
        for item in rows[:MAX_ROWS]
    ]
    note = (
        "During training. Taken: the part of the CPU time that the ranks wanted and other processes or the hypervisor used. "
        "Competing: the part that they took from each other. Quota: the part of the time in which a CPU quota stopped them."
    )
    if len(rows) > MAX_ROWS:
        note += f" {len(rows) - MAX_ROWS} less disturbed hosts are not shown."
    columns = ["host", "cores", "taken", "cores used by others", "cores stolen", "competing", "quota"]
    return table("machines", "CPU time of the ranks", columns, made, note)


def link_table(data: RunData) -> Table | None:
    """Return the TCP links between hosts, slow ones first."""
    rows = as_dicts(data.metrics.get("links"))
    made: list[Row] = []
    for item in rows[:MAX_ROWS]:
        rate = finite_float(item.get("bytes_per_s"))
        bad = item.get("slow") is True or item.get("lossy") is True
        ranks = [r for r in map(finite_int, as_list(item.get("ranks"))) if r is not None]
        made.append(
            (
                f"{format_value(item.get('host'))} to {format_value(item.get('peer'))}",
                format_ranks(ranks),
                number_cell(format_bytes(finite_int(item.get("sent_bytes")))),
                number_cell(NO_VALUE if rate is None else f"{rate / 1e6:,.1f} MB/s"),
                _ratio(item.get("relative")),
                _share(item.get("busy_share")),
                _share(item.get("resent_share")),
                Cell("slow", "bad") if bad else Cell("", "muted"),
            )
        )
    note = (
        "From the kernel's counters of the ranks' TCP connections. Relative: time per byte against the fastest other links, "
        "without the time in which the receiver did not read."
    )
    if len(rows) > MAX_ROWS:
        note += f" {len(rows) - MAX_ROWS} faster links are not shown."
    columns = ["link", "ranks", "sent", "rate", "relative", "busy", "sent again", ""]
    return table("links", "Links between nodes", columns, made, note)


def _ratio(value: object) -> Cell:
    found = finite_float(value)
    return number_cell(f"{found:.2f}" if found is not None else NO_VALUE)


def _share(value: object) -> Cell:
    found = finite_float(value)
    return number_cell(f"{found:.1%}" if found is not None else NO_VALUE)


def _number(value: object) -> Cell:
    found = finite_float(value)
    return number_cell(f"{found:.1f}" if found is not None else NO_VALUE)
