"""Write report.html: the results of a run on one offline page, with light and dark mode.

The summary on its top: key figures, synchronisation proof, time budget, sample answers before and after training.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from allranks.analysis.diagnose.run_outcome import failure_headline
from allranks.analysis.metrics import before_and_after
from allranks.analysis.report import charts, html, tables
from allranks.analysis.report.run_data import RunData, read_run_data
from allranks.planning.cost import cost_row
from allranks.rundir.files import write_text_atomic
from allranks.rundir.paths import RunDir
from allranks.utils import text
from allranks.utils.palette import RUN_COLOURS
from allranks.utils.text import finite_float, finite_int, sanitize


def write_report(run: RunDir, metrics: dict[str, Any] | None = None) -> Path:
    """Write the page of a run from whatever data exists, and return its path; `metrics` as for `read_run_data`.

    Raises:
        OSError: the page cannot be written (no such folder, disk full).
    """
    write_text_atomic(run.report, render(read_run_data(run, metrics)))
    return run.report


def render(data: RunData) -> str:
    """Return the page as HTML."""
    again = f"allranks report {data.name}"
    defined = (
        "Real tokens exclude padding; trained tokens are included in the loss. Speed and step time exclude the first 5 "
        "steps, in which caches are filled and kernels are compiled."
    )
    page = html.Page(
        "run report",
        data.name,
        _sections(data),
        subtitle(data),
        (_status(data), STATUS_TONES.get(data.status, "muted")),
        _banners(data),
        key_figures(data),
        [*([] if data.own_program else [defined]), f"Made from the files of the run folder; {again} makes it again."],
    )
    return html.render(page)


def _status(data: RunData) -> str:
    return data.status if data.status != "unknown" else "no verdict"


def _banners(data: RunData) -> list[tuple[str, str, str]]:
    said = [
        *(sanitize(w) for w in text.as_list(data.plan.get("warnings"))),
        *(sanitize(e.get("message") or "") for story in data.histories.values() for e in story.of("warning")),
    ]
    message = sanitize(data.metrics.get("message") or "")
    verdict = [(STATUS_TONES.get(data.status, "muted"), _status(data).capitalize(), message)] if message else []
    if diagnosis := failure_headline(data.metrics, data.name):
        verdict.append(("info", "Diagnosis", sanitize(diagnosis)))
    empty = [] if data.histories else [("info", "No events", "No rank has written an event to this run folder.")]
    return [*verdict, *(("warn", "Warning", w) for w in said), *empty]


def _sections(data: RunData) -> list[html.Section]:
    log = html.Log(f"The end of the log {data.log[0]}", data.log[1], open=True) if data.log else None
    answers = sample_answers(data)
    samples = html.Samples("Held-out questions with answers before and after training", answers) if answers else None
    spec = html.Log("Spec with all defaults", data.spec) if data.spec else None
    hosts = list(data.telemetry)
    where = hosts[0] if len(hosts) == 1 else f"each of {len(hosts)} hosts"
    sampled = f"Sampled on {where} during the run."
    if not data.own_program:
        sampled += " Shaded: from the first training step of an attempt to its end."
    results = (
        tables.eval_table,
        tables.checkpoint_table,
        tables.expert_table,
        tables.straggler_table,
        tables.machine_table,
        tables.link_table,
    )
    environment = (tables.environment_table, tables.findings_table, tables.network_table)
    facts = (tables.data_facts, tables.model_facts, tables.version_facts)
    setup: list[html.Group] = [
        ("columns", [tables.plan_facts(data), tables.rank_table(data), tables.preflight_table(data)]),
        ("stack", [*(make(data) for make in environment), spec]),
    ]
    errors = [tables.hang_table(data), tables.error_table(data), log]
    made, shown = [make(data) for make in results], [make(data) for make in facts]
    return [
        html.Section("", "", [("two", [proof(data), time_budget(data)])]),
        html.Section("what-went-wrong", "Errors", [("stack", errors)]),
        html.Section("learned", "Training", [("two", charts.training_charts(data)), ("stack", [samples])]),
        html.Section("speed", "Speed and memory", [("two", charts.speed_charts(data))]),
        html.Section("hosts", "Hosts", [("two", charts.telemetry_charts(data))], sampled),
        html.Section("results", "Results", [("two tables", made), ("stack", [tables.attempt_table(data)])]),
        html.Section("plan", "Plan", setup),
        html.Section("facts", "Data, model and versions", [("columns", shown)], short="Data and versions"),
    ]


STATUS_TONES = {"succeeded": "good", "stopped": "warn", "failed": "bad", "running": "info", "unfinished": "warn"}
PHASES = {
    "start": "starting and rendezvous",
    "prepare": "preparing data",
    "build": "building the model",
    "prove": "checking the ranks",
    "train": "training",
    "evaluate": "evaluating",
    "save": "saving",
}


def key_figures(data: RunData) -> list[html.KeyFigure]:
    """Return the known key figures."""
    made = [
        _train_loss(data),
        _change(data, "held-out loss", "loss", text.format_loss),
        _change(data, "perplexity", "perplexity", text.format_perplexity),
        _change(data, "accuracy", "accuracy", text.format_percent),
        _right_answers(data),
        _speed(data),
        _step_time(data),
        _memory(data),
        _wall_time(data),
        _cost(data),
        _mfu(data),
    ]
    return [card for card in made if card]


def _train_loss(data: RunData) -> html.KeyFigure | None:
    losses = [s.loss for s in data.zero.steps if s.loss is not None]
    if not losses:
        return None
    note = f"step {data.zero.steps[0].step:,} to {data.zero.steps[-1].step:,}"
    before = text.format_loss(losses[0]) if len(losses) > 1 else None
    return html.KeyFigure("train loss", text.format_loss(losses[-1]), note, before)


def _change(data: RunData, label: str, key: str, show: Any) -> html.KeyFigure | None:
    known = [(e["step"], v) for e in data.zero.of("eval") if (v := finite_float(e.get(key))) is not None]
    if not known:
        return None
    rows = finite_int(data.zero.last("eval").get("rows"))
    note = f"{rows:,} rows, after step {known[-1][0]:,}" if rows else f"after step {known[-1][0]:,}"
    return html.KeyFigure(label, show(known[-1][1]), note, show(known[0][1]) if len(known) > 1 else None)


def _right_answers(data: RunData) -> html.KeyFigure | None:
    card = _change(data, "exact match", "exact_match", text.format_percent)
    checked = finite_int(data.zero.last("eval").get("checked"))
    if not (card and checked):
        return card
    return html.KeyFigure(card.label, card.value, f"of {checked:,}, exact match", card.before)


def _speed(data: RunData) -> html.KeyFigure | None:
    if data.own_program:
        return _program_speed(data)
    rate, each = finite_float(data.metrics.get("tokens_per_s")), data.metrics.get("tokens_per_s_per_rank")
    if rate is None:
        return None
    real, padded = finite_float(data.metrics.get("tokens_real")), finite_float(data.metrics.get("tokens_padded"))
    padding = f"; {text.format_percent(padded / (real + padded))} padding" if real and padded is not None else ""
    return html.KeyFigure("real tokens / s", text.format_rate(rate), f"{text.format_rate(each)} per rank{padding}")


def _program_speed(data: RunData) -> html.KeyFigure | None:
    tokens, steps = (finite_float(data.metrics.get(name)) for name in ("tokens_per_s", "steps_per_s"))
    source = "parsed from its output" if data.metrics.get("progress_source") == "log" else "as reported"
    if tokens is not None:
        return html.KeyFigure("tokens / s", text.format_rate(tokens), source)
    return None if steps is None else html.KeyFigure("steps / s", f"{steps:.3g}", source)


def _step_time(data: RunData) -> html.KeyFigure | None:
    step = text.as_dict(data.metrics.get("step_time_s"))
    if finite_float(step.get("median")) is None:
        return None
    return html.KeyFigure(
        "step time", text.format_duration(step["median"]), f"median; p90 {text.format_duration(step.get('p90'))}"
    )


def _memory(data: RunData) -> html.KeyFigure | None:
    peaks = {
        rank: max(known)
        for rank, story in data.histories.items()
        if (known := [s.peak for s in story.steps if s.peak is not None])
    }
    if not peaks:
        return None
    top, low = max(peaks, key=lambda r: peaks[r]), min(peaks, key=lambda r: peaks[r])
    least = f"; lowest: rank {low}, {text.format_bytes(peaks[low])}" if low != top else ""
    return html.KeyFigure("peak memory per rank", text.format_bytes(peaks[top]), f"rank {top}{least}")


def _wall_time(data: RunData) -> html.KeyFigure | None:
    effective = text.as_dict(data.metrics.get("effective_training_time"))
    wall = finite_float(effective.get("wall_time_s")) or finite_float(data.metrics.get("wall_time_s"))
    if wall is None:
        return None
    done = data.zero.steps[-1].step if data.zero.steps else 0
    total = data.total_steps
    attempts = len(data.zero.attempts)
    note = f"{done:,} of {total:,} steps" if total is not None else f"{done:,} steps"
    notes = [*([] if data.own_program else [note]), *([f"{attempts} attempts"] if attempts > 1 else [])]
    share = finite_float(effective.get("share"))
    notes += [] if share is None else [f"{text.format_percent(share)} effective"]
    return html.KeyFigure("wall time", text.format_duration(wall), ", ".join(notes))


def _cost(data: RunData) -> html.KeyFigure | None:
    shown, _, note = cost_row(data.metrics.get("cost")).partition(", ")
    return html.KeyFigure("cost", shown, note) if shown else None


def _mfu(data: RunData) -> html.KeyFigure | None:
    mfu = finite_float(data.metrics.get("mfu"))
    if mfu is None:
        return None
    more = finite_float(data.metrics.get("mfu_with_attention"))
    attention = "" if more is None else f"; {text.format_percent(more)} with attention"
    return html.KeyFigure("MFU", text.format_percent(mfu), f"of the dense bf16 peak{attention}")


def proof(data: RunData) -> html.Items | None:
    """Return the three checks of step 0; None for a user's own program, which has none."""
    if data.own_program:
        return None
    shown = data.zero.last("proof") or text.as_dict(data.metrics.get("sync_proof"))
    size, planned = finite_int(shown.get("world_size")), data.world_size
    digest, rows = sanitize(shown.get("weights_hash") or "")[:12], finite_int(shown.get("rows_checked"))
    checks = [
        ("All ranks answer", f"{size} of {planned or size}", size is not None and size == (planned or size)),
        (
            "Equal weights",
            f"same SHA-256 on all ranks: {digest}…" if digest else "same hash on all ranks",
            shown.get("weights_equal") is True,
        ),
        (
            "Disjoint data",
            f"{rows:,} rows, each used once" if rows else "each row used once",
            shown.get("data_disjoint") is True,
        ),
    ]
    if shown:
        items = [html.Item("✓" if ok else "✗", "good" if ok else "bad", title, detail) for title, detail, ok in checks]
    else:
        failed = any(e.get("type") == "ProofFailed" for e in data.errors())
        mark, tone, detail = ("✗", "bad", "failed") if failed else ("?", "muted", "the run did not reach this check")
        items = [html.Item(mark, tone, title, detail) for title, _, _ in checks]
    return html.Items("Checks at step 0", items)


TIME_PARTS = {
    "productive": "train", "repeated": "repeated", "startup": "start", "evaluation": "evaluate", "checkpoint": "save",
    "detection": "detection", "restart": "restart", "other": "other",
}  # fmt: skip
"""Parts of the wall time as in metrics.json, each with its name in `RUN_COLOURS`."""


def _attempt_bars(effective: dict[str, Any]) -> html.Bars | None:
    """Return the wall time of each attempt by its parts, as shares of the longest attempt."""
    attempts = text.as_dicts(effective.get("attempts"))
    shown = {k: RUN_COLOURS[part] for k, part in TIME_PARTS.items() if finite_float(effective.get(f"{k}_s"))}
    rows = []
    for one in attempts:
        known = {kind: finite_float(one.get(f"{kind}_s")) or 0.0 for kind in shown}
        parts = [(kind.replace("startup", "start-up"), shown[kind], seconds) for kind, seconds in known.items()]
        rows.append(html.BarValues(f"attempt {one.get('attempt')}", parts, finite_float(one.get("wall_time_s")) or 0.0))
    note = f"{text.format_percent(effective.get('share'))} of {text.format_duration(effective.get('wall_time_s'))} was "
    note += "training that counts. Repeated: steps trained again. Restart: from the verdict to the ranks' next start."
    return html.stacked_bars("Wall time of the attempts", rows, text.format_duration, note)


def time_budget(data: RunData) -> html.Bars | None:
    """Return the parts of each attempt's time; of a training with one attempt, rank 0's time by phase."""
    effective = text.as_dict(data.metrics.get("effective_training_time"))
    if len(text.as_dicts(effective.get("attempts"))) > 1:
        return _attempt_bars(effective)
    if data.own_program:
        return None
    spent: dict[str, float] = {}
    for attempt in data.zero.attempts:
        marks = [("start", attempt.began)] if attempt.began is not None else []
        marks = [*marks, *attempt.phases, ("", attempt.ended)]
        for (name, start), (_, end) in pairwise(marks):
            if start is not None and end is not None and name in PHASES:
                spent[name] = spent.get(name, 0.0) + max(end - start, 0.0)
    total = sum(spent.values())
    parts = [
        html.Part(name, text.format_duration(round(spent[key], 3)), 100 * spent[key] / total, RUN_COLOURS[key])
        for key, name in PHASES.items()
        if total and spent.get(key, 0.0) > 0.0005 * total
    ]
    note = "Time of rank 0, from start to end."
    return html.Bars("Time of the run by phase", [html.Bar("", parts)], [], note) if parts else None


def subtitle(data: RunData) -> list[str]:
    """Return short facts about the run: model, strategy, ranks."""
    m, p = data.metrics, data.plan
    ranks, nodes = data.world_size, finite_int(m.get("nodes")) or len(text.as_dicts(p.get("nodes")))
    parts = [
        m.get("model"),
        "LoRA" if m.get("use_lora") is True else None,
        "own program" if data.own_program else p.get("strategy") or m.get("strategy"),
        f"{ranks} rank{'s' * (ranks != 1)} on {nodes} node{'s' * (nodes != 1)}" if ranks and nodes else None,
        m.get("device") or p.get("device"),
        None if data.own_program else p.get("dtype") or m.get("dtype"),
        m.get("dataset"),
    ]
    return [sanitize(part, 120) for part in parts if part]


_HEADERS = ("### Instruction:", "### Input:", "### Response:")
_BLANK_LINES = re.compile(r"\n\s*\n")


def sample_answers(data: RunData) -> list[html.Sample]:
    """Return held-out questions with their answers before and after training."""
    sample_steps = [e["step"] for e in data.zero.of("eval") if e["samples"]]
    labels = [f"after step {step}" if step else "before training" for step in sample_steps]
    first = labels[0] if len(sample_steps) > 1 or 0 in sample_steps else "before training"
    last = labels[-1] if any(sample_steps) else "after training"
    return [
        html.Sample(
            _question(row["prompt"]),
            [
                html.Answer("expected answer", row["expected"].strip()),
                _answer(first, row["before"], row["expected"]),
                _answer(last, row["after"], row["expected"]),
            ],
        )
        for row in before_and_after(data.zero.of("eval"))
    ]


def _answer(label: str, reply: str | None, expected: str) -> html.Answer:
    if reply is None:
        return html.Answer(label, None)
    return html.Answer(label, reply.strip(), bool(expected.strip()) and reply.strip() == expected.strip())


def _question(prompt: str) -> str:
    for header in _HEADERS:
        prompt = prompt.replace(header, "")
    return _BLANK_LINES.sub("\n", prompt.strip())
