"""Detect which process failed first, from exit codes, the program's exceptions, and errors that only report a lost peer.

An error about a lost peer may name the process whose log to read next.
"""

from __future__ import annotations

import re

from msgspec import Struct

from allranks.analysis.diagnose.case import CandidateCause, DiagnosisCase, sort_by_time
from allranks.analysis.diagnose.patterns import POSSIBLE
from allranks.analysis.diagnose.records import LogSignal

_NUMBER = re.compile(r"\d+")


def detect_exit_codes(case: DiagnosisCase) -> None:
    """Where nothing but the end of a process is told, says so: the launcher's table hides the error itself."""
    _silent_exits(case)
    if case.candidates:
        return
    ended = [
        s
        for s in case.facts("agent_field")
        if s.groups["field"].lower() == "exitcode" and s.groups["value"].startswith("1 ")
    ]
    ended += [s for s in case.facts("agent_failed") if s.groups["code"] == "1"]
    ended += [s for s in case.facts("srun_exit") if re.search(r"exit code [1-9]\d?$", s.groups["how"])]
    if ended:
        found = case.propose("application_error", 0.5, sort_by_time(ended))
        found.cause = "A process ended with an error code of its own; its error is not in these logs, only the launcher's report of it."
        found.next_test = (
            "give diagnose the logs of that rank; decorate the program's main function with torch.distributed.elastic's @record, or start with "
            "--log-dir and --redirects=3, so that the error is kept"
        )


def _silent_exits(case: DiagnosisCase) -> None:
    """A rank that ended by itself, with a code and without a word, where the others' words are of its absence alone."""
    if case.candidates.keys() - {"peer_died_first"}:
        return
    spoke = {s.rank for s in case.signals if s.kind == "class" or s.owner in ("exception", "event_error")}
    case.quiet_ends = [
        s for s in sort_by_time(case.facts("rank_end")) if s.rank not in spoke and int(s.groups["code"]) > 0
    ]
    if case.quiet_ends:
        first = case.quiet_ends[0]
        found = case.propose("application_error", 0.72, case.quiet_ends)
        found.rank, found.host = first.rank, first.host
        found.cause = (
            f"Rank {first.rank} ended itself with exit code {first.groups['code']} and wrote no error: sys.exit, os._exit, or a library that gave up. "
            "What the other ranks say is of its absence."
        )
        found.title = "the program ended itself without an error"
        found.fix = f"See in the program what ends it with {first.groups['code']} on rank {first.rank} alone; raise an exception there, which says why."
        found.next_test = f"read the end of the log of rank {first.rank}; it ends where the program did"


class FirstExit(Struct, frozen=True):
    """Who ended first, by the word of torchrun's agent or of srun."""

    host: str | None
    rank: int | None


def first_exit(case: DiagnosisCase) -> FirstExit:
    """The agent's root cause; else the first task that srun saw fail: its host, and its rank where each task is one."""
    noted = sort_by_time(case.facts("rank_end"))
    if noted:
        return FirstExit(noted[0].host, noted[0].rank)
    for root in sort_by_time(case.facts("agent_root")):
        fields = {
            s.groups["field"].lower(): s.groups["value"]
            for s in reversed(case.facts("agent_field"))
            if s.file == root.file and root.line < s.line <= root.line + 9
        }
        if fields:
            rank = _NUMBER.match(fields.get("rank", ""))
            return FirstExit(fields.get("host"), int(rank.group()) if rank else None)
    ended = [s for s in sort_by_time(case.facts("srun_exit")) if "terminated" not in s.groups["how"].lower()]
    if not ended:
        return FirstExit(None, None)
    task = _NUMBER.search(ended[0].groups["tasks"])
    return FirstExit(ended[0].groups["host"], int(task.group()) if task and case.tasks_are_ranks else None)


# Raised because another process, or the launcher, ended.
_CONSEQUENCES = frozenset(
    [
        "ChildFailedError",
        "SignalException",
        "CalledProcessError",
        "ProcessExitedException",
        "ProcessRaisedException",
        "BrokenPipeError",
        "ConnectionResetError",
        "ConnectionAbortedError",
        "ConnectionRefusedError",
        "EOFError",
        "KeyboardInterrupt",
        "SystemExit",
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        "DistError",
        "RendezvousConnectionError",
        "RendezvousTimeoutError",
        "RendezvousClosedError",
        "RendezvousStateError",
        "TimeoutExpired",
        "BrokenExecutor",
        "BrokenProcessPool",
        "WorkerError",
        "GeneratorExit",
        "StopIteration",
    ]
)
_COMMUNICATION = re.compile(
    r"\b(NCCL|nccl\w*|gloo|TCPStore|c10d|ProcessGroup\w*|collective|unhandled (system|cuda) error)\b"
)
_GENERAL = frozenset({"Error", "Exception", "Failure", "Timeout", "Exit", "Interrupt", "ERROR"})


def detect_exceptions(case: DiagnosisCase) -> None:
    """Proposes `application_error` for exceptions that no class explains, and abstains on bare errors of communication."""
    explained = {(s.file, s.line) for s in case.signals if s.kind in ("class", "benign")}
    own = [
        s
        for s in (*case.facts("exception"), *case.facts("event_error"))
        if (s.file, s.line) not in explained and is_own_exception(s) and not case.went_on_after(s)
    ]
    communication = [s for s in own if _COMMUNICATION.search(s.text)]
    plain = [s for s in own if s not in communication]
    plain = [s for s in plain if not _after_lost_peer(case, s)] or plain
    if communication and not case.candidates:
        found = case.propose("collective_hang", POSSIBLE, communication)
        found.cause = "An operation between the ranks failed, and the log does not say why: the message is NCCL's or Gloo's general one."
        found.next_test = (
            "run once more with NCCL_DEBUG=INFO (or TORCH_CPP_LOG_LEVEL=INFO) and give diagnose all ranks' logs"
        )
    if plain:
        ended = first_exit(case).rank
        first = sort_by_time([s for s in plain if ended is not None and s.rank == ended] or plain)[0]
        named = first.groups["type"] not in _GENERAL
        found = case.propose(
            "application_error", 0.74 if named else POSSIBLE - 0.05, [first, *[s for s in plain if s is not first]]
        )
        found.cause = _sentence(first)


def is_own_exception(signal: LogSignal) -> bool:
    """Whether an exception is one that the process raised for itself."""
    name = signal.groups.get("type", "")
    return (
        bool(name)
        and name[0].isupper()
        and name not in _CONSEQUENCES
        and not name.endswith("Warning")
        and signal.text.count(" ") < 80
        and '"echo":true' not in signal.text
    )


def _after_lost_peer(case: DiagnosisCase, signal: LogSignal) -> bool:
    """Whether the same rank had already said, in the same file, that it lost another: then this is what came of it."""
    echo = case.candidates.get("peer_died_first")
    return echo is not None and any(
        (e.file, e.rank) == (signal.file, signal.rank) and e.line <= signal.line for e in echo.signals
    )


def _sentence(signal: LogSignal) -> str:
    what = signal.groups["type"] + (f": {signal.groups['message']}" if signal.groups.get("message") else "")
    where = (
        f" It was raised in {signal.frames[-1].replace(':', ', ', 1) if signal.frames else ''}."
        if signal.frames
        else ""
    )
    return f"The program raised {what[:200].rstrip('. ')}.{where} What follows it is tear-down of the other processes."


_NAMED = (
    re.compile(r"retrieving ncclUniqueId from \[(?P<rank>\d+)\]"),
    re.compile(r"(?:timeout|signal|failure|error)[^.]{0,40} (?:from|on|of|by) +(?:global )?rank (?P<rank>\d+)"),
    re.compile(r"possible application crash on rank (?P<rank>\d+)"),
    re.compile(r"reported a timeout signal the global rank (?P<rank>\d+)"),
)
_PEER_ADDRESS = re.compile(
    r"(?:peer|error|from) \[?(?P<address>\d{1,3}(?:\.\d{1,3}){3}|[\da-f]*:[\da-f:]+)(?:\]:\d+|<\d+>)", re.IGNORECASE
)
_PEER_HOST = re.compile(r"[Cc]onnection closed by remote peer (?P<host>[A-Za-z][\w.-]*)")


def detect_lost_peers(case: DiagnosisCase) -> None:
    """Gives an echo the rank and host that its own lines name."""
    echo = case.candidates.get("peer_died_first")
    if echo is None:
        return
    for signal in echo.signals:
        match = next((m for p in _NAMED if (m := p.search(signal.text))), None)
        if match and int(match["rank"]) != signal.rank:
            echo.rank = int(match["rank"])
            echo.cause = (
                f"These lines only report that rank {echo.rank} went away or did not answer. The reason stands in that rank's own log, "
                "which is not among these or says nothing."
            )
            return
    hosts = [m["host"] for s in echo.signals if (m := _PEER_HOST.search(s.text))]
    if hosts:
        echo.host = hosts[0].split("<")[0]
        return
    _by_address(case, echo)
    _by_silence(case, echo)


def _by_address(case: DiagnosisCase, echo: CandidateCause) -> None:
    """The peer's address, where all that name one name the same; its host, where the logs tell whose it is."""
    named = {m["address"] for s in echo.signals if (m := _PEER_ADDRESS.search(s.text))}
    if len(named) != 1 or (address := named.pop()).startswith("127."):
        return
    owners = {s.groups["address"]: s.groups["host"] for s in case.facts("address")}
    owners |= {s.groups["address"]: s.host for s in case.facts("bootstrap") if s.host}
    echo.host = owners.get(address, address)
    echo.cause = f"These lines only report that the processes on {echo.host} went away. The reason stands in the logs of that host, or it is down."


def _by_silence(case: DiagnosisCase, echo: CandidateCause) -> None:
    """The one rank whose log ends without a word while all others report that they lost a peer."""
    told = {
        s.rank
        for s in case.signals
        if (s.rank is not None and s.kind == "class") or s.owner in ("exception", "rank_end")
    }
    ranks = {rank for scan in case.scans if (rank := case.file_rank(scan.file)) is not None}
    silent = sorted(ranks - told)
    if len(silent) == 1 and len(ranks) > 1:
        echo.rank = silent[0]
        own = case.rank_hosts.get(echo.rank)
        if echo.host == own or echo.host not in case.rank_hosts.values():
            echo.host = own
            echo.cause = (
                f"These lines only report that a peer went away. The log of rank {echo.rank} ends without a word: it was killed, or its host "
                f"{own or ''} went down."
            )
