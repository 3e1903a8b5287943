"""Build the tables of the ranks' own work, of the CPU time of their machines, and of the links between them. Pure."""

from __future__ import annotations

from allranks.analysis.report.run_data import RunData
from allranks.analysis.report.tables import MAX_ROWS, Cell, Row, Table, number_cell, table
from allranks.utils.formatting import (
    NO_VALUE,
    as_dict,
    as_dicts,
    as_list,
    finite_float,
    finite_int,
    format_bytes,
    format_duration,
    format_ranks,
)
from allranks.utils.text import format_value

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
