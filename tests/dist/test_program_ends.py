"""How runs of a user's own program are stopped, and that nothing of them is left; the programs need no torch."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from allranks.lab.cluster.processes import wait_gone
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests.dist.harness import ALLRANKS, Background, allranks, train, until, write_spec

BEGIN = "import os, pathlib, signal, subprocess, sys, time\nrank = int(os.environ['RANK'])\n"
READY = (
    "pathlib.Path(f'ready{rank}').write_text(f'{os.getpid()} ' + ' '.join(str(c.pid) for c in "
    "children))\ntime.sleep(600)\n"
)
SAVES = BEGIN + (
    "children = []\n"
    "def stop(number, frame):\n    time.sleep(1.0)\n    print('saved', flush=True)\n    os._exit(0) if rank else "
    "sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, stop)\n"
)
DEAF = BEGIN + (
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
    "children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]\n"
)


def program_spec(folder: Path, text: str, **more: Any) -> dict[str, Any]:
    (folder / "program.py").write_text(text)
    script = {"path": str(folder / "program.py"), **more.pop("script", {})}
    return {"name": "p", "script": script, "run_root": str(folder / "runs"), **more}


def log_of(folder: Path, text: str) -> list[str]:
    alone = {"procs_per_node": 1}  # of two ranks, the one that fails later may be ended before it prints
    _, run = train(folder, program_spec(folder, text, cluster=alone), code=1)
    return run.rank_logs(1)[0].read_text().splitlines()[1:]


@pytest.mark.full
def test_the_traceback_of_a_program_begins_in_the_program(tmp_path: Path) -> None:
    first, second, *_, last = log_of(tmp_path, "def main():\n    raise KeyError('rows')\n\nmain()\n")
    assert first == "Traceback (most recent call last):"
    assert second == f'  File "{tmp_path}/program.py", line 4, in <module>' and last == "KeyError: 'rows'"
    first, *_, last = log_of(tmp_path, "exec(compile('a = (', 'made.py', 'exec'))\n")
    assert first == "Traceback (most recent call last):" and last == "SyntaxError: '(' was never closed"


def test_a_program_that_python_cannot_read_starts_no_rank(tmp_path: Path) -> None:
    done = allranks("run", str(write_spec(tmp_path, program_spec(tmp_path, "a = (\n"))), cwd=tmp_path, code=2)
    assert "program.py: line 1: '(' was never closed" in done.stderr and not (tmp_path / "runs").exists()


@pytest.mark.full
def test_an_error_goes_to_the_excepthook_of_the_program(tmp_path: Path) -> None:
    hook = (
        "import sys\ndef hook(kind, error, trace):\n    print('hook', kind.__name__, trace.tb_lineno)\n    "
        "{0}\nsys.excepthook = hook\n1 / 0\n"
    )
    assert log_of(tmp_path, hook.format("pass")) == ["hook ZeroDivisionError 6"]
    lines = log_of(tmp_path, hook.format("sys.__excepthook__(kind, error, trace)"))  # as torch's does
    assert lines[1:3] == ["Traceback (most recent call last):", f'  File "{tmp_path}/program.py", line 6, in <module>']
    lines = log_of(tmp_path, hook.format("raise ValueError('of the hook')"))
    assert (lines[0], lines[-1]) == ("hook ZeroDivisionError 6", "ZeroDivisionError: division by zero")
    assert {"Error in sys.excepthook:", "ValueError: of the hook"} <= set(lines)


class Program(Background):
    def __init__(self, folder: Path, text: str, **script: Any) -> None:
        spec = program_spec(folder, text + READY, script=script, cluster={"procs_per_node": 2})
        super().__init__(folder, "run", str(write_spec(folder, spec)))
        self._folder = folder
        until(lambda: len(self.members()) >= 2 or self.process.poll() is not None)
        assert self.process.poll() is None, self.out.read_text()

    def members(self) -> list[psutil.Process]:
        texts = [path.read_text() for path in self._folder.glob("ready*")]
        ready = len(texts) == 2 and all(texts)
        return [psutil.Process(int(pid)) for text in texts for pid in text.split()] if ready else []

    def logs(self) -> list[str]:
        return [path.read_text() for path in self.run.rank_logs(1).values()]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Any]:
    started: list[tuple[Program, list[psutil.Process]]] = []

    def start(text: str, **script: Any) -> Program:
        one = Program(tmp_path, text, **script)
        started.append((one, one.members()))
        return one

    yield start
    for one, members in started:
        one.stop()
        for process in members:
            if process.is_running():
                process.kill()


def gone(processes: list[psutil.Process], limit_s: float) -> None:
    """All have ended; those that a test's own process must wait for count as ended."""
    left = wait_gone([p.pid for p in processes], limit_s)
    assert left == [], [p for p in processes if p.pid in left]


def test_a_program_that_handles_sigterm_saves_and_the_run_says_how_it_ended(program: Any) -> None:
    one = program(SAVES)
    one.signal(signal.SIGTERM)
    code, out = one.wait(limit_s=30)
    assert code == 1 and all("saved" in log for log in one.logs())
    assert "stopping: SIGTERM to every rank; what still runs after 30 s (script.grace_s) is killed" in out
    ended = "stopped (allranks received SIGTERM): the ranks received SIGTERM; rank 0, 1 ended with exit code 0"
    assert ended in " ".join(out.split()) and "checkpoint" not in out
    metrics = read_json(one.run.metrics)
    assert metrics["status"] == "stopped"
    unknown = ("strategy", "dtype", "use_lora", "gradient_checkpointing", "steps", "tokens_real", "eval_s", "model")
    assert {name: metrics[name] for name in unknown} == dict.fromkeys(unknown)
    assert (metrics["world_size"], metrics["device"]) == (2, "cpu")


@pytest.mark.full
@pytest.mark.parametrize("how", ["SIGHUP", "cancel", "cancel --now", "SIGINT twice"])
def test_a_deaf_program_is_killed_after_its_grace_with_its_children(program: Any, tmp_path: Path, how: str) -> None:
    asked_twice = how == "SIGINT twice"
    one = program(DEAF, grace_s=60.0 if asked_twice or "now" in how else 1.0)
    members = one.members()
    assert len(members) == 6
    began = time.monotonic()
    if how.startswith("cancel"):
        done = allranks(*how.split()[:1], one.run.name, *how.split()[1:], cwd=tmp_path)
        said = "stopped its ranks" if "now" in how else "sent SIGTERM to its ranks; what still runs after 1 s"
        assert said in done.stdout, done.stdout + done.stderr
    else:
        one.signal(signal.Signals[how.split(maxsplit=1)[0]])
        if asked_twice:
            until(lambda: "Ctrl-C again kills them now" in one.out.read_text())
            one.signal(signal.SIGINT)
    code, out = one.wait(limit_s=30)
    assert code == 1
    gone(members, 5)
    assert time.monotonic() - began < 30
    if not asked_twice and "now" not in how:
        assert "rank 0, 1 did not end within 1 s (script.grace_s) and was killed" in " ".join(out.split())


@pytest.mark.parametrize("killed", ["command", pytest.param("command and agent", marks=pytest.mark.full)])
def test_nothing_is_left_of_a_deaf_program_whose_launcher_is_killed(program: Any, killed: str) -> None:
    """As the out-of-memory killer does, who sends SIGKILL. One child has left its rank's session."""
    one = program(DEAF, grace_s=1.0)
    everything = [*psutil.Process(one.process.pid).children(recursive=True), *one.members()]
    victims = [p for p in everything if "allranks.launch.agent" in p.cmdline()] if "agent" in killed else []
    for pid in [one.process.pid, *(p.pid for p in victims)]:
        os.kill(pid, signal.SIGKILL)
    gone(everything, 15)


@pytest.mark.parametrize("how", ["sys.exit(0)", pytest.param("os._exit(0)", marks=pytest.mark.full)])
def test_a_rank_that_leaves_early_with_0_is_the_cause_of_the_others_errors(tmp_path: Path, how: str) -> None:
    text = (
        "import os, sys, torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
        f"for i in range(50):\n    if i == 3 and dist.get_rank() == 1:\n        {how}\n        break\n"
        "    dist.all_reduce(torch.ones(1))\n"
    )
    done, run = train(tmp_path, program_spec(tmp_path, text), code=1)
    assert "rank 1 on" in done.stderr and "ended with exit code 0" in done.stderr
    if how != "os._exit(0)":
        assert "while other ranks were still running; rank 0 then failed with RuntimeError" in done.stderr
    assert "killed" not in done.stderr
    assert read_json(run.metrics)["message"] in " ".join(done.stderr.split())
    (found, *_) = json.loads(allranks("diagnose", "--json", str(run.root), cwd=tmp_path).stdout)["findings"]
    assert (found["id"], found["rank"]) == ("application_error", 1)
    assert found["title"] == "a rank left early with exit code 0"


# Rank 0 ends well before rank 1 fails: else its agent may be told of the failure first, and ends with 1, too.
PROGRAM = "import os, sys, time\nif os.environ['RANK'] == '1':\n    time.sleep(2)\n    sys.exit(3)\n"


@contextmanager
def started(folder: Path, before: str = "", program: str = PROGRAM, **more: Any) -> Iterator[Any]:
    """The command `run`, the agents that were started by what it printed after `before`, and its output."""
    (folder / "own.py").write_text(program)
    hosts = {"launcher": "hosts", "nodes": 2, "hosts": ["127.0.0.1"] * 2}
    cluster = {**more, **hosts, "procs_per_node": 1, "device": "cpu"}
    spec = {"name": "h", "script": {"path": "own.py"}, "cluster": cluster, "run_root": "runs"}
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    out = folder / "out"
    command = [*ALLRANKS, "run", "spec.yaml"]
    launcher = subprocess.Popen(command, cwd=folder, stdout=out.open("w"), stderr=subprocess.STDOUT)
    agents: list[subprocess.Popen[bytes]] = []
    try:
        until(lambda: "  node 1:  " in out.read_text() or launcher.poll() is not None, limit_s=30)
        lines = [line.split(":  ", 1)[1] for line in out.read_text().splitlines() if line.startswith("  node ")]
        agents += [subprocess.Popen(["bash", "-c", before + line], stderr=subprocess.DEVNULL) for line in lines]
        yield launcher, agents, out
    finally:
        for process in (launcher, *agents):
            process.kill()


@pytest.mark.full
def test_each_agent_of_one_host_leaves_its_own_record(tmp_path: Path) -> None:
    with started(tmp_path) as (launcher, agents, out):
        assert launcher.wait(timeout=60) == 1, out.read_text()
        assert sorted(agent.wait(timeout=20) for agent in agents) == [0, 1]
        assert "rank 1 on " in out.read_text(), out.read_text()
        run = RunDir(next((tmp_path / "runs").iterdir()))
        records = sorted((read_json(path) for path in run.logs_of(1).glob("*.exit.json")), key=lambda one: one["node"])
        assert [(one["node"], [end["rank"] for end in one["failed"]]) for one in records] == [(0, []), (1, [1])]


@pytest.mark.full
def test_hosts_are_examined_before_the_ranks_start(tmp_path: Path) -> None:
    with started(tmp_path, "ulimit -n 512; ") as (launcher, agents, out):
        assert launcher.wait(timeout=60) == 3, out.read_text()
        assert [agent.wait(timeout=20) for agent in agents] == [1, 1]
        assert "127.0.0.1: files: ulimit -n 65536" in " ".join(out.read_text().split()), out.read_text()
        run = RunDir(next((tmp_path / "runs").iterdir()))
        assert "files=FEW(512)" in run.preflight_text.read_text() and not run.rank_logs(1)
