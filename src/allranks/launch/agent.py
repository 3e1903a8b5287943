"""The agent of one node: torchrun's own engine with our log files, telemetry and a record of every rank's end.

``python -m allranks.launch.agent RUN --attempt A --node N``; the environment of the ranks is this process's own.
Signals: USR1 and TERM ask the ranks for a clean stop at a step edge; INT ends them at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import psutil

from allranks.envpolicy import threads_per_rank
from allranks.errors import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_OK, EnvironmentNotAble
from allranks.fabric import report as network_file
from allranks.fabric.connections import by_interface, of_processes
from allranks.facts import host_name, usable_cpus
from allranks.hang import recorder
from allranks.hang.collect import Collector
from allranks.hang.pulse import VARIABLE
from allranks.hang.watch import HangWatch
from allranks.launch.blame import RankEnd
from allranks.launch.rank import done_marker, end_with_parent
from allranks.launch.rendezvous import Rendezvous
from allranks.observe.telemetry import Telemetry
from allranks.planning import LaunchPlan
from allranks.rundir import RunDir, read_json, write_json

PEER_DEATH_GRACE_S = 8.0
CONNECTIONS_S = 0.5
CONNECTIONS_LOOKS = 10
RENDEZVOUS_S = 300


def main() -> None:
    parser = argparse.ArgumentParser(prog="allranks.launch.agent")
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--node", type=int, default=int(os.environ.get("SLURM_NODEID", "0")))
    parser.add_argument("--telemetry-s", type=float, default=1.0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run = RunDir(args.run)
    plan = msgspec.json.decode(run.plan.read_bytes(), type=LaunchPlan)
    sys.exit(Agent(run, plan, args.attempt, args.node, args.telemetry_s).run())


class Agent:
    """Starts the ranks of one node and waits for them."""

    def __init__(self, run: RunDir, plan: LaunchPlan, attempt: int, node: int, telemetry_s: float) -> None:
        self._run, self._plan, self._attempt, self._node = run, plan, attempt, node
        self._host = host_name()
        self._telemetry_s = telemetry_s
        self._ranks = plan.nodes[node].ranks
        found = read_json(run.rendezvous(attempt))
        self._meeting = msgspec.convert(found, Rendezvous) if found else None
        self._policy = network_file.load(run.network(attempt))
        self._killed = False
        self._stop_asked = False
        self._told: set[int] = set()
        self._watch = self._hang_watch()

    def run(self) -> int:
        """The exit code: 0 if every rank ended well."""
        telemetry = (
            Telemetry(self._run.telemetry_of(self._host), self._telemetry_s, self._host, self._run.root)
            if self._telemetry_s
            else None
        )
        if telemetry:
            telemetry.start()
        signal.signal(signal.SIGUSR1, self._ask_stop)
        signal.signal(signal.SIGTERM, self._ask_stop)
        signal.signal(signal.SIGINT, self._kill)
        self._node_environment()
        end_with_parent()  # a launcher that is killed: the ranks stop cleanly
        (self._run.logs_of(self._attempt) / f"node.{self._node}.joined").write_text(self._host)
        if self._watch:
            os.environ[VARIABLE] = self._watch.offer()
            for name, value in recorder.environment(self._plan.device, self._run.hang(self._attempt)).items():
                os.environ.setdefault(name, value)
            self._watch.begin()
        threading.Thread(target=self._guard, name="guard", daemon=True).start()
        threading.Thread(target=self._obey, name="control", daemon=True).start()
        threading.Thread(target=self._watch_connections, name="connections", daemon=True).start()
        ends, refusal = self._meet_and_launch()
        if telemetry:
            telemetry.stop()
        if self._watch:
            self._watch.stop()
        self._write_exit(ends, refusal)
        if refusal:
            logging.error(refusal)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # one that comes now is late; Python's end would die of it
        return EXIT_ENVIRONMENT if refusal else EXIT_FAILED if ends else EXIT_OK

    def _meet_and_launch(self) -> tuple[list[RankEnd], str]:
        """How the failed ranks ended; or why none was started: the meeting place belongs to another run."""
        if self._meeting is None:
            return self._launch(), ""
        from allranks.launch.meeting import join_store

        try:
            store = join_store(self._meeting, self._node, self._run.name, RENDEZVOUS_S)
        except EnvironmentNotAble as error:
            return [], str(error)
        ends = self._launch()
        del store  # kept until here: on node 0 it is the one that all meet at
        return ends, ""

    def _launch(self) -> list[RankEnd]:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

        entry = ["-u", "-m", "allranks.launch.rank", str(self._run.root), str(self._attempt)]
        try:
            elastic_launch(self._config(), sys.executable)(*entry)
        except ChildFailedError as failed:
            return [
                RankEnd(rank=rank, host=self._host, pid=f.pid, exitcode=f.exitcode, time=float(f.timestamp))
                for rank, f in failed.failures.items()
            ]
        return []

    def _config(self) -> Any:
        from torch.distributed.launcher.api import LaunchConfig

        known = {f.name for f in dataclasses.fields(LaunchConfig)}
        wanted = {
            "min_nodes": len(self._plan.nodes),
            "max_nodes": len(self._plan.nodes),
            "nproc_per_node": self._plan.procs_per_node,
            "run_id": f"{self._run.name}.{self._attempt}",
            **self._meeting_place(),
            "max_restarts": 0,
            "monitor_interval": 0.1,
            "start_method": "spawn",
            "signals_to_handle": "SIGHUP,SIGQUIT",  # INT, TERM and USR1 are handled here
            "shutdown_timeout": int(PEER_DEATH_GRACE_S),
        }
        return LaunchConfig(**{k: v for k, v in wanted.items() if k in known})

    def _meeting_place(self) -> dict[str, Any]:
        """One node: port 0, so that the store itself takes a free one and no two runs can meet. Several nodes: the static
        rendezvous, in which node rank decides the ranks (c10d would sort host names), and node 0 fails aloud when its
        port is taken instead of joining another job's store."""
        if self._meeting is None:
            return {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
        return {
            "rdzv_backend": "static",
            "rdzv_endpoint": f"{self._meeting.address}:{self._meeting.port}",
            "rdzv_configs": {"rank": self._node, "timeout": RENDEZVOUS_S},
            "local_addr": self._meeting.places[self._node].address or None,
            "run_id": self._meeting.key,
        }

    def _node_environment(self) -> None:
        """What only this node can know: its interface on the chosen network, and its share of the cores."""
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(usable_cpus(), self._plan.procs_per_node)))
        self._network_environment()
        if self._meeting is not None:
            interface = self._meeting.places[self._node].interface or interface_towards(self._meeting.address)
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            if self._plan.device == "cuda":
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")

    @property
    def _names(self) -> list[str]:
        """Names by which others may know this node."""
        place = [self._meeting.places[self._node].host] if self._meeting else []
        return [*place, os.environ.get("SLURMD_NODENAME", ""), self._host]

    def _network_environment(self) -> None:
        """What was decided for this node once all of them had been asked; what the job's environment has wins."""
        policy = self._policy
        mine = next((node for name in self._names if policy and (node := policy.of(name))), None)
        for item in mine.environment if mine else []:
            if item.value is not None:
                os.environ.setdefault(item.name, item.value)

    def _watch_connections(self) -> None:
        """Writes down over which interfaces the ranks talk to each other, from their first connection on for a while."""
        ports = [self._meeting.port] if self._meeting else []
        peers = [address for node in self._policy.nodes for address in node.addresses] if self._policy else None
        names = {a.address: name for name, found in psutil.net_if_addrs().items() for a in found}
        most: dict[str, int] = {}
        looks = 0
        while looks < CONNECTIONS_LOOKS:
            time.sleep(CONNECTIONS_S)
            try:
                pids = [child.pid for child in self._children()]
            except psutil.NoSuchProcess:  # one ended between two looks
                continue
            seen = by_interface(of_processes(pids, peers=peers, without_ports=ports), names)
            looks += bool(seen)
            more = {name: max(count, most.get(name, 0)) for name, count in seen.items()}
            if {**most, **more} != most:
                most = {**most, **more}
                self._write_connections(most)

    def _write_connections(self, most: dict[str, int]) -> None:
        try:
            found = {"node": self._node, "names": self._names, "interfaces": most}
            write_json(self._run.connections(self._attempt, self._host), found)
        except OSError as error:  # a full disk must not end the watching, and it is no reason to stop the training
            logging.warning("the connections of %s are not written down: %s", self._host, error)

    def _children(self) -> list[psutil.Process]:
        return [p for p in psutil.Process().children() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def _ask_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop_asked = True
        self._tell_ranks()

    def _tell_ranks(self) -> None:
        """Hand the request on to each rank once, and not before it heeds it: one that is still starting would die of it."""
        for child in self._children() if self._stop_asked else []:
            if child.pid not in self._told and catches(child.pid, signal.SIGUSR1):
                self._told.add(child.pid)
                child.send_signal(signal.SIGUSR1)

    def _hang_watch(self) -> HangWatch | None:
        """Who looks after ranks that stand still; a comparison has pauses of its own, and is not watched."""
        if self._plan.hang is None or self._run.compare.exists():
            return None
        places = self._meeting.places if self._meeting else []
        named = {p.node: p.host for p in places}
        hosts = {r: named.get(n.node) or n.host or self._host for n in self._plan.nodes for r in n.ranks}
        meeting = (self._meeting.address, self._meeting.port) if self._meeting else None
        interface = places[self._node].interface if places else ""
        collector = Collector(self._run, self._attempt, self._node, self._host, meeting, interface)
        return HangWatch(
            self._run,
            self._attempt,
            self._node,
            self._host,
            self._ranks,
            hosts,
            self._plan.hang,
            collector,
            self._end_ranks,
        )

    def _end_ranks(self) -> None:
        for child in self._children():
            self._kill_group(child)

    def _kill(self, number: int, frame: FrameType | None) -> None:
        self._killed = True
        for child in self._children():
            self._kill_group(child)

    @staticmethod
    def _kill_group(child: psutil.Process) -> None:
        try:
            os.killpg(child.pid, signal.SIGKILL)  # torchrun gives each rank a session of its own
        except (ProcessLookupError, PermissionError):
            pass

    def _obey(self) -> None:
        """Heed the control file, for launchers whose signals do not reach this node."""
        control, obeyed = self._run.control(self._attempt), ""
        while True:
            time.sleep(0.5)
            self._tell_ranks()
            word = control.read_text().strip() if control.exists() else ""
            if word != obeyed:
                obeyed = word
                (self._kill if word == "kill" else self._ask_stop)(0, None)

    def _guard(self) -> None:
        """When a rank has gone without ending well, give the others a bounded time, then end them: torchrun waits
        30 s for ranks that do not heed SIGTERM, and a rank inside a collective cannot."""
        while len(children := self._children()) < self._plan.procs_per_node:
            time.sleep(0.1)
        while len([c for c in children if _alive(c)]) == len(children):
            time.sleep(0.1)
        while True:
            gone = len([c for c in children if not _alive(c)])
            done = len([r for r in self._ranks if done_marker(self._run, self._attempt, r).exists()])
            if gone == len(children):
                return
            if gone > done:
                break
            time.sleep(0.1)
        time.sleep(PEER_DEATH_GRACE_S)
        for child in children:
            if _alive(child):
                self._kill_group(child)

    def _write_exit(self, ends: list[RankEnd], refusal: str) -> None:
        write_json(
            self._run.agent_exit(self._attempt, self._host),
            {
                "host": self._host,
                "node": self._node,
                "attempt": self._attempt,
                "killed_by_request": self._killed,
                "time": time.time(),
                "refused": refusal,
                "failed": msgspec.to_builtins(ends),
            },
        )


def interface_towards(address: str) -> str:
    """The interface by which this node reaches an address, as the kernel's routes say; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == own for a in addresses):
            return name
    return "lo"


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal, by /proc; True where that is not known."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return not Path("/proc/self/status").exists()
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    main()
