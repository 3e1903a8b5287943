"""Runs in the batch script, on the first node: asks the nodes, decides the rendezvous, starts the agents, heeds signals.

``python -m allranks.launch.driver RUN``. A job that goes back to the queue comes here again: it then goes on from the
newest full checkpoint, as the next attempt.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import msgspec

from allranks import checkpoints
from allranks.errors import AllranksError, CheckpointError, EnvironmentNotAble
from allranks.facts import host_name
from allranks.launch import rendezvous
from allranks.launch.ask import Answer
from allranks.launch.outcome import conclude, of_attempt
from allranks.launch.rendezvous import Rendezvous
from allranks.observe.events import read_run
from allranks.plan import LaunchPlan
from allranks.rundir import RunDir, read_json, write_json
from allranks.slurm.script import entering
from allranks.spec import RunSpec, load_spec

ASK_S = 60.0
POLL_S = 0.2
PEER_NODE_GRACE_S = 12.0  # longer than an agent gives its own ranks


def main() -> None:
    run = RunDir(Path(sys.argv[1]))
    try:
        code = Driver(run).run()
    except AllranksError as error:
        say(str(error))
        write_json(
            run.logs / "driver.json",
            {
                "job": os.environ.get("SLURM_JOB_ID"),
                "state": "failed",
                "message": str(error),
                "exit_code": error.exit_code,
            },
        )
        code = error.exit_code
    sys.exit(code)


def say(text: str) -> None:
    """A line in Slurm's own log of the job."""
    print(f"allranks {time.strftime('%H:%M:%S')} {text}", flush=True)  # noqa: T201 - the job's log


class Driver:
    """One start of one job."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._spec: RunSpec = load_spec(run.spec)
        self._plan = msgspec.json.decode(run.plan.read_bytes(), type=LaunchPlan)
        self._job = os.environ["SLURM_JOB_ID"]
        self._restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self._agents: subprocess.Popen[bytes] | None = None
        self._stop_asked = False
        self._lost: list[str] = []

    def run(self) -> int:
        """The job's exit code."""
        attempt = max(self._run.attempts(), default=0) + 1
        self._run.logs_of(attempt).mkdir(parents=True)
        self._note("running", attempt)
        write_json(self._run.logs_of(attempt) / "args.json", self._resume_args(attempt))
        signal.signal(signal.SIGUSR1, self._ask_stop)
        signal.signal(signal.SIGTERM, self._ask_stop)
        answers = self._ask()
        place = self._decide(answers)
        write_json(self._run.logs_of(attempt) / "rendezvous.json", msgspec.to_builtins(place))
        self._tell(place)
        code = self._start(attempt)
        return self._end(attempt, code)

    def _resume_args(self, attempt: int) -> dict[str, object]:
        """A later start of the job goes on from the newest full checkpoint; without one it begins anew."""
        given = read_json(self._run.logs / "resume.json")
        if attempt == 1:
            return {}
        if isinstance(given, dict) and self._restart == 0:
            return given
        try:
            step, problems = checkpoints.newest(self._run)
        except CheckpointError:
            say("there is no checkpoint yet: the training begins anew")
            return {"resume_step": None, "anew": True}
        for problem in problems:
            say(f"passed over: {problem}")
        if checkpoints.manifest(self._run, step)["mode"] != "full":
            say(f"step {step} is a lite checkpoint, which holds no optimizer: the training begins anew")
            return {"resume_step": None, "anew": True}
        say(f"going on after step {step}")
        return {"resume_step": step, "inexact": False}

    def _srun(self, *command: str) -> list[str]:
        nodes = len(self._plan.nodes)
        cpus = os.environ.get("SLURM_CPUS_PER_TASK") or os.environ.get("SLURM_CPUS_ON_NODE", "1").split("(")[0]
        image = (
            (self._spec.cluster.environment or "").removeprefix("pyxis:")
            if (self._spec.cluster.environment or "").startswith("pyxis:")
            else None
        )
        _, python = entering(self._spec.cluster.environment, sys.executable)
        return [
            "srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={cpus}", "--input=none", "--unbuffered",
            *([f"--container-image={image}"] if image else []), *python, "-m", *command,
        ]  # fmt: skip

    def _ask(self) -> list[Answer]:
        """One answer a node. Asks again with another port while the first is taken on node 0."""
        wanted = self._spec.cluster.rendezvous.port
        taken: list[str] = []
        for turn in range(1 if wanted else rendezvous.TRIES):
            self._port = wanted or rendezvous.port_of(f"{self._job}.{self._restart}", turn)
            answers = self._ask_once()
            if answers[0].port_free:
                return answers
            taken.append(str(self._port))
            say(f"port {self._port} is taken on {answers[0].host}" + ("" if wanted else "; trying another"))
        raise EnvironmentNotAble(
            f"on the first node port {', '.join(taken)} is taken; leave cluster.rendezvous.port out, and a free one is found"
        )

    def _ask_once(self) -> list[Answer]:
        command = self._srun("allranks.launch.ask", str(self._run.root), str(self._port))
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        answers = sorted((msgspec.json.decode(line, type=Answer) for line in lines), key=lambda a: a.node)
        if len(answers) != len(self._plan.nodes):
            raise EnvironmentNotAble(
                f"{len(answers)} of {len(self._plan.nodes)} nodes answered; silent: {', '.join(self._silent(answers))}. "
                f"They cannot start {sys.executable} or do not see {self._run.root}: {done.stderr.strip()[-400:]}"
            )
        blind = [a.host for a in answers if not a.sees_run]
        if blind:
            raise EnvironmentNotAble(
                f"{', '.join(blind)} cannot see the run folder {self._run.root}; put run_root on a file system that all nodes share"
            )
        return answers

    def _silent(self, answers: list[Answer]) -> list[str]:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return [h for h in done.stdout.split() if h.split(".")[0] not in {a.host for a in answers}]

    def _decide(self, answers: list[Answer]) -> Rendezvous:
        return rendezvous.choose(answers, self._spec.cluster.rendezvous, f"{self._job}.{self._restart}", self._port)

    def _tell(self, place: Rendezvous) -> None:
        say(
            f"job {self._job} start {self._restart}: meeting at {place.address}:{place.port} on {place.network} ({place.reason})"
        )
        for p in place.places:
            ranks = self._plan.nodes[p.node].ranks
            say(f"node {p.node} = {p.host} {p.interface} {p.address}: ranks {ranks[0]}-{ranks[-1]}")

    def _start(self, attempt: int) -> int:
        """Start one agent a node and stay until all have ended."""
        command = self._srun(
            "allranks.launch.agent",
            str(self._run.root),
            "--attempt",
            str(attempt),
            "--telemetry-s",
            str(self._spec.observe.telemetry_s),
        )
        self._agents = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        if self._stop_asked:
            self._agents.send_signal(signal.SIGUSR1)
        failed_at: float | None = None
        while (code := self._agents.poll()) is None:
            time.sleep(POLL_S)
            if failed_at is None and self._some_node_failed(attempt):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > PEER_NODE_GRACE_S:
                self._lost = self._silent_agents(attempt)
                names = f": {', '.join(self._lost)} fell silent" if self._lost else ""
                say(f"a node has failed and others do not end{names}; ending what is left")
                self._agents.terminate()  # srun then kills its tasks; scancel with KILL would end this script too
                failed_at = float("inf")
        return code

    def _silent_agents(self, attempt: int) -> list[str]:
        """Nodes whose agent has not said how its ranks ended, though their peers have gone: lost, or beyond help."""
        place = msgspec.convert(read_json(self._run.rendezvous(attempt)), Rendezvous)
        return [p.host for p in place.places if not self._run.agent_exit(attempt, p.host).exists()]

    def _some_node_failed(self, attempt: int) -> bool:
        return any((read_json(p) or {}).get("failed") for p in self._run.logs_of(attempt).glob("*.exit.json"))

    def _ask_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop_asked = True
        if self._agents is not None and self._agents.poll() is None:
            self._agents.send_signal(signal.SIGUSR1)  # srun hands it on to the agents, they to the ranks

    def _end(self, attempt: int, code: int) -> int:
        ranks = [of_attempt(events, attempt) for events in read_run(self._run).values()]
        stopped = code == 0 and any(e["event"] == "stop" for events in ranks for e in events)
        cancelled = (self._run.logs / "cancelled").exists()
        if (stopped or self._lost) and not cancelled and self._restart < self._spec.cluster.slurm.max_requeues:
            self._requeue(attempt, "stopped before the time limit" if stopped else f"without {', '.join(self._lost)}")
        conclude(self._run, self._spec, self._plan, code)  # nobody may be following
        self._note(
            "stopped" if stopped else "done" if code == 0 else "failed", attempt, exit_code=code, host=host_name()
        )
        return code

    def _requeue(self, attempt: int, why: str) -> None:
        """Back to the queue; Slurm ends this script when the job is there. Lost nodes are left out from then on."""
        say(f"{why}: going back to the queue")
        self._note("requeued", attempt)
        if subprocess.run(["scontrol", "requeue", self._job], timeout=60, check=False).returncode:
            say("Slurm does not take the job back")
            return
        if self._lost:
            exclude = ",".join([*self._spec.cluster.slurm.exclude, *self._lost])
            subprocess.run(
                ["scontrol", "update", f"JobId={self._job}", f"ExcNodeList={exclude}"], timeout=60, check=False
            )
        time.sleep(60)

    def _note(self, state: str, attempt: int, **more: object) -> None:
        """What followers read."""
        known = {"job": self._job, "state": state, "attempt": attempt, "restart": self._restart}
        write_json(self._run.logs / "driver.json", {**known, **more})


if __name__ == "__main__":
    main()
