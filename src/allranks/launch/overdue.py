"""An attempt that is over by its run folder, while Slurm still holds its job: the first node is cut off, or lost.

The job's script runs on its first node. Where that node is cut off, Slurm hears of the end only once it gives the node up,
which takes minutes and then starts the job anew; where it is lost, nobody draws the conclusion that the run folder shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from allranks.rundir import RunDir, read_json

ENDED, LOST, CLEANING = "ended", "lost", "cleaning"
LIMIT_S = {
    ENDED: 30.0,  # from the driver's last word to Slurm's
    LOST: 90.0,  # from the first failure on record to the driver's last word, which may be seen a minute late on NFS
    CLEANING: 120.0,  # a node that does not answer keeps a job in it until Slurm gives the node up
}


class Overdue:
    """Looks at what the run folder says of the newest start of a job, and for how long it has said so."""

    def __init__(self, run: RunDir, job: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._job, self._clock = run, job, clock
        self._seen: tuple[object, ...] = ()
        self._since = clock()

    def look(self, state: str) -> str:
        """What lasts for longer than it may; empty while nothing does.

        Args:
            state: squeue's word for the job.

        Returns:
            `ENDED`: the driver has said its last word, `LOST`: it has not, though ranks have failed, `CLEANING`: Slurm
            waits for nodes, and for nothing else.
        """
        driver = self.driver()
        seen = (sign_of(self._run, driver, state), state, driver.get("restart"))
        if seen != self._seen:
            self._seen, self._since = seen, self._clock()
        return seen[0] if seen[0] and self._clock() - self._since > LIMIT_S[seen[0]] else ""

    def driver(self) -> dict[str, Any]:
        """What the driver of this job has written last; empty where that is of another job."""
        found = read_json(self._run.driver) or {}
        return found if found.get("job") == self._job else {}


def sign_of(run: RunDir, driver: Mapping[str, Any], state: str) -> str:
    """What there is to be seen now."""
    said, attempt = driver.get("state"), driver.get("attempt", 0)
    ended = said in ("done", "stopped", "failed")
    if state == "COMPLETING":  # or on its way back to the queue
        return CLEANING if ended or run.cancelled.exists() else ""
    if state == "PENDING":  # Slurm gave the node up, and would begin anew what was found to hang
        return ENDED if said == "failed" and run.hang_report(attempt).exists() else ""
    if ended:
        return ENDED
    return LOST if said == "running" and failed(run, attempt) else ""


def failed(run: RunDir, attempt: int) -> bool:
    """Whether ranks of an attempt have failed, as their agents say, or were found to stand still."""
    ends = [read_json(path) or {} for path in run.logs_of(attempt).glob("*.exit.json")]
    return run.hang_report(attempt).exists() or any(end.get("failed") or end.get("refused") for end in ends)
