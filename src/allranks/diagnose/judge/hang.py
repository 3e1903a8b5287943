"""Collectives that timed out: which of the possible causes the ranks' own words speak for."""

from __future__ import annotations

import re

from msgspec import Struct

from allranks.diagnose.catalogue.entry import FITS, SHOWS
from allranks.diagnose.judge.case import Case
from allranks.diagnose.signals import Signal

EARLY = 100  # collectives; after so many the network had shown that it carries them
MOST_RANKS = 1 << 20
WHOLE_MODEL = 1_000_000_000  # elements that one gather delivers; a layer's is smaller
_FIELD = {
    "seq": re.compile(r"SeqNum=(\d+)"),
    "op": re.compile(r"OpType=(\w+)"),
    "elements_in": re.compile(r"NumelIn=(\d+)"),
    "elements_out": re.compile(r"NumelOut=(\d+)"),
    "shape": re.compile(r"TensorShape=\[([\d, ]*)\]"),
}
_GROUP = re.compile(r"\[PG (?:ID )?\d+(?: PG GUID \w+)?")
_LOOSE = {"op": re.compile(r"^_?([A-Z][A-Z_]+)\b"), "elements_out": re.compile(r"NumelOut=(\d+)")}
_CHECKPOINT = re.compile(
    r"checkpoint|state_dict|save_pretrained|save_model|consolidat|_save_|:save\b|:_?load_checkpoint|full_params",
    re.IGNORECASE,
)
_LOADER = re.compile(r"utils/data/|_next_data|_try_get_data|dataloader", re.IGNORECASE)


class Work(Struct, frozen=True):
    """A collective that did not end, as one rank tells it."""

    rank: int | None
    seq: int | None
    op: str | None
    size: str
    elements_in: int
    elements_out: int
    signal: Signal


def decide(case: Case) -> None:
    """Proposes the cause of timeouts in collectives."""
    works = [_work(s, case.facts("work")) for s in case.facts("watchdog")]
    stuck = case.candidates.get("collective_hang")
    if stuck is None and not works:
        _first(case, works)
        return
    signals = [w.signal for w in works] or (stuck.signals if stuck else [])
    _unlike(case, works)
    _checkpoint(case, works, signals)
    _data(case, signals)
    _first(case, works)
    _two_groups(case, works)
    _never_called(case, works)
    _missing(case, works, signals)


def _work(signal: Signal, wrapped: list[Signal]) -> Work:
    """The collective that a report names, in its own line or, where that is wrapped, in one of the next."""
    after = [s for s in wrapped if s.file == signal.file and 0 < s.line - signal.line <= 3]
    text = signal.groups.get("work") or (after[0].groups["work"] if after else "") or signal.text
    found = {name: m.group(1) for name, pattern in _FIELD.items() if (m := pattern.search(text))}
    for name, pattern in _LOOSE.items():
        if name not in found and (m := pattern.search(text)):
            found[name] = m.group(1)
    size = found.get("elements_in") or found.get("shape") or ""
    return Work(
        signal.rank,
        int(found["seq"]) if "seq" in found else None,
        found.get("op"),
        size,
        int(found.get("elements_in", 0)),
        int(found.get("elements_out", 0)),
        signal,
    )


def _unlike(case: Case, works: list[Work]) -> None:
    """Ranks that stand at the same number in unlike calls, or at different numbers."""
    by_rank = {w.rank: w for w in works if w.rank is not None and w.seq is not None}
    if len(by_rank) < 2:
        return
    told = list(by_rank.values())
    numbers = {w.seq for w in told}
    shown = [w.signal for w in told]
    if len(numbers) == 1 and len({w.op for w in told}) > 1:
        ops = ", ".join(f"rank {w.rank}: {w.op}" for w in told[:4])
        case.propose(
            "collective_mismatch",
            0.93,
            shown,
            cause=f"At collective {told[0].seq} the ranks are in different calls ({ops}).",
        )
    elif (
        len(numbers) == 1
        and len({w.size for w in told}) > 1
        and told[0].op not in ("ALLGATHER", "COALESCED", "ALLTOALL")
    ):
        sizes = ", ".join(f"rank {w.rank}: {w.size}" for w in told[:4])
        case.propose(
            "collective_mismatch",
            0.88,
            shown,
            cause=f"At collective {told[0].seq} the ranks bring different sizes ({sizes}).",
        )
    elif len(numbers) > 1 and len({(w.op, w.size) for w in told}) > 1:
        at = ", ".join(f"rank {w.rank} at {w.seq} ({w.op})" for w in sorted(told, key=lambda w: w.seq or 0)[:4])
        behind = min(told, key=lambda w: w.seq or 0)
        found = case.propose(
            "collective_mismatch", 0.75, shown, cause=f"The ranks stand at different collectives: {at}."
        )
        found.rank = behind.rank


def _checkpoint(case: Case, works: list[Work], signals: list[Signal]) -> None:
    """Frames or the last words before the timeout speak of a checkpoint, or the gather is as large as a model."""
    in_frames = [s for s in (*signals, *case.facts("exception")) if any(_CHECKPOINT.search(f) for f in s.frames)]
    in_frames += [s for s in case.facts("fr_frame") if _CHECKPOINT.search(f"{s.groups['path']}:{s.groups['function']}")]
    if in_frames:
        case.propose("checkpoint_collective", 0.85, in_frames)
        return
    if any(_CHECKPOINT.search(f) for scan in case.scans for frames in scan.loose for f in frames):
        case.propose("checkpoint_collective", 0.78, signals[:3])
        return
    begun = [s for s in case.facts("saving") if not _ended(case, s) and any(_just_before(s, t) for t in signals)]
    if begun:
        case.propose("checkpoint_collective", SHOWS, [*begun, *signals[:2]])
        return
    huge = [w for w in works if w.elements_out >= WHOLE_MODEL and w.op and "GATHER" in w.op.upper()]
    if huge:
        found = case.propose("checkpoint_collective", FITS + 0.04, [w.signal for w in huge])
        found.cause = (
            f"The gather that did not end delivers {huge[0].elements_out:,} elements, more than a layer's: most likely the whole model, "
            "as when a checkpoint is saved."
        )
        found.against.append(
            "the log does not show what the program was doing; a sharded layer of that size would look the same"
        )


def _ended(case: Case, begun: Signal) -> bool:
    later = [
        s for s in case.facts("saved") if s.file == begun.file and s.line > begun.line and "start" not in s.text.lower()
    ]
    scan = case.scans[begun.file]
    return bool(later) or (scan.last_progress is not None and scan.last_progress > begun.line)


def _just_before(begun: Signal, timeout: Signal) -> bool:
    return (
        begun.line <= timeout.line
        if begun.file == timeout.file
        else begun.time is None or timeout.time is None or begun.time <= timeout.time
    )


def _data(case: Case, signals: list[Signal]) -> None:
    waiting = [s for s in (*signals, *case.facts("exception")) if s.frames and _LOADER.search(s.frames[-1])]
    if waiting:
        case.propose("dataloader_hang", 0.82, waiting)


def _first(case: Case, works: list[Work]) -> None:
    """Nothing had ever completed."""
    status = case.facts("pg_status")
    none_done = [s for s in status if int(s.groups["completed"]) <= 0 and int(s.groups["enqueued"]) >= 1]
    some_done = [s for s in status if int(s.groups["completed"]) > 0]
    first = [w.signal for w in works if w.seq == 1]
    later = [w for w in works if w.seq is not None and w.seq > 1]
    if (first or none_done) and not later and not some_done:
        score = 0.72 if first and none_done else 0.68 if works or case.candidates.get("collective_hang") else FITS
        found = case.propose("first_collective_failed", score, [*first, *none_done])
        op = next((f" ({w.op})" for w in works if w.op), "")
        found.cause = (
            f"The very first collective{op} never finished, on any rank that reported. Usual reasons: GPU peer-to-peer copies that IOMMU or PCIe ACS "
            "break, a network path that does not carry data, a rank that is still busy setting up, or one bad node."
        )


def _two_groups(case: Case, works: list[Work]) -> None:
    """Unlike collectives of one rank that time out together belong to two groups, whose calls crossed."""
    by_rank: dict[int, list[Work]] = {}
    for work in works:
        if work.rank is not None and work.seq is not None:
            by_rank.setdefault(work.rank, []).append(work)
    for rank, own in by_rank.items():
        if len({(w.seq, w.op) for w in own}) > 1 and len({w.op for w in own}) > 1:
            found = case.propose("collective_mismatch", 0.68, [w.signal for w in own[:3]])
            found.rank = rank
            named = ", ".join(f"{w.op} {w.seq}" for w in own[:3])
            found.cause = (
                f"Rank {rank} waits in several groups at once ({named}): ranks that enter the collectives of two groups in unlike "
                "order wait for each other."
            )
            return


def _never_called(case: Case, works: list[Work]) -> None:
    """Ranks of the same group that had finished all that they had called, and had not called the one in which others wait."""
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
            found = case.propose("collective_mismatch", 0.75, [*(w.signal for w in stuck[:3]), *idle.values()])
            found.rank = min(idle)
            found.cause = (
                f"Rank {first.rank} waits in collective {first.seq} ({first.op}) of its group; rank {', '.join(str(r) for r in sorted(idle)[:8])} "
                f"had finished all that they had called, up to {next(iter(idle.values())).groups['enqueued']}, and had not called it."
            )
            found.against.append("a rank that is only late, with data or a checkpoint, looks the same")
            return


def _group(signal: Signal) -> str | None:
    """The process group that a report names, as torch numbers it."""
    match = _GROUP.search(signal.text)
    return match.group() if match else None


def _missing(case: Case, works: list[Work], signals: list[Signal]) -> None:
    """Who of the group did not report. Ranks that were told to dump by another may have been in it all the same."""
    told = {w.rank for w in works if w.rank is not None}
    found = case.propose("collective_hang", FITS, signals)
    size = _group_size(works) or (case.world_size if len(case.scans) > 1 else None)
    later = all(w.seq is None or w.seq > EARLY for w in works)
    if size and told and len(told) < size <= MOST_RANKS and later and not case.facts("told_to_dump"):
        absent = sorted(set(range(size)) - told) if size == case.world_size else []
        _blame_missing(case, size, told, absent, signals)
    if len(told) > 1:
        found.against.append("calls and sizes of the ranks that reported agree, so their logs show no mismatch")


def _blame_missing(case: Case, size: int, told: set[int], absent: list[int], signals: list[Signal]) -> None:
    if len(told) * 2 <= size and size > 2:
        return  # half or more are silent: these logs are a part only
    missing = case.propose("collective_mismatch", FITS + 0.02, signals)
    if absent:
        missing.rank = absent[0]
        who = f"rank {', '.join(str(r) for r in absent[:8])} did not and is the one to look at: it was not in it"
    else:
        missing.elsewhere = True
        who = "the other one was not in it" if size - len(told) == 1 else "the others were not in it"
    missing.cause = f"{len(told)} of {size} ranks of the group waited in this collective until its limit passed; {who}."
    missing.against.append("if these logs do not hold all ranks of the group, that some are silent says nothing")


def _group_size(works: list[Work]) -> int | None:
    """The number of ranks in the group, by what a gather or a scatter does to the size."""
    for work in works:
        small, large = sorted((work.elements_in, work.elements_out))
        if work.op and ("GATHER" in work.op or "SCATTER" in work.op) and small and large % small == 0 and large > small:
            return large // small
    return None
