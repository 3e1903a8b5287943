"""Runs one case: starts the command, waits for the phase, does what the case says, and looks at what came of it."""

import hashlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import yaml

from allranks.lab.cluster import Box, BoxOptions, down, up
from allranks.lab.cluster.box import box_names
from allranks.lab.cluster.faults import heal, inject, injected, write_hosts
from allranks.launch.driver import KEEP_S
from allranks.nodes.slurm.endpoints import NAME_VARIABLE
from allranks.rundir.events import read_events
from tests.chaos import trials
from tests.chaos.cases import SAVE_EVERY, Action, Case
from tests.chaos.trials import Result, Seen, Trial
from tests.conftest import REPO
from tests.dist.harness import ALLRANKS, fill_disk, rows_spec

TEMPORARY = ("tmp", "dev/shm")
NOT_OURS = ("torchinductor_", "munge", "slurm")
BLOCKER = "blocker"


class Place:
    """What the command's words are prefixed with, and which temporary files a run has left."""

    box: Box | None = None

    def prefix(self, folder: Path) -> list[str]:
        return []

    def environment(self) -> dict[str, str]:
        return {}

    def roots(self) -> list[Path]:
        return []

    def temporary(self) -> set[str]:
        found = set()
        for root in self.roots():
            for folder in TEMPORARY:
                if (root / folder).is_dir():
                    names = (entry.name for entry in (root / folder).iterdir())
                    found |= {f"/{folder}/{name} in {root}" for name in names if not name.startswith(NOT_OURS)}
        return found

    def jobs(self) -> list[str]:
        """Jobs in the queue, but for the one that only keeps the nodes busy."""
        return []


class Machine(Place):
    """This machine. As root, commands run in a mount namespace whose /tmp and /dev/shm are their own."""

    def __init__(self) -> None:
        self._holder: subprocess.Popen[str] | None = None
        needed = (sys.prefix, sys.base_prefix, str(REPO))
        if os.geteuid() or any(Path(p).resolve().is_relative_to("/tmp") for p in needed):  # noqa: S108 - hidden
            return
        mounts = "mount -t tmpfs none /tmp && mount -t tmpfs none /dev/shm && echo ready && exec sleep 3600"
        words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mounts]
        self._holder = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        if self._holder.stdout.readline().strip() != "ready":
            self._holder.kill()
            self._holder = None

    def prefix(self, folder: Path) -> list[str]:
        words = ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", "env", "--chdir"] if self._holder else []
        return [*words, str(folder)] if words else []

    def roots(self) -> list[Path]:
        return [Path(f"/proc/{self._holder.pid}/root")] if self._holder else []

    def close(self) -> None:
        if self._holder:
            self._holder.kill()
            self._holder.wait(timeout=10)


class Cluster(Place):
    def __init__(self, box: Box) -> None:
        self.box: Box = box

    def environment(self) -> dict[str, str]:
        return {NAME_VARIABLE: self.box.name}

    def roots(self) -> list[Path]:
        return [Path(f"/proc/{pid}/root") for name, pid in self.box.inits().items() if name != self.box.plan.login]

    def temporary(self) -> set[str]:
        # /dev/shm is this machine's, where others work meanwhile
        return {name for name in super().temporary() if name.startswith("/tmp/") or "allranks" in name}  # noqa: S108

    def jobs(self) -> list[str]:
        shown = self.box.run(["squeue", "--noheader", "--format=%i %j %T"], cwd="/").stdout.splitlines()
        return [line.strip() for line in shown if line.strip() and line.split()[1] != BLOCKER]

    def block(self) -> None:
        words = ["sbatch", "--parsable", f"--job-name={BLOCKER}", "--nodes=3", "--exclusive", "--output=/dev/null"]
        done = self.box.run([*words, "--wrap", "sleep 600"], cwd="/")
        assert done.returncode == 0, done.stderr

    def heal(self) -> None:
        heal(self.box)
        for node in self.box.node_names:
            write_hosts(self.box, node, self_loopback=False)

    def job_record(self, job: str) -> dict[str, str]:
        shown = self.box.run(["scontrol", "--oneliner", "show", "job", job], cwd="/").stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def clear(self, limit_s: float = 40.0) -> None:
        """Kill all jobs, also those that would go back to the queue, and wait until they have gone."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            jobs = self.box.run(["squeue", "--noheader", "--format=%i"], cwd="/").stdout.split()
            if not jobs:
                return
            for job in jobs:
                self.box.run(["scontrol", "update", f"JobId={job}", "Requeue=0"], cwd="/")
                self.box.run(["scancel", "--signal=KILL", "--full", job], cwd="/")
                self.box.run(["scancel", job], cwd="/")
            time.sleep(1.0)


@contextmanager
def cluster() -> Iterator[Cluster]:
    for name in box_names():
        word, _, pid = name.partition("-")
        if word == "chaos" and pid.isdigit() and not psutil.pid_exists(int(pid)):
            down(name)
    box = up(BoxOptions(name=f"chaos-{os.getpid()}", nodes=3, conf=("KillWait=15",)))
    try:
        yield Cluster(box)
    finally:
        down(box.name)


@contextmanager
def case_folder(*, small_disk: bool) -> Iterator[Path]:
    """A folder that every node sees; with `small_disk` its ``runs`` is a file system of 128 MiB."""
    folder = Path(tempfile.mkdtemp(prefix="allranks-chaos-", dir="/var/tmp"))
    folder.chmod(0o755)
    runs = folder / "runs"
    runs.mkdir()
    try:
        if small_disk:
            words = ["mount", "-t", "tmpfs", "-o", "size=128m", "none", str(runs)]
            subprocess.run(words, check=True, capture_output=True, timeout=10)
        yield folder
    finally:
        end_processes(folder)
        if small_disk:
            subprocess.run(["umount", "--lazy", str(runs)], timeout=10, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def processes(folder: Path, module: str = "") -> list[psutil.Process]:
    """Python processes that were started with a path in `folder`, in order of their start; `module` narrows them."""
    found = []
    for process in psutil.process_iter(["cmdline", "create_time"]):
        words = process.info["cmdline"] or []
        wanted = not module or (module in words and "python" in Path(words[0]).name)  # srun has these words, too
        if wanted and any(word.startswith(str(folder)) for word in words):
            found.append(process)
    return sorted(found, key=lambda p: p.info["create_time"])


def end_processes(folder: Path) -> None:
    for process in processes(folder):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


PLANTED = Path(__file__).parent / "planted"
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
    with running(case, box) as one:
        seen = one.to_end()
        return msgspec.structs.replace(seen, reasons=(*seen.reasons, *judge(case, seen)))


def run_trial(of: Trial, weights: str, box: Cluster | None = None) -> Result:
    """Run a trial to its end and judge it against the final weights of an undisturbed run."""
    with running(of.case, box) as one:
        end = one.to_end()
        return trials.judge(of, one.seen(end, skewed=of.skewed), weights, end.seconds)


def undisturbed_weights(strategy: str, launcher: str, box: Cluster | None = None) -> str:
    """The digest of the final weights of an undisturbed run."""
    case = trials.undisturbed(strategy, launcher)
    with running(case, box) as one:
        end = one.to_end()
        weights = one.seen(end).weights
        assert end.code == 0 and weights, f"{case.id}: {end.code}\n{end.shown}"
        return weights


@contextmanager
def running(case: Case, box: Cluster | None) -> "Iterator[Running]":
    with ExitStack() as stack:
        folder = stack.enter_context(case_folder(small_disk=case.small_disk))
        place: Place
        if case.launcher == "slurm":
            assert box is not None
            place = box
            for restore in (box.clear, box.heal, partial(end_processes, folder)):  # the last one first
                stack.callback(restore)
        else:
            place = stack.enter_context(closing(Machine()))
        one = Running(case, place, folder)
        stack.callback(one.close)
        yield one


class Running:
    def __init__(self, case: Case, place: Place, folder: Path) -> None:
        self._case, self._place, self._folder = case, place, folder
        self._marks = folder / "marks"
        self._marks.mkdir()
        self._out = folder / "out.txt"
        self._copier: threading.Thread | None = None
        self._closing = threading.Event()
        self._acted_at: list[float] = []
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
            began = time.monotonic()
            for i, action in enumerate(self._case.actions):
                time.sleep(action.after_s if i else 0)
                self._acted_at.append(time.time())
                self._act(action)
        except PhaseNotReached as error:
            problem = str(error)
        ended = self._wait(began)
        seconds = time.monotonic() - began
        code = self._process.poll()
        metrics, job, shown = self._read("metrics.json"), self._job(), self._shown()
        left = self._left(before) if ended else ()
        message = _message(shown) or str(metrics.get("message") or "")
        restarts, excluded = self._slurm_facts(job)
        self._free()
        resumed = self._resume() if self._case.resume and ended and not problem else None
        return Outcome(
            id=self._case.id, seconds=round(seconds, 1), ended=ended, code=code, status=metrics.get("status"),
            message=self._tail(message), left=left, restarts=restarts, excluded=excluded, resumed=resumed,
            shown=self._tail(shown), reasons=(problem,) if problem else (),
        )  # fmt: skip

    def close(self) -> None:
        """End the command, if the trial itself was stopped."""
        process = getattr(self, "_process", None)
        if process is not None and process.poll() is None:
            process.kill()

    # --- what is run

    def _spec(self) -> dict[str, Any]:
        case, folder = self._case, self._folder
        cluster: dict[str, Any] = {
            "launcher": case.launcher, "nodes": case.nodes, "procs_per_node": case.ranks,
            "env": {"OMP_NUM_THREADS": "1"}, "cache": str(folder / "cache"),
            "restarts": {"max": None if case.restarts else 0},
        }  # fmt: skip
        if case.restarts:  # a stall in the set-up is noticed shortly before collectives time out
            cluster["timeout_s"] = 120
        if any(a.target == "scontrol" for a in case.actions) or "scontrol" in case.id:
            cluster["setup"] = [f"export PATH={self._broken_scontrol()}:$PATH"]
        if case.program:
            script = {"path": str(PLANTED / "own_program.py"), "args": [str(case.steps), *case.program]}
            return {"name": "c", "script": script, "cluster": cluster, "run_root": str(folder / "runs")}
        usual: dict[str, Any] = {
            "train": {"max_steps": case.steps, "schedule": "constant"}, "eval": {"samples": 0}, "cluster": cluster,
            "checkpoint": {"mode": "full", "every": SAVE_EVERY, "keep": 2},
        }  # fmt: skip
        return rows_spec(folder, name="c", **{**usual, **case.spec})

    def _broken_scontrol(self) -> Path:
        """A scontrol that fails, or that does not answer."""
        folder = self._folder / "bin"
        folder.mkdir()
        fails = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
        does = "exec sleep 3600" if "hangs" in self._case.id else fails
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
            pace = {"how": "pace", "where": "step", "rank": -1, "call": 0, "seconds": PACE_S, "attempt": -1}
            env["CHAOS"] = json.dumps([pace, *(msgspec.to_builtins(p) for p in self._case.plants)])
        if not terminal:
            with self._out.open("ab") as out:
                files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
                return subprocess.Popen(command, cwd=self._folder, env=env, start_new_session=True, **files)
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

    # --- phases

    @property
    def _run(self) -> Path | None:
        return next((p for p in self._folder.glob("runs/*") if p.is_dir()), None)

    def _reach(self, phase: str) -> None:
        holds: dict[str, Callable[[], bool]] = {
            "planning": self._planning,
            "submitted": lambda: bool(self._place.jobs()),
            "pending": lambda: any("PENDING" in line for line in self._place.jobs()),
            "staging": lambda: bool(self._found(DRIVER)),
            "start": lambda: bool(self._found(AGENT)),
            "joining": lambda: bool(self._found(RANK)),
            "training": lambda: self._steps_done() >= self._case.step,
            "saving": lambda: self._marked("save"),
            "ending": lambda: self._marked("end"),
            "evaluating": lambda: self._marked("eval"),
            "fault": lambda: self._marked("fault"),
            "started": lambda: True,
            "planted": self._planted,
        }
        limit_s = PHASE_LIMIT_S * (2 if self._case.restarts else 1)
        deadline = time.monotonic() + limit_s
        while not holds[phase]():
            if self._process.poll() is not None and not holds[phase]():
                raise PhaseNotReached(f"the run ended before the phase {phase}")
            if time.monotonic() > deadline:
                raise PhaseNotReached(f"the phase {phase} was not reached in {limit_s:.0f} s")
            time.sleep(POLL_S)

    def _planning(self) -> bool:
        """Before, Python itself is starting, and ends at a signal with its own traceback."""
        try:
            return "msgspec" in Path(f"/proc/{self._process.pid}/maps").read_text()
        except OSError:  # it has ended
            return False

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
        steps = [json.loads(line) for line in lines if '"event":"step"' in line and line.endswith("}")]
        return max((event["step"] for event in steps), default=0)

    # --- actions

    def _act(self, action: Action) -> None:
        what = action.what
        if what in signal.Signals.__members__ or f"SIG{what}" in signal.Signals.__members__:
            self._signal(action.target, getattr(signal, f"SIG{what}"))
        elif what == "close":
            assert self._copier is not None
            self._closing.set()
            self._copier.join(timeout=10)
        elif what.startswith("remove-"):
            assert self._run is not None
            folder = self._run / what.removeprefix("remove-")
            deadline = time.monotonic() + 10
            while list(folder.glob(".step-*.tmp")) and time.monotonic() < deadline:
                time.sleep(0.005)  # a save that loses its files fails, and says so: not this fault
            shutil.rmtree(folder, ignore_errors=True)
        elif what == "damage":
            assert self._run is not None
            newest = max(self._run.glob("checkpoints/step-*"), key=lambda p: int(p.name[5:]))
            file = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
            content = file.read_bytes()
            file.write_bytes(content[: len(content) // 2] + bytes(64) + content[len(content) // 2 + 64 :])
        elif what == "fill":
            fill_disk(self._folder / "runs")
        elif what in ("cancel", "cancel-now"):
            assert self._run is not None
            words = ["cancel", self._run.name, *(["--now"] if what == "cancel-now" else [])]
            command = [*self._place.prefix(self._folder), *ALLRANKS, *words]
            env = {**os.environ, **self._place.environment()}
            done = subprocess.run(command, cwd=self._folder, timeout=60, capture_output=True, env=env, check=False)
            assert done.returncode == 0, done.stderr
        else:
            self._act_on_slurm(action)

    def _box(self) -> Box:
        assert isinstance(self._place, Cluster) and self._place.box is not None
        return self._place.box

    def _act_on_slurm(self, action: Action) -> None:
        box = self._box()
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
        elif name == "names":
            box.folder.hosts(node).write_text("127.0.0.1 localhost\n")
        elif name == "folder":
            inject(box, "hide-folder", node, path=str(self._folder / "runs"))
        elif action.what == "down":
            inject(box, "interface-down", node)
        elif action.what == "slow":
            inject(box, "slow-link", node, rate="2mbit")
        elif action.what == "flap":
            for _ in range(3):
                with injected(box, "cut-link", node):
                    time.sleep(1.5)
                time.sleep(1.5)
        else:
            inject(box, f"{action.what}-{name}", node)

    def _signal(self, target: str, number: signal.Signals) -> None:
        name, _, which = target.partition(":")
        if name == "command":
            self._process.send_signal(number)
            return
        if name == "slurmd":
            inject(self._box(), "stop-slurmd", which)  # noted, so that it is started again
            return
        found = self._found({"rank": RANK, "agent": AGENT, "driver": DRIVER}[name])
        if name == "rank":
            found = [p for p in found if _variable(p, "RANK") == str(self._case.rank)]
        elif which:
            found = [p for p in found if _variable(p, "SLURM_NODEID") == which]
        if not found:
            raise PhaseNotReached(f"there is no process {target}")
        found[0].send_signal(number)

    # --- the end

    def _wait(self, began: float) -> bool:
        killed = any(a.target == "command" and a.what == "KILL" for a in self._case.actions)
        while time.monotonic() - began < self._case.bound_s:
            gone = self._process.poll() is not None
            if gone and not (killed and (self._found(RANK) or self._found(AGENT) or self._place.jobs())):
                return True
            time.sleep(POLL_S if not killed else 0.5)
        return False

    def _left(self, before: set[str]) -> tuple[str, ...]:
        """What is there some seconds after the end; nothing, if all went well. Nobody reaches a node without a link."""
        cut = any(a.target.startswith("link") and a.what in ("cut", "down") for a in self._case.actions)
        deadline = time.monotonic() + SETTLE_S + KEEP_S * cut
        while True:
            found = [f"process {_short(p.info['cmdline'])}" for p in processes(self._folder)]
            found += [f"job {line}" for line in self._place.jobs() if "COMPLETING" not in line]  # Slurm's own work
            found += [f"file {name.split(' in ')[0]}" for name in sorted(self._place.temporary() - before)]
            if not found or time.monotonic() > deadline:
                return tuple(found[:6])
            time.sleep(0.3)

    def seen(self, end: Outcome, skewed: int | None = None) -> Seen:
        """What a trial is judged by; the clock of the rank `skewed` is wrong."""
        run, decided = self._run, self._read("restarts.json")
        final = sorted(run.glob(f"checkpoints/step-{self._case.steps}/*model*.safetensors")) if run else []
        marks = [path.stat().st_mtime for path in self._marks.glob("fault.*")]
        faults = sorted([*marks, *self._acted_at])
        return Seen(
            ended=end.ended, injected=bool(faults) or self._case.phase == "started", code=end.code,
            message=end.message, shown=end.shown, left=end.left,
            attempts=len(list(run.glob("logs/attempt-*"))) if run else 0,
            first_verdict=decided[0]["message"] if isinstance(decided, list) and decided else "",
            weights=hashlib.sha256(b"".join(path.read_bytes() for path in final)).hexdigest() if final else "",
            recovery_s=self._recovery_s(faults[0], 1 if skewed == 0 else 0) if faults else None,
        )  # fmt: skip

    def _recovery_s(self, fault_at: float, rank: int) -> float | None:
        """Seconds from the fault to the first step of a later attempt, or, in a run with one attempt, the next step."""
        events = list(read_events(self._run / "events" / f"rank{rank}.jsonl")) if self._run else []
        again = [e["time"] for e in events if e["event"] == "start" and e["time"] > fault_at]
        since = again[0] if again else fault_at
        times = [e["time"] for e in events if e["event"] == "step" and e["time"] > since]
        return round(times[0] - fault_at, 1) if times else None

    def _read(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self._run / name).read_text()) if self._run else {}
        except (OSError, ValueError):
            return {}

    def _job(self) -> str:
        return self._read("job.json").get("job", "")

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
        if isinstance(self._place, Cluster):
            self._place.heal()

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
