"""The kinds of evidence by which a rank is named, from the hardest to the softest. Pure; a new one is a function and its name here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from allranks.hang.case import Case, Verdict, called, listed, place, spoken
from allranks.hang.procfs import ended
from allranks.hang.pulse import NO_STEP
from allranks.hang.records import Call, RankEvidence
from allranks.hang.stacks import standing

PARTS = ("data", "forward", "backward", "optimizer", "control")
PHASES = ("start", "prepare", "build", "prove", "first step", "train", "evaluate", "save")
UNEQUAL_SIZES = ("all_to_all", "coalesced", "scatter", "gather", "broadcast", "send", "recv")


def _silent_node(case: Case) -> Verdict | None:
    if not case.missing or not case.ranks:
        return None
    hosts = sorted({case.hosts[r] for r in case.missing})
    why = f"nothing of host {', '.join(hosts)} answers, neither its ranks nor the agent that watches them"
    return Verdict(kind="collective_hang", fallen=[case.fallen(r, why) for r in case.missing])


def _unable(case: Case) -> Verdict | None:
    """Processes that the kernel does not let run."""
    held = [r for r in case.ranks.values() if r.state[:1] in ("T", "t", "D")]
    if not held or len(held) == len(case.ranks):
        return None
    return Verdict(
        kind="collective_hang", fallen=[case.fallen(r.rank, f"its process {r.pid} is {spoken(r)}") for r in held]
    )


def _network(case: Case) -> Verdict | None:
    """Nodes whose network is down, or that do not reach the others."""
    if len(case.nodes) < 2:
        return None
    down = [n for n in case.nodes if n.interface and n.interfaces.get(n.interface, {}).get("up") is False]
    asked = [n for n in case.nodes if n.meets is not None]
    cut_off = [n for n in asked if not n.meets]
    if not down and len(cut_off) > 1 and len(cut_off) >= len(asked) - 1 and case.nodes[0].meets is not False:
        down, cut_off = [case.nodes[0]], []  # nobody reaches the first node but itself
    bad = down or (cut_off if len(cut_off) < len(asked) else [])
    if not bad:
        return None
    fallen = []
    for node in bad:
        why = (
            f"its interface {node.interface} is down"
            if node in down and node.interface and node.interfaces.get(node.interface, {}).get("up") is False
            else "the other nodes do not reach it"
            if node in down
            else "it does not reach the node at which all met, the others do"
        )
        fallen += [case.fallen(r.rank, f"the network of {node.host}: {why}") for r in node.ranks]
    return Verdict(kind="collective_hang", fallen=fallen)


def _calls(case: Case) -> Verdict | None:
    """Ranks that never came to a collective in which others wait, or came with another call."""
    for group in sorted({c.group for r in case.ranks.values() for c in r.calls}):
        members = {r.rank: own for r in case.ranks.values() if (own := {c.seq: c for c in r.calls if c.group == group})}
        stuck = [s for own in members.values() for s, c in own.items() if not c.done]
        if not stuck:
            continue
        seq = min(stuck)
        there = {rank: own[seq] for rank, own in members.items() if seq in own}
        absent = sorted(rank for rank, own in members.items() if max(own) < seq)
        if _unlike(there):
            return _mismatch(case, group, seq, there)
        if absent and any(not c.done for c in there.values()):
            return _absent(case, group, seq, there, absent)
    return None


def _unlike(there: dict[int, Call]) -> bool:
    if len({c.op for c in there.values()}) > 1:
        return True
    free = any(word in c.op for c in there.values() for word in UNEQUAL_SIZES)
    return not free and len({c.sizes for c in there.values()}) > 1


def _mismatch(case: Case, group: str, seq: int, there: dict[int, Call]) -> Verdict:
    kinds = Counter((c.op, c.sizes) for c in there.values())
    rarest = min(kinds.values())
    common = kinds.most_common(1)[0][0]
    odd = [r for r, c in sorted(there.items()) if kinds[c.op, c.sizes] == rarest]
    if len(odd) == len(there):  # as many against as many: who is less far was to be elsewhere
        odd = [r for r in _least_far(case) if r in there] or odd
    others = next((c for c in there.values() if (c.op, c.sizes) == common), None)
    fallen = []
    for rank in odd:
        call = there[rank]
        other = others if others is not None and (others.op, others.sizes) != (call.op, call.sizes) else None
        other = other or next((c for c in there.values() if (c.op, c.sizes) != (call.op, call.sizes)), None)
        why = f"its collective {seq} of group {group} is {called(call)}, that of others {called(other)}"
        fallen.append(case.fallen(rank, why))
    return Verdict(kind="collective_mismatch", fallen=fallen, cause="order")


def _absent(case: Case, group: str, seq: int, there: dict[int, Call], absent: list[int]) -> Verdict:
    waits = [r for r, c in sorted(there.items()) if not c.done]
    call = there[waits[0]]
    why = f"it never came to collective {seq} of group {group} ({called(call)}), in which rank {listed(waits)} waits"
    return Verdict(kind="collective_mismatch", fallen=[case.fallen(r, why) for r in absent])


def _behind(case: Case) -> Verdict | None:
    """Ranks that are less far than others, by what they said last."""
    behind = _least_far(case)
    if not behind:
        return None
    return Verdict(
        kind="collective_mismatch",
        fallen=[case.fallen(r, f"it is still in {place(case.ranks[r])}, others are further") for r in behind],
    )


def _least_far(case: Case) -> list[int]:
    """Ranks that are less far than at least as many others; none where most are there."""
    far = {r.rank: (r.step if r.step is not None else NO_STEP, _phase(r), _part(r)) for r in case.ranks.values()}
    least = min(far.values(), default=None)
    behind = sorted(r for r, at in far.items() if at == least)
    return [] if len(behind) == len(far) or len(behind) * 2 > len(far) else behind


def _phase(rank: RankEvidence) -> int:
    return PHASES.index(rank.phase) if rank.phase in PHASES else len(PHASES)


def _part(rank: RankEvidence) -> int:
    return PARTS.index(rank.part) if rank.part in PARTS else -1


def _outside(case: Case) -> Verdict | None:
    """Ranks whose stack is not in a collective, while the others' are."""
    known = [r for r in case.ranks.values() if r.stack or r.calls]
    out = [r for r in known if not case.waits(r)]
    if not out or len(out) == len(known):
        return None
    return Verdict(
        kind="collective_mismatch",
        fallen=[case.fallen(r.rank, "it is in no collective, the others wait in one") for r in out],
    )


def _first_silent(case: Case) -> Verdict | None:
    """No rank is in a collective, but they stand in unlike places: the one whose silence was noticed."""
    first = case.ranks.get(case.alarm.rank)
    if first is None or case.waits(first) or len({standing(r.stack) for r in case.ranks.values()}) < 2:
        return None
    why = "it was the first to be silent, and is in no collective"
    return Verdict(kind="collective_hang", fallen=[case.fallen(first.rank, why)])


def _mute(case: Case) -> Verdict | None:
    """Processes in which no Python has run for as long as they are silent: held within a call into C."""
    held = [
        r
        for r in case.ranks.values()
        if r.python_silent_s is not None
        and r.python_silent_s > 5.0
        and not any(not c.done for c in r.calls)
        and not ended(r.state)
    ]
    if not held or len(held) == len(case.ranks):
        return None
    why = "no thread of Python has run in its process for {:.0f} s: a call into C holds the interpreter"
    return Verdict(
        kind="collective_mismatch", fallen=[case.fallen(r.rank, why.format(r.python_silent_s)) for r in held]
    )


def _ended(case: Case) -> Verdict | None:
    """Processes that have ended. The softest kind: one whose collective has timed out ends while it is looked at."""
    gone = [r for r in case.ranks.values() if ended(r.state)]
    if not gone or len(gone) == len(case.ranks):
        return None
    return Verdict(kind="rank_died", fallen=[case.fallen(r.rank, f"its process {r.pid} has ended") for r in gone])


KINDS: tuple[Callable[[Case], Verdict | None], ...] = (
    _silent_node, _unable, _network, _mute, _calls, _behind, _outside, _first_silent, _ended,
)  # fmt: skip
