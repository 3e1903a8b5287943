"""Run one agent process on this machine, and supervise it over a control channel."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from contextlib import suppress
from typing import IO, Any

import msgspec
import psutil

from allranks.launch import process_guard
from allranks.launch.channel_protocol import CHANNEL_VARIABLE, LAUNCHER_PID_VARIABLE
from allranks.launch.failure_attribution import signal_name
from allranks.launch.rendezvous import remove_leftover_stores
from allranks.launch.stop_limit import StopLimit
from allranks.launch.supervisor import JobEnd, LostAgent, SupervisedJob
from allranks.planning.records import LaunchPlan
from allranks.rundir.files import open_append
from allranks.rundir.paths import RunDir

STOPPED_S = 10.0  # an agent that a signal has stopped is ended after this time, because only it can end its ranks
ENDED_S = 15.0  # from the last report of an agent to the end of its process
ORPHANS_S = 30.0  # for ranks whose agent was killed: at least; for a user's own program, beyond its grace period
INTERRUPT_GRACE_S = 3.0  # Ctrl-C while there is nothing to save: every rank is gone within 5 s


class LocalJob(SupervisedJob):
    """One agent and its ranks on this machine."""

    interrupt_grace_s = INTERRUPT_GRACE_S

    def __init__(
        self, run: RunDir, plan: LaunchPlan, attempt: int, env: dict[str, str], command: list[str], **options: Any
    ) -> None:
        host = plan.nodes[0].host or "localhost"
        super().__init__(run, plan, attempt, None, host, **options)
        # With Apptainer the agent's parent is another process.
        parent = {} if command[0] == "apptainer" else {LAUNCHER_PID_VARIABLE: str(os.getpid())}
        endpoint = msgspec.json.encode(self._hub.endpoint).decode()
        self._log: IO[bytes] = os.fdopen(open_append(run.agent_log(attempt, host)), "ab")
        # A session of its own: Ctrl-C in the terminal reaches only the launcher, which then ends the ranks in order.
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **env, **parent, CHANNEL_VARIABLE: endpoint},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._stopped_since = self._ended_since = math.inf
        self._orphans: StopLimit | None = None
        self._lost = ""
        self.label = f"agent pid {self._process.pid}"

    def poll(self) -> int | None:
        code = self.poll_agent()
        if code is not None:
            self._close()
        return code

    def poll_agent(self) -> int | None:
        """Return None until the agent of this machine and its ranks have ended, then its exit code."""
        code = self._process.poll()
        if code is None:
            self._end_hanging_agent()
            return None
        if code < 0:
            if not self._orphans_have_ended():
                return None
            if not self._supervisor.orders.end:
                self._lost = self._lost or f"was killed by {signal_name(code)}"
            remove_leftover_stores(self._process.pid)
        self._log.close()
        return code

    def end(self) -> JobEnd:
        result = super().end()
        if not self._lost:
            return result
        lost = LostAgent(node=0, host="this machine", why=f"process {self._process.pid} {self._lost}")
        return msgspec.structs.replace(result, lost=[lost])

    def _orphans_have_ended(self) -> bool:
        """Wait for the ranks of a killed agent: the kernel sent them the stop signal, and they write a checkpoint."""
        self._orphans = self._orphans or StopLimit(self._run, self._plan, ORPHANS_S + (self._plan.grace_s or 0.0))
        left = rank_processes(self._run)
        if self._orphans.expired(time.monotonic()):
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
        return not left

    def _end_hanging_agent(self) -> None:
        """Kill an agent that a signal has stopped, or that does not exit after it reported the end of its ranks."""
        now, stopped = time.monotonic(), False
        with suppress(psutil.Error):  # by a signal or a debugger
            status = psutil.Process(self._process.pid).status()
            stopped = status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        self._stopped_since = min(self._stopped_since, now) if stopped else math.inf
        self._ended_since = min(self._ended_since, now) if self._supervisor.all_ended else math.inf
        if self._ended_since == math.inf and now - self._stopped_since > STOPPED_S:
            self._lost = f"was stopped by a signal (SIGSTOP or SIGTSTP) for {STOPPED_S:.0f} s, and was killed"
        if self._lost or now - self._ended_since > ENDED_S:
            self._process.kill()  # the kernel then asks its ranks for a checkpoint

    def kill(self) -> None:
        super().kill()
        self._signal(signal.SIGINT)

    def kill_all_processes(self) -> None:
        """Kill the agent if it does not exit after its ranks, and any remaining rank processes."""
        try:
            processes = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.Error:
            processes = []
        self._signal(signal.SIGKILL)
        for process in [*processes, *rank_processes(self._run)]:
            with suppress(psutil.Error):
                # the guard of the ranks ends what these have left behind, and then itself
                if process_guard.__file__ not in process.cmdline():
                    process.kill()

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)


def rank_processes(run: RunDir) -> list[psutil.Process]:
    """Return a run's rank processes on this machine."""
    processes = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "allranks.launch.rank" in words and str(run.root) in words:
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
    return processes
