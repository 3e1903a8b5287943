"""Keeps the result of `make test-all`: python scripts/record_tests.py JUNIT.xml... [COLLECTED.txt] benchmarks/results/test_all.json

It takes hours, so it may be run in parts (pytest -m "not full", -m full): the outcome of a test is that of the last file in which it is.
COLLECTED.txt, from ``pytest --collect-only -q tests``, tells which tests have not run at all.
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
    found = ET.parse(junit).getroot().iter("testcase")  # noqa: S314 - pytest wrote it a moment ago
    return [c for c in found if c.get("classname")]  # what was broken off has none


def collected(listing: Path) -> list[str]:
    """Names as in JUnit's files, of lines ``tests/unit/test_x.py::test_y[z]``."""
    lines = (line.partition("::") for line in listing.read_text().splitlines() if ".py::" in line)
    return [f"{path.removesuffix('.py').replace('/', '.')}::{name}" for path, _, name in lines]


def seconds(case: ET.Element) -> float:
    return float(case.get("time", 0))


def outcome(case: ET.Element) -> str:
    """Of one test: passed, failed, error or skipped."""
    return next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")


def main() -> None:
    *given, target = map(Path, sys.argv[1:])
    sources = [p for p in given if p.suffix == ".xml"]
    found = {f"{c.get('classname')}::{c.get('name')}": c for source in sources for c in cases(source)}
    outcomes = {name: outcome(c) for name, c in found.items()}
    wanted = {name for p in given if p.suffix == ".txt" for name in collected(p)}
    slowest = sorted(found.values(), key=lambda c: -seconds(c))[:15]
    result = {
        "what": "make test-all" + (f", in {len(sources)} parts" if len(sources) > 1 else ""),
        "when": time.strftime("%Y-%m-%d"),
        "machine": facts(),
        "tests": dict(Counter(outcomes.values())),
        "not_run": sorted(wanted - outcomes.keys()),
        "seconds": round(sum(map(seconds, found.values())), 1),
        "not_passed": {name: kind for name, kind in outcomes.items() if kind != "passed"},
        "slowest_s": {f"{c.get('classname')}::{c.get('name')}": round(seconds(c), 1) for c in slowest},
    }
    target.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{result['tests']} in {result['seconds']:.0f} s -> {target}")


if __name__ == "__main__":
    main()
