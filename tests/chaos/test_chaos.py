"""Faults from outside and inside, one run each: bounded, the true reason, resumable, nothing left over."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos.cases import Case, all_cases
from tests.chaos.harness import Cluster, cluster, run_case, run_trial, undisturbed_weights
from tests.chaos.trials import trial
from tests.cluster.conftest import unable

CASES = all_cases()
LIMIT_S = 400
SEEDS = (8, 12, 15, 22, 25, 27, 32, 36, 4, 29)
"""Of the campaign (``make chaos``): one machine, faults of all kinds, two at once, in all strategies but one."""


def _params(launcher: str) -> list[Any]:
    chosen = [case for case in CASES if case.launcher == launcher]
    return [pytest.param(case, id=case.id, marks=[] if case.usual else [pytest.mark.full]) for case in chosen]


@pytest.fixture(scope="session")
def box() -> Iterator[Cluster]:
    """A box of the chaos cases alone: some of them stop Slurm's daemons."""
    if reason := unable():
        pytest.skip(reason)
    with cluster() as made:
        yield made


@pytest.mark.dist
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("case", _params("local"))
def test_a_fault_on_one_machine(case: Case) -> None:
    seen = run_case(case)
    assert seen.ok, f"{seen.reasons}\n{seen.message}\n{seen.shown}"


@pytest.mark.cluster
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("case", _params("slurm"))
def test_a_fault_under_slurm(case: Case, box: Cluster) -> None:
    seen = run_case(case, box)
    assert seen.ok, f"{seen.reasons}\n{seen.message}\n{seen.shown}"


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_fault_with_restarts(seed: int) -> None:
    drawn = trial(seed)
    seen = run_trial(drawn, undisturbed_weights(drawn.strategy, "local"))
    assert seen.ok, seen
