"""What the control channel costs the driver and each node, as nodes are added.

``python -m benchmarks.scale [--nodes 64,256,1024] [--repeats 3] [--real 64] [--json OUT]``. The driver's end is the real `Hub` with the real
`Supervisor`; the agents are objects of this process that speak the real protocol over real connections, and that follow orders as agents
do: join, start, report for `STEADY_S` seconds, examine their ranks after an alarm, end. Messages, bytes and opened files are counted,
and the driver's CPU seconds are those of its thread. ``real`` starts that many agent processes, each with a rank, by the launcher ``hosts``, and counts
the same while they run and after a rank was killed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import psutil

from allranks import api
from allranks.launch import hosts
from allranks.launch.channel import ChannelServer, authenticate
from allranks.launch.channel_protocol import (
    ENDED,
    RUNNING,
    AgentReport,
    Evidence,
    FrameReader,
    FrameWriter,
    Orders,
    RankProgress,
    decode_from_driver,
    encode_message,
)
from allranks.launch.hosts_job import HostsJob
from allranks.launch.launchers import get_launcher
from allranks.launch.monitor.records import CollectiveCall, HangAlarm, NodeEvidence, RankEvidence, StackFrame
from allranks.launch.supervisor import Supervisor, report_interval_s
from benchmarks import machine

STEADY_S = 20.0
RANKS = 8
LIMIT_S = 120.0
FIGURES = ("messages_in", "messages_out", "bytes_in", "bytes_out", "driver_cpu_s", "opens")


class Opens:
    """Counts the files that this process opens."""

    def __init__(self) -> None:
        self.count = 0
        sys.addaudithook(self._hook)

    def _hook(self, event: str, _: Any) -> None:
        if event == "open":
            self.count += 1


@dataclass
class Agent:
    """One node's agent without processes: it reports, and does what it is ordered to."""

    node: int
    sock: socket.socket
    sealer: FrameWriter
    opener: FrameReader
    report: AgentReport
    orders: Orders = field(default_factory=Orders)
    sent_at: float = 0.0
    examined: bool = False

    def publish(self, **values: Any) -> None:
        self.report = msgspec.structs.replace(self.report, **values)
        self.send_report()

    def send_report(self) -> None:
        self.sock.sendall(self.sealer.seal(encode_message(self.report)))
        self.sent_at = time.monotonic()

    def receive(self) -> None:
        for content in self.opener.feed(self.sock.recv(1 << 16)):
            message = decode_from_driver(content)
            if isinstance(message, Orders):
                self.orders = message
                self.follow()

    def follow(self) -> None:
        if self.orders.start and self.report.state != RUNNING and not self.orders.end:
            self.publish(state=RUNNING, ranks=[RankProgress(self.node * RANKS + i, "train", 1) for i in range(RANKS)])
        if self.orders.collect and not self.examined:
            self.examined = True
            self.sock.sendall(self.sealer.seal(encode_message(Evidence(node=self.node, found=evidence(self.node)))))
        if self.orders.end and self.report.state != ENDED:
            self.publish(state=ENDED)


def evidence(node: int) -> NodeEvidence:
    """Evidence of the usual size: stacks of 20 frames and 20 collectives a rank."""
    frames = [
        StackFrame(file="/usr/lib/python3.11/site-packages/torch/nn/modules/module.py", line=i, function="forward")
        for i in range(20)
    ]
    calls = [CollectiveCall(group="0", seq=i, op="all_reduce", sizes="[[4096]]", done=i < 19) for i in range(20)]
    ranks = [
        RankEvidence(rank=node * RANKS + i, pid=i, state="S sleeping", phase="train", step=9, stack=frames, calls=calls)
        for i in range(RANKS)
    ]
    return NodeEvidence(node=node, host=f"n{node}", time=1.0, ranks=ranks)


class Fleet(threading.Thread):
    """All agents in one event loop."""

    def __init__(self, hub: ChannelServer, nodes: int) -> None:
        super().__init__(daemon=True)
        self._selector = selectors.DefaultSelector()
        self.agents: list[Agent] = []
        self.stopped = False
        for node in range(nodes):
            sock = socket.create_connection((hub.endpoint.address, hub.endpoint.port), timeout=30)
            sealer, opener = authenticate(sock, hub.endpoint)
            store = ("10.0.0.1", 29400) if node == 0 else None
            agent = Agent(
                node, sock, sealer, opener, AgentReport(node=node, host=f"n{node}", pid=node + 1, store=store)
            )
            self._selector.register(sock, selectors.EVENT_READ, agent)
            self.agents.append(agent)
            agent.send_report()

    def run(self) -> None:
        while not self.stopped:
            for key, _ in self._selector.select(0.02):
                key.data.receive()
            now = time.monotonic()
            for agent in self.agents:
                if now - agent.sent_at >= agent.orders.interval_s:
                    agent.send_report()


def until(condition: Callable[[], object]) -> float:
    """Wait until something holds; return the seconds it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > LIMIT_S:
            raise TimeoutError("a phase did not end in time")
        time.sleep(0.01)
    return time.monotonic() - began


def count_traffic(hub: ChannelServer) -> dict[str, int]:
    """Count messages and bytes of a server from now on; the returned figures grow."""
    counts: dict[str, int] = dict.fromkeys(("messages_in", "messages_out", "bytes_in", "bytes_out"), 0)
    take, send, opened, flush = hub._take, hub._send, hub._opened, hub._flush

    def taken(peer: Any, content: bytes) -> None:
        counts["messages_in"] += 1
        take(peer, content)

    def sent(peer: Any, content: bytes) -> None:
        counts["messages_out"] += 1
        send(peer, content)

    def read(peer: Any, data: bytes) -> list[bytes]:
        counts["bytes_in"] += len(data)
        return opened(peer, data)

    def flushed(peer: Any) -> None:
        before = len(peer.out)
        flush(peer)
        counts["bytes_out"] += before - len(peer.out)

    hub._take, hub._send, hub._opened, hub._flush = taken, sent, read, flushed
    return counts


class Meter:
    """Figures of the driver since the last reading."""

    def __init__(self, hub: ChannelServer, opens: Opens) -> None:
        self._counts, self._opens = count_traffic(hub), opens
        self._clock = time.pthread_getcpuclockid(hub.ident or 0)
        self._last = self._now()

    def _now(self) -> dict[str, float]:
        return {
            **self._counts,
            "driver_cpu_s": time.clock_gettime(self._clock),
            "opens": self._opens.count,
        }

    def read(self, nodes: int, seconds: float) -> dict[str, float]:
        """Return the figures a node, and the seconds of the phase."""
        now = self._now()
        found = {name: round((now[name] - self._last[name]) / nodes, 6) for name in FIGURES}
        self._last = now
        return {**found, "seconds": round(seconds, 3)}


def simulated(nodes: int, opens: Opens) -> dict[str, Any]:
    """Take one run of that many agents through all phases."""
    judged: list[int] = []

    def judge(alarm: HangAlarm, found: Sequence[NodeEvidence]) -> None:
        judged.append(len(found))

    supervisor = Supervisor(nodes, judge)
    hub = ChannelServer(supervisor, nodes)
    hub.start()
    meter = Meter(hub, opens)
    began = time.monotonic()
    fleet = Fleet(hub, nodes)
    fleet.start()
    until(lambda: all(a.report.state == RUNNING for a in fleet.agents))
    phases = {"join and start": meter.read(nodes, time.monotonic() - began)}
    time.sleep(STEADY_S)
    steady = meter.read(nodes, STEADY_S)
    phases["steady"] = steady
    alarm = HangAlarm(node=1, host="n1", rank=8, phase="train", part="", step=9, since=0.0, time=1.0, limit_s=5.0)
    fleet.agents[1].publish(alarm=alarm)
    took = until(lambda: all(a.report.state == ENDED for a in fleet.agents))
    phases["examine and end"] = meter.read(nodes, took)
    fleet.stopped = True
    fleet.join(10)
    hub.close()
    for agent in fleet.agents:
        agent.sock.close()
    if judged != [nodes]:
        raise RuntimeError(f"the evidence of {judged} nodes was judged instead of {nodes}")
    return {"nodes": nodes, "report_interval_s": report_interval_s(nodes), "phases": phases}


def real(count: int, opens: Opens) -> dict[str, Any]:
    """Start real agents with one rank each, count for a while, kill a rank, and wait until all have ended."""
    with tempfile.TemporaryDirectory(prefix="allranks-scale-") as folder:
        program = Path(folder) / "waits.py"
        program.write_text("import time\ntime.sleep(600)\n")
        cluster = {"launcher": "hosts", "nodes": count, "procs_per_node": 1, "hosts": ["127.0.0.1"] * count}
        spec = api.read_spec(
            {"name": "scale", "script": {"path": str(program)}, "cluster": cluster, "run_root": folder}
        )
        run, plan = api.prepare_run(spec, force=True)
        job = get_launcher("hosts").start(run, spec, plan, 1, {})
        assert isinstance(job, HostsJob)
        hub = job._hub
        meter = Meter(hub, opens)
        began = time.monotonic()
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        out = (Path(folder) / "agents.log").open("ab")
        agents = [
            subprocess.Popen(["bash", "-c", f"exec {c}" if " && " not in c else c], stdout=out, stderr=out, env=env)
            for c in hosts.node_commands(spec, run, plan)
        ]
        try:
            until(lambda: len(hub.links) == count and all(link.report.state == RUNNING for link in hub.links.values()))
            until(lambda: len(run.rank_logs(1)) == count)
            phases = {"join and start": meter.read(count, time.monotonic() - began)}
            pids = [link.report.pid for link in hub.links.values()]
            before = sum(cpu_of(pid) for pid in pids)
            time.sleep(STEADY_S)
            phases["steady"] = {
                **meter.read(count, STEADY_S),
                "agent_cpu_s": round((sum(cpu_of(pid) for pid in pids) - before) / count, 4),
            }
            victim = psutil.Process(pids[-1]).children()
            ranks = [p for p in victim if "allranks.launch.rank" in p.cmdline()]
            ranks[0].kill()
            took = until(lambda: job._supervisor.all_ended)
            phases["a killed rank ends all"] = meter.read(count, took)
            until(lambda: job.poll() is not None)
            found = job.end()
        finally:
            for agent in agents:
                agent.kill()
                agent.wait(10)
            out.close()
    return {
        "agents": count,
        "phases": phases,
        "failed_ranks": [e.rank for e in found.failed],
        "lost_agents": len(found.lost),
        "ended_nodes": found.ended_nodes,
    }


def cpu_of(pid: int) -> float:
    """CPU seconds of one process so far."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and range of each figure over the repeats of one size."""
    first = runs[0]
    phases = {
        phase: {
            name: {"median": median(values), "min": min(values), "max": max(values)}
            for name in figures
            for values in [[run["phases"][phase][name] for run in runs]]
        }
        for phase, figures in first["phases"].items()
    }
    return {**first, "repeats": len(runs), "phases": phases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="64,256,1024")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--real", type=int, default=64)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/scale.json"))
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    opens = Opens()
    sizes = [int(n) for n in args.nodes.split(",")]
    runs: dict[int, list[dict[str, Any]]] = {n: [] for n in sizes}
    for _ in range(args.repeats):
        for nodes in sizes:
            runs[nodes].append(simulated(nodes, opens))
    found = [middle(runs[n]) for n in sizes]
    document = {
        "machine": machine.facts(),
        "unit": "figures are those of the driver, divided by the number of nodes: what one node adds",
        "load1_at_end": os.getloadavg()[0],
        "simulated": found,
        "real": real(args.real, opens) if args.real else None,
    }
    reach = Path("benchmarks/results/scale_reach.json")
    if reach.exists():
        document["reachability"] = json.loads(reach.read_text())
    args.json.write_text(json.dumps(document, indent=1) + "\n")
    for row in found:
        for phase, figures in row["phases"].items():
            shown = "  ".join(f"{name} {figures[name]['median']:g}" for name in (*FIGURES, "seconds"))
            print(f"{row['nodes']:5d} nodes  {phase:16s} {shown}")
    print(json.dumps(document["real"], indent=1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


if __name__ == "__main__":
    main()
