"""How certain a finding is: by measured hit rates of the kind of rule that found it, and by what speaks against it."""

from __future__ import annotations

from allranks.analysis.diagnose.case import CandidateCause
from allranks.analysis.diagnose.patterns import CERTAIN, LIKELY

# Written by `python -m benchmarks.diagnose --calibrate`, from first looks at logs that no rule was written from: kind of rule, answers, hits.
# begin generated
MEASURED: dict[str, tuple[int, int]] = {
    "ambiguous message, recognised emitter": (9, 8),
    "ambiguous message, unknown emitter": (5, 5),
    "certain message, recognised emitter": (47, 47),
    "certain message, unknown emitter": (19, 19),
    "exception": (14, 10),
    "likely message, recognised emitter": (18, 16),
    "likely message, unknown emitter": (14, 7),
    "parsed message": (7, 6),
    "several messages together": (11, 8),
}
# end generated
RULE_WEIGHT = 6  # the rule's own weight counts like so many measured answers
HIGHEST = 0.97
UNSURE_HIGHEST = 0.9  # if the emitter is not recognised, or something contradicts
CONTRADICTION = 0.08
_RECORDS = frozenset({"event_hang", "event_error", "rank_end", "rank_early", "rank_done"})


def kind_of(candidate: CandidateCause) -> str:
    """Return the kind of rule on which a candidate rests most."""
    if any(s.owner in _RECORDS for s in candidate.signals):
        return "record of a run"
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
    rate = (hits + RULE_WEIGHT * candidate.score) / (answers + RULE_WEIGHT)
    highest = UNSURE_HIGHEST if contradictions or kind.endswith("unknown emitter") else HIGHEST
    return max(min(rate, highest) - CONTRADICTION * min(contradictions, 2), 0.05)
