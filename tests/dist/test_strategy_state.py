"""What a strategy saves is all that it needs, and another strategy can go on from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.train.strategies import REGISTRY
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.dist
NAMES = [name for name, entry in REGISTRY.items() if not entry.single_process]


def test_going_on_from_a_saved_state_is_bitwise_as_if_there_had_been_no_stop(tmp_path: Path) -> None:
    triples = [(n, n, "lora" if i % 2 else "plain") for i, n in enumerate(NAMES)]
    for one in run_ranks("states", 2, tmp_path, folder=tmp_path, triples=triples)[0]:
        assert one["error"] == 0.0, one


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3])
def test_every_strategy_goes_on_bitwise_in_every_form(tmp_path: Path, world: int) -> None:
    triples = [(n, n, v) for n in NAMES for v in ("plain", "lora", "tied", "uneven", "bf16") if v != "uneven"]
    for one in run_ranks("states", world, tmp_path, 280, folder=tmp_path, triples=triples)[0]:
        assert one["error"] == 0.0, one


def test_a_state_of_one_strategy_loads_under_another(tmp_path: Path) -> None:
    ways = [("zero2", "pytorch_ddp"), ("pytorch_ddp", "zero3"), ("zero3", "pytorch_zero3"), ("pytorch_zero1", "zero1")]
    triples = [(a, b, "plain") for a, b in ways]
    for one in run_ranks("states", 2, tmp_path, folder=tmp_path, triples=triples)[0]:
        assert one["error"] < 1e-6, one


def test_moments_of_another_parameter_would_be_seen(tmp_path: Path) -> None:
    results = run_ranks("states", 2, tmp_path, folder=tmp_path, triples=[("zero2", "zero2", "plain")], plant=True)
    assert results[0][0]["error"] > 1e-4
