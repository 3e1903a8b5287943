"""The guard that ends the processes of a killed agent's ranks. Real processes; a child of the test stands for the
agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from allranks.launch.process_guard import processes_of_run

AGENT = """
import os, subprocess, sys, time
from allranks.launch.process_guard import ProcessGuard
guard = ProcessGuard("run.1", float(sys.argv[1]))
env = {**os.environ, "TORCHELASTIC_RUN_ID": "run.1", "ALLRANKS_AGENT_PID": str(os.getpid())}
rank = subprocess.Popen([sys.executable, "-c", sys.argv[2]], env=env, start_new_session=True)
guard.watch([rank.pid])
print(rank.pid, guard._process.pid, flush=True)
time.sleep(600)
"""
RANK = """
import os, signal, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleep)                                    # in the session of its rank
subprocess.Popen(sleep, start_new_session=True)
subprocess.Popen(sleep, env={})                            # hides its run, but stays in the session
if os.fork() == 0 and os.fork() == 0:                      # a daemon, whose parents have ended
    os.setsid()
    time.sleep(600)
open("ready", "w").close()
while not os.path.exists("end"):
    time.sleep(0.02)
"""


@pytest.mark.parametrize(("grace_s", "rank_ends"), [(0.5, False), (600.0, True)])
def test_all_that_a_killed_agent_has_left_is_ended(tmp_path: Path, grace_s: float, rank_ends: bool) -> None:
    """A rank has its grace period; what is left of a rank that has ended has none. A process of nobody is left
    alone."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(grace_s), RANK], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    try:
        assert agent.stdout is not None
        rank, guard = (psutil.Process(int(word)) for word in agent.stdout.readline().split())
        deadline = time.monotonic() + 30
        while not (tmp_path / "ready").exists() or len(processes_of_run("run.1", agent.pid, [rank.pid])) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        members = [psutil.Process(pid) for pid in processes_of_run("run.1", agent.pid, [rank.pid])]
        assert rank in members and guard not in members
        os.kill(agent.pid, signal.SIGKILL)
        agent.wait()
        killed = time.monotonic()
        if rank_ends:
            time.sleep(0.5)
            assert all(process.is_running() for process in members)
            (tmp_path / "end").touch()
        _, alive = psutil.wait_procs([*members, guard], timeout=15)
        assert alive == []
        assert time.monotonic() - killed >= 0.5
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        agent.kill()
        agent.wait()
