"""A checkpoint holds all that a strategy needs, another strategy can go on from it; what a rank holds, and what a bad
step changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness import run_ranks, shared_strategies
from tests.dist.plants import needs_deepspeed

pytestmark = pytest.mark.dist
NAMES = shared_strategies()
FAMILIES = [
    n
    for n in NAMES
    if n in ("pytorch_ddp", "zero1", "zero2", "zero3", "pytorch_zero3", "deepspeed_zero2", "hf_trainer")
]


def check_states(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["error"] == 0.0, one
        losses, right = one["evaluations"]
        assert losses == pytest.approx(right, rel=1e-6), one
        assert losses[1] < losses[0] * (1 - 1e-4), one


def of_itself(names: list[str]) -> list[tuple[str, str, str]]:
    return [(n, n, "lora" if i % 2 else "plain") for i, n in enumerate(names)]


@pytest.mark.parametrize("names", [FAMILIES, pytest.param(NAMES, marks=pytest.mark.full)], ids=["families", "all"])
def test_going_on_from_a_saved_state_is_bitwise_as_if_there_had_been_no_stop(tmp_path: Path, names: list[str]) -> None:
    """The evaluations on the way are of the weights of their step."""
    check_states(run_ranks("states", 2, tmp_path, triples=of_itself(names))[0])


@pytest.mark.parametrize("plant", ["moments_of_another_parameter", "evaluations_of_the_first_weights"])
def test_exchanged_moments_and_stale_evaluations_would_be_seen_under_every_family(tmp_path: Path, plant: str) -> None:
    for one in run_ranks("states", 2, tmp_path, triples=of_itself(FAMILIES), plant=plant)[0]:
        with pytest.raises(AssertionError):
            check_states([one])


def test_ranks_with_the_same_random_numbers_are_refused_under_every_family(tmp_path: Path) -> None:
    """Their dropout would be equal; a library that sets the seed of all ranks does that."""
    for found in run_ranks("same_seeds", 2, tmp_path, names=FAMILIES):
        assert all("rank 0 and rank 1 draw the same random numbers" in text for text in found.values()), found


OFFLOADED = [
    ("zero1", "host_moments"),
    ("zero3", "host_moments"),
    ("pytorch_zero2", "host_moments"),
    ("pytorch_zero3", "on_host"),
    ("pytorch_zero3", "lora_on_host"),
    ("pytorch_zero3", "moe_lora_sharded"),
]


def test_states_on_the_host_and_adapters_of_experts_go_on_too(tmp_path: Path) -> None:
    triples = [(name, name, variant) for name, variant in OFFLOADED]
    for one in run_ranks("states", 2, tmp_path, triples=triples)[0]:
        assert one["error"] == 0.0, one


def test_a_state_of_one_strategy_loads_under_another(tmp_path: Path) -> None:
    ways = [
        ("zero2", "pytorch_ddp"),
        ("pytorch_ddp", "zero2"),
        ("pytorch_ddp", "zero3"),
        ("zero3", "pytorch_zero3"),
        ("pytorch_zero1", "zero1"),
    ]
    triples = [(a, b, "plain") for a, b in ways]
    for one in run_ranks("states", 2, tmp_path, triples=triples)[0]:
        assert one["error"] < 1e-6, one


@pytest.mark.parametrize(
    ("bug", "saver", "loader"),
    [
        ("moments_of_another_rank", "zero2", "zero2"),
        pytest.param("fragments_one_element_late", "pytorch_ddp", "deepspeed_zero1", marks=needs_deepspeed),
    ],
)
def test_moments_that_belong_elsewhere_would_be_seen(tmp_path: Path, bug: str, saver: str, loader: str) -> None:
    triples = [(saver, loader, "plain")]
    (one,) = run_ranks("states", 2, tmp_path, triples=triples, plants=[bug])[0]
    assert one["error"] > 1e-4


# of plain data parallelism at two ranks: weights and gradients 4 bytes a parameter each, moments 8; FSDP2 keeps weights
# in parts between steps in both forms
SHARE = {
    "zero1": 3 / 4,
    "zero2": 5 / 8,
    "zero3": 1 / 2,
    "pytorch_zero1": 3 / 4,
    "pytorch_zero2": 1 / 2,
    "pytorch_zero3": 1 / 2,
    # DeepSpeed updates a float32 copy of its part of the weights, and in stage 3 keeps the part beside it
    "deepspeed_zero1": 3 / 4,
    "deepspeed_zero2": 3 / 4,
    "deepspeed_zero3": 5 / 8,
    "hf_trainer": 5 / 4,  # Accelerate's buckets lie beside the gradients
}


def shares(tmp_path: Path, names: list[str], plant: str = "") -> dict[str, float]:
    """What a rank holds on average when it updates, as a share of what `pytorch_ddp` holds."""
    ranks = run_ranks("memory", 2, tmp_path, names=["pytorch_ddp", *names], plant=plant)
    return {n: sum(r[n] for r in ranks) / sum(r["pytorch_ddp"] for r in ranks) for n in names}


def test_each_strategy_holds_what_theory_says(tmp_path: Path) -> None:
    for name, share in shares(tmp_path, [n for n in NAMES if n != "pytorch_ddp"]).items():
        assert share == pytest.approx(SHARE.get(name, 1.0), rel=0.02), name


def test_memory_that_is_kept_would_be_seen(tmp_path: Path) -> None:
    for name, share in shares(tmp_path, ["zero2", "zero3"], plant="never_freed_and_gradients_whole").items():
        assert share > SHARE[name] * 1.1, name


def test_a_step_that_is_not_finite_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    own = [n for n in NAMES if n != "hf_trainer"]  # its engine makes the steps; test_hf_trainer.py has such a run
    for found in run_ranks("bad_gradient", 2, tmp_path, names=own):
        for one in found:
            assert one["same"] and one["finite"][:3] == [True, True, False], one


def test_a_skip_that_does_not_last_would_be_seen(tmp_path: Path) -> None:
    names = ["zero2", "pytorch_zero1"]
    found = run_ranks("bad_gradient", 2, tmp_path, names=names, plant="a_skip_that_does_not_last")[0]
    assert [one["same"] for one in found] == [False, False]


def test_zero3_holds_three_blocks_at_most(tmp_path: Path) -> None:
    for found in run_ranks("gathered_at_once", 2, tmp_path, blocks=8):
        assert 1 <= found["blocks"] <= 3 and found["share"] < 0.4, found
        assert found["looks"] > 100


def test_blocks_that_are_never_freed_would_be_seen(tmp_path: Path) -> None:
    assert run_ranks("gathered_at_once", 2, tmp_path, blocks=8, plant="never_freed")[0]["blocks"] == 8
