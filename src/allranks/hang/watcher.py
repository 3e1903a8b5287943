"""Tells the heartbeat which step and part of a step a rank is in. No torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from allranks.hang.pulse import Pulse, pulse
from allranks.train.watching import StepWatcher


class Beating:
    """Looks on beside another watcher (`allranks.train.watching.StepWatcher`)."""

    def __init__(self, other: StepWatcher, beats: Pulse = pulse) -> None:
        self._other, self._pulse = other, beats

    def attach(self, quiet: Callable[[], None]) -> None:
        """Hands on."""
        self._other.attach(quiet)

    def step_begins(self, step: int) -> None:
        """A beat, and the step's number."""
        self._pulse.step(step)
        self._other.step_begins(step)

    def part(self, name: str) -> AbstractContextManager[Any]:
        """A beat, and the part's name."""
        self._pulse.part(name)
        return self._other.part(name)

    def step_ends(self, step: int) -> bool:
        """Hands on."""
        return self._other.step_ends(step)

    def close(self) -> None:
        """Hands on."""
        self._other.close()
