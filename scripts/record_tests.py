"""Keeps the result of `make test-all`: python scripts/record_tests.py JUNIT.xml benchmarks/results/test_all.json"""

from __future__ import annotations

import json
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import facts


def outcome(case: ET.Element) -> str:
    """Of one test: passed, failed, error or skipped."""
    return next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")


def main() -> None:
    source, target = map(Path, sys.argv[1:3])
    cases = list(ET.parse(source).getroot().iter("testcase"))  # noqa: S314 - pytest wrote it a moment ago
    outcomes = {f"{c.get('classname')}::{c.get('name')}": outcome(c) for c in cases}
    slowest = sorted(cases, key=lambda c: -float(c.get("time", 0)))[:15]
    result = {
        "what": "make test-all",
        "when": time.strftime("%Y-%m-%d"),
        "machine": facts(),
        "tests": dict(Counter(outcomes.values())),
        "seconds": round(sum(float(c.get("time", 0)) for c in cases), 1),
        "not_passed": {name: kind for name, kind in outcomes.items() if kind != "passed"},
        "slowest_s": {f"{c.get('classname')}::{c.get('name')}": round(float(c.get("time", 0)), 1) for c in slowest},
    }
    target.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{result['tests']} in {result['seconds']:.0f} s -> {target}")


if __name__ == "__main__":
    main()
