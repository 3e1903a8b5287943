"""Which rank failed first, and of what. Pure: reads records, decides, says."""

from __future__ import annotations

import re
import signal
from typing import Any

import msgspec

# What ranks say when *another* rank has gone: never the cause.
_ECHO = re.compile(
    r"Connection (closed by peer|reset by peer|refused)|Broken pipe|Application timeout caused pair closure|Timed out waiting"
    r"|NCCL communicator was aborted|remote process exited|Socket closed|gloo/transport|recvValue failed|sendBytes failed|DistStoreError",
    re.IGNORECASE,
)


class RankEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank ended, as its agent saw it. ``exitcode`` is negative for a signal."""

    rank: int
    host: str
    pid: int
    exitcode: int
    time: float


class Culprit(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that failed first."""

    rank: int
    host: str | None
    cause: str
    message: str
    step: int | None
    exit_code: int
    known: bool


def is_echo(error_type: str, message: str) -> bool:
    """True if an error only reports that a peer has gone."""
    return error_type in ("DistBackendError", "DistNetworkError", "DistStoreError", "RuntimeError") and bool(
        _ECHO.search(message)
    )


def signal_name(exitcode: int) -> str:
    """``-9`` as ``SIGKILL``."""
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"


def find_culprit(
    ends: list[RankEnd], errors: list[dict[str, Any]], last_steps: dict[int, int | None]
) -> Culprit | None:
    """The first failing rank. An exception that is no echo comes first (it knows its own time); then a rank that
    vanished by a signal other than the agent's own clean-up; then the earliest echo."""
    own = [e for e in errors if not e.get("echo")]
    vanished = [e for e in ends if e.exitcode < 0 and -e.exitcode != signal.SIGTERM]
    silent = {e.rank for e in ends} - {e["rank"] for e in errors}
    killed = [e for e in vanished if e.rank in silent]
    hosts = {e.rank: e.host for e in ends}
    if own:
        return _from_error(min(own, key=lambda e: e["time"]), hosts, last_steps)
    if killed:
        first = min(killed, key=lambda e: e.time)
        name = signal_name(first.exitcode)
        hint = " (the kernel's out-of-memory killer and Slurm's memory limit send it too)" if name == "SIGKILL" else ""
        return Culprit(
            rank=first.rank,
            host=first.host,
            cause=name,
            message=f"ended by {name}{hint}",
            step=last_steps.get(first.rank),
            exit_code=1,
            known=False,
        )
    plain = [e for e in ends if e.exitcode > 0 and e.rank in silent]
    if plain:
        first = min(plain, key=lambda e: e.time)
        return Culprit(
            rank=first.rank,
            host=first.host,
            cause=f"exit code {first.exitcode}",
            message=f"ended with exit code {first.exitcode}",
            step=last_steps.get(first.rank),
            exit_code=1,
            known=False,
        )
    return _from_error(min(errors, key=lambda e: e["time"]), hosts, last_steps) if errors else None


def _from_error(error: dict[str, Any], hosts: dict[int, str], last_steps: dict[int, int | None]) -> Culprit:
    rank = error["rank"]
    step = error.get("step")
    return Culprit(
        rank=rank,
        host=hosts.get(rank),
        cause=error["type"],
        message=error["message"],
        step=step if step is not None else last_steps.get(rank),
        exit_code=int(error.get("exit_code", 1)),
        known=bool(error.get("known")),
    )
