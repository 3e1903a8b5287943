"""Detect the cause of a hang.

The detectors use watchdog timeouts of collectives, stack dumps (py-spy, faulthandler), flight-recorder dumps, what the
hang watch of `allranks run` reported, and Gloo's check of the sizes that ranks send.
"""

from __future__ import annotations

import re
from pathlib import PurePath

from msgspec import Struct

from allranks.analysis.diagnose.catalogue import CATALOGUE
from allranks.analysis.diagnose.causes.exceptions import own_place
from allranks.analysis.diagnose.patterns import CERTAIN, LIKELY, POSSIBLE
from allranks.analysis.diagnose.records import DiagnosisCase, LogSignal, ThreadStack
from allranks.analysis.flight_recorder import OpenCollective, RecordedCall, open_collectives
from allranks.analysis.stacks import (
    called_collective,
    foreground_frames,
    is_checkpoint_frame,
    is_data_frame,
    is_library_file,
    main_threads,
    thread_activity,
)
from allranks.utils.collectives import size_rule

EARLY_COLLECTIVES = 100  # after this many collectives the network is known to work
MAX_RANKS = 1 << 20
WHOLE_MODEL_ELEMENTS = 4_000_000_000  # output elements of one gather; the gather of one layer is smaller
_FIELD = {
    "seq": re.compile(r"SeqNum=(\d+)"),
    "op": re.compile(r"OpType=(\w+)"),
    "elements_in": re.compile(r"NumelIn=(\d+)"),
    "elements_out": re.compile(r"NumelOut=(\d+)"),
    "shape": re.compile(r"TensorShape=\[([\d, ]*)\]"),
}
_GROUP = re.compile(r"\[PG (?:ID )?\d+(?: PG GUID \w+)?")
_LOOSE_OPERATION = re.compile(r"^_?([A-Z][A-Z_]+)\b")


class TimedOutCollective(Struct, frozen=True):
    """A collective that timed out, as one rank reports it."""

    rank: int | None
    seq: int | None
    op: str | None
    size: str
    elements_in: int
    elements_out: int
    signal: LogSignal


def detect_collective_timeouts(case: DiagnosisCase) -> None:
    """Propose the cause of timeouts in collectives."""
    works = [_work(s, case.facts("work")) for s in case.facts("watchdog")]
    stuck = case.candidates.get("collective_hang")
    if stuck is None and not works:
        _first(case, works)
        return
    signals = [w.signal for w in works] or (stuck.signals if stuck else [])
    _mismatched_calls(case, works)
    _checkpoint(case, works, signals)
    _data(case, signals)
    _first(case, works)
    _two_groups(case, works)
    _never_called(case, works)
    _missing(case, works, signals)


def _work(signal: LogSignal, wrapped: list[LogSignal]) -> TimedOutCollective:
    """Return the collective that a report names, in its own line or, if that was wrapped, in one of the next lines."""
    after = [s for s in wrapped if s.file == signal.file and 0 < s.line - signal.line <= 3]
    text = signal.groups.get("work") or (after[0].groups["work"] if after else "") or signal.text
    fields = {name: m.group(1) for name, pattern in _FIELD.items() if (m := pattern.search(text))}
    if "op" not in fields and (m := _LOOSE_OPERATION.search(text)):
        fields["op"] = m.group(1)
    size = fields.get("elements_in") or fields.get("shape") or ""
    return TimedOutCollective(
        signal.rank,
        int(fields["seq"]) if "seq" in fields else None,
        fields.get("op"),
        size,
        int(fields.get("elements_in", 0)),
        int(fields.get("elements_out", 0)),
        signal,
    )


def _mismatched_calls(case: DiagnosisCase, works: list[TimedOutCollective]) -> None:
    """Detect ranks that wait at the same sequence number in different calls, or at different sequence numbers."""
    by_rank = {w.rank: w for w in works if w.rank is not None and w.seq is not None}
    if len(by_rank) < 2:
        return
    timeouts = list(by_rank.values())
    numbers, at = {w.seq for w in timeouts}, f"At collective {timeouts[0].seq}"
    behind = None
    if len(numbers) == 1 and len({w.op for w in timeouts}) > 1:
        ops = ", ".join(f"rank {w.rank}: {w.op}" for w in timeouts[:4])
        score, cause = 0.93, f"{at} the ranks are in different calls ({ops})."
    elif len(numbers) == 1 and (by_size := _sizes_by_rule(timeouts)):
        sizes = ", ".join(f"rank {w.rank}: {size}" for w, size in zip(timeouts[:4], by_size, strict=False))
        score, cause = 0.88, f"{at} the sizes differ between ranks ({sizes})."
    elif len(numbers) > 1 and len({(w.op, w.size) for w in timeouts}) > 1:
        told_in_order = sorted(timeouts, key=lambda w: w.seq or 0)
        places = ", ".join(f"rank {w.rank} at {w.seq} ({w.op})" for w in told_in_order[:4])
        score, cause, behind = 0.75, f"The ranks are at different collectives: {places}.", told_in_order[0].rank
    else:
        return
    candidate = case.propose("collective_mismatch", score, [w.signal for w in timeouts], cause=cause)
    candidate.rank = candidate.rank if behind is None else behind


def _sizes_by_rule(timeouts: list[TimedOutCollective]) -> list[str]:
    """Return each report's sizes, of inputs or else of outputs, if they must be equal and are not; else nothing."""
    rule = size_rule(timeouts[0].op or "")
    for required, sizes in (
        (rule is not None and rule.inputs, [w.size for w in timeouts]),
        (rule is not None and rule.outputs, [str(w.elements_out) for w in timeouts]),
    ):
        if required and len(set(sizes)) > 1:
            return sizes
    return []


def _checkpoint(case: DiagnosisCase, works: list[TimedOutCollective], signals: list[LogSignal]) -> None:
    """Detect a checkpoint from stack frames, the last messages before the timeout, or a gather as large as a model."""
    in_frames = [s for s in (*signals, *case.facts("exception")) if any(map(is_checkpoint_frame, s.frames))]
    in_frames += [
        s for s in case.facts("fr_frame") if is_checkpoint_frame(f"{s.groups['path']}:{s.groups['function']}")
    ]
    if in_frames:
        case.propose("checkpoint_collective", 0.85, in_frames)
        return
    if any(is_checkpoint_frame(f) for scan in case.scans for frames in scan.loose for f in frames):
        case.propose("checkpoint_collective", 0.78, signals[:3])
        return
    begun = [s for s in case.facts("saving") if not _ended(case, s) and any(_just_before(s, t) for t in signals)]
    if begun:
        case.propose("checkpoint_collective", LIKELY, [*begun, *signals[:2]])
        return
    huge = [w for w in works if w.elements_out >= WHOLE_MODEL_ELEMENTS and w.op and "GATHER" in w.op.upper()]
    if huge:
        candidate = case.propose("checkpoint_collective", POSSIBLE + 0.04, [w.signal for w in huge])
        candidate.cause = (
            f"The gather that did not finish has {huge[0].elements_out:,} output elements, more than one layer: most "
            "likely it gathers the whole model to save a checkpoint."
        )
        candidate.against.append(
            "the log does not show what the program was doing; a sharded layer of that size would look the same"
        )


def _ended(case: DiagnosisCase, begun: LogSignal) -> bool:
    later = [
        s for s in case.facts("saved") if s.file == begun.file and s.line > begun.line and "start" not in s.text.lower()
    ]
    scan = case.scans[begun.file]
    return bool(later) or (scan.last_progress is not None and scan.last_progress > begun.line)


def _just_before(begun: LogSignal, timeout: LogSignal) -> bool:
    return (
        begun.line <= timeout.line
        if begun.file == timeout.file
        else begun.time is None or timeout.time is None or begun.time <= timeout.time
    )


def _data(case: DiagnosisCase, signals: list[LogSignal]) -> None:
    waiting = [s for s in (*signals, *case.facts("exception")) if s.frames and is_data_frame(s.frames[-1])]
    if waiting:
        case.propose("dataloader_hang", 0.82, waiting)


def _first(case: DiagnosisCase, works: list[TimedOutCollective]) -> None:
    """Detect that no collective ever completed."""
    status = case.facts("pg_status")
    none_done = [s for s in status if int(s.groups["completed"]) <= 0 and int(s.groups["enqueued"]) >= 1]
    some_done = [s for s in status if int(s.groups["completed"]) > 0]
    first = [w.signal for w in works if w.seq == 1]
    later = [w for w in works if w.seq is not None and w.seq > 1]
    if (first or none_done) and not later and not some_done:
        score = 0.72 if first and none_done else 0.68 if works or case.candidates.get("collective_hang") else POSSIBLE
        candidate = case.propose("first_collective_failed", score, [*first, *none_done])
        op = next((f" ({w.op})" for w in works if w.op), "")
        candidate.cause = (
            f"The very first collective{op} never finished on any rank that reported. Usual reasons: GPU peer-to-peer "
            "copies that IOMMU or PCIe ACS break, a network path that does not transfer data, a rank that is still in "
            "its setup, or one bad node."
        )


def _two_groups(case: DiagnosisCase, works: list[TimedOutCollective]) -> None:
    """Detect crossed calls: different collectives of one rank that time out together belong to two groups."""
    by_rank: dict[int, list[TimedOutCollective]] = {}
    for work in works:
        if work.rank is not None and work.seq is not None:
            by_rank.setdefault(work.rank, []).append(work)
    for rank, own in by_rank.items():
        if len({(w.seq, w.op) for w in own}) > 1 and len({w.op for w in own}) > 1:
            candidate = case.propose("collective_mismatch", 0.68, [w.signal for w in own[:3]])
            candidate.rank = rank
            named = ", ".join(f"{w.op} {w.seq}" for w in own[:3])
            candidate.cause = (
                f"Rank {rank} waits in several groups at once ({named}): ranks that call the collectives of two groups "
                "in different order wait for each other."
            )
            return


def _never_called(case: DiagnosisCase, works: list[TimedOutCollective]) -> None:
    """Detect ranks that had completed all their calls and had not made the call in which others of the group wait."""
    waiting = {w.rank for w in works}
    for group in sorted({g for w in works if (g := _group(w.signal))}):
        stuck = [w for w in works if w.seq is not None and _group(w.signal) == group]
        if not stuck:
            continue
        first = min(stuck, key=lambda w: w.seq or 0)
        idle = {
            s.rank: s
            for s in case.facts("pg_status")
            if s.rank is not None and s.rank not in waiting and _group(s) == group
            if s.groups["enqueued"] == s.groups["completed"] and 0 < int(s.groups["enqueued"]) < (first.seq or 0)
        }
        if idle:
            candidate = case.propose("collective_mismatch", 0.75, [*(w.signal for w in stuck[:3]), *idle.values()])
            candidate.rank = min(idle)
            candidate.cause = (
                f"Rank {first.rank} waits in collective {first.seq} ({first.op}) of its group; rank "
                f"{', '.join(str(r) for r in sorted(idle)[:8])} had completed all earlier calls, up to "
                f"{next(iter(idle.values())).groups['enqueued']}, and had not made this one."
            )
            candidate.against.append("a rank that is only delayed by data or a checkpoint looks the same")
            return


def _group(signal: LogSignal) -> str | None:
    """Return the process group in a report, as torch numbers it."""
    match = _GROUP.search(signal.text)
    return match.group() if match else None


def _missing(case: DiagnosisCase, works: list[TimedOutCollective], signals: list[LogSignal]) -> None:
    """Report ranks of the group without a timeout report. A rank that dumped on another's request may have waited."""
    reporting = {w.rank for w in works if w.rank is not None}
    candidate = case.propose("collective_hang", POSSIBLE, signals)
    size = _group_size(works) or (case.world_size if len(case.scans) > 1 else None)
    later = all(w.seq is None or w.seq > EARLY_COLLECTIVES for w in works)
    if size and reporting and len(reporting) < size <= MAX_RANKS and later and not case.facts("told_to_dump"):
        absent = sorted(set(range(size)) - reporting) if size == case.world_size else []
        _report_missing(case, size, reporting, absent, signals)
    if len(reporting) > 1:
        candidate.against.append("calls and sizes of the ranks that reported agree, so their logs show no mismatch")


def _report_missing(
    case: DiagnosisCase, size: int, reporting: set[int], absent: list[int], signals: list[LogSignal]
) -> None:
    if len(reporting) * 2 <= size and size > 2:
        return  # half of the group or more did not report: the logs are incomplete
    missing = case.propose("collective_mismatch", POSSIBLE + 0.02, signals)
    if absent:
        missing.rank = absent[0]
        who = f"rank {', '.join(str(r) for r in absent[:8])} did not report and had not entered it: check it first"
    else:
        missing.elsewhere = True
        who = (
            "the other rank had not entered it" if size - len(reporting) == 1 else "the other ranks had not entered it"
        )
    missing.cause = f"{len(reporting)} of {size} ranks of the group waited in this collective until the timeout; {who}."
    missing.against.append("this is not valid if the logs do not include all ranks of the group")


def _group_size(works: list[TimedOutCollective]) -> int | None:
    """Return the number of ranks in the group, from the ratio of output to input size of a gather or scatter."""
    for work in works:
        small, large = sorted((work.elements_in, work.elements_out))
        if work.op and ("GATHER" in work.op or "SCATTER" in work.op) and small and large % small == 0 and large > small:
            return large // small
    return None


class ProcessActivity(Struct, frozen=True):
    """The activity of one process: collective, checkpoint, data or other, from its main thread."""

    doing: str
    rank: int | None
    host: str | None
    where: str
    signal: LogSignal


def detect_rank_outside_collective(case: DiagnosisCase) -> None:
    """Find the one rank outside the collective in which most ranks wait."""
    standing = [_activity(case, scan.file, stack) for scan in case.scans for stack in main_threads(scan.stacks)]
    waiting = [s for s in standing if s.doing == "collective"]
    others = [s for s in standing if s.doing != "collective"]
    if not waiting or len(others) > max(1, len(waiting)):
        if standing and all(s.doing == "checkpoint" for s in standing):
            case.propose("checkpoint_collective", 0.7, [s.signal for s in standing[:4]])
        return
    if not others:
        places = {s.where for s in waiting}
        if len(places) > 1:
            candidate = case.propose("collective_mismatch", 0.7, [s.signal for s in waiting[:4]])
            candidate.cause = (
                "All ranks wait in collectives, but not in the same one: "
                + "; ".join(f"{_name(s)} in {s.where}" for s in waiting[:4])
                + "."
            )
        else:
            case.propose("collective_hang", 0.62, [s.signal for s in waiting[:4]])
        return
    out = others[0]
    kind = {"data": "dataloader_hang", "checkpoint": "checkpoint_collective"}.get(out.doing, "collective_mismatch")
    candidate = case.propose(kind, 0.88, [o.signal for o in others[:3]] + [w.signal for w in waiting[:2]])
    candidate.rank, candidate.host = out.rank, out.host
    candidate.cause = (
        f"{len(waiting)} of {len(standing)} processes wait in a collective; {_name(out)} is in {out.where} instead."
    )


def _name(standing: ProcessActivity) -> str:
    return (
        f"rank {standing.rank}"
        if standing.rank is not None
        else f"the process in {PurePath(standing.signal.groups['file']).name}"
    )


def _activity(case: DiagnosisCase, file: int, stack: ThreadStack) -> ProcessActivity:
    near = foreground_frames(stack.frames) or stack.frames
    doing = thread_activity(stack.frames)

    def is_own(frame: str) -> bool:
        installed = "site-packages" in frame or "lib/python" in frame or "/" not in frame
        return not installed or frame.endswith((":main", ":train"))

    own = next(filter(is_own, near), near[0])
    scan = case.scans[file]
    rank = stack.rank if stack.rank is not None else case.file_rank(file)
    host = (
        stack.host
        or (scan.hosts[0] if len(scan.hosts) == 1 else None)
        or (case.rank_hosts.get(rank) if rank is not None else None)
    )
    signal = LogSignal(
        kind="fact",
        owner="stack_head",
        weight=0.6,
        file=file,
        line=stack.line,
        rank=rank,
        host=host,
        text=f"{stack.head.strip()} {near[0]} ... {own}",
        groups={"file": case.names[file]},
    )
    return ProcessActivity(doing, rank, host, own.replace(":", ", "), signal)


def detect_diverging_calls(case: DiagnosisCase) -> None:
    """Propose the cause of a hang from the recorded calls of each rank, by group."""
    dumps = {
        f.rank: (scan.file, f.calls) for scan in case.scans if (f := scan.flight) is not None and f.rank is not None
    }
    for collective in open_collectives({rank: calls for rank, (_, calls) in dumps.items()}):
        own = {rank: (file, [c for c in calls if c.group == collective.group]) for rank, (file, calls) in dumps.items()}
        last = {rank: (file, max(calls, key=lambda c: c.seq)) for rank, (file, calls) in own.items() if calls}
        _first_open(case, collective, last, alone=len(dumps) < 2)


def _first_open(
    case: DiagnosisCase,
    collective: OpenCollective[RecordedCall],
    last: dict[int, tuple[int, RecordedCall]],
    *,
    alone: bool,
) -> None:
    """Propose the cause of one group.

    Args:
        last: by rank, the number of the file and the last call in the group.
        alone: only one dump was read.
    """
    calls = dict(sorted(collective.calls.items()))
    shown = [_signal(case, last[rank][0], rank, c) for rank, c in list(calls.items())[:4]]
    checkpoint = any(is_checkpoint_frame(f) for c in calls.values() for f in c.frames)
    if collective.differs:
        open_calls = ", ".join(f"rank {rank}: {collective.describe(c)}{_at(c)}" for rank, c in list(calls.items())[:4])
        proposed = case.propose("collective_mismatch", 0.95, shown)
        proposed.cause = (
            f"At collective {collective.seq} of group {collective.group} the ranks make different calls ({open_calls})."
        )
        proposed.rank = collective.rarest[0]
    elif collective.absent:
        _absent_ranks(case, collective, last, shown, checkpoint=checkpoint)
    elif collective.seq <= 1:
        case.propose("first_collective_failed", 0.8, shown)
    elif checkpoint:
        case.propose("checkpoint_collective", 0.8, shown)
    else:
        proposed = case.propose("collective_hang", 0.66, shown)
        if not alone:
            proposed.cause = (
                f"All {len(calls)} ranks made the same call (collective {collective.seq} of group {collective.group}) "
                "and it did not finish: check the network and the GPUs rather than the program."
            )


def _absent_ranks(
    case: DiagnosisCase,
    collective: OpenCollective[RecordedCall],
    last: dict[int, tuple[int, RecordedCall]],
    shown: list[LogSignal],
    *,
    checkpoint: bool,
) -> None:
    rank = collective.absent[0]
    file, call = last[rank]
    proposed = case.propose(
        "checkpoint_collective" if checkpoint else "collective_mismatch",
        0.93,
        [_signal(case, file, rank, call), *shown],
    )
    proposed.rank = rank
    named = ", ".join(str(r) for r in collective.absent[:8])
    proposed.cause = (
        f"Rank {named} never called collective {collective.seq} of group {collective.group}, in which "
        f"{len(last) - len(collective.absent)} others wait; the last call of rank {rank} was {call.op}{_at(call)}."
    )


def _at(call: RecordedCall) -> str:
    own = next((f for f in call.frames if not is_library_file(f)), None)
    return f" in {own}" if own else ""


def _signal(case: DiagnosisCase, file: int, rank: int, call: RecordedCall) -> LogSignal:
    return LogSignal(
        kind="fact",
        owner="flight",
        weight=0.8,
        file=file,
        line=1,
        rank=rank,
        host=case.rank_hosts.get(rank),
        text=f"rank {rank}: collective {call.seq} {call.op} {call.sizes} {call.state}{_at(call)}",
    )


MONITOR_SCORE = 0.97
OUTSIDE = (
    "a rank stalled outside of collectives, the others wait for it",
    (
        "Look at the line in which that rank is: a sleep, a lock, a loop that does not end, slow storage, a "
        "subprocess, or work that only this rank does."
    ),
)
_SIGKILL = re.compile(r"exit ?code\S*\s*:?\s*-9|SIGKILL|killed", re.IGNORECASE)
NO_RANK_SCORE = 0.7  # all ranks waited in the same place


def detect_monitored_hang(case: DiagnosisCase) -> None:
    """Propose the cause that a hang event reports. Other detectors read the stacks and calls recorded with it."""
    for signal in case.facts("event_hang"):
        fields = signal.groups
        kind = fields["kind"] if fields["kind"] in CATALOGUE else "collective_hang"
        named = bool(fields.get("ranks"))
        candidate = case.propose(kind, MONITOR_SCORE if named else NO_RANK_SCORE, [signal])
        candidate.cause = fields["message"].replace('\\"', '"').replace("\\\\", "\\")[:800].rstrip(".") + "."
        if named and is_outside(candidate.cause):
            candidate.title, candidate.fix = OUTSIDE
        if named:
            candidate.rank = int(fields["ranks"].split(",")[0])
            candidate.host = fields.get("host") or candidate.host
        candidate.next_test = (
            "read the stacks and the calls of all ranks in the folder hang/ of the run; run again, and check whether "
            "the same rank or the same host stalls"
        )
        for name in ("host_oom", "rank_died", "peer_died_first"):  # SIGKILLs that the agents sent after the hang
            killed = case.candidates.get(name)
            if killed is not None and killed.signals and all(_SIGKILL.search(s.text) for s in killed.signals):
                killed.explained = True
                case.own_kills |= {(s.file, s.line) for s in killed.signals}


_NEVER_JOINED = re.compile(r"it never joined collective .*?\. It is in (?P<where>[^;]*?)(?:\. |; |$)")


def is_outside(message: str) -> bool:
    """Return whether the hang watch found the stalled rank in no collective, so that its own work is the cause."""
    match = _NEVER_JOINED.search(message)
    return match is not None and "torch/distributed/" not in match["where"]


def detect_size_mismatch(case: DiagnosisCase) -> None:
    """Say what Gloo's error about sizes shows, and what not: the aborting rank received more than it expected."""
    candidate = case.candidates.get("collective_mismatch")
    if candidate is None or case.facts("event_hang"):
        return
    sizes = next((m for s in candidate.signals if (m := _GLOO_SIZES.search(s.text))), None)
    if sizes is None:
        return
    candidate.cause = (
        f"The ranks are in different collectives: a rank received {sizes['received']} bytes in a call in which it "
        f"expected {sizes['expected']}. A branch on the rank, a call on one rank alone, an early stop on only some "
        "ranks, or an uneven number of batches."
    )
    candidate.against.append(
        "the named rank is the one that received more than it expected; the call that should not be there may be "
        "another rank's: compare the lines in which the ranks were (the message at the end of the run, and the end of "
        "each rank's log)"
    )


_GLOO_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (?P<received>\d+) vs (?P<expected>\d+)")


_WAITED = re.compile(r"[Tt]imed out waiting|[Tt]imed? ?out after \d+ ?ms|Application timeout")


def detect_calls_in_tracebacks(case: DiagnosisCase) -> None:
    """Detect ranks whose collectives timed out in different calls, from their tracebacks: Gloo itself names no call."""
    waited = {}
    for signal in case.facts("exception"):
        call = called_collective(signal.frames[::-1])
        if signal.rank is not None and call and _WAITED.search(signal.groups.get("message", "")):
            waited.setdefault(signal.rank, (call, own_place(signal), signal))
    if len({call for call, _, _ in waited.values()}) < 2:
        return
    shown = sorted(waited.items())[:4]
    candidate = case.propose("collective_mismatch", 0.93, [signal for _, (_, _, signal) in shown])
    calls = "; ".join(f"rank {rank} in {call}" + (f" ({place})" if place else "") for rank, (call, place, _) in shown)
    candidate.cause = (
        f"The ranks waited in different collectives until the timeout: {calls}. All ranks of a group must make the "
        "same calls in the same order."
    )


_AGENT_NODE = re.compile(r"The node '(?P<node>[^']+?)(?:_\d+_\d+)?' has failed to send a keep-alive")
_REJOIN = re.compile(r"elastic/rendezvous/\w+\.py:next_rendezvous$")


def detect_failed_restart(case: DiagnosisCase) -> None:
    """Detect an elastic restart that failed by itself after a peer was lost: the surviving ranks are only witnesses."""
    failed = [s for s in case.facts("exception") if s.frames and _REJOIN.search(s.frames[-1])]
    lost = [(s, m) for s in case.signals if (m := _AGENT_NODE.search(s.text))]
    timed_out = [s for s in case.facts("exception") if _WAITED.search(s.groups.get("message", ""))]
    if not failed or not (lost or timed_out or "peer_died_first" in case.candidates):
        return
    for name in ("collective_hang", "rendezvous_unreachable", "application_error"):
        if name in case.candidates:
            case.candidates[name].explained = True
    candidate = case.propose("peer_died_first", 0.9, [*(s for s, _ in lost[:1]), *failed[:1], *timed_out[:1]])
    candidate.title = "a peer was lost, and the elastic restart then failed by itself"
    candidate.elsewhere = True
    if lost:
        lost[0][0].weight = CERTAIN  # it names the node
        candidate.rank, candidate.host = lost[0][0].rank, lost[0][1]["node"]
    who = f"The agent on {candidate.host}" if candidate.host else "A peer"
    candidate.cause = (
        f"{who} was lost. The other ranks only report that they waited for it, and torchrun's attempt to form the "
        f"group again failed in next_rendezvous ({failed[0].groups['type']}), which is a consequence."
    )
    candidate.fix = (
        "Find out why that node was lost, then start the whole job again: the rendezvous cannot be joined any more."
    )
    candidate.next_test = "read the log of that node, sacct and its kernel log at the time of the first line"


_DEVICE_WAIT = re.compile(
    r"\s(?P<where>(?:nfs|rpc|ldlm|osc|ptlrpc|cl_sync|ceph|fuse|request_wait|cxi|fhgfs)\w*)", re.IGNORECASE
)


def detect_stalled_storage(case: DiagnosisCase) -> None:
    """Say which processes wait for a file system, and since which save."""
    candidate = case.candidates.get("storage_stalled")
    if candidate is None:
        return
    lines = [s for s in candidate.signals if _DEVICE_WAIT.search(s.text)]
    calls = sorted({m["where"] for s in lines if (m := _DEVICE_WAIT.search(s.text))})
    begun = [s for s in case.facts("saving") if lines and s.file == lines[0].file and s.line < lines[0].line]
    since = f", since {begun[-1].text[:120]!r} (line {begun[-1].line})" if begun else ""
    candidate.signals = [*begun[-1:], *candidate.signals]
    if lines:
        candidate.cause = (
            "Processes wait in uninterruptible sleep (state D) in calls of a network file system "
            f"({', '.join(calls[:4])}){since}. They cannot go on, nor be killed, until its server answers."
        )


RAS_SILENT = (
    "a process no longer answers NCCL's RAS",
    "Look at that process on its node: it has exited (see its log), is stopped, or the node cannot be reached.",
)
RAS_SCORES = {"dead": LIKELY, "missing": 0.66, "behind": POSSIBLE + 0.05}


def detect_ras_report(case: DiagnosisCase) -> None:
    """Propose a cause from the last report of NCCL's RAS; one of ranks that are an operation apart is a snapshot."""
    for scan in case.scans:
        latest, before = next(reversed(scan.ras), []), {f.text for report in scan.ras[:-1] for f in report}
        for finding in latest:
            lasts = finding.text in before  # the numbers of operations are the same as in an earlier report
            if finding.kind not in RAS_SCORES or (finding.kind == "behind" and finding.apart < 2 and not lasts):
                continue
            name = "collective_mismatch" if finding.kind == "behind" else "rank_died"
            alone = name not in case.candidates
            host = next((r.host for r in finding.ranks if r.host), None)
            rank = next((r.rank for r in finding.ranks), None) if finding.largest else None
            signal = LogSignal(
                kind="fact", owner="ras", weight=0.8, file=scan.file, line=finding.line, text=finding.text,
                rank=rank, host=host,
            )  # fmt: skip
            candidate = case.propose(name, LIKELY if lasts else RAS_SCORES[finding.kind], [signal])
            candidate.cause = candidate.cause or f"NCCL's RAS reports: {finding.text}."
            if finding.kind == "behind" and not lasts:
                candidate.against.append("a report on a job that makes progress shows the same: repeat it")
            if alone:
                candidate.title, candidate.fix = OUTSIDE if finding.kind == "behind" else RAS_SILENT


def mention_dumps(case: DiagnosisCase) -> None:
    """Name the flight recorder's dumps that a watchdog announces and that were not given."""
    places = list(dict.fromkeys(s.groups["path"].rstrip(".,;'\"") for s in case.facts("dump_path")))
    if not places or any(scan.flight for scan in case.scans):
        return
    for name in ("collective_hang", "collective_mismatch", "checkpoint_collective", "first_collective_failed"):
        if candidate := case.candidates.get(name):
            test = candidate.next_test or CATALOGUE[name].next_test
            candidate.next_test = (
                f"give diagnose the flight recorder's dumps of all ranks, too ({', '.join(places[:2])}); {test}"
            )
