"""Records of a diagnosis: the content of a scanned file (matched lines, counts, ranks), and the reported findings."""

from __future__ import annotations

from msgspec import Struct, field

from allranks.analysis.flight_recorder import FlightRecord


class LogSignal(Struct, kw_only=True):
    """One matched line.

    ``kind`` is class, fact, sign or benign; ``owner`` the class, fact, sign or message. ``frames`` are the nearest traceback's
    ``file:function``, outermost first. ``file`` is an index into the scanned files.
    """

    kind: str
    owner: str
    rule: int
    weight: float
    passing: bool
    file: int
    line: int
    time: float | None
    rank: int | None
    local: int | None
    task: int | None
    host: str | None
    text: str
    groups: dict[str, str] = field(default_factory=dict)
    frames: tuple[str, ...] = ()
    emitter: str = "program"
    severity: str = ""


class ThreadStack(Struct):
    """The stack of one thread in a dump: ``file:function``, innermost first."""

    line: int
    head: str
    rank: int | None
    host: str | None
    frames: list[str] = field(default_factory=list)


class RuleCount(Struct):
    """How often a rule matched in a file, and where last."""

    count: int = 0
    last_line: int = 0


class FileScan(Struct, kw_only=True):
    """The result of scanning one file; its size is bounded."""

    file: int
    signals: list[LogSignal] = field(default_factory=list)
    tallies: dict[int, RuleCount] = field(default_factory=dict)
    stacks: list[ThreadStack] = field(default_factory=list)
    flight: FlightRecord | None = None
    loose: list[tuple[str, ...]] = field(
        default_factory=list
    )  # innermost frames of tracebacks that end without an exception
    transports: dict[str, int] = field(default_factory=dict)
    ready: int = 0
    hosts: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    rank_hosts: dict[int, str] = field(default_factory=dict)
    first_progress: int | None = None
    last_progress: int | None = None
    late_progress: list[int] = field(default_factory=list)  # the last few lines of progress
    last_completed: int | None = (
        None  # the last line that says that the job completed, not only that it saved something
    )
    last_done: int | None = None  # the last line that shows completion
    last_ended: int | None = None  # the last line that shows a process that ended without an error
    last_progress_text: str = ""
    marks: dict[int, float] = field(default_factory=dict)  # times of some of the steps
    lines: int = 0
    bytes_read: int = 0
    problems: list[str] = field(default_factory=list)


EMPTY_FILE = "is empty"


class LogEvidence(Struct, frozen=True, kw_only=True):
    """One line of a log, without secrets and terminal codes. ``line`` counts from 1."""

    file: str
    line: int
    text: str


class DiagnosisFinding(Struct, frozen=True, kw_only=True):
    """One possible cause. ``id`` is a class of the catalogue, ``confidence`` is between 0 and 1.

    ``host`` and ``rank`` are those that failed first, if the logs show it.
    """

    id: str
    title: str
    confidence: float
    cause: str
    fix: str
    host: str | None
    rank: int | None
    evidence: list[LogEvidence]
    against: list[str]
    next_test: str
    reference: str = ""
    count: int = 1


class UnexplainedFailure(Struct, frozen=True, kw_only=True):
    """A failure whose cause is not in the logs: the lines that show it, who wrote them, and which log may have the cause."""

    says: str
    emitter: str
    host: str | None
    rank: int | None
    read_next: str
    evidence: list[LogEvidence]


class RunChange(Struct, frozen=True, kw_only=True):
    """One difference between two runs."""

    what: str
    before: str
    now: str


class LastGoodRun(Struct, frozen=True, kw_only=True):
    """The newest successful run of the same spec, and what has changed since."""

    run: str
    same_spec: bool
    changes: list[RunChange]


class BenignFinding(Struct, frozen=True, kw_only=True):
    """A harmless message that looks like an error, and why it is harmless."""

    id: str
    why: str
    count: int
    evidence: LogEvidence


class ReadProblem(Struct, frozen=True, kw_only=True):
    """A file that was not read, or only in part."""

    file: str
    text: str


class JobHealth(Struct, frozen=True, kw_only=True):
    """Facts about the job from its logs.

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


class ClockOffsets(Struct, frozen=True, kw_only=True):
    """Clock offsets between hosts.

    ``offsets_s``: seconds by which a host's clock is ahead of the first host's, if they differ. ``unknown``: hosts without a
    known offset; the order in time between these and others is uncertain.
    """

    offsets_s: dict[str, float] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    note: str = ""


class Diagnosis(Struct, frozen=True, kw_only=True):
    """The complete result; ``findings`` has the most likely root cause first.

    ``verdict``: found (a class explains the failure), unexplained (something failed, and no class explains it), healthy (nothing failed
    and the logs end in progress or completion), or incomplete (neither).
    """

    verdict: str
    findings: list[DiagnosisFinding]
    benign: list[BenignFinding]
    unexplained: UnexplainedFailure | None
    last_good_run: LastGoodRun | None
    health: JobHealth
    story: list[str]
    clocks: ClockOffsets
    problems: list[ReadProblem]
    files: int
    bytes_read: int

    @property
    def readable(self) -> bool:
        """Return whether anything could be analysed: text, or an empty log."""
        return self.bytes_read > 0 or (self.files > 0 and all(p.text == EMPTY_FILE for p in self.problems))
