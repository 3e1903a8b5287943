"""Agent of one node: start its ranks, monitor them, report to the driver and follow its orders.

``python -m allranks.launch.agent RUN --attempt A --node N``; the ranks inherit this process's environment. All orders
arrive over the control channel; the run folder keeps the record. Signals: USR1 and TERM stop the ranks after a
checkpoint (a user's own program gets SIGTERM, and SIGKILL after a grace period), INT stops them at once. No torch.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
import psutil

from allranks.errors import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_OK
from allranks.launch import channel_protocol as protocol
from allranks.launch import rank_processes as processes
from allranks.launch.channel import ChannelClient
from allranks.launch.monitor import evidence
from allranks.launch.monitor.evidence import EvidenceCollector, ras_address
from allranks.launch.monitor.hang_watch import HangMonitor, ScriptSilence, WatchedNode
from allranks.launch.monitor.log_progress import LogProgress
from allranks.launch.monitor.records import HangAlarm
from allranks.launch.monitor.telemetry import TelemetrySampler
from allranks.launch.process_guard import ProcessGuard
from allranks.launch.rank import end_with_parent
from allranks.launch.rendezvous import (
    END_ITS_PROGRAM,
    LOOPBACK,
    FileStoreFolder,
    Rendezvous,
    TcpStoreServer,
    bind_problem,
    free_port,
    host_labels,
    interface_towards,
)
from allranks.launch.stop_limit import StopLimit
from allranks.planning import network_policy
from allranks.planning.rank_environment import threads_per_rank
from allranks.planning.records import LaunchPlan, load_plan
from allranks.rundir.files import read_json, write_node_json
from allranks.rundir.heartbeat import HEARTBEAT_VARIABLE, STORE_VARIABLE, HeartbeatPage, page_paths
from allranks.rundir.paths import RunDir
from allranks.utils.kernel_counters import connection_addresses, count_by_interface
from allranks.utils.machine import host_name, usable_cpus

if TYPE_CHECKING:
    from allranks.launch.host_agent import ProbeAnswers

POLL_S = 0.1
REACH_S = 90.0  # to reach the driver for the first time
PEER_GRACE_S = 5.0  # for the other ranks of this node, after one has failed
STOP_GRACE_S = 30.0  # for a checkpoint, once the driver is lost: at least
TERMINATE_S = 5.0  # between SIGTERM and SIGKILL to a program of the user's own, one of whose ranks has failed
DELIVER_S = 5.0
DECIDED_S = 90.0  # from the end of the ranks to the next attempt: also a shared file system may show it late
CONNECTIONS_S = 0.5
CONNECTIONS_LOOKS = 10


def main() -> None:
    parser = argparse.ArgumentParser(prog="allranks.launch.agent")
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--node", type=int, default=int(os.environ.get("SLURM_NODEID", "0")))
    parser.add_argument("--telemetry-s", type=float, default=1.0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run, by_hand = RunDir(args.run), protocol.CHANNEL_VARIABLE not in os.environ
    agent = Agent(run, load_plan(run), args.attempt, args.node, args.telemetry_s)
    code = agent.run()
    if not agent.delivered and not by_hand and run.driver.exists():
        from allranks.launch.slurm.job import IN_ALLOCATION
        from allranks.launch.slurm.liveness import continue_without_driver

        if IN_ALLOCATION not in os.environ and (job := os.environ.get("SLURM_JOB_ID")):
            continue_without_driver(run, job, stopped=lambda: agent.stopped)
    if by_hand and code == EXIT_FAILED and _starts_again(run, args.attempt, agent):
        words = [str(run.root), "--attempt", f"{args.attempt + 1}", "--node", f"{args.node}"]
        more = ["--telemetry-s", f"{args.telemetry_s}"]
        os.execv(sys.executable, [sys.executable, "-m", "allranks.launch.agent", *words, *more])  # noqa: S606 - itself
    sys.exit(code)


def _starts_again(run: RunDir, attempt: int, agent: Agent) -> bool:
    """Wait for a limited time until the launcher has decided on a failed attempt, and listens for the next one."""
    from allranks.launch.restarts import read_restarts, restart_limit  # most agents do not fail
    from allranks.spec import load_spec

    undecided = run.compare.exists() or not restart_limit(load_spec(run.spec))
    deadline = 0.0 if undecided else time.monotonic() + DECIDED_S
    while time.monotonic() < deadline and not agent.stopped:
        decided = next((one.action for one in read_restarts(run) if one.attempt == attempt), "")
        if decided == "stop":
            return False
        if decided and read_json(run.channel(attempt + 1)) is not None:
            return True
        time.sleep(POLL_S)
    return False


class AgentSignals:
    """Stop requests received as signals; handlers only set flags."""

    def __init__(self) -> None:
        self.stop = self.kill = False
        self.stop_name = ""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._on_stop)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(signal.SIGHUP, self._on_stop)
        signal.signal(signal.SIGINT, self._on_kill)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self.stop = True
        self.stop_name = self.stop_name or signal.Signals(number).name

    def _on_kill(self, number: int, frame: FrameType | None) -> None:
        self.kill = True


class Agent:
    """Run the ranks of one node. One loop makes all decisions; threads only measure and communicate."""

    def __init__(self, run: RunDir, plan: LaunchPlan, attempt: int, node: int, telemetry_s: float) -> None:
        self._run, self._plan, self._attempt, self._node = run, plan, attempt, node
        self._host = host_name()
        self._telemetry_s = telemetry_s
        rendezvous = read_json(run.rendezvous(attempt))
        self._meeting = msgspec.convert(rendezvous, Rendezvous) if rendezvous else None
        self._policy = network_policy.load_policy(run.network(attempt))
        self._pages = {rank: HeartbeatPage() for rank in plan.nodes[node].ranks}
        self._ranks = processes.RankProcesses(self._host, self._pages)
        self._signals = AgentSignals()
        self.delivered = True
        """Whether the driver has received the final report."""
        self._torchrun = processes.take_torchrun_settings()
        self._started_by_launcher = protocol.CHANNEL_VARIABLE in os.environ
        self._endpoint = _endpoint(run, attempt)
        self._report = protocol.AgentReport(
            node=node, host=self._names[0] or self._host, machine=self._host, pid=os.getpid()
        )
        self._channel = ChannelClient(self._endpoint, self._report)
        self._stores: list[FileStoreFolder | TcpStoreServer] = []
        self._reason = self._refused = ""
        self._alarm: HangAlarm | None = None
        self._hung = self._driver_gone = False
        self._limit: StopLimit | None = None
        self._guard: ProcessGuard | None = None
        self._deadline = math.inf  # when the ranks are killed
        self._checkpoints = 0  # requested so far
        self._watch = self._hang_watch()
        self._log_progress = self._log_reader()

    @property
    def stopped(self) -> bool:
        """Return whether the end was requested, or the launcher is gone."""
        return self._signals.stop or self._signals.kill or self._driver_gone or bool(self._channel.orders.stop)

    def run(self) -> int:
        """Run the ranks and return the exit code: 0 if every rank succeeded."""
        if self._started_by_launcher:
            # A launcher that is killed: the ranks stop as at every other stop.
            launcher = os.environ.pop(protocol.LAUNCHER_PID_VARIABLE, "")
            end_with_parent(parent=int(launcher) if launcher.isdigit() else None)
        telemetry = TelemetrySampler(self._run.telemetry_of(self._host), self._telemetry_s, self._host, self._run.root)
        if self._telemetry_s:
            telemetry.start()
        self._channel.start()
        try:
            self._prepare()
            if (start := self._await_start()) is not None:
                self._start_ranks(start)
                self._supervise()
        finally:
            # whatever has failed above: ranks without an agent would hold their GPUs
            self._ranks.kill()
            for store in self._stores:
                store.close()
        if self._telemetry_s:
            telemetry.stop()
        if self._watch:
            self._watch.stop()
        if self._log_progress:
            self._log_progress.stop()
        return self._finish()

    def _prepare(self) -> None:
        self._node_environment()
        os.environ[HEARTBEAT_VARIABLE] = page_paths([self._pages[rank] for rank in sorted(self._pages)])
        if self._watch:
            for name, value in evidence.flight_recorder_environment(
                self._plan.device, self._run.hang(self._attempt), self._torchrun.torch if self._torchrun else None
            ).items():
                os.environ.setdefault(name, value)
        if self._node == 0 and self._plan.needs_store:
            self._open_store()

    def _open_store(self) -> None:
        place = self._torchrun or self._meeting
        address, port = (place.address, place.port) if place else (LOOPBACK, 0)
        listen, python, cure = address, sys.executable, "leave cluster.rendezvous.port and address null"
        if self._torchrun:
            listen = LOOPBACK if address in (LOOPBACK, "localhost") else ""
            python, cure = self._torchrun.python, "give no --master-port"
        if self._torchrun and not self._torchrun.agent_store:
            self._publish(store=(address, port or free_port()))
            return
        try:
            try:
                server = TcpStoreServer(listen, port, python)
            except OSError:
                if place is None or place.port_fixed:
                    raise
                server = TcpStoreServer(listen, 0, python)
        except OSError as error:
            self._refused = f"node 0 cannot listen on {address}:{port} for the store of the ranks: " + bind_problem(
                error, port, f"{cure}, so that a free port is chosen, or {END_ITS_PROGRAM}"
            )
            return
        if server.note:
            logging.warning(server.note)
        self._stores.append(server)
        self._publish(store=(address, server.port))

    def _await_start(self) -> protocol.StartOrder | None:
        """Return the rendezvous once all nodes have joined and are fit; None if no rank is to be started."""
        answers: ProbeAnswers | None = None
        while not self._refused:
            orders = self._channel.orders
            if self._signals.kill or self._signals.stop or orders.stopping:
                self._reason = orders.stopping or "a stop signal arrived before the ranks were started"
                return None
            if orders.start is not None:
                return orders.start
            if orders.probe is not None:
                answers = answers or self._probe_answers()
                if (answered := answers.take(orders.probe)) is not None:
                    self._publish(answer=answered)
            if self._store_failed:
                self._refused = (
                    "the process that serves the ranks' store exited before the ranks were started; see its error "
                    "above in this log"
                )
            silent = self._channel.silent_s
            if not self._channel.ever_connected and silent > REACH_S:
                self._refused = (
                    f"this node could not reach the run's driver at {self._channel.where} within {REACH_S:.0f} s: "
                    f"{self._channel.why}; a firewall between the nodes may be the cause (cluster.rendezvous.port and "
                    "interface select port and network)"
                )
            elif self._driver_lost(silent):
                self._refused = (
                    f"the connection to the run's driver at {self._channel.where} was lost before the ranks were "
                    f"started: {self._channel.why}"
                )
            time.sleep(POLL_S)
        return None

    def _probe_answers(self) -> ProbeAnswers:
        from allranks.launch.host_agent import ProbeAnswers  # only agents that users started are queried

        labels = host_labels([place.host for place in self._meeting.places]) if self._meeting else [self._host]
        return ProbeAnswers(self._node, labels[self._node])

    def _driver_lost(self, silent_s: float) -> bool:
        keep_s = self._endpoint.keep_s
        return keep_s is not None and self._channel.ever_connected and silent_s > keep_s

    def _start_ranks(self, start: protocol.StartOrder) -> None:
        nodes, world = self._plan.nodes, self._plan.world_size
        mine = nodes[self._node].ranks
        own = self._torchrun
        run_id = own.run_id if own else f"{self._run.name}.{self._attempt}"
        more = self._store_environment(start)
        place = self._node, len(nodes), world, run_id, self._attempt - 1
        environments = {
            rank: {**processes.torchrun_environment(rank, i, len(mine), *place), **more} for i, rank in enumerate(mine)
        }
        if own:
            for i, (rank, variables) in enumerate(environments.items()):
                variables.update(own.variables(self._run.error_file(self._attempt, self._host, rank), i))
                if own.virtual_local_rank:
                    variables[HEARTBEAT_VARIABLE] = page_paths([self._pages[rank]])
        if self._plan.grace_s is not None:
            self._guard = ProcessGuard(run_id, self._plan.grace_s)
        command = own.command if own else [sys.executable, "-u", "-m"]
        self._ranks.start([*command, "allranks.launch.rank", str(self._run.root), str(self._attempt)], environments)
        if self._guard:
            self._guard.watch(self._ranks.pids)
        self._publish(state=protocol.RUNNING)
        if self._watch:
            self._watch.start()
        if self._log_progress:
            self._log_progress.start()
        threading.Thread(target=self._watch_connections, name="connections", daemon=True).start()

    def _store_environment(self, start: protocol.StartOrder) -> dict[str, str]:
        if not self._plan.needs_store:
            place = FileStoreFolder()
            self._stores.append(place)
            return {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": "0", **place.environment}
        place = {"MASTER_ADDR": start.address, "MASTER_PORT": str(start.port)}
        if self._plan.batch is None:
            return place
        return {**place, STORE_VARIABLE: f"tcp:{start.address}:{start.port}:{start.nonce}"}

    def _supervise(self) -> None:
        """Supervise the ranks until all of them have ended."""
        while True:
            ends, orders = self._ranks.poll(), self._channel.orders
            urgent = len(ends) != len(self._report.ends) or self._alarm != self._report.alarm
            self._publish(at_once=urgent, ends=ends, alarm=self._alarm)
            if self._ranks.all_ended:
                return
            now = time.monotonic()
            self._driver_gone = self._driver_gone or self._driver_lost(self._channel.silent_s)
            for condition, grace_s, reason in (
                (bool(orders.end), orders.end_grace_s, orders.end),
                (self._signals.kill, 0.0, "a signal stopped the ranks at once"),
                (self._hung, 0.0, "the ranks made no progress"),
                (any(end.failed for end in ends), PEER_GRACE_S, "a rank of this node failed"),
                (self._driver_gone and self._stop_expired(now), 0.0, self._lost_reason),
                (self._store_failed, 0.0, "the process that serves the ranks' store exited"),
            ):
                if condition:
                    self._end_ranks(now + grace_s, reason)
            if self._signals.stop and not orders.stop:
                self._reason = self._reason or f"the agent received {self._signals.stop_name}"
            if self._driver_gone and not self._reason:
                self._reason = self._lost_reason
                logging.warning("stopping the ranks of %s: %s", self._host, self._reason)
            if orders.stop or self._signals.stop or self._driver_gone:
                self._stop_ranks(now)
            if now >= self._deadline:
                self._ranks.kill()
            if orders.checkpoints > self._checkpoints and 0 in self._pages:  # rank 0 passes it on to the others
                self._checkpoints = orders.checkpoints
                self._pages[0].request_checkpoint()
            time.sleep(POLL_S)

    def _end_ranks(self, deadline: float, reason: str) -> None:
        """Have the ranks killed at a time; a user's own program receives SIGTERM first."""
        if self._deadline == math.inf:
            self._reason = self._reason or reason
            logging.warning("stopping the ranks of %s: %s", self._host, reason)
            if self._plan.batch is None and not (self._signals.kill or self._driver_gone):
                self._ranks.terminate()
                deadline = max(deadline, time.monotonic() + TERMINATE_S)
        self._deadline = min(self._deadline, deadline)

    def _stop_ranks(self, now: float) -> None:
        """Request a stop of the ranks. A user's own program is killed after its grace period."""
        if self._plan.grace_s is None:
            self._ranks.request_stop()
            return
        self._ranks.terminate_programs()
        self._deadline = min(self._deadline, now + self._plan.grace_s)

    def _stop_expired(self, now: float) -> bool:
        """Return whether, without the driver, a checkpoint's time or a user program's grace period has passed."""
        least_s = STOP_GRACE_S if self._plan.grace_s is None else self._plan.grace_s
        self._limit = self._limit or StopLimit(self._run, self._plan, least_s, min(self._pages))
        return self._limit.expired(now)

    @property
    def _store_failed(self) -> bool:
        return any(isinstance(store, TcpStoreServer) and store.exit_code() is not None for store in self._stores)

    @property
    def _lost_reason(self) -> str:
        return (
            f"the control channel to the driver at {self._channel.where} was lost for {self._endpoint.keep_s} s "
            f"({self._channel.why}); the ranks were stopped after "
            + ("a request for a checkpoint" if self._plan.grace_s is None else "SIGTERM")
        )

    def _publish(self, *, at_once: bool = True, **values: object) -> None:
        self._report = msgspec.structs.replace(self._report, **values)  # type: ignore[arg-type]
        self._channel.publish(self._report, at_once=at_once)

    def _finish(self) -> int:
        """Write the record of this node and report the end."""
        good = [end for end in self._report.ends if end.succeeded]
        self._publish(state=protocol.ENDED, refused=self._refused, reason=self._reason)
        self._write_exit()
        if self._refused:
            logging.error(self._refused)
        self.delivered = self._channel.wait_delivered(DELIVER_S)
        self._channel.close()
        self._ranks.end_leftovers()
        if self._guard:
            self._guard.close()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # one that comes now is late, and would end Python's own shutdown
        return EXIT_ENVIRONMENT if self._refused else EXIT_OK if len(good) == len(self._pages) else EXIT_FAILED

    def _write_exit(self) -> None:
        record = {
            "host": self._host,
            "node": self._node,
            "attempt": self._attempt,
            "killed_by_request": self._signals.kill,
            "time": time.time(),
            "refused": self._refused,
            "reason": self._reason,
            "failed": msgspec.to_builtins([end for end in self._report.ends if end.failed]),
            "succeeded": msgspec.to_builtins([end for end in self._report.ends if end.succeeded]),
        }
        try:
            write_node_json(self._run.agent_exit(self._attempt, self._host), self._node, record)
        except OSError as error:  # the driver was already informed over the channel
            logging.warning("the record of this node cannot be written: %s", error)

    def _node_environment(self) -> None:
        """Set, unless the job has, variables that only this node can determine, and those decided for it."""
        if self._torchrun:
            return
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(usable_cpus(), self._plan.procs_per_node)))
        policy = self._policy
        mine = next((node for name in self._names if policy and (node := policy.of(name))), None)
        for item in mine.environment if mine else []:
            if item.value is not None:
                os.environ.setdefault(item.name, item.value)
        if self._meeting is not None:
            interface = self._meeting.places[self._node].interface or interface_towards(self._meeting.address)
            # by itself Gloo takes the address of the host's name, which may be in another network, or loopback
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            if self._plan.device == "cuda":
                # without the =, NCCL takes the name for a prefix: eth1 is eth10, too
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")

    @property
    def _names(self) -> list[str]:
        """Return the names of this node on other nodes."""
        place = [self._meeting.places[self._node].host] if self._meeting else []
        return [*place, os.environ.get("SLURMD_NODENAME", ""), self._host]

    def _watch_connections(self) -> None:
        """Record for a limited time, from the first connection on, which interfaces the ranks use."""
        own = [self._meeting.port, self._endpoint.port] if self._meeting else []
        peers = [address for node in self._policy.nodes for address in node.addresses] if self._policy else None
        names = {a.address: name for name, addresses in psutil.net_if_addrs().items() for a in addresses}
        most: dict[str, int] = {}
        looks = 0
        while looks < CONNECTIONS_LOOKS and not self._ranks.all_ended:
            time.sleep(CONNECTIONS_S)
            ports = [*own, *([self._report.store[1]] if self._report.store else [])]
            try:
                pairs = connection_addresses(self._ranks.pids, peers=peers, without_ports=ports)
                seen = count_by_interface(pairs, names)
                looks += bool(seen)
                more = {**most, **{name: max(count, most.get(name, 0)) for name, count in seen.items()}}
                if more != most:
                    most = more
                    record = {"node": self._node, "names": self._names, "interfaces": most}
                    write_node_json(self._run.connections(self._attempt, self._host), self._node, record)
            except psutil.Error:  # a rank has ended between two looks
                continue
            except OSError as error:
                logging.warning("cannot record the connections of %s: %s", self._host, error)
                return

    def _hang_watch(self) -> HangMonitor | None:
        """Return the hang monitor; comparisons are not monitored, because they pause between strategies."""
        if self._plan.hang is None or self._run.compare.exists():
            return None
        place = self._meeting.places[self._node] if self._meeting else None
        driver = (self._endpoint.address, self._endpoint.port) if place else None
        return HangMonitor(
            WatchedNode(self._run, self._attempt, self._node, self._report.host, self._host, self._pages),
            self._plan.hang,
            EvidenceCollector(
                self._run,
                self._attempt,
                self._node,
                self._host,
                driver,
                place.interface if place else "",
                ras_address(self._plan.device, self._node),
            ),
            self._channel,
            raise_alarm=self._raise_alarm,
            end=self._end_hung,
            device=self._plan.device,
            script=ScriptSilence(self._plan.hang, self._plan.device) if self._plan.batch is None else None,
        )

    def _log_reader(self) -> LogProgress | None:
        """Return the reader of what rank 0 of a user's own program prints, on its node."""
        if self._plan.batch is not None or 0 not in self._pages:
            return None
        return LogProgress(self._run.log_of(self._attempt, self._host, 0), self._run.events_of(0))

    def _raise_alarm(self, alarm: HangAlarm | None) -> None:
        self._alarm = alarm

    def _end_hung(self) -> None:
        self._hung = True


def _endpoint(run: RunDir, attempt: int) -> protocol.Endpoint:
    """Return where the driver listens: from the environment, or (hand-started agents) from the run folder."""
    text = os.environ.pop(protocol.CHANNEL_VARIABLE, "")
    if text:
        return msgspec.json.decode(text, type=protocol.Endpoint)
    endpoint = read_json(run.channel(attempt))
    if endpoint is None:
        sys.exit(
            f"allranks: attempt {attempt} of {run.root} is not running: {run.channel(attempt)} is missing or unreadable"
        )
    return msgspec.convert(endpoint, protocol.Endpoint)


if __name__ == "__main__":
    main()
