"""The list of all failure classes that `diagnose` knows, and all rules of the scanner."""

from __future__ import annotations

from allranks.analysis.diagnose.catalogue import collectives, data, gpu, memory, network, programs, slurm
from allranks.analysis.diagnose.catalogue.messages import BENIGN_MESSAGES, FACT_PATTERNS, PROGRESS_PATTERN
from allranks.analysis.diagnose.catalogue.signs import FAILURE_SIGNS
from allranks.analysis.diagnose.catalogue.structured import STRUCTURED
from allranks.analysis.diagnose.patterns import FailureClass, ScanRule

CATALOGUE: dict[str, FailureClass] = {
    entry.id: entry for module in (collectives, network, gpu, memory, data, programs, slurm) for entry in module.CLASSES
}


def all_rules() -> list[ScanRule]:
    """Return all patterns in a fixed order, so that an index is the same in each process."""
    pairs = [("class", e.id, p) for e in CATALOGUE.values() for p in e.patterns]
    pairs += [("fact", name, p) for name, patterns in FACT_PATTERNS.items() for p in patterns]
    pairs += [("benign", b.id, p) for b in BENIGN_MESSAGES.values() for p in b.patterns]
    pairs += [("sign", s.id, p) for s in FAILURE_SIGNS.values() for p in s.patterns]
    pairs += [("structured", m.id, m.pattern) for m in STRUCTURED.values()]
    pairs.append(("progress", "progress", PROGRESS_PATTERN))
    return [ScanRule(i, *pair) for i, pair in enumerate(pairs)]
