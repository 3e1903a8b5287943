"""The sentences that begin the page of a trace: what the time was spent on, and for whom the ranks waited."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.analysis.trace import analyse
from allranks.analysis.trace.page import verdict
from tests.tracegen import Scenario, generate

LATE = {(3, step): 4000 for step in range(3)}


@pytest.mark.parametrize(
    ("scenario", "said", "unsaid"),
    [
        (Scenario(slow=LATE), "waiting for the last rank, mostly for rank 3, which was last in", "copies"),
        (Scenario(slow={(3, 0): 900, (6, 1): 900}), "waiting for the last rank.", "mostly"),
        (Scenario(world=1), "of the time is", "waiting"),
    ],
)
def test_the_verdict_follows_the_figures(tmp_path: Path, scenario: Scenario, said: str, unsaid: str) -> None:
    generate(scenario, tmp_path)
    (report,) = analyse([tmp_path], workers=1)
    text, total = verdict(report), report.ranks[0].total
    assert said in text and unsaid not in text, text
    if len(report.ranks) == 1:
        assert f"{total.compute_s / total.span_s:.0%}" in text
