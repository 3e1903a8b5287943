"""The control channel of a run: agents report to the driver and receive its orders over one authenticated TCP
connection each.

The server in the driver has one thread, which also calls the supervisor (`allranks.launch.supervisor`) several times
per second, so that a blocked display or file system cannot delay orders.
The client in an agent is a thread that keeps one connection to the driver and sends reports in batches.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import select
import socket
import threading
import time
from collections.abc import Mapping
from typing import Protocol

import msgspec

from allranks.errors import EnvironmentNotAble
from allranks.launch import channel_protocol as protocol
from allranks.launch.monitor.records import NodeEvidence

TICK_S = 0.1
BACKLOG = 1024  # a whole cluster comes at once
HANDSHAKE_S = 10.0
MAX_UNAUTHENTICATED = 128
MAX_QUEUED_BYTES = 8 << 20  # to a peer that does not read
USER_TIMEOUT_MS = 17_000
CLOSED, UNREACHABLE = "closed", "unreachable"
CHECKPOINT = "checkpoint"
_UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}


class AgentLink(msgspec.Struct, frozen=True, kw_only=True):
    """The driver's knowledge of one node's agent.

    ``heard_at`` and ``closed_at`` are `time.monotonic` times. ``closed`` is empty while the connection is open,
    `CLOSED` if the agent's kernel closed it (process gone, node alive), `UNREACHABLE` if the network failed.
    """

    report: protocol.AgentReport
    heard_at: float
    closed: str = ""
    closed_at: float = 0.0
    address: str = ""


class OrderSource(Protocol):
    """Source of the orders."""

    def tick(self, links: Mapping[int, AgentLink], now: float) -> protocol.Orders: ...

    def evidence(self, evidence: NodeEvidence) -> None: ...

    def request(self, order: str, reason: str) -> None: ...

    def request_checkpoint(self) -> None: ...


class _Peer:
    """One connection; `node` is known after its first report."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer, self.address = writer, str((writer.get_extra_info("peername") or "?")[0])
        self.sealer: protocol.FrameWriter | None = None
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
            self._listener = socket.create_server((address, port), backlog=BACKLOG)
        except OSError as error:
            cure = (
                " (its port is cluster.rendezvous.port + 1); end the program that uses the port (ss -ltnp shows it), "
                "or choose another cluster.rendezvous.port; null uses a free one"
            )
            where = f"{address}:{port}" if port else address
            why = os.strerror(error.errno or 0) + (cure if port else "")
            raise EnvironmentNotAble(f"cannot listen on {where} for the control channel: {why}") from None
        self._strangers: dict[_Peer, None] = {}  # connections that have not proved anything yet, oldest first
        self._of_node: dict[int, _Peer] = {}
        self._links: dict[int, AgentLink] = {}
        self._orders = protocol.Orders()
        self._closed = threading.Event()
        self._token = protocol.new_token()
        self.endpoint = protocol.Endpoint(
            address=address, port=self._listener.getsockname()[1], token=self._token, keep_s=keep_s
        )

    @property
    def links(self) -> dict[int, AgentLink]:
        """Return the state of every node that has joined."""
        return dict(self._links)

    def run(self) -> None:
        asyncio.run(self._serve())

    def close(self) -> None:
        """Close all connections and stop the thread, in bounded time."""
        self._closed.set()
        if self.is_alive():
            self.join(timeout=5.0)
        else:
            self._listener.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._converse, sock=self._listener, backlog=BACKLOG)
        closing = False
        while not closing:
            closing = self._closed.is_set()
            await asyncio.sleep(TICK_S)
            try:  # after `close` once more: what arrived last is part of the supervisor's result
                self._tick()
            except Exception:
                logging.exception("control channel: unexpected error; the channel continues")
        server.close()

    def _tick(self) -> None:
        orders = self._supervisor.tick(self._links, time.monotonic())
        if orders != self._orders:
            self._orders = orders
            for peer in self._of_node.values():
                self._send(peer, orders)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Authenticate a client and take its messages until it is gone."""
        peer, closed = _Peer(writer), CLOSED
        if len(self._strangers) >= MAX_UNAUTHENTICATED + self._nodes:
            # a client with the token authenticates within milliseconds, so the oldest one without has none
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.writer.transport.abort()
        self._strangers[peer] = None
        try:
            keep_alive(writer.get_extra_info("socket"))
            opener = await asyncio.wait_for(self._authenticate(peer, reader), HANDSHAKE_S)
            while data := await reader.read(1 << 18):
                for content in opener.feed(data):
                    self._take(peer, content)
        except (protocol.ChannelError, msgspec.DecodeError) as error:
            logging.warning("control channel: connection from %s refused: %s", peer.address, error)
        except asyncio.IncompleteReadError:
            pass
        except OSError as error:
            closed = UNREACHABLE if error.errno in _UNREACHABLE else CLOSED
        finally:
            writer.close()
            self._strangers.pop(peer, None)
            if peer.node is not None and self._of_node.get(peer.node) is peer:
                del self._of_node[peer.node]
                self._links[peer.node] = msgspec.structs.replace(
                    self._links[peer.node], closed=closed, closed_at=time.monotonic()
                )

    async def _authenticate(self, peer: _Peer, reader: asyncio.StreamReader) -> protocol.FrameReader:
        sent = protocol.new_challenge()
        peer.writer.write(sent)
        answered = await reader.readexactly(protocol.ANSWER_BYTES)
        peer.writer.write(protocol.verify_answer(self._token, sent, answered))
        peer.sealer, opener = protocol.open_session(self._token, sent, answered, server=True)
        self._strangers.pop(peer, None)  # it may have been dropped while its answer was on the way
        return opener

    def _take(self, peer: _Peer, content: bytes) -> None:
        message = protocol.AGENT_MESSAGES.decode(content)
        if isinstance(message, protocol.AgentReport):
            self._take_report(peer, message)
            self._send(peer, protocol.Acknowledgement(what="report"))
        elif isinstance(message, protocol.Evidence):
            self._supervisor.evidence(message.found)
            self._send(peer, protocol.Acknowledgement(what="evidence"))
        else:
            if isinstance(message, protocol.CheckpointRequest):
                self._supervisor.request_checkpoint()
            else:
                self._supervisor.request(message.order, message.reason)
            self._send(peer, protocol.Acknowledgement(what="request"))

    def _take_report(self, peer: _Peer, report: protocol.AgentReport) -> None:
        if not 0 <= report.node < self._nodes:
            raise protocol.ChannelError(f"node {report.node} is not part of this run of {self._nodes} nodes")
        before = self._of_node.get(report.node)
        if before is not None and before is not peer:
            known = self._links[report.node].report.pid
            if known != report.pid:
                raise protocol.ChannelError(f"node {report.node} already has an agent, process {known}")
            before.writer.transport.abort()  # the same agent, on a new connection
        new = peer.node is None
        peer.node = report.node
        self._of_node[report.node] = peer
        self._links[report.node] = AgentLink(report=report, heard_at=time.monotonic(), address=peer.address)
        if new:
            self._send(peer, self._orders)

    def _send(self, peer: _Peer, message: protocol.FromDriver) -> None:
        if peer.sealer is None or peer.writer.is_closing():
            return
        if peer.writer.transport.get_write_buffer_size() > MAX_QUEUED_BYTES:
            peer.writer.transport.abort()
            return
        peer.writer.write(peer.sealer.seal(msgspec.json.encode(message)))


def keep_alive(sock: socket.socket) -> None:
    """Enable TCP keepalive, so that the kernel detects a lost node within about 17 s."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 4)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


CONNECT_S = 5.0
RETRY_S = 1.0
MAX_PAUSE_S = 5.0  # a pause of this process itself (suspended job, overloaded node) does not count as silence


class ChannelClient(threading.Thread):
    """Send reports until `close`. All methods are thread-safe; only `wait_delivered` blocks."""

    def __init__(self, endpoint: protocol.Endpoint, report: protocol.AgentReport) -> None:
        super().__init__(name="channel", daemon=True)
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._report, self._version, self._delivered = report, 1, 0
        self._evidence: NodeEvidence | None = None
        self._orders = protocol.Orders()
        self._closed = threading.Event()
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._silent_s = 0.0
        self._looked_at = time.monotonic()
        self.why = "no connection was ever made"
        self.ever_connected = False

    @property
    def orders(self) -> protocol.Orders:
        """Return the driver's newest orders."""
        return self._orders

    @property
    def silent_s(self) -> float:
        """Return the time since the last message of the driver, without pauses of this process itself."""
        with self._lock:
            now = time.monotonic()
            self._silent_s += min(now - self._looked_at, MAX_PAUSE_S)
            self._looked_at = now
            return self._silent_s

    @property
    def where(self) -> str:
        return f"{self._endpoint.address}:{self._endpoint.port}"

    def publish(self, report: protocol.AgentReport, *, at_once: bool = True) -> None:
        """Replace the reported state, and send it at once or with the next regular report."""
        with self._lock:
            if report == self._report:
                return
            self._report = report
            if at_once:
                self._version += 1
        if at_once:
            self._wake()

    def send_evidence(self, evidence: NodeEvidence) -> None:
        """Send evidence, again after each reconnection until it has arrived."""
        with self._lock:
            self._evidence = evidence
        self._wake()

    def wait_delivered(self, timeout_s: float) -> bool:
        """Wait until the driver has received the newest published state."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._lock:
                if self._delivered >= self._version and self._evidence is None:
                    return True
            time.sleep(0.02)
        return False

    def close(self) -> None:
        """Stop the thread and close its connection."""
        self._closed.set()
        self._wake()
        if self.is_alive():
            self.join(timeout=CONNECT_S + 1.0)

    def run(self) -> None:
        while not self._closed.is_set():
            try:
                address = (self._endpoint.address, self._endpoint.port)
                with socket.create_connection(address, timeout=CONNECT_S) as sock:
                    sealer, opener = authenticate(sock, self._endpoint)
                    self.ever_connected = True
                    self._serve(sock, sealer, opener)
            except (OSError, protocol.ChannelError, msgspec.DecodeError) as error:
                self.why = str(error) or type(error).__name__
            except Exception as error:
                self.why = f"{type(error).__name__}: {error}"
                logging.exception("control channel: unexpected error; the agent reconnects")
            self._closed.wait(RETRY_S * random.uniform(0.5, 1.5))  # noqa: S311 - spreads reconnections

    def _serve(self, sock: socket.socket, sealer: protocol.FrameWriter, opener: protocol.FrameReader) -> None:
        keep_alive(sock)
        sent_version, sent_at, sent_evidence = 0, 0.0, None
        awaited: list[int] = []
        while not self._closed.is_set():
            with self._lock:
                report, version, evidence = self._report, self._version, self._evidence
            now = time.monotonic()
            if version != sent_version or now - sent_at >= self._orders.interval_s:
                send_message(sock, sealer, report)
                sent_version, sent_at = version, now
                awaited.append(version)
            if evidence is not None and evidence is not sent_evidence:
                send_message(sock, sealer, protocol.Evidence(found=evidence))
                sent_evidence = evidence
            wait_s = max(0.0, sent_at + self._orders.interval_s - time.monotonic())
            ready, _, _ = select.select([sock, self._wake_r], [], [], wait_s)
            if self._wake_r in ready:
                os.read(self._wake_r, 4096)
            if sock in ready:
                for message in receive_messages(sock, opener):
                    self._take(message, awaited)

    def _take(self, message: protocol.Orders | protocol.Acknowledgement, awaited: list[int]) -> None:
        with self._lock:
            self._silent_s, self._looked_at = 0.0, time.monotonic()
            if isinstance(message, protocol.Orders):
                self._orders = message
            elif message.what == "report" and awaited:
                self._delivered = awaited.pop(0)
            elif message.what == "evidence":
                self._evidence = None

    def _wake(self) -> None:
        try:
            os.write(self._wake_w, b"x")
        except BlockingIOError:
            pass  # it is awake


def authenticate(sock: socket.socket, endpoint: protocol.Endpoint) -> tuple[protocol.FrameWriter, protocol.FrameReader]:
    """Authenticate both sides: prove knowledge of the token and verify the server's proof.

    Raises:
        ChannelError: the server belongs to another run, or is not a control channel.
        OSError: the connection ended, or the server did not answer in time.
    """
    sent = receive_exactly(sock, protocol.CHALLENGE_BYTES)
    answered = protocol.answer_challenge(endpoint.token, sent)
    sock.sendall(answered)
    protocol.verify_server(endpoint.token, sent, answered, receive_exactly(sock, protocol.MAC_BYTES))
    return protocol.open_session(endpoint.token, sent, answered, server=False)


def send_message(sock: socket.socket, sealer: protocol.FrameWriter, message: protocol.FromAgent) -> None:
    """Send one message, bounded by the socket's timeout."""
    sock.sendall(sealer.seal(msgspec.json.encode(message)))


def receive_messages(sock: socket.socket, opener: protocol.FrameReader) -> list[protocol.FromDriver]:
    """Return the messages that have arrived; raise `ConnectionError` if the driver closed the connection."""
    data = sock.recv(1 << 16)
    if not data:
        raise ConnectionError("the driver closed the connection")
    return [protocol.DRIVER_MESSAGES.decode(content) for content in opener.feed(data)]


def send_request(endpoint: protocol.Endpoint, order: str, reason: str, timeout_s: float = 10.0) -> None:
    """Ask the driver of a run, from another process of the same user, to stop or kill its ranks, or for a checkpoint.

    Raises:
        OSError, ChannelError: the driver cannot be reached, or did not confirm.
    """
    with socket.create_connection((endpoint.address, endpoint.port), timeout=timeout_s) as sock:
        sealer, opener = authenticate(sock, endpoint)
        # a driver of an earlier version takes any order but "kill" for a stop, and refuses an unknown message
        checkpoint = order == CHECKPOINT
        message = protocol.CheckpointRequest() if checkpoint else protocol.OrderRequest(order=order, reason=reason)
        send_message(sock, sealer, message)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            messages = receive_messages(sock, opener)
            if any(isinstance(m, protocol.Acknowledgement) and m.what == "request" for m in messages):
                return
        raise protocol.ChannelError("the driver did not confirm the request")


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """Return so many bytes, bounded by the socket's timeout; raise `ConnectionError` if the connection ends before."""
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionError("the connection ended during the handshake")
        data += piece
    return data
