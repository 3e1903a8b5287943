"""Combine the evidence of all nodes and apply the rules that name a stalled rank, strongest evidence first. Pure.

A new rule is a function and an entry in the list of rules. A rule names a rank only for what was observed: if a rank's
heartbeat, stack, calls or step is missing, the rule ignores that rank, because the reason is unknown. Only a complete node
that does not answer is named for its silence, after all other rules about observations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from allranks.analysis.flight_recorder import CollectiveCall, OpenCollective, describe_call, open_collectives
from allranks.analysis.stacks import blocking_location, called_collective, is_collective_stack
from allranks.launch.monitor.procfs import is_ended_state
from allranks.launch.monitor.records import HangAlarm, NodeEvidence, RankEvidence, StalledRank
from allranks.rundir.heartbeat import DONE_PHASE, NO_STEP, TRAIN_PHASE
from allranks.utils.formatting import format_list

MAX_LISTED = 8
UNKNOWN = "unknown"
MIN_FOR_MAJORITY = 3  # of two ranks that differ, neither is the odd one
BUSY_CPU_SHARE = 0.8  # of a core


class HangVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that one rule names as stalled, and the class of failure."""

    kind: str
    stalled: list[StalledRank]
    cause: str = ""


class HangEvidence:
    """The evidence of all nodes, with queries for the rules."""

    def __init__(self, nodes: Sequence[NodeEvidence], hosts: dict[int, str], alarm: HangAlarm) -> None:
        self.alarm = alarm
        self.nodes = sorted(nodes, key=lambda n: n.node)
        self.ranks = {r.rank: r for n in self.nodes for r in n.ranks}
        self.hosts = hosts | {r.rank: n.host for n in self.nodes for r in n.ranks}
        answered = {hosts[r] for r in self.ranks if r in hosts} | {n.host for n in self.nodes}
        absent = sorted(set(hosts) - set(self.ranks))
        self.missing = [r for r in absent if hosts[r] not in answered]  # their node did not answer
        self.unseen = [r for r in absent if hosts[r] in answered]  # their node answered, but has no heartbeat from them

    def stalled(self, rank: int, why: str) -> StalledRank:
        """Return the stalled rank with its position."""
        found = self.ranks.get(rank)
        where = blocking_location(found.stack) if found else ""
        where = where or UNKNOWN
        return StalledRank(
            rank=rank, host=self.hosts.get(rank, ""), why=why, where=where, state=state_text(found) if found else ""
        )

    def waits(self, rank: RankEvidence) -> bool:
        """Return whether a rank is in a collective, by its stack or by an unfinished call."""
        return self.is_in_collective(rank) or any(not c.done for c in rank.calls)

    def is_in_collective(self, rank: RankEvidence) -> bool:
        """Return whether the stack of a rank's main thread is in a collective."""
        return is_collective_stack([str(f) for f in rank.stack])


def progress_text(rank: RankEvidence) -> str:
    """Describe the progress of a rank."""
    step = f"step {rank.step + 1}" if rank.step is not None else ""
    return ", ".join(part for part in (rank.phase, step, rank.part) if part) or "its start"


def state_text(rank: RankEvidence) -> str:
    """Describe the state of a rank's process, with its CPU share while it computes."""
    if rank.state[:1] == "R" and rank.cpu_share is not None and rank.cpu_share >= BUSY_CPU_SHARE:
        return f"running at {rank.cpu_share:.0%} of a core"
    return process_state_text(rank)


def process_state_text(rank: RankEvidence) -> str:
    """Return the kernel's name for the process state."""
    return rank.state.partition(" ")[2] or rank.state


def pending_call_text(rank: RankEvidence) -> str:
    """Describe the first collective that is unfinished on a rank."""
    found = next((c for c in rank.calls if not c.done), None)
    return f"collective {found.seq} of group {found.group}: {describe_call(found)}" if found else ""


def due_alarm(alarms: Sequence[HangAlarm], nodes: int) -> HangAlarm | None:
    """Return the alarm that has all ranks examined, or None.

    A user's own program is silent only if all of its nodes are, and it hangs only if no rank works, or others wait for one that does.

    Args:
        alarms: those that are raised now.
        nodes: number of nodes with running ranks.
    """
    first = next((alarm for alarm in alarms if not alarm.whole_job), None)
    if first is not None:
        return first
    if not alarms or len(alarms) < nodes or not (all(a.stuck for a in alarms) or any(a.waiting for a in alarms)):
        return None
    return min(alarms, key=lambda alarm: (not alarm.waiting, alarm.since))


def list_ranks(ranks: Sequence[int]) -> str:
    """Format rank numbers, shortened if there are many."""
    return format_list(ranks, MAX_LISTED)


PARTS = ("data", "forward", "backward", "optimizer", "control")
PHASES = ("start", "prepare", "build", "prove", "first step", "train", "evaluate", "save", "finish")
BETWEEN_STEPS = ("evaluate", "save")  # between two steps; the step number does not change
BLOCKED_INTERPRETER_S = 5.0  # ten beats of the heartbeat thread
MIN_HEARTBEATS = 4  # heartbeats after which the silence of the thread is meaningful
SAME_MOMENT_S = (
    2.0  # a C call that holds the interpreter silences the main thread and the heartbeat thread at the same time
)


def _unreachable_node(case: HangEvidence) -> HangVerdict | None:
    if not case.missing or not case.ranks:
        return None
    hosts = sorted({case.hosts[r] for r in case.missing})
    why = f"host {', '.join(hosts)} does not answer, neither its ranks nor their agent"
    return HangVerdict(kind="collective_hang", stalled=[case.stalled(r, why) for r in case.missing])


def _not_runnable(case: HangEvidence) -> HangVerdict | None:
    """Name processes that the kernel does not run."""
    held = [r for r in case.ranks.values() if r.state[:1] in ("T", "t", "D")]
    if not held or len(held) == len(case.ranks):
        return None
    return HangVerdict(
        kind="collective_hang",
        stalled=[case.stalled(r.rank, f"its process {r.pid} is {process_state_text(r)}") for r in held],
    )


def _network(case: HangEvidence) -> HangVerdict | None:
    """Name nodes whose network is down, or that cannot reach the others."""
    if len(case.nodes) < 2:
        return None
    down = [n for n in case.nodes if n.interface and n.interfaces.get(n.interface, {}).get("up") is False]
    asked = [n for n in case.nodes if n.meets is not None]
    cut_off = [n for n in asked if not n.meets]
    if not down and len(cut_off) > 1 and len(cut_off) >= len(asked) - 1 and case.nodes[0].meets is not False:
        down, cut_off = [case.nodes[0]], []  # no other node can reach the first one
    bad = down or (cut_off if len(cut_off) < len(asked) else [])
    if not bad:
        return None
    stalled = []
    for node in bad:
        why = (
            f"its interface {node.interface} is down"
            if node in down and node.interface and node.interfaces.get(node.interface, {}).get("up") is False
            else "the other nodes cannot reach it"
            if node in down
            else "it cannot reach the rendezvous node, the others can"
        )
        stalled += [case.stalled(r.rank, f"the network of {node.host}: {why}") for r in node.ranks]
    return HangVerdict(kind="collective_hang", stalled=stalled)


def _calls(case: HangEvidence) -> HangVerdict | None:
    """Name ranks that never joined a collective in which others wait, or that called another one."""
    for found in open_collectives({r.rank: r.calls for r in case.ranks.values()}):
        if found.differs:
            return _mismatch(case, found)
        if found.absent and found.waiting:
            return _absent(case, found)
    return None


def _sequences(case: HangEvidence) -> HangVerdict | None:
    """Name ranks outside collectives that have called fewer than a rank that waits, where no record shows the calls themselves."""
    for group in sorted({name for r in case.ranks.values() for name in r.sequences}):
        members = {r.rank: r for r in case.ranks.values() if group in r.sequences}
        most = max(r.sequences[group] for r in members.values())
        waits = [rank for rank, r in sorted(members.items()) if r.sequences[group] == most and case.waits(r)]
        behind = [r for _, r in sorted(members.items()) if r.sequences[group] < most and r.stack and not case.waits(r)]
        if waits and behind:
            why = "it never joined collective {} of group {}, in which rank {} waits; its last one is {}"
            stalled = [
                case.stalled(r.rank, why.format(most, group, list_ranks(waits), r.sequences[group])) for r in behind
            ]
            return HangVerdict(kind="collective_mismatch", stalled=stalled)
    return None


def _called_functions(case: HangEvidence) -> HangVerdict | None:
    """Name ranks that are in another function of torch.distributed than most, where no record shows the calls themselves.

    All ranks must be known to be in one, and none may be ahead of another in its number of calls.
    """
    called = {r.rank: called_collective([str(f) for f in r.stack]) for r in case.ranks.values()}
    numbers = [r.sequences for r in case.ranks.values()]
    if len(called) < MIN_FOR_MAJORITY or not all(called.values()) or any(one != numbers[0] for one in numbers):
        return None
    ((usual, count), *others) = Counter(called.values()).most_common()
    if not others or count * 2 <= len(called):
        return None
    why = "it called {}, other ranks called {}"
    odd = sorted(rank for rank, name in called.items() if name != usual)
    return HangVerdict(
        kind="collective_mismatch", stalled=[case.stalled(r, why.format(called[r], usual)) for r in odd], cause="order"
    )


def _mismatch(case: HangEvidence, found: OpenCollective[CollectiveCall]) -> HangVerdict:
    odd = found.rarest
    if len(odd) == len(found.calls):  # equal numbers: the ranks that are less far called the wrong one
        odd = [r for r in _ranks_least_far(case) if r in found.calls] or odd
    why = "its collective {} of group {} is {}, other ranks called {}"
    stalled = []
    for rank in odd:
        own, other = found.describe(found.calls[rank]), found.describe(found.contrast(rank))
        stalled.append(case.stalled(rank, why.format(found.seq, found.group, own, other)))
    return HangVerdict(kind="collective_mismatch", stalled=stalled, cause="order")


def _absent(case: HangEvidence, found: OpenCollective[CollectiveCall]) -> HangVerdict:
    waits = found.waiting
    why = (
        f"it never joined collective {found.seq} of group {found.group} ({describe_call(found.calls[waits[0]])}), in which "
        f"rank {list_ranks(waits)} waits"
    )
    return HangVerdict(kind="collective_mismatch", stalled=[case.stalled(r, why) for r in found.absent])


def _behind(case: HangEvidence) -> HangVerdict | None:
    """Name ranks behind the others, by their last reported progress."""
    behind = _ranks_least_far(case)
    if not behind:
        return None
    return HangVerdict(
        kind="collective_mismatch",
        stalled=[
            case.stalled(r, f"it is still in {progress_text(case.ranks[r])}, other ranks are ahead") for r in behind
        ],
    )


def _ranks_least_far(case: HangEvidence) -> list[int]:
    """Return ranks that are behind at least as many others; none if most ranks are there, or if it is unclear."""
    known = [r for r in case.ranks.values() if r.phase in PHASES]
    if any(_is_between_parts(r) for r in known) and any(r.phase in BETWEEN_STEPS for r in known):
        return []  # before the first part of its step, or after an evaluation in which others still are
    far = {r.rank: (r.step if r.step is not None else NO_STEP, PHASES.index(r.phase), _part_index(r)) for r in known}
    least = min(far.values(), default=None)
    behind = sorted(r for r, at in far.items() if at == least)
    return [] if len(behind) == len(far) or len(behind) * 2 > len(far) else behind


def _is_between_parts(rank: RankEvidence) -> bool:
    return rank.phase == TRAIN_PHASE and not rank.part


def _part_index(rank: RankEvidence) -> int:
    return PARTS.index(rank.part) if rank.part in PARTS else -1


def _not_in_collective(case: HangEvidence) -> HangVerdict | None:
    """Name ranks whose stack is not in a collective while the others are in one."""
    known = [r for r in case.ranks.values() if r.stack or r.calls]
    waiting = [r for r in known if case.waits(r)]
    out = [r for r in known if r.stack and not case.waits(r)]
    if not out or not waiting:
        return None
    return HangVerdict(
        kind="collective_mismatch",
        stalled=[case.stalled(r.rank, "it is not in a collective, the others wait in one") for r in out],
    )


def _first_silent(case: HangEvidence) -> HangVerdict | None:
    """Name the rank that raised the alarm if no rank is in a collective and their positions differ."""
    first = case.ranks.get(case.alarm.rank)
    if first is None or not first.stack or case.waits(first):
        return None
    if len({blocking_location(r.stack) for r in case.ranks.values() if r.stack}) < 2:
        return None
    why = "it was the first to be silent, and it is not in a collective"
    return HangVerdict(kind="collective_hang", stalled=[case.stalled(first.rank, why)])


def _blocked_interpreter(case: HangEvidence) -> HangVerdict | None:
    """Name processes in which no Python code has run since they fell silent: a C call holds the interpreter."""
    held = [r for r in case.ranks.values() if _has_blocked_interpreter(case, r)]
    if not held or len(held) == len(case.ranks):
        return None
    why = "no Python thread has run in its process for {:.0f} s: a C call holds the interpreter"
    return HangVerdict(
        kind="collective_mismatch", stalled=[case.stalled(r.rank, why.format(r.python_silent_s)) for r in held]
    )


def _has_blocked_interpreter(case: HangEvidence, rank: RankEvidence) -> bool:
    """Return whether only a blocked interpreter can explain the silence of a rank's heartbeat thread.

    The thread worked before and reports no failure; the main thread fell silent at the same time, since later progress would
    mean that Python ran; and the main thread's stack is known and not in a collective, where it would wait for peers.
    """
    silent_s = rank.python_silent_s
    return (
        silent_s is not None
        and silent_s > BLOCKED_INTERPRETER_S
        and rank.python_beats >= MIN_HEARTBEATS
        and not rank.monitor_error
        and rank.silent_s is not None
        and rank.silent_s >= silent_s - SAME_MOMENT_S
        and bool(rank.stack)
        and not case.waits(rank)
        and not is_ended_state(rank.state)
    )


def _ended(case: HangEvidence) -> HangVerdict | None:
    """Name processes that have exited. The weakest rule: a rank whose collective timed out may exit during the examination."""
    gone = [r for r in case.ranks.values() if is_ended_state(r.state)]
    if not gone or len(gone) == len(case.ranks):
        return None
    return HangVerdict(kind="rank_died", stalled=[case.stalled(r.rank, _end_text(r)) for r in gone])


def _end_text(rank: RankEvidence) -> str:
    cleanly = ", cleanly, while others continue" if rank.phase == DONE_PHASE else ""
    return f"its process {rank.pid} has exited{cleanly}"


RULES: tuple[Callable[[HangEvidence], HangVerdict | None], ...] = (
    _not_runnable, _network, _calls, _unreachable_node, _blocked_interpreter, _behind, _sequences, _called_functions, _not_in_collective,
    _first_silent, _ended,
)  # fmt: skip
