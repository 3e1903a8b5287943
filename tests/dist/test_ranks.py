"""Proof, evaluation, strategies, control and saving across real gloo ranks, each with the fault it must catch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allranks.train.strategies import REGISTRY
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.dist


def test_proof_of_ranks_that_are_one_job(tmp_path: Path) -> None:
    results = run_ranks("proof", 2, tmp_path, fault=None)
    assert len({r["hash"] for r in results}) == 1


@pytest.mark.parametrize(
    ("fault", "world", "words"),
    [
        ("weights", 3, "rank 1 differs from the others"),
        ("one_weight", 2, "embed_tokens.weight"),
        ("sampler", 3, "rank 1 shares"),
        ("absent", 2, "absent: rank 2"),
    ],
)
def test_proof_names_what_is_wrong(tmp_path: Path, fault: str, world: int, words: str) -> None:
    for result in run_ranks("proof", world, tmp_path, fault=fault):
        assert words in result["error"]
        assert result["exit_code"] == 1


def test_evaluation_is_the_same_for_any_ranks_and_batch_size(tmp_path: Path) -> None:
    found = [value for world in (1, 2, 3) for result in run_ranks("evaluation", world, tmp_path, folder=tmp_path) for value in result]
    losses, perplexities = [v[0] for v in found], [v[1] for v in found]
    assert max(losses) - min(losses) <= 1e-6 * losses[0]
    assert max(perplexities) - min(perplexities) <= 1e-6 * perplexities[0]
    assert {(v[2], v[3]) for v in found} == {(found[0][2], 23)}
    assert len(found) == (1 + 2 + 3) * 3


STRATEGIES = [name for name, entry in REGISTRY.items() if not entry.single_process]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"clip": None},
    "accumulation": {"accum": 3},
    "lora": {"lora": True},
    "tied": {"tied": True},
    "frozen": {"frozen": True},
}


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_equals_one_process_that_takes_the_ranks_in_turn(tmp_path: Path, name: str, variant: str, world: int) -> None:
    for result in run_ranks("parity", world, tmp_path, strategy=name, folder=tmp_path, **VARIANTS[variant]):
        assert result["differs"] < 2e-5
        assert result["ranks_equal"]
        assert result["moved"] is None or result["moved"] > 1e-3


def test_single_equals_the_reference(tmp_path: Path) -> None:
    (result,) = run_ranks("parity", 1, tmp_path, strategy="single", folder=tmp_path, accum=2)
    assert result["differs"] < 2e-6


def test_all_ranks_hear_of_a_stop_for_the_same_step(tmp_path: Path) -> None:
    for result in run_ranks("stop_agreement", 3, tmp_path):
        assert result["heard"] == [None, False, False, True, False]
        assert result["loss"] == 3.0
        assert result["norm"] == pytest.approx(2.0)


def test_a_rank_that_cannot_save_is_named_everywhere_and_earlier_checkpoints_stay(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for result in run_ranks("save_failure", 2, tmp_path, folder=tmp_path):
        assert "rank 1 failed to write its random state" in result["said"]
        assert "No space left" in result["said"]
        assert result["steps"][:1] in ([3], [1])
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir() if not p.name.startswith(".")) == ["step-3", "step-4"]
