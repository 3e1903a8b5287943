"""The evidence of all nodes laid together, what it is asked, and the words for a rank and its calls. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from allranks.hang.records import Alarm, Call, Fallen, NodeEvidence, RankEvidence
from allranks.hang.stacks import standing

SHOWN = 8
UNKNOWN = "unknown"
SPINS = 0.8  # of a core
_IN_COLLECTIVE = re.compile(
    r"distributed/(distributed_c10d|c10d_logger|_functional_collectives|algorithms|utils|rpc)|torch/autograd/graph\.py.*_engine_run_backward"
    r"|:(barrier|all_?reduce\w*|all_?gather\w*|reduce_scatter\w*|broadcast\w*|all_to_all\w*|wait_tensor|wait)$"
)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Who fell out by one kind of evidence, and the class of failure that it is."""

    kind: str
    fallen: list[Fallen]
    cause: str = ""


class Case:
    """The evidence of all nodes, and what it is asked."""

    def __init__(self, nodes: Sequence[NodeEvidence], hosts: dict[int, str], alarm: Alarm) -> None:
        self.alarm = alarm
        self.nodes = sorted(nodes, key=lambda n: n.node)
        self.ranks = {r.rank: r for n in self.nodes for r in n.ranks}
        self.hosts = hosts | {r.rank: n.host for n in self.nodes for r in n.ranks}
        self.missing = sorted(set(hosts) - set(self.ranks))

    def fallen(self, rank: int, why: str) -> Fallen:
        """That rank, with its place."""
        found = self.ranks.get(rank)
        where = standing(found.stack) if found else ""
        where = where or UNKNOWN
        return Fallen(
            rank=rank, host=self.hosts.get(rank, ""), why=why, where=where, state=state_in_words(found) if found else ""
        )

    def waits(self, rank: RankEvidence) -> bool:
        """Whether a rank stands in a collective, by its stack or by a call of it that has not ended."""
        if rank.stack:
            return any(_IN_COLLECTIVE.search(f"{f.file}:{f.function}") for f in rank.stack[:10])
        return any(not c.done for c in rank.calls)


def place(rank: RankEvidence) -> str:
    """How far a rank is."""
    step = f"step {rank.step + 1}" if rank.step is not None else ""
    return ", ".join(part for part in (rank.phase, step, rank.part) if part) or "its start"


def state_in_words(rank: RankEvidence) -> str:
    """What its process does, with its share of a core where it computes."""
    if rank.state[:1] == "R" and rank.cpu_share is not None and rank.cpu_share >= SPINS:
        return f"running at {rank.cpu_share:.0%} of a core"
    return spoken(rank)


def spoken(rank: RankEvidence) -> str:
    """The kernel's word for its state."""
    return rank.state.partition(" ")[2] or rank.state


def open_call(rank: RankEvidence) -> str:
    """The first collective that has not ended on it."""
    found = next((c for c in rank.calls if not c.done), None)
    return f"collective {found.seq} of group {found.group}: {called(found)}" if found else ""


def called(call: Call | None) -> str:
    """Operation and shapes."""
    return f"{call.op} {call.sizes}".strip() if call else "another"


def listed(ranks: Sequence[int]) -> str:
    """Some numbers, and how many more there are."""
    shown = ", ".join(map(str, ranks[:SHOWN]))
    return shown + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")
