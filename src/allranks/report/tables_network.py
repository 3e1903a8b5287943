"""Tables of the network: what the ranks of each node used, and where that is not what was expected. Pure."""

from __future__ import annotations

from allranks.report.gather import RunData
from allranks.report.tables import Cell, Row, Table, long, table
from allranks.report.text import count_text, items, record, records, text_or_none


def network_table(data: RunData) -> Table | None:
    """What the ranks of each node really used, as far as NCCL's lines and their connections tell."""
    rows: list[Row] = []
    for node in records(record(data.metrics.get("network")).get("observed")):
        networks, ports = (", ".join(map(text_or_none, items(node.get(key)))) for key in ("networks", "devices"))
        faces, ways = _counts(node.get("connections")), _counts(node.get("ways"))
        if networks or ports or faces or ways:
            rows.append((text_or_none(node.get("host")), networks, long(faces), long(ports), long(ways)))
    columns = ["host", "NCCL's network", "interfaces (connections)", "RDMA ports", "NCCL's ways (channels)"]
    used = [i for i, _ in enumerate(columns) if any(_shown(row[i]) for row in rows)]
    return table(
        "network",
        "Network of the ranks",
        [columns[i] for i in used],
        [tuple(row[i] for i in used) for row in rows],
    )


def _shown(cell: Cell | str) -> str:
    return cell.text if isinstance(cell, Cell) else cell


def findings_table(data: RunData) -> Table | None:
    """Differences between that and what was expected."""
    rows: list[Row] = [
        (
            Cell("✗ bad", "bad") if item.get("level") == "bad" else Cell("note", "muted"),
            text_or_none(item.get("host")),
            long(text_or_none(item.get("text"))),
        )
        for item in records(record(data.metrics.get("network")).get("findings"))
    ]
    return table("network-findings", "The network is not what was expected", ["verdict", "host", "what"], rows)


def _counts(value: object) -> str:
    return ", ".join(f"{text_or_none(name)} ({count_text(count)})" for name, count in record(value).items())
