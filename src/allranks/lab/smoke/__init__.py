"""Smoke tests: eight small trainings that check an installation, with explicit criteria. Here is the list of the tests, in order.

records.py                 tests, criteria, figures and results; a run folder as one frozen record; evaluation of criteria
criteria.py                criteria that several tests share
figures.py                 measured figures beside those of the field notes; sizes that fit this machine
mlp_tests.py               tests 01 to 04
language_model_tests.py    tests 05 to 08
runner.py                  runs the tests on this machine, through Slurm, or in the cluster in a box
report.py                  the table, smoke.json and the page
"""

from __future__ import annotations

from collections.abc import Sequence

from allranks.errors import SpecError
from allranks.lab.smoke import language_model_tests, mlp_tests
from allranks.lab.smoke.records import SmokeTest
from allranks.utils.text import did_you_mean

TESTS: tuple[SmokeTest, ...] = (
    mlp_tests.SINGLE_TEST,
    mlp_tests.DDP_TEST,
    mlp_tests.ZERO1_TEST,
    mlp_tests.MULTINODE_ZERO1_TEST,
    language_model_tests.LORA_TEST,
    language_model_tests.LORA_TWO_NODES_TEST,
    language_model_tests.FSDP_MOE_TEST,
    language_model_tests.CPU_LAB_TEST,
)


def select_tests(names: Sequence[str]) -> list[SmokeTest]:
    """Return tests by name or prefix, in the order of the list; ``all`` or nothing means all.

    Raises:
        SpecError: a test is unknown.
    """
    if not names or "all" in names:
        return list(TESTS)
    found = []
    for name in names:
        matches = [t for t in TESTS if t.name == name] or [t for t in TESTS if t.name.startswith(name)]
        if len(matches) != 1:
            hint = did_you_mean(name, [t.name for t in TESTS], 0.4, "{}")
            raise SpecError(f"smoke: unknown test {name!r}{hint} (known: {', '.join(t.name for t in TESTS)})")
        found += matches
    return [t for t in TESTS if t in found]
