"""Runs one case: starts the command, waits for the phase, does what the case says, and looks at what came of it.

Only the command line, processes by their command lines, Slurm's own commands and documented files are used.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import yaml

from allranks.lab.cluster.faults import heal, inject
from tests.chaos.cases import SAVE_EVERY, Action, Case
from tests.chaos.places import Cluster, Place, case_folder, end_processes, machine, processes
from tests.conftest import REPO, tiny_spec, write_rows
from tests.dist.harness import ALLRANKS

HERE = Path(__file__).parent
PLANTED = HERE / "planted"
PHASE_LIMIT_S = 90.0
RESUME_LIMIT_S = 120.0
SETTLE_S = 5.0
PACE_S = 0.05
POLL_S = 0.05
AGENT, RANK, DRIVER = "allranks.launch.agent", "allranks.launch.rank", "allranks.launch.driver"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a case; ``reasons`` is empty if all was as expected, ``shown`` is the end of the output."""

    id: str
    seconds: float
    ended: bool
    code: int | None
    status: str | None
    message: str
    left: tuple[str, ...]
    restarts: int
    excluded: str
    resumed: int | None
    shown: str
    reasons: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.reasons


def judge(case: Case, seen: Outcome) -> tuple[str, ...]:
    """Every way in which an outcome differs from what its case expects. Pure."""
    reasons = []
    if not seen.ended:
        reasons.append(f"not over {case.bound_s:.0f} s after the fault")
    elif seen.code not in case.codes:
        reasons.append(f"exit code {seen.code} instead of {' or '.join(map(str, case.codes))}")
    failed = seen.code != 0 and (seen.ended or seen.message)
    if failed and case.says and not re.search(case.says, seen.message):
        reasons.append(f"the message lacks /{case.says}/")
    reasons += [f"says /{p}/" for p in case.never if re.search(p, seen.message) or re.search(p, seen.shown)]
    # Rank 0's own output is shown live, and the traceback of a user's program is part of it.
    begin = r"Traceback \(most recent call last\):" + (r'\n\s*File "[^"\n]*/allranks/' if case.program else "")
    if re.search(begin, seen.shown):
        reasons.append("a traceback of allranks on the terminal")
    if seen.code == 0 and seen.status not in ("succeeded", None):
        reasons.append(f"exit code 0 with status {seen.status}")
    reasons += [f"left over: {what}" for what in seen.left]
    if seen.restarts and not case.requeue:
        reasons.append("the job went back to the queue")
    healthy = [name for name in re.findall(r"n\d+", _unfolded(seen.excluded)) if name not in case.excluded]
    if healthy:
        reasons.append(f"the healthy node {', '.join(healthy)} was excluded")
    if case.resume and seen.ended and seen.resumed != 0:
        reasons.append(f"resume ended with {seen.resumed}")
    return tuple(reasons)


def _unfolded(nodes: str) -> str:
    """``n[1-2]`` as ``n1 n2``."""
    found = re.fullmatch(r"n\[(\d+)-(\d+)\]", nodes)
    return " ".join(f"n{i}" for i in range(int(found[1]), int(found[2]) + 1)) if found else nodes


class PhaseNotReached(AssertionError):
    """The fault could not be injected: the run ended, or took too long, before its phase."""


def run_case(case: Case, box: Cluster | None = None) -> Outcome:
    """Run a case to its end and judge it. `box` is needed for cases of Slurm."""
    with ExitStack() as stack:
        folder = stack.enter_context(case_folder(small_disk=case.small_disk))
        place: Place
        if case.launcher == "slurm":
            assert box is not None
            place = box
            stack.callback(_restored, box, folder)
        else:
            place = stack.enter_context(machine())
        seen = Running(case, place, folder).to_end()
        return msgspec.structs.replace(seen, reasons=(*seen.reasons, *judge(case, seen)))


def _restored(box: Cluster, folder: Path) -> None:
    assert box.box is not None
    end_processes(folder)
    heal(box.box)
    box.clear()


class Running:
    """One case under way."""

    def __init__(self, case: Case, place: Place, folder: Path) -> None:
        self._case, self._place, self._folder = case, place, folder
        self._marks = folder / "marks"
        self._marks.mkdir()
        self._out = folder / "out.txt"
        self._copier: threading.Thread | None = None
        self._closing = threading.Event()
        (folder / "spec.yaml").write_text(yaml.safe_dump(self._spec()))

    def to_end(self) -> Outcome:
        before = self._place.temporary()
        if self._case.phase == "pending":
            assert isinstance(self._place, Cluster)
            self._place.block()
        self._process = self._start("run", "spec.yaml", terminal=self._case.terminal, plants=True)
        problem = ""
        began = time.monotonic()
        try:
            self._reach(self._case.phase)
            time.sleep(self._case.delay_s)
            began = self._do()
        except PhaseNotReached as error:
            problem = str(error)
        ended = self._wait(began)
        seconds = time.monotonic() - began
        code = self._process.poll()
        metrics, job, shown = self._metrics(), self._job(), self._shown()
        left = self._left(before) if ended else ()
        message = _message(shown) or str(metrics.get("message") or "")
        restarts, excluded = self._slurm_facts(job)
        self._free()
        resumed = self._resume() if self._case.resume and ended and not problem else None
        return Outcome(
            id=self._case.id,
            seconds=round(seconds, 1),
            ended=ended,
            code=code,
            status=metrics.get("status"),
            message=self._tail(message),
            left=left,
            restarts=restarts,
            excluded=excluded,
            resumed=resumed,
            shown=self._tail(shown),
            reasons=(problem,) if problem else (),
        )

    # --- what is run

    def _spec(self) -> dict[str, Any]:
        case, folder = self._case, self._folder
        cluster: dict[str, Any] = {
            "launcher": case.launcher,
            "nodes": case.nodes,
            "procs_per_node": case.ranks,
            "env": {"OMP_NUM_THREADS": "1"},
            "cache": str(folder / "cache"),
        }
        if any(a.target == "scontrol" for a in case.actions) or "scontrol" in case.id:
            cluster["setup"] = [f"export PATH={self._broken_scontrol()}:$PATH"]
        if case.program:
            where, how, rank, step = case.program
            args = [str(case.steps), where, how, rank, step]
            return {
                "name": "c",
                "script": {"path": str(PLANTED / "own_program.py"), "args": args},
                "cluster": cluster,
                "run_root": str(folder / "runs"),
            }
        write_rows(folder / "rows.json", 60)
        usual: dict[str, Any] = {
            "train": {"max_steps": case.steps, "schedule": "constant"},
            "checkpoint": {"mode": "full", "every": SAVE_EVERY, "keep": 2},
            "eval": {"samples": 0},
            "cluster": cluster,
        }
        return tiny_spec(folder / "rows.json", folder, name="c", **{**usual, **case.spec})

    def _broken_scontrol(self) -> Path:
        """A scontrol that fails, or that does not answer."""
        folder = self._folder / "bin"
        folder.mkdir()
        hangs = "hangs" in self._case.id
        does = (
            "exec sleep 3600"
            if hangs
            else "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
        )
        (folder / "scontrol").write_text(f"#!/bin/sh\n{does}\n")
        (folder / "scontrol").chmod(0o755)
        return folder

    def _start(self, *words: str, terminal: bool = False, plants: bool = False) -> subprocess.Popen[bytes]:
        command = [*self._place.prefix(self._folder), *ALLRANKS, *words]
        env = {**os.environ, **self._place.environment()}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO / "src"), os.environ.get("PYTHONPATH")]))
        if plants:
            env["PYTHONPATH"] = f"{PLANTED}{os.pathsep}{env['PYTHONPATH']}"
            env["CHAOS_MARKS"] = str(self._marks)
            pace = {"how": "pace", "where": "step", "rank": -1, "call": 0, "seconds": PACE_S}
            env["CHAOS"] = json.dumps([pace, *(msgspec.to_builtins(p) for p in self._case.plants)])
        if not terminal:
            with self._out.open("ab") as out:
                return subprocess.Popen(
                    command,
                    cwd=self._folder,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
        master, slave = pty.openpty()
        command = ["setsid", "--ctty", *command]  # the terminal that is closed is the command's own
        try:
            process = subprocess.Popen(command, cwd=self._folder, env=env, stdin=slave, stdout=slave, stderr=slave)
        finally:
            os.close(slave)
        self._copier = threading.Thread(target=self._copy_terminal, args=(master,), daemon=True)
        self._copier.start()
        return process

    def _copy_terminal(self, master: int) -> None:
        """Keep what is written to the terminal, until it is closed. A read that waits would keep it open."""
        with self._out.open("ab", buffering=0) as out, suppress(OSError):
            while not self._closing.is_set():
                if select.select([master], [], [], POLL_S)[0]:
                    out.write(os.read(master, 4096))
        os.close(master)

    def _close_terminal(self) -> None:
        assert self._copier is not None
        self._closing.set()
        self._copier.join(timeout=10)

    # --- phases

    @property
    def _run(self) -> Path | None:
        found = [p for p in (self._folder / "runs").iterdir() if p.is_dir()] if (self._folder / "runs").is_dir() else []
        return found[0] if found else None

    def _reach(self, phase: str) -> None:
        holds: dict[str, Callable[[], bool]] = {
            "planning": lambda: "run " not in self._shown(),
            "submitted": lambda: bool(self._place.jobs()),
            "pending": lambda: any("PENDING" in line for line in self._place.jobs()),
            "staging": lambda: bool(self._found(DRIVER)),
            "start": lambda: bool(self._found(AGENT)),
            "joining": lambda: bool(self._found(RANK)),
            "training": lambda: self._steps_done() >= self._case.step,
            "saving": lambda: self._marked("save"),
            "ending": lambda: self._marked("end"),
            "planted": self._planted,
        }
        deadline = time.monotonic() + PHASE_LIMIT_S
        while not holds[phase]():
            if self._process.poll() is not None and phase != "planted":
                raise PhaseNotReached(f"the run ended before the phase {phase}")
            if self._process.poll() is not None and not holds[phase]():
                raise PhaseNotReached("the run ended before the planted fault")
            if time.monotonic() > deadline:
                raise PhaseNotReached(f"the phase {phase} was not reached in {PHASE_LIMIT_S:.0f} s")
            time.sleep(POLL_S)

    def _planted(self) -> bool:
        if self._case.program:
            return self._marked(self._case.program[0])
        return any(self._marked(p.where) for p in self._case.plants)

    def _marked(self, name: str) -> bool:
        return any(self._marks.glob(f"{name}.*"))

    def _found(self, module: str) -> list[psutil.Process]:
        return processes(self._folder, module)

    def _steps_done(self) -> int:
        try:
            lines = (self._run / "events" / "rank0.jsonl").read_text().splitlines() if self._run else []
        except OSError:
            return 0
        return max(
            (json.loads(x)["step"] for x in lines if '"step"' in x and x.endswith("}") and '"event":"step"' in x),
            default=0,
        )

    # --- actions

    def _do(self) -> float:
        """Carry out the actions; returns the moment of the first."""
        began = time.monotonic()
        for i, action in enumerate(self._case.actions):
            if i:
                time.sleep(action.after_s)
            self._act(action)
        return began

    def _act(self, action: Action) -> None:
        what = action.what
        if what in signal.Signals.__members__ or f"SIG{what}" in signal.Signals.__members__:
            self._signal(action.target, getattr(signal, f"SIG{what}"))
        elif what == "close":
            self._close_terminal()
        elif what.startswith("remove-"):
            assert self._run is not None
            shutil.rmtree(self._run / what.removeprefix("remove-"), ignore_errors=True)
        elif what == "fill":
            _fill(self._folder / "runs" / "filler")
        elif what in ("cancel", "cancel-now"):
            assert self._run is not None
            words = ["cancel", self._run.name, *(["--now"] if what == "cancel-now" else [])]
            done = subprocess.run(
                [*self._place.prefix(self._folder), *ALLRANKS, *words],
                cwd=self._folder,
                timeout=60,
                capture_output=True,
                env={**os.environ, **self._place.environment()},
                check=False,
            )
            assert done.returncode == 0, done.stderr
        else:
            self._act_on_slurm(action)

    def _act_on_slurm(self, action: Action) -> None:
        assert isinstance(self._place, Cluster)
        box = self._place.box
        assert box is not None
        name, _, node = action.target.partition(":")
        if action.what == "scancel":
            box.run(["scancel", self._job()], cwd="/")
        elif action.what == "time-limit":  # as Slurm does it: the signal comes, and little time is left
            box.run(["scontrol", "update", f"JobId={self._job()}", "TimeLimit=2"], cwd="/")
            box.run(["scancel", "--signal=USR1", "--batch", self._job()], cwd="/")
            time.sleep(3.0)  # the next start of the job has time enough
            box.run(["scontrol", "update", f"JobId={self._job()}", "TimeLimit=60"], cwd="/")
        elif name == "node":
            inject(box, "kill-node", node)
        else:
            inject(box, f"{action.what}-{name}", node)

    def _signal(self, target: str, number: signal.Signals) -> None:
        name, _, which = target.partition(":")
        if name == "command":
            self._process.send_signal(number)
            return
        if name == "slurmd":
            assert isinstance(self._place, Cluster) and self._place.box is not None
            inject(self._place.box, "stop-slurmd", which)  # noted, so that it is started again
            return
        module = {"rank": RANK, "agent": AGENT, "driver": DRIVER}[name]
        found = self._found(module)
        if name == "rank":
            found = [p for p in found if _variable(p, "RANK") == str(self._case.rank)]
        elif which:
            found = [p for p in found if _variable(p, "SLURM_NODEID") == which]
        if not found:
            raise PhaseNotReached(f"there is no process {target}")
        found[0].send_signal(number)

    # --- the end

    def _wait(self, began: float) -> bool:
        """Whether the command, or the run whose command was killed, ended within the bound."""
        killed = any(a.target == "command" and a.what == "KILL" for a in self._case.actions)
        while time.monotonic() - began < self._case.bound_s:
            gone = self._process.poll() is not None
            if gone and not (killed and (self._found(RANK) or self._found(AGENT) or self._place.jobs())):
                return True
            time.sleep(POLL_S if not killed else 0.5)
        return False

    def _left(self, before: set[str]) -> tuple[str, ...]:
        """What is there some seconds after the end; nothing, if all went well."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            found = [f"process {_short(p.info['cmdline'])}" for p in processes(self._folder)]
            found += [f"job {line}" for line in self._place.jobs() if "COMPLETING" not in line]  # Slurm's own work
            found += [f"file {name.split(' in ')[0]}" for name in sorted(self._place.temporary() - before)]
            if not found or time.monotonic() > deadline:
                return tuple(found[:6])
            time.sleep(0.3)

    def _metrics(self) -> dict[str, Any]:
        try:
            return json.loads((self._run / "metrics.json").read_text()) if self._run else {}
        except (OSError, ValueError):
            return {}

    def _job(self) -> str:
        try:
            return json.loads((self._run / "job.json").read_text())["job"] if self._run else ""
        except (OSError, ValueError):
            return ""

    def _slurm_facts(self, job: str) -> tuple[int, str]:
        """How often the job has gone back to the queue, and which nodes it may no longer use."""
        if not isinstance(self._place, Cluster) or not job:
            return 0, ""
        record = self._place.job_record(job)
        return int(record.get("Restarts", 0)), record.get("ExcNodeList", "").replace("(null)", "")

    def _shown(self) -> str:
        return self._out.read_text(errors="replace") if self._out.exists() else ""

    def _tail(self, shown: str) -> str:
        return shown.replace(str(self._folder), "FOLDER").replace(f"{REPO}/", "")[-1500:]

    def _free(self) -> None:
        (self._folder / "runs" / "filler").unlink(missing_ok=True)
        if isinstance(self._place, Cluster) and self._place.box is not None:
            heal(self._place.box)

    def _resume(self) -> int | None:
        """The exit code of ``allranks resume`` for some more steps."""
        steps = [int(p.name[5:]) for p in (self._run / "checkpoints").glob("step-*")] if self._run else []
        if not steps or self._run is None:
            return None
        end_processes(self._folder)
        process = self._start("resume", self._run.name, "--set", f"train.max_steps={max(steps) + 3}")
        try:
            return process.wait(timeout=RESUME_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return None


def _short(words: list[str]) -> str:
    """A command line as its module, or else its program."""
    return words[words.index("-m") + 1] if "-m" in words[:-1] else Path(words[0]).name


def _message(shown: str) -> str:
    """The last paragraph that the command wrote for its user."""
    found = re.findall(r"(?ms)^allranks: .*", shown)
    return found[-1].strip() if found else ""


def _variable(process: psutil.Process, name: str) -> str:
    try:
        return process.environ().get(name, "")
    except psutil.Error:
        return ""


def _fill(path: Path) -> None:
    """Take all that is left of a small file system."""
    with path.open("wb", buffering=0) as file:
        for size in (2**20, 2**12):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
