"""Find the stalled rank from the evidence of all nodes, describe the hang in one paragraph, and write hang.json.

The driver does this after an alarm. The rules run from the strongest to the weakest evidence, and the first one that names a
rank decides: a process that cannot run; a network that is down; the collectives called (a rank that never joined, or called
another one); a node that does not answer; a blocked interpreter; the progress of each rank; the position of its stack.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import msgspec

from allranks.analysis.stacks import (
    ACTIVITY_FRAMES,
    blocking_location,
    is_build_lock_stack,
    is_checkpoint_frame,
    is_data_frame,
)
from allranks.errors import RunFailed
from allranks.launch.monitor.hang_rules import (
    RULES,
    UNKNOWN,
    HangEvidence,
    HangVerdict,
    list_ranks,
    pending_call_text,
)
from allranks.launch.monitor.records import HangAlarm, HangReport, NodeEvidence, StalledRank, WaitingRank
from allranks.rundir.files import make_folder, write_json
from allranks.rundir.paths import RunDir
from allranks.utils.inputs import read_regular


def hang_message(verdict: HangVerdict, waiting: list[WaitingRank], alarm: HangAlarm, now: float) -> str:
    """Return the report as one paragraph."""
    silent = f"no progress for {now - alarm.since:.0f} s (limit {alarm.limit_s:g} s, {_alarm_place(alarm)})"
    if not verdict.stalled:
        first = waiting[0].where if waiting else "nowhere"
        if verdict.cause == "alone":
            return f"hang: {silent}; the only rank is in {first}"
        if verdict.cause == "outside":
            return (
                f"hang: {silent}; all ranks are in {first}, and none is in a collective: check what they wait for there"
            )
        if verdict.cause == "build":
            return (
                f"hang: {silent}; all ranks wait until another process has built a C++ extension of torch ({first}): if no compiler runs, one "
                "that was killed left its lock: delete the files named lock below TORCH_EXTENSIONS_DIR (by default ~/.cache/torch_extensions)"
            )
        if (other := next((w for w in waiting if w.where and w.where != first), None)) is not None:
            return (
                f"hang: {silent}; no rank is known to have stalled: rank {waiting[0].rank} is in {first}, rank {other.rank} in {other.where}: "
                "check whether these calls belong together, then the network and the GPUs"
            )
        return (
            f"hang: {silent}; all ranks wait in the same place ({first}) and none stalled: check the network and the GPUs rather than "
            "the program"
        )
    who = verdict.stalled[0]
    ranks = list_ranks([f.rank for f in verdict.stalled if f.rank is not None])
    hosts = ", ".join(dict.fromkeys(f.host for f in verdict.stalled if f.host))
    one = len(verdict.stalled) == 1
    it = "It" if one else f"Rank {who.rank}"
    text = f"hang: rank{'' if one else 's'} {ranks} on {hosts} stalled, {who.why if one else f'rank {who.rank}: {who.why}'}. {_location_text(it, who)}"
    for other in verdict.stalled[1:3]:
        if other.where not in (who.where, UNKNOWN):
            text += f"; rank {other.rank} in {other.where}"
    if waiting:
        first = waiting[0]
        count = f"{len(waiting)} other rank{'s wait' if len(waiting) > 1 else ' waits'}"
        text += f". {count}{' for it' if len(verdict.stalled) == 1 else ''}, rank {first.rank} in {first.where or first.call or 'an unknown place'}"
    return f"{text}; {silent}"


def _location_text(it: str, who: StalledRank) -> str:
    if who.where == UNKNOWN:
        return f"the position of {it} is unknown"
    state = f", {who.state}" if who.state and not who.why.endswith(who.state) else ""
    return f"{it} is in {who.where}{state}"


def _alarm_place(alarm: HangAlarm) -> str:
    part = f", {alarm.part}" if alarm.part else ""
    return f"{alarm.phase}{part}" + (f", step {alarm.step + 1}" if alarm.step is not None else "")


def node_notes(case: HangEvidence) -> list[str]:
    """Return other noteworthy observations about the nodes."""
    notes = []
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
    kind = _specific_kind(case, verdict)
    return HangReport(
        attempt=attempt,
        kind=kind,
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
    rank = case.ranks.get(verdict.stalled[0].rank if verdict.stalled[0].rank is not None else -1)
    if rank is None:
        return verdict.kind
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
        found = {e.node: e for e in evidence}
        for node in range(self._nodes):
            if node not in found and (kept := self._kept(node)) is not None:
                found[node] = kept
        report = analyze_hang(list(found.values()), self._hosts, alarm, self._attempt, time.time())
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
    rank = first.rank if first and first.rank is not None else 0
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
