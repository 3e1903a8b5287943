"""Build the tables of the page. Pure.

First the results: evaluations, checkpoints, expert load, hangs, own work of the ranks, CPU time, links. Then the setup of the run: plan,
ranks, environment, preflight, network, data, model, versions.
"""

from __future__ import annotations

from typing import Any

from allranks.analysis.report.html import (
    MAX_ROWS,
    Cell,
    Row,
    Table,
    fact_table,
    limit_rows,
    long_cell,
    number_cell,
    table,
)
from allranks.analysis.report.run_data import RunData, versions_of
from allranks.utils import text
from allranks.utils.redaction import HIDDEN, holds_secret, redact_arguments
from allranks.utils.text import (
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
    format_value,
    sanitize,
)


def eval_table(data: RunData) -> Table | None:
    """Return the evaluations."""
    evals = data.zero.of("eval")
    columns = [
        ("loss", "loss", text.format_loss),
        ("perplexity", "perplexity", text.format_perplexity),
        ("accuracy", "accuracy", text.format_percent),
        ("exact match", "exact_match", text.format_percent),
    ]
    known = [c for c in columns if any(finite_float(e.get(c[1])) is not None for e in evals)]
    rows: list[Row] = [
        (
            number_cell(format_count(e["step"])),
            *(number_cell(show(e.get(key))) for _, key, show in known),
            number_cell(format_count(e.get("rows"))),
            number_cell(text.format_duration(e.get("seconds"))),
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
            f"{text.format_bytes(there['bytes'])} in {there['files']} file{'s' * (there['files'] != 1)}"
            if there.get("whole")
            else NO_VALUE
        )
        state = (
            Cell("✓ exists", "good") if there.get("whole") else Cell("removed" if not there else "no manifest", "muted")
        )
        mode = format_value(event.get("mode") or there.get("mode"))
        times = (number_cell(text.format_duration(event.get(key))) for key in ("seconds", "written_s"))
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
                    number_cell(text.format_bytes(size)),
                )
            )
    kept, note = limit_rows(rows, "traces")
    return table(
        "traces", "Profiler traces", ["rank", "attempt", "steps", "size"], kept, f"allranks trace {data.name} {note}"
    )


def attempt_table(data: RunData) -> Table | None:
    """Return each start of the run, from rank 0's events."""
    rows: list[Row] = []
    attempts = data.zero.attempts
    for a in attempts:
        spent = a.ended - a.began if a.ended is not None and a.began is not None else None
        end = a.end or "ended without a message"
        if a is attempts[-1] and not a.end and data.status in ("failed", "stopped", "succeeded"):
            end = f"the run {'was ' * (data.status == 'stopped')}{data.status}"  # the page begins with the reason
        if len(attempts) == 1 and (data.own_program or not a.phases):  # rank 0 need not have written when it ended
            spent = finite_float(data.metrics.get("wall_time_s")) or spent
        start = f"after step {a.resumed_from}" if a.resumed_from is not None else "from the start"
        rows.append(
            (
                number_cell(f"{a.number}"),
                text.format_timestamp(a.began),
                start,
                number_cell(format_count(a.last_step)),
                number_cell(text.format_duration(spent)),
                long_cell(end),
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
            number_cell(text.format_percent(layer.get("min"))),
            number_cell(text.format_percent(layer.get("mean"))),
            number_cell(text.format_percent(layer.get("max"))),
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
    words = redact_arguments([sanitize(a) for a in text.as_list(data.run_args.get("command"))])
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
            ("timeout of collectives", text.format_duration(p.get("timeout_s"))),
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
        ranks = [n for r in text.as_list(node.get("ranks")) if (n := finite_int(r)) is not None]
        rows.append(
            (
                number_cell(format_value(node.get("node"))),
                format_value(node.get("host")),
                number_cell(f"{len(ranks)}"),
                long_cell(text.format_ranks(ranks)),
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
    return text.format_list(list(dict.fromkeys(values)), 3)


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
    names = ", ".join(sanitize(k, 40) for k in list(labels)[:12]) + (" …" if len(labels) > 12 else "")
    how = (
        CACHE_STATES.get(str(d.get("how")), format_value(d.get("how"))) + f", {text.format_duration(d.get('seconds'))}"
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
            ("sequences", f"{format_count(d.get('sequences'))}, {text.format_percent(d.get('fill'))} full"),
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
    note = f"Rank {text.format_ranks(odd)} has other versions than rank {next(iter(found))}." if odd else ""
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
        f"{word} {text.format_duration(engine[k])}"
        for k, word in (("import_s", "import"), ("initialize_s", "start"))
        if engine.get(k) is not None
    ]
    return f"{name} {version}: {', '.join(took)}"


def _compiled(m: dict[str, Any]) -> str:
    """Return whether blocks were compiled, and why; empty for runs that do not say."""
    if m.get("compiled") is None:
        return ""
    why = m.get("not_compiled") or m.get("compile_reason")
    return ("yes" if m["compiled"] else "no") + (f": {format_value(why)}" if why else "")


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
            ("parameters", f"{format_count(total)} ({text.format_short_count(total)})" if total else ""),
            ("trained", f"{format_count(trained)}{share}" if trained is not None else ""),
            ("LoRA", format_value(m.get("use_lora"))),
            ("recomputed activations", format_value(m.get("recomputation"))),
            ("compiled blocks", _compiled(m)),
            ("time to build", text.format_duration(model.get("seconds"))),
            ("engine part", _engine(as_dict(m.get("engine")))),
        ],
    )
