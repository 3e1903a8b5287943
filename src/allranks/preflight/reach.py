"""Whether this node reaches all others on the chosen interface, as one JSON line. Standard library only.

    python - --json-args '{"peers": {"n1": {"address": "10.0.0.1", "ports": [21000, 40001]}, ...}}' < reach.py

Every node listens on its own address and connects to all others from it. The one that answers says its name: an address
that several machines share (a container bridge) answers, but with the wrong one. A node that starts late is waited for.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import threading
import time
from typing import Any

WINDOW_S = 6.0
TRY_S = 1.5
PAUSE_S = 0.05
MAX_NAME = 256


class Node:
    """This node: its listeners, and what it has found out so far."""

    def __init__(self, me: str, peers: dict[str, Any], window_s: float) -> None:
        self.me, self.peers = me, peers
        self.address: str = peers[me]["address"]
        self.deadline = time.monotonic() + window_s
        self._closed: dict[int, str] = {}
        self._waiting: set[int] = set()  # ports that are in use, perhaps only for a moment
        self.seen: set[tuple[str, int]] = set()
        self.reached: dict[tuple[str, int], float] = {}
        self.why: dict[tuple[str, int], str] = {}

    def listen(self) -> None:
        """Opens all ports of this node; each answers with the node's name."""
        for port in self.peers[self.me]["ports"]:
            if not self._open(port):
                self._waiting.add(port)
                threading.Thread(target=self._open_later, args=(port,), daemon=True).start()

    def _open(self, port: int) -> bool:
        """Whether the port is settled: opened, or it never can be. In use it may be for a moment only, by a connection that goes out."""
        try:
            server = socket.create_server((self.address, port), backlog=512)
        except OSError as error:
            self._closed[port] = f"cannot listen on {self.address}:{port}: {error.strerror}"
            return error.errno != errno.EADDRINUSE
        self._closed.pop(port, None)
        threading.Thread(target=self._serve, args=(server, port), daemon=True).start()
        return True

    def _open_later(self, port: int) -> None:
        while time.monotonic() < self.deadline and not self._open(port):
            time.sleep(PAUSE_S)
        self._waiting.discard(port)

    @property
    def errors(self) -> list[str]:
        """Why ports of this node are not open."""
        return list(self._closed.values())

    def _serve(self, server: socket.socket, port: int) -> None:
        while True:
            client, _ = server.accept()
            threading.Thread(target=self._answer, args=(client, port), daemon=True).start()

    def _answer(self, client: socket.socket, port: int) -> None:
        try:
            with client:
                client.settimeout(TRY_S)
                name = client.recv(MAX_NAME).decode()
                client.sendall(self.me.encode())
                client.recv(1)  # until the other has read it and closed
                self.seen.add((name, port))
        except OSError:
            pass

    def connect(self, peer: str, port: int) -> None:
        """Tries until it works or the time is over."""
        where = (self.peers[peer]["address"], port)
        while (left := self.deadline - time.monotonic()) > 0:
            began = time.perf_counter()
            try:
                with socket.create_connection(where, min(TRY_S, left), (self.address, 0)) as client:
                    client.sendall(self.me.encode())
                    name = client.recv(MAX_NAME).decode()
                if name == peer:
                    self.reached[peer, port] = time.perf_counter() - began
                    return
                self.why[peer, port] = f"{where[0]} is answered by {name or 'somebody else'}"
            except OSError as error:
                self.why[peer, port] = error.strerror or str(error)
            time.sleep(PAUSE_S)

    def _expected(self) -> int:
        """How many visits there will be: every other node's to each port that is open."""
        return (len(self.peers) - 1) * (len(self.peers[self.me]["ports"]) - len(self._closed))

    def meet(self) -> dict[str, Any]:
        """Connects to everybody at once, then answers until everybody has come or the time is over."""
        others = [(peer, port) for peer, facts in self.peers.items() if peer != self.me for port in facts["ports"]]
        threads = [threading.Thread(target=self.connect, args=pair, daemon=True) for pair in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self.deadline - time.monotonic()) + TRY_S)
        while (self._waiting or len(self.seen) < self._expected()) and time.monotonic() < self.deadline:
            time.sleep(PAUSE_S / 5)
        return {
            "host": self.me,
            "errors": self.errors,
            "unreached": [
                {"peer": peer, "port": port, "why": self.why.get((peer, port), "no answer")}
                for peer, port in others
                if (peer, port) not in self.reached
            ],
            "slowest_ms": round(max(self.reached.values(), default=0.0) * 1000, 2),
        }


def main() -> None:
    """One JSON line."""
    began = time.perf_counter()
    wish = json.loads(sys.argv[sys.argv.index("--json-args") + 1])
    me = os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    node = Node(wish.get("me", me), wish["peers"], wish.get("window_s", WINDOW_S))
    node.listen()
    found = node.meet()
    found["seconds"] = round(time.perf_counter() - began, 3)
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
