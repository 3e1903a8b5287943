"""Faults from outside and inside, one run each: bounded, the true reason, resumable, nothing left over.

The usual run takes a few cases of distinct mechanisms; ``make test-all`` takes all, and ``python -m tests.chaos``
writes the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.chaos.cases import Case, all_cases
from tests.chaos.harness import Outcome, judge, run_case
from tests.chaos.places import Cluster, cluster
from tests.cluster.conftest import unable

CASES = all_cases()
LIMIT_S = 400


def _param(case: Case) -> Any:
    marks = [] if case.usual else [pytest.mark.full]
    return pytest.param(case, id=case.id, marks=marks)


@pytest.fixture(scope="session")
def box() -> Iterator[Cluster]:
    """A box of the chaos cases alone: some of them stop Slurm's daemons."""
    if reason := unable():
        pytest.skip(reason)
    with cluster() as made:
        yield made


@pytest.mark.dist
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("case", [_param(case) for case in CASES if case.launcher == "local"])
def test_a_fault_on_one_machine(case: Case) -> None:
    seen = run_case(case)
    assert seen.ok, f"{seen.reasons}\n{seen.message}\n{seen.shown}"


@pytest.mark.cluster
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("case", [_param(case) for case in CASES if case.launcher == "slurm"])
def test_a_fault_under_slurm(case: Case, box: Cluster) -> None:
    seen = run_case(case, box)
    assert seen.ok, f"{seen.reasons}\n{seen.message}\n{seen.shown}"


def test_there_are_enough_cases_and_few_in_the_usual_run() -> None:
    assert len(CASES) >= 60
    usual = [case.launcher for case in CASES if case.usual]
    assert usual.count("local") <= 10
    assert usual.count("slurm") <= 6


GOOD = Outcome(
    id="x", seconds=1.0, ended=True, code=1, status="failed", message="allranks: rank 1 failed: planted", left=(),
    restarts=0, excluded="", resumed=0, shown="",
)  # fmt: skip
CASE = Case(id="x", launcher="slurm", phase="training", says="planted", never=("rank 0 failed",), resume=True)


def test_what_is_expected_is_judged_good() -> None:
    assert judge(CASE, GOOD) == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ended": False, "code": None}, "not over 30 s"),
        ({"code": 3}, "exit code 3"),
        ({"message": "allranks: no reason"}, "lacks"),
        ({"message": "allranks: rank 0 failed: planted"}, "says"),
        ({"shown": "Traceback (most recent call last):"}, "a traceback"),
        ({"left": ("process 1",)}, "left over"),
        ({"restarts": 1}, "back to the queue"),
        ({"excluded": "n[2-3]"}, "n2, n3 was excluded"),
        ({"resumed": 1}, "resume ended with 1"),
        ({"code": 0, "status": "failed"}, "exit code 0"),
    ],
)
def test_each_difference_is_a_reason(change: dict[str, Any], words: str) -> None:
    reasons = judge(CASE, msgspec.structs.replace(GOOD, **change))
    assert any(words in reason for reason in reasons), reasons
