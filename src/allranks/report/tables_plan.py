"""Tables of what was planned: plan, ranks by node, environment, what was checked before. Pure."""

from __future__ import annotations

from typing import Any

from allranks.redact import HIDDEN, is_secret_name, redact_argument
from allranks.report import text
from allranks.report.gather import RunData
from allranks.report.tables import Cell, Row, Table, facts, long, num, shorten, table
from allranks.report.text import count_text, record, records, text_or_none, whole


def plan_facts(data: RunData) -> Table | None:
    """What was planned, but for ranks and environment."""
    p, batch = data.plan, record(data.plan.get("batch"))
    options = ", ".join(f"{k}={text_or_none(v)}" for k, v in record(p.get("strategy_options")).items())
    steps = data.total_steps
    accum, world = whole(batch.get("grad_accum")), data.world_size
    sequences = (
        f"{text_or_none(batch.get('micro_batch_size'))} a rank x {world} ranks x {accum} accumulated = {text_or_none(batch.get('global_batch_size'))} sequences"
        if batch
        else ""
    )
    words = [redact_argument(text.plain(a)) for a in text.items(data.run_args.get("command"))]
    command = " ".join([words[0].rsplit("/", 1)[-1], *words[1:]]) if words else ""
    return facts(
        "plan",
        "Plan",
        [
            ("launcher", text_or_none(p.get("launcher"))),
            ("strategy", "" if data.own_program else text_or_none(p.get("strategy"))),
            ("its options", "" if data.own_program else options),
            ("device, type", f"{text_or_none(p.get('device'))}, {text_or_none(p.get('dtype'))}" if p else ""),
            ("backend", text_or_none(p.get("backend"))),
            ("optimizer step", sequences),
            ("steps", count_text(steps)),
            ("rendezvous", text_or_none(p.get("rendezvous"))),
            ("time limit of collectives", text.seconds_text(p.get("timeout_s"))),
            ("started", text_or_none(data.run_args.get("started"))),
            ("command", command),
        ],
        " ".join(_sentence(e.get("message")) for e in data.zero.of("remark")),
    )


def _sentence(value: Any) -> str:
    plain = text_or_none(value)
    return f"{plain[:1].upper()}{plain[1:]}."


def rank_table(data: RunData) -> Table | None:
    """Ranks by node."""
    rows: list[Row] = []
    for node in records(data.plan.get("nodes")):
        ranks = [n for r in text.items(node.get("ranks")) if (n := whole(r)) is not None]
        rows.append(
            (
                num(text_or_none(node.get("node"))),
                text_or_none(node.get("host")),
                num(f"{len(ranks)}"),
                long(text.ranks_text(ranks)),
            )
        )
    kept, note = shorten(rows, "nodes")
    return table("ranks", "Ranks by node", ["node", "host", "ranks", "which"], kept, note)


def environment_table(data: RunData) -> Table | None:
    """Every variable that was decided on: its value, by whom, and why."""
    rows = [
        (
            Cell(text_or_none(e.get("name")), "code"),
            _value(e),
            text_or_none(e.get("source")),
            long(text_or_none(e.get("reason"))),
        )
        for e in records(data.plan.get("environment"))
    ]
    return table("environment", "Environment of the ranks", ["variable", "value", "decided by", "reason"], rows)


def _value(entry: dict[str, Any]) -> Cell:
    if entry.get("value") is None:
        return Cell("left alone", "muted")
    if is_secret_name(str(entry.get("name"))):
        return Cell(HIDDEN, "code")
    return Cell(text_or_none(entry["value"]), "code wrap")


def preflight_table(data: RunData) -> Table | None:
    """What was checked on each node before the start: what failed host by host, what was well in one row a check."""
    bad: list[Row] = []
    well: dict[str, dict[str, str]] = {}
    for node in data.preflight:
        host = text_or_none(node.get("host"))
        for check in records(node.get("checks")):
            name, found = text_or_none(check.get("name")), text_or_none(check.get("found"))
            if check.get("ok") is True:
                well.setdefault(name, {})[host] = found
            else:
                cure = long(text_or_none(check.get("cure")))
                bad.append((name, Cell("✗ failed", "bad"), host, long(found), cure))
    good: list[Row] = [
        (name, Cell("✓ ok", "good"), _hosts(list(found)), long(_several(list(found.values()))), "")
        for name, found in well.items()
    ]
    kept, note = shorten([*bad, *good], "checks")
    columns = ["check", "verdict", "host", "found", "cure"]
    if not bad:
        columns, kept = columns[:4], [row[:4] for row in kept]
    return table("preflight", "Checked before the start", columns, kept, note)


def _hosts(hosts: list[str]) -> str:
    return hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"


def _several(values: list[str]) -> str:
    different = list(dict.fromkeys(values))
    return ", ".join(different[:3]) + (f" and {len(different) - 3} more" if len(different) > 3 else "")
