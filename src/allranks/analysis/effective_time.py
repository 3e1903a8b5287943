"""Account for the wall time of a run over all its attempts: what was training, and what was not. Pure.

Times are those of rank 0 (of a user's own program: of the lowest rank that reports steps). Between a stop and the
user's ``allranks resume`` the run does not exist; that time is not counted, nor is that in Slurm's queue before the
first start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from allranks.analysis.metrics import progress_events
from allranks.utils.text import finite_float, finite_int

Events = list[dict[str, Any]]
KINDS: tuple[str, ...] = (
    "productive", "repeated", "startup", "evaluation", "checkpoint", "detection", "restart", "other",
)  # fmt: skip
"""Parts of the wall time, in the order in which they are shown; ``other`` is what the others leave."""
_KIND_OF_PHASE = {
    **dict.fromkeys(("prepare", "build", "prove"), "startup"),
    "train": "productive",
    "evaluate": "evaluation",
    "save": "checkpoint",
}
_Step = tuple[float, int, int]  # when it was recorded, its number, and how many the record counts
_PROGRESS = ("start", "phase", "step", "eval", "checkpoint")
CLOCK_MARGIN_S = 5.0
"""Largest difference between the clocks of the first rank's host and of the launcher's, with which they are used."""


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is recorded of an attempt beside its events, in seconds since 1970.

    ``began``: the launcher, or the driver of the job, began it. ``verdict``: what follows its failure was decided.
    ``faults``: ranks failed by themselves, as their agents saw it. ``hung``: ranks stalled, and nothing else is known
    of when. ``ends``: ranks ended.
    """

    began: float | None = None
    verdict: float | None = None
    faults: Sequence[float] = ()
    hung: bool = False
    ends: Sequence[float] = ()


class _Span(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt with its events; ``since``: the verdict on the attempt before, where that led to this one."""

    number: int
    since: float | None
    began: float
    ended: float
    failed: bool
    fault: float | None
    events: Events


def effective_training_time(
    ranks: Mapping[int, Events], records: Mapping[int, AttemptRecord], launched_at: Sequence[float], *, program: bool
) -> dict[str, Any] | None:
    """Return the value of metrics.json: ``share`` of the wall time that was productive, and the parts, which add up
    to it exactly, of the run and of its ``attempts``. None: nothing of any attempt is recorded.

    Args:
        launched_at: when the user started the run, or resumed it.
        program: the ranks run a user's own program, of which only the reported steps are known.
    """
    attempts: list[dict[str, Any]] = []
    before = 0
    for span in _spans(ranks, records, launched_at):
        steps = _reported_steps(span.events) if program else _trained_steps(span.events)
        marks = _program_marks(span.events, steps) if program else _phase_marks(span.events)
        attempts.append({"attempt": span.number, **_rounded(span, _parts(span, marks, steps, before))})
        before = max([before, *(step for _, step, _ in steps)])
    if not attempts:
        return None
    totals: dict[str, Any] = {
        key: round(sum(one[key] for one in attempts), 3) for key in ("wall_time_s", *(f"{k}_s" for k in KINDS))
    }
    unknown: tuple[str, ...] = ("evaluation_s", "checkpoint_s") if program else ()
    if program and not before:
        unknown = (*unknown, "productive_s", "repeated_s")
    for one in (totals, *attempts):
        one.update(dict.fromkeys(unknown))
    known = totals["productive_s"] is not None and totals["wall_time_s"] > 0
    share = round(totals["productive_s"] / totals["wall_time_s"], 4) if known else None
    return {"share": share, **totals, "attempts": attempts}


def _spans(
    ranks: Mapping[int, Events], records: Mapping[int, AttemptRecord], launched_at: Sequence[float]
) -> list[_Span]:
    by_attempt: dict[int, list[Events]] = {}
    for _, events in sorted(ranks.items()):
        number = 0
        for event in events:
            if finite_float(event.get("time")) is None:
                continue
            if event["event"] == "start":
                number = finite_int(event.get("attempt")) or number + 1
                by_attempt.setdefault(number, []).append([])
            if number:
                by_attempt[number][-1].append(event)
    spans: list[_Span] = []
    for number in sorted(by_attempt.keys() | {n for n, one in records.items() if one.began is not None}):
        record, each = records.get(number, AttemptRecord()), by_attempt.get(number, [])
        first = next((events for events in each if progress_events(events)), each[0] if each else [])
        times = [event["time"] for event in first]
        began = min(times, default=0.0) if record.began is None else record.began
        ended = max([began, *times, *record.ends]) if record.verdict is None else max(began, record.verdict)
        errors = [e["time"] for events in each for e in events if e["event"] == "error"]
        resumed = spans and any(spans[-1].began < at <= began + CLOCK_MARGIN_S for at in launched_at)
        span = _Span(
            number=number,
            since=min(spans[-1].ended, began) if spans and record.began is not None and not resumed else None,
            began=began,
            ended=ended,
            failed=record.verdict is not None or bool(record.faults or errors),
            fault=None if record.hung else min([*record.faults, *errors], default=None),
            events=first,
        )
        spans.append(span)
    return spans


def _trained_steps(events: Events) -> list[_Step]:
    steps = [(e["time"], finite_int(e.get("step")), e.get("steps")) for e in events if e["event"] == "step"]
    return [(at, step, finite_int(count) or 1) for at, step, count in steps if step is not None]


def _reported_steps(events: Events) -> list[_Step]:
    reports = [(finite_float(e.get("last")) or e["time"], finite_int(e.get("step"))) for e in progress_events(events)]
    steps = [(at, step) for at, step in reports if step is not None]
    before = [steps[0][1] - 1, *(step for _, step in steps)] if steps else []
    return [(at, step, max(step - last, 1)) for (at, step), last in zip(steps, before, strict=False)]


def _phase_marks(events: Events) -> list[tuple[float, str]]:
    """Return when each part of the time begins, by the phases of the training."""
    marks = [(e["time"], _KIND_OF_PHASE.get(str(e.get("name")), "other")) for e in events if e["event"] == "phase"]
    return [(events[0]["time"], "startup"), *marks] if events else []


def _program_marks(events: Events, steps: list[_Step]) -> list[tuple[float, str]]:
    """Return the same of a program: from its first reported step to its last one it trains, the rest is not known."""
    marks = [(events[0]["time"], "other")] if events else []
    return [*marks, (steps[0][0], "productive"), (steps[-1][0], "other")] if steps else marks


def _parts(span: _Span, marks: list[tuple[float, str]], steps: list[_Step], before: int) -> dict[str, float]:
    """Return the seconds of each part of an attempt; ``before`` steps had been trained by earlier attempts."""
    parts = dict.fromkeys(KINDS, 0.0)
    if marks and not span.began - CLOCK_MARGIN_S <= marks[0][0] <= span.ended + CLOCK_MARGIN_S:
        return parts  # the clocks disagree
    fault, last_step = span.ended, math.inf
    if span.failed:
        progress = max((e["time"] for e in span.events if e["event"] in _PROGRESS), default=span.began)
        fault = min(progress if span.fault is None else span.fault, span.ended)
        last_step = max((at for at, _, _ in steps), default=-math.inf)
        parts["detection"] = span.ended - fault
    repeated_until = _repeated_until(marks, steps, before)
    first = (span.began, "startup") if span.since is None else (span.since, "restart")
    for (start, kind), (end, _) in pairwise([first, *marks, (fault, "")]):
        a, b = (min(max(at, first[0]), fault) for at in (start, end))
        b = max(a, b)
        if kind != "productive":
            parts[kind] += b - a
            continue
        trained = min(b, max(a, last_step)) if end == fault else b  # a step that was never completed is other time
        split = min(max(a, repeated_until), trained)
        parts["repeated"] += split - a
        parts["productive"] += trained - split
    return parts


def _repeated_until(marks: list[tuple[float, str]], steps: list[_Step], before: int) -> float:
    """Return when the attempt had trained the steps of earlier attempts again; inf: not by its end."""
    since = next((at for at, kind in marks if kind == "productive"), 0.0)
    for at, step, count in steps:
        if step > before:
            return since + (at - since) * max(before - step + count, 0) / count
        since = at
    return math.inf if before else -math.inf


def _rounded(span: _Span, parts: dict[str, float]) -> dict[str, float]:
    """Return the parts in whole milliseconds; ``other`` is the remainder, so that they add up to the wall time."""
    wall_ms = round(1000 * (span.ended - (span.began if span.since is None else span.since)))
    parts_ms = {kind: math.floor(1000 * parts[kind] + 1e-3) for kind in KINDS[:-1]}
    parts_ms["other"] = wall_ms - sum(parts_ms.values())
    return {"wall_time_s": wall_ms / 1000, **{f"{kind}_s": ms / 1000 for kind, ms in parts_ms.items()}}
