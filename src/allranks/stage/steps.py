"""Helper steps: node.py on some nodes of an allocation, one task a node, spoken to in JSON through srun."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.errors import EnvironmentNotAble, RunFailed
from allranks.stage import node, unpack

_LOADER = (
    "import json,sys,types\n"
    "for name,text in json.loads(sys.stdin.buffer.readline()):\n"
    " module=types.ModuleType(name); sys.modules[name]=module; exec(compile(text,name,'exec'),module.__dict__)\n"
    "sys.exit(module.main())"
)
# The first interpreter that is there; none: say so in the helper's own form.
_SHELL = (
    'loader=$1; shift; for p; do if command -v "$p" >/dev/null 2>&1; then exec "$p" -I -c "$loader"; fi; done; '
    'printf \'@allranks %s 0 1 {"error": "no Python is found here; it was looked for as: %s"}\\n\' "$SLURMD_NODENAME" "$*"; exit 1'
)
_END_S = 15.0


@dataclass(frozen=True)
class Allocation:
    """A running job: its id, how often it was restarted, its nodes. ``prefix`` stands before every Slurm command."""

    job_id: str
    nodes: tuple[str, ...]
    restart: int = 0
    cluster: str = "cluster"
    prefix: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Name of the job's folder on the nodes; no other job, and no other run of this job, has it."""
        return f"{self.cluster}.{self.job_id}.{self.restart}"

    @classmethod
    def current(cls) -> Allocation:
        """The job that this process runs in.

        Raises:
            EnvironmentNotAble: it runs in none.
        """
        job = os.environ.get("SLURM_JOB_ID")
        listed = os.environ.get("SLURM_JOB_NODELIST")
        if not job or not listed:
            raise EnvironmentNotAble("this is no Slurm job: SLURM_JOB_ID and SLURM_JOB_NODELIST are not set")
        shown = command(["scontrol", "show", "hostnames", listed], timeout_s=60)
        return cls(
            job_id=job,
            nodes=tuple(shown.split()),
            restart=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
            cluster=os.environ.get("SLURM_CLUSTER_NAME") or "cluster",
        )


def command(argv: Sequence[str], *, timeout_s: float) -> str:
    """Standard output of a command that must succeed.

    Raises:
        EnvironmentNotAble, RunFailed: there is no such program; it failed, or did not end in time.
    """
    try:
        done = subprocess.run(
            list(argv), capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        raise EnvironmentNotAble(f"the program {argv[0]!r} is missing here") from None
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{' '.join(argv[-4:])!r} did not end within {timeout_s:g} s") from None
    if done.returncode != 0:
        raise RunFailed(f"{' '.join(argv[-4:])!r} ended with exit code {done.returncode}: {last_line(done.stderr)}")
    return done.stdout


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


class Step:
    """node.py on some nodes, from its request to its answers. Use as a context: leaving it ends the step."""

    def __init__(
        self, allocation: Allocation, nodes: Sequence[str], pythons: Sequence[str], request: dict[str, Any]
    ) -> None:
        self.nodes = tuple(nodes)
        self._answers: queue.Queue[tuple[str, dict[str, Any]] | None] = queue.Queue()
        count = str(len(nodes))
        srun = [
            *(*allocation.prefix, "srun", f"--jobid={allocation.job_id}", f"--nodelist={','.join(nodes)}"),
            *("--nodes", count, "--ntasks", count, "--ntasks-per-node=1", "--cpus-per-task=1", "--overlap", "--mem=0"),
            *("--cpu-bind=none", "--input=all", "--kill-on-bad-exit=0", "--chdir=/", "--job-name=allranks-stage"),
            *("sh", "-c", _SHELL, "sh", _LOADER, *pythons),
        ]
        env = {k: v for k, v in os.environ.items() if k not in _STEP_SETTINGS}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        try:
            self._process = subprocess.Popen(
                srun, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=env
            )
        except FileNotFoundError:
            raise EnvironmentNotAble(f"the program {srun[0]!r} is missing here") from None
        threading.Thread(target=self._read, daemon=True).start()
        self.send(json.dumps(helper_texts()).encode() + b"\n" + json.dumps(request).encode() + b"\n")

    def send(self, data: bytes) -> None:
        """Give all nodes of the step some input; what a step that is gone cannot take shows in `answers`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass

    def order(self, **order: Any) -> None:
        """One line of JSON."""
        self.send(json.dumps(order).encode() + b"\n")

    def stream(self, part: str, archive: Path, timeout_s: float) -> None:
        """An archive, through srun: slower than sbcast, but srun is always allowed."""
        guard = threading.Timer(timeout_s, self._process.kill)
        guard.start()
        self.order(do="stream", part=part, bytes=archive.stat().st_size)
        with archive.open("rb") as file:
            while block := file.read(1 << 20):
                self.send(block)
        guard.cancel()

    def answers(self, timeout_s: float, alive: Callable[[], None] = lambda: None) -> dict[str, dict[str, Any]]:
        """The next answer of every node.

        Raises:
            RunFailed: a node said an error, or not all of them answered in time.
        """
        found: dict[str, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < len(self.nodes):
            alive()
            try:
                said = self._answers.get(timeout=min(1.0, max(0.01, deadline - time.monotonic())))
            except queue.Empty:
                if time.monotonic() < deadline:
                    continue
                missing = sorted(set(self.nodes) - set(found))
                raise RunFailed(f"staging: {', '.join(missing)} did not answer within {timeout_s:g} s") from None
            if said is None:
                missing = sorted(set(self.nodes) - set(found))
                raise RunFailed(f"staging: the step ended without an answer of {', '.join(missing)}: {self._said()}")
            found[said[0]] = said[1]
        wrong = [f"{name}: {answer['error']}" for name, answer in sorted(found.items()) if "error" in answer]
        if wrong:
            raise RunFailed("staging: " + "; ".join(wrong))
        return found

    def __enter__(self) -> Step:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        for end in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(timeout=_END_S)
                break
            except subprocess.TimeoutExpired:
                end()
        self._errors.close()

    def _said(self) -> str:
        self._errors.seek(0)
        return last_line(self._errors.read().decode(errors="replace"))

    def _read(self) -> None:
        """Puts fragments together to answers, until the step ends."""
        fragments: dict[str, list[str]] = {}
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            words = raw.decode(errors="replace").rstrip("\n").split(" ", 4)
            if words[0] != "@allranks" or len(words) != 5:
                continue  # what modules and login scripts print
            mine = fragments.setdefault(words[1], [])
            mine.append(words[4])
            if len(mine) == int(words[3]):
                self._answers.put((words[1], json.loads("".join(fragments.pop(words[1])))))
        self._answers.put(None)


# What a batch job sets for its own steps must not shape these: one task a node, on nodes that are named.
_STEP_SETTINGS = {
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_CORE"),
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_DISTRIBUTION", "SLURM_EXACT"),
    *("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE", "SLURM_CPU_BIND", "SLURM_GPUS", "SLURM_GPU_BIND"),
    *("SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_NNODES", "SLURM_HOSTFILE", "SLURM_ARBITRARY_NODELIST"),
}


def helper_texts() -> list[tuple[str, str]]:
    """The modules that run on nodes: names, and texts; the last one is the program."""
    return [(m.__name__, Path(str(m.__file__)).read_text(encoding="utf-8")) for m in (unpack, node)]
