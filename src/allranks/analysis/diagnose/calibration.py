"""How certain a finding is: by measured hit rates of the kind of rule that found it, and by what speaks against it."""

from __future__ import annotations

from allranks.analysis.diagnose.case import CandidateCause
from allranks.analysis.diagnose.patterns import CERTAIN, LIKELY

# Written by `python -m benchmarks.diagnose --calibrate`, from first looks at logs that no rule was written from: kind of rule, answers, hits.
# begin generated
MEASURED: dict[str, tuple[int, int]] = {
    "ambiguous message, recognised emitter": (49, 43),
    "ambiguous message, unknown emitter": (18, 18),
    "certain message, recognised emitter": (146, 144),
    "certain message, unknown emitter": (64, 61),
    "exception": (52, 45),
    "likely message, recognised emitter": (67, 58),
    "likely message, unknown emitter": (30, 21),
    "parsed message": (9, 8),
    "several messages together": (21, 15),
    "signal alone": (2, 2),
}
# end generated
RULE_WEIGHT = 6  # the rule's own weight counts like so many measured answers
HIGHEST = 0.97
UNSURE_HIGHEST = 0.9  # if the emitter is not recognised, or something contradicts
CONTRADICTION = 0.08
_RECORDS = frozenset({"event_hang", "event_error", "rank_end", "rank_early", "rank_done"})


SIGNAL_ALONE, SIGNAL_ALONE_WEIGHT = "signal alone", 0.5  # how a process ended is known, and not why or where it crashed
_REPORTING = frozenset({"launcher", "mpi", "shell", "slurm_client", "slurm_daemon"})


def only_reported(candidate: CandidateCause) -> bool:
    """Return whether all that is known of a crash is the signal, by the report of a launcher, a shell or the scheduler."""
    own = [s for s in candidate.signals if s.kind == "class"]
    return (
        candidate.id == "rank_died"
        and len(own) == len(candidate.signals) > 0
        and all((s.emitter in _REPORTING or "told" in s.groups) and not s.frames for s in own)
    )


def kind_of(candidate: CandidateCause) -> str:
    """Return the kind of rule on which a candidate rests most."""
    if any(s.owner in _RECORDS for s in candidate.signals):
        return "record of a run"
    if only_reported(candidate):
        return SIGNAL_ALONE
    own = [s for s in candidate.signals if s.kind == "class" and s.owner == candidate.id]
    if not own:
        return "exception" if candidate.id == "application_error" else "several messages together"
    best = max(own, key=lambda s: s.weight)
    if "told" in best.groups:  # only parsers set it
        return "parsed message"
    emitter = "recognised emitter" if best.emitter != "program" else "unknown emitter"
    strength = "certain" if best.weight >= CERTAIN else "likely" if best.weight >= LIKELY - 0.05 else "ambiguous"
    return f"{strength} message, {emitter}"


def confidences(candidates: list[CandidateCause]) -> list[float]:
    """Return the confidence of each candidate, in the order of the findings; none is above the one before it."""
    found: list[float] = []
    for candidate in candidates:
        rivals = [c for c in candidates if c is not candidate and c.score >= candidate.score]
        value = _confidence(candidate, contradictions=len(candidate.against) + len(rivals[:1]))
        found.append(round(min([value, *found[-1:]]), 2))
    return found


def _confidence(candidate: CandidateCause, *, contradictions: int) -> float:
    kind = kind_of(candidate)
    answers, hits = MEASURED.get(kind, (0, 0))
    weight = min(candidate.score, SIGNAL_ALONE_WEIGHT) if kind == SIGNAL_ALONE else candidate.score
    rate = (hits + RULE_WEIGHT * weight) / (answers + RULE_WEIGHT)
    if kind == SIGNAL_ALONE:
        rate = min(rate, SIGNAL_ALONE_WEIGHT)
    highest = UNSURE_HIGHEST if contradictions or kind.endswith("unknown emitter") else HIGHEST
    return max(min(rate, highest) - CONTRADICTION * min(contradictions, 2), 0.05)
