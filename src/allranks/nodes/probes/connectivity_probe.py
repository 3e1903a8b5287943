"""Connect this node to a few others on the chosen network; print one JSON line. Standard library only, Python 3.8 or
later.

    python - < connectivity_probe.py          with REQUEST filled in by `srun.program_text`

Up to `MESH_NODES` nodes all connect to all. Beyond, node i connects to its ring successor and to one node at each of
log2(N) random distances. The distances come from a seed that all nodes share, so each node derives its own targets and
its own visitors from (seed, N, i). As many others connect to a node as it connects to: about 1 + log2(N).

An answering node sends its name, so that an address shared by several machines (a container bridge) is detected. A
failed connection is tried again until the window closes, so that a node that starts late is not reported.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socket
import struct
import sys
import threading
import time
import zlib
from typing import Any

REQUEST = ""
"""The request, encoded by `srun.encode_request`; part of the program text, as an argument has at most 128 KiB."""

MESH_NODES = 8
WINDOW_S = 6.0
TRY_S = 1.5
PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5
MAX_NAME_BYTES = 256
RESET = struct.pack("ii", 1, 0)
"""Linger of 0 s: closing resets the connection, and the peer does not count this visit as successful."""


def distances(nodes: int, seed: str) -> list[int]:
    """Return how far ahead in the ring of `nodes` each node's targets are; distinct, 1 comes first.

    SHA-256 is used because `random` may differ between the Python versions of the nodes.
    """
    if nodes <= MESH_NODES:
        return list(range(1, nodes))
    steps = [1]
    draw = 0
    while len(steps) < 1 + (nodes - 1).bit_length():
        digest = hashlib.sha256(f"{seed}:{draw}".encode()).digest()
        distance = 1 + int.from_bytes(digest[:8], "big") % (nodes - 1)
        if distance not in steps:
            steps.append(distance)
        draw += 1
    return steps


def sampled_targets(index: int, nodes: int, seed: str) -> list[int]:
    """Return the nodes that node `index` connects to."""
    return [(index + distance) % nodes for distance in distances(nodes, seed)]


def sampled_visitors(index: int, nodes: int, seed: str) -> list[int]:
    """Return the nodes that connect to node `index`."""
    return [(index - distance) % nodes for distance in distances(nodes, seed)]


def encode_seats(seats: list[list[Any]]) -> str:
    """Return one text line ``[host, address, [port, ...]]`` per node, of which a node parses only a few."""
    return "\n".join(" ".join([host, address, *map(str, ports)]) for host, address, ports in seats)


def decode_seat(line: str) -> list[Any]:
    """Return one line's ``[host, address, [port, ...]]``."""
    host, address, *ports = line.split(" ")
    return [host, address, [int(port) for port in ports]]


class Node:
    """This node: its servers, the links that it tries, and the visits that it expects. Each has a thread.

    Args:
        index: this node's index.
        seats: ``[host, address, [port, ...]]`` of this node, its targets and its visitors, by index.
        targets: indices of the nodes to connect to, on all their ports.
        visitors: indices of the nodes that connect to this one.
        window_s: how long to try, in seconds.
    """

    def __init__(
        self, index: int, seats: dict[int, list[Any]], targets: list[int], visitors: list[int], window_s: float
    ) -> None:
        self.deadline = time.monotonic() + window_s
        self.host, self.address, self.ports = seats[index]
        self.peers = [(*seats[peer][:2], port) for peer in targets for port in seats[peer][2]]
        self.unreached: dict[tuple[str, str, int], tuple[str, int]] = dict.fromkeys(self.peers, ("not tried", 0))
        self.missing = {(seats[peer][0], port) for peer in visitors for port in self.ports}
        self.closed: dict[int, str] = {}

    def run(self) -> dict[str, Any]:
        """Listen, connect and answer until all links work or the window is over; return the report."""
        for port in self.ports:
            threading.Thread(target=self._serve, args=(port,), daemon=True).start()
        for peer in self.peers:
            threading.Thread(target=self._connect, args=peer, daemon=True).start()
        while (self.unreached or self.missing) and time.monotonic() < self.deadline + PAUSE_S:
            time.sleep(PAUSE_S / 5)
        unreached = [
            {"peer": host, "port": port, "why": why, "address": address, "tries": tries}
            for (host, address, port), (why, tries) in list(self.unreached.items())
        ]
        return {"host": self.host, "errors": list(self.closed.values()), "unreached": unreached}

    def _connect(self, host: str, address: str, port: int) -> None:
        """Try one link until it works."""
        tries = 0
        while time.monotonic() < self.deadline:
            tries += 1
            try:
                name = self._visit(address, port)
                why = f"{address}:{port} is {f'answered by {name}' if name else 'closed without an answer'}"
            except OSError as error:
                name, why = "", error.strerror or str(error)
            if name == host:
                self.unreached.pop((host, address, port))
                return
            self.unreached[host, address, port] = (why, tries)
            time.sleep(min(LONGEST_PAUSE_S, PAUSE_S * 2 ** min(tries - 1, 10)))

    def _visit(self, address: str, port: int) -> str:
        """Return the name that answers; empty if the peer closes without one."""
        limit = max(PAUSE_S, min(TRY_S, self.deadline - time.monotonic()))
        with socket.create_connection((address, port), limit, (self.address, 0)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            sock.sendall(f"{self.host}\n".encode())
            try:
                name = read_name(sock)
            except socket.timeout:  # noqa: UP041 - Python 3.8 has no other name for it
                raise OSError("connected, but no answer") from None
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
            return name

    def _serve(self, port: int) -> None:
        """Answer on one port, which may be in use for a moment by an outgoing connection."""
        while True:
            try:
                server = socket.create_server((self.address, port), backlog=512)
                break
            except OSError as error:
                self.closed[port] = f"cannot listen on {self.address}:{port}: {error.strerror or error}"
                time.sleep(PAUSE_S)
        self.closed.pop(port, None)
        while True:
            client, _ = server.accept()
            threading.Thread(target=self._answer, args=(client, port), daemon=True).start()

    def _answer(self, client: socket.socket, port: int) -> None:
        """Read the visitor's name, answer, and wait for the visitor to close: TIME_WAIT then stays off this port."""
        with client:
            client.settimeout(TRY_S)
            try:
                name = read_name(client)
                client.sendall(f"{self.host}\n".encode())
                if not client.recv(1):
                    self.missing.discard((name, port))
            except OSError:
                return  # it has disconnected, and tries again


def read_name(sock: socket.socket) -> str:
    """Return the line that a peer sends; empty if it closes without one."""
    data = b""
    while b"\n" not in data and len(data) < MAX_NAME_BYTES:
        part = sock.recv(MAX_NAME_BYTES)
        if not part:
            break
        data += part
    return data.partition(b"\n")[0].decode(errors="replace")


def index_of(request: dict[str, Any], me: str) -> int | None:
    """Return the index of the node called `me`, or None."""
    return next((i for i, line in enumerate(request["seats"].split("\n")) if line.startswith(f"{me} ")), None)


def node_of(request: dict[str, Any], index: int) -> Node:
    """Return a node as a request describes it."""
    lines = request["seats"].split("\n")
    targets = sampled_targets(index, len(lines), request["seed"])
    visitors = sampled_visitors(index, len(lines), request["seed"])
    seats = {i: decode_seat(lines[i]) for i in {index, *targets, *visitors}}
    return Node(index, seats, targets, visitors, request.get("window_s", WINDOW_S))


def main() -> None:
    """Print one JSON line."""
    began = time.perf_counter()
    request = json.loads(zlib.decompress(base64.b64decode(REQUEST)))
    me = os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    index = index_of(request, me)
    report = {"host": me, "unreached": [], "errors": [f"{me} is not among the nodes of the request"]}
    if index is not None:
        report = node_of(request, index).run()
    report["seconds"] = round(time.perf_counter() - began, 3)
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
