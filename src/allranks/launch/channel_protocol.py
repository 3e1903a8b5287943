"""Messages between agents and driver, and the authenticated wire format of the control channel. No I/O.

The protocol is a mutual challenge-response handshake, then authenticated JSON frames.

Both sides know a random token, which travels through the scheduler (the environment of the agents) or in a file of mode
0600, and never over the channel. The server sends a nonce; the client answers with its own nonce and a proof
(HMAC-SHA256) that it knows the token; the server answers with its proof. Every frame then carries an HMAC over its
number and its content, with one key per direction, so a frame can be neither forged nor replayed. Nothing is encrypted:
the channel carries no secrets. Both sides always send their full state, so lost or repeated messages are harmless.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any

import msgspec

from allranks.launch.failure_attribution import RankEnd
from allranks.launch.monitor.records import HangAlarm, NodeEvidence

MAGIC = b"allranks-channel-2"
NONCE_BYTES = 32
MAC_BYTES = 32
HEADER_BYTES = 4 + MAC_BYTES
MAX_FRAME_BYTES = 4 << 20
CHALLENGE_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + MAC_BYTES
TOKEN_BYTES = 32


class ChannelError(Exception):
    """The peer does not use this protocol, does not know the token, or sent a damaged frame."""


def new_token() -> str:
    """Return a random token for one attempt of one run."""
    return secrets.token_hex(TOKEN_BYTES)


def new_challenge() -> bytes:
    """Return the first bytes that a server sends."""
    return MAGIC + secrets.token_bytes(NONCE_BYTES)


def answer_challenge(token: str, sent: bytes) -> bytes:
    """Return the client's answer to a challenge; raise `ChannelError` if it is not one of this protocol."""
    if not sent.startswith(MAGIC) or len(sent) != CHALLENGE_BYTES:
        raise ChannelError("the peer is not a control channel of allranks")
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + _proof(token, b"client", sent, nonce)


def verify_answer(token: str, sent: bytes, answered: bytes) -> bytes:
    """Check a client's answer on the server, and return the server's own proof, which completes the handshake.

    Raises:
        ChannelError: the client does not know the token.
    """
    nonce, proof = answered[:NONCE_BYTES], answered[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"client", sent, nonce)):
        raise ChannelError("the client does not know the token of this run")
    return _proof(token, b"server", sent, nonce)


def verify_server(token: str, sent: bytes, answered: bytes, proof: bytes) -> None:
    """Raise `ChannelError` on the client if the server does not know the token: it belongs to another run."""
    if not hmac.compare_digest(proof, _proof(token, b"server", sent, answered[:NONCE_BYTES])):
        raise ChannelError("the server does not know the token of this run")


def open_session(token: str, sent: bytes, answered: bytes, *, server: bool) -> tuple[FrameWriter, FrameReader]:
    """Return the keys of both directions of an authenticated connection: for sending and for receiving."""
    to_server, to_client = (
        _proof(token, label, sent, answered[:NONCE_BYTES]) for label in (b"to-server", b"to-client")
    )
    return (
        (FrameWriter(to_client), FrameReader(to_server)) if server else (FrameWriter(to_server), FrameReader(to_client))
    )


class FrameWriter:
    """Convert messages to frames: length (4 bytes, big endian), HMAC (32 bytes), content. `key`: of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def seal(self, content: bytes) -> bytes:
        """Return one frame; raise `ChannelError` if the content is larger than `MAX_FRAME_BYTES`."""
        if len(content) > MAX_FRAME_BYTES:
            raise ChannelError(f"a message of {len(content)} bytes is larger than {MAX_FRAME_BYTES}")
        mac = _frame_mac(self._key, self._count, content)
        self._count += 1
        return len(content).to_bytes(4, "big") + mac + content


class FrameReader:
    """Convert a byte stream to messages."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count, self._buffer = key, 0, bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that are now complete; raise `ChannelError` for a frame too large or with a wrong
        HMAC."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= HEADER_BYTES:
            size = int.from_bytes(self._buffer[:4], "big")
            if size > MAX_FRAME_BYTES:
                raise ChannelError(f"a frame announces {size} bytes, more than {MAX_FRAME_BYTES}")
            if len(self._buffer) < HEADER_BYTES + size:
                break
            mac, content = bytes(self._buffer[4:HEADER_BYTES]), bytes(self._buffer[HEADER_BYTES : HEADER_BYTES + size])
            if not hmac.compare_digest(mac, _frame_mac(self._key, self._count, content)):
                raise ChannelError("a frame has a wrong HMAC")
            self._count += 1
            del self._buffer[: HEADER_BYTES + size]
            messages.append(content)
        return messages


def _proof(token: str, label: bytes, sent: bytes, nonce: bytes) -> bytes:
    return hmac.new(bytes.fromhex(token), label + sent + nonce, hashlib.sha256).digest()


def _frame_mac(key: bytes, count: int, content: bytes) -> bytes:
    return hmac.new(key, count.to_bytes(8, "big") + content, hashlib.sha256).digest()


CHANNEL_VARIABLE = "ALLRANKS_CHANNEL"  # JSON of `Endpoint`, in the environment of the agents
LAUNCHER_PID_VARIABLE = "ALLRANKS_LAUNCHER_PID"  # of the command that is the parent of an agent on this machine

JOINED, RUNNING, ENDED = "joined", "running", "ended"


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Address of the driver. ``keep_s``: how long an agent keeps its ranks running without the driver; None: as long as
    the connection stays open (the driver is a command on this machine that the user may suspend)."""

    address: str
    port: int
    token: str
    keep_s: float | None = None


class ProbeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a program of the preflight printed on a node, as an answer to the request of that number."""

    number: int
    lines: list[str]
    said: str = ""


class AgentReport(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """State of one node's agent. ``host`` is its name on other nodes, ``machine`` its own host name; ``store`` is the
    address and port of the store on node 0; ``answer`` what the program of the newest `ProbeRequest` printed."""

    node: int
    host: str
    pid: int
    machine: str = ""
    state: str = JOINED
    store: tuple[str, int] | None = None
    ends: list[RankEnd] = []
    alarm: HangAlarm | None = None
    refused: str = ""
    reason: str = ""
    answer: ProbeAnswer | None = None

    @property
    def failed(self) -> list[RankEnd]:
        """Return the ranks that failed by themselves."""
        return [end for end in self.ends if end.failed]


class Evidence(msgspec.Struct, frozen=True, kw_only=True, tag="evidence"):
    """Evidence that an agent collected about its ranks."""

    found: NodeEvidence


class OrderRequest(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """A user's request from another terminal: ``stop`` or ``kill``."""

    order: str
    reason: str


class CheckpointRequest(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint"):
    """A user's request from another terminal for a checkpoint without a stop."""


class StartOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Rendezvous of the ranks; sent once every node has joined."""

    address: str
    port: int
    nonce: str


class ProbeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A program of `nodes.probes` that some nodes are to run from their own allranks; only its name is sent."""

    number: int
    nodes: list[int]
    program: str
    python: str
    limit_s: float
    argument: dict[str, Any] | None = None
    request: dict[str, Any] | None = None


class Orders(msgspec.Struct, frozen=True, kw_only=True, tag="orders"):
    """Orders to every agent; always the full state.

    ``stop``: the ranks write a checkpoint and exit. ``end``: the agent kills the ranks after ``end_grace_s``. Both hold
    the reason.
    ``checkpoints``: how many checkpoints users have requested so far.
    ``collect``: examine the ranks because of this alarm. ``probe``: agents without ranks run this program.
    ``interval_s``: seconds between reports of an agent.
    """

    start: StartOrder | None = None
    stop: str = ""
    end: str = ""
    end_grace_s: float = 0.0
    checkpoints: int = 0
    collect: HangAlarm | None = None
    interval_s: float = 1.0
    probe: ProbeRequest | None = None

    @property
    def stopping(self) -> str:
        """Return why the ranks stop or end; empty if they do not."""
        return self.end or self.stop


class Acknowledgement(msgspec.Struct, frozen=True, kw_only=True, tag="received"):
    """The driver's confirmation of a report, evidence or request."""

    what: str


FromAgent = AgentReport | Evidence | OrderRequest | CheckpointRequest
FromDriver = Orders | Acknowledgement
AGENT_MESSAGES: msgspec.json.Decoder[FromAgent] = msgspec.json.Decoder(FromAgent)
DRIVER_MESSAGES: msgspec.json.Decoder[FromDriver] = msgspec.json.Decoder(FromDriver)
