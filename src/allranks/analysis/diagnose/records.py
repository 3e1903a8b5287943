"""Records of a diagnosis: the content of a scanned file (matched lines, counts, ranks), the reported findings, and the
case.

The case is the scans of all files together, with the candidate causes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import PurePath

from msgspec import Struct, field

from allranks.analysis.diagnose.lines import times_comparable
from allranks.analysis.flight_recorder import FlightRecord
from allranks.analysis.nccl_ras import RasFinding


class LogSignal(Struct, kw_only=True):
    """One matched line.

    ``kind`` is class, fact, sign or benign; ``owner`` the class, fact, sign or message. ``frames``: the nearest
    traceback's ``file:function``, outermost first. ``dated``: has a time stamp. ``file``: index into the scanned files.
    """

    kind: str
    owner: str
    weight: float
    file: int
    line: int
    text: str
    rule: int = -1  # none: it was read from a record
    passing: bool = False
    time: float | None = None
    rank: int | None = None
    local: int | None = None
    task: int | None = None
    host: str | None = None
    groups: dict[str, str] = field(default_factory=dict)
    frames: tuple[str, ...] = ()
    places: tuple[str, ...] = ()  # of the same frames, ``file:line in function``
    emitter: str = "program"
    severity: str = ""
    dated: bool = True


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
    ras: list[list[RasFinding]] = field(default_factory=list)  # the reports of NCCL's RAS, in order
    # innermost frames of tracebacks that end without an exception
    loose: list[tuple[str, ...]] = field(default_factory=list)
    transports: dict[str, int] = field(default_factory=dict)
    ready: int = 0
    hosts: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    rank_hosts: dict[int, str] = field(default_factory=dict)
    first_progress: int | None = None
    last_progress: int | None = None
    late_progress: list[int] = field(default_factory=list)  # the last few lines of progress
    # the last line that says that the job completed, not only that it saved something
    last_completed: int | None = None
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
    """A failure without a cause in the logs: lines that show it, who wrote them, and which log may have the cause."""

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

    ``offsets_s``: seconds by which a host's clock is ahead of the first host's, if they differ. ``unknown``: hosts
    without a
    known offset; the order in time between these and others is uncertain.
    """

    offsets_s: dict[str, float] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    note: str = ""


HEADLINE_CHARACTERS = 240


def place(rank: int | None, host: str | None) -> str:
    """Return ``rank 3 on host n2``, or what of it is known."""
    return " on ".join([*([f"rank {rank}"] if rank is not None else []), *([f"host {host}"] if host else [])])


def headline(what: str, where: str, todo: str) -> str:
    """Return one line from a title, a place, and the first sentence of what to do."""
    ends = [m.start() for m in re.finditer(r"(?<=[^.]{12}[.;]) |(?<=[^.]{12}): ", todo)]
    first = next((s for s in (todo[:end] for end in ends) if s.count("(") == s.count(")")), todo).rstrip(";.")
    return f"{what[:1].upper()}{what[1:]}{', ' if where else ''}{where}. {first}."[:HEADLINE_CHARACTERS]


class Diagnosis(Struct, frozen=True, kw_only=True):
    """The complete result; ``findings`` has the most likely root cause first.

    ``verdict``: found (a class explains the failure), unexplained (something failed, and no class explains it), healthy
    (nothing failed
    and the logs end in progress or completion), or incomplete (neither).
    """

    verdict: str
    summary: str = ""
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

    def headline(self) -> str:
        """Return one line that a pager can carry: what, where, what to do."""
        if self.findings:
            first = self.findings[0]
            what, where, todo = first.title, place(first.rank, first.host), first.fix
        elif self.unexplained is not None:
            seen = self.unexplained
            what, where = "a failure whose cause is not in these logs", place(seen.rank, seen.host)
            todo = f"Read next: {seen.read_next}"
        else:
            return ""
        return headline(what, where, todo)

    @property
    def readable(self) -> bool:
        """Return whether anything could be analysed: text, or an empty log."""
        return self.bytes_read > 0 or (self.files > 0 and all(p.text == EMPTY_FILE for p in self.problems))


_RANK_FILE = re.compile(r"(?:^|[._-])rank[._-]?(\d+)(?=[._-]|$)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_HOST_FILE = re.compile(r"^([A-Za-z][\w-]*(?:\.[\w-]+)*?)\.(?:rank\d+\.log|(?:slurmd|dmesg|kern|syslog|messages)\b)")


SURVIVAL_LINES = 3
REPEATED = 3
# a log ends in progress if its last progress is within so many lines, or this part, of its end
END_LINES, END_PART = 60, 0.1
# Their reports end a process: what a shell script prints afterwards does not mean that the job survived.
ENDING_EMITTERS = frozenset({"launcher", "mpi", "slurm_client", "slurm_daemon", "shell", "kernel"})


class CandidateCause(Struct, kw_only=True):
    """A possible cause, with evidence for and against it."""

    id: str
    score: float
    signals: list[LogSignal] = field(default_factory=list)
    against: list[str] = field(default_factory=list)
    cause: str | None = None  # replaces the catalogue's sentence if more is known
    title: str | None = None
    fix: str | None = None
    next_test: str | None = None
    rank: int | None = None
    host: str | None = None
    explained: bool = False  # a consequence of another candidate
    elsewhere: bool = False  # the failed rank is none of those that report it

    @property
    def time(self) -> float | None:
        times = [s.time for s in self.signals if s.time is not None]
        return min(times) if times else None


class DiagnosisCase:
    """The scans of all files, with queries across them."""

    def __init__(self, names: list[str], scans: list[FileScan]) -> None:
        self.names, self.scans = names, scans
        self._attribute()
        self.signals: list[LogSignal] = [s for scan in scans for s in scan.signals]
        self.candidates: dict[str, CandidateCause] = {}
        self.unsure_hosts: frozenset[str] = frozenset()  # their clocks cannot be compared with the others
        self.quiet_ends: list[LogSignal] = []  # ranks that exited with a code and no message
        self.own_kills: set[tuple[int, int]] = set()  # files and lines about ranks that allranks itself ended

    def facts(self, name: str) -> list[LogSignal]:
        """Return the signals of one fact, in order of files and lines."""
        return self._facts.get(name, [])

    @cached_property
    def _facts(self) -> dict[str, list[LogSignal]]:
        facts: dict[str, list[LogSignal]] = {}
        for signal in self.signals:
            if signal.kind == "fact":
                facts.setdefault(signal.owner, []).append(signal)
        return facts

    @cached_property
    def rank_hosts(self) -> dict[int, str]:
        """Return the host of each rank, if any line names it."""
        hosts: dict[int, str] = {}
        for scan in self.scans:
            for rank, host in scan.rank_hosts.items():
                hosts.setdefault(rank, host)
        for signal in self.signals:
            if signal.rank is not None and signal.host:
                hosts.setdefault(signal.rank, signal.host)
        return hosts

    @cached_property
    def world_size(self) -> int | None:
        """Return the number of ranks that the logs report."""
        sizes = [int(s.groups["nranks"]) for s in self.facts("comm_init")]
        sizes += [int(s.groups["world"]) for s in self.facts("world") if len(s.groups["world"]) < 7]
        return max(sizes, default=None)

    @cached_property
    def hosts(self) -> set[str]:
        """Return every host that a line names as its own."""
        return {host for scan in self.scans for host in scan.hosts} | {s.host for s in self.signals if s.host}

    @cached_property
    def tasks_are_ranks(self) -> bool:
        """Return whether Slurm's task numbers are ranks: there are more tasks than hosts."""
        numbers = [int(n) for s in self.facts("srun_exit") for n in _NUMBER.findall(s.groups["tasks"])]
        hosts = self.hosts | {host for scan in self.scans if (host := self.file_host(scan.file))}
        return max(numbers, default=0) >= max(len(hosts), 1)

    def went_on_after(self, signal: LogSignal) -> bool:
        """Return whether a line of progress or of completion follows the last of these messages in the same file."""
        scan = self.scans[signal.file]
        return max(scan.last_progress or 0, scan.last_done or 0) > self._last_line(signal)

    def _last_line(self, signal: LogSignal) -> int:
        """Return the last line of the same file with this message."""
        tally = self.scans[signal.file].tallies.get(signal.rule)
        return tally.last_line if tally else signal.line

    def survived(self, signal: LogSignal) -> bool:
        """Return whether the job went on after the last of these messages: `SURVIVAL_LINES` of progress, or completion.

        One line of progress may be another rank's, not yet aware of the failure. A user's interrupt is never survived.
        """
        if "interrupt" in signal.groups:
            return False
        scan, last = self.scans[signal.file], self._last_line(signal)
        later = sum(line > last for line in scan.late_progress)
        done = scan.last_done is not None and scan.last_done > last and signal.severity != "fatal"
        return later >= SURVIVAL_LINES or (done and (later > 0 or signal.emitter not in ENDING_EMITTERS))

    def repeats_to_end(self, signal: LogSignal) -> bool:
        """Return whether messages of this rule (at least `REPEATED`) go on as often as before until progress ends."""
        scan = self.scans[signal.file]
        tally = scan.tallies.get(signal.rule)
        if tally is None or tally.count < REPEATED:
            return False
        first = min(s.line for s in scan.signals if s.rule == signal.rule)
        usual = (tally.last_line - first) / (tally.count - 1)
        return (scan.last_progress or 0) - tally.last_line <= 2 * usual + 1

    def after_completion(self, signal: LogSignal) -> bool:
        """Return whether the job had completed, and made no progress since, when a message was written."""
        scan = self.scans[signal.file]
        return scan.last_completed is not None and (scan.last_progress or 0) < scan.last_completed < signal.line

    def ends_well(self, file: int) -> bool:
        """Return whether a file ends in progress or completion."""
        scan = self.scans[file]
        last = max(scan.last_progress or 0, scan.last_done or 0, scan.last_ended or 0)
        return last > 0 and scan.lines - last <= max(END_LINES, END_PART * scan.lines)

    def propose(
        self, name: str, score: float, signals: Iterable[LogSignal] = (), *, cause: str | None = None
    ) -> CandidateCause:
        """Return the candidate of that class, new or existing, with at least this score."""
        candidate = self.candidates.setdefault(name, CandidateCause(id=name, score=0.0))
        candidate.score = max(candidate.score, score)
        known = {(s.file, s.line) for s in candidate.signals}
        candidate.signals += [s for s in signals if (s.file, s.line) not in known]
        candidate.cause = cause or candidate.cause
        return candidate

    def file_rank(self, file: int) -> int | None:
        """Return the rank of a file, by its name or because its lines name no other."""
        match = _RANK_FILE.search(PurePath(self.names[file]).name)
        ranks = self.scans[file].ranks
        return int(match.group(1)) if match else ranks[0] if len(ranks) == 1 else None

    def host_of(self, signal: LogSignal) -> str | None:
        """Return the host of a signal, by itself or by its rank."""
        return signal.host or (self.rank_hosts.get(signal.rank) if signal.rank is not None else None)

    def file_host(self, file: int) -> str | None:
        """Return the host of a file: by its name, because its lines name no other, or by its rank."""
        match = _HOST_FILE.match(PurePath(self.names[file]).name)
        if match:
            return match.group(1)
        hosts, rank = self.scans[file].hosts, self.file_rank(file)
        return hosts[0] if len(hosts) == 1 else self.rank_hosts.get(rank) if rank is not None else None

    def _attribute(self) -> None:
        """Assign the rank or host of a file to its signals without one, if the file has only one."""
        for scan in self.scans:
            name = PurePath(self.names[scan.file]).name
            rank_match, host_match = _RANK_FILE.search(name.split(".log")[0]), _HOST_FILE.match(name)
            own_rank = int(rank_match.group(1)) if rank_match else (scan.ranks[0] if len(scan.ranks) == 1 else None)
            own_host = host_match.group(1) if host_match else (scan.hosts[0] if len(scan.hosts) == 1 else None)
            for signal in scan.signals:
                if signal.rank is None and signal.local is None and rank_match:
                    signal.rank = own_rank
                if signal.host is None and (signal.rank is None or signal.rank == own_rank):
                    signal.host = own_host
            if own_rank is not None and own_host:
                scan.rank_hosts.setdefault(own_rank, own_host)
        self._date_ends()

    def _date_ends(self) -> None:
        """Set the time of errors in lines without a time stamp to the end of their rank, as the run recorded it."""
        signals = [s for scan in self.scans for s in scan.signals]
        ends = {s.rank: s.time for s in signals if s.owner in ("rank_end", "event_error") and s.time is not None}
        for signal in signals:
            ended, is_error = ends.get(signal.rank), signal.kind in ("class", "sign") or signal.owner == "exception"
            if is_error and not signal.dated and ended is not None:
                signal.time = ended


def sort_by_time(signals: Iterable[LogSignal]) -> list[LogSignal]:
    """Sort by time if both times can be compared, else by file and line."""
    listed = sorted(signals, key=lambda s: (s.file, s.line))
    times = [s.time for s in listed if s.time is not None]
    if len(times) < len(listed) or not all(times_comparable(times[0], t) for t in times):
        return listed
    return sorted(listed, key=lambda s: (s.time or 0.0, s.file, s.line))
