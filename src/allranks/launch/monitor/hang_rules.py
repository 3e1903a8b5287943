"""Find the stalled rank from the evidence of all nodes, describe the hang in one paragraph, and write hang.json.

The driver does this after an alarm. The rules run from the strongest to the weakest evidence, and the first one that
names a rank decides. A rule names a rank only for what was observed: if a rank's heartbeat, stack, calls or step is
missing, the rule ignores that rank. Only a complete node that does not answer is named for its silence.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from allranks.analysis.flight_recorder import CollectiveCall, OpenCollective, describe_call, open_collectives
from allranks.analysis.nccl_ras import RasFinding
from allranks.analysis.stacks import (
    ACTIVITY_FRAMES,
    blocking_location,
    is_build_lock_stack,
    is_checkpoint_frame,
    is_collective_stack,
    is_data_frame,
)
from allranks.errors import RunFailed
from allranks.launch.monitor.procfs import is_ended_state
from allranks.launch.monitor.records import HangAlarm, HangReport, NodeEvidence, RankEvidence, StalledRank, WaitingRank
from allranks.rundir.files import make_folder, write_json
from allranks.rundir.heartbeat import DONE_PHASE, NO_STEP, TRAIN_PHASE
from allranks.rundir.paths import RunDir
from allranks.utils.inputs import read_regular
from allranks.utils.text import format_list

MAX_LISTED = 8
UNKNOWN = "unknown"
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
        self.ras = self._ras()

    def _ras(self) -> list[tuple[RasFinding, list[int]]]:
        """Return what NCCL's RAS reports of this job, with the job's ranks that it names.

        Its port on a node belongs to the job that was there first: a report without a process of this job is another's.
        Its ranks are those of a communicator, so they are joined by process.
        """
        by_pid: dict[int | None, list[int]] = {}
        for rank in self.ranks.values():
            by_pid.setdefault(rank.pid, []).append(rank.rank)
        report = next((n.ras for n in self.nodes if any(r.pid in by_pid for f in n.ras for r in f.ranks)), [])
        joined = [(f, [by_pid.get(r.pid, []) for r in f.ranks]) for f in report]
        return [(f, sorted({own[0] for own in ranks if len(own) == 1})) for f, ranks in joined]

    def stalled(self, rank: int, why: str) -> StalledRank:
        """Return the stalled rank with its position."""
        known = self.ranks.get(rank)
        where, state = (blocking_location(known.stack), state_text(known)) if known else ("", "")
        if not why.startswith(RAS) and any(rank in ranks and f.kind in RAS_KINDS for f, ranks in self.ras):
            why += " (NCCL RAS names it, too)"
        return StalledRank(rank=rank, host=self.hosts.get(rank, ""), why=why, where=where or UNKNOWN, state=state)

    def verdict(self, kind: str, stalled: Iterable[tuple[RankEvidence, str]], cause: str = "") -> HangVerdict:
        """Return the verdict that names these ranks, each for its reason."""
        return HangVerdict(kind=kind, stalled=[self.stalled(r.rank, why) for r, why in stalled], cause=cause)

    def waits(self, rank: RankEvidence) -> bool:
        """Return whether a rank is in a collective, by its stack or by an unfinished call."""
        return is_collective_stack(list(map(str, rank.stack))) or any(not c.done for c in rank.calls)


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
    call = next((c for c in rank.calls if not c.done), None)
    return f"collective {call.seq} of group {call.group}: {describe_call(call)}" if call else ""


def due_alarm(alarms: Sequence[HangAlarm], nodes: int) -> HangAlarm | None:
    """Return the alarm that has all ranks examined, or None.

    A user's own program is silent only if all of its nodes are, and it hangs only if no rank works, or others wait for
    one that does.

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
RAS = "NCCL RAS: "
RAS_KINDS = {"dead": "rank_died", "missing": "collective_hang", "behind": "collective_mismatch"}
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
    return HangVerdict(kind="node_unhealthy", stalled=[case.stalled(r, why) for r in case.missing])


def _not_runnable(case: HangEvidence) -> HangVerdict | None:
    """Name processes that the kernel does not run."""
    held = [r for r in case.ranks.values() if r.state[:1] in ("T", "t", "D")]
    if not held or len(held) == len(case.ranks):
        return None
    return case.verdict("collective_hang", ((r, f"its process {r.pid} is {process_state_text(r)}") for r in held))


def _network(case: HangEvidence) -> HangVerdict | None:
    """Name nodes whose network is down, or that cannot reach the others."""
    if len(case.nodes) < 2:
        return None
    tested = [n for n in case.nodes if n.meets is not None]
    cut_off = [n for n in tested if not n.meets]
    if bad := [n for n in case.nodes if n.interface and n.interfaces.get(n.interface, {}).get("up") is False]:
        why = "its interface {} is down"
    elif len(cut_off) > 1 and len(cut_off) >= len(tested) - 1 and case.nodes[0].meets is not False:
        bad, why = [case.nodes[0]], "the other nodes cannot reach it"
    elif 0 < len(cut_off) < len(tested):
        bad, why = cut_off, "it cannot reach the rendezvous node, the others can"
    else:
        return None
    return case.verdict(
        "broken_node_network",
        ((r, f"the network of {node.host}: {why.format(node.interface)}") for node in bad for r in node.ranks),
    )


def _calls(case: HangEvidence) -> HangVerdict | None:
    """Name ranks that never joined a collective in which others wait, or that called another one."""
    for call in open_collectives({r.rank: r.calls for r in case.ranks.values()}):
        if call.differs:
            return _mismatch(case, call)
        if call.absent and (waits := call.waiting):
            text = describe_call(call.calls[waits[0]])
            why = f"it never joined collective {call.seq} of group {call.group} ({text}), in which rank "
            why += f"{list_ranks(waits)} waits"
            return case.verdict("collective_mismatch", ((case.ranks[r], why) for r in call.absent))
    return None


def _sequences(case: HangEvidence) -> HangVerdict | None:
    """Name ranks outside collectives that called fewer than a waiting rank, where no record shows the calls."""
    for group in sorted({name for r in case.ranks.values() for name in r.sequences}):
        members = {r.rank: r for r in case.ranks.values() if group in r.sequences}
        most = max(r.sequences[group] for r in members.values())
        waits = [rank for rank, r in sorted(members.items()) if r.sequences[group] == most and case.waits(r)]
        behind = [r for _, r in sorted(members.items()) if r.sequences[group] < most and r.stack and not case.waits(r)]
        if waits and behind:
            why = (
                f"it never joined collective {most} of group {group}, in which rank {list_ranks(waits)} waits; its "
                "last one is"
            )
            return case.verdict("collective_mismatch", ((r, f"{why} {r.sequences[group]}") for r in behind))
    return None


def _mismatch(case: HangEvidence, call: OpenCollective[CollectiveCall]) -> HangVerdict:
    odd = call.rarest
    if len(odd) == len(call.calls):  # equal numbers: the ranks that are less far called the wrong one
        odd = [r for r in _ranks_least_far(case) if r in call.calls] or odd
    where = f"its collective {call.seq} of group {call.group} is"
    stalled = [
        (rank, f"{where} {call.describe(call.calls[rank])}, other ranks called {call.describe(call.contrast(rank))}")
        for rank in odd
    ]
    return case.verdict("collective_mismatch", ((case.ranks[rank], why) for rank, why in stalled), cause="order")


def _behind(case: HangEvidence) -> HangVerdict | None:
    """Name ranks behind the others, by their last reported progress."""
    behind = [case.ranks[rank] for rank in _ranks_least_far(case)]
    if not behind:
        return None
    stalled = ((r, f"it is still in {progress_text(r)}, other ranks are ahead") for r in behind)
    return case.verdict("collective_mismatch", stalled)


def _ranks_least_far(case: HangEvidence) -> list[int]:
    """Return ranks that are behind at least as many others; none if most ranks are there, or if it is unclear."""
    known = [r for r in case.ranks.values() if r.phase in PHASES]
    between_parts = any(r.phase == TRAIN_PHASE and not r.part for r in known)
    if between_parts and any(r.phase in BETWEEN_STEPS for r in known):
        return []  # before the first part of its step, or after an evaluation in which others still are
    far = {}
    for r in known:
        part = PARTS.index(r.part) if r.part in PARTS else -1
        far[r.rank] = (r.step if r.step is not None else NO_STEP, PHASES.index(r.phase), part)
    least = min(far.values(), default=None)
    behind = sorted(r for r, at in far.items() if at == least)
    return [] if len(behind) == len(far) or len(behind) * 2 > len(far) else behind


def _not_in_collective(case: HangEvidence) -> HangVerdict | None:
    """Name ranks whose stack is not in a collective while the others are in one."""
    known = [r for r in case.ranks.values() if r.stack or r.calls]
    waiting = [r for r in known if case.waits(r)]
    out = [r for r in known if r.stack and not case.waits(r)]
    if not out or not waiting:
        return None
    return case.verdict("collective_mismatch", ((r, "it is not in a collective, the others wait in one") for r in out))


def _first_silent(case: HangEvidence) -> HangVerdict | None:
    """Name the rank that raised the alarm if no rank is in a collective and their positions differ."""
    first = case.ranks.get(case.alarm.rank)
    if first is None or not first.stack or case.waits(first):
        return None
    if len({blocking_location(r.stack) for r in case.ranks.values() if r.stack}) < 2:
        return None
    return case.verdict("collective_hang", [(first, "it was the first to be silent, and it is not in a collective")])


def _ras(case: HangEvidence) -> HangVerdict | None:
    """Name the minority that does not answer NCCL's RAS, or that has launched fewer collectives than the others."""
    for kind, name in RAS_KINDS.items():
        for finding, ranks in case.ras:
            if finding.kind == kind and ranks and len(ranks) * 2 < len(case.hosts) and set(ranks) <= set(case.ranks):
                why = f"{RAS}{finding.text}"
                return case.verdict(name, ((case.ranks[rank], why) for rank in ranks))
    return None


def _blocked_interpreter(case: HangEvidence) -> HangVerdict | None:
    """Name processes in which no Python code has run since they fell silent: a C call holds the interpreter."""
    held = [r for r in case.ranks.values() if _has_blocked_interpreter(case, r)]
    if not held or len(held) == len(case.ranks):
        return None
    why = "no Python thread has run in its process for {:.0f} s: a C call holds the interpreter"
    return case.verdict("collective_mismatch", ((r, why.format(r.python_silent_s)) for r in held))


def _has_blocked_interpreter(case: HangEvidence, rank: RankEvidence) -> bool:
    """Return whether only a blocked interpreter can explain the silence of a rank's heartbeat thread.

    The thread worked before and reports no failure; the main thread fell silent at the same time, since later progress
    would mean that Python ran; and the main thread's stack is known and not in a collective, which waits for peers.
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
    """Name exited processes. The weakest rule: a rank whose collective timed out may exit during the examination."""
    gone = [r for r in case.ranks.values() if is_ended_state(r.state)]
    if not gone or len(gone) == len(case.ranks):
        return None
    cleanly = ", cleanly, while others continue"
    stalled = ((r, f"its process {r.pid} has exited{cleanly if r.phase == DONE_PHASE else ''}") for r in gone)
    return case.verdict("rank_died", stalled)


RULES: tuple[Callable[[HangEvidence], HangVerdict | None], ...] = (
    _not_runnable, _network, _calls, _unreachable_node, _blocked_interpreter, _behind, _sequences,
    _not_in_collective, _ras, _first_silent, _ended,
)  # fmt: skip


NOBODY_STALLED = {
    "alone": "the only rank is in {}",
    "outside": "all ranks are in {}, and none is in a collective: check what they wait for there",
    "build": (
        "all ranks wait until another process has built a C++ extension of torch ({}): if no compiler runs, one that "
        "was killed left its lock: delete the files named lock below TORCH_EXTENSIONS_DIR (by default "
        "~/.cache/torch_extensions)"
    ),
    "same": (
        "all ranks wait in the same place ({}) and none stalled: check the network and the GPUs rather than the program"
    ),
}


def hang_message(verdict: HangVerdict, waiting: list[WaitingRank], alarm: HangAlarm, now: float) -> str:
    """Return the report as one paragraph."""
    silent = f"no progress for {now - alarm.since:.0f} s (limit {alarm.limit_s:g} s, {_alarm_place(alarm)})"
    if not verdict.stalled:
        first = waiting[0].where if waiting else "nowhere"
        text = NOBODY_STALLED[verdict.cause].format(first)
        other = next((w for w in waiting if w.where and w.where != first), None)
        if verdict.cause == "same" and other is not None:
            text = (
                f"no rank is known to have stalled: rank {waiting[0].rank} is in {first}, rank {other.rank} in "
                f"{other.where}: check whether these calls belong together, then the network and the GPUs"
            )
        return f"hang: {silent}; {text}"
    who = verdict.stalled[0]
    ranks = list_ranks([f.rank for f in verdict.stalled])
    hosts = ", ".join(dict.fromkeys(f.host for f in verdict.stalled if f.host))
    if len(verdict.stalled) == 1:
        text, it, its = f"hang: rank {ranks} on {hosts} stalled, {who.why}", "It", "Its position"
    else:
        it, its = f"Rank {who.rank}", f"The position of rank {who.rank}"
        text = f"hang: ranks {ranks} on {hosts} stalled, rank {who.rank}: {who.why}"
    state = f", {who.state}" if who.state and who.state not in who.why else ""
    text += f". {its} is unknown" if who.where == UNKNOWN else f". {it} is in {who.where}{state}"
    for other in verdict.stalled[1:3]:
        if other.where not in (who.where, UNKNOWN):
            text += f"; rank {other.rank} in {other.where}"
    if waiting:
        first = waiting[0]
        count = f"{len(waiting)} other rank{'s wait' if len(waiting) > 1 else ' waits'}"
        for_it = " for it" if len(verdict.stalled) == 1 else ""
        text += f". {count}{for_it}, rank {first.rank} in {first.where or first.call or 'an unknown place'}"
    return f"{text}; {silent}"


def _alarm_place(alarm: HangAlarm) -> str:
    part = f", {alarm.part}" if alarm.part else ""
    return f"{alarm.phase}{part}" + (f", step {alarm.step + 1}" if alarm.step is not None else "")


def node_notes(case: HangEvidence) -> list[str]:
    """Return other noteworthy observations about the nodes."""
    notes = [f"{RAS}{finding.text}" for finding, _ in case.ras[:MAX_LISTED]]
    if case.unseen:
        notes.append(f"rank {list_ranks(case.unseen)}: no heartbeat was written, so its state is unknown")
    notes += [f"rank {r.rank}: its heartbeat failed: {r.monitor_error}" for r in case.ranks.values() if r.monitor_error]
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


def analyze_hang(
    nodes: Sequence[NodeEvidence], hosts: dict[int, str], alarm: HangAlarm, attempt: int, now: float
) -> HangReport:
    """Return the hang report.

    Args:
        nodes: the evidence received; nodes that do not answer are absent.
        hosts: the host of each rank of the job.
        now: seconds since the epoch.
    """
    case = HangEvidence(nodes, hosts, alarm)
    verdict = next((v for ask in RULES if (v := ask(case)) is not None), _no_stalled_rank(case))
    named = {f.rank for f in verdict.stalled}
    waiting = [
        WaitingRank(
            rank=r.rank, host=case.hosts.get(r.rank, ""), where=blocking_location(r.stack), call=pending_call_text(r)
        )
        for r in case.ranks.values()
        if r.rank not in named
    ]
    return HangReport(
        attempt=attempt,
        kind=_specific_kind(case, verdict),
        sentence=hang_message(verdict, waiting, alarm, now),
        stalled=verdict.stalled,
        waiting=waiting,
        alarm=alarm,
        judged=round(now, 3),
        missing_hosts=sorted({case.hosts[r] for r in case.missing}),
        notes=node_notes(case),
    )


def _no_stalled_rank(case: HangEvidence) -> HangVerdict:
    if len(case.ranks) < 2:
        return HangVerdict(kind="collective_hang", stalled=[], cause="alone")
    if all(is_build_lock_stack([str(f) for f in r.stack]) for r in case.ranks.values()):
        return HangVerdict(kind="extension_build_lock", stalled=[], cause="build")
    waits = any(case.waits(r) for r in case.ranks.values())
    return HangVerdict(kind="collective_hang", stalled=[], cause="same" if waits else "outside")


def _specific_kind(case: HangEvidence, verdict: HangVerdict) -> str:
    """Return the class of failure that the rank's position indicates."""
    if verdict.kind != "collective_mismatch" or verdict.cause == "order" or len(verdict.stalled) != 1:
        return verdict.kind
    rank = case.ranks[verdict.stalled[0].rank]
    lines = [str(f) for f in rank.stack[:ACTIVITY_FRAMES]]
    if rank.part == "data" or any(map(is_data_frame, lines)):
        return "dataloader_hang"
    if rank.phase == "save" or any(map(is_checkpoint_frame, lines[:8])):
        return "checkpoint_collective"
    return verdict.kind


class HangAnalyzer:
    """Analyze a hang once, from evidence received over the control channel or found in the run folder."""

    def __init__(self, run: RunDir, attempt: int, hosts: dict[int, str], nodes: int) -> None:
        self._run, self._attempt, self._hosts, self._nodes = run, attempt, hosts, nodes

    def __call__(self, alarm: HangAlarm, evidence: Sequence[NodeEvidence]) -> str:
        """Analyze, write ``hang.json``, and return the verdict in one sentence, even if the file cannot be written."""
        by_node = {e.node: e for e in evidence}
        for node in range(self._nodes):
            if node not in by_node and (kept := self._kept(node)) is not None:
                by_node[node] = kept
        report = analyze_hang(list(by_node.values()), self._hosts, alarm, self._attempt, time.time())
        report = msgspec.structs.replace(report, files=str(self._run.hang(self._attempt)))
        try:
            write_hang_report(self._run, report)
        except (OSError, RunFailed) as error:
            logging.warning("the report on ranks without progress cannot be written: %s", error)
        return report.sentence

    def _kept(self, node: int) -> NodeEvidence | None:
        """Return evidence in the run folder from a node that the driver cannot reach."""
        try:
            return msgspec.json.decode(read_regular(self._run.hang_node(self._attempt, node)), type=NodeEvidence)
        except (OSError, msgspec.DecodeError):
            return None


def write_hang_report(run: RunDir, report: HangReport) -> None:
    """Write hang.json, and an event of the rank that stalled (or of rank 0)."""
    from allranks.rundir.events import EventLog

    make_folder(run.hang(report.attempt))
    write_json(run.hang_report(report.attempt), msgspec.to_builtins(report))
    first = report.stalled[0] if report.stalled else None
    rank = first.rank if first else 0
    log = EventLog(run.events_of(rank), rank)
    log.write(
        "hang",
        attempt=report.attempt,
        kind=report.kind,
        host=first.host if first else None,
        ranks=[f.rank for f in report.stalled],
        where=first.where if first else "",
        message=report.sentence,
        since=report.alarm.since,
        limit_s=report.alarm.limit_s,
        noticed=report.alarm.time,
    )
    log.close()
