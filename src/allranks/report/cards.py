"""What stands at the top of the page: key figures, proof, time budget. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from allranks.report import text
from allranks.report.gather import RunData
from allranks.report.text import number, plain, whole

TONES = {"succeeded": "good", "stopped": "warn", "failed": "bad", "running": "info", "unfinished": "warn"}
PHASES = {
    "join": ("starting and joining", 6),
    "prepare": ("preparing data", 5),
    "build": ("building the model", 4),
    "prove": ("proving the ranks", 8),
    "train": ("training", 1),
    "evaluate": ("evaluating", 2),
    "save": ("saving", 3),
}


@dataclass(frozen=True)
class Card:
    """One key figure. ``before`` is set where the value has changed from it."""

    label: str
    value: str
    note: str = ""
    before: str | None = None


@dataclass(frozen=True)
class Tick:
    """One thing that was proved: ok True, False, or None where the run did not get there."""

    title: str
    detail: str
    ok: bool | None


@dataclass(frozen=True)
class Slice:
    """A part of the run's time; ``share`` in percent, ``paint`` the number of its colour."""

    name: str
    seconds: str
    share: float
    paint: int


def cards(data: RunData) -> list[Card]:
    """The key figures, only those that are known."""
    made = [
        _train_loss(data),
        _change(data, "held-out loss", "loss", text.loss_text),
        _change(data, "perplexity", "perplexity", text.perplexity_text),
        _change(data, "accuracy", "accuracy", text.share_text),
        _right_answers(data),
        _speed(data),
        _step_time(data),
        _memory(data),
        _wall_time(data),
        _parameters(data),
        _mfu(data),
    ]
    return [card for card in made if card]


def _train_loss(data: RunData) -> Card | None:
    losses = [s.loss for s in data.zero.steps if s.loss is not None]
    if not losses:
        return None
    note = f"step {data.zero.steps[0].step:,} to {data.zero.steps[-1].step:,}"
    before = text.loss_text(losses[0]) if len(losses) > 1 else None
    return Card("train loss", text.loss_text(losses[-1]), note, before)


def _change(data: RunData, label: str, key: str, show: Any) -> Card | None:
    known = [(e["step"], v) for e in data.zero.of("eval") if (v := number(e.get(key))) is not None]
    if not known:
        return None
    rows = whole(data.zero.last("eval").get("rows"))
    note = f"{rows:,} rows, after step {known[-1][0]:,}" if rows else f"after step {known[-1][0]:,}"
    return Card(label, show(known[-1][1]), note, show(known[0][1]) if len(known) > 1 else None)


def _right_answers(data: RunData) -> Card | None:
    card = _change(data, "right answers", "exact_match", text.share_text)
    checked = whole(data.zero.last("eval").get("checked"))
    return (
        Card(card.label, card.value, f"of {checked:,}, equal to the letter", card.before) if card and checked else card
    )


def _speed(data: RunData) -> Card | None:
    rate, each = number(data.metrics.get("tokens_per_s")), data.metrics.get("tokens_per_s_per_rank")
    if rate is None:
        return None
    real, padded = number(data.metrics.get("tokens_real")), number(data.metrics.get("tokens_padded"))
    padding = f"; {text.share_text(padded / (real + padded))} padding" if real and padded is not None else ""
    return Card("real tokens / s", text.rate_text(rate), f"{text.rate_text(each)} a rank{padding}")


def _step_time(data: RunData) -> Card | None:
    step = text.record(data.metrics.get("step_time_s"))
    if number(step.get("median")) is None:
        return None
    return Card("step time", text.seconds_text(step["median"]), f"median; p90 {text.seconds_text(step.get('p90'))}")


def _memory(data: RunData) -> Card | None:
    peaks = {
        rank: max(known)
        for rank, story in data.stories.items()
        if (known := [s.peak for s in story.steps if s.peak is not None])
    }
    if not peaks:
        return None
    top, low = max(peaks, key=lambda r: peaks[r]), min(peaks, key=lambda r: peaks[r])
    least = f"; least: rank {low}, {text.bytes_text(peaks[low])}" if low != top else ""
    return Card("peak memory a rank", text.bytes_text(peaks[top]), f"rank {top}{least}")


def _wall_time(data: RunData) -> Card | None:
    wall = number(data.metrics.get("wall_time_s"))
    if wall is None:
        return None
    done = data.zero.steps[-1].step if data.zero.steps else 0
    total = data.total_steps
    attempts = len(data.zero.attempts)
    note = f"{done:,} of {total:,} steps" if total is not None else f"{done:,} steps"
    notes = [*([] if data.own_program else [note]), *([f"{attempts} attempts"] if attempts > 1 else [])]
    return Card("wall time", text.seconds_text(wall), ", ".join(notes))


def _parameters(data: RunData) -> Card | None:
    model = data.zero.last("model")
    total, trained = number(model.get("parameters")), number(model.get("parameters_trained"))
    if total is None or trained is None:
        return None
    share = f"{text.share_text(trained / total)} of {text.short_count(total)}" if total else ""
    return Card("parameters trained", text.short_count(trained), share)


def _mfu(data: RunData) -> Card | None:
    mfu = number(data.metrics.get("mfu"))
    return None if mfu is None else Card("MFU", text.share_text(mfu), "of the dense bf16 peak")


def proof(data: RunData) -> list[Tick]:
    """The three things shown at step 0; nothing for a program of the user's own, of which nothing is proved."""
    if data.own_program:
        return []
    shown = data.zero.last("proof") or text.record(data.metrics.get("sync_proof"))
    if not shown:
        problem = next((e for e in data.errors() if e.get("type") == "ProofFailed"), None)
        detail = "not proved" if problem else "the run did not get there"
        ok = False if problem else None
        return [Tick(title, detail, ok) for title in ("All ranks answer", "Equal weights", "Disjoint data")]
    size, planned = whole(shown.get("world_size")), data.world_size
    digest, rows = plain(shown.get("weights_hash") or "")[:12], whole(shown.get("rows_checked"))
    return [
        Tick("All ranks answer", f"{size} of {planned or size}", size is not None and size == (planned or size)),
        Tick(
            "Equal weights",
            f"one SHA-256 on all: {digest}…" if digest else "one hash on all",
            shown.get("weights_equal") is True,
        ),
        Tick(
            "Disjoint data",
            f"{rows:,} rows, each taken once" if rows else "each row taken once",
            shown.get("data_disjoint") is True,
        ),
    ]


def budget(data: RunData) -> list[Slice]:
    """Rank 0's time by phase, summed over the attempts."""
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
        Slice(name, text.seconds_text(round(spent[key], 3)), 100 * spent[key] / total, paint)
        for key, (name, paint) in PHASES.items()
        if total and spent.get(key, 0.0) > 0.0005 * total
    ]


def subtitle(data: RunData) -> list[str]:
    """What ran, in a few words each."""
    m, p = data.metrics, data.plan
    ranks, nodes = data.world_size, whole(m.get("nodes")) or len(text.records(p.get("nodes")))
    parts = [
        m.get("model"),
        "LoRA" if m.get("use_lora") is True else None,
        "own program" if data.own_program else p.get("strategy") or m.get("strategy"),
        f"{ranks} rank{'s' * (ranks != 1)} on {nodes} node{'s' * (nodes != 1)}" if ranks and nodes else None,
        m.get("device") or p.get("device"),
        None if data.own_program else p.get("dtype") or m.get("dtype"),
        m.get("dataset"),
    ]
    return [plain(part, 120) for part in parts if part]
