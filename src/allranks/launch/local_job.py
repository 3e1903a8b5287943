"""Run one agent process on this machine, and supervise it over a control channel."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from typing import IO

import msgspec
import psutil

from allranks.launch import process_guard
from allranks.launch.channel import ChannelServer
from allranks.launch.channel_protocol import CHANNEL_VARIABLE, LAUNCHER_PID_VARIABLE
from allranks.launch.failure_attribution import signal_name
from allranks.launch.monitor.hang_rules import HangAnalyzer
from allranks.launch.rendezvous import hosts_of_ranks, remove_leftover_stores
from allranks.launch.stop_limit import StopLimit
from allranks.launch.supervisor import JobEnd, LaunchedJob, LostAgent, Supervisor
from allranks.planning.records import LaunchPlan
from allranks.rundir.files import open_append, write_json
from allranks.rundir.paths import RunDir

STOPPED_S = 10.0  # an agent that a signal has stopped is ended after this time, because only it can end its ranks
ENDED_S = 15.0  # from the last report of an agent to the end of its process
ORPHANS_S = 30.0  # for ranks whose agent was killed: at least; for a user's own program, beyond its grace period
INTERRUPT_GRACE_S = 3.0  # Ctrl-C while there is nothing to save: every rank is gone within 5 s


class LocalJob(LaunchedJob):
    """One agent and its ranks on this machine."""

    interrupt_grace_s = INTERRUPT_GRACE_S

    def __init__(
        self, run: RunDir, plan: LaunchPlan, attempt: int, env: dict[str, str], telemetry_s: float, python: list[str]
    ) -> None:
        self._run, self._plan, self._attempt = run, plan, attempt
        host = plan.nodes[0].host or "localhost"
        log = run.agent_log(attempt, host)
        judge = HangAnalyzer(run, attempt, hosts_of_ranks(plan, None, host), 1)
        self._supervisor = Supervisor(1, judge, needs_store=plan.batch is None)
        self._hub = ChannelServer(self._supervisor, 1)
        self._hub.start()
        options = ["--attempt", str(attempt), "--telemetry-s", str(telemetry_s)]
        # With Apptainer the agent's parent is another process.
        parent = {} if python[0] == "apptainer" else {LAUNCHER_PID_VARIABLE: str(os.getpid())}
        endpoint = msgspec.json.encode(self._hub.endpoint).decode()
        self._log: IO[bytes] = os.fdopen(open_append(log), "ab")
        # A session of its own: Ctrl-C in the terminal reaches only the launcher, which then ends the ranks in order.
        self._process = subprocess.Popen(
            [*python, "-m", "allranks.launch.agent", str(run.root), *options],
            env={**os.environ, **env, **parent, CHANNEL_VARIABLE: endpoint},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        write_json(run.channel(attempt), msgspec.to_builtins(self._hub.endpoint), private=True)
        self._stopped_since: float | None = None
        self._ended_since: float | None = None
        self._orphans: StopLimit | None = None
        self._lost: LostAgent | None = None
        self.label = f"agent pid {self._process.pid}"

    def poll(self) -> int | None:
        """Return the exit code once the agent has ended, else None."""
        code = self._process.poll()
        if code is None:
            self._end_stopped_agent()
            return None
        if code < 0 and not self._orphans_have_ended():
            return None
        if code < 0 and self._lost is None and not self._supervisor.ordered_end:
            name = signal_name(code)
            self._lost = LostAgent(
                node=0, host="this machine", why=f"process {self._process.pid} was killed by {name}", node_lost=False
            )
        if code < 0:
            remove_leftover_stores(self._process.pid)
        self._log.close()
        self._hub.close()
        self._run.channel(self._attempt).unlink(missing_ok=True)
        return code

    def end(self) -> JobEnd:
        """Return how agent and ranks ended."""
        found = self._supervisor.result()
        return msgspec.structs.replace(found, lost=[self._lost]) if self._lost else found

    def _orphans_have_ended(self) -> bool:
        """Wait for the ranks of a killed agent: the kernel sent them the stop signal, and they write a checkpoint."""
        self._orphans = self._orphans or StopLimit(self._run, self._plan, ORPHANS_S + (self._plan.grace_s or 0.0))
        left = rank_processes(self._run)
        if self._orphans.expired(time.monotonic()):
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
        return not left

    def _end_stopped_agent(self) -> None:
        """Kill an agent that a signal has stopped, or that does not exit after it reported the end of its ranks."""
        now = time.monotonic()
        stopped = False
        with suppress(psutil.Error):  # by a signal or a debugger
            status = psutil.Process(self._process.pid).status()
            stopped = status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        self._stopped_since = (self._stopped_since or now) if stopped else None
        ended = self._supervisor.all_ended
        self._ended_since = (self._ended_since or now) if ended else None
        too_long = (self._stopped_since is not None and now - self._stopped_since > STOPPED_S) or (
            self._ended_since is not None and now - self._ended_since > ENDED_S
        )
        if not too_long:
            return
        if not ended:
            why = (
                f"process {self._process.pid} was stopped by a signal (SIGSTOP or SIGTSTP) for {STOPPED_S:.0f} s, and "
                "was killed"
            )
            self._lost = LostAgent(node=0, host="this machine", why=why, node_lost=False)
        self._process.kill()  # the kernel then asks its ranks for a checkpoint

    def request_stop(self, reason: str) -> None:
        """Stop the ranks after a checkpoint."""
        self._supervisor.stop(reason)

    def kill(self) -> None:
        """Kill all ranks."""
        self._supervisor.kill("the launcher stopped the ranks")
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
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "allranks.launch.rank" in words and str(run.root) in words:
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found
