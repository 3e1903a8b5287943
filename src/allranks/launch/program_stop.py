"""Say how the ranks of a user's own program ended after they were told to stop. Pure."""

from __future__ import annotations

import signal

from allranks.errors import EXIT_FAILED
from allranks.launch.failure_attribution import RankEnd, signal_name
from allranks.launch.monitor.hang_rules import list_ranks
from allranks.launch.supervisor import JobEnd

_BY_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)


def reason_of_stop(reported: JobEnd, *, interrupted: bool) -> str:
    """Return why the ranks were told to stop; empty if they were not, or if agents are lost or ranks had failed before."""
    signalled = next((reason for reason in reported.reasons if "the agent received" in reason), "")
    told = reported.stopped or signalled or ("interrupted" if interrupted else "")
    if reported.lost or reported.hang or any(_failed_by_itself(end) for end in reported.ends):
        return ""
    return told


def _failed_by_itself(end: RankEnd) -> bool:
    """Return whether a rank failed in another way than a program that receives SIGTERM ends: Slurm signals ranks itself."""
    return end.failed and end.exitcode not in (0, *_BY_SIGTERM)


def describe_program_stop(reported: JobEnd, why: str, grace_s: float) -> tuple[str, str, int]:
    """Return status, message and exit code of a run whose ranks were told to stop.

    The status is ``stopped`` if every rank then ended by itself with exit code 0. Whether it has saved anything is not known.
    """
    groups: dict[str, list[int]] = {}
    for end in reported.ends:
        groups.setdefault(_how(end, grace_s), []).append(end.rank)
    ends = "; ".join(f"rank {list_ranks(sorted(ranks))} {how}" for how, ranks in groups.items())
    status = "stopped" if reported.ends and all(end.exitcode == 0 for end in reported.ends) else "failed"
    told = "the ranks received SIGTERM" if reported.ends else "no rank had been started"
    return status, f"stopped ({why}): {told}" + (f"; {ends}" if ends else ""), EXIT_FAILED


def _how(end: RankEnd, grace_s: float) -> str:
    if end.exitcode == -signal.SIGTERM:
        return "ended by it"
    if end.exitcode == -signal.SIGKILL and end.ended_by_agent:
        return f"did not end within {grace_s:g} s (script.grace_s) and was killed"
    if end.exitcode < 0:
        return f"ended by {signal_name(end.exitcode)}"
    return f"ended with exit code {end.exitcode}"
