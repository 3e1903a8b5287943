"""Record the result of one part of `make test-all`.

``python scripts/record_tests.py PART JUNIT.xml benchmarks/results/test_all.json``. All tests take hours, so they can be
run in parts: a part that runs again replaces its own record and keeps those of other parts. JUNIT.again.xml beside the
results holds the tests that failed beside others and ran once more, alone; those that passed there count as passed, and
the record names them.
"""

from __future__ import annotations

import json
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import facts
from scripts import make_pages

SLOWEST = 15


def cases(junit: Path) -> list[ET.Element]:
    """Return the tests of a part; none if it was aborted before it wrote its results."""
    if not junit.is_file():
        return []
    found = ET.parse(junit).getroot().iter("testcase")  # noqa: S314 - written by pytest
    return [c for c in found if c.get("classname")]  # aborted tests have none


def wall_s(junit: Path) -> float:
    """Return how long pytest ran, in seconds; 0 if it did not run."""
    if not junit.is_file():
        return 0.0
    return sum(float(suite.get("time", 0)) for suite in ET.parse(junit).getroot().iter("testsuite"))  # noqa: S314


def seconds(case: ET.Element) -> float:
    return float(case.get("time", 0))


def outcome(case: ET.Element) -> str:
    """Return the outcome of one test: passed, failed, error or skipped."""
    return next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")


def file_of(case: ET.Element) -> str:
    """Return the path of a test's file; classname is its dotted name, possibly followed by the name of a class."""
    words = (case.get("classname") or "").split(".")
    last = next((i for i, word in enumerate(words) if word.startswith("test_")), len(words) - 1)
    return "/".join(words[: last + 1]) + ".py"


def name_of(case: ET.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def recorded(target: Path) -> dict[str, dict[str, Any]]:
    """Return the parts that the file already holds."""
    try:
        return json.loads(target.read_text())["parts"]
    except (OSError, ValueError, KeyError):
        return {}


def part_of(found: list[ET.Element], again: list[ET.Element]) -> dict[str, Any]:
    """Return the record of one part, from its tests and those of them that ran once more."""
    files: dict[str, float] = {}
    alone = {name_of(c) for c in again if outcome(c) == "passed"} - {
        name_of(c) for c in again if outcome(c) != "passed"
    }

    def result(case: ET.Element) -> str:
        return "passed" if name_of(case) in alone else outcome(case)

    for case in found:
        files[file_of(case)] = files.get(file_of(case), 0.0) + seconds(case)
    slowest = sorted(found, key=lambda c: -seconds(c))[:SLOWEST]
    return {
        "when": time.strftime("%Y-%m-%d"),
        "machine": facts(),
        "tests": dict(Counter(map(result, found))),
        "seconds": round(sum(files.values()), 1),
        "not_passed": {name_of(c): result(c) for c in found if result(c) != "passed"},
        "passed_alone": sorted(alone),
        "slowest_s": {name_of(c): round(seconds(c), 1) for c in slowest},
        "files_s": {file: round(s, 1) for file, s in sorted(files.items(), key=lambda item: -item[1])},
    }


def main() -> None:
    part, junit, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    found = cases(junit)
    if not found:
        sys.exit(f"{part}: {junit.name} holds no tests; {target.name} is not changed")
    again = junit.with_suffix(".again.xml")
    took = {"wall_s": round(wall_s(junit) + wall_s(again), 1)}
    parts = {**recorded(target), part: took | part_of(found, cases(again))}
    tests: Counter[str] = Counter()
    for one in parts.values():
        tests.update(one["tests"])
    result = {
        "what": "make test-all, by part; several tests run at a time: wall_s is the time of the part, "
        "seconds the sum of its tests",
        "tests": dict(tests),
        "wall_s": round(sum(one.get("wall_s", 0) for one in parts.values()), 1),
        "seconds": round(sum(one["seconds"] for one in parts.values()), 1),
        "parts": parts,
    }
    target.write_text(json.dumps(result, indent=2) + "\n")
    make_pages.main()
    print(f"{part}: {parts[part]['tests']} in {parts[part]['wall_s']:.0f} s -> {target}")


if __name__ == "__main__":
    main()
