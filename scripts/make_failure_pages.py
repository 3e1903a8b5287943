"""Write docs/failures/README.md, the index of the forty failures, from their records. ``python scripts/make_failure_pages.py``

The pages themselves are written by hand; a test checks that index, pages and records agree.
"""

from __future__ import annotations

import re
from pathlib import Path

from allranks.analysis.diagnose.known_failures import KNOWN_FAILURES, KnownFailure

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "failures"
NODE_ID = re.compile(r"`(tests/[\w/]+\.py::[^`]+)`")
HEAD = """# The forty failures

The field notes behind this project describe forty failures of distributed training. allranks **P**revents each by design, **R**efuses it before the ranks
start, or names it with **D**iagnose. Each has a test that injects it. If that needs GPUs or a network that the test machines do not have, the test replays
recorded logs and facts instead, and the last column says so.

`allranks failures` prints this table, `allranks failures 18` prints one failure, and `allranks diagnose PATH` searches logs for them.
Generated from `src/allranks/analysis/diagnose/known_failures.py` by `scripts/make_failure_pages.py`.

| # | failure | how | where | tested by |
|---|---|---|---|---|
"""


def row(failure: KnownFailure) -> str:
    """Return one row of the table."""
    count = len(set(NODE_ID.findall((FOLDER / failure.page).read_text().split("## Tests")[1])))
    tests = f"{count} test{'s' * (count != 1)}, {failure.evidence}"
    return f"| {failure.number} | [{failure.title}]({failure.page}) | {failure.how} | {failure.where} | {tests} |\n"


def text() -> str:
    """Return the page."""
    return HEAD + "".join(row(failure) for failure in KNOWN_FAILURES)


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(text())
