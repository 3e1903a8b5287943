"""What a diagnosis says: findings, harmless messages, what runs healthily, and what could not be read."""

from __future__ import annotations

from msgspec import Struct, field

IS_EMPTY = "is empty"


class Evidence(Struct, frozen=True, kw_only=True):
    """One line of a log, without secrets and terminal codes. ``line`` counts from 1."""

    file: str
    line: int
    text: str


class Finding(Struct, frozen=True, kw_only=True):
    """One possible cause. ``id`` is a class of the catalogue, ``confidence`` lies between 0 and 1.

    ``host`` and ``rank`` are those that failed first, where the logs tell.
    """

    id: str
    title: str
    confidence: float
    cause: str
    fix: str
    host: str | None
    rank: int | None
    evidence: list[Evidence]
    against: list[str]
    next_test: str
    reference: str = ""
    count: int = 1


class Benign(Struct, frozen=True, kw_only=True):
    """A message that looks alarming and is harmless, and why."""

    id: str
    why: str
    count: int
    evidence: Evidence


class Problem(Struct, frozen=True, kw_only=True):
    """Something that could not be read, or only in part."""

    file: str
    text: str


class Health(Struct, frozen=True, kw_only=True):
    """What the logs say about a job that runs.

    ``transports`` counts connections between ranks by path (P2P, SHM, NET/IB, NET/Socket ...).
    """

    world_size: int | None = None
    ranks_seen: list[int] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    transports: dict[str, int] = field(default_factory=dict)
    network: list[str] = field(default_factory=list)
    channels: int | None = None
    interfaces: list[str] = field(default_factory=list)
    versions: dict[str, list[str]] = field(default_factory=dict)
    communicators_ready: int = 0
    progressed: bool = False
    advice: list[str] = field(default_factory=list)


class Clocks(Struct, frozen=True, kw_only=True):
    """How the clocks of the hosts stand to each other.

    ``offsets_s``: seconds that a host's clock is ahead of the first host's, where they differ. ``unknown``: hosts of which
    nothing tells; the order in time between these and others is uncertain.
    """

    offsets_s: dict[str, float] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    note: str = ""


class Diagnosis(Struct, frozen=True, kw_only=True):
    """The whole answer; ``findings`` most likely root cause first, empty where nothing failed."""

    findings: list[Finding]
    benign: list[Benign]
    health: Health
    story: list[str]
    clocks: Clocks
    problems: list[Problem]
    files: int
    bytes_read: int

    @property
    def readable(self) -> bool:
        """Whether there was anything to say something about: text, or a log that is empty."""
        return self.bytes_read > 0 or (self.files > 0 and all(p.text == IS_EMPTY for p in self.problems))
