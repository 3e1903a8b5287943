"""Server of the control channel in the driver: one thread, one selector, one connection per node.

The thread also calls the supervisor (`allranks.launch.supervisor`) several times per second, so that a blocked display
or file system cannot delay orders.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from typing import Protocol

import msgspec

from allranks.errors import EnvironmentNotAble
from allranks.launch.channel.protocol import (
    ANSWER_BYTES,
    Acknowledgement,
    AgentReport,
    ChannelError,
    Endpoint,
    Evidence,
    FrameReader,
    FrameWriter,
    FromDriver,
    OrderRequest,
    Orders,
    decode_from_agent,
    encode_message,
    new_challenge,
    new_token,
    open_session,
    verify_answer,
)
from allranks.launch.monitor.records import NodeEvidence

TICK_S = 0.1
HANDSHAKE_S = 10.0
MAX_UNAUTHENTICATED = 128  # connections that have not proved anything yet
MAX_QUEUED_BYTES = 8 << 20  # to a peer that does not read
USER_TIMEOUT_MS = 17_000
CLOSED, UNREACHABLE = "closed", "unreachable"
_UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}


class AgentLink(msgspec.Struct, frozen=True, kw_only=True):
    """The driver's knowledge of one node's agent.

    ``heard_at`` and ``closed_at`` are `time.monotonic` times. ``closed`` is empty while the connection is open, `CLOSED` if the
    agent's kernel closed it (the process is gone, the node is alive), `UNREACHABLE` if the network failed.
    """

    report: AgentReport
    heard_at: float
    closed: str = ""
    closed_at: float = 0.0
    address: str = ""


class OrderSource(Protocol):
    """Source of the orders."""

    def tick(self, links: Mapping[int, AgentLink], now: float) -> Orders: ...

    def evidence(self, found: NodeEvidence) -> None: ...

    def request(self, order: str, reason: str) -> None: ...


class _Connection:
    """One connection."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock, self.address = sock, address
        self.sent = new_challenge()
        self.out = bytearray(self.sent)
        self.greeting = bytearray()
        self.sealer: FrameWriter | None = None
        self.opener: FrameReader | None = None
        self.since = time.monotonic()
        self.node: int | None = None


class ChannelServer(threading.Thread):
    """Listen until `close`.

    Args:
        address: address to listen on; loopback for agents on this machine.
        port: 0 for any free one.
        nodes: number of nodes of the run; higher node numbers are refused.

    Raises:
        EnvironmentNotAble: cannot listen on the address, for example because another run uses the port.
    """

    def __init__(
        self,
        supervisor: OrderSource,
        nodes: int,
        address: str = "127.0.0.1",
        port: int = 0,
        *,
        keep_s: float | None = None,
    ) -> None:
        super().__init__(name="channel", daemon=True)
        self._supervisor, self._nodes = supervisor, nodes
        try:
            self._listener = socket.create_server((address, port), backlog=1024)
        except OSError as error:
            raise EnvironmentNotAble(_refusal(address, port, error)) from None
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers: dict[socket.socket, _Connection] = {}
        self._of_node: dict[int, _Connection] = {}
        self._links: dict[int, AgentLink] = {}
        self._orders = Orders()
        self._closed = threading.Event()
        token = new_token()
        self._token = token
        self.endpoint = Endpoint(address=address, port=self._listener.getsockname()[1], token=token, keep_s=keep_s)

    @property
    def links(self) -> dict[int, AgentLink]:
        """Return the state of every node that has joined."""
        return dict(self._links)

    @property
    def orders(self) -> Orders:
        """Return the last orders sent to the agents."""
        return self._orders

    def run(self) -> None:
        ticked, closing = 0.0, False
        while not closing:
            closing = self._closed.is_set()
            try:
                self._serve(0.0 if closing else TICK_S)
                if (
                    closing or time.monotonic() - ticked >= TICK_S
                ):  # what arrived last is part of the supervisor's result
                    ticked = time.monotonic()
                    self._tick(ticked)
            except Exception:
                logging.exception("control channel: unexpected error; the channel continues")
                time.sleep(TICK_S)
        for peer in list(self._peers.values()):
            self._flush(peer)
            self._drop(peer, CLOSED)
        self._selector.close()
        self._listener.close()

    def close(self) -> None:
        """Close all connections and stop the thread, in bounded time."""
        self._closed.set()
        if self.is_alive():
            self.join(timeout=5.0)
        else:
            self._listener.close()

    def _tick(self, now: float) -> None:
        self._drop_silent_strangers(now)
        orders = self._supervisor.tick(self._links, now)
        if orders != self._orders:
            self._orders = orders
            content = encode_message(orders)
            for peer in list(self._of_node.values()):
                self._send(peer, content)

    def _serve(self, wait_s: float) -> None:
        for key, events in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
                continue
            peer = self._peers.get(key.fileobj)  # type: ignore[arg-type]
            if peer is None:
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(peer)
            if events & selectors.EVENT_READ and peer.sock in self._peers:
                self._read(peer)

    def _accept(self) -> None:
        for _ in range(256):  # a whole cluster comes at once
            try:
                sock, address = self._listener.accept()
            except OSError:
                return
            if len(self._peers) - len(self._of_node) >= MAX_UNAUTHENTICATED + self._nodes:
                self._drop_oldest_stranger()
            keep_alive(sock)
            sock.setblocking(False)
            peer = _Connection(sock, str(address[0]))
            self._peers[sock] = peer
            self._selector.register(sock, selectors.EVENT_READ)
            self._flush(peer)

    def _drop_silent_strangers(self, now: float) -> None:
        for peer in [p for p in self._peers.values() if p.opener is None and now - p.since > HANDSHAKE_S]:
            self._drop(peer, CLOSED)

    def _drop_oldest_stranger(self) -> None:
        """Close the oldest unauthenticated connection; a client with the token authenticates within milliseconds."""
        oldest = next((peer for peer in self._peers.values() if peer.opener is None), None)
        if oldest is not None:
            self._drop(oldest, CLOSED)

    def _read(self, peer: _Connection) -> None:
        try:
            data = peer.sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(peer, UNREACHABLE if error.errno in _UNREACHABLE else CLOSED)
            return
        if not data:
            self._drop(peer, CLOSED)
            return
        try:
            for content in self._opened(peer, data):
                self._take(peer, content)
        except (ChannelError, msgspec.DecodeError) as error:
            logging.warning("control channel: connection from %s refused: %s", peer.address, error)
            self._drop(peer, CLOSED)

    def _opened(self, peer: _Connection, data: bytes) -> list[bytes]:
        if peer.opener is None:
            peer.greeting += data
            if len(peer.greeting) < ANSWER_BYTES:
                return []
            answered, data = bytes(peer.greeting[:ANSWER_BYTES]), bytes(peer.greeting[ANSWER_BYTES:])
            proof = verify_answer(self._token, peer.sent, answered)
            peer.sealer, peer.opener = open_session(self._token, peer.sent, answered, server=True)
            peer.out += proof
            self._flush(peer)
        return peer.opener.feed(data)

    def _take(self, peer: _Connection, content: bytes) -> None:
        message = decode_from_agent(content)
        if isinstance(message, AgentReport):
            self._take_report(peer, message)
            self._answer(peer, Acknowledgement(what="report"))
        elif isinstance(message, Evidence):
            self._supervisor.evidence(message.found)
            self._answer(peer, Acknowledgement(what="evidence"))
        elif isinstance(message, OrderRequest):
            self._supervisor.request(message.order, message.reason)
            self._answer(peer, Acknowledgement(what="request"))

    def _take_report(self, peer: _Connection, report: AgentReport) -> None:
        if not 0 <= report.node < self._nodes:
            raise ChannelError(f"node {report.node} is not part of this run of {self._nodes} nodes")
        before = self._of_node.get(report.node)
        if before is not None and before is not peer:
            if self._links[report.node].report.pid != report.pid:
                raise ChannelError(
                    f"node {report.node} already has an agent, process {self._links[report.node].report.pid}"
                )
            self._drop(before, CLOSED)  # the same agent, on a new connection
        new = peer.node is None
        peer.node = report.node
        self._of_node[report.node] = peer
        self._links[report.node] = AgentLink(report=report, heard_at=time.monotonic(), address=peer.address)
        if new:
            self._answer(peer, self._orders)

    def _answer(self, peer: _Connection, message: FromDriver) -> None:
        self._send(peer, encode_message(message))

    def _send(self, peer: _Connection, content: bytes) -> None:
        if peer.sealer is None:
            return
        if len(peer.out) > MAX_QUEUED_BYTES:
            self._drop(peer, CLOSED)
            return
        peer.out += peer.sealer.seal(content)
        self._flush(peer)

    def _flush(self, peer: _Connection) -> None:
        try:
            while peer.out:
                sent = peer.sock.send(peer.out)
                del peer.out[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(peer, UNREACHABLE if error.errno in _UNREACHABLE else CLOSED)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
        if peer.sock in self._peers:
            self._selector.modify(peer.sock, wanted)

    def _drop(self, peer: _Connection, how: str) -> None:
        if self._peers.pop(peer.sock, None) is None:
            return
        self._selector.unregister(peer.sock)
        peer.sock.close()
        if peer.node is not None and self._of_node.get(peer.node) is peer:
            del self._of_node[peer.node]
            link = self._links[peer.node]
            self._links[peer.node] = msgspec.structs.replace(link, closed=how, closed_at=time.monotonic())


def _refusal(address: str, port: int, error: OSError) -> str:
    cure = "end the program that uses the port (ss -ltnp shows it), or choose another cluster.rendezvous.port; null uses a free one"
    return (
        f"cannot listen on {address}:{port} for the control channel (its port is cluster.rendezvous.port + 1): "
        f"{os.strerror(error.errno or 0)}; {cure}"
        if port
        else f"cannot listen on {address} for the control channel: {os.strerror(error.errno or 0)}"
    )


def keep_alive(sock: socket.socket) -> None:
    """Enable TCP keepalive, so that the kernel detects a lost node within about 17 s."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 4)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
