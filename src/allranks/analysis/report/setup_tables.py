"""Build the tables of a run's setup: plan, ranks, environment, preflight, network, data, model, versions. Pure."""

from __future__ import annotations

from typing import Any

from allranks.analysis.report.run_data import RunData, versions_of
from allranks.analysis.report.tables import Cell, Row, Table, fact_table, limit_rows, long_cell, number_cell, table
from allranks.utils import formatting, text
from allranks.utils.formatting import as_dict, as_dicts, as_list, finite_float, finite_int, format_count
from allranks.utils.redaction import HIDDEN, holds_secret, redact_arguments
from allranks.utils.text import format_value


def _device(data: RunData) -> str:
    known = ("device",) if data.own_program else ("device", "dtype")
    return ", ".join(format_value(data.plan.get(name)) for name in known) if data.plan else ""


def plan_facts(data: RunData) -> Table | None:
    """Return the plan, except ranks and environment."""
    p, batch = data.plan, as_dict(data.plan.get("batch"))
    options = ", ".join(f"{k}={format_value(v)}" for k, v in as_dict(p.get("strategy_options")).items())
    steps = data.total_steps
    accum, world = finite_int(batch.get("grad_accum")), data.world_size
    sequences = (
        f"{format_value(batch.get('micro_batch_size'))} per rank x {world} ranks x {accum} accumulated = {format_value(batch.get('global_batch_size'))} sequences"  # noqa: E501
        if batch
        else ""
    )
    words = redact_arguments([text.sanitize(a) for a in formatting.as_list(data.run_args.get("command"))])
    command = " ".join([words[0].rsplit("/", 1)[-1], *words[1:]]) if words else ""
    return fact_table(
        "plan",
        "Plan",
        [
            ("launcher", format_value(p.get("launcher"))),
            ("strategy", "" if data.own_program else format_value(p.get("strategy"))),
            ("options", "" if data.own_program else options),
            ("device" if data.own_program else "device, type", _device(data)),
            ("backend", format_value(p.get("backend"))),
            ("optimizer step", sequences),
            ("steps", format_count(steps)),
            ("rendezvous", format_value(p.get("rendezvous"))),
            ("timeout of collectives", formatting.format_duration(p.get("timeout_s"))),
            ("started", format_value(data.run_args.get("started"))),
            ("command", command),
        ],
        " ".join(_sentence(e.get("message")) for e in data.zero.of("remark")),
    )


def _sentence(value: Any) -> str:
    plain = format_value(value)
    return f"{plain[:1].upper()}{plain[1:]}."


def rank_table(data: RunData) -> Table | None:
    """Return the ranks by node."""
    rows: list[Row] = []
    for node in as_dicts(data.plan.get("nodes")):
        ranks = [n for r in formatting.as_list(node.get("ranks")) if (n := finite_int(r)) is not None]
        rows.append(
            (
                number_cell(format_value(node.get("node"))),
                format_value(node.get("host")),
                number_cell(f"{len(ranks)}"),
                long_cell(formatting.format_ranks(ranks)),
            )
        )
    kept, note = limit_rows(rows, "nodes")
    return table("ranks", "Ranks by node", ["node", "host", "ranks", "which"], kept, note)


def environment_table(data: RunData) -> Table | None:
    """Return every variable that was set: its value, who set it, and why."""
    rows = [
        (
            Cell(format_value(e.get("name")), "code"),
            _value(e),
            format_value(e.get("source")),
            long_cell(format_value(e.get("reason"))),
        )
        for e in as_dicts(data.plan.get("environment"))
    ]
    return table("environment", "Environment of the ranks", ["variable", "value", "decided by", "reason"], rows)


def _value(entry: dict[str, Any]) -> Cell:
    if entry.get("value") is None:
        return Cell("not set", "muted")
    if holds_secret(str(entry.get("name")), str(entry["value"])):
        return Cell(HIDDEN, "code")
    return Cell(format_value(entry["value"]), "code wrap")


def preflight_table(data: RunData) -> Table | None:
    """Return the checks of each node before the start: failures by host, passed checks in one row each."""
    bad: list[Row] = []
    well: dict[str, dict[str, str]] = {}
    for node in data.preflight:
        host = format_value(node.get("host"))
        for check in as_dicts(node.get("checks")):
            name, found = format_value(check.get("name")), format_value(check.get("found"))
            if check.get("ok") is True:
                well.setdefault(name, {})[host] = found
            else:
                cure = long_cell(format_value(check.get("cure")))
                bad.append((name, Cell("✗ failed", "bad"), host, long_cell(found), cure))
    good: list[Row] = [
        (name, Cell("✓ ok", "good"), _hosts(list(found)), long_cell(_join_distinct(list(found.values()))), "")
        for name, found in well.items()
    ]
    kept, note = limit_rows([*bad, *good], "checks")
    columns = ["check", "verdict", "host", "found", "cure"]
    if not bad:
        columns, kept = columns[:4], [row[:4] for row in kept]
    return table("preflight", "Preflight checks", columns, kept, note)


def _hosts(hosts: list[str]) -> str:
    return hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"


def _join_distinct(values: list[str]) -> str:
    return formatting.format_list(list(dict.fromkeys(values)), 3)


def network_table(data: RunData) -> Table | None:
    """Return the network that the ranks of each node used, from NCCL's log lines and their connections."""
    rows: list[Row] = []
    for node in as_dicts(as_dict(data.metrics.get("network")).get("observed")):
        networks, ports = (", ".join(map(format_value, as_list(node.get(key)))) for key in ("networks", "devices"))
        faces, ways = _counts(node.get("connections")), _counts(node.get("ways"))
        if networks or ports or faces or ways:
            rows.append((format_value(node.get("host")), networks, long_cell(faces), long_cell(ports), long_cell(ways)))
    columns = ["host", "NCCL's network", "interfaces (connections)", "RDMA ports", "NCCL's transports (channels)"]
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
    """Return the differences between the used and the expected network."""
    rows: list[Row] = [
        (
            Cell("✗ bad", "bad") if item.get("level") == "bad" else Cell("note", "muted"),
            format_value(item.get("host")),
            long_cell(format_value(item.get("text"))),
        )
        for item in as_dicts(as_dict(data.metrics.get("network")).get("findings"))
    ]
    return table("network-findings", "Unexpected network", ["verdict", "host", "finding"], rows)


def _counts(value: object) -> str:
    return ", ".join(f"{format_value(name)} ({format_count(count)})" for name, count in as_dict(value).items())


CACHE_STATES = {"found": "found in the cache", "built": "built now", "waited": "built by another rank"}


def data_facts(data: RunData) -> Table | None:
    """Return the size of the prepared data."""
    d = data.zero.last("data")
    if not d:
        return None
    rows, cut = finite_float(d.get("rows")), finite_float(d.get("rows_truncated"))
    share = f" ({cut / rows:.0%} of the rows)" if rows and cut else ""
    warnings = d.get("warnings")
    labels = as_dict(d.get("labels"))
    names = ", ".join(text.sanitize(k, 40) for k in list(labels)[:12]) + (" …" if len(labels) > 12 else "")
    how = (
        CACHE_STATES.get(str(d.get("how")), format_value(d.get("how")))
        + f", {formatting.format_duration(d.get('seconds'))}"
    )
    return fact_table(
        "data",
        "Data",
        [
            ("source", format_value(d.get("source"))),
            ("template", format_value(d.get("template"))),
            (
                "rows",
                f"{format_count(rows)}: {format_count(d.get('rows_train'))} for training, {format_count(d.get('rows_eval'))} held out",
            ),
            ("truncated rows", f"{format_count(cut)}{share}, {format_count(d.get('tokens_cut'))} tokens lost"),
            ("skipped rows", f"{format_count(d.get('rows_without_target'))} with a prompt longer than a sequence"),
            ("warnings", "; ".join(format_value(w) for w in warnings) if isinstance(warnings, list) else ""),
            ("sequences", f"{format_count(d.get('sequences'))}, {formatting.format_percent(d.get('fill'))} full"),
            (
                "tokens",
                f"{format_count(d.get('tokens_real'))} real, {format_count(d.get('tokens_trained'))} of them trained, in one epoch",
            ),
            ("vocabulary", format_count(d.get("vocab_size"))),
            ("labels", f"{len(labels)}: {names}" if labels else ""),
            ("prepared", how),
            ("used in this run", _seen(data)),
        ],
    )


def _seen(data: RunData) -> str:
    m = data.metrics
    if not finite_float(m.get("tokens_real")):
        return ""
    counts = (m.get("tokens_real"), m.get("tokens_trained"), m.get("tokens_padded"))
    real, trained, padded = map(format_count, counts)
    return f"{real} real tokens, {trained} trained; plus {padded} padding"


def version_facts(data: RunData) -> Table | None:
    """Return the versions of the main packages, and whether all ranks have the same."""
    found = {rank: versions for rank, story in data.histories.items() if (versions := versions_of(story))}
    mine = next(iter(found.values()), {})
    odd = [rank for rank, versions in found.items() if versions != mine]
    note = f"Rank {formatting.format_ranks(odd)} has other versions than rank {next(iter(found))}." if odd else ""
    if not odd and len(found) > 1:
        note = f"The same on all {len(found)} ranks."
    model = data.zero.last("model")
    known = {
        "python": format_value(data.run_args.get("python")),
        "allranks": format_value(data.run_args.get("allranks")),
        **mine,
    }
    pairs = [
        *known.items(),
        ("device", format_value(model.get("device"))),
        ("threads per rank", format_count(model.get("threads"))),
    ]
    return fact_table("versions", "Versions", pairs, note)


def _engine(engine: dict[str, Any]) -> str:
    if not engine:
        return ""
    name, version = format_value(engine.get("name")), format_value(engine.get("version"))
    took = [
        f"{word} {formatting.format_duration(engine[k])}"
        for k, word in (("import_s", "import"), ("initialize_s", "start"))
        if engine.get(k) is not None
    ]
    return f"{name} {version}: {', '.join(took)}"


def model_facts(data: RunData) -> Table | None:
    """Return name and size of the model."""
    model, m = data.zero.last("model"), data.metrics
    total, trained = finite_float(model.get("parameters")), finite_float(model.get("parameters_trained"))
    share = f" ({trained / total:.2%})" if total and trained is not None else ""
    return fact_table(
        "model",
        "Model",
        [
            ("name", format_value(m.get("model"))),
            ("parameters", f"{format_count(total)} ({formatting.format_short_count(total)})" if total else ""),
            ("trained", f"{format_count(trained)}{share}" if trained is not None else ""),
            ("LoRA", format_value(m.get("use_lora"))),
            ("recomputed activations", format_value(m.get("recomputation"))),
            ("time to build", formatting.format_duration(model.get("seconds"))),
            ("engine part", _engine(as_dict(m.get("engine")))),
        ],
    )
