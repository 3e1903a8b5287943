"""Tables of hangs and stragglers: who stood where, and who works slower than the others. Pure."""

from __future__ import annotations

from allranks.report.gather import RunData
from allranks.report.tables import MOST_ROWS, Cell, Row, Table, long, num, table
from allranks.report.text import NONE, number, record, records, seconds_text, text_or_none, whole


def pace_table(data: RunData) -> Table | None:
    """Own time of each rank, the slowest first."""
    found = record(data.metrics.get("own_time"))
    factor, rows = number(found.get("factor")), records(found.get("ranks"))
    made: list[Row] = []
    for item in rows[:MOST_ROWS]:
        slow = item.get("slow") is True
        made.append(
            (
                num(text_or_none(item.get("rank"))),
                text_or_none(item.get("host")),
                num(seconds_text(item.get("own_s"))),
                _ratio(item.get("relative")),
                num(seconds_text(item.get("backward_s"))),
                _ratio(item.get("backward_relative")),
                Cell("slow: the others wait", "bad") if slow else Cell("", "muted"),
            )
        )
    note = "Medians of a step, without waiting for other ranks; relative to the median of the others."
    if factor is not None:
        note += f" Named from {factor:g} times on, if it lasts."
    if len(rows) > MOST_ROWS:
        note += f" {len(rows) - MOST_ROWS} faster ranks are not shown."
    return table(
        "pace",
        "Own work of each rank",
        ["rank", "host", "data and forward", "relative", "backward", "relative", ""],
        made,
        note,
    )


def _ratio(value: object) -> Cell:
    found = number(value)
    return num(f"{found:.2f}" if found is not None else NONE)


def hang_table(data: RunData) -> Table | None:
    """Where each rank stood when the run stood still."""
    fallen, waiting = records(data.hang.get("fallen")), records(data.hang.get("waiting"))
    made: list[Row] = []
    for item in fallen[:MOST_ROWS]:
        why = long(text_or_none(item.get("why")))
        made.append((*_place(item), Cell("fell out", "bad"), long(text_or_none(item.get("where"))), why))
    for item in waiting[: max(MOST_ROWS - len(made), 1)]:
        call = long(text_or_none(item.get("call")))
        made.append((*_place(item), Cell("waits", "muted"), long(text_or_none(item.get("where"))), call))
    left = len(fallen) + len(waiting) - len(made)
    alarm = record(data.hang.get("alarm"))
    note = f"No progress for {seconds_text(alarm.get('limit_s'))} was the limit. Stacks and calls of all ranks: {text_or_none(data.hang.get('files'))}."
    if left > 0:
        note += f" {left} more ranks are not shown."
    notes = [str(n) for n in data.hang.get("notes") or []]
    return table(
        "hang", "Where the ranks stood", ["rank", "host", "state", "line", "why"], made, " ".join([note, *notes])
    )


def _place(item: dict[str, object]) -> tuple[Cell, str]:
    rank = whole(item.get("rank"))
    return num(NONE if rank is None else str(rank)), text_or_none(item.get("host"))
