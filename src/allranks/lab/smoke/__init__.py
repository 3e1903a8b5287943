"""Smoke tests: eight small trainings that check an installation, with explicit criteria.

tests.yaml    the tests, in order: spec, criteria and figures of the field notes
criteria.py   the criteria, by key
figures.py    the figures: their definitions, measured beside those of the field notes
sizes.py      the spec of a test for a machine
records.py    records of tests and results; a run folder as one frozen record; evaluation of criteria
runner.py     runs the tests on this machine, through Slurm, or in the cluster in a box
report.py     the table, smoke.json and the page
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

import yaml

from allranks.errors import SpecError
from allranks.lab.smoke.criteria import criterion_of
from allranks.lab.smoke.records import SmokeTest
from allranks.utils.text import did_you_mean


def _test_of(entry: dict[str, Any]) -> SmokeTest:
    keys = [key for item in entry["criteria"] for key in (item if isinstance(item, list) else [item])]
    return SmokeTest(**{**entry, "criteria": tuple(map(criterion_of, keys))})


TESTS: tuple[SmokeTest, ...] = tuple(
    map(_test_of, yaml.safe_load((resources.files(__name__) / "tests.yaml").read_text("utf-8"))["tests"])
)


def select_tests(names: Sequence[str]) -> list[SmokeTest]:
    """Return tests by name or prefix, in the order of the list; ``all`` means all.

    Raises:
        SpecError: a test is unknown.
    """
    if "all" in names:
        return list(TESTS)
    tests = []
    for name in names:
        matches = [t for t in TESTS if t.name == name] or [t for t in TESTS if t.name.startswith(name)]
        if len(matches) != 1:
            hint = did_you_mean(name, [t.name for t in TESTS], 0.4, "{}")
            raise SpecError(f"smoke: unknown test {name!r}{hint} (known: {', '.join(t.name for t in TESTS)})")
        tests += matches
    return [t for t in TESTS if t in tests]
