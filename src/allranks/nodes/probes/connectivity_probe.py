"""Connect this node to a few others on the chosen network; print one JSON line. Standard library only, Python 3.8 or
later.

    python - < connectivity_probe.py          with REQUEST filled in by `srun.program_text`

Up to `MESH_NODES` nodes all connect to all. Beyond, node i connects to its ring successor and to one node at each of
log2(N) random distances. The distances come from a seed that all nodes share, so each node derives its own targets and
its own visitors from (seed, N, i). As many others connect to a node as it connects to: about 1 + log2(N).

An answering node sends its name, so that an address shared by several machines (a container bridge) is detected. A
failed connection is tried again until the window closes, so that a node that starts late is not reported.

`ProbedNode` decides what to try and when to stop, and does no I/O. `Sockets` does the I/O in one thread.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import selectors
import socket
import struct
import sys
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any

REQUEST = ""
"""The request in the encoding of `srun.encode_request`. It is part of the program text, because one argument has at
most 128 KiB."""

MESH_NODES = 8
WINDOW_S = 6.0
TRY_S = 1.5
PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5
MAX_NAME_BYTES = 256
POLL_S = 0.25
RESET = struct.pack("ii", 1, 0)
"""Linger of 0 s: closing resets the connection, and the peer does not count this visit as successful."""

if TYPE_CHECKING:
    Link = tuple[int, int]  # a node's index, and one of its ports; Python 3.8 has no tuple[...] at run time


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
    """Return ``[host, address, [port, ...]]`` of each node as text, one line each, of which a node parses only a
    few."""
    return "\n".join(" ".join([host, address, *map(str, ports)]) for host, address, ports in seats)


def decode_seat(line: str) -> list[Any]:
    """Return one line's ``[host, address, [port, ...]]``."""
    host, address, *ports = line.split(" ")
    return [host, address, [int(port) for port in ports]]


class ConnectionAttempts:
    """The attempts on one link so far."""

    def __init__(self, now: float) -> None:
        self.tries = 0
        self.next_s = now
        self.began_s = now
        self.running = False
        self.why = "not tried"
        self.reached_ms: float | None = None

    @property
    def pause_s(self) -> float:
        """Return the time until the next attempt; it doubles after each."""
        return min(LONGEST_PAUSE_S, PAUSE_S * 2 ** min(self.tries - 1, 10))


class ProbedNode:
    """One node's state: the links to try, and the expected visits.

    Args:
        index: this node's index.
        seats: ``[host, address, [port, ...]]`` of this node, its targets and its visitors, by index.
        targets: indices of the nodes to connect to, on all their ports.
        visitors: indices of the nodes that connect to this one.
        deadline: when to stop, on the same clock as every `now`, in seconds.
    """

    def __init__(
        self,
        index: int,
        seats: dict[int, list[Any]],
        targets: list[int],
        visitors: list[int],
        now: float,
        deadline: float,
    ) -> None:
        self.index, self.seats, self.deadline = index, seats, deadline
        self.host, self.address, self.ports = seats[index]
        self.links: dict[Link, ConnectionAttempts] = {
            (peer, port): ConnectionAttempts(now) for peer in targets for port in seats[peer][2]
        }
        self.visitors = {seats[peer][0] for peer in visitors}
        self.missing = {(name, port) for name in self.visitors for port in self.ports}
        self.closed: dict[int, str] = {}
        self.cost = {"connects": 0, "accepts": 0, "messages": 0, "bytes": 0}

    def listening(self, port: int) -> None:
        """Record that a port is open."""
        self.closed.pop(port, None)

    def not_listening(self, port: int, why: str) -> None:
        """Record why a port is not open."""
        self.closed[port] = f"cannot listen on {self.address}:{port}: {why}"

    def due(self, now: float) -> list[Link]:
        """Return the links to try now. `begin` must follow for each."""
        return [link for link, a in self.links.items() if not a.running and a.reached_ms is None and a.next_s <= now]

    def begin(self, link: Link, now: float) -> None:
        """Record the start of an attempt."""
        attempts = self.links[link]
        attempts.running, attempts.began_s, attempts.tries = True, now, attempts.tries + 1
        self.cost["connects"] += 1

    def answered(self, link: Link, name: str, now: float) -> None:
        """Record the name in a peer's answer; empty if it closed without one."""
        peer, attempts = self.seats[link[0]], self.links[link]
        if name == peer[0]:
            attempts.running, attempts.reached_ms = False, (now - attempts.began_s) * 1000
        else:
            who = f"answered by {name}" if name else "closed without an answer"
            self.failed(link, f"{peer[1]}:{link[1]} is {who}", now)

    def failed(self, link: Link, why: str, now: float) -> None:
        """Record a failed attempt; the link is tried again later."""
        attempts = self.links[link]
        attempts.running, attempts.why = False, why
        attempts.next_s = now + attempts.pause_s

    def visited(self, name: str, port: int) -> None:
        """Record that a peer connected, read this node's name and closed."""
        self.missing.discard((name, port))

    def sent(self, count: int) -> None:
        """Count a message that this node sent."""
        self.cost["messages"] += 1
        self.cost["bytes"] += count

    def done(self, now: float) -> bool:
        """Return whether all targets are reached and all visitors have come, or the window is over."""
        if now >= self.deadline:
            return True
        return all(a.reached_ms is not None for a in self.links.values()) and not any(
            port not in self.closed for _, port in self.missing
        )

    def report(self) -> dict[str, Any]:
        """Return this node's answer."""
        return {
            "host": self.host,
            "errors": list(self.closed.values()),
            "unreached": [
                {
                    "peer": self.seats[peer][0],
                    "port": port,
                    "why": a.why,
                    "address": self.seats[peer][1],
                    "tries": a.tries,
                }
                for (peer, port), a in self.links.items()
                if a.reached_ms is None
            ],
            "cost": self.cost,
        }


class Conversation:
    """One open connection: outgoing (`link`) or incoming (`port`)."""

    def __init__(self, sock: socket.socket, until: float, link: Link | None = None, port: int = 0) -> None:
        self.sock, self.until, self.link, self.port = sock, until, link, port
        self.connected = link is None
        self.data = b""
        self.name: str | None = None


class Sockets:
    """Drive a `ProbedNode` over non-blocking sockets, in one thread."""

    def __init__(self, node: ProbedNode) -> None:
        self.node = node
        self.selector = selectors.DefaultSelector()
        self.servers: list[socket.socket] = []
        self.to_open = dict.fromkeys(node.ports, 0.0)
        self.open: dict[int, Conversation] = {}

    def run(self) -> dict[str, Any]:
        """Listen, connect and answer until the node is done; return its report."""
        while True:
            now = time.monotonic()
            self._listen(now)
            self._expire(now)
            if self.node.done(now) and not (self.to_open and now < self.node.deadline):
                break
            for link in self.node.due(now):
                self._connect(link, now)
            for key, _ in self.selector.select(self._pause_s(time.monotonic())):
                self._ready(key)
        for conversation in list(self.open.values()):
            self._close(conversation)
        for server in self.servers:
            server.close()
        self.selector.close()
        return self.node.report()

    def _pause_s(self, now: float) -> float:
        """Return the time until the next event: an attempt, the end of one, a port to open, or the end of the
        window."""
        waiting = [a.next_s for a in self.node.links.values() if not a.running and a.reached_ms is None]
        ends = [conversation.until for conversation in self.open.values()]
        soonest = min([self.node.deadline, now + POLL_S, *waiting, *ends, *self.to_open.values()])
        return max(0.0, soonest - now)

    def _listen(self, now: float) -> None:
        """Open ports. A port may be in use for a moment by an outgoing connection, and is then tried again."""
        for port in [port for port, due in self.to_open.items() if due <= now]:
            try:
                server = socket.create_server((self.node.address, port), backlog=512)
            except OSError as error:
                self.node.not_listening(port, error.strerror or str(error))
                if error.errno == errno.EADDRINUSE:
                    self.to_open[port] = now + PAUSE_S
                else:
                    del self.to_open[port]
                continue
            del self.to_open[port]
            server.setblocking(False)
            self.servers.append(server)
            self.node.listening(port)
            self.selector.register(server, selectors.EVENT_READ, port)

    def _connect(self, link: Link, now: float) -> None:
        self.node.begin(link, now)
        sock = socket.socket()
        try:
            sock.setblocking(False)
            sock.bind((self.node.address, 0))
            code = sock.connect_ex((self.node.seats[link[0]][1], link[1]))
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except OSError as error:
            sock.close()
            self.node.failed(link, error.strerror or str(error), now)
            return
        self._keep(Conversation(sock, min(now + TRY_S, self.node.deadline), link=link), selectors.EVENT_WRITE)

    def _keep(self, conversation: Conversation, events: int) -> None:
        self.open[conversation.sock.fileno()] = conversation
        self.selector.register(conversation.sock, events, conversation)

    def _close(self, conversation: Conversation) -> None:
        if self.open.pop(conversation.sock.fileno(), None) is not None:
            self.selector.unregister(conversation.sock)
        conversation.sock.close()

    def _expire(self, now: float) -> None:
        for conversation in [c for c in self.open.values() if c.until <= now]:
            if conversation.link is not None:
                what = "connected, but no answer" if conversation.connected else "timed out"
                self.node.failed(conversation.link, what, now)
                conversation.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self._close(conversation)

    def _ready(self, key: selectors.SelectorKey) -> None:
        if isinstance(key.data, int):
            self._accept(key.fileobj, key.data)  # type: ignore[arg-type]
            return
        conversation: Conversation = key.data
        try:
            if conversation.link is not None and not conversation.connected:
                self._greet(conversation)
            elif conversation.link is not None:
                self._hear_answer(conversation, conversation.link)
            else:
                self._hear_visitor(conversation)
        except BlockingIOError:
            return
        except OSError as error:
            if conversation.link is not None:
                self.node.failed(conversation.link, error.strerror or str(error), time.monotonic())
            self._close(conversation)

    def _accept(self, server: socket.socket, port: int) -> None:
        try:
            client, _ = server.accept()
        except OSError:
            return  # the visitor has already disconnected
        client.setblocking(False)
        self.node.cost["accepts"] += 1
        self._keep(Conversation(client, time.monotonic() + TRY_S, port=port), selectors.EVENT_READ)

    def _say(self, conversation: Conversation) -> None:
        """Send this node's name. It is far smaller than any socket buffer, so one call sends it completely."""
        self.node.sent(conversation.sock.send(f"{self.node.host}\n".encode()))

    def _greet(self, conversation: Conversation) -> None:
        code = conversation.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        conversation.connected = True
        self._say(conversation)
        self.selector.modify(conversation.sock, selectors.EVENT_READ, conversation)

    def _hear_answer(self, conversation: Conversation, link: Link) -> None:
        data = conversation.sock.recv(MAX_NAME_BYTES)
        conversation.data += data
        if data and b"\n" not in conversation.data and len(conversation.data) < MAX_NAME_BYTES:
            return
        self._close(conversation)
        name = conversation.data.partition(b"\n")[0].decode(errors="replace")
        self.node.answered(link, name, time.monotonic())

    def _hear_visitor(self, conversation: Conversation) -> None:
        """Read the visitor's name, answer, and wait for the visitor to close: TIME_WAIT then stays off this port."""
        data = conversation.sock.recv(MAX_NAME_BYTES)
        conversation.data += data
        if conversation.name is None and b"\n" in conversation.data:
            conversation.name = conversation.data.partition(b"\n")[0].decode(errors="replace")
            self._say(conversation)
        if not data or len(conversation.data) >= MAX_NAME_BYTES:
            if conversation.name is not None:
                self.node.visited(conversation.name, conversation.port)
            self._close(conversation)


def index_of(request: dict[str, Any], me: str) -> int | None:
    """Return the index of the node called `me`, or None."""
    return next((i for i, line in enumerate(request["seats"].split("\n")) if line.startswith(f"{me} ")), None)


def node_of(request: dict[str, Any], index: int, now: float) -> ProbedNode:
    """Return a node as a request describes it: with sampled targets, or the explicit ``links`` of a second round."""
    lines, links = request["seats"].split("\n"), request.get("links")
    if links is None:
        targets = sampled_targets(index, len(lines), request["seed"])
        visitors = sampled_visitors(index, len(lines), request["seed"])
    else:
        targets = links[index]
        visitors = [i for i, peers in enumerate(links) if index in peers]
    seats = {i: decode_seat(lines[i]) for i in {index, *targets, *visitors}}
    return ProbedNode(index, seats, targets, visitors, now, now + request.get("window_s", WINDOW_S))


def main() -> None:
    """Print one JSON line."""
    began = time.perf_counter()
    request = json.loads(zlib.decompress(base64.b64decode(REQUEST)))
    me = os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    index = index_of(request, me)
    if index is None:
        report = {"host": me, "unreached": [], "errors": [f"{me} is not among the nodes of the request"]}
    else:
        report = Sockets(node_of(request, index, time.monotonic())).run()
    report["seconds"] = round(time.perf_counter() - began, 3)
    report.setdefault("cost", {}).update(cpu_s=round(time.process_time(), 4), threads=threading.active_count())
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
