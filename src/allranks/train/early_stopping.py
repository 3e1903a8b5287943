"""Decide from the held-out losses when more training does not help. Pure; every rank decides the same from the same losses."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


class EarlyStopping:
    """Count the evaluations since the held-out loss was last lower than before.

    A loss that is not finite is never lower. The evaluation before the first step does not count: there is no checkpoint of it.

    Args:
        patience: evaluations in a row without a lower loss after which the training ends; None never ends it.
        min_delta: by how much a loss must be lower than the lowest before.
    """

    def __init__(self, patience: int | None, min_delta: float = 0.0) -> None:
        self._patience, self._min_delta = patience, min_delta
        self.best_loss, self.best_step = math.inf, 0
        self.waited = 0

    def add(self, step: int, loss: float | None) -> None:
        """Add the evaluation after `step`; None and NaN are losses that were not finite."""
        if step == 0:
            return
        if loss is not None and loss < self.best_loss - self._min_delta:
            self.best_loss, self.best_step, self.waited = loss, step, 0
        else:
            self.waited += 1

    def replay(self, evaluations: Iterable[tuple[int, float | None]]) -> None:
        """Add the evaluations of earlier attempts, in their order."""
        for step, loss in evaluations:
            self.add(step, loss)

    @property
    def reason(self) -> str | None:
        """Why the training ends now, or None."""
        if self._patience is None or self.waited < self._patience:
            return None
        times = f"{self.waited} evaluation{'s' * (self.waited != 1)} in a row"
        if not self.best_step:
            return f"no finite held-out loss in {times} (eval.patience {self._patience})"
        less = f" by more than {self._min_delta:g}" if self._min_delta else ""
        return (
            f"the held-out loss was not lower{less} than {self.best_loss:.6g} (step {self.best_step}) in {times} "
            f"(eval.patience {self._patience})"
        )


def evaluations_until(events: Iterable[dict[str, Any]], step: int) -> list[tuple[int, float | None]]:
    """Return step and loss of each evaluation up to `step` in the events of rank 0, without those that an attempt repeated."""
    found: list[tuple[int, float | None]] = []
    for event in events:
        if event["event"] == "resume":
            found = [one for one in found if one[0] <= event["from_step"]]
        elif event["event"] == "eval":
            found.append((event["step"], event.get("loss")))
    return [one for one in found if one[0] <= step]
