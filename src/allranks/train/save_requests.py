"""Decide when a checkpoint is due that no fixed number of steps decides: on request, after a time, or at the best
interval for the cost of a save. Pure, except for the clock and the heartbeat page, over which requests come.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from allranks.rundir.events import WARMUP_STEPS
from allranks.rundir.heartbeat import HeartbeatWriter, heartbeat
from allranks.spec.records import EVERY_AUTO, CheckpointSpec

SCHEDULED, REQUESTED = 1, 2
"""What kind of save is wanted: by the spec's interval and in its mode; by a user, always a full checkpoint."""
SHORTEST_S = 60.0
"""The shortest interval that ``auto`` chooses: a save also loads the disk, and removes older checkpoints."""
RECENT_SAVES = 5


def best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return the seconds between checkpoints for which saves and repeated steps together cost least, to first order:
    the square root of twice the cost of a save times the mean time between failures.

    Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM
    17 (9), 1974; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22 (3), 2006, whose further terms matter where a save takes a large part of that time.
    """
    return max(SHORTEST_S, math.sqrt(2.0 * cost_s * mtbf_s))


class SaveRequests:
    """Saves that rank 0 wants, and that all ranks have agreed on with the reduction of a step's metrics.

    Only rank 0 calls `wanted`: a single rank decides, so that one request is one save, also if the clocks of the ranks
    differ. Under ``every: auto`` the first save after the warm-up measures what a save costs.

    Args:
        nodes: of the run, on which its mean time between failures depends.
    """

    def __init__(
        self,
        spec: CheckpointSpec,
        nodes: int,
        page: HeartbeatWriter = heartbeat,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._page, self._clock = page, clock
        self.mtbf_h = spec.failure_interval_h(nodes)
        self._auto = spec.mode != "none" and spec.every == EVERY_AUTO
        self.every_s = spec.every_s if spec.mode != "none" else None
        """Seconds between saves; None if steps decide, or the cost of a save is not measured yet."""
        self._costs: deque[float] = deque(maxlen=RECENT_SAVES)
        self._steps, self._saved_at, self._waiting = 0, clock(), False
        self.agreed = 0
        """The kind of save that all ranks do after the current step; 0: none."""

    @property
    def cost_s(self) -> float:
        """How long a save stops the training, the median of the last ones."""
        return median(self._costs)

    def wanted(self) -> int:
        """Return which kind of save rank 0 wants after the current step; 0: none. Call once per step."""
        self._steps += 1
        if self._page.take_checkpoint_request():
            return REQUESTED
        late = self.every_s is not None and self._clock() - self._saved_at >= self.every_s
        if self._waiting or not (late or (self._auto and not self._costs and self._steps >= WARMUP_STEPS)):
            return 0
        self._waiting = True
        return SCHEDULED

    def take(self) -> int:
        """Return what was agreed, and forget it."""
        self._waiting = False
        agreed, self.agreed = self.agreed, 0
        return agreed

    def saved(self, cost_s: float) -> bool:
        """Take note that a save has stopped the training for so long; return whether that changed the interval by more
        than a tenth."""
        self._saved_at = self._clock()
        self._costs.append(cost_s)
        if not self._auto:
            return False
        before, self.every_s = self.every_s, best_interval_s(self.cost_s, 3600.0 * self.mtbf_h)
        return before is None or abs(self.every_s / before - 1.0) > 0.1
