"""Build the tables of the page. Pure.

First the results: evaluations, checkpoints, expert load, hangs, own work of the ranks, CPU time, links. Then the setup
of the run: plan, ranks, environment, preflight, network, data, model, versions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allranks.analysis.report.html import Cell, Row, Table, column, fact_table, listing, long_cell, number_cell, table
from allranks.analysis.report.run_data import AttemptRecord, RunData, versions_of
from allranks.rundir.events import CACHE_STATES
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
    scores = [
        ("loss", column("loss", text.format_loss)),
        ("perplexity", column("perplexity", text.format_perplexity)),
        ("accuracy", column("accuracy", text.format_percent)),
        ("exact match", column("exact_match", text.format_percent)),
    ]
    known = [one for one in scores if any(finite_float(e.get(one[0].replace(" ", "_"))) is not None for e in evals)]
    columns = [
        ("after step", column("step", format_count)),
        *known,
        ("rows", column("rows", format_count)),
        ("time", column("seconds", format_duration)),
    ]
    return listing("evals", "Evaluations", evals, columns, what="evaluations")


def checkpoint_table(data: RunData) -> Table | None:
    """Return the checkpoints that were written, and whether they still exist."""
    written = {e["step"]: e for e in data.zero.of("checkpoint")}
    there = {step: data.checkpoints.get(step, {}) for step in sorted({*written, *data.checkpoints})}
    items = [{**kept, **written.get(step, {}), "step": step, "there": kept} for step, kept in there.items()]

    def size(item: dict[str, Any]) -> str:
        there = item["there"]
        files = (
            f"{format_bytes(there['bytes'])} in {there['files']} file{'s' * (there['files'] != 1)}"
            if there.get("whole")
            else ""
        )
        return files or NO_VALUE

    def state(item: dict[str, Any]) -> Cell:
        there = item["there"]
        return Cell("✓ exists", "good") if there.get("whole") else Cell("no manifest" if there else "removed", "muted")

    columns = [
        ("step", column("step", format_count)),
        ("mode", column("mode", tone="")),
        ("pause", column("seconds", format_duration)),
        ("complete after", column("written_s", format_duration)),
        ("size", size),
        ("state", state),
    ]
    meaning = "Pause: time without training. Complete: verified and published."
    return listing("checkpoints", "Checkpoints", items, columns, meaning, what="checkpoints")


def attempt_table(data: RunData) -> Table | None:
    """Return each start of the run, from rank 0's events."""
    decided = {finite_int(one.get("attempt")): one for one in map(as_dict, as_list(data.metrics.get("restarts")))}
    known = {a.number for a in data.zero.attempts}  # rank 0 need not have started in an attempt that failed
    other = [
        AttemptRecord(number, None, end=format_value(one.get("message")))
        for number, one in decided.items()
        if number is not None and number not in known
    ]
    attempts = sorted([*data.zero.attempts, *other], key=lambda a: a.number)

    def spent(a: AttemptRecord) -> Cell:
        seconds = a.ended - a.began if a.ended is not None and a.began is not None else None
        if len(attempts) == 1 and (data.own_program or not a.phases):  # rank 0 need not have written when it ended
            seconds = finite_float(data.metrics.get("wall_time_s")) or seconds
        return number_cell(format_duration(seconds))

    def end(a: AttemptRecord) -> Cell:
        if a is attempts[-1] and not a.end and data.status in ("failed", "stopped", "succeeded"):
            return long_cell(
                f"the run {'was ' * (data.status == 'stopped')}{data.status}"
            )  # the page begins with the reason
        runs = a is attempts[-1] and data.status == "running"
        return long_cell(a.end or ("still running" if runs else "ended without a message"))

    def next_action(a: AttemptRecord) -> Cell:
        one = decided.get(a.number)
        if one is None:
            return long_cell("")
        what = "started again" if one.get("action") == "restart" else "not started again"
        return long_cell(f"{what}: {format_value(one.get('reason'))}")

    def begins(a: AttemptRecord) -> str:
        if data.own_program and a.number > 1:
            return "its own checkpoints"
        return f"after step {a.resumed_from}" if a.resumed_from is not None else "from the start"

    columns = [
        ("attempt", lambda a: number_cell(f"{a.number}")),
        ("started", lambda a: text.format_timestamp(a.began)),
        ("from", begins),
        ("last step", lambda a: number_cell(format_count(a.last_step))),
        ("time", spent),
        ("end", end),
        *([("then", next_action)] if decided else []),
    ]
    return listing("attempts", "Attempts", attempts, columns, what="attempts")


def error_table(data: RunData) -> Table | None:
    """Return the errors that ranks reported, causes before consequences."""
    columns = [
        ("attempt", column("attempt", format_count)),
        ("rank", column("rank", format_count)),
        ("error", column("type", tone="code")),
        ("message", column("message", tone="long")),
        ("because", lambda e: "another rank had failed" if e.get("echo") is True else ""),
    ]
    return listing("errors", "Errors reported by ranks", data.errors(), columns, what="errors")


def expert_table(data: RunData) -> Table | None:
    """Return the smallest, even and largest share of a block's experts; least even blocks first."""
    load = as_dict(data.metrics.get("expert_load"))
    layers = sorted(as_dicts(load.get("layers")), key=lambda layer: -(finite_float(layer.get("max")) or 0.0))
    note = (
        "Shares of the tokens of all training steps, without padding. Even: the share if all experts got the same "
        "number; unused: experts without a token."
    )
    columns = [
        ("block", column("layer")),
        ("smallest", column("min", text.format_percent)),
        ("even", column("mean", text.format_percent)),
        ("largest", column("max", text.format_percent)),
        ("by expert", column("most", format_count)),
        ("unused", column("unused", format_count)),
    ]
    return listing("experts", "Expert load", layers, columns, note, what="blocks")


def hang_table(data: RunData) -> Table | None:
    """Return the stack position of each rank at the time of the hang."""
    # one that waits is shown beside any number of stalled ones: the last
    items = [{**i, "state": "stalled"} for i in as_dicts(data.hang.get("stalled"))]
    items += [{**i, "state": "waits", "why": i.get("call")} for i in as_dicts(data.hang.get("waiting"))]
    note = (
        f"Limit without progress: {format_duration(as_dict(data.hang.get('alarm')).get('limit_s'))}. Stacks and calls "
        f"of all ranks: {format_value(data.hang.get('files'))}."
    )
    columns = [
        ("rank", column("rank", lambda rank: NO_VALUE if finite_int(rank) is None else str(finite_int(rank)))),
        ("host", column("host", tone="")),
        ("state", lambda i: Cell(i["state"], "bad" if i["state"] == "stalled" else "muted")),
        ("line", column("where", tone="long")),
        ("why", column("why", tone="long")),
    ]
    notes = [note, *(str(n) for n in as_list(data.hang.get("notes")))]
    return listing("hang", "Position of the ranks", items, columns, " ".join(notes), what="ranks")


_REASONS = {
    "own": Cell("slow: the others wait", "bad"),
    "unknown": Cell("slow: the others wait; reason not known", "bad"),
    "machine": Cell("its CPU time was taken", "muted"),
}


def straggler_table(data: RunData) -> Table | None:
    """Return the own time of each rank, slowest first."""
    own_time = as_dict(data.metrics.get("own_time"))
    factor = finite_float(own_time.get("factor"))
    note = (
        "Medians of a step, without waiting for other ranks. Relative to the median of the others, without the time in "
        "which the rank had no core."
    )
    if factor is not None:
        note += f" A rank is slow from a ratio of {factor:g}, if it persists."

    def reason(item: dict[str, Any]) -> Cell:
        slow = _REASONS["own"] if item.get("slow") is True else Cell("", "muted")
        return _REASONS.get(str(item.get("reason")), slow)

    columns = [
        ("rank", column("rank")),
        ("host", column("host", tone="")),
        ("data and forward", column("own_s", format_duration)),
        ("relative", column("relative", _ratio)),
        ("backward", column("backward_s", format_duration)),
        ("relative", column("backward_relative", _ratio)),
        ("optimizer", column("optimizer_s", format_duration)),
        ("relative", column("optimizer_relative", _ratio)),
        ("no core", column("queued_share", _share)),
        ("", reason),
    ]
    return listing("pace", "Own work of each rank", as_dicts(own_time.get("ranks")), columns, note, what="ranks")


def machine_table(data: RunData) -> Table | None:
    """Return what happened to the CPU time of the ranks on each host, most disturbed first."""
    rows = as_dicts(data.metrics.get("machine_load"))
    rows = sorted(rows, key=lambda item: -(finite_float(item.get("taken_share")) or 0.0))
    note = (
        "During training. Taken: the part of the CPU time that the ranks wanted and other processes or the hypervisor "
        "used. Competing: the part that they took from each other. Quota: the part of the time in which a CPU quota "
        "stopped them."
    )
    columns = [
        ("host", column("host", tone="")),
        ("cores", column("cores")),
        ("taken", column("taken_share", _share)),
        ("cores used by others", column("others_cores", _number)),
        ("cores stolen", column("steal_cores", _number)),
        ("competing", column("competing_share", _share)),
        ("quota", column("throttled_share", _share)),
    ]
    return listing("machines", "CPU time of the ranks", rows, columns, note, what="hosts")


def link_table(data: RunData) -> Table | None:
    """Return the TCP links between hosts, slow ones first."""

    def ranks(item: dict[str, Any]) -> str:
        return format_ranks([r for r in map(finite_int, as_list(item.get("ranks"))) if r is not None])

    def rate(value: object) -> str:
        bytes_per_s = finite_float(value)
        return NO_VALUE if bytes_per_s is None else f"{bytes_per_s / 1e6:,.1f} MB/s"

    note = (
        "From the kernel's counters of the ranks' TCP connections. Relative: time per byte against the fastest other "
        "links, without the time in which the receiver did not read."
    )
    columns = [
        ("link", lambda i: f"{format_value(i.get('host'))} to {format_value(i.get('peer'))}"),
        ("ranks", ranks),
        ("sent", column("sent_bytes", lambda sent: format_bytes(finite_int(sent)))),
        ("rate", column("bytes_per_s", rate)),
        ("relative", column("relative", _ratio)),
        ("busy", column("busy_share", _share)),
        ("sent again", column("resent_share", _share)),
        ("", lambda i: Cell("slow", "bad") if i.get("slow") is True or i.get("lossy") is True else Cell("", "muted")),
    ]
    return listing("links", "Links between nodes", as_dicts(data.metrics.get("links")), columns, note, what="links")


def _figure(form: str) -> Callable[[object], str]:
    return lambda value: NO_VALUE if (number := finite_float(value)) is None else format(number, form)


_ratio, _share, _number = _figure(".2f"), _figure(".1%"), _figure(".1f")


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
        (
            f"{format_value(batch.get('micro_batch_size'))} per rank x {world} ranks x {accum} accumulated = "
            f"{format_value(batch.get('global_batch_size'))} sequences"
        )
        if batch
        else ""
    )
    words = redact_arguments([sanitize(a) for a in as_list(data.run_args.get("command"))])
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
            ("timeout of collectives", format_duration(p.get("timeout_s"))),
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

    def ranks(node: dict[str, Any]) -> list[int]:
        return [n for r in as_list(node.get("ranks")) if (n := finite_int(r)) is not None]

    columns = [
        ("node", column("node")),
        ("host", column("host", tone="")),
        ("ranks", lambda node: number_cell(f"{len(ranks(node))}")),
        ("which", lambda node: long_cell(format_ranks(ranks(node)))),
    ]
    return listing("ranks", "Ranks by node", as_dicts(data.plan.get("nodes")), columns, what="nodes")


def environment_table(data: RunData) -> Table | None:
    """Return every variable that was set: its value, who set it, and why."""
    columns = [
        ("variable", column("name", tone="code")),
        ("value", _value),
        ("decided by", column("source", tone="")),
        ("reason", column("reason", tone="long")),
    ]
    return listing("environment", "Environment of the ranks", as_dicts(data.plan.get("environment")), columns)


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
            name, observed = format_value(check.get("name")), format_value(check.get("found"))
            if check.get("ok") is True:
                well.setdefault(name, {})[host] = observed
            else:
                cure = long_cell(format_value(check.get("cure")))
                bad.append((name, Cell("✗ failed", "bad"), host, long_cell(observed), cure))
    good: list[Row] = [
        (
            name,
            Cell("✓ ok", "good"),
            next(iter(observed)) if len(observed) == 1 else f"{len(observed)} hosts",
            long_cell(text.format_list(list(dict.fromkeys(observed.values())), 3)),
            "",
        )
        for name, observed in well.items()
    ]
    names = ["check", "verdict", "host", "found", *(["cure"] if bad else [])]
    columns = [(name, lambda row, i=i: row[i]) for i, name in enumerate(names)]
    return listing("preflight", "Preflight checks", [*bad, *good], columns, what="checks")


def network_table(data: RunData) -> Table | None:
    """Return the network that the ranks of each node used, from NCCL's log lines and their connections."""
    rows: list[Row] = []
    for node in as_dicts(as_dict(data.metrics.get("network")).get("observed")):
        networks, ports = (", ".join(map(format_value, as_list(node.get(key)))) for key in ("networks", "devices"))
        faces, ways = _counts(node.get("connections")), _counts(node.get("ways"))
        if networks or ports or faces or ways:
            rows.append((format_value(node.get("host")), networks, long_cell(faces), long_cell(ports), long_cell(ways)))
    columns = ["host", "NCCL's network", "interfaces (connections)", "RDMA ports", "NCCL's transports (channels)"]
    shown = [[cell.text if isinstance(cell, Cell) else cell for cell in row] for row in rows]
    used = [i for i, _ in enumerate(columns) if any(row[i] for row in shown)]
    return table(
        "network", "Network of the ranks", [columns[i] for i in used], [tuple(row[i] for i in used) for row in rows]
    )


def findings_table(data: RunData) -> Table | None:
    """Return the differences between the used and the expected network."""
    columns = [
        ("verdict", lambda i: Cell("✗ bad", "bad") if i.get("level") == "bad" else Cell("note", "muted")),
        ("host", column("host", tone="")),
        ("finding", column("text", tone="long")),
    ]
    findings = as_dicts(as_dict(data.metrics.get("network")).get("findings"))
    return listing("network-findings", "Unexpected network", findings, columns)


def _counts(value: object) -> str:
    return ", ".join(f"{format_value(name)} ({format_count(count)})" for name, count in as_dict(value).items())


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
    origin = CACHE_STATES.get(str(d.get("how")), format_value(d.get("how"))) + f", {format_duration(d.get('seconds'))}"
    return fact_table(
        "data",
        "Data",
        [
            ("source", format_value(d.get("source"))),
            ("template", format_value(d.get("template"))),
            (
                "rows",
                (
                    f"{format_count(rows)}: {format_count(d.get('rows_train'))} for training, "
                    f"{format_count(d.get('rows_eval'))} held out"
                ),
            ),
            ("truncated rows", f"{format_count(cut)}{share}, {format_count(d.get('tokens_cut'))} tokens lost"),
            ("skipped rows", f"{format_count(d.get('rows_without_target'))} with a prompt longer than a sequence"),
            ("warnings", "; ".join(format_value(w) for w in warnings) if isinstance(warnings, list) else ""),
            ("sequences", f"{format_count(d.get('sequences'))}, {text.format_percent(d.get('fill'))} full"),
            (
                "tokens",
                (
                    f"{format_count(d.get('tokens_real'))} real, {format_count(d.get('tokens_trained'))} of them "
                    "trained, in one epoch"
                ),
            ),
            ("labels", f"{len(labels)}: {names}" if labels else ""),
            ("prepared", origin),
        ],
    )


def version_facts(data: RunData) -> Table | None:
    """Return the versions of the main packages, and whether all ranks have the same."""
    versions_by_rank = {rank: versions for rank, story in data.histories.items() if (versions := versions_of(story))}
    mine = next(iter(versions_by_rank.values()), {})
    odd = [rank for rank, versions in versions_by_rank.items() if versions != mine]
    note = f"Rank {format_ranks(odd)} has other versions than rank {next(iter(versions_by_rank))}." if odd else ""
    if not odd and len(versions_by_rank) > 1:
        note = f"The same on all {len(versions_by_rank)} ranks."
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
        f"{word} {format_duration(engine[k])}"
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
            ("attention kernel", sanitize(as_dict(m.get("attention")).get("chosen") or "")),
            ("time to build", format_duration(model.get("seconds"))),
            ("engine part", _engine(as_dict(m.get("engine")))),
        ],
    )
