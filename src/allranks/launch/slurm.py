"""The Slurm launcher: submit the batch script, and see the job through the queue to its end."""

from __future__ import annotations

import time

from allranks.launch import giveup
from allranks.launch.overdue import Overdue
from allranks.rundir import RunDir, write_json
from allranks.slurm.commands import JobState, Slurm

LOOK_S = 1.0


class SlurmJob:
    """A job in the queue or running. Its driver on the first node starts the agents."""

    def __init__(self, run: RunDir, slurm: Slurm, job: str) -> None:
        self._run, self._slurm, self._job = run, slurm, job
        self._looked = 0.0
        self._state = JobState(state="PENDING")
        self._told = ""
        self._overdue = Overdue(run, job)
        self.label = f"Slurm job {job}"

    @classmethod
    def submit(cls, run: RunDir, slurm: Slurm) -> SlurmJob:
        """Hand ``job.sbatch`` to Slurm.

        Raises:
            RequestError: Slurm refuses it.
        """
        job = slurm.submit(run.sbatch)
        write_json(run.job, {"job": job, "slurm": slurm.label})
        return cls(run, slurm, job)

    def poll(self) -> int | None:
        """None while the job has anything to do; then 0 if its driver says that all went well."""
        if time.monotonic() - self._looked < LOOK_S:
            return None
        self._looked = time.monotonic()
        self._state = self._slurm.state(self._job)
        if self._state.alive and not self._given_up():
            return None
        return 0 if self._overdue.driver().get("state") in ("done", "stopped") else 1

    def _given_up(self) -> bool:
        """Whether the job is to be waited for no longer, though Slurm has not seen its end."""
        sign = self._overdue.look(self._state.state)
        return bool(sign) and giveup.act(sign, self._run, self._slurm, self._job, self._state, self._overdue.driver())

    def news(self) -> str | None:
        """What has changed in the queue since the last time, for a person."""
        state = self._state
        if state.state == "PENDING":
            when = f", estimated start {state.start}" if state.start not in ("", "N/A") else ""
            text = f"job {self._job} waits: {state.reason or 'no reason given'}{when}"
        elif state.state == "RUNNING":
            text = f"job {self._job} runs on {state.nodes}"
        elif state.state == "GONE":
            return None
        else:
            text = f"job {self._job} is {state.state}"
        if text == self._told:
            return None
        self._told = text
        return text

    def end_reason(self) -> str:
        """How Slurm says that the job ended."""
        return self._slurm.end_reason(self._job)

    def ask_stop(self) -> None:
        """Ask the ranks for a clean stop; the job then does not go back to the queue."""
        self._run.cancelled.touch()
        self._slurm.cancel(self._job, "--signal=USR1", "--batch")

    def kill(self) -> None:
        """End the job."""
        self._run.cancelled.touch()
        self._slurm.cancel(self._job)

    def kill_agent(self) -> None:
        """Nothing more than `kill` can be done to a job."""
