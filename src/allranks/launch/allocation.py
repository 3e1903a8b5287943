"""Inside an allocation (``salloc``, or a batch script of one's own): the driver runs here, and no new job is submitted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from allranks.rundir import RunDir

IN_ALLOCATION = "ALLRANKS_IN_ALLOCATION"


def inside() -> bool:
    """True in the shell of an allocation; in a task of srun the nodes are somebody else's to hand out."""
    return "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ


class AllocationJob:
    """A driver in the foreground of an allocation, which outlives it."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._log = (run.logs / "slurm.log").open("ab")
        self._driver = subprocess.Popen(
            [sys.executable, "-m", "allranks.launch.driver", str(run.root)],
            env={**os.environ, IN_ALLOCATION: "1"},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._told = False
        self.label = f"allocation {os.environ['SLURM_JOB_ID']}"

    def poll(self) -> int | None:
        """The driver's exit code, or None while it runs."""
        code = self._driver.poll()
        if code is not None:
            self._log.close()
        return code

    def news(self) -> str | None:
        """Once: where it runs."""
        told, self._told = self._told, True
        return None if told else f"running in {self.label} on {os.environ.get('SLURM_JOB_NODELIST', '?')}"

    def ask_stop(self) -> None:
        """Ask the ranks for a clean stop."""
        if self._driver.poll() is None:
            self._driver.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End the driver and its steps; the allocation stays."""
        if self._driver.poll() is None:
            os.killpg(self._driver.pid, signal.SIGTERM)

    def kill_agent(self) -> None:
        """The driver's srun kills its tasks when it is ended."""
        if self._driver.poll() is None:
            os.killpg(self._driver.pid, signal.SIGKILL)

    def end_reason(self) -> str:
        """The allocation itself goes on."""
        return "unknown"
