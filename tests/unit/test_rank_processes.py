"""The processes of a node's ranks: how their ends are recorded, when they are signalled, and what is left of them. Real
processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from allranks.launch import rank_processes as processes
from allranks.launch.failure_attribution import RankEnd
from allranks.launch.process_guard import processes_of_run
from allranks.launch.rank_processes import RankProcesses, has_signal_handler, torchrun_environment
from allranks.rundir.heartbeat import HEARTBEAT_VARIABLE, HeartbeatPage, page_paths
from allranks.rundir.paths import RunDir

LIMIT_S = 40.0


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


class Node:
    """Ranks that run a program of the user's own, each by the real `allranks.launch.rank`."""

    def __init__(self, folder: Path, program: str, ranks: int) -> None:
        self.folder = folder
        (folder / "program.py").write_text(program)
        self.run = RunDir(folder / "run")
        self.run.root.mkdir()
        self.run.spec.write_text(yaml.safe_dump({"name": "t", "script": {"path": str(folder / "program.py")}}))
        self.pages = {rank: HeartbeatPage() for rank in range(ranks)}
        self.processes = RankProcesses("n1", self.pages)
        os.environ[HEARTBEAT_VARIABLE] = page_paths([self.pages[rank] for rank in range(ranks)])
        command = [sys.executable, "-u", "-m", "allranks.launch.rank", str(self.run.root), "1"]
        self.processes.start(
            command, {rank: torchrun_environment(rank, rank, ranks, 0, 1, ranks, "t.1") for rank in range(ranks)}
        )
        self.pids = self.processes.pids

    def ends(self) -> list[RankEnd]:
        until(lambda: len(self.processes.poll()) == len(self.pages))
        return self.processes.poll()

    def ready(self, count: int) -> None:
        """Wait for the files that programs make."""
        until(lambda: len(list(self.folder.glob("ready*"))) == count)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    started: list[Node] = []
    monkeypatch.setenv(HEARTBEAT_VARIABLE, "")

    def start(program: str, ranks: int = 1) -> Node:
        started.append(Node(tmp_path, program, ranks))
        return started[-1]

    yield start
    for one in started:
        one.processes.kill()
        one.processes.end_leftovers()


READY = "import os, pathlib, signal, subprocess, sys, time\nrank = os.environ['RANK']\n"
SAY = "pathlib.Path(f'ready{rank}').touch()\n"


def test_how_ranks_end_by_themselves_is_recorded(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    one = node(
        READY
        + "if rank == '1': os._exit(0)\n"
        + "if rank == '2': sys.exit(7)\n"
        + "if rank == '3': os.kill(os.getpid(), 9)\n"
        + "if rank == '4': raise ValueError('bad rows')\n",
        5,
    )
    assert not one.processes.all_ended
    good, early, code, killed, error = sorted(one.ends(), key=lambda end: end.rank)
    assert one.processes.all_ended and one.processes.pids == []
    assert (good.exitcode, good.done, good.failed, good.host) == (0, True, False, "n1")
    assert [good.pid, early.pid, code.pid, killed.pid, error.pid] == one.pids
    assert (early.exitcode, early.done, early.failed) == (0, False, True)
    assert (code.exitcode, code.failure, code.failed) == (7, "sys.exit: exit code 7", True)
    assert (killed.exitcode, killed.failure, killed.failed) == (-9, "", True)
    assert (error.exitcode, error.failure, error.failed) == (1, "ValueError: bad rows", True)
    assert not any(end.ended_by_agent for end in (good, early, code, killed, error))


@pytest.mark.parametrize(("how", "exitcode"), [("terminate", -signal.SIGTERM), ("kill", -signal.SIGKILL)])
def test_a_rank_that_the_agent_ends_has_not_failed_and_one_that_ended_before_keeps_its_end(
    node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, exitcode: int
) -> None:
    monkeypatch.chdir(tmp_path)
    ends = "if rank == '1': os._exit(5)\nif rank == '2': os.kill(os.getpid(), 9)\n"
    one = node(READY + ends + SAY + "time.sleep(600)\n", 3)
    one.ready(1)
    for pid in one.pids[1:]:
        # Ended and not waited for. A zombie is not enough: its other threads may still be exiting.
        until(lambda pid=pid: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))
    getattr(one.processes, how)()
    first, second, third = sorted(one.ends(), key=lambda end: end.rank)
    assert (first.exitcode, first.ended_by_agent, first.failed) == (exitcode, True, False)
    assert (second.exitcode, second.ended_by_agent, second.failed) == (5, False, True)
    assert (third.exitcode, third.ended_by_agent, third.failed) == (-signal.SIGKILL, False, True)


def test_a_request_to_stop_comes_once_and_only_after_the_handler_is_there(
    node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGUSR1 ends a process without a handler; the interpreter of a rank takes a while to install one."""
    monkeypatch.chdir(tmp_path)
    one = node(
        READY
        + SAY
        + "while not pathlib.Path('go').exists(): time.sleep(0.02)\n"
        + "asked = []\n"
        + "signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))\n"
        + "pathlib.Path('installed').touch()\n"
        + "while not pathlib.Path('end').exists(): time.sleep(0.02)\n"
        + "pathlib.Path('asked').write_text(str(len(asked)))\n"
    )
    for _ in range(20):  # from the first moment of the process on
        one.processes.request_stop()
        time.sleep(0.01)
    one.ready(1)
    assert not has_signal_handler(one.pids[0], signal.SIGUSR1)
    one.processes.request_stop()
    (tmp_path / "go").touch()
    until((tmp_path / "installed").exists)
    assert has_signal_handler(one.pids[0], signal.SIGUSR1)
    for _ in range(5):
        one.processes.request_stop()
        time.sleep(0.05)
    (tmp_path / "end").touch()
    (end,) = one.ends()
    assert (end.exitcode, end.done) == (0, True)
    assert (tmp_path / "asked").read_text() == "1"


LEAVES = (
    READY
    + (
        "sleep = [sys.executable, '-c', 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "time.sleep(600)']\n"
    )
    + (
        "left = [subprocess.Popen(sleep), subprocess.Popen(sleep, process_group=0), subprocess.Popen(sleep, "
        "start_new_session=True)]\n"
    )
    + "pathlib.Path(f'left{rank}').write_text(' '.join(str(p.pid) for p in left))\n"
)


@pytest.mark.parametrize("end", ["", "os._exit(3)\n", "time.sleep(600)\n"])
def test_what_a_rank_leaves_in_its_session_is_ended(
    node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Also a child with a process group of its own, as a shell with job control makes them, or with a session of its
    own. Others are left alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "LEFTOVER_GRACE_S", 0.3)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        one = node(LEAVES + end)
        until(lambda: (tmp_path / "left0").exists() and (tmp_path / "left0").read_text())
        left = [psutil.Process(int(pid)) for pid in (tmp_path / "left0").read_text().split()]
        if "sleep" in end:
            one.processes.kill()
        one.ends()
        began = time.monotonic()
        one.processes.end_leftovers()
        assert time.monotonic() - began >= 0.3  # they may end by themselves
        assert psutil.wait_procs(left, timeout=10)[1] == []
        assert processes_of_run("t.1", os.getpid(), one.pids) == set()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
