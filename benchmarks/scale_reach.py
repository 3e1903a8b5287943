"""What the connection test of preflight costs one node, as nodes are added: before (full mesh) and after (ring and samples).

``python -m benchmarks.scale_reach [--nodes 64,256,1024,4096] [--repeats 3] [--before COMMIT] [--json OUT]``. One real
node runs the program as it is sent to nodes. This process plays all other nodes on loopback addresses: it answers the
node's connections and makes those that the node expects. So connects and bytes are counted outside the program, and CPU
seconds, threads and memory are one process's own. ``simulated`` counts all nodes of the same graph, and the rounds with
one node down.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.reachsim import Faults, Simulated

from allranks.nodes import srun
from allranks.nodes.checks import network
from allranks.nodes.probes import connectivity_probe
from benchmarks import machine

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "d88cc4e"
"""The last commit with the full mesh."""
WINDOW_S = 60.0
LIMIT_S = 120.0
FIRST_PORT = 21000
FIGURES = ("connects", "accepts", "messages", "bytes", "threads", "cpu_s", "wall_s", "rss_bytes", "stdin_bytes")


def address(index: int) -> str:
    """A loopback address of its own for each node."""
    return f"127.1.{index // 250}.{1 + index % 250}"


@dataclass
class Peers:
    """All nodes but the one that is measured, in one event loop."""

    names: Sequence[str]
    ports: list[int]
    visits: list[tuple[str, int]]
    """Names that connect to the node, each with the port."""
    newline: bytes
    target: str
    counts: dict[str, int] = field(default_factory=lambda: {"connects": 0, "accepts": 0, "bytes": 0, "messages": 0})

    def __post_init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.by_address = {address(index): name for index, name in enumerate(self.names)}
        self.servers = []
        for port in self.ports:
            server = socket.socket()
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("0.0.0.0", port))  # noqa: S104 - every loopback address, as each peer has its own
            server.listen(4096)
            server.setblocking(False)
            self.selector.register(server, selectors.EVENT_READ, "accept")
            self.servers.append(server)
        self.waiting = list(self.visits)
        self.retry_s = 0.0

    def turn(self) -> None:
        """Handle what is ready within 5 ms."""
        now = time.monotonic()
        while self.waiting and now >= self.retry_s:
            name, port = self.waiting.pop()
            sock = socket.socket()
            try:
                sock.connect((self.target, port))
            except OSError:
                sock.close()
                self.waiting.append((name, port))
                self.retry_s = now + 0.02
                break
            sock.sendall(f"{name}\n".encode())
            sock.setblocking(False)
            self.counts["accepts"] += 1
            self.selector.register(sock, selectors.EVENT_READ, "reply")
        for key, _ in self.selector.select(0.005):
            self._ready(key)

    def _ready(self, key: selectors.SelectorKey) -> None:
        sock = key.fileobj
        assert isinstance(sock, socket.socket)
        if key.data == "accept":
            client, _ = sock.accept()
            client.setblocking(False)
            self.counts["connects"] += 1
            self.selector.register(client, selectors.EVENT_READ, "visitor")
            return
        try:
            data = sock.recv(256)
        except OSError:
            data = b""
        if data:
            self.counts["messages"] += 1
            self.counts["bytes"] += len(data)
        if data and key.data == "visitor":
            sock.sendall(self.by_address[sock.getsockname()[0]].encode() + self.newline)
        else:
            self.selector.unregister(sock)
            sock.close()

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self.selector.close()


def free_ports() -> list[int]:
    """Two ports that no process of this machine uses on any address."""
    found: list[int] = []
    for port in range(FIRST_PORT, FIRST_PORT + 2000):
        with socket.socket() as sock:
            try:
                sock.bind(("0.0.0.0", port))  # noqa: S104
            except OSError:
                continue
        found.append(port)
        if len(found) == 2:
            return found
    raise SystemExit("no two ports are free")


def measured(command: list[str], text: str, peers: Peers, host: str) -> dict[str, Any]:
    """Run the node's program beside its peers."""
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        env={**os.environ, "SLURMD_NODENAME": host},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin and process.stdout
    process.stdin.write(text.encode())
    process.stdin.close()
    threads = 0
    status = Path(f"/proc/{process.pid}/status")
    while True:
        peers.turn()
        ended, code, usage = os.wait4(process.pid, os.WNOHANG)
        if ended:
            break
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        threads = max(threads, int(fields.get("Threads", "0")))
        if time.monotonic() - began > LIMIT_S:
            process.kill()
            raise SystemExit(f"{host} did not end within {LIMIT_S:g} s")
    process.returncode = code
    found = json.loads(process.stdout.read() or b"{}")
    if found.get("unreached") != [] or found.get("errors"):
        raise SystemExit(f"not a healthy run: {json.dumps(found)[:500]}")
    return {
        **peers.counts,
        "messages": peers.counts["connects"] + peers.counts["accepts"],
        "threads": threads,
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 4),
        "wall_s": round(time.monotonic() - began, 3),
        "rss_bytes": usage.ru_maxrss * 1024,
        "stdin_bytes": len(text),
    }


def after(size: int) -> dict[str, Any]:
    """One node of `size`, with the program of this checkout."""
    names, ports = [f"n{i}" for i in range(size)], free_ports()
    seats = [[name, address(index), ports_of(index, ports)] for index, name in enumerate(names)]
    text = srun.program_text(
        "connectivity_probe.py", {"seats": connectivity_probe.encode_seats(seats), "seed": "7", "window_s": WINDOW_S}
    )
    own = ports_of(0, ports)
    visits = [(names[i], port) for i in connectivity_probe.sampled_visitors(0, size, "7") for port in own]
    return run_with(names, ports, visits, b"\n", [sys.executable, "-I", "-S", "-"], text)


def before(size: int, program: str) -> dict[str, Any]:
    """The same with the full mesh: all peers in one argument."""
    names, ports = [f"n{i}" for i in range(size)], free_ports()
    peers = {n: {"address": address(i), "ports": ports_of(i, ports)} for i, n in enumerate(names)}
    wish = json.dumps({"me": names[0], "peers": peers, "window_s": WINDOW_S})
    visits = [(name, port) for name in names[1:] for port in ports_of(0, ports)]
    command = [sys.executable, "-I", "-S", "-", "--json-args", wish]
    return run_with(names, ports, visits, b"", command, program)


def ports_of(index: int, ports: list[int]) -> list[int]:
    """The measured node's ports differ from its peers', which one listener for all loopback addresses holds."""
    return [port + 4000 for port in ports] if index == 0 else ports


def run_with(
    names: list[str], ports: list[int], visits: list[tuple[str, int]], newline: bytes, command: list[str], text: str
) -> dict[str, Any]:
    peers = Peers(names, ports, visits, newline, address(0))
    try:
        return measured(command, text, peers, names[0])
    finally:
        peers.close()


def simulated(size: int) -> dict[str, Any]:
    """Counts of the busiest node, and what one node that is down costs."""
    healthy = Simulated(size)
    host = f"n{size // 2}"
    began = time.process_time()
    healthy.verdicts()
    judge_s = time.process_time() - began
    down = Simulated(size, Faults(down={host}))
    assert list(down.bad()) == [host] and not healthy.bad()
    busiest = {
        name: max(cost[name] for cost in healthy.first_cost.values()) for name in ("connects", "messages", "bytes")
    }
    return {
        "busiest_node": busiest,
        "all_nodes_connects": sum(cost["connects"] for cost in healthy.first_cost.values()),
        "launcher_judge_cpu_s": round(judge_s, 4),
        "one_node_down": {
            "blamed": list(down.bad()),
            "asked_again": len(down.again),
            "links_asked_again": sum(map(len, down.again.values())),
            "retried_peers": network.RETRIED_PEERS,
        },
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: {"median": median(values), "min": min(values), "max": max(values)}
        for name in FIGURES
        for values in [[row[name] for row in rows]]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="64,256,1024,4096")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--before", default=BEFORE, help="commit with the full mesh; empty leaves it out")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "scale_reach.json")
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sizes = [int(word) for word in args.nodes.split(",")]
    old = ""
    if args.before:
        where = f"{args.before}:src/allranks/preflight/reach.py"
        old = subprocess.run(["git", "show", where], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    clock = machine.CpuClock.now()
    found: dict[str, Any] = {}
    for size in sizes:
        row: dict[str, Any] = {"after": summary([after(size) for _ in range(args.repeats)])}
        if old:
            try:
                row["before"] = summary([before(size, old) for _ in range(args.repeats)])
            except OSError as error:
                if error.errno != errno.E2BIG:
                    raise
                row["before"] = {"error": "E2BIG: the peers are one argument of more than 128 KiB"}
        found[str(size)] = row
        for name in ("before", "after"):
            figures = row.get(name, {})
            shown = ", ".join(f"{n} {figures[n]['median']:g}" for n in FIGURES if n in figures) or figures.get(
                "error", "-"
            )
            print(f"{size} nodes, {name}: {shown}", flush=True)
    for size in sizes:  # last: a process that is started from a large one inherits its peak memory
        found[str(size)]["simulated"] = simulated(size)
    result = {
        "benchmark": "scale_reach",
        "repeats": args.repeats,
        "per_node": found,
        **clock.disturbance(),
        "machine": machine.facts(),
    }
    args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
