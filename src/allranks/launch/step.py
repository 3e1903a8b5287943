"""The step of a Slurm job in which the agents run: its srun ends in a bounded time, also where it cannot reach its tasks."""

from __future__ import annotations

import subprocess
import time

from allranks.errors import EXIT_FAILED

END_S = 15.0  # a node that can be reached kills its tasks within seconds


class AgentsStep:
    """srun with one agent a node."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self._end_asked: float | None = None

    def poll(self) -> int | None:
        """The exit code; None while there is anything to wait for."""
        if self._end_asked is not None and time.monotonic() - self._end_asked > END_S:
            self._process.kill()  # it waits for a node, or for Slurm's controller, that it does not reach
        code = self._process.poll()
        return EXIT_FAILED if code is not None and code < 0 else code

    def end(self) -> None:
        """Have srun kill its tasks. (scancel with KILL would end the batch script too.)"""
        if self._end_asked is None:
            self._end_asked = time.monotonic()
            self._process.terminate()
