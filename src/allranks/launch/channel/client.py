"""Client of the control channel, used by agents: a thread that keeps one connection to the driver and sends reports in batches."""

from __future__ import annotations

import logging
import os
import random
import select
import socket
import threading
import time

import msgspec

from allranks.launch.channel.protocol import (
    CHALLENGE_BYTES,
    MAC_BYTES,
    Acknowledgement,
    AgentReport,
    ChannelError,
    Endpoint,
    Evidence,
    FrameReader,
    FrameWriter,
    FromAgent,
    OrderRequest,
    Orders,
    answer_challenge,
    decode_from_driver,
    encode_message,
    open_session,
    verify_server,
)
from allranks.launch.channel.server import keep_alive
from allranks.launch.monitor.records import NodeEvidence

CONNECT_S = 5.0
RETRY_S = 1.0
MAX_PAUSE_S = 5.0  # a pause of this process itself (suspended job, overloaded node) does not count as silence


class ChannelClient(threading.Thread):
    """Send reports until `close`. All methods are thread-safe; only `wait_delivered` blocks."""

    def __init__(self, endpoint: Endpoint, report: AgentReport) -> None:
        super().__init__(name="channel", daemon=True)
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._report, self._version, self._delivered = report, 1, 0
        self._evidence: NodeEvidence | None = None
        self._orders = Orders()
        self._closed = threading.Event()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        self._silent_s = 0.0
        self._looked_at = time.monotonic()
        self.why = "no connection was ever made"
        self.ever_connected = False

    @property
    def orders(self) -> Orders:
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
        """Return the driver's address for messages."""
        return f"{self._endpoint.address}:{self._endpoint.port}"

    def publish(self, report: AgentReport, *, at_once: bool = True) -> None:
        """Replace the reported state.

        Args:
            at_once: send it now; otherwise with the next regular report.
        """
        with self._lock:
            if report == self._report:
                return
            self._report = report
            if at_once:
                self._version += 1
        if at_once:
            self._wake()

    def send_evidence(self, found: NodeEvidence) -> None:
        """Send evidence, again after each reconnection until it has arrived."""
        with self._lock:
            self._evidence = found
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
                with self._connect() as sock:
                    sealer, opener = authenticate(sock, self._endpoint)
                    self.ever_connected = True
                    self._serve(sock, sealer, opener)
            except (OSError, ChannelError, msgspec.DecodeError) as error:
                self.why = str(error) or type(error).__name__
            except Exception as error:
                self.why = f"{type(error).__name__}: {error}"
                logging.exception("control channel: unexpected error; the agent reconnects")
            self._closed.wait(RETRY_S * random.uniform(0.5, 1.5))  # noqa: S311 - spreads reconnections

    def _connect(self) -> socket.socket:
        return socket.create_connection((self._endpoint.address, self._endpoint.port), timeout=CONNECT_S)

    def _serve(self, sock: socket.socket, sealer: FrameWriter, opener: FrameReader) -> None:
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
                send_message(sock, sealer, Evidence(node=report.node, found=evidence))
                sent_evidence = evidence
            wait_s = max(0.0, sent_at + self._orders.interval_s - time.monotonic())
            ready, _, _ = select.select([sock, self._wake_r], [], [], wait_s)
            if self._wake_r in ready:
                os.read(self._wake_r, 4096)
            if sock in ready:
                for message in receive_messages(sock, opener):
                    self._take(message, awaited)

    def _take(self, message: Orders | Acknowledgement, awaited: list[int]) -> None:
        with self._lock:
            self._silent_s, self._looked_at = 0.0, time.monotonic()
            if isinstance(message, Orders):
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


def authenticate(sock: socket.socket, endpoint: Endpoint) -> tuple[FrameWriter, FrameReader]:
    """Authenticate both sides: prove knowledge of the token and verify the server's proof.

    Raises:
        ChannelError: the server belongs to another run, or is not a control channel.
        OSError: the connection ended, or the server did not answer in time.
    """
    sent = _exactly(sock, CHALLENGE_BYTES)
    answered = answer_challenge(endpoint.token, sent)
    sock.sendall(answered)
    verify_server(endpoint.token, sent, answered, _exactly(sock, MAC_BYTES))
    return open_session(endpoint.token, sent, answered, server=False)


def send_message(sock: socket.socket, sealer: FrameWriter, message: FromAgent) -> None:
    """Send one message; bounded by the socket's timeout."""
    sock.sendall(sealer.seal(encode_message(message)))


def receive_messages(sock: socket.socket, opener: FrameReader) -> list[Orders | Acknowledgement]:
    """Return the messages that have arrived.

    Raises:
        ConnectionError: the driver closed the connection.
    """
    data = sock.recv(1 << 16)
    if not data:
        raise ConnectionError("the driver closed the connection")
    return [decode_from_driver(content) for content in opener.feed(data)]


def send_request(endpoint: Endpoint, order: str, reason: str, timeout_s: float = 10.0) -> None:
    """Ask the driver of a run, from another process of the same user, to stop or kill its ranks.

    Raises:
        OSError, ChannelError: the driver cannot be reached, or did not confirm.
    """
    with socket.create_connection((endpoint.address, endpoint.port), timeout=timeout_s) as sock:
        sealer, opener = authenticate(sock, endpoint)
        send_message(sock, sealer, OrderRequest(order=order, reason=reason))
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if any(isinstance(m, Acknowledgement) and m.what == "request" for m in receive_messages(sock, opener)):
                return
        raise ChannelError("the driver did not confirm the request")


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionError("the connection ended during the handshake")
        data += piece
    return data
