"""Runs in the batch script, on the first node: asks the nodes, decides the rendezvous, starts the agents, heeds signals.

``python -m allranks.launch.driver RUN``. A job that goes back to the queue comes here again: it then goes on from the
newest full checkpoint, as the next attempt.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec

from allranks import checkpoints
from allranks.errors import AllranksError, CheckpointError, EnvironmentNotAble
from allranks.fabric import report as network_file
from allranks.fabric.gather import for_run
from allranks.facts import host_name, machine_facts
from allranks.launch.allocation import IN_ALLOCATION
from allranks.launch.outcome import conclude, of_attempt
from allranks.launch.rendezvous import Place, Rendezvous
from allranks.launch.step import AgentsStep
from allranks.observe.events import read_run
from allranks.planning import LaunchPlan, make_plan, network_job
from allranks.preflight import PreflightReport
from allranks.preflight.gather import Preflight, Where, cures, examine, require_nodes, text_line, without_bad, write
from allranks.rundir import RunDir, read_json, write_json
from allranks.slurm.commands import Slurm
from allranks.slurm.script import agents
from allranks.spec import RunSpec, load_spec

POLL_S = 0.2
STAGEABLE = {"proj", "py", "pkgs", "imports", "data", "model", "script"}
PACKAGES = {"py", "pkgs", "imports"}
PEER_NODE_GRACE_S = 12.0  # longer than an agent gives its own ranks


def main() -> None:
    run = RunDir(Path(sys.argv[1]))
    # After `sbatch --export=NONE` (a habit of some sites) srun would hand on nothing.
    os.environ["SLURM_EXPORT_ENV"] = "ALL"
    try:
        code = Driver(run).run()
    except AllranksError as error:
        say(str(error))
        write_json(
            run.driver,
            {
                "job": os.environ.get("SLURM_JOB_ID"),
                "restart": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
                "host": own_name(),
                "state": "failed",
                "message": str(error),
                "exit_code": error.exit_code,
            },
        )
        code = error.exit_code
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a request that comes now is late; Python's end would die of it
    sys.exit(code)


def own_name() -> str:
    """This node as Slurm knows it."""
    return os.environ.get("SLURMD_NODENAME") or host_name()


def say(text: str) -> None:
    """A line in Slurm's own log of the job."""
    print(f"allranks {time.strftime('%H:%M:%S')} {text}", flush=True)  # noqa: T201 - the job's log


def _can_be_staged(report: PreflightReport) -> bool:
    """True if all that a node lacks is what a bundle brings."""
    return all(check.ok or not check.blocks or check.name in STAGEABLE for check in report.checks)


def _some_lack(reports: list[PreflightReport], names: set[str]) -> bool:
    return any(not check.ok and check.name in names for report in reports for check in report.checks)


class Driver:
    """One start of one job."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._spec: RunSpec = load_spec(run.spec)
        self._plan = msgspec.json.decode(run.plan.read_bytes(), type=LaunchPlan)
        self._job = os.environ["SLURM_JOB_ID"]
        self._restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self._stop_asked = False
        self._lost: list[str] = []
        self._hosts: list[str] = []  # what is left of the allocation, once nodes were left out
        self._srun_options, self._python = agents(self._spec, self._plan, run, sys.executable)

    def run(self) -> int:
        """The job's exit code."""
        attempt = max(self._run.attempts(), default=0) + 1
        self._run.logs_of(attempt).mkdir(parents=True)
        self._note("running", attempt)
        write_json(self._run.logs_of(attempt) / "args.json", self._resume_args(attempt))
        signal.signal(signal.SIGUSR1, self._ask_stop)
        signal.signal(signal.SIGTERM, self._ask_stop)
        found = self._examine()
        place = self._meet(found)
        self._decide_network(attempt, found)
        if place is not None:
            write_json(self._run.rendezvous(attempt), msgspec.to_builtins(place))
            self._tell(place)
        with self._staged(found):
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

    @staticmethod
    def _cpus() -> str:
        """Cores of a node's task, given to srun explicitly: since 22.05 it does not read sbatch's own."""
        return os.environ.get("SLURM_CPUS_PER_TASK") or os.environ.get("SLURM_CPUS_ON_NODE", "1").split("(")[0]

    def _srun(self, *command: str) -> list[str]:
        nodes = len(self._plan.nodes)
        some = [f"--nodelist={','.join(self._hosts)}"] if self._hosts else []
        return [
            "srun", *some, f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={self._cpus()}", "--input=none", "--unbuffered",
            *self._srun_options, *self._python, "-m", *command,
        ]  # fmt: skip

    def _examine(self) -> Preflight:
        """Ask every node what it has, and let them reach each other; refuse to start on nodes that cannot do it.

        Imports are not tried: the ranks do that at once, and it costs seconds of every node's cores.
        """
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        where = Where(hosts=listed.stdout.split(), job_id=f"{self._job}.{self._restart}", cpus=int(self._cpus()))
        found = examine(where, self._spec, self._plan, self._run.root, imports=False)
        write(self._run, found)
        for report in found.reports:
            say(text_line(report))
        bad = self._unusable(found)
        if bad and self._spec.cluster.exclude_bad:
            found = self._without(bad, where)
        else:
            require_nodes(bad)
        if found.port is None:
            raise EnvironmentNotAble("no port is free on the first node; give another with cluster.rendezvous.port")
        return found

    def _unusable(self, found: Preflight) -> list[PreflightReport]:
        """Nodes that cannot run this, whatever is staged."""
        staging = self._spec.cluster.stage != "never"
        return [r for r in found.reports if not r.may_run and not (staging and _can_be_staged(r))]

    def _without(self, bad: list[PreflightReport], where: Where) -> Preflight:
        """Leave nodes out, plan anew for the rest, and look at the rest again: a bad node may have hidden more."""
        names = [r.host for r in bad]
        for line in cures(bad):
            say(line)
        plan = self._plan
        cluster = msgspec.structs.replace(
            self._spec.cluster, device=plan.device, backend=plan.backend, procs_per_node=plan.procs_per_node
        )
        asked = msgspec.structs.replace(self._spec, cluster=cluster)
        self._spec = without_bad(asked, names, machine_facts())
        smaller = make_plan(self._spec, machine_facts())
        self._plan = msgspec.structs.replace(smaller, environment=plan.environment)
        self._hosts = [host for host in where.hosts if host not in names]
        batch = self._plan.batch
        size = f", global batch {batch.global_batch_size}" if batch else ""
        say(f"going on without {', '.join(names)}: {smaller.world_size} ranks on {len(self._hosts)} nodes{size}")
        write_json(self._run.plan, msgspec.to_builtins(self._plan))
        again = examine(
            msgspec.structs.replace(where, hosts=self._hosts), self._spec, self._plan, self._run.root, imports=False
        )
        write(self._run, msgspec.structs.replace(again, reports=[*again.reports, *bad]))
        require_nodes(self._unusable(again))
        return again

    @contextmanager
    def _staged(self, found: Preflight) -> Iterator[None]:
        """While it lasts, nodes that lack code, packages, model or data have copies of their own."""
        lacking = [r.host for r in found.reports if not r.may_run]
        always = self._spec.cluster.stage == "always"
        if self._spec.cluster.stage == "never" or not (lacking or always or self._run.bundle.exists()):
            yield
            return
        from allranks.stage import Allocation, staged
        from allranks.stage.job import bundle_for, packed_ahead

        say(f"staging for {', '.join(lacking) or 'all nodes'}")
        allocation = Allocation.current()
        allocation = dataclasses.replace(allocation, nodes=tuple(self._hosts) or allocation.nodes)
        bundle = bundle_for(
            self._spec,
            allocation,
            packages=always or _some_lack(found.reports, PACKAGES),
            always=always,
            ahead=packed_ahead(self._run),
            log=say,
        )
        with staged(bundle, allocation, always=always, log=say) as manifest:
            manifest.save(self._run.stage)
            self._python = manifest.python(self._python)
            yield

    def _meet(self, found: Preflight) -> Rendezvous | None:
        """Where the ranks of several nodes meet; one node needs no place."""
        network = found.network
        if network is None or found.port is None or len(self._plan.nodes) < 2:
            return None
        hosts = [probe.host for probe in sorted(found.probes, key=lambda probe: probe.node_id)]
        places = [
            Place(node=i, host=h, address=network.seats[h].address, interface=network.seats[h].interface)
            for i, h in enumerate(hosts)
        ]
        address = self._spec.cluster.rendezvous.address or places[0].address
        key = f"{self._job}.{self._restart}"
        return Rendezvous(
            address=address, port=found.port, key=key, network=network.network, reason=network.reason, places=places
        )

    def _decide_network(self, attempt: int, found: Preflight) -> None:
        """Each node's NCCL and Gloo variables, now that all of them have been asked; the agents set them."""
        job = network_job(self._spec, self._plan.device)
        planned = {item.name for item in self._plan.environment if item.value is not None}
        policy = for_run(job, found, self._run.root.parent, planned)
        network_file.save(self._run.network(attempt), policy)
        for line in network_file.lines(policy):
            say(line)

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
        control = self._run.control(attempt)
        control.touch()  # what is there is read anew at each opening, also on NFS; what is not there, up to a minute late
        step = AgentsStep(command)
        failed_at: float | None = None
        while (code := step.poll()) is None:
            time.sleep(POLL_S)
            if self._stop_asked and not control.stat().st_size:
                # Not through srun: its signal reaches every process of a step, also those that are still starting,
                # or are no ranks (loaders of data, compilers), and they would die of it.
                control.write_text("stop")
            if failed_at is None and (self._some_node(attempt, "failed") or self._some_node(attempt, "refused")):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > PEER_NODE_GRACE_S:
                self._lost = self._silent_agents(attempt) if self._some_node(attempt, "failed") else []
                names = f": {', '.join(self._lost)} fell silent" if self._lost else ""
                say(f"a node has failed and others do not end{names}; ending what is left")
                step.end()
                failed_at = float("inf")
        return code

    def _silent_agents(self, attempt: int) -> list[str]:
        """Nodes whose agent has not said how its ranks ended, though their peers have gone: lost, or beyond help."""
        found = read_json(self._run.rendezvous(attempt))
        places = msgspec.convert(found, Rendezvous).places if found else []
        return [p.host for p in places if not self._run.agent_exit(attempt, p.host).exists()]

    def _some_node(self, attempt: int, what: str) -> bool:
        """Whether an agent has said that ranks of it ``failed``, or that it was ``refused`` at the meeting place."""
        return any((read_json(p) or {}).get(what) for p in self._run.logs_of(attempt).glob("*.exit.json"))

    def _ask_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop_asked = True

    def _end(self, attempt: int, code: int) -> int:
        if max(self._run.attempts()) > attempt:
            say("Slurm has given this node up meanwhile and started the job anew: that start has the word")
            return code
        ranks = [of_attempt(events, attempt) for events in read_run(self._run).values()]
        stopped = code == 0 and any(e["event"] == "stop" for events in ranks for e in events)
        cancelled = self._run.cancelled.exists() or IN_ALLOCATION in os.environ
        if (stopped or self._lost) and not cancelled and self._restart < self._spec.cluster.slurm.max_requeues:
            self._requeue(attempt, "stopped before the time limit" if stopped else f"without {', '.join(self._lost)}")
        conclude(self._run, self._spec, self._plan, code)  # nobody may be following
        self._note("stopped" if stopped else "done" if code == 0 else "failed", attempt, exit_code=code)
        return code

    def _requeue(self, attempt: int, why: str) -> None:
        """Back to the queue; Slurm ends this script when the job is there. Lost nodes are left out from then on."""
        say(f"{why}: going back to the queue")
        self._note("requeued", attempt)
        without = [*self._spec.cluster.slurm.exclude, *self._lost] if self._lost else []
        if not Slurm([], "this job's").requeue(self._job, without):
            say("Slurm does not take the job back")
            return
        time.sleep(60)

    def _note(self, state: str, attempt: int, **more: object) -> None:
        """What followers read."""
        known = {"job": self._job, "state": state, "attempt": attempt, "restart": self._restart, "host": own_name()}
        write_json(self._run.driver, {**known, **more})


if __name__ == "__main__":
    main()
