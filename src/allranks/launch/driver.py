"""Runs in the batch script, on the first node: examines the nodes, starts the agents and supervises them.

``python -m allranks.launch.driver RUN``. A requeued job starts the driver again, which then continues from the newest
full checkpoint as the next attempt.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path

import msgspec

from allranks.errors import EXIT_FAILED, AllranksError, EnvironmentNotAble
from allranks.launch.channel_protocol import CHANNEL_VARIABLE
from allranks.launch.launchers import agent_command, agent_words, write_attempt_args
from allranks.launch.notification import notify
from allranks.launch.outcome import events_of_attempt, finalize_run
from allranks.launch.rendezvous import LOOPBACK, NodeAddress, Rendezvous, control_port, own_address_towards
from allranks.launch.restarts import Restart, read_restarts, record_requeue, restart_limit, resume_args
from allranks.launch.resumption import require_same_schema
from allranks.launch.slurm.liveness import DriverRecord, print_log_line, slurm_node_name
from allranks.launch.slurm.requeue import REQUEUE_REASONS, StopAndRequeue, StopRequested
from allranks.launch.stop_limit import FACTOR, StopLimit
from allranks.launch.supervisor import JobEnd, Supervisor, supervise
from allranks.nodes.network.facts import policy_for_nodes
from allranks.nodes.preflight.runner import (
    PreflightResult,
    TargetNodes,
    choose_nodes,
    exclude_nodes,
    failure_lines,
    require_usable_nodes,
    run_preflight,
    unusable_nodes,
    without_nodes,
    write_preflight,
)
from allranks.nodes.records import PreflightReport
from allranks.nodes.slurm.allocations import Allocation, expand_hostlist
from allranks.nodes.slurm.commands import Slurm
from allranks.nodes.slurm.srun import SrunStep, srun_command
from allranks.nodes.staging.manifests import StageManifest
from allranks.planning import memory, network_policy
from allranks.planning.planner import network_job, resolve_device
from allranks.planning.records import load_plan
from allranks.rundir.events import read_run_events
from allranks.rundir.files import make_folder, read_json, read_record, write_json
from allranks.rundir.paths import RunDir
from allranks.spec import RunSpec, load_spec
from allranks.utils.machine import host_name, machine_facts

POLL_S = 0.2
KEEP_S = 120.0  # how long agents keep their ranks without this process
END_S = 15.0  # from the end of all agents to that of their step
END_LIMIT_S = 60.0  # from the order to end the ranks to the end of their step
LOST_END_S = 2.0  # the same where a node is lost: srun would wait for it
WARM_IMPORTS = "allranks.launch.rank, allranks.train.worker, transformers"
PACKAGE_CHECKS = {"py", "pkgs", "imports", "program"}


def main() -> None:
    run = RunDir(Path(sys.argv[1]))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # After `sbatch --export=NONE` (a habit of some sites) srun would hand on nothing.
    os.environ["SLURM_EXPORT_ENV"] = "ALL"
    record = DriverRecord(run)
    problem = ""
    try:
        code = Driver(run, record).run()
    except AllranksError as error:
        code, problem = error.exit_code, str(error)
        print_log_line(problem)
    except Exception as error:  # noqa: BLE001 - the outermost level of the process
        traceback.print_exc()
        code = EXIT_FAILED
        problem = f"the driver of the job failed on {slurm_node_name()}: {type(error).__name__}: {error}"
    if problem:
        record.write("failed", message=problem, exit_code=code)
    record.close()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # one that comes now is late, and would end Python's own shutdown
    sys.exit(code)


class Driver:
    """One start of a job."""

    def __init__(self, run: RunDir, record: DriverRecord) -> None:
        self._run, self._record = run, record
        require_same_schema(run)  # allranks may have been replaced while the job waited in the queue
        self._spec: RunSpec = load_spec(run.spec)
        self._plan = load_plan(run)
        self._job = os.environ["SLURM_JOB_ID"]
        self._restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self._slurm = Slurm([], "this job's")
        self._ending = StopAndRequeue(
            run, self._slurm, record, job=self._job, restart=self._restart, cluster=self._spec.cluster
        )
        self._most = self._spec.cluster.allocated_nodes  # an allocation of others may have more
        # A step outlasts a lost node, and starts while Slurm still waits for the end of another on that node.
        self._step_options = ["--no-kill", "--overlap"] if self._spec.cluster.spares else []
        self._hosts: list[str] = []  # the nodes of the ranks
        self._spares: list[str] = []  # the other usable nodes of the job
        self._lost: dict[str, str] = {}  # nodes of the newest attempt that are lost, with the evidence
        self._suspects: set[str] = set()  # nodes of this start that are used last
        self._decided: list[Restart] = []  # restarts of this start of the job
        self._stage = ExitStack()  # removes what was staged, which later attempts use again
        self._manifest: StageManifest | None = None

    def run(self) -> int:
        """Run the job and return its exit code; start again within it where the cause of a failure allows it."""
        self._ending.handle_signals()
        with self._stage:
            return self._run_attempts()

    def _run_attempts(self) -> int:
        resume: dict[str, object] | None = None
        self._record_lost_nodes(max(self._run.attempts(), default=0))
        while True:
            attempt = max(self._run.attempts(), default=0) + 1
            make_folder(self._run.logs_of(attempt))
            self._record.write("running", attempt=attempt, end=None)
            if resume is None:
                self._record.start()
                resume = self._resume_args(attempt)
            write_attempt_args(self._run, attempt, resume)
            code, again = self._run_attempt(attempt)
            if again is None:
                return code
            self._decided.append(again)
            self._suspects.update(again.left_out)
            resume = again.resume_args(self._spec)

    def _record_lost_nodes(self, attempt: int) -> None:
        """Record which nodes the attempt before lost, where Slurm started the job again before anybody noticed."""
        if not self._restart or not attempt or any(one.attempt == attempt for one in read_restarts(self._run)):
            return
        places = read_record(self._run.rendezvous(attempt)).get("places", ())
        hosts = {str(read_record(self._run.driver).get("host")), *(place["host"] for place in places)}
        usable = self._slurm.usable_nodes(self._spec.cluster.slurm.partition)
        if usable is not None and (lost := self._ending.lost_nodes(sorted(hosts - set(usable)))):
            record_requeue(self._run, attempt, lost, own_program=self._plan.batch is None)

    def _run_attempt(self, attempt: int) -> tuple[int, Restart | None]:
        """Run one attempt; return its exit code, and the decision by which the job starts again."""
        self._srun_options, self._python = agent_command(self._spec, self._plan, self._run, sys.executable)
        try:
            preflight = self._examine(attempt)
            place = self._meet(preflight)
            self._decide_network(attempt, preflight)
            if place is not None:
                write_json(self._run.rendezvous(attempt), msgspec.to_builtins(place))
                print_log_line(
                    f"job {self._job} start {self._restart}: rendezvous on node 0, {place.address}, network "
                    f"{place.network} ({place.reason})"
                )
                for p in place.places:
                    ranks = self._plan.nodes[p.node].ranks
                    print_log_line(f"node {p.node} = {p.host} {p.interface} {p.address}: ranks {ranks[0]}-{ranks[-1]}")
            self._stage_on_nodes(preflight)
            self._ending.raise_if_stop_requested()
            code, end = self._start(attempt, place, preflight)
        except StopRequested:
            return self._end_before_start(attempt), None
        except AllranksError:
            # With GraceTime, a preemption signals the steps of a job, such as that of the preflight, and not this
            # script.
            if self._ending.why or self._ending.ask_slurm_for_cause() != "preempted":
                raise
            self._ending.why = "preempted"
            return self._end_before_start(attempt), None
        return self._end(attempt, code, end)

    def _end_before_start(self, attempt: int) -> int:
        """End or requeue the job before any rank was started."""
        self._stage.close()
        text = f"ended before the ranks were started: {self._ending.reason_text}"
        print_log_line(text)
        if refused := self._ending.requeue(self._spec, self._plan, attempt, stopped=True):
            text = f"{text}; {refused}"
        by_slurm = self._ending.why in (*REQUEUE_REASONS, "node_fail")
        self._record.write("failed" if by_slurm else "cancelled", message=text, exit_code=EXIT_FAILED)
        return EXIT_FAILED

    def _resume_args(self, attempt: int) -> dict[str, object]:
        """Return arguments for a later start of the job to resume from the newest full checkpoint, if there is one."""
        given = read_json(self._run.logs / "resume.json")
        if attempt == 1:
            return {}
        if isinstance(given, dict) and self._restart == 0:
            return given
        resume, notes = resume_args(self._run, self._spec)
        for line in notes:
            print_log_line(line)
        return resume

    @staticmethod
    def _cpus() -> str:
        """Return the cores per task for srun; since Slurm 22.05, srun does not inherit sbatch's value."""
        return os.environ.get("SLURM_CPUS_PER_TASK") or os.environ.get("SLURM_CPUS_ON_NODE", "1").split("(")[0]

    def _examine(self, attempt: int) -> PreflightResult:
        """Collect facts from every node and test connections between them; choose the nodes of the ranks.

        Imports are not tested: the ranks import at once anyway, and a test costs seconds on every node.
        """
        self._ending.raise_if_stop_requested()
        # The port of the store must not be predictable from the job's number.
        key = f"{self._job}.{self._restart}.{secrets.token_hex(8)}"
        gone = self._spec.cluster.slurm.exclude
        hosts = [host for host in expand_hostlist(self._slurm, os.environ["SLURM_JOB_NODELIST"]) if host not in gone]
        where = TargetNodes(hosts=hosts[: self._most], job_id=key, cpus=int(self._cpus()))
        preflight = run_preflight(where, self._spec, self._plan, self._run.root, imports=False)
        self._ending.raise_if_stop_requested()
        if self._resolve_device(preflight):
            preflight = run_preflight(where, self._spec, self._plan, self._run.root, imports=False)
        write_preflight(self._run, preflight)
        for report in preflight.reports:
            print_log_line(report.line())
        for line in failure_lines([report for report in preflight.reports if report.may_run]):
            print_log_line(line)
        if bad := unusable_nodes(self._spec, preflight.reports):
            if len(where.hosts) - len(bad) < len(self._plan.nodes) and not self._spec.cluster.exclude_bad:
                lost = self._lost and self._lost | self._ending.lost_nodes(report.host for report in bad)
                self._ending.requeue(self._spec, self._plan, attempt, stopped=False, lost=lost)
                require_usable_nodes(bad)
            preflight = self._without(bad, where)
        usable = [host for host in where.hosts if host in {report.host for report in preflight.reports}]
        self._hosts, self._spares = choose_nodes(usable, len(self._plan.nodes), self._suspects)
        if self._spares:
            print_log_line(f"spare: {', '.join(self._spares)}")
        self._lost = {}
        preflight = preflight.of_hosts(self._hosts, self._spec.cluster.rendezvous.interface)
        if preflight.port is None:
            raise EnvironmentNotAble("no free port on the first node; choose another with cluster.rendezvous.port")
        return preflight

    def _resolve_device(self, preflight: PreflightResult) -> bool:
        """Decide ``device: auto`` from the nodes' GPUs; return whether the plan changed."""
        spec = resolve_device(self._spec, self._plan, {probe.host: len(probe.gpus) for probe in preflight.probes})
        if spec is None:
            return False
        self._spec = spec
        self._make_plan()
        print_log_line(
            f"device auto: the nodes have {self._plan.device}; {self._plan.world_size} ranks, {self._plan.work}"
        )
        return True

    def _make_plan(self) -> None:
        """Plan again for the current spec; keep the environment that the job received."""
        before = self._plan
        plan = msgspec.structs.replace(memory.make_plan(self._spec, machine_facts()), environment=before.environment)
        resumes = max(self._run.attempts(), default=1) > 1
        if resumes:  # what was trained with compiled blocks goes on with them, and the reverse
            plan = msgspec.structs.replace(plan, compiled=before.compiled, compile_reason=before.compile_reason)
        self._plan = plan
        write_json(self._run.plan, msgspec.to_builtins(self._plan))

    def _without(self, bad: list[PreflightReport], where: TargetNodes) -> PreflightResult:
        """Check the other nodes again, as a bad one may have hidden failures; without enough of them, plan for
        fewer."""
        names, plan = [r.host for r in bad], self._plan
        left = [host for host in where.hosts if host not in names]
        for line in failure_lines(bad):
            print_log_line(line)
        cluster = msgspec.structs.replace(
            self._spec.cluster, device=plan.device, backend=plan.backend, procs_per_node=plan.procs_per_node
        )
        spec = msgspec.structs.replace(self._spec, cluster=cluster)
        self._spec = exclude_nodes(spec, names, len(left), machine_facts())
        if self._spec.cluster.nodes < len(plan.nodes):
            self._make_plan()
        batch, count = self._plan.batch, len(self._plan.nodes)
        size = f", global batch {batch.global_batch_size}" if batch else ""
        taken = ", ".join(host for host in left[:count] if host not in where.hosts[:count])
        size += f"; {taken} was spare" if taken and count == len(plan.nodes) else ""
        going_on = f"continuing without {', '.join(names)}: {self._plan.world_size} ranks on {count} nodes{size}"
        print_log_line(going_on)
        self._record.write("running", note="; ".join([*failure_lines(bad), going_on]))
        again = run_preflight(
            msgspec.structs.replace(where, hosts=left), self._spec, self._plan, self._run.root, imports=False
        )
        write_preflight(self._run, msgspec.structs.replace(again, reports=[*again.reports, *bad]))
        require_usable_nodes(unusable_nodes(self._spec, again.reports))
        return again

    def _stage_on_nodes(self, preflight: PreflightResult) -> None:
        """Stage code, packages, model or data on nodes that lack them, spare ones too, until the job ends."""
        lacking = [r.host for r in preflight.reports if not r.may_run]
        always = self._spec.cluster.stage == "always"
        if self._spec.cluster.stage == "never" or not (lacking or always or self._run.bundle.exists()):
            return
        if self._manifest is not None:
            self._python = self._manifest.python(self._python)
            return
        from allranks.nodes.staging.broadcast import bundle_for, load_packed_ahead, staged

        self._ending.raise_if_stop_requested()
        print_log_line(f"staging for {', '.join(lacking) or 'all nodes'}")
        allocation = Allocation.current()
        allocation = msgspec.structs.replace(allocation, nodes=(*self._hosts, *self._spares))
        failed = {check.name for report in preflight.reports for check in report.checks if not check.ok}
        packages, ahead = always or bool(failed & PACKAGE_CHECKS), load_packed_ahead(self._run)
        bundle = bundle_for(self._spec, allocation, packages=packages, always=always, ahead=ahead, log=print_log_line)
        self._ending.raise_if_stop_requested()
        on_nodes = staged(
            bundle,
            allocation,
            always=always,
            log=print_log_line,
            lost=lambda: {*self._lost, *self._spec.cluster.slurm.exclude},
        )
        self._manifest = self._stage.enter_context(on_nodes)
        self._manifest.save(self._run.stage)
        self._python = self._manifest.python(self._python)

    def _meet(self, preflight: PreflightResult) -> Rendezvous | None:
        """Choose the network of several nodes; one node needs none."""
        network = preflight.network
        if network is None or preflight.port is None or len(self._plan.nodes) < 2:
            return None
        hosts = [probe.host for probe in sorted(preflight.probes, key=lambda probe: probe.node_id)]
        places = [
            NodeAddress(node=i, host=h, address=network.seats[h].address, interface=network.seats[h].interface)
            for i, h in enumerate(hosts)
        ]
        return Rendezvous(
            address=self._spec.cluster.rendezvous.address or places[0].address,
            port=preflight.port,
            port_fixed=self._spec.cluster.rendezvous.port is not None,
            network=network.network,
            reason=network.reason,
            places=places,
        )

    def _decide_network(self, attempt: int, preflight: PreflightResult) -> None:
        """Decide each node's NCCL and Gloo variables from the facts of all nodes; the agents set them."""
        job = network_job(self._spec, self._plan.device)
        planned = {item.name for item in self._plan.environment if item.value is not None}
        policy = policy_for_nodes(job, preflight.probes, preflight.network, self._run.root.parent, planned)
        network_policy.save_policy(self._run.network(attempt), policy)
        for line in network_policy.policy_lines(policy):
            print_log_line(line)

    def _start(self, attempt: int, place: Rendezvous | None, preflight: PreflightResult) -> tuple[int, JobEnd]:
        """Start one agent per node and supervise them until all have ended."""
        first = preflight.probes[0].host if preflight.probes else slurm_node_name()
        supervisor, hub = supervise(
            self._run,
            self._plan,
            attempt,
            place,
            first,
            address=self._address(place, first),
            port=control_port(self._spec.cluster.rendezvous.port or 0),
            keep_s=KEEP_S,
        )
        os.environ[CHANNEL_VARIABLE] = msgspec.json.encode(hub.endpoint).decode()
        channel = self._run.channel(attempt)
        write_json(channel, msgspec.to_builtins(hub.endpoint), private=True)  # for other commands in an allocation
        command = agent_words(self._python, self._run, attempt, telemetry_s=self._spec.observe.telemetry_s)
        options = ["--input=none", "--unbuffered", "--wait=0", *self._step_options, *self._srun_options]
        step = SrunStep(srun_command(self._hosts, command, cpus=self._cpus(), options=options))
        warm = self._warm_spares()
        try:
            code = self._wait(step, supervisor)
        finally:
            step.close()
            hub.close()
            channel.unlink(missing_ok=True)
            if warm is not None:
                warm.close()
        return code, supervisor.result()

    def _warm_spares(self) -> SrunStep | None:
        """Start to import on the spare nodes what the ranks import, so that a later start finds it in their caches."""
        if not self._spares:
            return None
        code = f"import {WARM_IMPORTS if self._plan.batch else 'allranks.launch.rank, torch'}"
        command = ["nice", "-n", "19", *self._python, "-c", code]
        options = ["--input=none", "--output=none", "--error=none", "--overlap", *self._srun_options]
        return SrunStep(srun_command(self._spares, command, cpus=self._cpus(), options=options))

    def _address(self, place: Rendezvous | None, first: str) -> str:
        """Return the control channel's address: on the ranks' network, or loopback for a single node."""
        if place is not None:
            return own_address_towards(place.places[0].address)
        if first in (slurm_node_name(), host_name()):
            return LOOPBACK
        return own_address_towards(first)  # in an allocation, on another machine

    def _wait(self, step: SrunStep, supervisor: Supervisor) -> int:
        """Wait for the agents' job step to end, for a bounded time after all agents ended or were ordered to end."""
        reported: set[int] = set()
        ended_since = ordered_since = math.inf
        ending = False
        limit = StopLimit(self._run, self._plan, 0.0)
        while (code := step.poll()) is None:
            time.sleep(POLL_S)
            self._ending.check_time_limit(FACTOR * limit.measured_s(time.monotonic()))
            self._ending.check_signal(supervisor)
            for lost in supervisor.lost:
                if lost.node not in reported:
                    reported.add(lost.node)
                    print_log_line(f"agent of {lost.host}: {lost.why}")
                    self._lost |= self._ending.lost_nodes([self._hosts[lost.node]])
                    if self._lost and self._plan.batch is not None:  # without it no other rank reaches a checkpoint
                        supervisor.kill(f"node {self._hosts[lost.node]} is lost")
            now = time.monotonic()
            ended_since = min(ended_since, now) if supervisor.all_ended else math.inf
            ordered_since = min(ordered_since, now) if supervisor.orders.end else math.inf
            end_s = LOST_END_S if self._lost else END_S
            if now - ended_since > end_s or now - ordered_since > END_LIMIT_S:
                if not ending:
                    print_log_line("the agents have ended, but their job step has not; cancelling it")
                ending = True
                step.end(end_s)
        return code

    def _end(self, attempt: int, code: int, end: JobEnd) -> tuple[int, Restart | None]:
        if max(self._run.attempts(), default=attempt) > attempt:
            print_log_line("Slurm has started the job again in the meantime; the new start continues the run")
            return code, None
        self._ending.check_signal()
        ranks = [events_of_attempt(events, attempt) for events in read_run_events(self._run).values()]
        stopped = code == 0 and any(e["event"] == "stop" for events in ranks for e in events)
        signalled = (stopped and not end.stopped) or end.terminated
        if signalled and not self._ending.why and self._ending.ask_slurm_for_cause() == "preempted":
            # With GraceTime, Slurm signals the steps of the job, and not this script.
            self._ending.why = "preempted"
            print_log_line(f"SIGTERM to the ranks: {self._ending.reason_text}")
        if self._ending.why and not end.stopped:
            end = msgspec.structs.replace(end, stopped=self._ending.reason_text)
        lost = self._lost_hosts(end) if code and not self._ending.why else {}
        replaced = 0 < len(lost) <= len(self._spares) and len(self._decided) < restart_limit(self._spec)
        if self._ending.why or (lost and not replaced):
            self._stage.close()
        refused = self._ending.requeue(
            self._spec, self._plan, attempt, end, stopped=stopped, lost={} if replaced else lost
        )
        if refused and stopped:
            end = msgspec.structs.replace(end, stopped=f"{end.stopped}; {refused}")
        state = "stopped" if stopped else "failed" if code or (end.terminated and not end.ends) else "done"
        state = "cancelled" if self._ending.why == "cancelled" else state
        more = {"gave_up": refused[0].upper() + refused[1:]} if refused else {}
        self._record.write("running", end=msgspec.to_builtins(end), why=self._ending.why, **more)
        ended = self._ending.why or self._run.cancelled.exists() or (lost and not replaced)
        before = None if state != "failed" or ended else self._decided
        # there may be no follower
        result = finalize_run(
            self._run, self._spec, self._plan, code, end=end, restarts_before=before, spares=self._spares, lost=lost
        )
        notify(self._spec, result, print_log_line)
        if state == "failed" and self._ending.requeued_by_slurm():  # Slurm has found a node of the job down meanwhile
            state = "requeued"
        elif result.restart is not None:
            for line in result.restart.lines:
                print_log_line(line)
            if result.restart.action == "restart":
                self._lost, self._spec = lost, without_nodes(self._spec, list(lost))
                return code, result.restart
        self._stage.close()
        self._record.write(state, exit_code=code)
        return code, None

    def _lost_hosts(self, end: JobEnd) -> dict[str, str]:
        """Return which nodes of this attempt are lost, with the evidence."""
        silent = [self._hosts[n] for n in sorted({lost.node for lost in end.lost} | set(end.not_joined))]
        self._lost |= self._ending.lost_nodes(host for host in silent if host not in self._lost)
        return {host: self._lost[host] for host in silent if host in self._lost}


if __name__ == "__main__":
    main()
