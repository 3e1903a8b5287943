"""A run that `allranks run` watched itself: its agents looked at all ranks while they stood still, and named one."""

from __future__ import annotations

from allranks.diagnose.catalogue import CATALOGUE
from allranks.diagnose.judge.case import Case

SURE = 0.97
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
