"""What ranks, nodes, launcher and scheduler said, in one order of time."""

from __future__ import annotations

from datetime import UTC, datetime

from allranks.diagnose.catalogue import CATALOGUE
from allranks.diagnose.catalogue.entry import HINTS
from allranks.diagnose.judge.case import Case
from allranks.diagnose.lines import YEAR_KNOWN, comparable
from allranks.diagnose.secrets import clean
from allranks.diagnose.signals import Signal

MOST = 12
TEXT = 140  # characters of a line
_ENDS = ("exception", "event_error", "event_hang", "srun_exit", "step_over", "watchdog", "told_to_dump")


def tell(case: Case) -> list[str]:
    """At most `MOST` lines, the first of each kind from each rank or host; only what has a time that compares.

    Clocks of nodes may differ: a cause then stands after its echo here, but not in the order of findings.
    """
    told_of = [s for s in case.signals if _tells(s) and (s.file, s.line) not in case.own_kills]
    timed = [s for s in [*told_of, *case.quiet_ends] if s.time is not None]
    if not timed:
        return []
    timed.sort(key=lambda s: (s.time or 0.0, s.file, s.line))
    era = [s for s in timed if comparable(s.time or 0.0, timed[-1].time or 0.0)]
    seen: set[object] = set()
    told: list[str] = []
    kinds: dict[str, int] = {}
    for signal in era:
        who, where = (signal.owner, signal.rank, case.host_of(signal)), (signal.file, signal.line)
        if who in seen or where in seen or kinds.get(signal.owner, 0) >= 3 or len(told) >= MOST:
            continue
        seen |= {who, where}
        kinds[signal.owner] = kinds.get(signal.owner, 0) + 1
        told.append(_line(case, signal))
    return told


def _tells(signal: Signal) -> bool:
    if signal.owner == "event_error":
        return '"echo":true' not in signal.text
    return (signal.kind == "class" and signal.weight > HINTS) or signal.owner in _ENDS


def _line(case: Case, signal: Signal) -> str:
    moment = datetime.fromtimestamp(signal.time or 0.0, UTC)
    when = moment.strftime("%Y-%m-%d %H:%M:%S" if (signal.time or 0) > YEAR_KNOWN else "%m-%d %H:%M:%S")
    rank = f"rank {signal.rank}" if signal.rank is not None else ""
    host = signal.host or (case.rank_hosts.get(signal.rank) if signal.rank is not None else None) or ""
    who = " on ".join(part for part in (rank, host) if part) or case.names[signal.file]
    said = {
        "event_error": lambda g: f"{g['type']}: {g['message']}",
        "event_hang": lambda g: g["message"],
        "rank_end": lambda g: f"ended with exit code {g['code']}",
    }.get(signal.owner, lambda _: signal.text)(signal.groups)
    what = CATALOGUE[signal.owner].title if signal.owner in CATALOGUE else clean(said)[:TEXT]
    return f"{when}  {who}: {what}"
