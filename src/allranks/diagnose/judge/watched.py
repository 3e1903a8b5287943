"""A run that `allranks run` watched itself: its agents looked at all ranks while they stood still, and named one."""

from __future__ import annotations

import re

from allranks.diagnose.catalogue import CATALOGUE
from allranks.diagnose.judge.case import Case

SURE = 0.97
_KILLED = re.compile(r"exit ?code\S*\s*:?\s*-9|SIGKILL|killed", re.IGNORECASE)
UNNAMED = 0.7  # all ranks were seen to wait in the same place


def decide(case: Case) -> None:
    """Takes over what the event says; stacks and calls of the same moment are looked at by others, too."""
    for signal in case.facts("event_hang"):
        told = signal.groups
        kind = told["kind"] if told["kind"] in CATALOGUE else "collective_hang"
        named = bool(told.get("ranks"))
        found = case.propose(kind, SURE if named else UNNAMED, [signal])
        found.cause = told["message"].replace('\\"', '"').replace("\\\\", "\\")[:800].rstrip(".") + "."
        if named:
            found.rank = int(told["ranks"].split(",")[0])
            found.host = told.get("host") or found.host
        found.next_test = (
            "read the stacks and the calls of all ranks in the folder hang/ of the run; run again, and see whether it is the same rank, or "
            "the same host, that falls out"
        )
        _own_kills(case)


def _own_kills(case: Case) -> None:
    """The agents ended the ranks themselves, by SIGKILL: nobody else did."""
    for name in ("host_oom", "rank_died", "peer_died_first"):
        candidate = case.candidates.get(name)
        if candidate is not None and candidate.signals and all(_KILLED.search(s.text) for s in candidate.signals):
            candidate.explained = True
            case.own_kills |= {(s.file, s.line) for s in candidate.signals}
