"""Flight-recorder dumps of several ranks laid together: the first collective at which they part."""

from __future__ import annotations

import re

from allranks.diagnose.judge.case import Case
from allranks.diagnose.signals import Call, Signal

_CHECKPOINT = re.compile(r"checkpoint|state_dict|:save\w*$|save_pretrained", re.IGNORECASE)
_LIBRARY = re.compile(r"site-packages|dist-packages|/torch/|lib/python|importlib|<frozen")


def decide(case: Case) -> None:
    """Proposes the cause of a hang from what each rank had called, by group."""
    dumps = {
        f.rank: (scan.file, f.calls) for scan in case.scans if (f := scan.flight) is not None and f.rank is not None
    }
    groups = {c.group for _, calls in dumps.values() for c in calls}
    for group in sorted(groups):
        members = {
            rank: (file, own)
            for rank, (file, calls) in dumps.items()
            if (own := {c.seq: c for c in calls if c.group == group})
        }
        _one_group(case, group, members, alone=len(dumps) < 2)


def _one_group(case: Case, group: str, members: dict[int, tuple[int, dict[int, Call]]], *, alone: bool) -> None:
    open_calls = {
        r: min((s for s, c in own.items() if c.state != "completed"), default=None) for r, (_, own) in members.items()
    }
    stuck = [s for s in open_calls.values() if s is not None]
    if not stuck:
        return
    seq = min(stuck)
    there = {r: own[seq] for r, (_, own) in members.items() if seq in own}
    absent = sorted(r for r, (_, own) in members.items() if max(own) < seq)
    shown = [_signal(case, members[r][0], r, c) for r, c in sorted(there.items())[:4]]
    checkpoint = any(_CHECKPOINT.search(f) for c in there.values() for f in c.frames)
    if len({c.op for c in there.values()}) > 1 or (len({c.sizes for c in there.values()}) > 1 and _equal_sizes(there)):
        told = ", ".join(f"rank {r}: {c.op} {c.sizes}{_at(c)}" for r, c in sorted(there.items())[:4])
        found = case.propose("collective_mismatch", 0.95, shown)
        found.cause, found.rank = (
            f"At collective {seq} of group {group} the ranks make unlike calls ({told}).",
            _odd_one(there),
        )
    elif absent:
        _never_came(case, seq, group, members, absent, shown, checkpoint=checkpoint)
    elif seq <= 1:
        case.propose("first_collective_failed", 0.8, shown)
    elif checkpoint:
        case.propose("checkpoint_collective", 0.8, shown)
    else:
        found = case.propose("collective_hang", 0.66, shown)
        if not alone:
            found.cause = (
                f"All {len(there)} ranks made the same call (collective {seq} of group {group}) and it did not end: look at the network and "
                "the GPUs rather than at the program."
            )


def _never_came(
    case: Case,
    seq: int,
    group: str,
    members: dict[int, tuple[int, dict[int, Call]]],
    absent: list[int],
    shown: list[Signal],
    *,
    checkpoint: bool,
) -> None:
    rank = absent[0]
    file, own = members[rank]
    last = own[max(own)]
    found = case.propose(
        "checkpoint_collective" if checkpoint else "collective_mismatch",
        0.93,
        [_signal(case, file, rank, last), *shown],
    )
    found.rank = rank
    named = ", ".join(str(r) for r in absent[:8])
    found.cause = (
        f"Rank {named} never called collective {seq} of group {group}, in which {len(members) - len(absent)} others wait; the last call of rank {rank} "
        f"was {last.op}{_at(last)}."
    )


def _equal_sizes(there: dict[int, Call]) -> bool:
    """Whether the operation asks for equal sizes on all ranks."""
    return not any(
        word in c.op
        for c in there.values()
        for word in ("all_to_all", "coalesced", "scatter", "gather_object", "broadcast")
    )


def _odd_one(there: dict[int, Call]) -> int:
    """The rank whose call is the rarest."""
    kinds = [(c.op, c.sizes) for c in there.values()]
    return min(sorted(there), key=lambda r: kinds.count((there[r].op, there[r].sizes)))


def _at(call: Call) -> str:
    own = next((f for f in call.frames if not _LIBRARY.search(f)), None)
    return f" in {own}" if own else ""


def _signal(case: Case, file: int, rank: int, call: Call) -> Signal:
    return Signal(
        kind="fact", owner="flight", rule=-1, weight=0.8, passing=False, file=file, line=1, time=None, rank=rank, local=None, task=None,
        host=case.rank_hosts.get(rank), text=f"rank {rank}: collective {call.seq} {call.op} {call.sizes} {call.state}{_at(call)}",
    )  # fmt: skip
