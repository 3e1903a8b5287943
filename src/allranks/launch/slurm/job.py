"""Follow a job of Slurm through the queue to its end, or a driver in the foreground of an allocation."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable

import msgspec

from allranks.errors import EnvironmentNotAble
from allranks.launch.restarts import read_restarts
from allranks.launch.slurm import liveness
from allranks.launch.slurm.liveness import DriverLiveness
from allranks.launch.supervisor import JobEnd, LaunchedJob, job_end_of
from allranks.nodes.records import PreflightReport
from allranks.nodes.slurm.commands import NO_ANSWER, JobState, Slurm
from allranks.rundir.files import read_json, write_json
from allranks.rundir.paths import RunDir

POLL_INTERVAL_S = 1.0
CANCEL_TIMEOUT_S = 10.0
UNANSWERED_S = 60.0  # calls that fail for so long are reported to the user
CANCEL_COMPLETES_S = 90.0  # from scancel to the end of the job as squeue shows it; KillWait is 30 s by default
NOT_STARTED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")


class SlurmJob(LaunchedJob):
    """A job in the queue or running. Its driver on the first node starts the agents."""

    interrupt_grace_s = 20.0  # a signal through Slurm takes a few seconds

    def __init__(self, run: RunDir, slurm: Slurm, job: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._slurm, self._job, self._clock = run, slurm, job, clock
        self._looked = 0.0
        self._state = JobState(state="PENDING")
        self._answered_at = clock()
        self._unanswered = ""
        self._told = ""
        self._killed_at: float | None = None
        self._overdue = DriverLiveness(run, job)
        self._notes: list[str] = []
        self._noted = ""
        self._decided = len(read_restarts(run))
        self._examined = False
        self.label = f"Slurm job {job}"

    @classmethod
    def submit(cls, run: RunDir, slurm: Slurm) -> SlurmJob:
        """Submit ``job.sbatch`` to Slurm.

        Raises:
            RequestError: Slurm refuses it.
        """
        job = slurm.submit(run.sbatch)
        write_json(run.job, {"job": job, "slurm": slurm.label})
        return cls(run, slurm, job)

    def poll(self) -> int | None:
        now = self._clock()
        if now - self._looked < POLL_INTERVAL_S:
            return None
        self._looked = now
        if (note := str(self._overdue.driver().get("note", self._noted))) != self._noted:
            self._noted = note
            self._notes.append(f"note     {note}")
        answer = self._slurm.state(self._job)
        if answer.state == NO_ANSWER:  # slurmctld restarts, or is busy: the job does not depend on it
            self._unanswered = answer.reason
        else:
            self._state, self._answered_at, self._unanswered = answer, now, ""
        if self._killed_at is not None and now - self._killed_at > CANCEL_COMPLETES_S:
            return 1
        if self._state.alive and not self._given_up():
            return None
        return self._code()

    def _code(self) -> int:
        driver = self._overdue.driver()
        if driver.get("state") in ("done", "stopped"):
            return 0
        if driver.get("state") == "cancelled":
            return int(driver.get("exit_code", 1))
        return 1

    def _given_up(self) -> bool:
        """Return whether to stop waiting for the job although Slurm has not seen its end."""
        sign = self._overdue.look(self._state.state)
        try:
            return bool(sign) and liveness.handle_dead_driver(
                sign, self._run, self._slurm, self._job, self._state, self._overdue.driver()
            )
        except EnvironmentNotAble as error:
            self._unanswered = str(error)
            return False

    def news(self) -> str | None:
        if not self._examined and self._state.state != "PENDING":
            self._read_preflight()
        if not self._notes and self._run.restarts.exists():
            decided = read_restarts(self._run)[self._decided :]
            self._decided += len(decided)
            self._notes += [line for one in decided for line in one.lines]
        if self._notes:
            return self._notes.pop(0)
        text = self._text()
        if text is None or text == self._told:
            return None
        self._told = text
        return text

    def _read_preflight(self) -> None:
        """Take what the driver found on the nodes and what does not prevent the run, once it has examined them."""
        from allranks.nodes.preflight.runner import failure_lines  # with all checks, and most commands follow no job

        try:
            reports = msgspec.convert(read_json(self._run.preflight), list[PreflightReport])
        except msgspec.ValidationError:  # none yet
            return
        nodes = [report for report in reports if any(check.name == "proj" for check in report.checks)]
        if nodes:  # else it is still the report on the machine of the command
            self._examined = True
            self._notes += [f"note     {line}" for line in failure_lines([one for one in nodes if one.may_run])]

    def _text(self) -> str | None:
        state = self._state
        if self._unanswered and self._clock() - self._answered_at > UNANSWERED_S:
            return (
                f"job {self._job}: Slurm has not answered for {UNANSWERED_S:.0f} s ({self._unanswered}); still "
                "following the run"
            )
        return describe_state(self._job, state)

    def end_reason(self) -> str:
        try:
            return self._slurm.end_reason(self._job)
        except EnvironmentNotAble as error:
            return f"unknown ({error})"

    def end(self) -> JobEnd | None:
        return job_end_of(self._overdue.driver())

    def request_stop(self, reason: str) -> None:
        """Stop the ranks after a checkpoint; the job is then not requeued. A job that has not started is cancelled."""
        if self._not_started():
            self.kill()
            return
        self._mark_cancelled()
        self._cancel("--signal=USR1", "--batch")

    def kill(self) -> None:
        """Cancel the job."""
        self._mark_cancelled()
        self._killed_at = self._killed_at or self._clock()
        self._cancel()

    def _not_started(self) -> bool:
        state = self._slurm.state(self._job).state
        return (self._state.state if state == NO_ANSWER else state) in NOT_STARTED

    def _mark_cancelled(self) -> None:
        try:
            self._run.cancelled.touch()
        except OSError as error:
            self._notes.append(f"{self._run.cancelled} cannot be written: {error.strerror}")

    def _cancel(self, *options: str) -> None:
        try:
            self._slurm.cancel(self._job, *options, timeout_s=CANCEL_TIMEOUT_S)
        except EnvironmentNotAble as error:
            self._notes.append(f"could not signal job {self._job}: {error}. Cancel it by hand: scancel {self._job}")


def describe_state(job: str, state: JobState) -> str | None:
    """Return the state of a job in the queue as a line for the user; None if Slurm does not know the job."""
    if state.state == "PENDING":
        when = f", estimated start {state.start}" if state.start not in ("", "N/A") else ""
        reason = state.reason if state.reason not in ("", "None") else "Slurm has not said why yet"
        return f"job {job} is pending: {reason}{when}"
    if state.state == "RUNNING":
        return f"job {job} is running on {state.nodes}"
    return None if state.state == "GONE" else f"job {job} is {state.state}"


IN_ALLOCATION = "ALLRANKS_IN_ALLOCATION"


class AllocationJob(LaunchedJob):
    """A driver in the foreground of an allocation that continues after it.

    Args:
        python: the command of the Python that runs it.
    """

    interrupt_grace_s = 15.0  # srun and the other nodes take a few seconds

    def __init__(self, run: RunDir, python: list[str]) -> None:
        self._run = run
        self._log = (run.logs / "slurm.log").open("ab")
        self._driver = subprocess.Popen(
            [*python, "-m", "allranks.launch.driver", str(run.root)],
            env={**os.environ, IN_ALLOCATION: "1"},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._told = False
        self.label = f"allocation {os.environ['SLURM_JOB_ID']}"

    def poll(self) -> int | None:
        code = self._driver.poll()
        if code is not None:
            self._log.close()
        return code

    def news(self) -> str | None:
        already_reported, self._told = self._told, True
        return None if already_reported else f"running in {self.label} on {os.environ.get('SLURM_JOB_NODELIST', '?')}"

    def request_stop(self, reason: str) -> None:
        """Stop the ranks after a checkpoint."""
        if self._driver.poll() is None:
            self._driver.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Kill the driver and its job steps; the allocation stays."""
        if self._driver.poll() is None:
            os.killpg(self._driver.pid, signal.SIGTERM)

    def kill_all_processes(self) -> None:
        """Kill the driver; its srun then kills its tasks."""
        if self._driver.poll() is None:
            os.killpg(self._driver.pid, signal.SIGKILL)

    def end(self) -> JobEnd | None:
        return job_end_of(read_json(self._run.driver))
