"""How a rank ends: what its log, its events and its heartbeat page say, and what it waits for. Real processes, no
torch."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from allranks.launch.failure_attribution import RankEnd, find_first_failure
from allranks.rundir.events import read_events
from allranks.rundir.heartbeat import HEARTBEAT_VARIABLE, Heartbeat, HeartbeatPage, page_paths
from allranks.rundir.paths import RunDir

START = (
    "import allranks.launch.rank as r; r.EXIT_HANDLERS_S = r.EXIT_HANDLERS_FAILED_S = {limit}; r.HELD_S = 1.0; r.main()"
)


class Ended:
    """A rank that has run a program to its end."""

    def __init__(
        self, folder: Path, program: str, *, limit_s: float = 20.0, script: dict[str, Any] | None = None
    ) -> None:
        (folder / "program.py").write_text(program)
        self.run = RunDir(folder / "run")
        self.run.root.mkdir()
        self.run.spec.write_text(
            yaml.safe_dump({"name": "t", "script": script or {"path": str(folder / "program.py")}})
        )
        page = HeartbeatPage()
        env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", HEARTBEAT_VARIABLE: page_paths([page])}
        began = time.monotonic()
        command = [sys.executable, "-u", "-c", START.format(limit=limit_s), str(self.run.root), "1"]
        self.code = subprocess.run(command, env=env, cwd=folder, timeout=60).returncode
        self.seconds = time.monotonic() - began
        self.log = self.run.rank_logs(1)[0].read_text()
        file = self.run.events_of(0)  # a device, where a test has put one there, has no end
        self.events = [e for e in read_events(file) if e["event"] != "start"] if not file.is_symlink() else []
        beat = page.read()
        assert beat is not None
        self.beat: Heartbeat = beat

    def event(self, kind: str) -> dict[str, Any]:
        (found,) = [e for e in self.events if e["event"] == kind]
        return found


@pytest.mark.parametrize("end", ["", "import sys; sys.exit()", "import sys; sys.exit(0)"])
def test_a_program_that_comes_to_its_end_says_done(tmp_path: Path, end: str) -> None:
    found = Ended(tmp_path, f"import atexit\natexit.register(print, 'last words')\n{end}\n")
    assert (found.code, found.beat.done, found.beat.failure) == (0, True, "")
    assert found.event("phase")["name"] == "done"
    assert [e["exit_code"] for e in found.events if e["event"] == "exit"] == ([0] if end else [])
    assert "last words" in found.log
    written = [p for p in found.run.root.rglob("*") if p.is_file()]
    assert sorted(written) == sorted([found.run.spec, found.run.events_of(0), found.run.rank_logs(1)[0]])


def test_the_text_of_sys_exit_is_printed_and_recorded(tmp_path: Path) -> None:
    found = Ended(tmp_path, "import sys, atexit\natexit.register(print, 'last words')\nsys.exit('no data in /data')\n")
    assert (found.code, found.beat.done) == (1, False)
    assert "no data in /data\n" in found.log
    assert "Traceback" not in found.log
    assert "last words" in found.log
    assert (found.event("exit")["exit_code"], found.event("exit")["message"]) == (1, "no data in /data")
    assert found.beat.failure == "sys.exit: no data in /data"


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


def test_an_error_is_printed_recorded_and_on_the_page(tmp_path: Path) -> None:
    found = Ended(tmp_path, "import atexit\natexit.register(print, 'last words')\nraise ValueError('bad row 7')\n")
    assert (found.code, found.beat.done) == (1, False)
    assert found.log.index("ValueError: bad row 7") < found.log.index("last words")
    assert (found.event("error")["type"], found.event("error")["message"]) == ("ValueError", "bad row 7")
    assert found.beat.failure == "ValueError: bad row 7"


def test_an_event_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    """The file of events is on a full device when the program fails."""
    fill = "import os, glob\n(f,) = glob.glob('run/events/*.jsonl')\nos.unlink(f)\nos.symlink('/dev/full', f)\n"
    found = Ended(tmp_path, fill + "raise ValueError('the first error')\n")
    assert found.code == 1
    assert found.log.index("ValueError: the first error") < found.log.index("No space left on device")
    assert "cannot record the event 'error' of rank 0" in found.log
    assert found.log.count("Traceback") == 1
    assert found.beat.failure == "ValueError: the first error"


@pytest.mark.parametrize("stream", ["sys.stderr = None", "sys.stderr.close()", "sys.stderr = open('/dev/full', 'w')"])
def test_a_program_that_has_spoiled_standard_error_still_shows_its_error(tmp_path: Path, stream: str) -> None:
    found = Ended(tmp_path, f"import sys\n{stream}\nsys.stdout = None\nraise ValueError('bad row 7')\n")
    assert (found.code, found.event("error")["message"]) == (1, "bad row 7")
    assert "ValueError: bad row 7" in found.log
    assert found.log.count("Traceback") == 1
    (tmp_path / "well").mkdir()
    assert Ended(tmp_path / "well", f"import sys\n{stream}\n").beat.done


def test_an_error_whose_message_cannot_be_shown(tmp_path: Path) -> None:
    bad = "class Bad(Exception):\n    def __str__(self):\n        raise RuntimeError('no text')\n"
    found = Ended(tmp_path, bad + "raise Bad()\n")
    assert (found.code, found.event("error")["type"]) == (1, "Bad")
    assert found.beat.failure == "Bad: (its message cannot be shown)"


SLOW = {
    "handler": "import atexit, time\natexit.register(time.sleep, 1000)\n",
    "thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), name='reader').start()\n",
    "executor": "import concurrent.futures as f\nprint(f.ThreadPoolExecutor(1).submit(int).result())\n",
}


@pytest.mark.parametrize(
    ("what", "said", "fails"),
    [
        ("handler", "exit handlers", False),
        ("executor", "", False),
        ("handler", "exit handlers", True),
        ("thread", "threads reader", True),
        ("executor", "", True),
    ],
)
def test_handlers_and_threads_get_a_bounded_time(tmp_path: Path, what: str, said: str, fails: bool) -> None:
    found = Ended(tmp_path, SLOW[what] + ("raise ValueError('bad')\n" if fails else ""), limit_s=1.0)
    assert (found.code, found.beat.done) == ((1, False) if fails else (0, True))
    assert found.seconds < 30
    assert (
        f"{said} of the program did not finish within 1 s" in found.log if said else "did not finish" not in found.log
    ), found.log
    assert ("ValueError: bad" in found.log) == fails


def test_a_program_at_its_end_may_work_on_in_threads_as_in_python(tmp_path: Path) -> None:
    """Longer than exit handlers may take; and the program is still the module ``__main__`` for what they do."""
    program = (
        "import sys, threading, time\n"
        "answer = 42\n"
        "def work():\n    time.sleep(2.5)\n    print('thread', sys.modules['__main__'].answer, flush=True)\n"
        "threading.Thread(target=work).start()\n"
    )
    found = Ended(tmp_path, program, limit_s=1.0)
    assert (found.code, found.beat.done, "thread 42" in found.log) == (0, True, True), found.log


@pytest.mark.parametrize("end", ["", "sys.exit('bad')\n"])
def test_what_the_program_has_not_flushed_is_written_as_in_python(tmp_path: Path, end: str) -> None:
    """To a text file, a compressed one, and by a C library; exit handlers may still write."""
    program = (
        "import atexit, ctypes, gzip, sys\n"
        "plain, packed = open('plain.txt', 'w'), gzip.open('packed.gz', 'wt')\n"
        "plain.write('one ')\npacked.write('two')\n"
        "atexit.register(plain.write, 'three')\n"
        "ctypes.CDLL(None).puts(b'from C')\n"
    )
    found = Ended(tmp_path, program + end)
    assert found.code == (1 if end else 0)
    assert (tmp_path / "plain.txt").read_text() == "one three"
    with gzip.open(tmp_path / "packed.gz", "rt") as packed:
        assert packed.read() == "two"
    assert "from C" in found.log


SHOW = "import os, sys\nprint('ran', __name__, __package__, sys.argv[1:], os.getcwd(), sys.path[0])\n"


@pytest.mark.parametrize("kind", ["module", "package"])
def test_a_module_runs_as_python_runs_it(tmp_path: Path, kind: str) -> None:
    """The same five values as under ``python -m``, in another working directory; relative imports work."""
    folder = tmp_path / "project"
    (folder / "tools" / "fit").mkdir(parents=True)
    (folder / "tools" / "rate.py").write_text("LR = 0.5\n")
    relative = "from .rate import LR\n" if kind == "module" else "from ..rate import LR\n"
    file = folder / "tools" / ("prog.py" if kind == "module" else "fit/__main__.py")
    file.write_text(relative + SHOW + "print('lr', LR)\n")
    name = "tools.prog" if kind == "module" else "tools.fit"
    expected = subprocess.run(
        [sys.executable, "-m", name, "--x", "a b"], cwd=folder, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    found = Ended(tmp_path, "", script={"module": name, "args": ["--x", "a b"], "workdir": str(folder)})
    assert found.code == 0, found.log
    assert expected in found.log and "lr 0.5" in expected


def test_a_script_runs_as_python_runs_it(tmp_path: Path) -> None:
    """It sees the modules beside it, but not those of its working directory, which would hide others of the same
    name."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "statistics.py").write_text("raise SystemExit('the wrong one')\n")
    (tmp_path / "beside.py").write_text("mine = True\n")
    found = Ended(
        tmp_path,
        SHOW + "import beside, statistics\nprint('mine', beside.mine)\n",
        script={"path": str(tmp_path / "program.py"), "workdir": str(tmp_path / "work")},
    )
    assert found.code == 0, found.log
    assert f"ran __main__ None [] {tmp_path / 'work'} {tmp_path}\nmine True" in found.log
    assert "the wrong one" not in found.log


def test_a_held_interpreter_at_the_end_is_ended_from_outside_python(tmp_path: Path) -> None:
    held = "import atexit, ctypes\natexit.register(ctypes.PyDLL(None).sleep, 1000)\n"
    found = Ended(tmp_path, held, limit_s=1.0)
    assert (found.code, found.beat.done) == (1, False)
    assert found.seconds < 30
    assert "Timeout" in found.log  # faulthandler's stacks


@pytest.mark.parametrize("child", ["sys.exit(0)", "sys.exit('child')", "raise ValueError('child')", "pass"])
def test_a_forked_child_does_not_speak_for_the_rank(tmp_path: Path, child: str) -> None:
    fork = f"import os, sys\nif not (pid := os.fork()):\n    {child}\nelse:\n    os.waitpid(pid, 0)\n    os._exit(0)\n"
    found = Ended(tmp_path, fork)
    assert (found.code, found.beat.done, found.beat.failure, found.events) == (0, False, "", [])
