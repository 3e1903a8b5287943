"""State in parts, read by other strategies and numbers of ranks; what a rank holds, and what a bad step changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import sampling
from tests.dist.harness import run_ranks, shared_strategies
from tests.dist.plants import needs_deepspeed

NAMES = sampling.first_of(["pytorch_ddp", "zero3", "pytorch_zero3", "hf_trainer", "zero2", "pytorch_zero1"], 4)
DEEPSPEED = ["deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"]
OTHERS = ["pytorch_ddp", "zero3", "pytorch_zero3"]
full = pytest.mark.full
ODD = {"config": {"intermediate_size": 61}}


def loaded(tmp_path: Path, how: Any, ranks: int, names: list[str], sources: list[str], **more: Any) -> list[Any]:
    """(strategy, what wrote, name) of all that differs on any rank."""
    each = run_ranks("load_shards", ranks, tmp_path, names=names, sources=sources, how=how, **more)
    return sorted({tuple(w) for one in each for w in one})


@pytest.mark.parametrize("how", [ODD, {"lora": True}], ids=["all", "lora"])
def test_every_strategy_reads_what_every_other_wrote_at_another_number_of_ranks(tmp_path: Path, how: Any) -> None:
    run_ranks("save_shards", 2, tmp_path, names=NAMES, how=how)
    for name in NAMES:
        assert sorted(p.name[:11] for p in (tmp_path / name).iterdir()) == ["shard-00001", "shard-00002"]
    assert loaded(tmp_path, how, 3, NAMES, NAMES) == []


BF16 = {**ODD, "dtype": "bfloat16"}


@needs_deepspeed
@pytest.mark.parametrize(
    ("how", "wrote", "reads"),
    [
        pytest.param(ODD, 2, 3, id="all-2-3"),
        pytest.param({"lora": True}, 3, 2, id="lora-3-2"),
        pytest.param(BF16, 2, 3, id="bf16-2-3", marks=full),
    ],
)
def test_deepspeed_and_others_read_what_each_other_wrote(tmp_path: Path, how: Any, wrote: int, reads: int) -> None:
    run_ranks("save_shards", wrote, tmp_path, names=[*DEEPSPEED, *OTHERS], how=how)
    assert loaded(tmp_path, how, reads, OTHERS, DEEPSPEED) == []
    assert loaded(tmp_path, how, reads, DEEPSPEED, [*OTHERS, *DEEPSPEED]) == []


WHOLE = {**ODD, "config_of_deepspeed": {"zero_optimization": {}}}  # stage 3 keeps small weights whole, which all are


@needs_deepspeed
def test_what_was_there_before_does_not_show_not_even_in_weights_that_stage_3_keeps_whole(tmp_path: Path) -> None:
    run_ranks("save_shards", 2, tmp_path, names=["pytorch_ddp", "deepspeed_zero3"], how=WHOLE)
    names, sources = ["deepspeed_zero2", "deepspeed_zero3"], ["pytorch_ddp", "deepspeed_zero3"]
    assert loaded(tmp_path, WHOLE, 3, names, sources, trained=True) == []


@needs_deepspeed
@pytest.mark.parametrize(
    ("plant", "name", "how"),
    [("copies_not_filled", "deepspeed_zero2", BF16), ("whole_weights_kept", "deepspeed_zero3", WHOLE)],
)
def test_a_bug_in_reading_would_be_seen(tmp_path: Path, plant: str, name: str, how: Any) -> None:
    run_ranks("save_shards", 2, tmp_path, names=["pytorch_ddp"], how=how)
    assert loaded(tmp_path, how, 3, [name], ["pytorch_ddp"], plant=plant, trained=True)


@needs_deepspeed
def test_padding_taken_for_weights_would_be_seen(tmp_path: Path) -> None:
    how = {"names": ["deepspeed_zero3"], "how": ODD, "plant": "padding_taken_for_weights"}
    with pytest.raises(AssertionError, match="must match the existing size"):
        run_ranks("save_shards", 3, tmp_path, **how)


ON_HOST = ["zero1", "zero3", "pytorch_zero3"]


@pytest.mark.parametrize(
    ("names", "how"),
    [
        (["pytorch_ddp", "zero3", "pytorch_zero3"], {"moe": True, "lora": True}),
        (ON_HOST, {"options": {"offload": "optimizer"}}),
        pytest.param(["pytorch_zero2", "pytorch_zero3"], {"options": {"offload": "all"}, "lora": True}, marks=full),
    ],
    ids=["experts", "moments_on_host", "weights_on_host"],
)
def test_adapters_of_experts_and_what_is_on_the_host_too(tmp_path: Path, names: list[str], how: Any) -> None:
    run_ranks("save_shards", 2, tmp_path, names=names, how=how)
    assert loaded(tmp_path, how, 3, names, names) == []


@pytest.mark.parametrize(("how", "ranks"), [(ODD, 2), pytest.param({"lora": True}, 4, marks=full)], ids=["all", "lora"])
def test_two_nodes_with_a_copy_each_write_it_once_and_others_read_it(tmp_path: Path, how: Any, ranks: int) -> None:
    copies = {**how, "options": {"replicate": "nodes", **({"adapters": "sharded"} if "lora" in how else {})}}
    names, nodes = ["pytorch_zero3"], {"ranks_per_node": ranks // 2}
    run_ranks("save_shards", ranks, tmp_path, names=names, how=copies, **nodes)
    written = sum(t.numel() for p in (tmp_path / "pytorch_zero3").iterdir() for t in load_file(p).values())
    assert written == sum(t.numel() for t in torch.load(tmp_path / "pytorch_zero3.pt", weights_only=True).values())
    assert loaded(tmp_path, how, 3, ["pytorch_ddp", "pytorch_zero3"], names) == []
    assert loaded(tmp_path, copies, ranks, names, names, **nodes) == []


STRATEGIES = shared_strategies()
OF_EACH = {"pytorch_ddp", "zero1", "zero2", "zero3", "pytorch_zero3", "deepspeed_zero2", "hf_trainer"}
FAMILIES = [n for n in STRATEGIES if n in OF_EACH]


def check_states(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["error"] == 0.0, one
        losses, right = one["evaluations"]
        assert losses == pytest.approx(right, rel=1e-6) and losses[1] < losses[0] * (1 - 1e-4), one


def states(tmp_path: Path, triples: list[tuple[str, str, str]], **more: Any) -> list[dict[str, Any]]:
    return run_ranks("states", 2, tmp_path, triples=triples, **more)[0]


def of_itself(names: list[str]) -> list[tuple[str, str, str]]:
    return [(n, n, "lora" if i % 2 else "plain") for i, n in enumerate(names)]


@pytest.mark.parametrize("names", [FAMILIES, pytest.param(STRATEGIES, marks=pytest.mark.full)], ids=["families", "all"])
def test_going_on_from_a_saved_state_is_bitwise_as_if_there_had_been_no_stop(tmp_path: Path, names: list[str]) -> None:
    """The evaluations on the way are of the weights of their step."""
    check_states(states(tmp_path, of_itself(names)))


@pytest.mark.parametrize("plant", ["moments_of_another_parameter", "evaluations_of_the_first_weights"])
def test_exchanged_moments_and_stale_evaluations_would_be_seen_under_every_family(tmp_path: Path, plant: str) -> None:
    for one in states(tmp_path, of_itself(FAMILIES), plant=plant):
        with pytest.raises(AssertionError):
            check_states([one])


def test_ranks_with_the_same_random_numbers_are_refused_under_every_family(tmp_path: Path) -> None:
    """Their dropout would be equal; a library that sets the seed of all ranks does that."""
    for found in run_ranks("same_seeds", 2, tmp_path, names=FAMILIES):
        assert all("rank 0 and rank 1 draw the same random numbers" in text for text in found.values()), found


OFFLOADED = [
    *((name, "host_moments") for name in ("zero1", "zero3", "pytorch_zero2")),
    *(("pytorch_zero3", variant) for variant in ("on_host", "lora_on_host", "moe_lora_sharded")),
]


def test_states_on_the_host_and_adapters_of_experts_go_on_too(tmp_path: Path) -> None:
    for one in states(tmp_path, [(name, name, variant) for name, variant in OFFLOADED]):
        assert one["error"] == 0.0, one


@pytest.mark.parametrize(
    ("bug", "saver", "loader"),
    [
        ("moments_of_another_rank", "zero2", "zero2"),
        pytest.param("fragments_one_element_late", "pytorch_ddp", "deepspeed_zero1", marks=needs_deepspeed),
    ],
)
def test_moments_that_belong_elsewhere_would_be_seen(tmp_path: Path, bug: str, saver: str, loader: str) -> None:
    (one,) = states(tmp_path, [(saver, loader, "plain")], plants=[bug])
    assert one["error"] > 1e-4


# of plain data parallelism at two ranks: weights and gradients 4 bytes a parameter each, moments 8; FSDP2 keeps weights
# in parts between steps in both forms
SHARE = {
    "zero1": 3 / 4, "zero2": 5 / 8, "zero3": 1 / 2,
    "pytorch_zero1": 3 / 4, "pytorch_zero2": 1 / 2, "pytorch_zero3": 1 / 2,
    # DeepSpeed updates a float32 copy of its part of the weights, and in stage 3 keeps the part beside it
    "deepspeed_zero1": 3 / 4, "deepspeed_zero2": 3 / 4, "deepspeed_zero3": 5 / 8,
    "hf_trainer": 5 / 4,  # Accelerate's buckets lie beside the gradients
}  # fmt: skip


def shares(tmp_path: Path, names: list[str], plant: str = "") -> dict[str, float]:
    """What a rank holds on average when it updates, as a share of what `pytorch_ddp` holds."""
    ranks = run_ranks("memory", 2, tmp_path, names=["pytorch_ddp", *names], plant=plant)
    return {n: sum(r[n] for r in ranks) / sum(r["pytorch_ddp"] for r in ranks) for n in names}


def test_each_strategy_holds_what_theory_says(tmp_path: Path) -> None:
    for name, share in shares(tmp_path, [n for n in STRATEGIES if n != "pytorch_ddp"]).items():
        assert share == pytest.approx(SHARE.get(name, 1.0), rel=0.02), name


def test_memory_that_is_kept_would_be_seen(tmp_path: Path) -> None:
    for name, share in shares(tmp_path, ["zero2", "zero3"], plant="never_freed_and_gradients_whole").items():
        assert share > SHARE[name] * 1.1, name


def test_a_step_that_is_not_finite_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    names = STRATEGIES if sampling.ALL else FAMILIES
    own = [n for n in names if n != "hf_trainer"]  # its engine makes the steps; test_stops.py has such a run
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
