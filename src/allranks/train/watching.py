"""What may look on while the loop runs. The loop knows this contract and nobody behind it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

_NOTHING = nullcontext()


class StepWatcher(Protocol):
    """Is told where steps and their parts begin and end. Steps count from 0."""

    def attach(self, quiet: Callable[[], None]) -> None:
        """Before the first step. ``quiet()`` returns when nothing that the loop began is under way on this rank; it may
        be called wherever a step begins or ends."""
        ...

    def step_begins(self, step: int) -> None:
        """Before anything of the step."""
        ...

    def part(self, name: str) -> AbstractContextManager[Any]:
        """Around ``data``, ``forward``, ``backward``, ``optimizer`` and ``control``."""
        ...

    def step_ends(self, step: int) -> bool:
        """After all of the step; True if the watcher took time of its own, which is no training time."""
        ...

    def close(self) -> None:
        """No step follows."""
        ...


class Unwatched:
    """Nobody looks on."""

    def attach(self, quiet: Callable[[], None]) -> None: ...

    def step_begins(self, step: int) -> None: ...

    def part(self, name: str) -> AbstractContextManager[Any]:
        return _NOTHING

    def step_ends(self, step: int) -> bool:
        return False

    def close(self) -> None: ...
