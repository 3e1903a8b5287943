"""Checkpoints of real gloo ranks: what is in them, what they cost, what is refused, and what a kill leaves."""

import signal
from pathlib import Path
from typing import Any

import pytest

from allranks.utils.machine import host_name
from tests import sampling
from tests.dist.harness import end_of_ranks, run_ranks

pytestmark = pytest.mark.timeout(420)
LORA: dict[str, Any] = {"lora": True, "accum": 2}


def ranks(case: str, world: int, folder: Path, **args: Any) -> list[Any]:
    return run_ranks(case, world, folder, limit_s=300, module="saves", **args)


def test_what_one_strategy_saved_another_goes_on_from(tmp_path: Path) -> None:
    triples = [("zero3", "pytorch_ddp", {}), ("pytorch_ddp", "pytorch_zero3", {"tied": True})]
    triples += [("pytorch_zero3", "zero1", LORA), ("zero2", "zero3", LORA)]
    found = ranks("elsewhere", 2, tmp_path, triples=triples)[0]
    assert len(found) == 2 * len(triples)
    for row in found:
        assert row["weights"] == 0 and row["moments"] in (0, None), row
    for row in found[1::2]:
        assert row["twice"] == [], "weights stand in the files for others and again in state/"
        assert row["whole"] == [None, None] and row["latest"] == "step-4"


def test_a_rank_that_takes_no_part_is_named_in_time(tmp_path: Path) -> None:
    first, absent, last = ranks("absent", 3, tmp_path)
    assert "rank 1 did not join" in first["said"] and "2 s" in first["said"]
    assert absent["said"] is None and "another rank, see that of rank 0, did not join" in last["said"]
    assert first["steps"] == [1]


def test_a_rank_that_cannot_write_is_named_everywhere_and_earlier_checkpoints_stay(tmp_path: Path) -> None:
    for result in ranks("one_fails", 2, tmp_path):
        for words in (f"rank 1 on {host_name()} failed to write its files", "No space left"):
            assert words in result["said"] and words in result["later"]
        assert "no longer visible" not in result["said"]
        assert f"The run folder is no longer visible on {host_name()}. " in result["lost"]
        assert (result["after"], result["names"]) == ([1], ["latest", "step-3", "step-4"])


def test_saves_that_lie_are_refused(tmp_path: Path) -> None:
    found = ranks("planted", 2, tmp_path)
    assert found[0].keys() == found[1].keys() and len(found[0]) == 3 * 10 + 6
    assert [name for name, problem in found[0].items() if not problem] == []
    assert all("Earlier checkpoints are untouched" in problem for problem in found[0].values())
    slices = [p for n, p in found[0].items() if n.endswith("only_the_first_ranks_slice")]
    assert all("element" in p or "shape" in p for p in slices), slices
    changed = ("a_weight_changed_on_its_way", "a_weight_missing", "a_wrappers_prefix", "another_dtype")
    said = dict.fromkeys(changed, "differs from memory after it was read again")
    said["a_part_changed_on_its_way"] = "differs from the memory of the rank that holds it"
    said["a_rank_left_out"] = "the ranks together hold"
    for bug, words in said.items():
        assert all(words in p for n, p in found[0].items() if n.endswith(bug)), (bug, found[0])


@pytest.mark.parametrize(("name", "how"), [("zero3", {}), pytest.param("pytorch_ddp", LORA, marks=pytest.mark.full)])
def test_a_save_behind_training_holds_the_state_of_its_moment(tmp_path: Path, name: str, how: dict[str, Any]) -> None:
    for result in ranks("behind", 2, tmp_path, name=name, how=how):
        assert (result["before"], result["between"], result["after"]) == ([], [1], [1, 2])
        assert result["apart"] == [0, 0] and result["moved"] > 0
        assert 0.5 < result["stalled"][0] < 30, "the wait for the copy was not counted"
        assert result["reused"]


def test_a_save_is_published_when_it_is_on_the_disk_and_training_need_not_wait(tmp_path: Path) -> None:
    for result in ranks("written_first", 2, tmp_path, name="zero3", how={}):
        assert result["before"] == [], "published before it was on the disk"
        assert result["after"] == [1]
        assert result["moved"] > 0 and result["apart"] == 0
        assert "differs from memory after it was read again. Earlier checkpoints are untouched" in result["spoilt"]
        assert f"rank 1 on {host_name()} failed to write its files: No space left on device" in result["unflushed"]
        assert f"rank 1 on {host_name()} failed to write its files" in result["at_once"]
        waited_s, told_s, seconds = result["blocked"]
        assert waited_s == told_s < seconds


def test_a_lite_save_moves_adapters_alone(tmp_path: Path) -> None:
    names = ["pytorch_ddp", "zero3", "pytorch_zero3"]
    by_rank = ranks("lite_moves", 2, tmp_path, names=names)
    for name in names:
        facts = [rank[name] for rank in by_rank]
        adapters = facts[0]["trained"]
        assert facts[0]["frozen"] > 5 * adapters and facts[0]["keys"] == 8
        assert adapters <= sum(f["written"] for f in facts) <= 2 * adapters, name
        assert [tensors_sent(f) for f in facts] == [{}, {}], name
    gathered = ranks("lite_moves", 2, tmp_path, names=["zero3", "pytorch_zero3"], plant="frozen_weights_gathered")
    assert all(tensors_sent(rank[name]) for rank in gathered for name in rank), "it would not be seen"


def tensors_sent(facts: dict[str, Any]) -> dict[str, int]:
    """Elements by collective, without those by which ranks agree on small things (pickled, a list of bytes each)."""
    small = {"c10d::allgather_", "c10d::gather_", "c10d::scatter_", "c10d::broadcast_", "c10d::monitored_barrier_"}
    return {name: numel for name, numel in facts["sent"].items() if name not in small}


KILLS = [
    ("while writing", 1, "zero3", 2),
    ("before proof", 0, "pytorch_zero3", 2),
    ("before the rename", 0, "zero3", 2),
    ("between the renames", 0, "pytorch_ddp", 1),
    ("after the rename", 0, "pytorch_ddp", 2),
]


def test_a_kill_at_any_stage_leaves_the_newest_good_checkpoint(tmp_path: Path) -> None:
    cases = []
    kills = KILLS if sampling.ALL else KILLS[::2]
    for i, (stage, rank, name, step) in enumerate(kills):
        folder = tmp_path / str(i)
        folder.mkdir()
        how = {"stage": stage, "rank": rank, "name": name, "step": step}
        codes, _ = end_of_ranks("killed", 2, folder, module="saves", **how)
        assert codes[rank] == -signal.SIGKILL
        assert codes[1 - rank] not in (0, -signal.SIGKILL), "the other rank took the save for done"
        cases.append((str(folder), name))
    for results in ranks("after_kills", 2, tmp_path, cases=cases):
        for (stage, *_), result in zip(kills, results, strict=True):
            assert result["step"] == (2 if stage == "after the rename" else 1), stage
            assert result["problems"] == [] and result["damage"] is None
            assert not [n for n in result["names"] if n.startswith(".")]
