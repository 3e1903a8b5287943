"""Keeps the result of `make test-all`: python scripts/record_tests.py JUNIT.xml... benchmarks/results/test_all.json

It takes hours, so it may be run in parts (pytest -m "not full", -m full): the outcome of a test is that of the last file in which it is.
"""

from __future__ import annotations

import json
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import facts


def cases(junit: Path) -> list[ET.Element]:
    return list(ET.parse(junit).getroot().iter("testcase"))  # noqa: S314 - pytest wrote it a moment ago


def seconds(case: ET.Element) -> float:
    return float(case.get("time", 0))


def outcome(case: ET.Element) -> str:
    """Of one test: passed, failed, error or skipped."""
    return next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")


def main() -> None:
    *sources, target = map(Path, sys.argv[1:])
    found = {f"{c.get('classname')}::{c.get('name')}": c for source in sources for c in cases(source)}
    outcomes = {name: outcome(c) for name, c in found.items()}
    slowest = sorted(found.values(), key=lambda c: -seconds(c))[:15]
    result = {
        "what": "make test-all" + (f", in {len(sources)} parts" if len(sources) > 1 else ""),
        "when": time.strftime("%Y-%m-%d"),
        "machine": facts(),
        "tests": dict(Counter(outcomes.values())),
        "seconds": round(sum(map(seconds, found.values())), 1),
        "not_passed": {name: kind for name, kind in outcomes.items() if kind != "passed"},
        "slowest_s": {f"{c.get('classname')}::{c.get('name')}": round(seconds(c), 1) for c in slowest},
    }
    target.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{result['tests']} in {result['seconds']:.0f} s -> {target}")


if __name__ == "__main__":
    main()
