"""Decide why a job ends, and whether it is requeued."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from types import FrameType

from allranks.errors import EXIT_FAILED
from allranks.launch import restarts
from allranks.launch.slurm.job import IN_ALLOCATION
from allranks.launch.slurm.liveness import DriverRecord, examine_node, print_log_line, smaller_request, usable_without
from allranks.launch.supervisor import JobEnd, Supervisor
from allranks.nodes.slurm.answers import JobInfo, why_signalled
from allranks.nodes.slurm.commands import Slurm
from allranks.planning.records import LaunchPlan
from allranks.rundir.paths import RunDir
from allranks.spec import RunSpec
from allranks.spec.records import ClusterSpec

POLL_S = 0.2
LIMIT_S = 30.0  # between two questions for the job's time limit
SILENT_S = 120.0  # slurmctld is not asked for nodes after it gave no answer
REQUEUED_S = 60.0  # from the request to the end of this process
REQUEUE_REASONS = {"time_limit": "the time limit is near", "preempted": "the job was preempted"}


class StopRequested(Exception):
    """The job must end before its ranks were started."""


class StopAndRequeue:
    """Takes the signals of one start of a job, asks Slurm for their cause, and returns the job to the queue.

    Args:
        cluster: of the spec as the user wrote it.
        record: written before the job is requeued.
    """

    def __init__(
        self, run: RunDir, slurm: Slurm, record: DriverRecord, *, job: str, restart: int, cluster: ClusterSpec
    ) -> None:
        self._run, self._slurm, self._record = run, slurm, record
        self._job, self._restart, self._cluster, self._signal_s = job, restart, cluster, cluster.slurm.signal_s
        self._signalled = ""  # name of the signal that was not looked into yet
        self._checkpoint = False  # requested, and not forwarded yet
        self._limit_at: float | None = None
        self._limit_read_at = self._silent_until = float("-inf")
        self.why = ""
        """Why the job is to end: one of `why_signalled`, or "request"."""

    def handle_signals(self) -> None:
        """Take SIGUSR1 and SIGTERM as requests to end the job, SIGURG (which is ignored before and after) as one for a
        checkpoint. The handlers only set flags."""
        signal.signal(signal.SIGUSR1, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGURG, self._on_checkpoint_signal)

    def _on_checkpoint_signal(self, number: int, frame: FrameType | None) -> None:
        self._checkpoint = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = signal.Signals(number).name

    def check_signal(self, supervisor: Supervisor | None = None) -> None:
        """Ask Slurm why it sent a signal, and forward the stop request. Without an answer, the job is not requeued."""
        name, self._signalled = self._signalled, ""
        if name and not self.why:
            why = self.ask_slurm_for_cause()
            self.why = why if why != "unknown" else "request"
            print_log_line(f"{name}: {self.reason_text}")
        if supervisor is not None and self._checkpoint:
            self._checkpoint = False
            supervisor.request_checkpoint()
        if self.why and supervisor is not None:
            supervisor.stop(self.reason_text)

    def check_time_limit(self, needed_s: float) -> None:
        """Stop the ranks before Slurm's signal if they need more time for their checkpoint than it gives them."""
        if self.why or needed_s <= self._signal_s or os.environ.get(IN_ALLOCATION):
            return
        if time.monotonic() - self._limit_read_at > LIMIT_S:  # an administrator may change it
            self._limit_read_at = time.monotonic()
            answer = self._slurm.try_job(self._job)
            self._limit_at = answer.must_end_at if isinstance(answer, JobInfo) else None
        if self._limit_at is not None and self._limit_at - time.time() <= needed_s:
            self.why = "time_limit"
            print_log_line(
                f"{self.reason_text}: the ranks need up to {needed_s:.0f} s for the checkpoint, more than "
                f"cluster.slurm.signal_s ({self._signal_s})"
            )

    def raise_if_stop_requested(self) -> None:
        """Raise `StopRequested` where a signal came or the run was cancelled."""
        self.check_signal()
        if self._run.cancelled.exists() and not self.why:
            self.why = "cancelled"
        if self.why:
            raise StopRequested

    def ask_slurm_for_cause(self) -> str:
        """Return why Slurm ends the job; ``unknown`` if it gives no reason or does not answer."""
        if self._run.cancelled.exists() or os.environ.get(IN_ALLOCATION):
            return "cancelled"
        answer = self._slurm.try_job(self._job)
        info = answer if isinstance(answer, JobInfo) else None
        return why_signalled(info, time.time(), self._signal_s)

    @property
    def reason_text(self) -> str:
        """Describe why the job ends."""
        known = {
            **REQUEUE_REASONS,
            "cancelled": "the job was cancelled",
            "node_fail": "Slurm ended the job because a node failed",
        }
        return known.get(self.why, "a signal requested the end, and Slurm reports no time limit or preemption")

    def requeue(
        self,
        spec: RunSpec,
        plan: LaunchPlan,
        attempt: int,
        end: JobEnd | None = None,
        *,
        stopped: bool,
        lost: Mapping[str, str] = {},
    ) -> str:
        """Requeue a job that is to end for a reason that passes, or that lost nodes.

        Args:
            spec: of this start of the job; it may exclude more nodes than the user did.
            end: how the agents ended; None if they were not started.
            stopped: whether the ranks wrote a checkpoint and ended as they were asked to, or were not started.
            lost: nodes that are lost, with the evidence.

        Returns:
            Why it was not requeued; empty where it is not wanted.

        Raises:
            SystemExit: the job was requeued, and Slurm has told this process to exit.
        """
        if self.why == "node_fail" and self.requeued_by_slurm():  # the job waits in the queue, and is not over
            print_log_line(f"{self.reason_text}, and has requeued it")
            self._record.write("requeued", attempt=attempt)
            raise SystemExit(EXIT_FAILED)
        end = end or JobEnd()
        unstarted = end.terminated and not end.ends
        # A preempted training whose ranks could not save may start again; a user's own program decides itself.
        may_start_again = self.why == "preempted" and plan.batch is not None
        if ((stopped or unstarted) and self.why in REQUEUE_REASONS) or (end.terminated and may_start_again):
            return self._requeue(spec, plan, attempt, REQUEUE_REASONS[self.why], {})
        return self._requeue(spec, plan, attempt, f"without {', '.join(lost)}", lost) if lost else ""

    def lost_nodes(self, hosts: Iterable[str]) -> dict[str, str]:
        """Return which of these nodes are lost, with the evidence; an agent killed on a healthy node does not count."""
        lost: dict[str, str] = {}
        for host in hosts:
            if time.monotonic() < self._silent_until:  # each question would wait as long again
                print_log_line(f"node {host}: unknown: slurmctld did not answer a moment ago")
                continue
            verdict = examine_node(self._slurm, host)
            print_log_line(f"node {host}: {verdict.text}")
            if not verdict.answered:
                self._silent_until = time.monotonic() + SILENT_S
            if verdict.lost:
                lost[host] = verdict.text
        return lost

    def _requeue(self, spec: RunSpec, plan: LaunchPlan, attempt: int, why: str, lost: Mapping[str, str]) -> str:
        """Requeue the job without its lost nodes and exit; return why not, empty if no requeue is wanted."""
        if os.environ.get(IN_ALLOCATION) or self._run.cancelled.exists():
            return ""
        limit = spec.cluster.slurm.max_requeues
        if self._restart >= limit:
            return self._not_requeued(f"cluster.slurm.max_requeues ({limit}) is reached") if limit else ""
        excluded = [*spec.cluster.slurm.exclude, *lost]
        usable = usable_without(self._slurm, self._cluster, excluded) if lost else 0
        if lost and usable < len(plan.nodes):
            return self._not_requeued(
                f"without {', '.join(lost)} the partition has fewer than {len(plan.nodes)} usable nodes"
            )
        print_log_line(f"{why}: requeueing the job")
        self._record.write("requeued", attempt=attempt)
        self._signalled = ""
        refused = self._slurm.try_requeue(self._job)
        if refused and not self.requeued_by_slurm():
            return self._not_requeued(f"Slurm refused the requeue: {refused}")
        if lost:
            restarts.record_requeue(self._run, attempt, lost, own_program=plan.batch is None)
        if lost and (kept := self._slurm.try_exclude(self._job, excluded, *smaller_request(self._cluster, usable))):
            print_log_line(f"Slurm does not exclude {', '.join(excluded)} from the next start: {kept}")
        deadline = time.monotonic() + REQUEUED_S
        while time.monotonic() < deadline:
            if self._signalled == "SIGTERM":  # Slurm ends this start; the nodes are free only once this process is gone
                raise SystemExit(EXIT_FAILED)
            time.sleep(POLL_S)
        return self._not_requeued(
            f"Slurm accepted the requeue, but did not end this start of the job within {REQUEUED_S:.0f} s"
        )

    def requeued_by_slurm(self) -> bool:
        """Return whether the job is in the queue already: Slurm requeues a job itself once its node is DOWN."""
        return (self._slurm.restarts(self._job) or 0) > self._restart

    @staticmethod
    def _not_requeued(why: str) -> str:
        text = f"the job was not requeued: {why}"
        print_log_line(text)
        return text
