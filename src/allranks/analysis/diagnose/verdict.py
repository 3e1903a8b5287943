"""Decide whether anything failed, independently of the failure classes, and describe a failure that no class explains."""

from __future__ import annotations

from typing import Literal

from allranks.analysis.diagnose.case import CandidateCause, DiagnosisCase
from allranks.analysis.diagnose.catalogue import CATALOGUE
from allranks.analysis.diagnose.catalogue.signs import FAILURE_SIGNS, FailureSign
from allranks.analysis.diagnose.causes.process_exits import first_exit
from allranks.analysis.diagnose.lines import REMARKING_EMITTERS
from allranks.analysis.diagnose.patterns import CERTAIN, POSSIBLE
from allranks.analysis.diagnose.records import LogEvidence, LogSignal, UnexplainedFailure
from allranks.utils.redaction import redact

Verdict = Literal["found", "unexplained", "incomplete", "healthy"]
MAX_EVIDENCE = 5
_QUIET_EXCEPTIONS = frozenset({"StopIteration", "GeneratorExit", "StopAsyncIteration"})
_EXCEPTION = FAILURE_SIGNS["traceback"]
_ENDED = FAILURE_SIGNS["launcher_report"]


def find_signs(case: DiagnosisCase) -> list[tuple[FailureSign, LogSignal]]:
    """Return the signs of failure that the job did not survive, strong ones first, in order of files and lines."""
    found: list[tuple[FailureSign, LogSignal]] = []
    seen: set[tuple[int, int]] = set()
    for signal in case.signals:
        sign = _sign(signal)
        if sign is None or (signal.file, signal.line) in seen or (signal.file, signal.line) in case.own_kills:
            continue
        remark = signal.severity == "info" or (signal.severity == "warning" and signal.emitter in REMARKING_EMITTERS)
        if not sign.strong and remark:
            continue
        if case.survived(signal) or (not sign.strong and case.went_on_after(signal)):
            continue
        seen.add((signal.file, signal.line))
        found.append((sign, signal))
    return sorted(found, key=lambda pair: (not pair[0].strong, pair[1].file, pair[1].line))


def _sign(signal: LogSignal) -> FailureSign | None:
    """Return the sign that a signal is, if it is one."""
    if signal.kind == "sign":
        return FAILURE_SIGNS[signal.owner]
    if signal.owner == "exception":
        name = signal.groups.get("type", "")
        return None if name in _QUIET_EXCEPTIONS or name.endswith("Warning") else _EXCEPTION
    if signal.owner in ("event_error", "event_hang"):
        return _EXCEPTION
    if signal.owner == "rank_end" and signal.groups.get("code") not in ("0", "-15"):
        return _ENDED
    return None


def decide(
    case: DiagnosisCase, candidates: list[CandidateCause]
) -> tuple[Verdict, list[CandidateCause], UnexplainedFailure | None]:
    """Return the verdict, the candidates that remain findings, and the description of a failure that no finding explains."""
    signs = find_signs(case)
    kept = candidates if signs else [c for c in candidates if not _is_remark(case, c)]
    if kept:
        return "found", kept, None
    if signs:
        return "unexplained", [], _describe(case, signs)
    well = any(case.ends_well(scan.file) for scan in case.scans) or bool(case.facts("rank_done"))
    return ("healthy" if well else "incomplete"), [], None


def _is_remark(case: DiagnosisCase, candidate: CandidateCause) -> bool:
    """Return whether a candidate needs a sign of failure beside it.

    That is what a logger marks as a warning, an ambiguous message of an unknown emitter, and an ambiguous sign of slowness in a job that
    ends well.
    """
    own = [s for s in candidate.signals if s.kind == "class" and s.owner == candidate.id]
    if CATALOGUE[candidate.id].measured:
        return max((s.weight for s in own), default=CERTAIN) <= POSSIBLE and not any(map(case.repeats_to_end, own))
    if own and all(s.passing and s.weight <= POSSIBLE for s in own):
        return True
    if not own or len(own) < len(candidate.signals) or max(s.weight for s in own) >= CERTAIN:
        return False
    ambiguous = candidate.score <= POSSIBLE
    if ambiguous and not CATALOGUE[candidate.id].ends_job and all(case.ends_well(s.file) for s in own):
        return True
    return all(
        (s.severity in ("info", "warning") and s.emitter in REMARKING_EMITTERS)
        or (ambiguous and s.emitter == "program")
        for s in own
    )


def _describe(case: DiagnosisCase, signs: list[tuple[FailureSign, LogSignal]]) -> UnexplainedFailure:
    sign, first = signs[0]
    end = first_exit(case)
    rank = end.rank if end.rank is not None else first.rank
    host = end.host or case.host_of(first)
    return UnexplainedFailure(
        says=sign.says,
        emitter=first.emitter,
        host=case.rank_hosts.get(rank, host) if rank is not None else host,
        rank=rank,
        read_next=sign.read_next,
        evidence=[
            LogEvidence(file=case.names[s.file], line=s.line, text=redact(s.text)) for _, s in signs[:MAX_EVIDENCE]
        ],
    )
