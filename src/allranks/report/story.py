"""Events of one rank, checked once: what comes after can rely on names and types. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from allranks.observe.summary import of_last_story
from allranks.report.text import number, plain, record, records, whole

PARTS = ("data", "forward", "backward", "optimizer")
_PART_KEYS = tuple((part, f"{part}_s") for part in PARTS)
_NEEDED = {"step": "step", "eval": "step", "checkpoint": "step", "stop": "step", "resume": "from_step"}
Events = list[dict[str, Any]]


class Step(msgspec.Struct, frozen=True, gc=False):
    """One "step" event. It may stand for several optimizer steps (``observe.log_every``): `count` of them, up to `step`."""

    step: int
    count: int
    loss: float | None
    lr: float | None
    grad_norm: float | None
    tokens: float | None
    trained: float | None
    padded: float | None
    seconds: tuple[float, ...]
    parts: dict[str, float]
    memory: float | None
    peak: float | None


@dataclass
class Attempt:
    """One start of the run: from its "start" event to the next."""

    number: int
    began: float | None
    ended: float | None = None
    resumed_from: int | None = None
    last_step: int | None = None
    end: str = "ended without a word"
    phases: list[tuple[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Story:
    """One rank's part in a run. `events` are all but steps; what a resumed attempt did again is left out of both."""

    steps: list[Step] = field(default_factory=list)
    events: Events = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)

    def of(self, kind: str) -> Events:
        """The events of a kind."""
        return [e for e in self.events if e["event"] == kind]

    def last(self, kind: str) -> dict[str, Any]:
        """The last event of a kind, or an empty one."""
        return next((e for e in reversed(self.events) if e["event"] == kind), {})


def read_story(events: Iterable[dict[str, Any]]) -> Story:
    """Check events and put them in order; events that lack what they need are passed over."""
    sound = [checked for e in events if (checked := _checked(e)) is not None]
    kept = of_last_story(sound)
    steps = sorted((_step(e) for e in kept if e["event"] == "step"), key=lambda s: s.step)
    return Story(steps, [e for e in kept if e["event"] != "step"], _attempts(sound))


def _checked(event: dict[str, Any]) -> dict[str, Any] | None:
    needed = _NEEDED.get(event["event"])
    if needed is not None:
        at = whole(event.get(needed))
        if at is None:
            return None
        event[needed] = at
    if event["event"] == "eval":
        event["samples"] = _samples(event.get("samples"))
    return event


def _samples(value: Any) -> list[dict[str, str]]:
    return [
        {name: plain(sample.get(name) or "") for name in ("prompt", "expected", "reply")} for sample in records(value)
    ]


def _step(event: dict[str, Any]) -> Step:
    each = event.get("step_times_s")
    times = each if isinstance(each, list) and each else [event.get("step_time_s")]
    seconds = tuple(t for t in map(number, times) if t is not None and t >= 0)
    parts = {part: t for part, key in _PART_KEYS if (t := number(event.get(key))) is not None}
    return Step(
        step=event["step"],
        count=max(whole(event.get("steps")) or 1, 1),
        loss=number(event.get("loss")),
        lr=number(event.get("lr")),
        grad_norm=number(event.get("grad_norm")),
        tokens=number(event.get("tokens")),
        trained=number(event.get("tokens_trained")),
        padded=number(event.get("tokens_padded")),
        seconds=seconds,
        parts=parts,
        memory=number(event.get("memory_bytes")),
        peak=number(event.get("peak_memory_bytes")),
    )


def _attempts(events: Events) -> list[Attempt]:
    found: list[Attempt] = []
    for event in events:
        at = number(event.get("time"))
        if event["event"] == "start" or not found:
            found.append(Attempt(whole(event.get("attempt")) or len(found) + 1, at))
            found[-1].resumed_from = whole(event.get("resumed_from"))
        now = found[-1]
        now.ended = at if at is not None else now.ended
        _tell(now, event, at)
    return found


def _tell(attempt: Attempt, event: dict[str, Any], at: float | None) -> None:
    kind = event["event"]
    if kind == "step":
        attempt.last_step = event["step"]
    elif kind == "stop":
        attempt.end = f"stopped after step {event['step']} ({plain(event.get('reason'), 200)})"
    elif kind == "error":
        attempt.end = f"failed: {plain(event.get('type'), 200)}"
    elif kind == "phase":
        name = plain(event.get("name"), 40)
        if at is not None:
            attempt.phases.append((name, at))
        if name == "done" and not attempt.end.startswith("stopped"):
            attempt.end = "done"


def versions_of(story: Story) -> dict[str, str]:
    """Package versions that a rank has reported."""
    return {plain(k): plain(v) for k, v in record(story.last("model").get("versions")).items()}
