"""How certain a finding is: by the kind of rule that found it, and what speaks against it."""

from __future__ import annotations

from allranks.analysis.diagnose.case import CandidateCause
from allranks.analysis.diagnose.patterns import CERTAIN, LIKELY

RECORDS = frozenset({"event_hang", "event_error", "rank_end", "rank_early", "rank_done"})


def kind_of(candidate: CandidateCause) -> str:
    """Return the kind of rule on which a candidate rests most."""
    if any(s.owner in RECORDS for s in candidate.signals):
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
