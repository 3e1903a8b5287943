"""Collect Python's garbage at chosen steps, the same on every rank.

Python collects whenever enough objects were made, on each rank at another step, and a full collection looks at all
objects of torch and transformers: 50 to 140 ms, for which the other ranks wait. Here, what exists after the first step
is never looked at again (`gc.freeze`), and only the objects since the last collection are, every `STEPS_BETWEEN` steps.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

STEPS_BETWEEN = 50


class StepGarbage:
    """Collect garbage after chosen steps, from the first call of `after_step` until `close`.

    Args:
        steps: how many there will be. In short trainings Python collects by itself: a full collection would not pay.
    """

    def __init__(self, steps: int) -> None:
        self._active, self._pays = False, steps > STEPS_BETWEEN

    def after_step(self, step: int) -> float | None:
        """Collect if it is due after `step` (from 0); return the seconds that it took, or None."""
        if not self._pays or (self._active and (step + 1) % STEPS_BETWEEN):
            return None
        began = time.perf_counter()
        if self._active:
            gc.collect(1)
        else:
            gc.collect()
            gc.freeze()
            gc.disable()
            self._active = True
        return time.perf_counter() - began

    @contextmanager
    def automatic(self) -> Iterator[None]:
        """Let Python collect by itself within this context: evaluations and saves make objects of any kind."""
        if not self._active:
            yield
            return
        gc.enable()
        yield
        gc.collect(1)
        gc.disable()

    def close(self) -> None:
        """Let Python collect by itself again."""
        if self._active:
            gc.enable()
            gc.unfreeze()
            self._active = False
