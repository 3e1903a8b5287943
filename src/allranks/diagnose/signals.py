"""What scanning one file yields: matched lines, counts, and who is who."""

from __future__ import annotations

from msgspec import Struct, field


class Signal(Struct, kw_only=True):
    """One matched line.

    ``kind`` is class, fact or benign; ``owner`` the class, fact or message. ``frames`` are the nearest traceback's
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


class Stack(Struct):
    """Where one thread stood in a dump: ``file:function``, innermost first."""

    line: int
    head: str
    rank: int | None
    host: str | None
    frames: list[str] = field(default_factory=list)


class Call(Struct):
    """One collective that a rank called, from its flight recorder. ``frames`` innermost first."""

    group: str
    seq: int
    op: str
    sizes: str
    state: str
    frames: list[str]


class Flight(Struct):
    """A rank's flight recorder."""

    rank: int | None
    calls: list[Call]


class Tally(Struct):
    """How often a rule matched in a file, and where last."""

    count: int = 0
    last_line: int = 0


class FileScan(Struct, kw_only=True):
    """All that one file tells, bounded in size whatever the file's."""

    file: int
    signals: list[Signal] = field(default_factory=list)
    tallies: dict[int, Tally] = field(default_factory=dict)
    stacks: list[Stack] = field(default_factory=list)
    flight: Flight | None = None
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
    last_progress_text: str = ""
    marks: dict[int, float] = field(default_factory=dict)  # when some of the steps were told
    lines: int = 0
    bytes_read: int = 0
    problems: list[str] = field(default_factory=list)
