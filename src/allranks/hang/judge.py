"""Which rank fell out, and where it stands. Pure: evidence of the nodes in, one report out.

Kinds of evidence from the hardest to the softest; the first that names somebody decides: a node that does not answer; a
process that cannot run; a network that is down; what the ranks have called (a rank that never came, or came with another
call); how far each is; and where their stacks stand.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from allranks.hang.procfs import ended
from allranks.hang.pulse import NO_STEP
from allranks.hang.records import Alarm, Call, Fallen, HangReport, NodeEvidence, RankEvidence, Waiting
from allranks.hang.stacks import standing

PARTS = ("data", "forward", "backward", "optimizer", "control")
PHASES = ("start", "prepare", "build", "prove", "first step", "train", "evaluate", "save")
SHOWN = 8
UNKNOWN = "unknown"
SPINS = 0.8  # of a core
UNEQUAL_SIZES = ("all_to_all", "coalesced", "scatter", "gather", "broadcast", "send", "recv")
_IN_COLLECTIVE = re.compile(
    r"distributed/(distributed_c10d|c10d_logger|_functional_collectives|algorithms|utils|rpc)|torch/autograd/graph\.py.*_engine_run_backward"
    r"|:(barrier|all_?reduce\w*|all_?gather\w*|reduce_scatter\w*|broadcast\w*|all_to_all\w*|wait_tensor|wait)$"
)
_CHECKPOINT = re.compile(r"checkpoint|state_dict|save_pretrained|:save\w*$", re.IGNORECASE)
_LOADER = re.compile(r"utils/data/|/data/|data_?loader|:(_next_data|_try_get_data|__next__|__getitem__|make_batch)$")


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
            rank=rank, host=self.hosts.get(rank, ""), why=why, where=where, state=_state(found) if found else ""
        )

    def waits(self, rank: RankEvidence) -> bool:
        """Whether a rank stands in a collective, by its stack or by a call of it that has not ended."""
        if rank.stack:
            return any(_IN_COLLECTIVE.search(f"{f.file}:{f.function}") for f in rank.stack[:10])
        return any(not c.done for c in rank.calls)


def judge(nodes: Sequence[NodeEvidence], hosts: dict[int, str], alarm: Alarm, attempt: int, now: float) -> HangReport:
    """The report.

    Args:
        nodes: what came in; a node that does not answer is absent.
        hosts: the host of each rank of the job.
        now: seconds since the epoch.
    """
    case = Case(nodes, hosts, alarm)
    verdict = next((v for ask in _KINDS if (v := ask(case)) is not None), _nobody(case))
    named = {f.rank for f in verdict.fallen}
    waiting = [
        Waiting(rank=r.rank, host=case.hosts.get(r.rank, ""), where=standing(r.stack), call=_open_call(r))
        for r in case.ranks.values()
        if r.rank not in named
    ]
    kind = _special(case, verdict)
    return HangReport(
        attempt=attempt,
        kind=kind,
        sentence=_sentence(verdict, waiting, alarm, now),
        fallen=verdict.fallen,
        waiting=waiting,
        alarm=alarm,
        judged=round(now, 3),
        missing_hosts=sorted({case.hosts[r] for r in case.missing}),
        notes=_notes(case),
    )


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
        kind="collective_hang", fallen=[case.fallen(r.rank, f"its process {r.pid} is {_spoken(r)}") for r in held]
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
        why = f"its collective {seq} of group {group} is {_called(call)}, that of others {_called(other)}"
        fallen.append(case.fallen(rank, why))
    return Verdict(kind="collective_mismatch", fallen=fallen, cause="order")


def _absent(case: Case, group: str, seq: int, there: dict[int, Call], absent: list[int]) -> Verdict:
    waits = [r for r, c in sorted(there.items()) if not c.done]
    call = there[waits[0]]
    why = f"it never came to collective {seq} of group {group} ({_called(call)}), in which rank {_list(waits)} waits"
    return Verdict(kind="collective_mismatch", fallen=[case.fallen(r, why) for r in absent])


def _behind(case: Case) -> Verdict | None:
    """Ranks that are less far than others, by what they said last."""
    behind = _least_far(case)
    if not behind:
        return None
    return Verdict(
        kind="collective_mismatch",
        fallen=[case.fallen(r, f"it is still in {_place(case.ranks[r])}, others are further") for r in behind],
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


_KINDS: tuple[Callable[[Case], Verdict | None], ...] = (
    _silent_node, _unable, _network, _mute, _calls, _behind, _outside, _first_silent, _ended,
)  # fmt: skip


def _nobody(case: Case) -> Verdict:
    if len(case.ranks) < 2:
        return Verdict(kind="collective_hang", fallen=[], cause="alone")
    waits = any(case.waits(r) for r in case.ranks.values())
    return Verdict(kind="collective_hang", fallen=[], cause="same" if waits else "outside")


def _special(case: Case, verdict: Verdict) -> str:
    """What the place where the rank stands says of the cause."""
    if verdict.kind != "collective_mismatch" or verdict.cause == "order" or len(verdict.fallen) != 1:
        return verdict.kind
    rank = case.ranks.get(verdict.fallen[0].rank if verdict.fallen[0].rank is not None else -1)
    if rank is None:
        return verdict.kind
    lines = [f"{f.file}:{f.function}" for f in rank.stack[:14]]
    if rank.part == "data" or any(_LOADER.search(line) for line in lines):
        return "dataloader_hang"
    if rank.phase == "save" or any(_CHECKPOINT.search(line) for line in lines[:8]):
        return "checkpoint_collective"
    return verdict.kind


def _sentence(verdict: Verdict, waiting: list[Waiting], alarm: Alarm, now: float) -> str:
    """One paragraph for a person."""
    silent = f"no progress for {now - alarm.since:.0f} s (limit {alarm.limit_s:g} s, {_alarm_place(alarm)})"
    if not verdict.fallen:
        first = waiting[0].where if waiting else "nowhere"
        if verdict.cause == "alone":
            return f"hang: {silent}; the only rank stands in {first}"
        if verdict.cause == "outside":
            return f"hang: {silent}; all ranks stand in {first}, and none is in a collective: look at what they wait for there"
        return (
            f"hang: {silent}; all ranks wait in the same place ({first}) and none fell out: look at the network and the GPUs rather than "
            "at the program"
        )
    who = verdict.fallen[0]
    ranks = _list([f.rank for f in verdict.fallen if f.rank is not None])
    hosts = ", ".join(dict.fromkeys(f.host for f in verdict.fallen if f.host))
    one = len(verdict.fallen) == 1
    it = "It" if one else f"Rank {who.rank}"
    text = f"hang: rank{'' if one else 's'} {ranks} on {hosts} fell out, {who.why if one else f'rank {who.rank}: {who.why}'}. {_stands(it, who)}"
    for other in verdict.fallen[1:3]:
        if other.where not in (who.where, UNKNOWN):
            text += f"; rank {other.rank} in {other.where}"
    if waiting:
        first = waiting[0]
        count = f"{len(waiting)} other rank{'s wait' if len(waiting) > 1 else ' waits'}"
        text += f". {count}{' for it' if len(verdict.fallen) == 1 else ''}, rank {first.rank} in {first.where or first.call or 'an unknown place'}"
    return f"{text}; {silent}"


def _stands(it: str, who: Fallen) -> str:
    if who.where == UNKNOWN:
        return f"{it} did not show where it stands"
    state = f", {who.state}" if who.state and not who.why.endswith(who.state) else ""
    return f"{it} stands in {who.where}{state}"


def _alarm_place(alarm: Alarm) -> str:
    part = f", {alarm.part}" if alarm.part else ""
    return f"{alarm.phase}{part}" + (f", step {alarm.step + 1}" if alarm.step is not None else "")


def _notes(case: Case) -> list[str]:
    """What else stands out on the nodes."""
    notes = []
    for node in case.nodes:
        if node.memory_available_bytes is not None and node.memory_total_bytes:
            share = node.memory_available_bytes / node.memory_total_bytes
            if share < 0.03:
                notes.append(f"{node.host}: only {share:.1%} of its memory is available")
        if node.load1 and node.cpus and node.load1 > 2 * node.cpus:
            notes.append(f"{node.host}: load {node.load1:.0f} on {node.cpus} cores")
        if node.blocked:
            notes.append(f"{node.host}: processes in uninterruptible sleep: {'; '.join(node.blocked[:4])}")
    return notes


def _place(rank: RankEvidence) -> str:
    step = f"step {rank.step + 1}" if rank.step is not None else ""
    return ", ".join(part for part in (rank.phase, step, rank.part) if part) or "its start"


def _state(rank: RankEvidence) -> str:
    if rank.state[:1] == "R" and rank.cpu_share is not None and rank.cpu_share >= SPINS:
        return f"running at {rank.cpu_share:.0%} of a core"
    return _spoken(rank)


def _spoken(rank: RankEvidence) -> str:
    return rank.state.partition(" ")[2] or rank.state


def _open_call(rank: RankEvidence) -> str:
    found = next((c for c in rank.calls if not c.done), None)
    return f"collective {found.seq} of group {found.group}: {_called(found)}" if found else ""


def _called(call: Call | None) -> str:
    return f"{call.op} {call.sizes}".strip() if call else "another"


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN]))
    return shown + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")
