"""What is known of ranks that stand still, as the files of ``hang/attempt-<A>/`` hold it."""

from __future__ import annotations

from typing import Any

import msgspec


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a stack."""

    file: str
    line: int
    function: str


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One collective that a rank has called. ``done``: it has ended on this rank."""

    group: str
    seq: int
    op: str
    sizes: str
    done: bool
    where: str = ""


class RankEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, as the agent of its node found it.

    ``state`` is the kernel's letter and word for its main thread; ``silent_s`` the time without progress, and
    ``python_silent_s`` that since any thread of Python ran in it. ``stack`` is the main thread's, innermost first.
    """

    rank: int
    pid: int
    state: str
    phase: str = ""
    part: str = ""
    step: int | None = None
    silent_s: float | None = None
    python_silent_s: float | None = None
    sequences: dict[str, int] = {}
    wait_channel: str = ""
    kernel_stack: list[str] = []
    cpu_share: float | None = None  # of one core, while it was looked at
    threads: int | None = None
    memory_bytes: int | None = None
    stack: list[Frame] = []
    stack_by: str = ""
    no_stack: str = ""
    calls: list[Call] = []
    no_calls: str = ""


class NodeEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One node. ``meets`` is whether it reaches the place where the ranks met; None where it was not tried."""

    node: int
    host: str
    time: float
    ranks: list[RankEvidence]
    seconds: float = 0.0
    load1: float | None = None
    cpus: int | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    oom_kills: int | None = None
    blocked: list[str] = []
    interfaces: dict[str, dict[str, Any]] = {}
    interface: str = ""
    meets: bool | None = None


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """The silence that was noticed first. ``since`` and ``time`` in seconds since the epoch."""

    node: int
    host: str
    rank: int
    phase: str
    part: str
    step: int | None
    since: float
    time: float
    limit_s: float


class Fallen(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that fell out: why it is held to be the one, and where it stands."""

    rank: int | None
    host: str
    why: str
    where: str
    state: str = ""


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that waits for others."""

    rank: int
    host: str
    where: str
    call: str = ""


class HangReport(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict. ``kind`` is a class of the catalogue of `allranks diagnose`."""

    attempt: int
    kind: str
    sentence: str
    fallen: list[Fallen]
    waiting: list[Waiting]
    alarm: Alarm
    judged: float
    missing_hosts: list[str] = []
    notes: list[str] = []
    files: str = ""
