"""The processes of ranks: how their ends are recorded, when they are signalled, what is left of them, what the guard
ends once the agent was killed; and what the log, the events and the page of a rank say of its end. Real processes."""

import gzip
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from allranks.launch import rank_processes as processes
from allranks.launch.failure_attribution import RankEnd, find_first_failure, is_peer_error
from allranks.launch.process_guard import processes_of_run
from allranks.launch.rank_processes import RankProcesses, has_signal_handler, torchrun_environment
from allranks.rundir.events import read_events
from allranks.rundir.heartbeat import HEARTBEAT_VARIABLE, Heartbeat, HeartbeatPage, page_paths
from allranks.rundir.paths import RunDir
from tests.dist.harness import until


class Node:
    """Ranks that run a program of the user's own, each by the real `allranks.launch.rank`."""

    def __init__(self, folder: Path, program: str, ranks: int) -> None:
        self.run, file = RunDir(folder / "run"), folder / "program.py"
        self.run.root.mkdir()
        file.write_text("import os, pathlib, signal, subprocess, sys, time\nrank = os.environ['RANK']\n" + program)
        self.run.spec.write_text(yaml.safe_dump({"name": "t", "script": {"path": str(file)}}))
        self.pages = {rank: HeartbeatPage() for rank in range(ranks)}
        self.processes = RankProcesses("n1", self.pages)
        os.environ[HEARTBEAT_VARIABLE] = page_paths(list(self.pages.values()))
        environments = {rank: torchrun_environment(rank, rank, ranks, 0, 1, ranks, "t.1", 0) for rank in range(ranks)}
        command = [sys.executable, "-u", "-m", "allranks.launch.rank", str(self.run.root), "1"]
        self.processes.start(command, environments)
        self.pids = self.processes.pids

    def ends(self) -> list[RankEnd]:
        """The ends of all ranks, in their order."""
        until(lambda: len(self.processes.poll()) == len(self.pages))
        return sorted(self.processes.poll(), key=lambda end: end.rank)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    started: list[Node] = []
    monkeypatch.setenv(HEARTBEAT_VARIABLE, "")
    monkeypatch.chdir(tmp_path)

    def start(program: str, ranks: int = 1) -> Node:
        started.append(Node(tmp_path, program, ranks))
        return started[-1]

    yield start
    for one in started:
        one.processes.kill()
        one.processes.end_leftovers()


Start = Callable[..., Node]


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is of no run, and must be left alone."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    yield process
    assert process.poll() is None
    process.kill()
    process.wait()


READY = "pathlib.Path('ready').touch()\n"


def test_how_ranks_end_by_themselves_is_recorded(node: Start) -> None:
    ways = ("os._exit(0)", "sys.exit(7)", "os.kill(os.getpid(), 9)", "raise ValueError('bad rows')")
    one = node("".join(f"if rank == '{rank}': {way}\n" for rank, way in enumerate(ways, 1)), 5)
    assert not one.processes.all_ended
    ends = one.ends()
    assert one.processes.all_ended and one.processes.pids == []
    assert [end.pid for end in ends] == one.pids
    assert [(end.exitcode, end.failure, end.failed, end.done) for end in ends] == [
        (0, "", False, True),
        (0, "", True, False),
        (7, "sys.exit: exit code 7", True, False),
        (-9, "", True, False),
        (1, "ValueError: bad rows", True, False),
    ]
    assert {(end.host, end.ended_by_agent) for end in ends} == {("n1", False)}


@pytest.mark.parametrize(("order", "exitcode"), [("terminate", -signal.SIGTERM), ("kill", -signal.SIGKILL)])
def test_only_ranks_that_ended_before_the_signal_failed(node: Start, tmp_path: Path, order: str, exitcode: int) -> None:
    ends = "if rank == '1': os._exit(5)\nif rank == '2': os.kill(os.getpid(), 9)\n"
    one = node(ends + READY + "time.sleep(600)\n", 3)
    until((tmp_path / "ready").exists)
    for pid in one.pids[1:]:
        # Ended and not waited for. A zombie is not enough: its other threads may still be exiting.
        until(lambda pid=pid: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))
    getattr(one.processes, order)()
    expected = [(exitcode, True, False), (5, False, True), (-signal.SIGKILL, False, True)]
    assert [(end.exitcode, end.ended_by_agent, end.failed) for end in one.ends()] == expected


def test_a_request_to_stop_comes_once_after_the_handler_is_there(node: Start, tmp_path: Path) -> None:
    """SIGUSR1 ends a process without a handler; the interpreter of a rank takes a while to install one."""
    one = node(
        READY
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
    until((tmp_path / "ready").exists)
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


LEAVES = """
ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
sessions = ({}, {"process_group": 0}, {"start_new_session": True})
left = [subprocess.Popen([sys.executable, "-c", ignores], **session) for session in sessions]
pathlib.Path("left").write_text(" ".join(str(process.pid) for process in left))
"""


@pytest.mark.parametrize("end", ["", "os._exit(3)\n", "time.sleep(600)\n"])
def test_what_a_rank_leaves_in_its_session_is_ended(
    node: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: object, end: str
) -> None:
    """Also a child with a process group of its own, as a shell with job control makes them, or with its own session."""
    monkeypatch.setattr(processes, "LEFTOVER_GRACE_S", 0.3)
    one, left = node(LEAVES + end), tmp_path / "left"
    until(lambda: left.exists() and left.read_text())
    remaining = [psutil.Process(int(pid)) for pid in left.read_text().split()]
    if "sleep" in end:
        one.processes.kill()
    one.ends()
    began = time.monotonic()
    one.processes.end_leftovers()
    assert time.monotonic() - began >= 0.3  # they may end by themselves
    assert psutil.wait_procs(remaining, timeout=10)[1] == []
    assert processes_of_run("t.1", os.getpid(), one.pids) == set()


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
def test_what_a_killed_agent_left_is_ended(tmp_path: Path, stranger: object, grace_s: float, rank_ends: bool) -> None:
    """A child of this test stands for the agent. A rank has its grace period; what an ended rank left has none."""
    command = [sys.executable, "-c", AGENT, str(grace_s), RANK]
    agent = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert agent.stdout is not None
        rank, guard = (psutil.Process(int(word)) for word in agent.stdout.readline().split())
        until((tmp_path / "ready").exists)
        until(lambda: len(processes_of_run("run.1", agent.pid, [rank.pid])) >= 5)
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
    finally:
        agent.kill()
        agent.wait()


START = "import allranks.launch.rank as r; r.EXIT_HANDLERS_S = r.EXIT_HANDLERS_FAILED_S = {}; r.HELD_S = 1.0; r.main()"


class Ended:
    """A rank that has run a program to its end."""

    def __init__(self, folder: Path, program: str, *, limit_s: float = 20.0, **script: Any) -> None:
        (folder / "program.py").write_text(program)
        self.run = RunDir(folder / "run")
        self.run.root.mkdir()
        script = script if "module" in script else {"path": str(folder / "program.py"), **script}
        self.run.spec.write_text(yaml.safe_dump({"name": "t", "script": script}))
        page = HeartbeatPage()
        env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", HEARTBEAT_VARIABLE: page_paths([page])}
        began = time.monotonic()
        command = [sys.executable, "-u", "-c", START.format(limit_s), str(self.run.root), "1"]
        self.code = subprocess.run(command, env=env, cwd=folder, timeout=60).returncode
        self.seconds = time.monotonic() - began
        self.log = self.run.rank_logs(1)[0].read_text()
        file = self.run.events_of(0)  # a device, where a test has put one there, has no end
        self.events = [e for e in read_events(file) if e["event"] != "start"] if not file.is_symlink() else []
        beat = page.read()
        assert beat is not None
        self.beat: Heartbeat = beat
        self.end = (self.code, beat.done, beat.failure)

    def event(self, kind: str, *fields: str) -> list[Any]:
        """The fields of the only event of this kind."""
        (event,) = [e for e in self.events if e["event"] == kind]
        return [event[field] for field in fields]


LAST_WORDS = "import atexit, sys\natexit.register(print, 'last words')\n"


@pytest.mark.parametrize("end", ["", "sys.exit()", "sys.exit(0)"])
def test_a_program_that_comes_to_its_end_says_done(tmp_path: Path, end: str) -> None:
    rank = Ended(tmp_path, LAST_WORDS + end)
    assert rank.end == (0, True, "")
    assert rank.event("phase", "name") == ["done"]
    assert [e["exit_code"] for e in rank.events if e["event"] == "exit"] == ([0] if end else [])
    assert "last words" in rank.log
    written = [p for p in rank.run.root.rglob("*") if p.is_file()]
    assert sorted(written) == sorted([rank.run.spec, rank.run.events_of(0), rank.run.rank_logs(1)[0]])


def test_the_text_of_sys_exit_is_printed_and_recorded(tmp_path: Path) -> None:
    rank = Ended(tmp_path, LAST_WORDS + "sys.exit('no data in /data')\n")
    assert rank.end == (1, False, "sys.exit: no data in /data")
    assert "no data in /data\n" in rank.log and "Traceback" not in rank.log and "last words" in rank.log
    assert rank.event("exit", "exit_code", "message") == [1, "no data in /data"]


def test_a_rank_that_came_to_its_end_before_its_peers_failed_is_the_cause() -> None:
    left = RankEnd(rank=1, host="n1", pid=1, exitcode=0, time=2.1)
    lost = RankEnd(rank=0, host="n1", pid=2, exitcode=1, time=2.2, done=False)
    aborted = RankEnd(rank=0, host="n1", pid=2, exitcode=-signal.SIGABRT, time=2.2, done=False)
    echo = {"rank": 0, "type": "RuntimeError", "message": "Connection closed by peer", "time": 2.05, "echo": True}
    for ends, errors in (([left, lost], [echo]), ([left, aborted], [])):
        found = find_first_failure(ends, errors, {}, None, {1: 2.0})
        assert found is not None and (found.rank, found.cause) == (1, "exit code 0")
        assert "while other ranks were still running; rank 0 then failed with" in found.message
        for finished in (None, {1: 3.0}):  # of a training; or after the others had failed
            found = find_first_failure(ends, errors, {}, None, finished)
            assert found is not None and found.rank == 0
    killed = RankEnd(rank=0, host="n1", pid=2, exitcode=-signal.SIGKILL, time=2.2, done=False)
    found = find_first_failure([left, killed], [], {}, None, {1: 2.0})
    assert found is not None and (found.rank, found.cause) == (0, "SIGKILL")


def test_a_rank_killed_while_another_waits_for_it_to_save_is_the_cause() -> None:
    """The other rank may have reported it, and ended, before the killed one is gone."""
    text = "step 20: another rank, see that of rank 0, ended within 0 s (Connection closed by peer); earlier ones"
    error = {"rank": 1, "type": "CheckpointError", "message": text, "time": 1.0}
    killed = RankEnd(rank=0, host="n1", pid=2, exitcode=-signal.SIGKILL, time=1.2, done=False)
    found = find_first_failure([killed], [error | {"echo": is_peer_error("CheckpointError", text)}], {})
    assert found is not None and (found.rank, found.cause) == (0, "SIGKILL")
    assert not is_peer_error("CheckpointError", "rank 1 did not join within 600 s (checkpoint.timeout_s)")


def test_an_error_is_printed_recorded_and_on_the_page(tmp_path: Path) -> None:
    rank = Ended(tmp_path, LAST_WORDS + "raise ValueError('bad row 7')\n")
    assert rank.end == (1, False, "ValueError: bad row 7")
    assert rank.log.index("ValueError: bad row 7") < rank.log.index("last words")
    assert rank.event("error", "type", "message") == ["ValueError", "bad row 7"]


def test_an_event_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    """The file of events is on a full device when the program fails."""
    fill = "import os, glob\n(f,) = glob.glob('run/events/*.jsonl')\nos.unlink(f)\nos.symlink('/dev/full', f)\n"
    rank = Ended(tmp_path, fill + "raise ValueError('the first error')\n")
    assert (rank.code, rank.beat.failure) == (1, "ValueError: the first error")
    assert rank.log.index("ValueError: the first error") < rank.log.index("No space left on device")
    assert "cannot record the event 'error' of rank 0" in rank.log
    assert rank.log.count("Traceback") == 1


@pytest.mark.parametrize("stream", ["sys.stderr = None", "sys.stderr.close()", "sys.stderr = open('/dev/full', 'w')"])
def test_a_program_that_has_spoiled_standard_error_still_shows_its_error(tmp_path: Path, stream: str) -> None:
    rank = Ended(tmp_path, f"import sys\n{stream}\nsys.stdout = None\nraise ValueError('bad row 7')\n")
    assert (rank.code, rank.event("error", "message")) == (1, ["bad row 7"])
    assert "ValueError: bad row 7" in rank.log and rank.log.count("Traceback") == 1
    (tmp_path / "well").mkdir()
    assert Ended(tmp_path / "well", f"import sys\n{stream}\n").beat.done


def test_an_error_whose_message_cannot_be_shown(tmp_path: Path) -> None:
    bad = "class Bad(Exception):\n    def __str__(self):\n        raise RuntimeError('no text')\n"
    rank = Ended(tmp_path, bad + "raise Bad()\n")
    assert rank.end == (1, False, "Bad: (its message cannot be shown)")
    assert rank.event("error", "type") == ["Bad"]


SLOW = {
    "handler": "import atexit, time\natexit.register(time.sleep, 1000)\n",
    "thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), name='reader').start()\n",
    "executor": "import concurrent.futures as f\nprint(f.ThreadPoolExecutor(1).submit(int).result())\n",
}


@pytest.mark.parametrize(
    ("what", "said", "fails"),
    [
        ("handler", "exit handlers", False), ("handler", "exit handlers", True), ("executor", "", False),
        ("executor", "", True), ("thread", "threads reader", True),
    ],
)  # fmt: skip
def test_handlers_and_threads_get_a_bounded_time(tmp_path: Path, what: str, said: str, fails: bool) -> None:
    rank = Ended(tmp_path, SLOW[what] + ("raise ValueError('bad')\n" if fails else ""), limit_s=1.0)
    assert rank.end[:2] == ((1, False) if fails else (0, True))
    assert rank.seconds < 30
    late = f"{said} of the program did not finish within 1 s"
    assert late in rank.log if said else "did not finish" not in rank.log, rank.log
    assert ("ValueError: bad" in rank.log) == fails


def test_a_program_at_its_end_may_work_on_in_threads_as_in_python(tmp_path: Path) -> None:
    """Longer than exit handlers may take; and the program is still the module ``__main__`` for what they do."""
    program = (
        "import sys, threading, time\nanswer = 42\ndef work():\n    time.sleep(2.5)\n"
        "    print('thread', sys.modules['__main__'].answer, flush=True)\nthreading.Thread(target=work).start()\n"
    )
    rank = Ended(tmp_path, program, limit_s=1.0)
    assert (*rank.end, "thread 42" in rank.log) == (0, True, "", True), rank.log


@pytest.mark.parametrize("end", ["", "sys.exit('bad')\n"])
def test_what_the_program_has_not_flushed_is_written_as_in_python(tmp_path: Path, end: str) -> None:
    """To a text file, a compressed one, and by a C library; exit handlers may still write."""
    program = (
        "import atexit, ctypes, gzip, sys\nplain, packed = open('plain.txt', 'w'), gzip.open('packed.gz', 'wt')\n"
        "plain.write('one ')\npacked.write('two')\natexit.register(plain.write, 'three')\n"
        "ctypes.CDLL(None).puts(b'from C')\n"
    )
    rank = Ended(tmp_path, program + end)
    assert rank.code == (1 if end else 0)
    assert (tmp_path / "plain.txt").read_text() == "one three"
    assert gzip.decompress((tmp_path / "packed.gz").read_bytes()) == b"two"
    assert "from C" in rank.log


SHOW = "import os, sys\nprint('ran', __name__, __package__, sys.argv[1:], os.getcwd(), sys.path[0])\n"


@pytest.mark.parametrize(("name", "file"), [("tools.prog", "prog.py"), ("tools.fit", "fit/__main__.py")])
def test_a_module_runs_as_python_runs_it(tmp_path: Path, name: str, file: str) -> None:
    """The same five values as under ``python -m``, in another working directory; relative imports work."""
    folder = tmp_path / "project"
    (folder / "tools" / "fit").mkdir(parents=True)
    (folder / "tools" / "rate.py").write_text("LR = 0.5\n")
    above = "." * file.count("/")
    (folder / "tools" / file).write_text(f"from {above}.rate import LR\n" + SHOW + "print('lr', LR)\n")
    command = [sys.executable, "-m", name, "--x", "a b"]
    python = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    rank = Ended(tmp_path, "", module=name, args=["--x", "a b"], workdir=str(folder))
    assert rank.code == 0, rank.log
    assert python.stdout in rank.log and "lr 0.5" in python.stdout


def test_a_script_runs_as_python_runs_it(tmp_path: Path) -> None:
    """It sees the modules beside it, but not those of its working directory, which would hide others of that name."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "statistics.py").write_text("raise SystemExit('the wrong one')\n")
    (tmp_path / "beside.py").write_text("mine = True\n")
    program = SHOW + "import beside, statistics\nprint('mine', beside.mine)\n"
    rank = Ended(tmp_path, program, workdir=str(tmp_path / "work"))
    assert rank.code == 0, rank.log
    assert f"ran __main__ None [] {tmp_path / 'work'} {tmp_path}\nmine True" in rank.log
    assert "the wrong one" not in rank.log


def test_a_held_interpreter_at_the_end_is_ended_from_outside_python(tmp_path: Path) -> None:
    rank = Ended(tmp_path, "import atexit, ctypes\natexit.register(ctypes.PyDLL(None).sleep, 1000)\n", limit_s=1.0)
    assert rank.end[:2] == (1, False)
    assert rank.seconds < 30
    assert "Timeout" in rank.log  # faulthandler's stacks


@pytest.mark.parametrize("child", ["sys.exit(0)", "sys.exit('child')", "raise ValueError('child')", "pass"])
def test_a_forked_child_does_not_speak_for_the_rank(tmp_path: Path, child: str) -> None:
    fork = f"import os, sys\nif not (pid := os.fork()):\n    {child}\nelse:\n    os.waitpid(pid, 0)\n    os._exit(0)\n"
    rank = Ended(tmp_path, fork)
    assert (rank.end, rank.events) == ((0, False, ""), [])
