"""Determine which rank failed first, and why, from records and from what ranks wrote when they aborted. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import Any

import msgspec

from allranks.analysis.stacks import RANK_PREFIX, blocking_location, main_thread_frames, traceback_frames

# What ranks say when *another* rank has gone: never the cause.
_PEER_ERROR = re.compile(
    r"Connection (closed by peer|reset by peer|refused)|Broken pipe|Application timeout caused pair closure"
    r"|Timed out waiting"
    r"|NCCL communicator was aborted|remote process exited|Socket closed|gloo/transport|recvValue failed"
    r"|sendBytes failed|DistStoreError"
    r"|Connection was likely closed",
    re.IGNORECASE,
)
_MAY_REPORT_PEER = ("CheckpointError", "DistBackendError", "DistNetworkError", "DistStoreError", "RuntimeError")
_WHAT = re.compile(r"^\s*what\(\):\s+(?P<text>\S.{0,400})", re.MULTILINE)
_FATAL = "Fatal Python error: "
_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (?P<received>\d+) vs (?P<expected>\d+)")
_TRACEBACK = "Traceback (most recent call last):"


class RankEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank ended, as its agent observed it.

    ``exitcode`` is negative for a signal. ``done``: the rank reported completion before it exited. ``ended_by_agent``:
    the agent killed it for a known reason, which is never the cause of a failure. ``failure``: the error that the rank
    wrote to its heartbeat page, type and message. ``killed_for_memory``, of a rank that ended by SIGKILL: whether the
    kernel has ended a process of this machine for lack of memory since the rank's start; None if it is not counted.
    """

    rank: int
    host: str
    pid: int
    exitcode: int
    time: float
    done: bool = True
    ended_by_agent: bool = False
    failure: str = ""
    killed_for_memory: bool | None = None

    @property
    def failed(self) -> bool:
        """Return whether the rank failed by itself."""
        return not self.ended_by_agent and (self.exitcode != 0 or not self.done)

    @property
    def succeeded(self) -> bool:
        """Return whether the rank finished its work and exited with 0."""
        return self.exitcode == 0 and self.done


class FirstFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that failed first."""

    rank: int
    host: str | None
    cause: str
    message: str
    step: int | None
    exit_code: int = 1
    known: bool = False
    echo: bool = False


def is_peer_error(error_type: str, message: str) -> bool:
    """Return whether an error only reports that a peer is gone."""
    return error_type in _MAY_REPORT_PEER and bool(_PEER_ERROR.search(message))


def signal_name(exitcode: int) -> str:
    """Return the name of a signal: ``SIGKILL`` for ``-9``."""
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"


def find_first_failure(
    ends: list[RankEnd],
    errors: list[dict[str, Any]],
    last_steps: dict[int, int | None],
    exits: dict[int, str] | None = None,
    finished: dict[int, float] | None = None,
) -> FirstFailure | None:
    """Find the first failed rank. Exceptions other than peer errors come first (they have a time); then ranks killed by
    a signal that the agent did not send; then ranks that exited by themselves; then the earliest peer error, unless a
    rank had come to its end before.

    Args:
        ends: how ranks ended; those that succeeded are needed only with `finished`.
        exits: the text that a rank passed to ``sys.exit``, from its event ``exit``.
        finished: when ranks of a user's own program came to their end. One that did so while others still communicated
            with it is the cause of their errors.
    """
    ends = [e for e in ends if not e.ended_by_agent]
    errors = [*errors, *_errors_only_in_heartbeat(ends, errors)]
    own = [e for e in errors if not e.get("echo")]
    vanished = [e for e in ends if e.exitcode < 0 and -e.exitcode != signal.SIGTERM]
    silent = {e.rank for e in ends} - {e["rank"] for e in errors}
    killed = [e for e in vanished if e.rank in silent]
    hosts = {e.rank: e.host for e in ends}
    if own:
        return _from_error(min(own, key=lambda e: e["time"]), hosts, last_steps)
    left = _left_early(ends, errors, killed, finished or {})
    if left is not None:
        return left
    plain = [e for e in ends if e.exitcode > 0 and e.rank in silent]
    early = [e for e in ends if e.exitcode == 0 and not e.done]
    for kind in (killed, plain, early):
        if not kind:
            continue
        first = min(kind, key=lambda e: e.time)
        code = first.exitcode
        cause = signal_name(code) if code < 0 else f"exit code {code}"
        text = (exits or {}).get(first.rank)
        if code < 0:
            message = f"ended by {cause}" + (_sender_of_sigkill(first.killed_for_memory) if cause == "SIGKILL" else "")
        elif code:
            message = f"ended with {cause}" + (f": {text}" if text else "")
        else:
            message = f"ended with {cause} before it had finished its work"
        step = last_steps.get(first.rank)
        return FirstFailure(rank=first.rank, host=first.host, cause=cause, message=message, step=step)
    return _from_error(min(errors, key=lambda e: e["time"]), hosts, last_steps) if errors else None


def _sender_of_sigkill(for_memory: bool | None) -> str:
    if for_memory is None:
        return " (the kernel's out-of-memory killer and Slurm's memory limit send it too)"
    if for_memory:
        return (
            ", and the kernel's out-of-memory killer has ended a process on this machine since the start, most likely "
            "this rank"
        )
    return (
        ", but not by the kernel's out-of-memory killer, which has ended no process here since the start: a user or "
        "Slurm sent it"
    )


def _left_early(
    ends: list[RankEnd], errors: list[dict[str, Any]], killed: list[RankEnd], finished: dict[int, float]
) -> FirstFailure | None:
    """Return the rank whose exit with code 0 made others fail: they reported a lost peer or a watchdog aborted them."""
    if any(end.exitcode != -signal.SIGABRT for end in killed):
        return None
    victims = [(e["time"], e["rank"], f"{e['type']}: {e['message']}".splitlines()[0]) for e in errors]
    victims += [(end.time, end.rank, signal_name(end.exitcode)) for end in killed]
    if not victims:
        return None
    at, victim, ending = min(victims)
    failing = {rank for _, rank, _ in victims}
    early = [e for e in ends if e.exitcode == 0 and e.rank not in failing and finished.get(e.rank, at) < at]
    if not early:
        return None
    first = min(early, key=lambda e: finished[e.rank])
    return FirstFailure(
        rank=first.rank,
        host=first.host,
        cause="exit code 0",
        message=f"ended with exit code 0 while other ranks were still running; rank {victim} then failed with {ending}",
        step=None,
    )


def _errors_only_in_heartbeat(ends: list[RankEnd], errors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return errors that are in no event, because events could not be written or were removed."""
    recorded = {e["rank"] for e in errors}
    failures = []
    for end in ends:
        kind, _, message = end.failure.partition(": ")
        if end.failure and end.rank not in recorded and kind != "sys.exit":
            echo = is_peer_error(kind, message)
            failures.append({"rank": end.rank, "type": kind, "message": message, "time": end.time, "echo": echo})
    return failures


def _from_error(error: dict[str, Any], hosts: dict[int, str], last_steps: dict[int, int | None]) -> FirstFailure:
    rank = error["rank"]
    step = error.get("step")
    return FirstFailure(
        rank=rank,
        host=hosts.get(rank),
        cause=error["type"],
        message=error["message"],
        step=step if step is not None else last_steps.get(rank),
        exit_code=int(error.get("exit_code", 1)),
        known=bool(error.get("known")),
        echo=bool(error.get("echo")),
    )


def describe_crash(rank: int, logs: Mapping[int, str]) -> str:
    """Return the reason and the source line that the log of an aborted rank contains; empty if there are none.

    Args:
        logs: the ends of the logs of all ranks.
    """
    text = logs.get(rank, "")
    causes = _WHAT.findall(text)
    said = causes[-1].strip() if causes else ""
    if sizes := _SIZES.search(said):
        places = "; ".join(f"rank {r} in {place}" for r in sorted(logs) if (place := place_in_log(logs[r])))
        received = f"it received data of {sizes['received']} bytes where it expected {sizes['expected']}"
        return f"the ranks are in different collectives ({received})" + (f": {places}" if places else "")
    place = place_in_log(text) if _FATAL in text else ""
    return ", ".join(part for part in (said, f"in {place}" if place else "") if part)


def exception_in_log(text: str) -> tuple[str, str]:
    """Return the exception (``Type: message``) of the traceback with which a log ends, and its line in the program."""
    lines = [RANK_PREFIX.sub("", line).removeprefix(" ") for line in text[text.rfind(_TRACEBACK) :].splitlines()]
    error = next((line for line in lines[1:] if line and not line[0].isspace()), "")
    return (error, place_in_log(text)) if _TRACEBACK in text and _FATAL not in text else ("", "")


def place_in_log(text: str) -> str:
    """Return the program's line of the dump or traceback with which a log ends; empty if there is none."""
    if _FATAL in text:
        return blocking_location(main_thread_frames(text[text.rindex(_FATAL) :])).partition(" (within")[0]
    if _TRACEBACK not in text:
        return ""
    return blocking_location(traceback_frames(text[text.rindex(_TRACEBACK) :])).partition(" (within")[0]
