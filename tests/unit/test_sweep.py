"""Points of a sweep, what ends one early, and how they are ranked. Runs of ranks are in tests/dist/test_sweep.py."""

import json
from pathlib import Path

import pytest

from allranks.errors import RequestError
from allranks.experiments.sweep import DivergenceWatch, PointResult, grid_points, ranked
from allranks.launch.runs import NullObserver
from allranks.rundir.paths import RunDir


def test_points_are_the_product_of_the_grid_and_the_lines() -> None:
    points = grid_points(
        ["train.lr=1e-4, 3e-4", "adapter.targets=[a,b],[c]"], ["", "# a comment", "train.lr=1 train.seed=2"]
    )
    assert [point.sets for point in points] == [
        ["train.lr=1e-4", "adapter.targets=[a,b]"], ["train.lr=1e-4", "adapter.targets=[c]"],
        ["train.lr=3e-4", "adapter.targets=[a,b]"], ["train.lr=3e-4", "adapter.targets=[c]"],
        ["train.lr=1", "train.seed=2"],
    ]  # fmt: skip
    assert [point.name for point in points] == ["p1", "p2", "p3", "p4", "p5"]
    big = [f"k{i}={','.join('abcdefghij')}" for i in range(4)]
    for grid, lines in (([], []), (["train.lr"], []), (["a=1,"], []), (["a=1", "a=2"], []), (big, []), ([], ["word"])):
        with pytest.raises(RequestError):
            grid_points(grid, lines)


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ([5.0 - i / 10 for i in range(40)], ""),
        ([5.0, 4.0, None], "not finite at step 3"),
        ([5.0] * 15 + [2.0] * 15 + [4.9] * 30, ""),
        ([5.0] + [2.0] * 25 + [9.0] * 15, "above the first loss"),
        ([1.0] + [20.0] * 9, ""),
    ],
)
def test_a_loss_that_is_not_finite_or_has_risen_for_good_ends_a_point(
    losses: list, reason: str, tmp_path: Path
) -> None:
    ended: list[RunDir] = []
    watch = DivergenceWatch(NullObserver(), ended.append)
    watch.start(RunDir(tmp_path), None)
    for step, loss in enumerate(losses, 1):
        watch.event({"event": "step", "rank": 0, "step": step, "loss": loss})
        watch.event({"event": "step", "rank": 1, "step": step, "loss": None})
    assert reason in watch.reason and len(ended) == bool(reason)
    assert bool(watch.reason) == bool(reason)


def test_the_held_out_loss_ranks_if_all_have_it() -> None:
    def result(name: str, status: str, held_out: float | None, train: float | None) -> PointResult:
        return PointResult(
            name=name, sets=[], run=name, status=status, message="", eval_loss=held_out, train_loss=train
        )

    one, two, bad = (
        result("a", "succeeded", 2.0, 1.0),
        result("b", "succeeded", 1.0, 2.0),
        result("c", "failed", 0.1, 0.1),
    )
    key, order = ranked([bad, one, two])
    assert (key, [r.name for r in order]) == ("eval_loss", ["b", "a", "c"])
    key, order = ranked([bad, one, result("b", "succeeded", None, 2.0)])
    assert (key, [r.name for r in order]) == ("train_loss", ["a", "b", "c"])
    assert json.loads(json.dumps(order[0].sets)) == []
