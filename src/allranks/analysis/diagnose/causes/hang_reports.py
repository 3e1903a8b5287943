"""Detect the cause that the hang watch of a run reported, or Gloo's check of the sizes that ranks send."""

from __future__ import annotations

import re

from allranks.analysis.diagnose.case import DiagnosisCase
from allranks.analysis.diagnose.catalogue import CATALOGUE

MONITOR_SCORE = 0.97
_SIGKILL = re.compile(r"exit ?code\S*\s*:?\s*-9|SIGKILL|killed", re.IGNORECASE)
NO_RANK_SCORE = 0.7  # all ranks waited in the same place


def detect_monitored_hang(case: DiagnosisCase) -> None:
    """Propose the cause that a hang event reports. The stacks and calls that were recorded with it are read by other detectors."""
    for signal in case.facts("event_hang"):
        told = signal.groups
        kind = told["kind"] if told["kind"] in CATALOGUE else "collective_hang"
        named = bool(told.get("ranks"))
        found = case.propose(kind, MONITOR_SCORE if named else NO_RANK_SCORE, [signal])
        found.cause = told["message"].replace('\\"', '"').replace("\\\\", "\\")[:800].rstrip(".") + "."
        if named and _is_outside(found.cause):
            found.title = "a rank stalled outside of collectives, the others wait for it"
            found.fix = (
                "Look at the line in which that rank is: a sleep, a lock, a loop that does not end, slow storage, a subprocess, or work that only this "
                "rank does."
            )
        if named:
            found.rank = int(told["ranks"].split(",")[0])
            found.host = told.get("host") or found.host
        found.next_test = (
            "read the stacks and the calls of all ranks in the folder hang/ of the run; run again, and check whether the same rank or "
            "the same host stalls"
        )
        _own_kills(case)


_NEVER_JOINED = re.compile(r"it never joined collective .*?\. It is in (?P<where>[^;]*?)(?:\. |; |$)")


def _is_outside(message: str) -> bool:
    """Return whether the hang watch found the stalled rank in no collective at all, so that its own work is the cause."""
    found = _NEVER_JOINED.search(message)
    return found is not None and "torch/distributed/" not in found["where"]


def detect_size_mismatch(case: DiagnosisCase) -> None:
    """Say what Gloo's error about sizes shows, and what not: the rank that aborts is the one that received more than it expected."""
    found = case.candidates.get("collective_mismatch")
    if found is None or case.facts("event_hang"):
        return
    sizes = next((m for s in found.signals if (m := _GLOO_SIZES.search(s.text))), None)
    if sizes is None:
        return
    found.cause = (
        f"The ranks are in different collectives: a rank received {sizes['received']} bytes in a call in which it expected {sizes['expected']}. A branch on "
        "the rank, a call on one rank alone, an early stop on only some ranks, or an uneven number of batches."
    )
    found.against.append(
        "the named rank is the one that received more than it expected; the call that should not be there may be another rank's: compare the lines in which "
        "the ranks were (the message at the end of the run, and the end of each rank's log)"
    )


_GLOO_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (?P<received>\d+) vs (?P<expected>\d+)")


def _own_kills(case: DiagnosisCase) -> None:
    """Mark SIGKILLs as explained: the agents sent them after the hang."""
    for name in ("host_oom", "rank_died", "peer_died_first"):
        candidate = case.candidates.get(name)
        if candidate is not None and candidate.signals and all(_SIGKILL.search(s.text) for s in candidate.signals):
            candidate.explained = True
            case.own_kills |= {(s.file, s.line) for s in candidate.signals}
