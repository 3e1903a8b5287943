"""State of a run for a live view, from its events in the order in which they were written. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from allranks.rundir.events import PROGRESS
from allranks.utils.text import finite_float, finite_int, format_value

SPEED_STEPS = 20
"""Steps over which speed and the time left are averaged."""
KEPT_LOSSES = 4000
KEPT_NOTES = 6


@dataclass
class RankState:
    """What one rank has reported last. Times are seconds since 1970; unknown values are None."""

    host: str = ""
    phase: str = ""
    step: int | None = None
    memory_bytes: float | None = None
    peak_bytes: float | None = None
    seen: float | None = None
    _recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=SPEED_STEPS))

    @property
    def step_time_s(self) -> float | None:
        """Return the median time of the last steps."""
        return statistics.median(seconds for seconds, _ in self._recent) if self._recent else None

    @property
    def tokens_per_s(self) -> float | None:
        """Return the real tokens per second of this rank over the last steps."""
        seconds = sum(seconds for seconds, _ in self._recent)
        return sum(tokens for _, tokens in self._recent) / seconds if seconds > 0 else None

    def add(self, seconds: float, steps: int, tokens: float) -> None:
        self._recent.append((seconds, tokens / steps))


@dataclass
class LiveState:
    """A run as its events describe it so far."""

    ranks: dict[int, RankState] = field(default_factory=dict)
    attempt: int | None = None
    started: float | None = None
    last: float | None = None
    total_steps: int | None = None
    losses: deque[tuple[int, float | None]] = field(default_factory=lambda: deque(maxlen=KEPT_LOSSES))
    held_out: tuple[int, float | None] | None = None
    checkpoint: int | None = None
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_NOTES))

    @property
    def step(self) -> int | None:
        """Return the last step of rank 0."""
        return self.ranks[0].step if 0 in self.ranks else None

    @property
    def tokens_per_s(self) -> float | None:
        """Return the sum over the ranks; None while one of them is unknown."""
        each = [rank.tokens_per_s for rank in self.ranks.values()]
        return sum(filter(None, each)) if each and None not in each else None

    @property
    def left_s(self) -> float | None:
        """Return the estimated time of the remaining steps, without evaluations and checkpoints."""
        seconds = self.ranks[0].step_time_s if 0 in self.ranks else None
        if seconds is None or self.total_steps is None or self.step is None:
            return None
        return max(self.total_steps - self.step, 0) * seconds

    def take(self, event: dict[str, Any]) -> None:
        """Add one event. Any field may be missing or malformed."""
        rank, at, kind = finite_int(event.get("rank")), finite_float(event.get("time")), event["event"]
        if rank is None:
            return
        state, step = self.ranks.setdefault(rank, RankState()), finite_int(event.get("step"))
        state.seen = self.last = at if at is not None else state.seen
        if kind == "start":
            self._start(rank, event, at)
        elif kind == "phase":
            state.phase = format_value(event.get("name"))
            self.total_steps = finite_int(event.get("total_steps")) or self.total_steps
        elif kind in ("step", PROGRESS) and step is not None:
            self._step(rank, state, step, event)
        elif kind == "eval" and rank == 0 and step is not None:
            self.held_out = step, finite_float(event.get("loss"))
        elif kind == "checkpoint" and rank == 0:
            self.checkpoint = step
        elif kind == "warning" or (kind == "error" and not event.get("echo")):
            text = f"rank {rank}: {'' if kind == 'warning' else kind + ': '}{format_value(event.get('message'))}"
            if text not in self.notes:
                self.notes.append(text)
        elif kind == "hang":
            self.notes.append(f"hang: rank {format_value(event.get('ranks'))} stalled")

    def _start(self, rank: int, event: dict[str, Any], at: float | None) -> None:
        attempt = finite_int(event.get("attempt"))
        if attempt != self.attempt:  # the ranks of an earlier attempt have ended
            self.attempt = attempt
            self.started = self.started or at
            for state in self.ranks.values():
                state.phase = ""
        self.ranks[rank] = RankState(host=format_value(event.get("host")), phase="join", seen=at)

    def _step(self, rank: int, state: RankState, step: int, event: dict[str, Any]) -> None:
        earlier = state.step
        state.step, count = step, max(finite_int(event.get("steps")) or 1, 1)
        state.memory_bytes = finite_float(event.get("memory_bytes"))
        state.peak_bytes = finite_float(event.get("peak_memory_bytes"))
        seconds, tokens = finite_float(event.get("step_time_s")), finite_float(event.get("tokens"))
        if seconds is not None and tokens is not None:
            state.add(seconds, count, tokens)
        self.total_steps = finite_int(event.get("total")) or self.total_steps
        if rank == 0 and "loss" in event:
            while earlier is not None and self.losses and self.losses[-1][0] >= step:
                self.losses.pop()  # repeated after a resume
            self.losses.append((step, finite_float(event["loss"])))
