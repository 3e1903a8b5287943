"""The local launcher: one agent process on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import IO

import psutil

from allranks.rundir import RunDir


class LocalJob:
    """An agent and its ranks on this machine."""

    def __init__(self, run: RunDir, attempt: int, host: str, env: dict[str, str], telemetry_s: float) -> None:
        log = run.agent_log(attempt, host)
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "allranks.launch.agent",
            str(run.root),
            "--attempt",
            str(attempt),
            "--telemetry-s",
            str(telemetry_s),
        ]
        self._log: IO[bytes] = log.open("ab")
        # A session of its own: Ctrl-C in the terminal reaches only the launcher, which then ends the ranks in order.
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.label = f"agent pid {self._process.pid}"

    def poll(self) -> int | None:
        """The exit code once all ranks have ended, else None."""
        code = self._process.poll()
        if code is not None:
            self._log.close()
        return code

    def news(self) -> str | None:
        """A local job has no queue to wait in."""
        return None

    def end_reason(self) -> str:
        """There is no scheduler to ask."""
        return "unknown"

    def ask_stop(self) -> None:
        """Ask the ranks for a clean stop at the next step edge."""
        self._signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End every rank now."""
        try:
            processes = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        self._signal(signal.SIGINT)
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def kill_agent(self) -> None:
        """End the agent itself, should it not end by itself once its ranks are gone."""
        self.kill()
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)
