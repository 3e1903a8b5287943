"""Find and end all processes of a run on one node, also those started by its ranks; do so when the agent is killed.

``python -I -S process_guard.py FD RUN_ID AGENT_PID GRACE_S`` waits until the other end of the pipe FD is closed,
which is when the agent has ended, however it did. It then ends what is left of the agent's ranks, whose process ids
it has read from the pipe: they have been sent SIGTERM by the kernel, and get GRACE_S for it. What is left of ranks
that have ended is killed at once. Standard library alone, so that it starts in some hundredths of a second and needs
no packages.

A process belongs to a run if its environment names the run and the agent: children inherit it, also through
``setsid`` and after their parent's end. Children that overwrite their environment are found by their rank's session.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

AGENT_PID_VARIABLE = "ALLRANKS_AGENT_PID"  # the parent of the ranks
RUN_ID_VARIABLE = "TORCHELASTIC_RUN_ID"
PROGRAM_VARIABLE = "ALLRANKS_PROGRAM"  # program and arguments of a rank that `allranks torchrun` starts, as JSON
POLL_S = 0.1
KILL_S = 10.0  # for the kernel to end what SIGKILL was sent to
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class ProcessGuard:
    """The guard of the processes of one agent, which outlives it if it must."""

    def __init__(self, run_id: str, grace_s: float) -> None:
        read, self._write = os.pipe()
        words = [str(read), run_id, str(os.getpid()), str(grace_s)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *words],
            stdin=subprocess.DEVNULL,
            pass_fds=[read],
            start_new_session=True,
        )
        os.close(read)

    def watch(self, ranks: Sequence[int]) -> None:
        """Tell the guard the processes of the ranks, each of which leads a session."""
        os.write(self._write, " ".join(["", *map(str, ranks), ""]).encode())

    def close(self) -> None:
        """Let the guard end the remaining processes, and itself."""
        os.close(self._write)
        try:
            self._process.wait(timeout=KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


def processes_of_run(run_id: str, agent_pid: int, sessions: Collection[int] = ()) -> set[int]:
    """Return the running processes of an agent's ranks on this machine.

    Args:
        sessions: further sessions whose members belong to the run.
    """
    marks = {f"{RUN_ID_VARIABLE}={run_id}".encode(), f"{AGENT_PID_VARIABLE}={agent_pid}".encode()}
    pids: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            session = int(fields[3])
            if fields[0] in "ZX":
                continue
            if session in sessions or marks <= set((entry / "environ").read_bytes().split(b"\0")):
                pids.add(int(entry.name))
        except OSError:  # it has ended, or is another user's
            continue
    return pids


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def guard(fd: int, run_id: str, agent_pid: int, grace_s: float) -> None:
    """Wait for the end of the agent, then of its ranks, and kill the remaining processes."""
    received = b""
    while data := os.read(fd, 4096):
        received += data
    ranks = {int(word) for word in received.split()}
    end = time.monotonic() + grace_s
    while left := processes_of_run(run_id, agent_pid, ranks):
        now = time.monotonic()
        if now > end + KILL_S:
            return
        if now > end or not ranks & left:
            end = min(end, now)
            for pid in left:
                send_signal(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def main() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    fd, run_id, agent_pid, grace_s = sys.argv[1:5]
    guard(int(fd), run_id, int(agent_pid), float(grace_s))


if __name__ == "__main__":
    main()
