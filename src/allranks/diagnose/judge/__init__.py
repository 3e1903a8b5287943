"""From signals to findings: every decider looks at the case, then causes are told from their echoes and ranked."""

from __future__ import annotations

from collections.abc import Callable

from allranks.diagnose.benign import BENIGN
from allranks.diagnose.catalogue import CATALOGUE
from allranks.diagnose.catalogue.entry import HINTS
from allranks.diagnose.judge import ends, flight, hang, memory, network, peers, program, stacks, watched
from allranks.diagnose.judge.case import Candidate, Case, in_order
from allranks.diagnose.judge.ends import FirstEnd, first_end
from allranks.diagnose.judge.ranking import rank
from allranks.diagnose.records import Benign, Evidence, Finding
from allranks.diagnose.secrets import clean
from allranks.diagnose.signals import Signal

MAX_EVIDENCE = 5
# Reported by every rank alike: that one wrote first says nothing about it.
_OF_ALL = frozenset({"collective_hang", "first_collective_failed", "peer_died_first", "checkpoint_collective"})
# Each looks at the whole case and proposes or weighs candidates; order matters only where one reads another's.
DECIDERS: tuple[Callable[[Case], None], ...] = (
    memory.decide,
    network.decide,
    hang.decide,
    stacks.decide,
    flight.decide,
    program.decide,
    ends.decide,
    peers.decide,
    watched.decide,
)


def judge(case: Case) -> tuple[list[Finding], list[Benign]]:
    """The findings, most likely root cause first, and the harmless messages."""
    recovered = _collect(case)
    for decide in DECIDERS:
        decide(case)
    end = first_end(case)
    findings = [_finding(case, candidate, end) for candidate in rank(case)]
    return findings, _benign(case, recovered)


def _collect(case: Case) -> list[Signal]:
    """Candidates from messages that name a class; returns warnings that the job survived."""
    recovered: list[Signal] = []
    by_class: dict[str, list[Signal]] = {}
    for signal in case.signals:
        if signal.kind == "class":
            if signal.passing and case.went_on_after(signal):
                recovered.append(signal)
            else:
                by_class.setdefault(signal.owner, []).append(signal)
    for name, signals in by_class.items():
        best = max(s.weight for s in signals)
        if best > HINTS:
            more = 0.01 * min(3, len({s.rule for s in signals}) - 1)
            case.propose(name, min(0.98, best + more), sorted(signals, key=lambda s: -s.weight))
    return recovered


def _finding(case: Case, candidate: Candidate, end: FirstEnd) -> Finding:
    entry = CATALOGUE[candidate.id]
    strongest = max((s.weight for s in candidate.signals), default=0.0)
    telling = [s for s in candidate.signals if s.kind != "class" or s.weight >= strongest - 0.2]
    first = in_order(telling)
    rank_number, host = _where(case, candidate, first, end)
    return Finding(
        id=entry.id,
        title=candidate.title or entry.title,
        confidence=round(min(candidate.score, 0.98), 2),
        cause=clean(candidate.cause or entry.cause),
        fix=candidate.fix or entry.fix,
        host=host,
        rank=rank_number,
        evidence=_evidence(case, first),
        against=[clean(a) for a in dict.fromkeys(candidate.against)],
        next_test=candidate.next_test or entry.next_test,
        reference=entry.reference,
        count=_count(case, candidate.signals),
    )


def _count(case: Case, signals: list[Signal]) -> int:
    """About how many lines say it: several rules may match one line, so the busiest rule of each file counts."""
    busiest: dict[int, int] = {}
    for file, rule in {(s.file, s.rule) for s in signals if s.rule >= 0}:
        busiest[file] = max(busiest.get(file, 0), case.scans[file].tallies[rule].count)
    return sum(busiest.values()) or len(signals)


def _where(case: Case, candidate: Candidate, signals: list[Signal], end: FirstEnd) -> tuple[int | None, str | None]:
    """Rank and host that failed first: as the candidate knows, its lines name, their ranks say, or who ended first."""
    if candidate.elsewhere and candidate.rank is None:
        return None, candidate.host
    named = next((s.groups["host"] for s in signals if s.kind == "class" and s.groups.get("host")), None)
    host = candidate.host or named
    ranks = [s.rank for s in signals if s.rank is not None]
    of_all = candidate.id in _OF_ALL and len(set(ranks)) > 1
    if candidate.rank is not None:
        return candidate.rank, host or case.rank_hosts.get(candidate.rank)
    if host:
        there = [rank for rank, place in case.rank_hosts.items() if place == host]
        own = [rank for rank in ranks if rank in there]
        return (own or (there if len(there) == 1 else [None]))[0], host
    number = ranks[0] if ranks and not of_all else end.rank
    host = case.rank_hosts.get(number) if number is not None else None
    if host is None and not of_all:
        host = next((s.host for s in signals if s.host), None) or end.host
    return number, host


def _evidence(case: Case, signals: list[Signal]) -> list[Evidence]:
    shown, seen = [], set()
    for signal in signals:
        if (signal.file, signal.line) not in seen and len(shown) < MAX_EVIDENCE:
            seen.add((signal.file, signal.line))
            shown.append(Evidence(file=case.names[signal.file], line=signal.line, text=clean(signal.text)))
    return shown


def _benign(case: Case, recovered: list[Signal]) -> list[Benign]:
    found: dict[str, tuple[str, list[Signal]]] = {}
    for signal in case.signals:
        if signal.kind == "benign":
            found.setdefault(signal.owner, (BENIGN[signal.owner].why, []))[1].append(signal)
    for signal in recovered:
        why = "The job went on after it."
        found.setdefault(f"recovered_{signal.owner}", (why, []))[1].append(signal)
    return [
        Benign(
            id=name,
            why=why,
            count=_count(case, signals),
            evidence=_evidence(case, signals[:1])[0],
        )
        for name, (why, signals) in found.items()
    ]
