"""The program's own exceptions, and which exceptions only report that something else failed."""

from __future__ import annotations

import re

from allranks.diagnose.catalogue.entry import FITS
from allranks.diagnose.judge.case import Case, in_order
from allranks.diagnose.judge.ends import first_end
from allranks.diagnose.signals import Signal

# Raised because another process, or the launcher, ended.
_ECHOES = frozenset(
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


def decide(case: Case) -> None:
    """Proposes `application_error` for exceptions that no class explains, and abstains on bare errors of communication."""
    explained = {(s.file, s.line) for s in case.signals if s.kind in ("class", "benign")}
    own = [
        s
        for s in (*case.facts("exception"), *case.facts("event_error"))
        if (s.file, s.line) not in explained and is_own(s) and not case.went_on_after(s)
    ]
    communication = [s for s in own if _COMMUNICATION.search(s.text)]
    plain = [s for s in own if s not in communication]
    plain = [s for s in plain if not _after_an_echo(case, s)] or plain
    if communication and not case.candidates:
        found = case.propose("collective_hang", FITS, communication)
        found.cause = "An operation between the ranks failed, and the log does not say why: the message is NCCL's or Gloo's general one."
        found.next_test = (
            "run once more with NCCL_DEBUG=INFO (or TORCH_CPP_LOG_LEVEL=INFO) and give diagnose all ranks' logs"
        )
    if plain:
        ended = first_end(case).rank
        first = in_order([s for s in plain if ended is not None and s.rank == ended] or plain)[0]
        named = first.groups["type"] not in _GENERAL
        found = case.propose(
            "application_error", 0.74 if named else FITS - 0.05, [first, *[s for s in plain if s is not first]]
        )
        found.cause = _sentence(first)


def is_own(signal: Signal) -> bool:
    """Whether an exception is one that the process raised for itself."""
    name = signal.groups.get("type", "")
    return (
        bool(name)
        and name[0].isupper()
        and name not in _ECHOES
        and not name.endswith("Warning")
        and signal.text.count(" ") < 80
        and '"echo":true' not in signal.text
    )


def _after_an_echo(case: Case, signal: Signal) -> bool:
    """Whether the same rank had already said, in the same file, that it lost another: then this is what came of it."""
    echo = case.candidates.get("peer_died_first")
    return echo is not None and any(
        (e.file, e.rank) == (signal.file, signal.rank) and e.line <= signal.line for e in echo.signals
    )


def _sentence(signal: Signal) -> str:
    what = signal.groups["type"] + (f": {signal.groups['message']}" if signal.groups.get("message") else "")
    where = (
        f" It was raised in {signal.frames[-1].replace(':', ', ', 1) if signal.frames else ''}."
        if signal.frames
        else ""
    )
    return f"The program raised {what[:200].rstrip('. ')}.{where} What follows it is tear-down of the other processes."
