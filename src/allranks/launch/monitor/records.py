"""Records of stalled ranks, as stored in ``hang/attempt-<A>/``."""

from __future__ import annotations

from typing import Any

import msgspec

from allranks.analysis.flight_recorder import CollectiveCall
from allranks.analysis.nccl_ras import RasFinding
from allranks.analysis.stacks import StackFrame


class RankEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence of one rank, collected by the agent of its node.

    ``state`` is the kernel's state letter and name of its main thread; ``silent_s`` the time without progress;
    ``python_silent_s`` the time since its heartbeat thread last ran (None: never). ``python_beats`` counts how often
    that thread has run, and ``monitor_error`` is its own failure: both show whether its silence is meaningful.
    ``stack`` is the main thread's, innermost first.
    """

    rank: int
    pid: int
    state: str
    phase: str = ""
    part: str = ""
    step: int | None = None
    silent_s: float | None = None
    python_silent_s: float | None = None
    python_beats: int = 0
    monitor_error: str = ""
    sequences: dict[str, int] = {}
    wait_channel: str = ""
    kernel_stack: list[str] = []
    cpu_share: float | None = None  # of one core, during the examination
    stack: list[StackFrame] = []
    calls: list[CollectiveCall] = []
    no_calls: str = ""


class NodeEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence of one node. ``meets``: whether it can reach the rendezvous; None if not tested. ``ras``: what NCCL's
    RAS reports of the whole job."""

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
    ras: list[RasFinding] = []


class HangAlarm(msgspec.Struct, frozen=True, kw_only=True):
    """The first silence that was detected. ``since`` and ``time`` in seconds since the epoch.

    ``whole_job``: this is a user's own program, and the alarm counts only once every node has raised one. ``stuck``: no
    rank of
    the node works; ``waiting``: one of them is in a collective.
    """

    node: int
    host: str
    rank: int
    phase: str
    part: str
    step: int | None
    since: float
    time: float
    limit_s: float
    whole_job: bool = False
    stuck: bool = True
    waiting: bool = False


class StalledRank(msgspec.Struct, frozen=True, kw_only=True):
    """A stalled rank: why it was named, and where it is."""

    rank: int
    host: str
    why: str
    where: str
    state: str = ""


class WaitingRank(msgspec.Struct, frozen=True, kw_only=True):
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
    stalled: list[StalledRank]
    waiting: list[WaitingRank]
    alarm: HangAlarm
    judged: float
    missing_hosts: list[str] = []
    notes: list[str] = []
    files: str = ""
