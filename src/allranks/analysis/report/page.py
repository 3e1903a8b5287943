"""Write report.html: the results of a run on one offline page, with light and dark mode.

The summary on its top: key figures, synchronisation proof, time budget, sample answers before and after training.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from allranks.analysis.metrics import before_and_after
from allranks.analysis.report import charts, tables
from allranks.analysis.report.html import Table, plotly_source, render_page
from allranks.analysis.report.run_data import RunData, read_run_data
from allranks.rundir.files import write_text_atomic
from allranks.rundir.paths import RunDir
from allranks.utils import text
from allranks.utils.text import finite_float, finite_int, sanitize

_Maker = Callable[[RunData], Table | None]
_TABLES: dict[str, tuple[_Maker, ...]] = {
    "results": (
        tables.eval_table,
        tables.checkpoint_table,
        tables.expert_table,
        tables.trace_table,
        tables.straggler_table,
        tables.machine_table,
        tables.link_table,
    ),
    "attempts": (tables.attempt_table,),
    "plan": (tables.plan_facts, tables.rank_table, tables.preflight_table),
    "environment": (tables.environment_table, tables.findings_table, tables.network_table),
    "facts": (tables.data_facts, tables.model_facts, tables.version_facts),
}


def write_report(run: RunDir) -> Path | None:
    """Write the page of a run from whatever data exists.

    Returns:
        The page, or None if it could not be written (no such folder, disk full).
    """
    try:
        return write_page(run)
    except OSError:
        return None


def write_page(run: RunDir) -> Path:
    """Write the page of a run and return its path.

    Raises:
        OSError: the page cannot be written.
    """
    write_text_atomic(run.report, render(read_run_data(run), plotly_source()))
    return run.report


def render(data: RunData, plotly: str | None) -> str:
    """Return the page as HTML. Without plotly it has no charts, and explains how to get them."""
    return render_page("report.html.j2", *_context(data, plotly), plotly)


def _context(data: RunData, plotly: str | None) -> tuple[dict[str, Any], str]:
    """Return the context of the template, and the charts."""
    made = key_figures(data)
    groups = {
        "training": charts.training_charts(data),
        "speed": charts.speed_charts(data),
        "telemetry": charts.telemetry_charts(data),
    }
    figures = charts.figures_json([chart for group in groups.values() for chart in group]) if plotly else "{}"
    context = {
        "name": data.name,
        "status": data.status if data.status != "unknown" else "no verdict",
        "tone": STATUS_TONES.get(data.status, "muted"),
        "message": sanitize(data.metrics.get("message") or ""),
        "warnings": [
            *(sanitize(w) for w in text.as_list(data.plan.get("warnings"))),
            *(sanitize(e.get("message") or "") for story in data.histories.values() for e in story.of("warning")),
        ],
        "subtitle": subtitle(data),
        "recorded": bool(data.histories),
        "cards": made,
        "card_columns": min(len(made), 4) if len(made) not in (5, 6, 9, 10) else (3 if len(made) < 9 else 5),
        "proof": proof_items(data),
        "budget": time_budget(data),
        "samples": sample_answers(data),
        "errors": tables.error_table(data),
        "hang": tables.hang_table(data),
        "log": data.log,
        "hosts": list(data.telemetry),
        "charts": groups if plotly else {name: [] for name in groups},
        "charts_missing": plotly is None and any(groups.values()),
        "tables": {name: [t for make in makers if (t := make(data))] for name, makers in _TABLES.items()},
        "spec": data.spec,
        "own_program": data.own_program,
    }
    return context, figures


STATUS_TONES = {"succeeded": "good", "stopped": "warn", "failed": "bad", "running": "info", "unfinished": "warn"}
PHASES = {
    "join": ("starting and rendezvous", 6),
    "prepare": ("preparing data", 5),
    "build": ("building the model", 4),
    "prove": ("checking the ranks", 8),
    "train": ("training", 1),
    "evaluate": ("evaluating", 2),
    "save": ("saving", 3),
}


@dataclass(frozen=True)
class KeyFigure:
    """One key figure. ``before`` is set if the value has changed since then."""

    label: str
    value: str
    note: str = ""
    before: str | None = None


@dataclass(frozen=True)
class ProofItem:
    """One synchronisation check: ok True, False, or None if the run did not reach it."""

    title: str
    detail: str
    ok: bool | None


@dataclass(frozen=True)
class BudgetSlice:
    """A part of the run's time; ``share`` in percent, ``paint`` the number of its colour."""

    name: str
    seconds: str
    share: float
    paint: int


def key_figures(data: RunData) -> list[KeyFigure]:
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
        _parameters(data),
        _mfu(data),
    ]
    return [card for card in made if card]


def _train_loss(data: RunData) -> KeyFigure | None:
    losses = [s.loss for s in data.zero.steps if s.loss is not None]
    if not losses:
        return None
    note = f"step {data.zero.steps[0].step:,} to {data.zero.steps[-1].step:,}"
    before = text.format_loss(losses[0]) if len(losses) > 1 else None
    return KeyFigure("train loss", text.format_loss(losses[-1]), note, before)


def _change(data: RunData, label: str, key: str, show: Any) -> KeyFigure | None:
    known = [(e["step"], v) for e in data.zero.of("eval") if (v := finite_float(e.get(key))) is not None]
    if not known:
        return None
    rows = finite_int(data.zero.last("eval").get("rows"))
    note = f"{rows:,} rows, after step {known[-1][0]:,}" if rows else f"after step {known[-1][0]:,}"
    return KeyFigure(label, show(known[-1][1]), note, show(known[0][1]) if len(known) > 1 else None)


def _right_answers(data: RunData) -> KeyFigure | None:
    card = _change(data, "exact match", "exact_match", text.format_percent)
    checked = finite_int(data.zero.last("eval").get("checked"))
    return KeyFigure(card.label, card.value, f"of {checked:,}, exact match", card.before) if card and checked else card


def _speed(data: RunData) -> KeyFigure | None:
    if data.own_program:
        return _program_speed(data)
    rate, each = finite_float(data.metrics.get("tokens_per_s")), data.metrics.get("tokens_per_s_per_rank")
    if rate is None:
        return None
    real, padded = finite_float(data.metrics.get("tokens_real")), finite_float(data.metrics.get("tokens_padded"))
    padding = f"; {text.format_percent(padded / (real + padded))} padding" if real and padded is not None else ""
    return KeyFigure("real tokens / s", text.format_rate(rate), f"{text.format_rate(each)} per rank{padding}")


def _program_speed(data: RunData) -> KeyFigure | None:
    tokens, steps = (finite_float(data.metrics.get(name)) for name in ("tokens_per_s", "steps_per_s"))
    source = "parsed from its output" if data.metrics.get("progress_source") == "log" else "as reported"
    if tokens is not None:
        return KeyFigure("tokens / s", text.format_rate(tokens), source)
    return None if steps is None else KeyFigure("steps / s", f"{steps:.3g}", source)


def _step_time(data: RunData) -> KeyFigure | None:
    step = text.as_dict(data.metrics.get("step_time_s"))
    if finite_float(step.get("median")) is None:
        return None
    return KeyFigure(
        "step time",
        text.format_duration(step["median"]),
        f"median; p90 {text.format_duration(step.get('p90'))}",
    )


def _memory(data: RunData) -> KeyFigure | None:
    peaks = {
        rank: max(known)
        for rank, story in data.histories.items()
        if (known := [s.peak for s in story.steps if s.peak is not None])
    }
    if not peaks:
        return None
    top, low = max(peaks, key=lambda r: peaks[r]), min(peaks, key=lambda r: peaks[r])
    least = f"; lowest: rank {low}, {text.format_bytes(peaks[low])}" if low != top else ""
    return KeyFigure("peak memory per rank", text.format_bytes(peaks[top]), f"rank {top}{least}")


def _wall_time(data: RunData) -> KeyFigure | None:
    wall = finite_float(data.metrics.get("wall_time_s"))
    if wall is None:
        return None
    done = data.zero.steps[-1].step if data.zero.steps else 0
    total = data.total_steps
    attempts = len(data.zero.attempts)
    note = f"{done:,} of {total:,} steps" if total is not None else f"{done:,} steps"
    notes = [*([] if data.own_program else [note]), *([f"{attempts} attempts"] if attempts > 1 else [])]
    return KeyFigure("wall time", text.format_duration(wall), ", ".join(notes))


def _parameters(data: RunData) -> KeyFigure | None:
    model = data.zero.last("model")
    total, trained = finite_float(model.get("parameters")), finite_float(model.get("parameters_trained"))
    if total is None or trained is None:
        return None
    share = f"{text.format_percent(trained / total)} of {text.format_short_count(total)}" if total else ""
    return KeyFigure("trained parameters", text.format_short_count(trained), share)


def _mfu(data: RunData) -> KeyFigure | None:
    mfu = finite_float(data.metrics.get("mfu"))
    if mfu is None:
        return None
    more = finite_float(data.metrics.get("mfu_with_attention"))
    attention = "" if more is None else f"; {text.format_percent(more)} with attention"
    return KeyFigure("MFU", text.format_percent(mfu), f"of the dense bf16 peak{attention}")


def proof_items(data: RunData) -> list[ProofItem]:
    """Return the three checks of step 0; nothing for a user's own program, which has none."""
    if data.own_program:
        return []
    shown = data.zero.last("proof") or text.as_dict(data.metrics.get("sync_proof"))
    if not shown:
        problem = next((e for e in data.errors() if e.get("type") == "ProofFailed"), None)
        detail = "failed" if problem else "the run did not reach this check"
        ok = False if problem else None
        return [ProofItem(title, detail, ok) for title in ("All ranks answer", "Equal weights", "Disjoint data")]
    size, planned = finite_int(shown.get("world_size")), data.world_size
    digest, rows = sanitize(shown.get("weights_hash") or "")[:12], finite_int(shown.get("rows_checked"))
    return [
        ProofItem("All ranks answer", f"{size} of {planned or size}", size is not None and size == (planned or size)),
        ProofItem(
            "Equal weights",
            f"same SHA-256 on all ranks: {digest}…" if digest else "same hash on all ranks",
            shown.get("weights_equal") is True,
        ),
        ProofItem(
            "Disjoint data",
            f"{rows:,} rows, each used once" if rows else "each row used once",
            shown.get("data_disjoint") is True,
        ),
    ]


def time_budget(data: RunData) -> list[BudgetSlice]:
    """Return rank 0's time by phase, summed over the attempts."""
    if data.own_program:
        return []
    spent: dict[str, float] = {}
    for attempt in data.zero.attempts:
        marks = [("join", attempt.began)] if attempt.began is not None else []
        marks = [*marks, *attempt.phases, ("", attempt.ended)]
        for (name, start), (_, end) in pairwise(marks):
            if start is not None and end is not None and name in PHASES:
                spent[name] = spent.get(name, 0.0) + max(end - start, 0.0)
    total = sum(spent.values())
    return [
        BudgetSlice(name, text.format_duration(round(spent[key], 3)), 100 * spent[key] / total, paint)
        for key, (name, paint) in PHASES.items()
        if total and spent.get(key, 0.0) > 0.0005 * total
    ]


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


@dataclass(frozen=True)
class Answer:
    """An answer; ``right`` means an exact match, as ``exact_match`` counts."""

    label: str
    text: str | None
    right: bool = False


@dataclass(frozen=True)
class Sample:
    """A held-out question with its answers; text None if it was not answered at that time."""

    question: str
    answers: list[Answer]


def sample_answers(data: RunData) -> list[Sample]:
    """Return held-out questions with their answers before and after training."""
    asked = [e["step"] for e in data.zero.of("eval") if e["samples"]]
    labels = [f"after step {step}" if step else "before training" for step in asked]
    first = labels[0] if len(asked) > 1 or 0 in asked else "before training"
    last = labels[-1] if any(asked) else "after training"
    return [
        Sample(
            _question(row["prompt"]),
            [
                Answer("expected answer", row["expected"].strip()),
                _answer(first, row["before"], row["expected"]),
                _answer(last, row["after"], row["expected"]),
            ],
        )
        for row in before_and_after(data.zero.of("eval"))
    ]


def _answer(label: str, reply: str | None, expected: str) -> Answer:
    if reply is None:
        return Answer(label, None)
    return Answer(label, reply.strip(), bool(expected.strip()) and reply.strip() == expected.strip())


def _question(prompt: str) -> str:
    for header in _HEADERS:
        prompt = prompt.replace(header, "")
    return _BLANK_LINES.sub("\n", prompt.strip())
