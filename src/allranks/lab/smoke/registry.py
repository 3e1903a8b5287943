"""The rungs, in order. A new test is one file beside this one and one line below."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from allranks.errors import SpecError
from allranks.lab.smoke import language_model_tests, mlp_tests
from allranks.lab.smoke.records import SmokeTest

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
    """Tests by name or the beginning of one, in the order of the ladder; ``all`` or nothing means all.

    Raises:
        SpecError: there is no such test.
    """
    if not names or "all" in names:
        return list(TESTS)
    found = []
    for name in names:
        matches = [t for t in TESTS if t.name == name] or [t for t in TESTS if t.name.startswith(name)]
        if len(matches) != 1:
            near = difflib.get_close_matches(name, [t.name for t in TESTS], n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SpecError(f"smoke: there is no test {name!r}{hint} (known: {', '.join(t.name for t in TESTS)})")
        found += matches
    return [t for t in TESTS if t in found]
